"""The nouns of every room: frozen values with no behaviour that touches the world. Standard library, without dataclasses.

Times are aware UTC ``datetime``; durations ``timedelta``; sizes bytes (``int``); shares 0–1 (``float``).
Annotations are no texts here, nor in other modules that ``status`` imports for their records (no ``from __future__ import
annotations``): typing compiles each text, and every start would wait for it.
"""

from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

from ftsupervise import truth
from ftsupervise.truth import (
    Beginning,
    GivenCheckpoint,
    LeftCheckpoint,
    LossTrouble,
    NotFrom,
    OnlyTold,
    OutputPart,
    PercentReached,
    Resumed,
    TornSave,
)
from ftsupervise.units import show_duration


class FailureKind(str, Enum):
    """Classes of failures. Each has a budget of its own (``launch.restart.budgets``)."""

    CODE = "code"  # the user's own program left with an exit code
    SIGNAL = "signal"  # killed by a signal nobody of us sent
    MEMORY = "memory"  # out of host or GPU memory
    NODE = "node"  # a node went away, or a step could not be started on it
    DISK = "disk"  # no space, or quota
    START = "start"  # the command could not be started at all
    HANG = "hang"  # no progress, ended by us or by a collective's own timeout
    NUMBERS = "numbers"  # the loss is no number, or a result did not hold when computed again
    GIVEN_UP = "given-up"  # the program itself says that starting it again is no use
    LOST = "lost"  # nobody lived to write down how it ended


class Failure(NamedTuple):
    """A failure as the brake counts it."""

    kind: FailureKind
    sign: str  # what it is known by: "exit 1", "killed by SIGKILL", "node failure"
    detail: str = ""  # the line of the output that says most; "no output"
    error: str = ""  # the name of the exception, where there is one: "ModuleNotFoundError"

    def words(self) -> str:
        return f"{self.sign} ({self.error})" if self.error else self.sign

    def same(self, other: "Failure") -> bool:
        """Return whether it is the same failure again. srun can lose the end of a rank's output when it ends its step, and
        with it the exception's name."""
        return self.sign == other.sign and (self.error == other.error or not (self.error and other.error))


class CauseKind(str, Enum):
    """The kind of cause that ended an attempt. The values are the words of the pages, the guard's too."""

    EXIT = "exit"  # a process left with ``code``
    SIGNAL = "killed by a signal"
    DIED = "died"  # how is not known
    MEMORY = "out of memory"
    NODE = "node failure"
    LAUNCH = "launch failed"
    NO_STEP = "srun could not create a step"
    NO_START = "could not start"
    NOT_STARTED = "not started"
    HANG = "hang"
    MOVED = "the lighthouse is at another address now"  # of a replica group
    FINISHED = "finished"
    KILL_SWITCH = truth.KILL_SWITCH
    WARNING = truth.WARNED
    TIME_LIMIT = truth.TIME_LIMIT
    RUN_TIME = truth.RUN_TIME
    HOST_MEMORY = truth.HOST_MEMORY
    GPU_MEMORY = truth.GPU_MEMORY
    NOT_A_NUMBER = truth.NOT_A_NUMBER
    DIVERGES = truth.DIVERGES
    TOLD = truth.TOLD_TO_STOP
    CANCELLED = "cancelled or preempted"
    PREEMPTED = "preemption"
    REQUEUED = "put back into the queue"  # by ``scontrol requeue``
    INTERRUPTED = "interrupted"
    SUPERSEDED = truth.SUPERSEDED
    LOST = "ended without a record"  # no end on record, and its process is gone
    UNKNOWN = "unknown"  # no end on record, and nothing can be said from here
    OTHER = "other"  # ``text`` says it: Slurm's own reason, or a page without more


class Standstill(str, Enum):
    """The state of the ranks that a hang is about."""

    STOPPED = "stopped"
    GONE = "gone"
    BUSY = "uses CPU"
    IDLE = "uses no CPU"

    def words(self, several: bool = False) -> str:
        makes, be = ("make", "are") if several else ("makes", "is")
        if self is Standstill.BUSY:
            return f"use{'' if several else 's'} CPU and {makes} no step"
        return f"{makes} no step" if self is Standstill.IDLE else f"{be} {self.value}"


class NodeRanks(NamedTuple):
    """Ranks of one node. Either may be unknown."""

    node: str = ""
    ranks: Annotated[str, 2000] = ""  # as Slurm writes them: "5", "0-2,7"

    def words(self) -> str:
        ranks = f"rank{'' if self.ranks.isdigit() else 's'} {self.ranks}" if self.ranks else ""
        return " ".join(filter(None, (ranks, self.node and f"on {self.node}")))


