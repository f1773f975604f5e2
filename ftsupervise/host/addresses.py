"""Finds the address, in numbers, at which another host reaches this one.

A host name is no answer: on Debian it leads to 127.0.1.1, and on a cluster with several networks to the slow one as
often as not. The kernel knows from which address it would send to another node. Nothing is sent to find that out.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from time import monotonic

from ftsupervise.host.in_time import in_time

LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"  # a host that is nowhere (RFC 5737): it has the route of all that have none of their own
_RESOLVE = 2.0  # seconds for names
_AT_ONCE = 32  # names that are looked up at the same time


def own_address(nodes: Iterable[str], names_by: Names | None = None) -> str:
    """Return the address of this host at which ``nodes`` (names or addresses) reach it: 127.0.0.1 where all of them are
    this host.

    Where no name of them can be resolved, it is the address by which this host reaches the outside. All names together cost one
    bound, and one that was slow is not waited for again.
    """
    found, wanted = "", tuple(nodes)
    at = (names_by or _NODES).look_up(wanted)
    for node in wanted:
        there = at.get(node, "").partition("%")[0]
        here = _towards(there) if there else ""
        if here and not ip_address(here).is_loopback:
            return here
        found = here or found
    if found:
        return LOOPBACK
    here = _towards(_ELSEWHERE) or resolve(socket.gethostname())
    return here or LOOPBACK


def resolve(name: str) -> str:
    """Return the first address of ``name``, IPv4 if it has one; "" where it has none, or the name server does not
    answer in time.
    """
    if _is_address(name):
        return name
    return (in_time(lambda: _ask(name), _RESOLVE) or "").partition("%")[0]


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


def _ask(name: str) -> str:
    """Return the first address of ``name``, IPv4 if it has one; "" where it has none. It may take long."""
    try:
        answer = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return min((str(one[4][0]) for one in answer), key=lambda one: ":" in one, default="")


class Names:
    """Looks names up beside the caller, all at once, and remembers what it found. A name server that is slow or silent holds up
    only the first who asks for a name, and nobody for longer than the bound.
    """

    def __init__(self, ask: Callable[[str], str] = _ask) -> None:
        """``ask`` returns the address of a name, "" where it has none. It may take long."""
        self._ask = ask
        self._known: dict[str, str] = {}  # "": it has no address
        self._slow: set[str] = set()  # not known in time: nobody waits for them again
        self._under_way: set[str] = set()
        self._queue = deque[str]()
        self._threads = 0
        self._news = threading.Condition()

    def look_up(self, names: Iterable[str], seconds: float = _RESOLVE) -> dict[str, str]:
        """Return name -> address, "" for one that has none; without those for which that is not known in time."""
        wanted = list(dict.fromkeys(names))
        found = {name: name for name in wanted if _is_address(name)}
        until = monotonic() + seconds
        with self._news:
            new = [name for name in wanted if name not in found and not self._known.get(name)]
            self._begin([name for name in new if name not in self._under_way])
            while (rest := until - monotonic()) > 0 and not self._under_way.isdisjoint(set(new) - self._slow):
                self._news.wait(rest)
            self._slow.update(self._under_way.intersection(new))
            return found | {name: self._known[name] for name in wanted if name in self._known}

    def _begin(self, names: Iterable[str]) -> None:
        for name in names:
            self._under_way.add(name)
            self._queue.append(name)
            if self._threads < _AT_ONCE:
                try:
                    threading.Thread(target=self._work, name="names", daemon=True).start()
                except RuntimeError:  # the machine has no more threads at present: those that run do it, or nobody
                    continue
                self._threads += 1

    def _work(self) -> None:
        while True:
            with self._news:
                if not self._queue:
                    self._threads -= 1
                    return
                name = self._queue.popleft()
            address = self._ask(name)
            with self._news:
                self._known[name] = address
                self._under_way.discard(name)
                self._news.notify_all()


_NODES = Names()


def _towards(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as one:
            one.connect((address, 9))
            return str(one.getsockname()[0])
    except OSError:
        return ""


def own_addresses() -> list[str]:
    """Return this host's names and the addresses it would use to reach others, the most reliable first."""
    own = [os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()]
    found = [name for name in own if name]
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # documentation addresses
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))  # sends nothing: it asks the routing table
                found.append(probe.getsockname()[0])
        except OSError:
            continue
    return list(dict.fromkeys(found))
