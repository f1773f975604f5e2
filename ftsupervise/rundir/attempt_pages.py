"""The pages of an attempt, ``RUN/attempts/NNNN/``: each is one record with one writer, written whole, read through the codec.

A page that is missing and one that cannot be read are the same to a reader: what it would have said is not known. Light: the
guard and ``status`` read them.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from ftsupervise.host.ownership import remove_entry
from ftsupervise.model import Cause, Failure
from ftsupervise.rundir.paths import NOT_FROM, RESUMED
from ftsupervise.rundir.records import read_record, write_json
from ftsupervise.truth import (
    Beginning,
    GivenCheckpoint,
    LeftCheckpoint,
    LinesWithoutStep,
    LossTrouble,
    NotFrom,
    OutputPart,
    PercentReached,
    Resumed,
    TornSave,
)

Words = Annotated[str, 2000]  # text for people


class StartPage(NamedTuple):
    """Written by its supervisor when it has claimed the attempt."""

    attempt: int = 0
    job_id: Words = ""  # as squeue prints it
    at: datetime | None = None
    host: Words = ""
    nodes: Annotated[str, 60_000] = ""  # as Slurm writes them
    in_place: int = 0  # restarts in this job before it
    stop_within: float | None = None  # seconds from the kill switch until the command is ended
    observes: tuple[str, ...] = ()  # decisions that the launch says are only told
    restart_count: int = 0  # how often Slurm had put its job back into the queue and begun it again by then
    command: Annotated[tuple[Words, ...], 10_000] = ()  # without its secrets: others may read it
    pid: int = 0
    pid_start: int | None = None
    boot_id: str = ""
    outputs: tuple[OutputPart, ...] = ()
    job_ends: datetime | None = None


class EndPage(NamedTuple):
    """Written by its supervisor with the decision after it. What the ledger has too has the same name there."""

    attempt: int = 0
    ended: datetime | None = None
    words: Words = ""  # the cause, for people
    exit_code: int | None = None  # negative for a signal
    cause: Cause | None = None
    failure: Failure | None = None
    then: Words = ""
    first_step: int | None = None
    last_step: int | None = None
    saved: int | None = None
    ready: float | None = None
    saving: float | None = None
    worked: float | None = None
    first_loss: float | None = None
    source: str = ""
    epoch: int | None = None
    trouble: LossTrouble | None = None
    seconds: float = 0.0
    note: Words = ""
    hardware: Words = ""
    braked: bool = False


class CopiesPage(NamedTuple):
    """Written by its supervisor while it runs: how far the buddy copies are."""

    at: datetime | None = None
    held: int | None = None  # the step that every buddy holds
    nodes: int = 0
    problem: Words = ""


class KeptSnapshotPage(NamedTuple):
    """Its last snapshot was kept on the disk when its job ended."""

    at: datetime | None = None
    step: int | None = None
    path: Annotated[str, 4096] = ""


class TornPage(NamedTuple):
    """The checkpoints whose save was cut off, as they were found when it began."""

    torn: Annotated[tuple[TornSave, ...], 100] = ()


class LostEnd(NamedTuple):
    """Others know why it left no record of its end: Slurm knows of its host, and we know of a group's supervisor. The attempt
    after it writes this, or the process that starts the groups."""

    words: Annotated[str, 500] = ""


class DecidingLine(NamedTuple):
    """A line that decides a verdict. ``source``: the ledger, the output of a rank, its stack, the flight recorder."""

    source: Annotated[str, 100] = ""
    text: Annotated[str, 500] = ""


class VerdictPage(NamedTuple):
    """The verdict of ``diagnose`` about it, once it has failed, without secrets: kept by the first process of the run's account
    that has read its output, the watch as a rule (``diagnosis/kept.py``). ``kind`` "": none came about, and ``unseen`` says
    why."""

    attempt: int = 0
    at: datetime | None = None
    kind: str = ""  # the class, in words
    confidence: str = ""  # "high", "medium", "low"
    headline: Annotated[str, 500] = ""
    where: str = ""  # the ranks and nodes with which it began, in words: "rank 5 on gpu-07"
    culprits: tuple[int, ...] = ()
    nodes: Annotated[tuple[str, ...], 100] = ()
    place: str = ""  # in the program: by it and its class the same failure is known again
    evidence: Annotated[tuple[DecidingLine, ...], 3] = ()
    history: Annotated[tuple[Annotated[str, 500], ...], 10] = ()  # how it compares with earlier ones, in sentences
    move: str = ""  # what to do about the next start: "restart", "mend it", "stop"
    advice: Annotated[str, 500] = ""  # the same, and why
    remedy: Annotated[str, 500] = ""  # what to try
    unseen: Annotated[tuple[Annotated[str, 500], ...], 5] = ()  # what could not be read

    def named(self) -> str:
        """Return class, place and confidence: "an error in the program, rank 5 on gpu-07 (confidence: high)"."""
        sure = f" (confidence: {self.confidence})" if self.confidence and self.is_known else ""
        return f"{', '.join(filter(None, (self.kind, self.where)))}{sure}"

    def told(self) -> str:
        """Return the same with the line that decides, for a message; "" where nothing is known."""
        if not self.is_known:
            return ""
        return f"{self.named()}: {self.line}" if self.line else self.named()

    @property
    def is_known(self) -> bool:
        """Return whether it says more than that nobody knows."""
        return self.kind not in ("", "unknown")

    @property
    def line(self) -> str:
        """Return the line that decides; "" where there is none but the ledger's, which the cause says already."""
        return next((one.text for one in self.evidence if one.source != "the ledger"), "")


# ``Resumed`` and ``NotFrom`` are rank 0's, which says from what it went on, and from which snapshot it did not although it was
# told to: without that its end would speak against a snapshot that is good. ``PercentReached`` and ``LinesWithoutStep`` are
# those of the follower of its output, which is a process of its own. ``LeftCheckpoint`` is what it wrote without a guard, and
# ``GivenCheckpoint`` what it was to go on from.
NAMES: dict[type, str] = {
    StartPage: "start.json",
    Beginning: "begins.json",
    CopiesPage: "copies.json",
    EndPage: "end.json",
    Resumed: RESUMED,
    NotFrom: NOT_FROM,
    KeptSnapshotPage: "kept.json",
    LeftCheckpoint: "written.json",
    GivenCheckpoint: "given.json",
    TornPage: "torn.json",
    PercentReached: "percent.json",
    LinesWithoutStep: "unread.json",
    LostEnd: "lost.json",
    VerdictPage: "verdict.json",
}
_Page = TypeVar("_Page")


def read_page(kind: type[_Page], folder: Path) -> _Page | None:
    """Return a page of the attempt in ``folder``; None where there is none, or it cannot be read."""
    path = f"{folder}/{NAMES[kind]}"
    if not os.path.lexists(path):  # most are not there, and a tick asks for ten of each run
        return None
    try:
        return read_record(kind, path)
    except (OSError, ValueError):
        return None


def write_page(folder: Path, page: object) -> None:
    """Write a page of the attempt in ``folder``. Raises OSError. Only the first and the last one are synced."""
    write_json(folder / NAMES[type(page)], page, sync=isinstance(page, (StartPage, EndPage)))


def forget_page(kind: type[_Page], folder: Path) -> None:
    """Remove it: what it says does not hold any more. Raises OSError."""
    remove_entry(folder / NAMES[kind])
