"""Turns the reasons to save or to stop into the answer of a step: this rank's own look at them, and what all ranks
agree on.

It stands alone because the votes of ranks, and how they agree, know nothing of a loop.

A step in which nothing is due does not come here. Signal handlers and the deadline make a check due.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from ftsupervise.guard.heartbeat import Heart
from ftsupervise.guard.process_group import find_process_group
from ftsupervise.guard.settings import NOW, Limits, Pace, RankContext, Voice, whole
from ftsupervise.guard.side_thread import LAST_WITHIN, WITHIN, SideThread
from ftsupervise.guard.stop_reasons import OF_ONE_RANK, Decision, StopReasons, as_vote, from_vote
from ftsupervise.host.ownership import FOLDER, make_folder
from ftsupervise.host.processes import boot_id
from ftsupervise.printable import printable
from ftsupervise.rundir.paths import STOPPED, RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.switches import Finished, Identity, Stopped

# The ranks come to the same decision at the same step.
#
# They agree through the store of torch.distributed, where the program has one (``StoreAgreement``): no rank waits for
# another there. Otherwise they do so through a function that all ranks call in the same step: the user's own
# (``AskedAgreement``), or one small all_reduce every few steps (``ReducedAgreement``). A decision and its step belong
# together for all ranks, so all count the calls of ``Guard.step``: its numbers may begin anywhere, repeat or skip.

AHEAD = 0.5  # seconds of steps that ranks may make between two questions: a decision waits no longer
MOST_AHEAD = 32  # steps, however quick they are: the next ones may be slow


class Agreement(Protocol):
    """The agreement of the ranks.

    ``count``: the calls of ``Guard.step`` so far, counted there. Up to ``free`` a call need not come to ``decide``.
    ``lost``: why this rank decides alone for now, or "".
    """

    count: int
    free: int
    lost: str

    def decide(self, want: Decision) -> Decision:
        """Return the decision of all ranks for this call; ``want``: this rank's own wish."""

    def pending(self) -> Decision:
        """Return what is decided for a call to come, as far as this rank knows."""

    def tell(self, want: Decision) -> None:
        """Pass this rank's wish on before its next call."""

    def close(self, *, in_order: bool) -> None:
        """End: the loop is over. ``in_order``: the other ranks are about to leave too, and are waited for a little."""


class InTheStep:
    """An agreement that is made inside of steps alone: nothing is told or heard between them, or at the end."""

    def pending(self) -> Decision:
        return _CONTINUE

    def tell(self, want: Decision) -> None:
        return

    def close(self, *, in_order: bool) -> None:
        return


class AskedAgreement(InTheStep):
    """``agree``: int -> int, the maximum over all ranks; every rank calls it in each ``every``-th step."""

    lost = ""

    def __init__(self, agree: Callable[[int], int], every: int) -> None:
        self.count = 0
        self._agree, self._every = agree, max(1, every)
        self.free = self._every - 1

    def decide(self, want: Decision) -> Decision:
        if self.count <= self.free:
            return _CONTINUE
        self.free = self.count + self._every - 1
        return common(want, self._agree(as_vote(want)))


def common(want: Decision, agreed: int) -> Decision:
    """Return the decision that all have voted for; with this rank's own reason if it voted for the same."""
    return want if agreed == as_vote(want) else from_vote(int(agreed))


class StepPace:
    """Tells how many steps take ``seconds``, from the time that the last ones took.

    The number grows step by step: the first step may be quick.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self.step_takes = 0.0  # seconds
        self.steps = 0
        self._seconds, self._most = seconds, most
        self._at, self._count = 0.0, 0

    def measure(self, count: int, now: float) -> int:
        if self._at and count > self._count:
            self.step_takes = (now - self._at) / (count - self._count)
            fit = int(self._seconds / self.step_takes) if self.step_takes > 0 else self._most
            self.steps = min(fit, 2 * self.steps + 1, self._most)
        self._at, self._count = now, count
        return self.steps


class ReducedAgreement(InTheStep):
    """``maximum``: ints -> their maxima over all ranks, a collective; every few steps, as many on every rank."""

    def __init__(self, maximum: Callable[..., list[int]]) -> None:
        self.count = self.free = 0
        self.lost = ""
        self._maximum = maximum
        self._pace = StepPace(AHEAD, MOST_AHEAD)

    def decide(self, want: Decision) -> Decision:
        if self.lost:
            return want
        if self.count <= self.free:
            return _CONTINUE
        steps = self._pace.measure(self.count, _monotonic())
        try:
            agreed, fewest = self._maximum(as_vote(want), -steps)
        except Exception as error:  # law 7: the loop's own next collective meets the same
            self.lost = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            return want
        self.free = self.count - fewest
        return common(want, agreed)


# ------------------------------------------------------------------------------------------


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
            self.outside.clock.saved()
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


# ------------------------------------------------------------------------------------------

# The loop's side of the agreement through a store: when to ask it, and what a step answers.
#
# A rank may make the steps up to the one that all have passed, and asks for more while it makes them, so that a
# step finds the answer there. Where one step takes longer than a decision should, each asks and waits, which takes some 100 us.

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
