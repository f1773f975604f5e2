"""The supervisor's part of the buddy copies: which node copies to which, and which generation next. Pure but for its clock.

The nodes stand in a ring, in the order of the allocation, and each copies to the next one; a spare node takes copies and has
none to give. The generation that is copied next must be the same on all nodes, so it is named before it is made: "the first
snapshot from step 140 on". All ranks keep that one until every buddy has it. Then it is the held one, which is kept until a
newer one is, and the next is named. A node that hears it too late says so, and the next one is named longer in advance.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from math import ceil
from time import monotonic
from typing import NamedTuple

from ftsupervise.rundir.records import decode, encode

# The words between the supervisor and a node about its buddy copies: an order, and a report.


class CopyOrder(NamedTuple):
    """The supervisor's order to a node."""

    number: int  # grows: an older one is not obeyed
    attempt: int
    host: str = ""  # of the buddy; "" where there is none
    port: int = 0
    held: int = -1  # the step that every buddy holds
    wanted: int = -1  # the first snapshot from this step on is copied next


class CopyReport(NamedTuple):
    """A node's report to the supervisor."""

    port: int = 0  # where it takes snapshots
    ranks: int = 0  # that run here and make snapshots
    world: int = 0
    newest: int = -1  # step that all of them have
    sent: int = -1  # step that the buddy has of all of them
    attempt: int = 0  # of ``sent``
    missed: int = -1  # a ``wanted`` that came too late
    order: int = 0  # the last one that was obeyed
    host: str = ""  # how others reach this node, as it thinks
    problem: str = ""


def pack(word: CopyOrder | CopyReport) -> bytes:
    return json.dumps(encode(word, sparse=True)).encode()


def read_order(raw: bytes) -> CopyOrder | None:
    try:
        return decode(CopyOrder, json.loads(raw), lenient=True)
    except ValueError:
        return None


def read_report(raw: bytes) -> CopyReport | None:
    try:
        return decode(CopyReport, json.loads(raw), lenient=True)
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------


_FRESH = 5.0  # seconds after which a node without a report is left out of the ring
_LEAST, _MOST = 0.2, 5.0  # seconds in advance
_PER_NODE = 0.0004  # seconds in advance for each node: an order to every node is a burst of datagrams
_WAKE = 1.0  # seconds between two orders to a node that has not reported


class _Member(NamedTuple):
    report: CopyReport
    at: float
    host: str


class CopyState(NamedTuple):
    """The progress of the buddy copies, for people."""

    held: int = -1  # step that every buddy holds
    nodes: int = 0  # that take part
    problem: str = ""


