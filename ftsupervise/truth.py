"""The words that the guard and the quick commands need: health, switches and beats.

They stand apart from ``model.py`` because a rank that starts, and a ``kill`` typed in a hurry, need nothing else of it.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from enum import Enum
from types import MappingProxyType
from typing import Annotated, NamedTuple, Optional

# the exit code that says: starting it again is no use before a person has acted. Source: NVIDIA's ft_launcher
GIVEN_UP = 93
# Phases of a rank, as the guard tells them.
START = "start"
TRAIN = "train"
SAVE = "save"  # it saves a checkpoint, or waits for others that do
UNTOLD = ""  # the guard reports none


class Health(Enum):
    """The result of a probe. ``UNKNOWN`` is a value of its own: it neither fires nor resolves."""

    OK = "ok"
    BAD = "bad"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, bad: Optional[bool]) -> "Health":
        """Return the health; ``bad`` None: it could not be seen."""
        return cls.UNKNOWN if bad is None else cls.BAD if bad else cls.OK


class SwitchState(NamedTuple):
    """A switch as found: up or not, and who raised it and why if it says so."""

    name: str  # "kill-switch" or "save-switch"
    health: Health  # OK: not raised; BAD: raised; UNKNOWN: could not look
    who: str = ""
    why: str = ""
    since: Optional[datetime] = None
    problem: str = ""  # why a file in its place is not accepted as a switch ("a symbolic link", "1 GB long" …)

    @property
    def up(self) -> bool:
        return self.health is Health.BAD


# Why a loop is asked to save or to stop, in the words of the ledger. Those that end an attempt are kinds of causes too (model).
SAVE_SWITCH = "save switch"
SAVE_DUE = "a checkpoint is due"
HOST_MEMORY = "host memory"
GPU_MEMORY = "GPU memory"
RUN_TIME = "run time reached"
TIME_LIMIT = "time limit"
WARNED = "warning signal"
TOLD_TO_STOP = "asked to stop (SIGTERM)"  # before it is known what for
KILL_SWITCH = "kill switch"
DIVERGES = "loss diverges"
NOT_A_NUMBER = "loss is not a number"
SUPERSEDED = "superseded"  # a newer attempt has begun: stop, and write nothing any more


class LossTrouble(NamedTuple):
    """A loss that is no number or that diverges, as the rank that was given it says."""

    kind: str = NOT_A_NUMBER  # or DIVERGES
    since: Optional[int] = None  # the first step whose loss showed it
    step: Optional[int] = None  # the last one that did
    rank: int = 0
    words: Annotated[str, 500] = ""  # the numbers
    then: str = "warn"  # what the settings say: "warn", "stop", or "resume" from an older checkpoint
    observed: bool = False  # it would have stopped the run, and that is only told

    @property
    def stops(self) -> bool:
        return self.then in ("stop", "resume") and not self.observed


# decisions that may be only told (``act`` in the settings)
HANG, BRAKE, EXCLUSION, RANKS, BACK = DECISIONS = ("hang", "brake", "exclusion", "exit_analysis", "going_back")


class OnlyTold(NamedTuple):
    """A decision that was not carried out."""

    decision: str = ""  # one of ``DECISIONS``
    what: Annotated[str, 500] = ""  # would have been done: "restarted it"
    why: Annotated[str, 1000] = ""
    at: Optional[datetime] = None
    step: Optional[int] = None  # that the run had reached
    node: str = ""  # that it is about
    then: Annotated[str, 1000] = ""  # what happened without it; "": nothing yet, or the end of the attempt says it
    standing: bool = False  # each attempt comes to it anew, while its reason lasts

    def words(self) -> str:
        """Return it for people: would have restarted it: rank 3 on node-1 is stopped."""
        return f"would have {self.what}: {self.why}"

    def repeats(self, before: "Iterable[OnlyTold]") -> bool:
        """Return whether it is among the decisions of the attempt before, and has been told with them."""
        return any(
            (one.decision, one.node) == (self.decision, self.node)
            and (self.decision == BRAKE or (self.standing and one.what == self.what))
            for one in before
        )


class Beat(NamedTuple):
    """A rank's newest proof of progress."""

    rank: int
    step: Optional[int]
    phase: str
    at: datetime
    pid: int = 0
    host: str = ""
    facts: Mapping[str, str] = MappingProxyType({})
    trouble: Optional[LossTrouble] = None  # with its loss, while there is any


