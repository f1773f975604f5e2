"""What a scheduler says of jobs: words for every room. Apart from ``model``: ``status`` starts faster without the rest."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import Enum
from typing import NamedTuple


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
