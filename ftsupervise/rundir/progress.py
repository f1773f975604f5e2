"""The progress of an attempt as its supervisor sees it: all ranks in one small page, ``attempts/NNNN/progress.json``.

The node agents sum up their ranks, the supervisor sums up the nodes and writes this page every few seconds. So ``status`` reads
one file for a run of 100,000 ranks. The page of an attempt that was lost says until when it is known to have lived.

Standard library only: ``status`` reads it.
"""

from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import EPOCH, read_record, write_json

PROGRESS = "progress.json"  # in an attempt's directory
# what a supervisor does about a hang: it starts it again in place; ends it, for the next job; tells it only; leaves it running
# and says so; does not look for one
RESTARTS, ENDS, TOLD, LEFT, OFF = ON_HANG = ("restarts", "ends", "told", "left", "off")


class ProgressPage(NamedTuple):
    """Times are this host's; ``first_at`` and ``active_at`` are in epoch seconds."""

    at: datetime = EPOCH  # when this was seen
    ranks: int = 0  # that report
    step: int | None = None  # that all of them have reached
    ahead: int | None = None  # that the first of them has reached
    slowest: Annotated[str, 200] = ""  # the rank that is furthest behind, and where, if one is
    phase: Annotated[str, 100] = ""  # of most ranks
    stepped: float | None = None  # seconds since the last step of any rank
    first: int | None = None
    first_at: float | None = None  # when the last rank had made its first step
    active_at: float | None = None  # the last step of any rank, or the last change of its phase
    saved: int | None = None
    saved_at: datetime | None = None  # when that was first seen
    saving: float = 0.0  # seconds in saves
    rate: float | None = None  # steps a second over the last minute, saves included
    usual: float | None = None  # the same over the run
    steady: float | None = None  # the same over the last hour in which it trained; None before there was one
    hung: Annotated[str, 500] = ""  # the hang that the detector has found and left alone, in words
    on_hang: Annotated[str, 20] = ""  # one of ``ON_HANG``; "": not known
    hang_at: float | None = None  # epoch seconds: the present standstill is a hang then, unless something moves
    loss: float | None = None
    last_step: int | None = None  # the one after which the training is complete, where the loop said so


def write_progress(attempt: Path, progress: ProgressPage) -> None:
    """Write the page. Raises OSError. Not synced: an older page is true too."""
    write_json(attempt / PROGRESS, progress, sync=False, indent=None)


def read_progress(rundir: RunDir, number: int) -> ProgressPage | None:
    """Return the page; None where there is none, or it cannot be read."""
    try:
        return read_record(ProgressPage, rundir.attempt(number) / PROGRESS, limit=64_000)
    except (OSError, ValueError):
        return None