class Cause(NamedTuple):
    """The cause of an attempt's end. ``words()`` renders it for people; all other code reads the fields."""

    kind: CauseKind
    at: tuple[NodeRanks, ...] = ()  # where, as far as it is known
    more: int = 0  # ranks beside those
    signal: int = 0  # that killed it, or told it to leave
    code: Optional[int] = None  # exit code of what it tells of
    left: Optional[int] = None  # exit code of the command, where that is another
    how: Optional[Standstill] = None
    phase: str = ""
    step: Optional[int] = None
    waited: float = 0.0  # seconds without progress
    text: Annotated[str, 2000] = ""  # in others' words: Slurm's reason, why nothing was started
    then: "Cause | None" = None  # how the command ended after that
    late: bool = False  # it was told to leave and did not in time
    beside: bool = False  # ``then`` may have come before it: that was not seen

    @property
    def first(self) -> "Cause":
        """Return the first part of it that names a place."""
        return self if self.at or self.then is None else self.then.first

    @property
    def of_ranks(self) -> bool:
        """Return whether it names ranks."""
        return any(one.ranks for one in self.at)

    @property
    def killed_by(self) -> int:
        """Return the number of the signal, also where only the exit code shows it; 0 if there was none."""
        return self.signal or (signal_in(self.code) if self.kind is CauseKind.EXIT else 0)

    @property
    def orderly(self) -> bool:
        """Return whether the end was asked for, and the loop left in order: no one needs to be woken. After the warning a
        program may leave with a code of its own, by which its job script knows that there is more to do."""
        then = self.then
        left = then is None or then.orderly
        if then is not None and self.kind is CauseKind.WARNING:
            left = left or (then.kind is CauseKind.EXIT and not then.killed_by)
        return left and (self.kind in _ORDERLY or (self.kind is CauseKind.EXIT and self.code == 0))

    def words(self) -> str:
        """Return the words for people: "rank 1 on node-1 killed by SIGKILL (exit 137)". They hold one exit code, that of
        the rank where it left with one, and not that of its launcher too."""
        told = self.left if self.kind is not CauseKind.EXIT else None
        if self.signal and signal_in(told) not in (0, self.signal):
            told = None  # it says by what the others were ended then
        said = self._words() + (f" (exit {told})" if told is not None else "")
        said += ", and it did not leave in time" if self.late else ""
        if self.then is None:
            return said
        if self.beside:
            return f"{said}, and {self.then.words()}: which of them came first is not known"
        return f"{said}: {self.then.words()}" if self.kind is CauseKind.NODE else f"{said}, then {self.then.words()}"

    @property
    def _several(self) -> bool:
        return len(self.at) + self.more > 1 or any(not one.ranks.isdigit() for one in self.at if one.ranks)

    def hang_words(self) -> str:
        """Say which ranks stand still and how, since when and where."""
        where = f"at step {self.step}" if self.step is not None else "before the first step" if self.phase else ""
        who = ", ".join(one.words() for one in self.at) + (f" and {self.more} more" if self.more else "")
        stands = f"{who} {(self.how or Standstill.IDLE).words(self._several)}" if who else "all ranks wait"
        waited = f"{self.waited:.1f} s" if self.waited < 120 else show_duration(round(self.waited))
        return " ".join(filter(None, (f"{stands}; no progress for {waited}", where, self.phase and f"({self.phase})")))

    def _words(self) -> str:
        kind, where = self.kind, ", ".join(one.words() for one in self.at)
        if kind is CauseKind.OTHER:
            return self.text
        if kind is CauseKind.HANG:
            return f"hang: {self.hang_words()}"
        if kind in (CauseKind.NODE, CauseKind.LAUNCH) and not self.text:
            return f"{kind.value} {where}".rstrip()
        if kind is CauseKind.NO_START:
            return f"{kind.value} (exit {self.code})"
        if kind in (CauseKind.NODE, CauseKind.NO_STEP):
            return f"{kind.value} ({self.text})"
        if kind is CauseKind.CANCELLED and self.text:  # who did it is known
            return f"cancelled {self.text} ({_signal_name(self.signal)})"
        if kind in (CauseKind.CANCELLED, CauseKind.INTERRUPTED):
            return f"{kind.value} ({_signal_name(self.signal)})"
        if kind in (CauseKind.EXIT, CauseKind.SIGNAL, CauseKind.DIED, CauseKind.MEMORY):
            return f"{where} {self.end_words()}".lstrip()
        if kind is CauseKind.SUPERSEDED and self.text:
            return f"superseded by {self.text}"
        return f"{kind.value}: {self.text}" if self.text else kind.value

    def end_words(self) -> str:
        """Return how a process ended, without where: "exit 3"."""
        if self.kind is CauseKind.SIGNAL:
            told = self.signal == _SIGTERM and self.at  # by srun, with the others
            return f"{'ended' if told else 'killed'} by {_signal_name(self.signal)}"
        if self.kind is CauseKind.EXIT:
            by = 0 if self.at else signal_in(self.code)  # what a shell, srun or torchrun make of a child's signal
            return f"exit {self.code}{f' (a process killed by {_signal_name(by)})' if by else ''}"
        if self.kind is CauseKind.MEMORY and not self.at:
            return "out of memory (the kernel or Slurm killed a process)"
        return self.text or self.kind.value


