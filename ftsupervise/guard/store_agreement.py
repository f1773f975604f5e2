"""The loop's side of the agreement through a store: when to ask it, and what a step answers.

A rank may make the steps up to the one that all have passed, and asks for more while it makes them, so that a
step finds the answer there. Where one step takes longer than a decision should, each asks and waits, which takes some 100 us.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import NamedTuple, Protocol

from ftsupervise.guard.agreement import AHEAD, MOST_AHEAD, StepPace
from ftsupervise.guard.stop_reasons import Decision, as_vote, from_vote
from ftsupervise.printable import printable

# The agreement of all ranks: how many steps each may make without a question, and the steps at which all save or stop.
#
# The ranks keep this one value in a store that they share, and change it by compare-and-set only. A decision is always
# named for the first step that no rank may make yet, so no rank can have passed it, however far ranks are apart; and
# before a rank makes a step beyond ``passed`` it asks, and is told. No rank ever waits for another one.
#
# A stop that saves may turn into one that does not, when a loss is no number any more before its step is made. The first
# rank that comes to this step closes it, and from then on it stays what it is, for all. Steps are counted as calls of
# ``Guard.step``, which all ranks make equally often: numbers may begin anywhere, repeat or skip.

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


# ------------------------------------------------------------------------------------------


# Carries a rank's questions to the store that all ranks share, in a thread of its own.
#
# A store whose server is stopped gives no answer and no error, and the loop must not wait for it without a bound.
#
# The thread sleeps until it is asked. While the training goes on that is once in half a second at most.

_LOOK_EVERY = 0.02  # seconds between two checks whether all ranks have left
_CLOSE_WITHIN = 1.0  # seconds that the end of the loop may wait for a store that does not answer


class Register(Protocol):
    """The one value that ``world`` ranks share, and a counter of those that have left. An error of it means that it is gone."""

    world: int

    def swap(self, expected: str, desired: str) -> str:
        """Replace ``expected`` ("" where there is none yet) by ``desired``; return the value afterwards."""

    def left(self, more: int) -> int:
        """Count ``more`` ranks as having left; return how many have."""


class Question(NamedTuple):
    """``up_to``: the steps that should be passed, unless those up to ``enough`` are by then. ``wish``: a decision to name a
    step for, and the step that this rank has made. ``closes``: the step that it makes now as it is named."""

    enough: int = 0
    up_to: int = 0
    wish: tuple[Decision, int] | None = None
    closes: int = 0


class Courier:
    """``known``: what the ranks have agreed on, as far as this one knows. ``gone``: why it can learn no more."""

    def __init__(self, register: Register, rank: int) -> None:
        self.known = Frontier()
        self.gone = ""
        self.busy = False  # asked, and not answered yet
        self._register, self._rank = register, rank
        self._turn = threading.Condition()
        self._asked = False
        self._question = Question()
        self._leaving = self._counted = False
        self._linger: float | None = None  # seconds, once the loop is over
        self._text = ""  # of ``known``, as it is in the store
        self._thread = threading.Thread(target=self._run, name="ftsupervise-agreement", daemon=True)
        self._thread.start()

    def ask(self, enough: int, up_to: int, wish: tuple[Decision, int] | None = None) -> None:
        """Have the steps up to ``up_to`` passed, unless those up to ``enough`` are by then. ``wish``: a decision to name a step
        for, and the step that this rank has made. Returns at once."""
        with self._turn:
            asked = self._question
            enough, up_to = max(enough, asked.enough), max(up_to, asked.up_to)
            self._question = Question(enough, up_to, wish or asked.wish, asked.closes)
            self._asked = self.busy = True
            self._turn.notify_all()

    def wait(self, step: int, seconds: float) -> bool:
        """Wait until ``step`` may be made; False: there was no answer within ``seconds``, or there will be none."""
        with self._turn:
            self._turn.wait_for(lambda: self.known.passed >= step or self.gone, seconds)
            return self.known.passed >= step

    def close_step(self, step: int, seconds: float) -> Frontier:
        """Note that this rank does now what is named for ``step``; return that, as far as it can be learned within
        ``seconds``.
        """
        with self._turn:
            self._question = self._question._replace(closes=max(step, self._question.closes))
            self._asked = self.busy = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: self.known.closed >= step or self.gone, seconds)
            return self.known

    def leave(self) -> None:
        """Note that this rank asks no more: it knows that all stop. Returns at once."""
        with self._turn:
            self._leaving = True
            self._turn.notify_all()

    def close(self, linger: float) -> None:
        """End: the loop is over.

        Where this process holds the store, it waits ``linger`` seconds at most until all others have left too, so that
        none of them asks in vain.
        """
        with self._turn:
            if self._linger is None:
                self._linger, self._leaving = linger, True
                self._turn.notify_all()
        self._thread.join(_CLOSE_WITHIN + linger)

    # ---------------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        try:
            linger: float | None = None
            while linger is None:
                with self._turn:
                    self._turn.wait_for(
                        lambda: self._asked or self._leaving != self._counted or self._linger is not None
                    )
                    asked, self._asked, linger = self._asked, False, self._linger
                    question, self._question = self._question, self._question._replace(wish=None)
                if asked:
                    known, text = self._exchange(question)
                    with self._turn:
                        self.known, self._text, self.busy = known, text, self._asked
                        self._turn.notify_all()
                if self._leaving and not self._counted:
                    self._counted = True
                    self._register.left(1)
            self._end("the loop is over")
            self._wait_for_the_others(linger)
        except Exception as error:  # law 7: whatever the store raises, the loop goes on without it
            self._end(f"{type(error).__name__}: {error}".partition("\n")[0][:200])

    def _end(self, why: str) -> None:
        with self._turn:
            self.gone = self.gone or why
            self._turn.notify_all()

    def _exchange(self, question: Question) -> tuple[Frontier, str]:
        expected = self._text
        while True:
            desired = parse(expected)
            if question.wish is not None:
                desired = desired.wish(question.wish[0], self._rank, question.wish[1])
            if desired.passed < question.enough:
                desired = desired.up_to(question.up_to)
            desired = desired.close(question.closes)
            text = desired.text()
            found = self._register.swap(expected, text)
            if found == text:
                return desired, text
            if found == expected:
                raise LookupError("what the ranks have agreed on is gone from the store")
            expected = found

    def _wait_for_the_others(self, linger: float) -> None:
        end = time.monotonic() + linger
        while linger and self._register.left(0) < self._register.world and time.monotonic() < end:
            time.sleep(_LOOK_EVERY)


# ------------------------------------------------------------------------------------------


_CONTINUE = Decision.CONTINUE
_monotonic = time.monotonic

_RANKS_PER_SECOND = 8_000  # that may ask one store; more of them ask more rarely
_MOST_SECONDS_AHEAD = 10.0
_PATIENCE = 30.0  # seconds that a step may wait for the store
_LINGER = 3.0  # seconds that the process which holds the store stays for the others
_FAR_BEHIND = 128  # steps: the ranks of a loop that meets in each step are never so far apart


class StoreAgreement:
    """``rank``: of this process among those of ``register``; ``hosts``: the store lives in this process."""

    def __init__(self, register: Register, rank: int, *, hosts: bool, patience: float = _PATIENCE) -> None:
        self.count = self.free = 0
        self.lost = ""
        self._patience, self._linger = patience, _LINGER if hosts else 0.0
        self._pid = os.getpid()
        self._courier = Courier(register, rank)
        ahead = min(_MOST_SECONDS_AHEAD, max(AHEAD, register.world / _RANKS_PER_SECOND))
        self._pace = StepPace(ahead, MOST_AHEAD)
        self._answered = 0  # the steps up to this one

    def decide(self, want: Decision) -> Decision:
        count, courier = self.count, self._courier
        if self.lost and courier.busy:  # it was waited for in vain, and has not answered since
            return want
        new = want and not self._is_coming(want)
        left = courier.known.passed - count
        if new or left < 0 or (left < self._margin and not courier.busy):
            ahead = self._pace.measure(count, _monotonic())
            courier.ask(count + self._margin, count + ahead, (want, count - 1) if new else None)
        if count > courier.known.passed and not self._is_told(count):
            return want
        return self._answer(count, courier.known)

    def pending(self) -> Decision:
        coming = [one.decision() for one in self._courier.known.named if one.at > self._answered]
        return max(coming, default=_CONTINUE)

    def tell(self, want: Decision) -> None:
        if want and not self._is_coming(want):
            self._courier.ask(self.count, self.count, (want, self.count))

    def close(self, *, in_order: bool) -> None:
        if os.getpid() == self._pid:
            self._courier.close(self._linger if in_order and not self.lost else 0.0)

    @property
    def _margin(self) -> int:
        """Return how many steps before the last allowed one more are asked for."""
        return (self._pace.steps + 3) // 4

    def _is_coming(self, want: Decision) -> bool:
        return any(covers(one.decision(), want) for one in self._courier.known.named if one.at > self._answered)

    def _is_told(self, count: int) -> bool:
        """Wait until it is known what the ranks do in this step. False: it cannot be known, and this rank decides alone."""
        courier = self._courier
        if os.getpid() != self._pid:  # a forked child that trains is a loop of its own
            self.lost = self.lost or "this process was forked"
        elif not courier.wait(count, self._patience):
            self.lost = courier.gone or f"it has not answered within {self._patience:.0f} s"
        else:
            self.lost = ""
        return not self.lost

    def _answer(self, count: int, known: Frontier) -> Decision:
        named = known.between(self._answered, count) or self._out_of_reach(count, known)
        self._answered = max(self._answered, count, *(one.at for one in named))
        next_named = known.next_after(self._answered)
        self.free = known.passed - self._margin
        if next_named is not None:
            self.free = min(self.free, next_named - 1)
        if not named:
            return _CONTINUE
        strongest = max(named, key=lambda one: one.vote)
        decision = strongest.decision()
        if decision.stop and decision.save:
            strongest = self._closed(strongest)
            decision = strongest.decision()
        if decision.stop:
            self._courier.leave()
        if strongest.rank == 0 or decision.reason == decision.cause:
            return decision
        return Decision(int(decision), decision.cause, f"rank {strongest.rank}: {decision.reason}")

    def _closed(self, stop: NamedStep) -> NamedStep:
        """Return the same stop, as it is for all ranks: the loss of one may have been no number since this one asked."""
        if os.getpid() != self._pid:
            return stop
        known = self._courier.close_step(stop.at, self._patience)
        return next((one for one in known.named if one.at == stop.at), stop)

    def _out_of_reach(self, count: int, known: Frontier) -> tuple[NamedStep, ...]:
        """Return the steps that are named so far ahead that this rank cannot come to them in time.

        Ranks that are so far apart do not meet in their steps, and this one need not wait for them.
        """
        at = known.next_after(max(count, self._answered))
        behind = 0 if at is None else at - count
        if behind <= _FAR_BEHIND or behind * self._pace.step_takes <= self._patience:
            return ()
        return known.between(max(count, self._answered), at or 0)
