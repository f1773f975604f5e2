"""Finds the rank for which the others wait, from the states that the agents report anyway. Pure: states in, a straggler out.

In synchronous training all ranks make equally many steps: the fast ones wait in a collective for the slow one, so that nobody's
step takes longer than another's. Two things still tell the slow one apart, and the loop pays for neither:

* It makes its step later than the others, where the loop reports a step before the ranks meet, or soon after.
* Its main thread computes, or waits for a disk, at each look, while those of the others sleep for part of the time.

What is lost is what it takes longer than the next slowest: without it, that one would be waited for. Looks at a time in which
a rank saves, evaluates or starts count for none. Ranks that spin while they wait, as most GPU programs do, look as busy as the
one that they wait for: only the first sign tells there. A step that takes three times the usual one, and more, counts for none
either.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from datetime import datetime, timedelta
from statistics import median
from typing import NamedTuple

from ftsupervise.rundir.progress import COMES_LAST, WORKS, Straggler
from ftsupervise.truth import TRAIN, UNTOLD, RankState

_FEWEST = 3  # ranks
_WARM = 10  # steps after the first one that are left out: they compile, and fill caches
_AT_WORK = frozenset("RD")
_ALWAYS = 0.9  # of the looks at which the one that is waited for is at work
_AGAIN = 0.8  # of the looks at which it comes late
_NOISE = 0.02  # seconds: what the reports of two nodes may differ by
_FRESH = 15.0  # seconds since a rank was last reported
_NAMED = 64  # ranks
_LONG = 3.0  # times the usual step: one that takes longer is something else, as a save that nobody tells
_EVERY = 1.0  # seconds between two looks: as often as the agents report
_KEPT = 6  # looks at the step of a rank: a report may be late by some seconds
_BUSY = 50  # a look that took T is followed by a pause of 50 T at least


class StragglerLimits(NamedTuple):
    """``least``: the share of time that others must lose; ``looks``: of a block; ``blocks``: in a row that agree."""

    least: float = 0.1
    looks: int = 24
    blocks: int = 3


_LIMITS = StragglerLimits()


def pause_after(took: float) -> float:
    """Return the seconds from a look that took ``took`` seconds, with what it asks, to the next one: it stays cheap."""
    return max(_EVERY, _BUSY * took)


class _Sums:
    """Sums of a rank over a block."""

    __slots__ = ("late", "node", "often", "works")

    def __init__(self, node: str) -> None:
        self.node = node
        self.late = 0.0  # steps
        self.often = self.works = 0  # looks


class _BlockVerdict(NamedTuple):
    """The verdict of a block."""

    ranks: frozenset[int]
    node: str
    cost: float
    how: str


class StragglerDetector:
    """Looks at all ranks of one attempt, again and again."""

    def __init__(self, limits: StragglerLimits = _LIMITS, price: float | None = None) -> None:
        self._limits, self._price = limits, price
        self._begin: int | None = None  # the step at the first look
        self._last: tuple[int, float] | None = None  # the step compared last, and when the ranks made it
        self._made: dict[int, array[float]] = {}  # the last steps seen of each rank, and when: step, time, step, time …
        self._ranks: dict[int, _Sums] = {}
        self._usual = deque[float](maxlen=limits.looks)  # seconds of the last steps
        self._looks = self._steps = 0  # of this block; and those at which there was a new step
        self._blocks: list[_BlockVerdict | None] = []  # the last ones
        self._began = self._since = 0.0
        self._found: _BlockVerdict | None = None

    def look(self, states: Sequence[RankState], now: float) -> None:
        """Take the states at monotonic ``now``."""
        if (seen := _in_training(states, now)) is not None:
            self._take(seen, now)
        else:
            self._last = None  # the steps around a save are longer
            self._made.clear()

    def found(self, now: float, at: datetime) -> Straggler | None:
        """Return the rank, or the ranks of one node, for which the others wait; None while there is none. ``at``: the time at
        monotonic ``now``."""
        one = self._found
        if one is None:
            return None
        since = at - timedelta(seconds=max(0.0, now - self._since))
        ranks, cost = tuple(sorted(one.ranks))[:_NAMED], round(one.cost, 3)
        return Straggler(ranks, one.node, cost, one.how, len(self._ranks), since, self._price)

    def _take(self, seen: Sequence[RankState], now: float) -> None:
        step = min(one.step or 0 for one in seen)
        if self._begin is None or step < self._begin:
            self._begin, self._last = step, None
            self._made.clear()
        for one in seen:
            points = self._made.setdefault(one.rank, array("d"))
            if not points or points[-2] != one.step:
                points.extend((one.step or 0, one.stepped))
                del points[: -2 * _KEPT]
        if step < self._begin + _WARM:
            return
        for one in seen:
            if one.rank not in self._ranks or self._ranks[one.rank].node != one.node:
                self._ranks[one.rank] = _Sums(one.node)
        if self._usual and median(one.seen - one.stepped for one in seen) <= _LONG * median(self._usual):
            self._began = self._began if self._looks else now
            self._looks += 1
            for one in seen:
                self._ranks[one.rank].works += one.state in _AT_WORK
        made = [_when(self._made[one.rank], step) for one in seen]
        known = [when for when in made if when is not None]
        if len(known) == len(seen) and (self._last is None or step > self._last[0]):
            usual = median(known)
            if self._last is not None and usual > self._last[1]:
                self._compare(seen, known, (usual - self._last[1]) / (step - self._last[0]))
            self._last = step, usual
        if self._looks >= self._limits.looks and 3 * self._steps >= self._limits.looks:
            self._close()

    def _compare(self, seen: Sequence[RankState], made: Sequence[float], step: float) -> None:
        """Compare when each rank has ``made`` the same step. ``step``: seconds that one takes."""
        self._usual.append(step)
        if step > _LONG * median(self._usual):
            return
        self._steps += 1
        usual = median(made)
        for one, when in zip(seen, made, strict=True):
            late = (when - usual) / step
            sums = self._ranks[one.rank]
            sums.late += max(-1.0, min(1.0, late))  # a single step that took long counts no more than this
            sums.often += late * step > _NOISE and late > self._limits.least / 2

    def _close(self) -> None:
        found = _judged(self._ranks, self._looks, self._steps, self._limits.least)
        before = self._blocks[-1] if self._blocks else None
        if found is not None and (before is None or not found.ranks & before.ranks):
            self._since = self._began
        self._blocks = [*self._blocks, found][-self._limits.blocks :]
        self._conclude()
        self._ranks = {rank: _Sums(one.node) for rank, one in self._ranks.items()}
        self._looks = self._steps = 0

    def _conclude(self) -> None:
        """A straggler is told, and told no more, when so many blocks in a row say so."""
        if len(self._blocks) < self._limits.blocks:
            return
        known = [one for one in self._blocks if one is not None]
        ranks = frozenset[int]().union(*(one.ranks for one in known))
        if len(known) == len(self._blocks) and (same := ranks.intersection(*(one.ranks for one in known))):
            self._found = known[-1]._replace(ranks=same, cost=median(one.cost for one in known))
        elif self._found is not None and not ranks & self._found.ranks:
            self._found = None


def _when(points: Sequence[float], step: int) -> float | None:
    """Return when a rank made ``step``, by those that were seen of it before and after; None where one of them is missing."""
    steps, times = points[::2], points[1::2]
    after = bisect_left(steps, step)
    if after == len(steps):
        return None
    if steps[after] == step:
        return times[after]
    if not after:
        return None
    share = (step - steps[after - 1]) / (steps[after] - steps[after - 1])
    return times[after - 1] + share * (times[after] - times[after - 1])


def _in_training(states: Sequence[RankState], now: float) -> list[RankState] | None:
    """Return the ranks where all of them train; None where one does something else, or is not heard of."""
    found = [one for one in states if one.step is not None and not one.read]
    if len(found) < _FEWEST or len(found) < len(states):
        return None
    if any(
        one.phase not in (TRAIN, UNTOLD) or one.leaving or one.state in "XZ" or now - one.seen > _FRESH for one in found
    ):
        return None
    return found


def _judged(ranks: dict[int, _Sums], looks: int, steps: int, least: float) -> _BlockVerdict | None:
    late = {rank: one.late / steps for rank, one in ranks.items()}
    works = {rank: one.works / looks for rank, one in ranks.items()}
    often = {rank for rank, one in ranks.items() if one.often >= _AGAIN * steps}
    always = {rank for rank, share in works.items() if share >= _ALWAYS}
    blocks = [_slowest(ranks, late, often, least, COMES_LAST), _slowest(ranks, works, always, least, WORKS)]
    return max((one for one in blocks if one is not None), key=lambda one: one.cost, default=None)


def _slowest(
    ranks: dict[int, _Sums], shares: dict[int, float], suspects: set[int], least: float, how: str
) -> _BlockVerdict | None:
    """Return the one suspect, or those of one node: a tenth of all ranks at most. Many that are slow are not stragglers, unless
    one is it twice as much as any other: in a broadcast, some wait for the slow one and come late too."""
    if not suspects:
        return None
    if len({ranks[one].node for one in suspects}) > 1 or len(suspects) > max(1, len(ranks) // 10):
        worst = max(suspects, key=lambda one: shares[one])
        if shares[worst] < 2 * max(share for rank, share in shares.items() if rank != worst):
            return None
        suspects = {worst}
    others = max(share for rank, share in shares.items() if rank not in suspects)
    cost = max(shares[one] for one in suspects) - max(0.0, others)
    return _BlockVerdict(frozenset(suspects), ranks[next(iter(suspects))].node, cost, how) if cost >= least else None
