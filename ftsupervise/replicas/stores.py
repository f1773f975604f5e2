"""The stores of the groups: does each still answer?

All groups of a quorum meet at the store of one of them. Where another process holds it than the manager's, as under torchrun,
it can be gone while the manager reports that all is well, and then no step succeeds. So each is connected to now and then, by
a thread and with a bound. Nothing is sent.

A stranger may have written the address of a store: only those are connected to that are on the run's own nodes.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_address

from ftsupervise.host.addresses import resolve
from ftsupervise.replicas.lighthouse_page import LighthousePage, PageNotSeen

_EVERY = 5.0  # seconds between two rounds
_WITHIN = 1.0  # seconds for one store
_MOST = 1000  # stores in a round


class StoreWatch:
    """``names``: the run's own nodes, by each name or address that a group may give its own."""

    def __init__(
        self, page: Callable[[], LighthousePage | PageNotSeen], names: Collection[str], every: float = _EVERY
    ) -> None:
        self.silent: frozenset[str] = frozenset()  # stores that refused twice in a row
        self._page, self._names, self._every = page, frozenset(names), every
        self._over = threading.Event()
        threading.Thread(target=self._look_on, name="stores", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _look_on(self) -> None:
        hosts, refused = hosts_of(self._names), set[str]()
        while not self._over.wait(self._every):
            page = self._page()
            stores = {one.store for one in page.members} if isinstance(page, LighthousePage) else set()
            now = {one for one in sorted(stores)[:_MOST] if store_answers(one, hosts, _WITHIN) is False}
            self.silent, refused = frozenset(now & refused), now


def store_answers(store: str, hosts: Mapping[str, str], within: float) -> bool | None:
    """Return whether something listens at the store of a member ("HOST:PORT/prefix"). None where that cannot be said."""
    host, _, rest = store.rpartition(":")
    port = rest.partition("/")[0]
    address = hosts.get(host.strip("[]"))
    if address is None or not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536):
        return None
    family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as one:
        one.settimeout(within)
        try:
            one.connect((address, int(port)))
        except OSError as error:
            return False if error.errno == errno.ECONNREFUSED else None
    return True


def hosts_of(names: Collection[str]) -> dict[str, str]:
    """Return each of ``names`` with its address in numbers; those that have none are left out."""
    found = {name: resolve(name) for name in names}
    return {name: address for name, address in found.items() if address}
