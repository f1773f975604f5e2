"""The nouns of every room: frozen values with no behaviour that touches the world. Standard library, and quick to load.

Times are aware UTC ``datetime``; durations ``timedelta``; sizes bytes (``int``); shares 0–1 (``float``).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class Health(Enum):
    """What a probe saw. ``UNKNOWN`` is a value of its own: it neither fires nor resolves what it could not see."""

    OK = "ok"
    BAD = "bad"
    UNKNOWN = "unknown"

    @classmethod
    def of(cls, bad: bool | None) -> Health:
        """``bad`` None: it could not be seen."""
        return cls.UNKNOWN if bad is None else cls.BAD if bad else cls.OK


class SwitchState(NamedTuple):
    """A switch as found: up or not, and who raised it and why if it says so."""

    name: str  # "kill-switch" or "save-switch"
    health: Health  # OK: not raised; BAD: raised; UNKNOWN: could not look
    who: str = ""
    why: str = ""
    since: datetime | None = None
    problem: str = ""  # why a file in its place is not accepted as a switch ("a symbolic link", "1 GB long" …)

    @property
    def up(self) -> bool:
        return self.health is Health.BAD


class Attempt(NamedTuple):
    """One start of the command, as the ledger has it."""

    number: int
    job_id: str
    started: datetime
    host: str = ""
    nodes: tuple[str, ...] = ()
    ended: datetime | None = None
    exit_code: int | None = None  # None while it runs, or when nobody lived to write it down
    cause: str = ""  # "finished", "kill switch", "warning signal", "exit 1", "killed by SIGKILL" …
    first_step: int | None = None
    last_step: int | None = None
    note: str = ""
    kind: str = ""  # class of the failure (run/cause.py: Kind), "" if it was none
    failure: str = ""  # the failure as the brake counts it: "exit 1 (ValueError)"
    saved: int | None = None  # newest step the loop said it had saved
    ready: float | None = None  # seconds from the start to the first step
    then: str = ""  # what was done about it: "restarted in place", "left to the next member", "stopped"
    detail: str = ""  # the line of the output that says most; "no output"

    def why(self) -> str:
        """The cause with the line that decides, for people: "exit 1: ValueError: no such shape"."""
        return f"{self.cause}: {self.detail}" if self.detail and self.detail not in self.cause else self.cause


class Beat(NamedTuple):
    """A rank's newest proof of progress."""

    rank: int
    step: int | None
    phase: str
    at: datetime
    pid: int = 0
    host: str = ""
    facts: Mapping[str, str] = MappingProxyType({})


class Reading(NamedTuple):
    """What a rank's page in node-local memory says (``pages.py``). Times are that host's CLOCK_MONOTONIC, in seconds."""

    rank: int
    attempt: int
    pid: int
    pid_start: int  # clock ticks since boot: with the pid an identity
    step: int | None
    phase: str
    stepped: float  # when the last step was made; before the first one, when the page was
    beaten: float  # the last sign of life of any kind
    leaving: bool = False
    failed: bool = False  # an exception is on its way out
    code: int | None = None  # the exit code with which its interpreter ends after a failure; its process may take long


class Pulse(NamedTuple):
    """A rank as the job ring knows it, wherever it runs. Times are the job ring's own CLOCK_MONOTONIC, in seconds."""

    rank: int
    node: str
    step: int | None
    phase: str
    stepped: float
    beaten: float
    seen: float  # when we last heard of it at all
    pid: int = 0
    state: str = ""  # one letter as in /proc/PID/stat, "X" when the process is gone, "" when nobody could look
    cpu: float | None = None  # seconds of CPU it has used so far, None when nobody could look
    leaving: bool = False


# ----------------------------------------------------------------------------------------------------- the queue


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
    submit_time: datetime | None = None
    start_time: datetime | None = None  # expected start while pending, if Slurm has an opinion
    end_time: datetime | None = None  # None: unlimited, or not known
    time_limit: timedelta | None = None
    raw_id: str = ""  # SLURM_JOB_ID of this very member
    directory: str = ""  # it was submitted in, or for; "" when that is not known


class Submitted(NamedTuple):
    """What a scheduler says after it took a script."""

    job_id: str
    cluster: str = ""
    found_again: bool = False  # sbatch failed ambiguously and the job turned out to be there