class SnapshotRing:
    """``tell(node, body)`` sends an order; ``nodes()`` names all nodes that have an agent, in the order of the ring.
    ``at_once``: the nodes copy each snapshot by themselves, and none is named."""

    def __init__(
        self,
        nodes: Callable[[], tuple[str, ...]],
        tell: Callable[[str, bytes], object],
        clock: Callable[[], float] = monotonic,
        at_once: bool = False,
    ) -> None:
        self._nodes, self._tell, self._clock, self._at_once = nodes, tell, clock, at_once
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}
        self._order = CopyOrder(0, 0)
        self._buddies: Mapping[str, tuple[str, int]] = {}  # node -> where its buddy takes copies
        self._advance = 2 * _LEAST
        self._seen: tuple[float, int] | None = None  # when, and the newest step, at the last naming
        self._rate = 0.0  # steps per second
        self._woken = float("-inf")
        self.active = False  # true if a node has had a snapshot

    @property
    def state(self) -> CopyState:
        with self._lock:
            told = [one.report.problem for one in self._members.values() if one.report.problem]
            return CopyState(self._order.held, len(self._buddies), told[0] if told else "")

    def port_of(self, node: str) -> tuple[str, int] | None:
        """Return the port at which ``node`` serves snapshots; None where that is not known."""
        with self._lock:
            found = self._members.get(node)
            return self._reach(found) if found is not None and found.report.port else None

    def begin(self, attempt: int, step: int) -> None:
        """Prepare for a new attempt from ``step`` (-1: from none in memory): snapshots held from after it do not count."""
        with self._lock:
            held = self._order.held if self._order.held <= step else -1
            self._order = self._order._replace(number=self._order.number + 1, attempt=attempt, held=held, wanted=-1)
            self._seen = None
            if self.active:
                self._tell_all()

    def hear(self, node: str, host: str, body: bytes) -> None:
        """Take a report of ``node``, which ``host`` sent."""
        report = read_report(body)
        if report is None:
            return
        now = self._clock()
        with self._lock:
            self.active = True
            self._members[node] = _Member(report, now, host)
            if self._think(now):
                self._tell_all()
            elif report.order < self._order.number:
                self._tell_one(node)
            self._wake(now)

    def _think(self, now: float) -> bool:
        """Make a new order where one is due; return whether it was."""
        fresh = {node: one for node, one in self._members.items() if now - one.at < _FRESH}
        order = [node for node in self._nodes() if node in fresh and fresh[node].report.port]
        after = [*order[1:], *order[:1]] if len(order) > 1 else []
        buddies = {node: self._reach(fresh[buddy]) for node, buddy in zip(order, after, strict=False)}
        changed, self._buddies = buddies != self._buddies, buddies
        at_work = [fresh[node].report for node in order if fresh[node].report.ranks]
        if self._named(at_work, now) or changed:
            self._order = self._order._replace(number=self._order.number + 1)
            return True
        return False

    def _named(self, at_work: list[CopyReport], now: float) -> bool:
        """Name the next generation, where it is time for it."""
        whole = bool(at_work) and sum(one.ranks for one in at_work) == at_work[0].world
        if not whole or not self._buddies or min(one.newest for one in at_work) < 0:
            return False
        if self._at_once:
            return self._all_hold(at_work, now)
        order = self._order
        newest = max(max(one.newest, one.sent if one.attempt == order.attempt else -1) for one in at_work)
        if order.wanted < 0:
            self._name_next(newest, now)
            return True
        sent = {one.sent if one.attempt == order.attempt else -1 for one in at_work}
        late = any(one.missed == order.wanted for one in at_work)
        if not late and min(sent) < order.wanted:
            return False
        if not late and len(sent) == 1:
            self._order = order._replace(held=sent.pop())
            self._advance = max(_LEAST, self._advance * 0.8)
        else:
            self._advance = min(_MOST, self._advance * 2)
        self._name_next(newest, now)
        return True

    def _all_hold(self, at_work: list[CopyReport], now: float) -> bool:
        """Note the step that every buddy holds, or has held; return whether that is news. Once a second is enough: it is for
        people, and old copies are removed by it."""
        step = min(one.sent if one.attempt == self._order.attempt else -1 for one in at_work)
        if step <= self._order.held or (self._seen is not None and now < self._seen[0] + _WAKE):
            return False
        self._seen, self._order = (now, step), self._order._replace(held=step, wanted=-1)
        return True

    def _name_next(self, newest: int, now: float) -> None:
        if self._seen is not None and now > self._seen[0] and newest > self._seen[1]:
            self._rate = (newest - self._seen[1]) / (now - self._seen[0])
        self._seen = (now, newest)
        advance = max(self._advance, _PER_NODE * len(self._buddies))
        self._order = self._order._replace(wanted=newest + max(1, ceil(self._rate * advance)))

    def _tell_all(self) -> None:
        for node in self._members:
            self._tell_one(node)

    def _tell_one(self, node: str) -> None:
        host, port = self._buddies.get(node, ("", 0))
        self._tell(node, pack(self._order._replace(host=host, port=port)))

    def _reach(self, one: _Member) -> tuple[str, int]:
        """Return where another node finds it: the agent on this host may have sent from 127.0.0.1."""
        all_here = all(_is_loop(member.host) for member in self._members.values())
        return one.host if all_here or not _is_loop(one.host) else one.report.host, one.report.port

    def _wake(self, now: float) -> None:
        """Send the order to nodes without ranks too: they take copies."""
        if now < self._woken + _WAKE:
            return
        self._woken = now
        for node in self._nodes():
            if node not in self._members:
                self._tell(node, pack(self._order))


def _is_loop(host: str) -> bool:
    return host.removeprefix("::ffff:").startswith("127.") or host == "::1"
