"""The agreement of all ranks: how many steps each may make without a question, and the steps at which all save or stop.

The ranks keep this one value in a store that they share, and change it by compare-and-set only. A decision is always
named for the first step that no rank may make yet, so no rank can have passed it, however far ranks are apart; and
before a rank makes a step beyond ``passed`` it asks, and is told. No rank ever waits for another one.

A stop that saves may turn into one that does not, when a loss is no number any more before its step is made. The first
rank that comes to this step closes it, and from then on it stays what it is, for all. Steps are counted as calls of
``Guard.step``, which all ranks make equally often: numbers may begin anywhere, repeat or skip.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from ftsupervise.guard.stop_reasons import Decision, as_vote, from_vote
from ftsupervise.printable import printable

_KEPT = 32  # decisions; a rank that is further behind than so many saves is not one of ours
_LONGEST_REASON = 300
_LARGEST = 1 << 16


class NamedStep(NamedTuple):
    """At the step ``at`` all ranks do what ``rank`` has voted for."""

    at: int
    vote: int
    rank: int = 0
    reason: str = ""

    def decision(self) -> Decision:
        common = from_vote(self.vote)
        return Decision(int(common), common.cause, self.reason or common.cause)


class Frontier(NamedTuple):
    """Every rank may make its first ``passed`` steps; ``named``: what happens at some of them, in their order. Up to the step
    ``closed`` that does not change any more."""

    passed: int = 0
    named: tuple[NamedStep, ...] = ()
    closed: int = 0

    def up_to(self, step: int) -> Frontier:
        """Return the frontier with every step up to this one allowed to all ranks."""
        return self if step <= self.passed else self._replace(passed=step)

    def wish(self, decision: Decision, rank: int, after: int) -> Frontier:
        """Name the next possible step for it, unless a step after ``after`` has as much planned already.

        A stop that is to come anyway becomes this one.
        """
        coming = [one for one in self.named if one.at > after]
        if any(covers(one.decision(), decision) for one in coming):
            return self
        stop = next((one for one in coming if one.decision().stop), None)
        if stop is not None:
            own = NamedStep(stop.at, as_vote(decision), rank, decision.reason[:_LONGEST_REASON])
            named = tuple(own if one == stop else one for one in self.named)
            return self if stop.at <= self.closed else self._replace(named=named)
        at = self.passed + 1
        one = NamedStep(at, as_vote(decision), rank, decision.reason[:_LONGEST_REASON])
        return Frontier(at, (*self.named, one)[-_KEPT:], self.closed)

    def close(self, step: int) -> Frontier:
        """Note that a rank does now what is named for ``step``."""
        return self if step <= self.closed else self._replace(closed=step)

    def between(self, answered: int, step: int) -> tuple[NamedStep, ...]:
        """Return the steps that were named after ``answered``, up to ``step``."""
        return tuple(one for one in self.named if answered < one.at <= step)

    def next_after(self, step: int) -> int | None:
        """Return the first step after ``step`` that something is named for."""
        return min((one.at for one in self.named if one.at > step), default=None)

    def text(self) -> str:
        return json.dumps([self.passed, [list(one) for one in self.named], self.closed], separators=(",", ":"))


def covers(coming: Decision, wanted: Decision) -> bool:
    """Return whether a rank that wants the one gets it with the other.

    A stop that saves is not enough for one that must not.
    """
    return coming >= wanted and not (wanted.stop and coming.save and not wanted.save)


def parse(text: str) -> Frontier:
    """The inverse of ``text``; "" is the beginning. Raises ValueError for what is no such value: others may write there."""
    if not text:
        return Frontier()
    if len(text) > _LARGEST:
        raise ValueError("too long")
    found = json.loads(text)
    try:
        passed, named, closed = found
        return Frontier(_count(passed), tuple(_named(*one) for one in named), _count(closed))
    except TypeError as error:
        raise ValueError(str(error)) from error


def _named(at: object, vote: object, rank: object, reason: object) -> NamedStep:
    return NamedStep(_count(at), _count(vote), _count(rank), printable(str(reason)[:_LONGEST_REASON]))


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
