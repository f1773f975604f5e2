"""The guard's reasons to save or to stop. One check costs some 10 us; a slow file system makes checks rarer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

from ftsupervise import scheduler
from ftsupervise.guard.held_back import HeldBack
from ftsupervise.guard.loss_policy import LossWatch, loss_policy
from ftsupervise.guard.memory_limits import GpuMemory, MemoryLimits, Shortage
from ftsupervise.guard.settings import Limits, RankContext, Voice
from ftsupervise.host import files
from ftsupervise.printable import printable
from ftsupervise.rundir.fence import newer
from ftsupervise.rundir.paths import DEADLINE, WARNING, RunDir
from ftsupervise.rundir.switches import KILL, SAVE, Identity, clear_answered, look_at_switch
from ftsupervise.truth import (
    DIVERGES,
    GPU_MEMORY,
    HOST_MEMORY,
    KILL_SWITCH,
    NOT_A_NUMBER,
    RUN_TIME,
    SAVE_SWITCH,
    SUPERSEDED,
    TIME_LIMIT,
    TOLD_TO_STOP,
    WARNED,
    Health,
)

# The guard's answers, and how ranks vote on them with one int.

# A vote has the number of its cause, the weakest first: ranks of one version talk to each other, and agree on the maximum.
CAUSES = {
    0: "",
    1: SAVE_SWITCH,
    2: HOST_MEMORY,
    3: GPU_MEMORY,
    4: RUN_TIME,
    5: TIME_LIMIT,
    6: WARNED,
    7: TOLD_TO_STOP,
    8: KILL_SWITCH,
    9: DIVERGES,
    10: NOT_A_NUMBER,
    11: SUPERSEDED,
}
_NUMBERS = {cause: number for number, cause in CAUSES.items()}
_UNSAVED = (DIVERGES, NOT_A_NUMBER, SUPERSEDED)
OF_ONE_RANK = (HOST_MEMORY, GPU_MEMORY, DIVERGES, NOT_A_NUMBER)  # the others have not seen it
_CAUSE_BITS = 4


class Decision(int):
    """CONTINUE < SAVE < STOP. An int, so that it compares and travels; ``reason`` says why, in words.

    ``save`` is true for SAVE and for STOP, which saves first; unless a newer attempt has begun, which owns the
    checkpoints from then on, or the loss says that the state is worth nothing.
    """

    CONTINUE: ClassVar[Decision]
    SAVE: ClassVar[Decision]
    STOP: ClassVar[Decision]

    reason: str
    cause: str

    def __new__(cls, value: int, cause: str = "", reason: str = "") -> Decision:
        self = super().__new__(cls, value)
        self.cause = cause
        self.reason = reason or cause
        return self

    @property
    def save(self) -> bool:
        return self >= 1 and self.cause not in _UNSAVED

    @property
    def stop(self) -> bool:
        return self >= 2

    @property
    def name(self) -> str:
        return ("CONTINUE", "SAVE", "STOP")[self]

    def __repr__(self) -> str:
        return f"<Decision {self.name}: {self.reason}>" if self.reason else f"<Decision {self.name}>"

    __str__ = __repr__


Decision.CONTINUE = Decision(0)
Decision.SAVE = Decision(1)
Decision.STOP = Decision(2)


def as_vote(decision: Decision) -> int:
    """Return one non-negative int; the maximum over ranks is the strongest decision. 0 is CONTINUE; fits 6 bits."""
    return int(decision) << _CAUSE_BITS | _NUMBERS.get(decision.cause, 0)


def from_vote(vote: int) -> Decision:
    """Return the decision again, without the voter's details. An int that is no vote counts as CONTINUE."""
    value, cause = vote >> _CAUSE_BITS, vote & (1 << _CAUSE_BITS) - 1
    if value <= 0 or value > 2 or cause not in CAUSES:
        return Decision.CONTINUE
    return Decision(value, CAUSES[cause])


# Signals as votes: a handler only sets a flag, then calls the handler that was there before us.
#
# Forked children (loader workers, pools) inherit the handlers of their parent. In them the warning is not for the child to
# act on, and SIGTERM must end it as it would have without us, or ``terminate()`` would hang.