_SIGTERM = 15
_ORDERLY = (CauseKind.FINISHED, CauseKind.KILL_SWITCH, CauseKind.WARNING, CauseKind.TIME_LIMIT, CauseKind.RUN_TIME)


def ended(code: Optional[int], node: str, rank: str) -> "Cause":
    """Return how a rank ended whose exit code is ``code``, negative for a signal; None where it is not known."""
    at = (NodeRanks(node, rank),)
    if code is None:
        return Cause(CauseKind.DIED, at)
    return Cause(CauseKind.SIGNAL, at, signal=-code) if code < 0 else Cause(CauseKind.EXIT, at, code=code)


def signal_in(code: Optional[int]) -> int:
    """Return the signal in an exit code above 128; 0 if there is none."""
    return code - 128 if code is not None and 128 < code < 128 + 65 else 0


def _signal_name(number: int) -> str:
    from ftsupervise.units import signal_name

    return signal_name(number)


class Reached(NamedTuple):
    """The progress of an attempt, as far as its beats tell."""

    first: Optional[int] = None  # first step
    last: Optional[int] = None  # last step
    saved: Optional[int] = None  # newest step that was saved
    first_at: Optional[float] = None  # epoch seconds at which the last rank had made its first step
    saving: Optional[float] = None  # seconds in saves
    active_at: Optional[float] = None  # epoch seconds of the last step, or of the last change of a phase
    trouble: Optional[LossTrouble] = None  # with the loss, that was not over when it ended
    first_loss: Optional[float] = None
    because: Optional[tuple[NodeRanks, str]] = None  # the rank that asked to stop, and its words
    source: str = ""  # who told the steps: one of ``SOURCES``; "": not known
    epoch: Optional[int] = None  # at the first step, where the output says so


GUARD, OUTPUT, NOBODY = SOURCES = ("guard", "output", "nobody")  # who tells the steps of an attempt


class Claim(NamedTuple):
    """An attempt that is ours."""

    number: int
    folder: Path


class Attempt(NamedTuple):
    """One start of the command, as the ledger has it, and as its supervisor judges it before that."""

    number: int
    job_id: str
    started: datetime
    host: str = ""
    nodes: tuple[str, ...] = ()
    ended: Optional[datetime] = None
    exit_code: Optional[int] = None  # None while it runs, or when nobody lived to write it down
    cause: Optional[Cause] = None  # None while it runs
    first_step: Optional[int] = None
    last_step: Optional[int] = None
    note: str = ""
    failure: Optional[Failure] = None  # None if it was none
    saved: Optional[int] = None  # newest step the loop said it had saved
    ready: Optional[float] = None  # seconds from the start to the first step
    then: str = ""  # what was done about it: "restarted in place", "its supervisor left", "stopped by the brake"
    stop_signal: int = 0  # of one without an end: it had been asked to stop by this
    hardware: str = ""  # what a GPU or a node said of a fault of its own
    resumed: Optional[Resumed] = None  # None where its loop did not ask the guard for a checkpoint
    begins: Optional[Beginning] = None  # None where no rank of its job had a snapshot in memory
    not_from: Optional[NotFrom] = None  # the snapshot that it was to begin from, and did not
    held: Optional[int] = None  # of one without an end: newest step whose snapshots every buddy holds
    kept: Optional[int] = None  # step that was in memory only and was kept on the disk when its job ended
    saving: Optional[float] = None  # seconds in saves; None where the loop does not say
    worked: Optional[float] = None  # seconds from the start to the last sign of progress
    braked: bool = False  # the brake came on after it
    outputs: tuple[OutputPart, ...] = ()  # files; none where it goes to a pipe or a terminal
    heard: Optional[datetime] = None  # of one without an end: its supervisor's last page
    trouble: Optional[LossTrouble] = None  # with the loss, that was not over when it ended
    first_loss: Optional[float] = None  # the first that any rank reported
    source: str = ""  # who told the steps: one of ``SOURCES``; "": not known
    epoch: Optional[int] = None  # at the first step, where the output says so
    written: Optional[LeftCheckpoint] = None  # None where it has a guard, or nobody has looked
    given: Optional[GivenCheckpoint] = None  # None where ``launch.resume`` had none for it, or is not set
    torn: tuple[TornSave, ...] = ()  # checkpoints that were torn when it began
    unread: str = ""  # where no step was found in its output: in words
    percent: Optional[PercentReached] = None  # where it prints a share of its work, and no step
    begun_again: int = 0  # how often Slurm had put its job back into the queue and begun it again by then
    observes: tuple[str, ...] = ()  # decisions that its launch says are only told
    observed: tuple[OnlyTold, ...] = ()  # decisions on it that were only told

    @property
    def kind(self) -> Optional[CauseKind]:
        """Return the kind of its cause; None while it runs."""
        return None if self.cause is None else self.cause.kind

    @property
    def was_asked(self) -> bool:
        """Return whether it has ended because somebody or something asked for it, and not of a fault."""
        return self.failure is None and self.kind not in (None, CauseKind.LOST, CauseKind.UNKNOWN)

    @property
    def has_failed(self) -> bool:
        """Return whether it failed, or was lost."""
        return self.failure is not None or (self.ended is None and self.kind is CauseKind.LOST)

    @property
    def words(self) -> str:
        """Return the cause, for people; "" while it runs."""
        return "" if self.cause is None else self.cause.words()

    @property
    def sign(self) -> str:
        """Return the failure as the brake counts it: "exit 1 (ValueError)"; "" if it was none."""
        return "" if self.failure is None else self.failure.words()

    @property
    def line(self) -> str:
        """Return the line of the output that decides, where the cause does not say it already."""
        detail = self.failure.detail if self.failure is not None else ""
        return "" if detail in self.words else detail

    def why(self) -> str:
        """Return the cause with the line that decides, for people: "exit 1: ValueError: no such shape"."""
        return f"{self.words}: {self.line}" if self.line else self.words


