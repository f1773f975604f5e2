"""torchft's lighthouse beside the groups of one job: at an address of this host that all their nodes reach."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address

from ftsupervise.ranks.protocol import own_addresses
from ftsupervise.replicas.lighthouse import Lighthouse, LighthousePlace
from ftsupervise.replicas.lighthouse_page import LighthousePage, group_of
from ftsupervise.replicas.suspects import suspects
from ftsupervise.replicas.torchft_python import find_torchft
from ftsupervise.run.group_options import GroupOptions
from ftsupervise.rundir import ledger
from ftsupervise.scheduler.allocation import Allocation

_RESOLVE = 5.0  # seconds for the address of this node
_LOOPBACK = "127.0.0.1"


class GroupLighthouse:
    """Raises an error where there can be none: no torchft, no port, a run directory that does not answer."""

    def __init__(
        self,
        asked: GroupOptions,
        env: Mapping[str, str],
        allocation: Allocation,
        say: Callable[[str], None],
        live: Callable[[], int | None],
    ) -> None:
        assert asked.timeouts is not None
        self._timeouts, self._say = asked.timeouts, say
        node = env.get("SLURMD_NODENAME", "") or os.uname().nodename
        place = LighthousePlace(
            home=asked.rundir.replicas,
            host=_address(allocation, env.get("SLURMD_NODENAME", "")),
            groups=asked.count,
            least=asked.least,
            timeouts=asked.timeouts,
            job=ledger.job_id(env),
            node=node,
        )
        python = find_torchft(asked.command, env).python
        self._lighthouse = Lighthouse(place, python, say, live=live, env=env)
        self.address = self._lighthouse.start().address
        self.restarted: float | None = None  # monotonic: torchft may have lost a group's call then
        self._suspected: frozenset[str] = frozenset()

    def follow(self, steps: Mapping[str, int | None]) -> None:
        """Take note of what has happened to it. ``steps``: of each group, as its ranks say."""
        for event in self._lighthouse.events():
            if event.restart:
                self.restarted = time.monotonic()
        page = self._lighthouse.page()
        if isinstance(page, LighthousePage):
            found = {one.words for one in suspects(page, steps, self._heartbeat)}
            for words in sorted(found & self._suspected):  # two looks say so
                self._say(words)
            self._suspected = frozenset(found)

    def heard(self, group: str) -> bool | None:
        """Does a start of this group still send heartbeats? None: that could not be seen."""
        page = self._lighthouse.page()
        if not isinstance(page, LighthousePage):
            return None
        return any(group_of(one) == group for one in page.heard(self._heartbeat))

    def stop(self) -> None:
        self._lighthouse.close()

    @property
    def _heartbeat(self) -> float:
        return 2 * self._timeouts.heartbeat


def _address(allocation: Allocation, here: str) -> str:
    """In numbers: of this node as Slurm has it, else as the routing table would send from it."""
    if set(allocation.nodes) <= {here}:
        return _LOOPBACK
    for name in (allocation.address(here) if here else "", *reversed(own_addresses())):
        if name and (found := _in_numbers(name)):
            return found
    return _LOOPBACK


def _in_numbers(name: str) -> str:
    try:
        return str(ip_address(name))
    except ValueError:
        pass
    found: list[str] = []

    def resolve() -> None:
        try:
            found.append(str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]))
        except OSError:
            return

    thread = threading.Thread(target=resolve, name="resolving", daemon=True)
    thread.start()
    thread.join(_RESOLVE)
    return found[0] if found else ""