class Signals:
    """Listens to ``numbers``. ``got`` is the first that came (SIGTERM overrides a warning), 0 while none has."""

    def __init__(self, numbers: Iterable[int], wake: Callable[[], None]) -> None:
        self.got = 0
        self.told: float | None = None  # epoch seconds at which SIGTERM came
        self.on_told: Callable[[], object] = lambda: None
        self.leaving = False  # the loop was told to stop, by whatever: the signal that asked another rank may come late
        self.pid = os.getpid()
        self._wake = wake
        self._previous: dict[int, Any] = {}
        self._numbers = tuple(dict.fromkeys(numbers))
        self._over = False  # a later guard may still call the handler, or have it as the one before its own

    def listen(self) -> str:
        """Install the handlers; return "", or why it cannot be done (only the main thread of a process may)."""
        self._over = False
        try:
            for number in self._numbers:
                self._previous[number] = signal.signal(number, self._on_signal)
        except (ValueError, OSError) as error:
            self.ignore()
            return str(error)
        return ""

    def ignore(self) -> None:
        """Restore the former handler of each signal, unless ours was replaced since: then ours does from now on what the
        former one would. A process that SIGTERM asked to stop, and that leaves now, hears it no more: scancel tells it
        twice, by its step and by its supervisor, and the second one would end it by a signal after all."""
        self._over = True
        for number in self._previous:
            try:
                if signal.getsignal(number) == self._on_signal and not self._told_again(number):
                    signal.signal(number, self._before(number))
            except ValueError:  # not in the main thread
                continue

    def _before(self, number: int) -> Any:
        """Return the handler that was there before ours, and before those of guards that were closed since."""
        previous = self._previous.get(number)
        owner = getattr(previous, "__self__", None)
        if isinstance(owner, Signals) and owner._over and owner is not self:
            return owner._before(number)
        return signal.SIG_DFL if previous is None else previous

    def last_words(self) -> None:
        """Ignore a late warning at the interpreter's end, which takes our handlers away.

        A warning that was seen already in the file, and comes once more as a signal, must not kill a process that
        leaves in order. SIGTERM may, unless it is what asked the process or another rank to leave.
        """
        for number in self._previous:
            warns = not self._over and number != signal.SIGTERM
            if (warns or self._told_again(number)) and signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_IGN)

    def _told_again(self, number: int) -> bool:
        """Return whether ``number`` is the SIGTERM that asked this process to stop, or another rank of it, and which nothing
        else in it answers."""
        asked = self.leaving or self.got == signal.SIGTERM
        mine = self._before(number) is signal.SIG_DFL and os.getpid() == self.pid
        return number == signal.SIGTERM and asked and mine

    def taken(self) -> list[str]:
        """Return the names of the signals whose handler was replaced."""
        replaced = (n for n in self._previous if not self._over and signal.getsignal(n) != self._on_signal)
        return [_name(n) for n in replaced]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._before(number)
        if self._over:
            if self._told_again(number):
                return
            if previous is signal.SIG_DFL and signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL)  # it was put back by a library that had replaced it
                os.kill(os.getpid(), number)
        elif os.getpid() != self.pid:
            if number == signal.SIGTERM and not callable(previous):
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif not self.got or number == signal.SIGTERM:
            if number == signal.SIGTERM and self.told is None:
                self.told = time.time()
                self.on_told()
            self.got = number
            self._wake()
        if callable(previous):
            previous(number, frame)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


_CONTINUE = Decision.CONTINUE


class SeenSwitches(NamedTuple):
    """The switches at one look, in words."""

    raised: Identity | None = None  # the save switch, if it is up
    save: str = ""
    kill: str | None = None