class JobState(Enum):
    """Slurm's base states (squeue(1), JOB STATE CODES), and OTHER for a word a newer Slurm may invent."""

    PENDING = "PENDING"
    CONFIGURING = "CONFIGURING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    SUSPENDED = "SUSPENDED"
    STOPPED = "STOPPED"
    REQUEUED = "REQUEUED"
    REQUEUE_HOLD = "REQUEUE_HOLD"
    REQUEUE_FED = "REQUEUE_FED"
    EXPEDITING = "EXPEDITING"  # it has lost a node, and begins again as soon as there are enough
    SPECIAL_EXIT = "SPECIAL_EXIT"
    RESIZING = "RESIZING"
    SIGNALING = "SIGNALING"
    STAGE_OUT = "STAGE_OUT"
    RESV_DEL_HOLD = "RESV_DEL_HOLD"
    REVOKED = "REVOKED"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    OTHER = "OTHER"

    @property
    def ended(self) -> bool:
        return self in _ENDED

    @property
    def waiting(self) -> bool:
        return self in _WAITING


_ENDED = frozenset(
    {
        JobState.COMPLETED,
        JobState.CANCELLED,
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.PREEMPTED,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
        JobState.OUT_OF_MEMORY,
        JobState.REVOKED,
    }
)
_WAITING = frozenset(
    {
        JobState.PENDING,
        JobState.REQUEUED,
        JobState.REQUEUE_HOLD,
        JobState.REQUEUE_FED,
        JobState.EXPEDITING,
        JobState.SPECIAL_EXIT,
        JobState.RESV_DEL_HOLD,
    }
)


class Job(NamedTuple):
    """One line of the queue: a job, or an array member, or the still pending rest of an array ("88_[3-10%1]")."""

    id: str  # as squeue prints it: "87", "88_3", "88_[4-10%1]"
    base_id: str  # the id of the job or of its whole array: "87", "88"
    name: str
    user: str
    state: JobState
    reason: str = ""  # Slurm's word: "Dependency", "JobHeldUser" …; "" when there is none
    dependency: str = ""
    comment: str = ""
    nodes: tuple[str, ...] = ()
    submit_time: Optional[datetime] = None
    start_time: Optional[datetime] = None  # expected start while pending, if Slurm has an opinion
    end_time: Optional[datetime] = None  # None: unlimited, or not known
    raw_id: str = ""  # SLURM_JOB_ID of this very member
    directory: str = ""  # it was submitted in, or for; "" when that is not known
    nodes_wanted: int = 1
    partitions: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # nodes that it may not get
    features: str = ""  # its --constraint


class Submitted(NamedTuple):
    """The answer of a scheduler that took a script."""

    job_id: str
    found_again: bool = False  # sbatch failed ambiguously and the job turned out to be there
