"""Turns the reasons to save or to stop into the answer of a step: this rank's own look at them, and what all ranks
agree on.

A step in which nothing is due does not come here. Signal handlers and the deadline make a check due.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Literal

from ftsupervise.guard.agreement import Agreement, AskedAgreement, ReducedAgreement, common
from ftsupervise.guard.heartbeat import Heart
from ftsupervise.guard.process_group import find_process_group
from ftsupervise.guard.settings import NOW, Limits, Pace, RankContext, Voice, whole
from ftsupervise.guard.side_thread import LAST_WITHIN, WITHIN, SideThread
from ftsupervise.guard.stop_reasons import OF_ONE_RANK, Decision, StopReasons, as_vote
from ftsupervise.host.ownership import FOLDER, make_folder
from ftsupervise.host.processes import boot_id
from ftsupervise.rundir.paths import STOPPED, RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.switches import Finished, Identity, Stopped

_CONTINUE = Decision.CONTINUE
_SEARCH = 10  # steps: a program that has initialised no process group by then has none
_NEXT_STEP_IS_FAR = 0.25  # seconds
_SILENT = 10.0  # seconds without an answer of the run directory before it is said
FINISH_WITHIN = 30.0  # seconds that the end of the training waits until it is written down
_SPEAKERS = 2  # ranks that say that there is no agreement any more: the first may be the one that is gone
_monotonic = time.monotonic


class Decider:
    """Decides for one loop. Before monotonic ``next`` nothing has to be done in a step, unless ``agreement`` says so.

    ``agree``: int -> int, the maximum over all ranks, asked once in ``agree_every`` steps; None: the ranks agree through
    torch.distributed, where it is initialised by the first steps; False: each rank decides alone. ``signals``: their numbers.
    """

    def __init__(
        self,
        place: RankContext,
        limits: Limits,
        signals: tuple[int, ...],
        voice: Voice,
        agree: Callable[[int], int] | Literal[False] | None,
        agree_every: int,
    ) -> None:
        self.next = NOW
        self.stepped = NOW  # monotonic: the last step in which nothing was due
        self.side = SideThread()
        self.agreement: Agreement | None = AskedAgreement(agree, agree_every) if agree else None
        self.first = True
        self.outside = StopReasons(place, limits, signals, self.wake, voice, self._first_loss)
        self._place, self._voice = place, voice
        self._pace = Pace(limits.poll)
        self._waits = not limits.poll  # for each look into the run directory
        self._search = _SEARCH if agree is None else 0  # so many steps more a process group is looked for
        self._reads = place.rank == 0  # this rank checks the shared directory, where decisions are shared
        self._carried = False  # the loop carries the votes
        self._want = _CONTINUE  # this rank's own decision
        self._stop: Decision | None = None  # decided: every later step repeats it

    def listen(self, problems: Iterable[str]) -> None:
        """Receive signals from now on, and report which of them, and which settings, do not work here."""
        for problem in problems:
            self._voice.once(problem)
        why_not = self.outside.signals.listen()
        atexit.register(self.outside.signals.last_words)
        if why_not:
            self._voice.once(
                f"the guard cannot receive signals here ({why_not}); the warning file and the switches still work"
            )
        if self._place.rundir is None and self._place.rank == 0:
            self._voice.say(
                "FTSUPERVISE_RUN_DIR is not set: no switches and no beats; the guard reacts to signals only"
            )

    def vote(self, heart: Heart) -> int:
        """See ``Guard.vote``."""
        self._carry()
        if _monotonic() >= self._pace.due:
            self._look(heart)
        return as_vote(self._want)

    def decide(self, step: int, agreed: int | None, heart: Heart) -> Decision:
        """Return the answer of ``step``; ``agreed``: the maximum of the votes, where the loop carried them."""
        if self._stop is not None:
            return self._stop
        if self.first:
            self.first = False
            heart.first(step)
        if agreed is not None:
            self._carry()
            decision = common(self._want, agreed)
        else:
            if self._search:
                self._find_the_others()
            if _monotonic() >= self._pace.due:
                self._look(heart)
            decision = self._decision(heart)
        if decision.save:
            self.outside.switches.answer()
            self._want = _CONTINUE
            self._tell_all(
                f"{decision.reason}: saving{' and stopping' if decision.stop else ''} at step {step}", decision
            )
        elif decision.stop:
            self._tell_all(f"{decision.reason}: stopping at step {step}, unsaved", decision)
        if decision.stop:
            self._settle(decision, step, heart)
        self.stepped = _monotonic()
        return decision

    def wake(self) -> None:
        """Check at the next step. Called by signal handlers."""
        self._pace.due = self.next = NOW

    def check(self, heart: Heart) -> Decision:
        """See ``Guard.check``."""
        if self._stop is not None:
            return self._stop
        if _monotonic() >= self._pace.due:
            self._look(heart)
        if self.agreement is None:
            return self._want
        self.agreement.tell(self._want)
        return max(self._want, self.agreement.pending())

    def superseded(self) -> bool:
        """Return whether a newer attempt has begun. Checks now; unknown counts as no."""
        if self.outside.attempt.newer is None and self._place.attempt is not None:
            self.side.do("attempt", self.outside.attempt.superseded)
        return self.outside.attempt.newer is not None

    def take_down(self, answered: Identity | None) -> None:
        """Note that a checkpoint is saved: rank 0 takes down the save switch that it answers, and no other."""
        if answered is not None and self._place.rank == 0:
            self.side.do("save switch", partial(self.outside.switches.take_down, answered, self._place.area))
            self._voice.say_held()

    def finish(self, step: int) -> None:
        """Record that the training is complete: rank 0 does, for the later members of the chain."""
        rundir, place = self._place.rundir, self._place
        if rundir is None or place.rank != 0:
            return
        record = Finished(whole(step), place.attempt, os.uname().nodename, datetime.now(timezone.utc))
        if not self.side.do("finished", partial(self._write_finished, rundir, record), FINISH_WITHIN):
            self._voice.say(
                f"{rundir.root} has not answered for {FINISH_WITHIN:.0f} s: the next job may go on training; "
                f"when it answers, touch {rundir.finished}"
            )
        self._voice.say_held()

    def close(self, *, in_order: bool) -> None:
        """End: the last beat is written, and the threads end."""
        self.side.close()
        self._voice.say_held()
        self._leave(in_order=in_order)

    def _leave(self, *, in_order: bool) -> None:
        if self.agreement is not None:
            self.agreement.close(in_order=in_order)

    # --------------------------------------------------------------------------------------------------- the other ranks

    @property
    def _shared(self) -> bool:
        return self._carried or (self.agreement is not None and not self.agreement.lost)

    def _carry(self) -> None:
        """Let the loop carry the votes: nothing else is agreed on."""
        if not self._carried:
            self._carried, self._search = True, 0
            self._leave(in_order=False)
            self.agreement = None

    def _find_the_others(self) -> None:
        """Agree through torch.distributed from this step on, which is the same on all ranks."""
        self._search -= 1
        group = find_process_group()
        if group is not None:
            self._search, self._reads = 0, group.rank == 0
            if group.can_swap():
                from ftsupervise.guard.store_agreement import StoreAgreement

                self.agreement = StoreAgreement(group.register(), group.rank, hosts=group.hosts_the_store)
            else:
                self.agreement = ReducedAgreement(group.maximum)
            self.agreement.count = 1
            atexit.register(self._at_exit)
        elif self._place.world == 1:
            self._search = 0
        elif not self._search and self._place.rank == 0:
            self._voice.say(
                f"each of the {self._place.world} ranks decides alone, and they may stop at different steps: "
                "torch.distributed is not initialised; give Guard(agree=…)"
            )
        self._set_next()

    def _at_exit(self) -> None:
        self._leave(in_order=self._stop is not None)

    def _decision(self, heart: Heart) -> Decision:
        if self.agreement is None:
            return self._want
        decision = self.agreement.decide(self._want)
        heart.facts["cannot_agree"] = lost = self.agreement.lost
        if lost and self._place.rank < _SPEAKERS:
            self._voice.once(
                f"the ranks cannot agree any more ({lost}): each decides alone, and they may stop at different steps"
            )
        return decision

    def _settle(self, decision: Decision, step: int, heart: Heart) -> None:
        """Record the cause for the supervisor: the loop will stop."""
        self._stop = decision
        self.outside.signals.leaving = True
        self.wake()
        if heart.ending is not None:
            heart.ending.forget()
            heart.ending.leaves()
        self.outside.loss.settle(whole(step))
        heart.facts["stop"] = decision.cause
        if decision.reason != decision.cause:
            heart.facts["because"] = decision.reason
        heart.beat_now()
        if self._place.attempt_dir is not None and self._place.rank == 0:
            then = self.outside.loss.action(decision.cause)
            record = Stopped(decision.cause, decision.reason, whole(step), datetime.now(timezone.utc), then)
            told = self.outside.signals.told
            if told is not None:
                record = record._replace(told=datetime.fromtimestamp(told, timezone.utc), boot=boot_id())
            self.side.do("stop", partial(self._write_down, self._place.attempt_dir / STOPPED, record))
            self._voice.say_held()

    def _write_down(self, file: Path, record: Stopped) -> None:
        try:
            write_json(file, record)
        except OSError as error:
            self._voice.later(f"cannot record why we stop: {error.strerror}")

    def _write_finished(self, rundir: RunDir, record: Finished) -> None:
        try:
            make_folder(rundir.state, FOLDER)
            write_json(rundir.finished, record, area=self._place.area)
        except OSError as error:
            if not self.outside.attempt.superseded():
                self._voice.later(f"cannot write {rundir.finished}: {error.strerror}; touch it by hand")

    def _tell_all(self, text: str, decision: Decision) -> None:
        if not self._shared or self._place.rank == 0:
            self._voice.say(text, for_all=self._shared)
        elif decision.reason != decision.cause and decision.cause in OF_ONE_RANK:  # rank 0 cannot say which and why
            self._voice.say(decision.reason)

    # ------------------------------------------------------------------------------------------------------- looking

    def _first_loss(self) -> float | None:
        from ftsupervise.guard.resume import first_loss

        return self.side.answer("ledger", partial(first_loss, self._place), LAST_WITHIN)

    def _look(self, heart: Heart) -> None:
        """Find this rank's own decision. The next check is scheduled first, so that a signal meanwhile makes one due."""
        end = self.outside.end
        now = self._pace.begin(end)
        self._set_next()
        self.side.start(self._pace.poll)
        try:
            self._want = self._reasons(now, heart)
            self._say_what_waits()
        except Exception as error:  # law 7: our failure never stops the training
            self._voice.once(f"the guard's check failed: {type(error).__name__}: {error}")
        self._pace.done(end)
        self._set_next()
        if self.outside.signals.got and not self._want.stop:  # it came during the check
            self.wake()

    def _set_next(self) -> None:
        self.next = NOW if self._search else self._pace.due

    def _reasons(self, now: float, heart: Heart) -> Decision:
        if heart.beat(now):  # what follows costs 5 us and more: as rarely as the beats
            for taken in self.outside.signals.taken():
                self._voice.once(f"another handler was installed for {taken}; the guard no longer receives it")
            if self.outside.signals.pid != os.getpid() and not self.first:
                self.outside.signals.pid = os.getpid()  # a forked child that trains is a loop of its own
            heart.miss_the_watch(now)
        reads = self._reads or not self._shared
        self._look_outside(now, shared_directory=reads)
        if not reads and self.outside.asks_for_the_end(now):
            self.side.do("end", self.outside.attempt.look_for_deadline)
        want = self.outside.reasons(now, shared_directory=reads)
        if self.outside.switches.problem:
            heart.facts["problem"] = self.outside.switches.problem
        return want

    def _look_outside(self, now: float, *, shared_directory: bool) -> None:
        """In the side thread, which has this loop decide at its next step when something has changed. Where that step may be
        far away, the answer is waited for."""
        look = partial(self.outside.look, shared_directory=shared_directory and self._place.rundir is not None)
        if self._waits or now - self.stepped > _NEXT_STEP_IS_FAR:
            self.side.do("look", look)
        else:
            self.side.ask("look", look)
        if self.side.waits() > WITHIN and self.outside.memory:  # the run directory does not answer; the memory does
            self.outside.look_at_memory()

    def _say_what_waits(self) -> None:
        self._voice.say_held()
        if self.side.waits() > _SILENT:
            self._voice.once(
                f"{self._place.rundir} has not answered for {_SILENT:.0f} s: no switch is seen and no beat is written "
                "until it does; training goes on"
            )