class SwitchReader:
    """The run's switches as this process sees them, and which raising of the save switch it has answered."""

    def __init__(self, rundir: RunDir | None, voice: Voice) -> None:
        self._rundir, self._voice = rundir, voice
        self._folder = str(rundir.switches) if rundir else ""
        self.problem = ""  # a file in a switch's place that is no switch
        self._seen = SeenSwitches()
        self._answered: Identity | None = None  # the one a checkpoint was asked for
        self._to_clear: Identity | None = None  # the same, until that checkpoint is saved

    def look(self) -> bool:
        """Look at them, in the side thread; return whether they have changed."""
        before, self._seen = self._seen, self._look()
        return self._seen != before

    def wanted(self) -> Decision:
        """Return what they ask for, as last seen."""
        seen = self._seen
        if seen.kill is not None:
            return Decision(2, KILL_SWITCH, seen.kill)
        if seen.raised is not None and seen.raised != self._answered:
            return Decision(1, SAVE_SWITCH, seen.save)
        return _CONTINUE

    def _look(self) -> SeenSwitches:
        rundir, seen = self._rundir, SeenSwitches()
        if rundir is None:
            return seen
        try:
            names = files.among(self._folder, (SAVE, KILL))
        except OSError as error:
            self._voice.later(f"cannot read the switches in {self._folder}: {error.strerror}; training goes on")
            return self._seen  # what was up is up, as far as anybody can tell
        if SAVE in names:
            switch, raised = look_at_switch(rundir, SAVE)
            self._report(switch.problem)
            seen = seen._replace(raised=raised, save=_words(SAVE_SWITCH, switch.who, switch.why))
        if KILL in names:
            switch, _ = look_at_switch(rundir, KILL)
            self._report(switch.problem)
            if switch.health is Health.BAD:
                seen = seen._replace(kill=_words(KILL_SWITCH, switch.who, switch.why))
        return seen

    def _report(self, problem: str) -> None:
        if problem:
            self.problem = problem
            self._voice.later(problem)

    def answer(self) -> None:
        """Note that the loop is asked to save: the save switch as last seen is answered with that checkpoint."""
        self._answered = self._to_clear = self._seen.raised

    def hand_over(self) -> Identity | None:
        """Let a checkpoint in the background answer the save switch: ``saved`` of another one leaves it up."""
        answered, self._to_clear = self._to_clear, None
        return answered

    def take_back(self, answered: Identity | None) -> None:
        """Undo that when the checkpoint failed: the next one that is saved answers the switch."""
        if self._to_clear is None:
            self._to_clear = answered

    def take_down(self, answered: Identity, area: Path | None) -> None:
        """Take down the switch that is answered, and no other, in the side thread."""
        if self._rundir is None:
            return
        try:
            clear_answered(self._rundir, SAVE, answered, area)
        except OSError as error:
            problem = f"cannot lower the save switch: {error.strerror}; the next attempt will save once more"
            self._voice.later(problem)


class AttemptFiles:
    """Looks for what other processes leave for the ranks of this attempt: the warning of its end, and a newer attempt."""

    def __init__(self, place: RankContext, voice: Voice) -> None:
        self._number, self._voice = place.attempt, voice
        self._folder = str(place.attempt_dir or "")
        self._attempts = str(place.attempt_dir.parent) if place.attempt_dir else ""
        self.deadline: float | None = (
            None  # the end of the job, epoch seconds, where it was moved since the attempt began
        )
        self.newer: int | None = None  # an attempt that has begun after ours: from then on nothing of ours is written
        self._warning = _CONTINUE

    def look(self) -> bool:
        """Look at them, in the side thread; return whether they have changed."""
        before = self.says
        if self._folder:
            before_that = self.deadline
            self._warning = self._look_for_warning()
            self.superseded()
            if self.deadline != before_that:
                return True
        return self.says.cause != before.cause

    def look_for_deadline(self) -> None:
        """Read the end of the job where it was moved, in the side thread."""
        try:
            self.deadline = float(_first_line(Path(self._folder, DEADLINE)))
        except ValueError:  # there is none, or not yet a whole one
            return

    @property
    def says(self) -> Decision:
        """Return what follows from them, as last seen."""
        if self.newer is None:
            return self._warning
        return Decision(2, SUPERSEDED, f"superseded: attempt {self.newer} has begun, this one must not write any more")

    def _look_for_warning(self) -> Decision:
        """Look for the file that ``ftsupervise run`` drops for ranks that Slurm's signal cannot reach."""
        try:
            found = files.among(self._folder, (WARNING, DEADLINE))
            if DEADLINE in found:
                self.look_for_deadline()
            if WARNING not in found:
                return _CONTINUE
        except OSError as error:
            self._voice.later(f"cannot check for the warning in {self._folder}: {error.strerror}")
            return self._warning
        words = _first_line(Path(self._folder, WARNING))
        return Decision(2, WARNED, f"warning from ftsupervise run: {words}")

    def superseded(self) -> bool:
        """Return whether a newer attempt has begun. Checks now; unknown counts as no."""
        if self.newer is None and self._number is not None:
            try:
                self.newer = newer(self._attempts, self._number)
            except OSError:  # the check for the warning, in the same place, reports it
                return False
        return self.newer is not None


