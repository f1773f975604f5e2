"""How the reasons to save or to stop become the answer of a step: this rank's own look at them, and what all ranks agree on.

A step in which nothing is due does not come here. Signal handlers and the deadline make a check due.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import datetime, timezone

from ftsupervise.guard.heartbeat import Heart, whole
from ftsupervise.guard.settings import NOW, Limits, Pace, RankContext, Voice
from ftsupervise.guard.stop_reasons import Decision, StopReasons, as_vote, from_vote
from ftsupervise.rundir.paths import STOPPED
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.switches import Stopped

_CONTINUE = Decision.CONTINUE
_monotonic = time.monotonic


class Decider:
    """Decides for one loop. Before monotonic ``next`` nothing has to be done in a step.

    ``agree``: int -> int, the maximum over all ranks, asked once in ``agree_every`` steps; None: this rank decides alone,
    unless the loop carries the votes. ``signals``: their numbers.
    """

    def __init__(
        self,
        place: RankContext,
        limits: Limits,
        signals: tuple[int, ...],
        voice: Voice,
        agree: Callable[[int], int] | None,
        agree_every: int,
    ) -> None:
        self.next = NOW  # never the future when all ranks meet in each step
        self.first = True
        self.outside = StopReasons(place, limits, signals, self.wake, voice)
        self._place, self._voice = place, voice
        self._pace = Pace(limits.poll)
        self._agree, self._agree_every = agree, max(1, agree_every)
        self._shared = agree is not None  # decisions are shared, so rank 0 alone checks the shared directory
        self._want = _CONTINUE  # this rank's own decision
        self._stop: Decision | None = None  # decided: every later step repeats it

    def vote(self, heart: Heart) -> int:
        """See ``Guard.vote``."""
        self._shared = True
        if _monotonic() >= self._pace.due:
            self._look(heart)
        return as_vote(self._want)

    def decide(self, step: int, agreed: int | None, heart: Heart) -> Decision:
        """The answer of ``step``; ``agreed``: the maximum of the votes, where the loop carried them."""
        if self._stop is not None:
            return self._stop
        if self.first:
            self.first = False
            heart.first(step)
        if agreed is None:
            if _monotonic() >= self._pace.due:
                self._look(heart)
            if self._agree is not None:
                if step % self._agree_every:
                    return _CONTINUE
                agreed = self._agree(as_vote(self._want))
            elif self._place.world > 1:
                self._voice.once("each rank decides alone: give Guard(agree=…), or ranks may stop at different steps")
        decision = self._want if agreed is None else self._shared_decision(agreed)
        if decision.save:
            self.outside.switches.answer()
            self._want = _CONTINUE
            self._tell_all(f"{decision.reason}: saving{' and stopping' if decision.stop else ''} at step {step}")
        elif decision.stop:
            self._tell_all(f"{decision.reason}: stopping at step {step}, unsaved")
        if decision.stop:
            self._settle(decision, step, heart)
        return decision

    def wake(self) -> None:
        """Check at the next step. Called by signal handlers."""
        self._pace.due = self.next = NOW

    def _shared_decision(self, agreed: int) -> Decision:
        """The common decision; with this rank's own reason if it voted for the same."""
        return self._want if agreed == as_vote(self._want) else from_vote(int(agreed))

    def _settle(self, decision: Decision, step: int, heart: Heart) -> None:
        """The loop will stop: record the cause for the supervisor."""
        self._stop = decision
        self.wake()
        if heart.ending is not None:
            heart.ending.forget()
            heart.ending.leaves()
        heart.facts["stop"] = decision.cause
        heart.beat_now()
        if self._place.attempt_dir is not None and self._place.rank == 0:
            record = Stopped(decision.cause, decision.reason, whole(step), datetime.now(timezone.utc))
            try:
                write_json(self._place.attempt_dir / STOPPED, record)
            except OSError as error:
                self._voice.once(f"cannot write down why we stop: {error.strerror}")

    def _tell_all(self, text: str) -> None:
        if not self._shared or self._place.rank == 0:
            self._voice.say(text, for_all=self._shared)

    # ------------------------------------------------------------------------------------------------------- looking

    def _look(self, heart: Heart) -> None:
        """Find this rank's own decision. The next check is scheduled first, so that a signal meanwhile makes one due."""
        end = self.outside.end
        now = self._pace.begin(end)
        self._set_next()
        try:
            self._want = self._reasons(now, heart)
        except Exception as error:  # law 7: our failure never stops the training
            self._voice.once(f"the guard's check failed: {type(error).__name__}: {error}")
        self._pace.done(end)
        self._set_next()
        if self.outside.signals.got and not self._want.stop:  # it came during the check
            self.wake()

    def _set_next(self) -> None:
        self.next = NOW if self._agree is not None else self._pace.due

    def _reasons(self, now: float, heart: Heart) -> Decision:
        if heart.beat(now):  # what follows costs 5 us and more: as rarely as the beats
            for taken in self.outside.signals.taken():
                self._voice.once(f"another handler was installed for {taken}; the guard no longer receives it")
            if self.outside.signals.pid != os.getpid() and not self.first:
                self.outside.signals.pid = os.getpid()  # a forked child that trains is a loop of its own
            heart.facts["memory"] = self.outside.memory.used()
            heart.miss_the_watch(now)
        want = self.outside.reasons(now, shared_directory=self._place.rank == 0 or not self._shared)
        if self.outside.switches.problem:
            heart.facts["problem"] = self.outside.switches.problem
        return want
