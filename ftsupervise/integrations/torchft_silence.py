"""A group that waits for the others sees that one of them is silent, and waits no longer.

A process that is killed closes its connections, and its neighbours notice. One that is stopped, whose host has lost its power
or whose cable is cut closes none: the others would wait for the whole timeout of the process group, 10 s and more
(meta-pytorch/torchft #164). The lighthouse knows better, since heartbeats come from every healthy group ten times a second.

While a reduction or the way to it takes longer than a heartbeat may, the first rank looks at the lighthouse's page, and tells
the other ranks of its group through their store. What is not seen makes nobody silent; neither does a page on which this group
is silent itself, nor one that took long to come: then the lighthouse is late, or our own network is.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import import_module
from ipaddress import ip_address
from math import inf
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ftsupervise.host.addresses import LOOPBACK, own_address, resolve
from ftsupervise.host.in_time import Every
from ftsupervise.replicas.members import LighthousePage, PageNotSeen, Unseen, group_of
from ftsupervise.replicas.members import look as look_at

LOOK_EVERY = 0.2  # seconds; longer where there are many groups
_LOOKS = 100  # a second, of all groups together
_LATE = 1.2  # times the timeout of a heartbeat, after which the lighthouse itself would do without the group
_PAGE = 2.0  # seconds for one look


class PeerSilent(RuntimeError):
    """Another group is silent: the step is not committed, and the next quorum is made without it."""


class Wait(NamedTuple):
    """A rank waits for the ``members`` of its quorum, in a ``step`` of its own, ``since`` then (monotonic seconds). ``attempt``
    names this try of the step for all ranks of the group."""

    step: object
    since: float
    attempt: str
    members: tuple[str, ...]


def silent_members(
    page: LighthousePage | PageNotSeen, own: str, members: Collection[str], heartbeat: float
) -> tuple[str, ...]:
    """Return the ``members`` that the lighthouse has heard of, and hears of no more. ``own``: this start of our group. Pure.

    Two names of the lighthouse may look the same here, for one of them is a stranger's: the later heartbeat counts."""
    if not isinstance(page, LighthousePage):
        return ()
    ages: dict[str, float] = {}
    for one in page.heartbeats:
        ages[one.replica] = min(one.age, ages.get(one.replica, inf))
    if ages.get(own, inf) > heartbeat / 2:
        return ()
    return tuple(sorted(one for one in members if ages.get(one, 0.0) > _LATE * heartbeat))


class SilenceWatch:
    """A thread of each rank. ``waits``: what this rank waits for; None while it waits for nobody. ``look``: the lighthouse's
    page, within so many seconds; None on the other ranks of a group. ``store``: of this group. ``lost``: called with the step
    and a sentence when a member is silent. ``own``: this start of our group, as the lighthouse has it."""

    def __init__(
        self,
        waits: Callable[[], Wait | None],
        look: Callable[[float], LighthousePage | PageNotSeen] | None,
        store: Any,
        lost: Callable[[object, str], None],
        *,
        own: str,
        groups: int,
        heartbeat: float,
    ) -> None:
        self._waits, self._look, self._store, self._lost = waits, look, store, lost
        self._own, self._heartbeat = own, heartbeat
        every = max(LOOK_EVERY, groups / _LOOKS) if look else LOOK_EVERY
        self._looking = Every(lambda _: every * random.uniform(0.8, 1.2), self._follow, "silence")

    def close(self) -> None:
        self._looking.close()

    def _follow(self) -> None:
        wait = self._waits()
        if wait is None or time.monotonic() - wait.since < self._heartbeat:
            return
        if words := self._seen(wait):
            self._lost(wait.step, words)

    def _seen(self, wait: Wait) -> str:
        key = f"ftsupervise/silent/{wait.attempt}"
        try:
            if self._look is None:
                return self._store.get(key).decode() if self._store.check([key]) else ""
            began = time.monotonic()
            page = self._look(_PAGE)
            late = time.monotonic() - began > self._heartbeat / 2  # heartbeats may have come since it was written
            names = () if late else silent_members(page, self._own, wait.members, self._heartbeat)
            if not names:
                return ""
            words = f"{', '.join(map(group_of, names))} sends no heartbeats to the lighthouse any more"
            self._store.set(key, words)
            return words
        except RuntimeError:  # the store of a group that ends
            return ""


# ------------------------------------------------------------------------------------------

# The network between the groups: where the lighthouse is, and by which address of this host the others reach it.
#
# A host name is no answer: on Debian it leads to 127.0.1.1, and on a cluster with several networks to the slow one as often as
# not (meta-pytorch/torchft #329: a recovery took 948 s instead of 20). The kernel knows the address from which this host
# reaches the lighthouse; a person who has named an interface for gloo or NCCL means that one.

ENV_GLOO, ENV_NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


class GroupNetwork:
    """``lighthouse``: its address, "http://host:port". ``host``: the address of this host for the other groups, in numbers.
    ``interface``: that has it, "" where none is found."""

    def __init__(self, lighthouse: str, env: Mapping[str, str]) -> None:
        try:
            parts = urlsplit(lighthouse)
            told, self._port = parts.hostname or "", parts.port or 80
        except ValueError:
            told, self._port = "", 0
        self._lighthouse = resolve(told) if told else ""
        addresses = _addresses()
        named = next((addresses[name][0] for name in _named(env, addresses) if addresses[name]), "")
        self.host = named or own_address([self._lighthouse] if self._lighthouse else ())
        if not named and self.host == LOOPBACK and not _is_loopback(told):
            self.host = own_address(())  # the name of this host, which leads to itself here, and to this host elsewhere
        self.interface = next((name for name, found in addresses.items() if self.host in found), "")

    @property
    def host_in_url(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def look(self, within: float) -> LighthousePage | PageNotSeen:
        """The lighthouse's page, at most ``within`` seconds from now."""
        if not self._lighthouse:
            return PageNotSeen(Unseen.CUT, "its address is not known")
        return look_at(self._lighthouse, self._port, within)


def _named(env: Mapping[str, str], interfaces: Iterable[str]) -> list[str]:
    """The ``interfaces`` that a person has named. NCCL takes what a name begins with, "=eth0" for that one alone, and "^docker"
    for all others, which names none."""
    gloo, nccl = env.get(ENV_GLOO, "").split(","), env.get(ENV_NCCL, "")
    exact, excludes = nccl.startswith("="), nccl.startswith("^")
    begins = [] if excludes else [name for name in nccl.removeprefix("=").split(",") if name]
    found = [name for name in gloo if name in interfaces]
    return found + [one for name in begins for one in interfaces if one == name or (not exact and one.startswith(name))]


def _is_loopback(host: str) -> bool:
    """A person has said this host, and means it: all groups are here."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host in ("", "localhost")


def _addresses() -> dict[str, list[str]]:
    """The addresses of each interface, IPv4 first. Those that hold on one link alone are left out."""
    found = import_module("psutil").net_if_addrs()
    return {
        name: [
            one.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for one in of
            if one.family == family and "%" not in one.address and not one.address.startswith("fe80:")
        ]
        for name, of in found.items()
    }