class StopReasons:
    """All reasons outside the loop to save or stop, as this process sees them. ``wake``: called when a signal has come;
    ``first_loss``: asks the ledger for that of the run."""

    def __init__(
        self,
        place: RankContext,
        limits: Limits,
        numbers: Iterable[int],
        wake: Callable[[], None],
        voice: Voice,
        first_loss: Callable[[], float | None],
    ) -> None:
        self._wake = wake
        self._even = False
        self._memory_says = self._gpu_says = _CONTINUE
        self.attempt = AttemptFiles(place, voice)
        self.signals = Signals(numbers, wake)
        gpu = GpuMemory() if limits.gpu_memory is not None else None
        self.memory = MemoryLimits(limits.memory, gpu, limits.gpu_memory, voice.later)
        policy, odd = loss_policy(os.environ)
        for problem in odd:
            voice.once(problem)
        self.loss = LossWatch(policy, place.rank, voice.say, first_loss, HeldBack(place))
        self.switches = SwitchReader(place.rundir, voice)
        self._ends = _find_ends(limits, place.rank)
        self.end, self._end_cause = min(self._ends)
        self._before, self._deadline = limits.stop_before, self.attempt.deadline

    def look(self, *, shared_directory: bool) -> None:
        """Look at the memory, and into the run directory, in the side thread. What has changed is answered at the next step."""
        self._even = not self._even  # the memory and the files of the attempt take turns
        changed = False
        if self._even and self.memory:
            changed = self.look_at_memory()
        elif shared_directory:
            changed = self.attempt.look()
        if shared_directory:
            changed = self.switches.look() or changed
        if changed:
            self._wake()

    def asks_for_the_end(self, now: float) -> bool:
        """Return whether the job's end is the next reason to stop: somebody may have moved it."""
        return now >= self.end and self._end_cause == TIME_LIMIT

    def _follow_the_end(self) -> None:
        moved, before = self.attempt.deadline, self._before
        if moved is not None and before is not None and moved != self._deadline:
            self._deadline = moved
            self._ends = [one for one in self._ends if one[1] != TIME_LIMIT]
            self._ends.append((time.monotonic() + moved - time.time() - before, TIME_LIMIT))
            self.end, self._end_cause = min(self._ends)

    def look_at_memory(self) -> bool:
        """Look at the memory of the host and the job; return whether it has run short."""
        before, self._memory_says = self._memory_says, _of(self.memory.check_host(time.monotonic()))
        return self._memory_says.cause != before.cause

    def reasons(self, now: float, *, shared_directory: bool) -> Decision:
        """Return the strongest reason known. ``shared_directory``: whether this rank looks there."""
        self._follow_the_end()
        if self.memory.has_gpu:
            self._gpu_says = _of(self.memory.check_gpu(now))
        want = max(self._sure_reasons(now), self.attempt.says, self._memory_says, self._gpu_says)
        want = max(self.switches.wanted(), want) if shared_directory else want
        return want if want.cause == SUPERSEDED else max(self._loss_says(), want)

    def _loss_says(self) -> Decision:
        trouble = self.loss.trouble
        if trouble is None or not trouble.stops:
            return _CONTINUE
        return Decision(2, trouble.kind, f"{trouble.kind}: {trouble.words}")

    def _sure_reasons(self, now: float) -> Decision:
        """Return the reasons that need no check: signals received, and the clock."""
        if self.signals.got == signal.SIGTERM:
            return Decision(2, TOLD_TO_STOP, "SIGTERM: the job ends soon, or is preempted or cancelled")
        if self.signals.got:
            return Decision(2, WARNED, f"warning signal {_name(self.signals.got)}")
        return _CONTINUE if now < self.end else Decision(2, self._end_cause)


def _of(short: Shortage | None) -> Decision:
    return _CONTINUE if short is None else Decision(2, short.cause, short.words)


def _find_ends(limits: Limits, rank: int) -> list[tuple[float, str]]:
    """Return the monotonic times at which to stop, with their causes; infinity if there is none."""
    now, ends = time.monotonic(), [(inf, "")]
    if limits.run_for is not None:
        ends.append((now + limits.run_for, RUN_TIME))
    if limits.stop_before is not None:
        end = scheduler.deadline_from_environment(os.environ)
        if end is None and rank == 0:
            end = scheduler.ask_slurm_for_the_deadline(os.environ)
        if end is not None:
            ends.append((now + end - time.time() - limits.stop_before, TIME_LIMIT))
    return ends


def _words(what: str, who: str, why: str) -> str:
    return f"{what} raised by {who}" + (f": {why}" if why else "")


def _first_line(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return "no reason given"
    with os.fdopen(fd, "rb") as file:
        line = file.read(1000).decode("utf-8", "replace").partition("\n")[0]
    return printable(line) or "no reason given"
