"""The loop's side of the agreement through a store: when to ask it, and what a step answers.

A rank may make the steps up to the one that all have passed (frontier.py), and asks for more while it makes them, so that a
step finds the answer there. Where one step takes longer than a decision should, each asks and waits, which takes some 100 us.
"""

from __future__ import annotations

import os
import time

from ftsupervise.guard.agreement import AHEAD, MOST_AHEAD, StepPace
from ftsupervise.guard.courier import Courier, Register
from ftsupervise.guard.frontier import Frontier, NamedStep, covers
from ftsupervise.guard.stop_reasons import Decision

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
