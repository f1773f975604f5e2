"""The guard's reasons to save or to stop. One check costs some 10 us; a slow file system makes checks rarer."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple, Protocol

from ftsupervise import scheduler
from ftsupervise.guard.held_back import HeldBack
from ftsupervise.guard.loss_policy import LossWatch, loss_policy, median
from ftsupervise.guard.settings import Limits, RankContext, Voice
from ftsupervise.host import files
from ftsupervise.host.memory import JOB, THROTTLED, HostMemory
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
    SAVE_DUE,
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
    1: SAVE_DUE,
    2: SAVE_SWITCH,
    3: HOST_MEMORY,
    4: GPU_MEMORY,
    5: RUN_TIME,
    6: TIME_LIMIT,
    7: WARNED,
    8: TOLD_TO_STOP,
    9: KILL_SWITCH,
    10: DIVERGES,
    11: NOT_A_NUMBER,
    12: SUPERSEDED,
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


class SaveClock:
    """When the next checkpoint is due, by ``checkpoints.every``: so long after the last one, or after the first step."""

    def __init__(self, every: float | None) -> None:
        self._every = every
        self._due: float | None = None

    def saved(self) -> None:
        """Begin anew: the loop saves now, or has saved."""
        if self._every is not None:
            self._due = time.monotonic() + self._every

    def wanted(self, now: float) -> Decision:
        if self._every is None:
            return _CONTINUE
        if self._due is None:
            self._due = now + self._every
        return _CONTINUE if now < self._due else Decision(1, SAVE_DUE)


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
        self.clock = SaveClock(limits.save_every)
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
        want = max(self.switches.wanted(), self.clock.wanted(now), want) if shared_directory else want
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


# ------------------------------------------------------------------------------------------
# The shares of host, job and GPU memory at which the loop leaves, and how long it is until then.
#
# The kernel, Slurm and CUDA end a run that has used up its memory, and say little. The guard leaves before that, in order. The
# trend is the median slope over the last hour at most: a checkpoint that comes and goes does not bend it, and what it cannot
# say yet it does not say.


# Reads how full the GPUs are that this process computes on, from PyTorch and the driver.
#
# CUDA is asked only where the program itself has begun to use it: a guard that initialised it would break every later fork and
# take some hundred megabytes. Memory that PyTorch's allocator holds but has given to no tensor is not used: the next tensor
# gets it. Before a loop leaves because of its GPU, garbage that Python has not collected yet and the allocator's empty blocks
# are given back once; this waits for the device, some milliseconds, and is done in the guard's check and never at each step.

_GIVE_BACK_EVERY = 600.0  # seconds


class CudaInterface(Protocol):
    """The part of ``torch.cuda`` that is asked. Sizes in bytes."""

    def is_initialized(self) -> bool: ...
    def device_count(self) -> int: ...
    def memory_reserved(self, device: int, /) -> int: ...
    def memory_allocated(self, device: int, /) -> int: ...
    def mem_get_info(self, device: int, /) -> tuple[int, int]: ...
    def empty_cache(self) -> None: ...


class GpuShare(NamedTuple):
    """``share``: used by whatever process, 0-1, without what our allocator holds in reserve."""

    device: int
    share: float


def cuda_of_torch() -> CudaInterface | None:
    """``torch.cuda`` where this process has initialised it; None otherwise. It is never imported or initialised here."""
    cuda: CudaInterface | None = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


class GpuMemory:
    """``find``: the interface, once there is one."""

    def __init__(self, find: Callable[[], CudaInterface | None] = cuda_of_torch) -> None:
        self._find = find
        self._gave_back = -inf

    def shares(self) -> tuple[GpuShare, ...]:
        """Return the share of each device on which this process holds memory; () without one. Raises whatever CUDA raises."""
        cuda = self._find()
        if cuda is None:
            return ()
        return tuple(_share(cuda, device) for device in range(cuda.device_count()) if cuda.memory_reserved(device))

    def give_back(self, now: float) -> bool:
        """Collect garbage and empty the allocator's cache, unless that was done minutes ago; return whether it was done."""
        cuda = self._find()
        if cuda is None or now - self._gave_back < _GIVE_BACK_EVERY:
            return False
        self._gave_back = now
        gc.collect()
        cuda.empty_cache()
        return True