class HeartbeatSample(NamedTuple):
    """The state of a rank on its page in node-local memory (``heartbeat_page.py``).

    Times: CLOCK_MONOTONIC of that host, seconds.
    """

    rank: int
    attempt: int
    pid: int
    pid_start: int  # clock ticks since boot: with the pid an identity
    step: Optional[int]
    phase: str
    stepped: float  # when the last step was made; before the first one, when the page was
    beaten: float  # the last sign of life of any kind
    leaving: bool = False
    failed: bool = False  # an exception is on its way out
    code: Optional[int] = (
        None  # the exit code with which its interpreter ends after a failure; its process may take long
    )
    since: float = 0.0  # when its phase began
    saving: float = 0.0  # seconds that it has spent in saves that are over
    saved: Optional[int] = None  # newest step that it has saved
    first: Optional[int] = None  # the first step that it made
    first_at: float = 0.0  # when it had made it
    loss: Optional[float] = None  # the newest that it reported
    last_step: Optional[int] = None  # the one after which the training is complete, where it said so
    told: bool = False  # SIGTERM has come to it


class Tally(NamedTuple):
    """The counts of the guards of some ranks, as one (``ranks/tally.py``). Times as in ``RankState``."""

    first: Optional[int] = None  # the lowest first step
    first_at: Optional[float] = None  # when the last of them had made its first step
    last: Optional[int] = None  # the highest step
    saved: Optional[int] = None  # newest step that one of them has saved
    saving: float = 0.0  # seconds in saves, of the one that spent most
    active: Optional[float] = None  # the last step of any of them, or the last change of its phase
    loss: Optional[float] = None  # of the lowest rank that reported one
    loss_rank: Optional[int] = None
    last_step: Optional[int] = None  # the one after which the training is complete, where one said so


class RankState(NamedTuple):
    """A rank as the job ring knows it, wherever it runs. Times are the job ring's own CLOCK_MONOTONIC, in seconds."""

    rank: int
    node: str
    step: Optional[int]
    phase: str
    stepped: float
    beaten: float
    seen: float  # when we last heard of it at all
    pid: int = 0
    state: str = ""  # one letter as in /proc/PID/stat, "X" when the process is gone, "" when nobody could look
    cpu: Optional[float] = None  # seconds of CPU it has used so far, None when nobody could look
    leaving: bool = False
    read: bool = False  # nobody in the loop told it: it was read from the output, and proves nothing alone


class SkippedBatches(NamedTuple):
    """Batches that the loop was told to skip when it went on from ``step``."""

    step: int
    batches: int


class Resumed(NamedTuple):
    """The checkpoint that an attempt began from, and why, as its guard recorded it. ``words()`` renders it for people."""

    checkpoint: str = ""  # its name; "": there was none
    step: Optional[int] = None
    committed: Optional[datetime] = None
    at: Optional[datetime] = None  # when it was chosen
    why: Annotated[str, 2000] = ""
    older: int = 0  # checkpoints behind it
    passed: tuple[Annotated[str, 2000], ...] = ()  # newer ones, each with the reason that it was not taken
    set_aside: str = ""  # the one that this attempt put into the quarantine
    set_aside_step: Optional[int] = None
    more_aside: int = 0  # others that were set aside with it
    skipped: tuple[SkippedBatches, ...] = ()  # on the way to here, the last at this very step
    damaged: tuple[
        Annotated[str, 2000], ...
    ] = ()  # checkpoints whose bytes were not those that were saved, with the reason
    refused: Annotated[str, 2000] = (
        ""  # why the attempt could not begin, and a new start is no use before a person has acted
    )

    @property
    def begun(self) -> bool:
        """Return whether the attempt began, from a checkpoint or anew. One that was refused is no part of the run's way."""
        return not self.refused

    @property
    def skip(self) -> int:
        """Return the batches to skip before the first step of this attempt."""
        return sum(one.batches for one in self.skipped if one.step == (self.step or 0))

    def same(self, other: "Resumed") -> bool:
        """Return whether it is the same checkpoint, not a later one of the same name."""
        return (self.checkpoint, self.committed) == (other.checkpoint, other.committed)

    def words(self) -> str:
        """Return "from step-00000080 (step-00000100 was set aside)"."""
        others = f" and {self.more_aside} more were" if self.more_aside else " was"
        more = [f"{self.set_aside}{others} set aside"] if self.set_aside else []
        more += [f"{len(self.passed)} newer passed over"] if self.passed else []
        more += [f"{len(self.damaged)} damaged"] if self.damaged else []
        more += [f"{self.skip} batches are skipped"] if self.skip else []
        if self.refused:
            return f"refused: {self.refused}"
        said = f"from {self.checkpoint}" if self.checkpoint else "from the beginning"
        return said + (f" ({'; '.join(more)})" if more else "")


class LeftCheckpoint(NamedTuple):
    """The newest thing like a checkpoint that an attempt without a guard wrote, and where it was kept from a start over it."""

    path: Annotated[str, 4096] = ""
    step: Optional[int] = None  # as its name says
    at: Optional[datetime] = None  # when it was last written
    size: int = 0
    kept: Annotated[str, 4096] = ""  # "": it was not kept
    how: Annotated[str, 300] = ""  # in which way, or why not
    by_job: bool = False  # it lies in a folder that has the number of its job in its name: the next job's is another