def _share(cuda: CudaInterface, device: int) -> GpuShare:
    free, total = cuda.mem_get_info(device)
    in_reserve = max(0, cuda.memory_reserved(device) - cuda.memory_allocated(device))
    return GpuShare(device, 1 - min(total, free + in_reserve) / total)


_SAMPLES, _WINDOW, _APART = 24, 3600.0, 10.0  # at most; seconds that they span, and between two, at least
_ENOUGH, _LONG_ENOUGH = 8, 120.0  # samples and seconds before a trend is named
_SLOWED = "; beyond memory.high the kernel slows the job down"
_CLEAR = 0.75  # of all pairs of samples that show growth, for it to be one
_SOON = 7200.0  # seconds to the limit from which on it is said on stderr
_GPU_EVERY = 5.0  # seconds between two looks at the GPU: its allocator is asked, and the driver


class Shortage(NamedTuple):
    """A memory that is as full as its limit says. ``cause`` is HOST_MEMORY or GPU_MEMORY."""

    cause: str
    words: str


class UsageTrend:
    """The share of one memory over time."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._growth: float | None = None

    def add(self, now: float, share: float) -> None:
        """Add a sample. ``now``: monotonic seconds. Too early after the last sample it costs a comparison."""
        samples = self._samples
        if not self.is_due(now):
            return
        samples.append((now, share))
        while now - samples[0][0] > _WINDOW or len(samples) > 2 * _SAMPLES:
            samples.pop(0)
        self._growth = _growth(samples)

    def is_due(self, now: float) -> bool:
        samples = self._samples
        return not samples or now - samples[-1][0] >= max(_APART, (now - samples[0][0]) / _SAMPLES)

    @property
    def growth(self) -> float | None:
        """Return the share per second; 0.0: it does not grow; None: it cannot be said yet."""
        return self._growth

    def left(self, share: float, limit: float) -> float | None:
        """Return the seconds until the limit is reached; ``inf``: never, as it goes; None: it cannot be said yet."""
        if self._growth is None:
            return None
        return max(0.0, limit - share) / self._growth if self._growth > 0 else inf


def _growth(samples: list[tuple[float, float]]) -> float | None:
    if len(samples) < _ENOUGH or samples[-1][0] - samples[0][0] < _LONG_ENOUGH:
        return None
    slopes = [(v - u) / (t - s) for at, (s, u) in enumerate(samples) for t, v in samples[at + 1 :]]
    grows = sum(slope > 0 for slope in slopes) >= _CLEAR * len(slopes)
    return max(0.0, median(slopes)) if grows else 0.0


class _Gauge:
    """One memory with its limit and its trend."""

    def __init__(self, cause: str, name: str, limit: float, say: Callable[[str], object], then: str = "") -> None:
        self.cause, self.limit, self._name, self._say = cause, limit, name, say
        self._then = then  # what the kernel does beyond it, where it does not end the job
        self.trend = UsageTrend()
        self.share = 0.0
        self._told = False
        self._was_below: bool | None = None  # None: not looked yet

    def set(self, now: float, share: float) -> Shortage | None:
        self.share = share
        self.trend.add(now, share)  # where it is not due, this share is not taken
        growth, left = self.trend.growth, self.left
        grows = f", growing by {growth * 3600:.1%} an hour" if growth else ""
        if share >= self.limit:
            if self._was_below:
                return Shortage(self.cause, f"{self._name} {share:.1%} used, limit {self.limit:.0%}{grows}{self._then}")
            if self._was_below is None:
                self._was_below = False
                # others hold it, or the program itself needs it
                self._say(
                    f"{self._name} {share:.1%} used at the first step already, limit {self.limit:.0%}: the next attempt would "
                    "find the same, so the run goes on; it stops once that memory was below the limit and reaches it again"
                )
            return None
        self._was_below = True
        if left is not None and left < _SOON and not self._told:
            from ftsupervise.units import show_duration

            self._told = True
            self._say(
                f"{self._name} {share:.1%} used{grows}: {show_duration(left)} to the limit of {self.limit:.0%}{self._then}"
            )
        return None

    @property
    def left(self) -> float | None:
        return self.trend.left(self.share, self.limit)


def _fullest(seen: Iterable[tuple[float, Shortage | None]]) -> Shortage | None:
    """Return the one with the greatest share of those that are short."""
    return max(((share, short) for share, short in seen if short), default=(0.0, None))[1]


def _facts(name: str, gauges: Iterable[_Gauge]) -> dict[str, str]:
    """Return facts for the beat: the greatest share, and the seconds until the first is at its limit.

    "steady" where nothing grows, "" where that is not known.
    """
    found = list(gauges)
    known = [left for one in found if (left := one.left) is not None]
    left = min(known, default=None)
    words = "" if left is None else "steady" if left == inf else f"{left:.0f}"
    return {name: f"{max(one.share for one in found):.3f}", f"{name}_left": words} if found else {name: ""}


class MemoryLimits:
    """``memory``: share of the host's and the job's memory at which to leave; ``gpu_limit``: the same of the GPUs that ``gpu``
    sees. None: never. ``say`` prints a line. ``host``: where another memory than this process's is to be looked at."""

    def __init__(
        self,
        memory: float | None,
        gpu: GpuMemory | None,
        gpu_limit: float | None,
        say: Callable[[str], object],
        host: HostMemory | None = None,
    ) -> None:
        self.limit = memory or 1.0  # of the host and the job; snapshots stay below it
        self._say = say
        self._gauges: dict[str, _Gauge] = {}  # of the host and the job
        self._gpus: dict[int, _Gauge] = {}
        self._gpu_limit = gpu_limit or 1.0
        self._cuda = gpu
        self._gpu_due = -inf
        self._gpu_says: Shortage | None = None
        self._memory: HostMemory | None = None
        if memory is not None:
            try:
                self._memory = host or HostMemory()
            except (OSError, ValueError) as error:
                say(f"cannot read the memory use: {error}")

    def __bool__(self) -> bool:
        return self._memory is not None

    @property
    def has_gpu(self) -> bool:
        return self._cuda is not None

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory = self._cuda = None

    def facts(self) -> dict[str, str]:
        """Return facts for the beat: the watch cannot see this host. File pages are not counted."""
        try:
            for whose, share in (self._memory.shares() if self._memory is not None else {}).items():
                self._gauge(whose).share = share
        except (OSError, ValueError):
            self._gauges.clear()
        gpus = _facts("gpu_memory", self._gpus.values()) if self._gpus else {}
        return {**_facts("memory", self._gauges.values()), **gpus}

    def _gauge(self, whose: str) -> _Gauge:
        if whose not in self._gauges:
            throttled = whose == THROTTLED
            name = f"memory.high of the {JOB}" if throttled else f"{whose} memory"
            self._gauges[whose] = _Gauge(HOST_MEMORY, name, self.limit, self._say, _SLOWED if throttled else "")
        return self._gauges[whose]

    def check_host(self, now: float) -> Shortage | None:
        """Return the memory of the host or the job, if it is short. ``now``: monotonic."""
        if self._memory is None:
            return None
        # far from the limit the cheap look, which takes file pages for used, is enough; not so for the trend
        due = any(one.trend.is_due(now) for one in self._gauges.values()) or not self._gauges
        try:
            shares = self._memory.shares(0.0 if due else self.limit)
        except (OSError, ValueError) as error:
            self._say(f"cannot read the memory use: {error}")
            self._memory.close()
            self._memory = None
            self._gauges.clear()
            return None
        return _fullest((share, self._gauge(whose).set(now, share)) for whose, share in shares.items())

    def check_gpu(self, now: float) -> Shortage | None:
        """Return the memory of a GPU, if it is short; asked in the loop's own thread, as CUDA likes it. ``now``: monotonic."""
        if self._cuda is None or now < self._gpu_due:
            return self._gpu_says
        self._gpu_due = now + _GPU_EVERY
        try:
            shares = self._cuda.shares()
            if any(one.share >= self._gpu_limit for one in shares) and self._cuda.give_back(now):
                shares = self._cuda.shares()
        except Exception as error:  # CUDA raises what it likes, and after a fault of the device for ever
            self._say(f"cannot read the GPU's memory: {type(error).__name__}: {error}")
            self._cuda = self._gpu_says = None
            self._gpus.clear()
            return None
        for one in shares:
            if one.device not in self._gpus:
                self._gpus[one.device] = _Gauge(GPU_MEMORY, f"memory of GPU {one.device}", self._gpu_limit, self._say)
        self._gpu_says = _fullest((one.share, self._gpus[one.device].set(now, one.share)) for one in shares)
        return self._gpu_says