class GivenCheckpoint(NamedTuple):
    """The checkpoint that the command of an attempt was told to go on from, by ``launch.resume``."""

    path: Annotated[str, 4096] = ""
    step: Optional[int] = None  # as its name says
    at: Optional[datetime] = None  # when it was last written


class TornSave(NamedTuple):
    """A checkpoint whose save was cut off, as an attempt found it before its command began. ``words()`` renders it."""

    path: Annotated[str, 4096] = ""
    why: Annotated[str, 2000] = ""  # a clause
    attempt: int = 0  # that ended while it was saved
    whole: Annotated[str, 4096] = ""  # the newest older one of its kind that is whole; "": none lies beside it
    aside: Annotated[str, 4096] = ""  # where it was moved; "": it stays where it is
    stays: Annotated[str, 500] = ""  # why, as a clause

    def words(self) -> str:
        """Return "checkpoint-500 is torn: ...; attempt 3 ended while it was saved; checkpoint-400 is the newest whole one"."""
        name, whole = self.path.rpartition("/")[2], self.whole.rpartition("/")[2]
        good = f"{whole} is the newest whole one" if whole else "no whole one of its kind lies beside it"
        return f"{name} is torn: {self.why}; attempt {self.attempt} ended while it was saved; {good}"

    def then(self) -> str:
        """Return what was done about it, and the command for the opposite, which may be long."""
        from shlex import quote  # here: a rank that starts has no need of it

        if self.aside:
            return f"it is set aside; to bring it back: mv -T {quote(self.aside)} {quote(self.path)}"
        return self.now()

    def now(self) -> str:
        """Return where it is now; the command that sets it aside where it stays."""
        from shlex import quote  # as above

        if self.aside:
            return f"it is set aside: {self.aside}"
        return f"it stays: {self.stays}; to set it aside: ftsupervise checkpoints set-aside {quote(self.path)}"


class LinesWithoutStep(NamedTuple):
    """An output without a step. ``asked``: a person's own regular expression was looked for."""

    lines: int
    asked: bool = False

    def words(self) -> str:
        """Return it as half a sentence, with what helps."""
        lines = f"{self.lines:,} line{'s' if self.lines != 1 else ''}"
        if self.asked:
            return f"no step found in {lines}: none fits launch.heartbeat.log"
        return f"no step found in {lines}: launch.heartbeat says which number it is"


class PercentReached(NamedTuple):
    """How far an attempt has come by its own words, in percent. Times are in epoch seconds."""

    last: float
    first: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0
    of: Annotated[str, 200] = ""  # what the line looks like without its numbers: another one is another counter

    def pace(self) -> Optional[float]:
        """Return the points a second; None where too little was seen."""
        seconds = self.last_at - self.first_at
        return (self.last - self.first) / seconds if seconds >= 10 and self.last > self.first else None

    def left(self) -> Optional[float]:
        """Return the seconds from its last line to 100 %; None where that is not known."""
        pace = self.pace()
        return None if not pace or self.last >= 100 else (100 - self.last) / pace

    def words(self) -> str:
        return show_percent_points(self.last)


def show_percent_points(percent: float) -> str:
    """Return "4.1 %", and "63 %" where no more is known."""
    return f"{percent:.1f}".removesuffix(".0") + " %"


class NotFrom(NamedTuple):
    """The snapshot that an attempt was to begin from and did not, as its guard recorded: its end says nothing against it."""

    step: Optional[int] = None
    made: Optional[int] = None  # the attempt that made it
    why: Annotated[str, 2000] = ""  # a clause

    def words(self) -> str:
        """Return "the snapshot of step 34 was not used: code 'v1' made it, and this is code 'v2'"."""
        return f"the snapshot of step {self.step} was not used: {self.why}"


class Beginning(NamedTuple):
    """The place where an attempt begins, as its supervisor chose it. ``words()`` renders it for people."""

    source: str = (
        ""  # "memory", "kept" on the disk from an older job's memory, "disk", or "start" where none offers a step
    )
    step: Optional[int] = None
    copies: int = 0  # ranks whose snapshot came from another node
    again: Optional[int] = None  # steps that are made again
    why: Annotated[str, 2000] = ""  # the memory was not used, or not its newest step
    made: Optional[int] = None  # the attempt that made the snapshot

    def words(self) -> str:
        """Return "from step 118 in memory (2 steps are made again)"."""
        where = {
            "memory": f"from step {self.step} in memory",
            "kept": f"from step {self.step}, kept on the disk from the memory of an older job",
            "disk": f"from the disk, step {self.step}",
        }
        more = [f"{_ranks(self.copies)} from another node's memory"] if self.copies else []
        if self.again is not None:
            more.append("1 step is made again" if self.again == 1 else f"{self.again} steps are made again")
        more += [self.why] if self.why else []
        return where.get(self.source, "not from memory") + (f" ({'; '.join(more)})" if more else "")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


class OutputPart(NamedTuple):
    """A file that an attempt's output goes to, and its size when the attempt began."""

    path: Annotated[str, 4096] = ""
    begin: int = 0
