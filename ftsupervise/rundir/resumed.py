"""Which checkpoint an attempt went on from, and which newer ones it passed over: ``attempts/NNNN/resumed.json``.

Written by rank 0 when its loop asks ``guard.latest()``. It is what a person wants to know of a run that diverged, and by what
a checkpoint is found from which attempt after attempt fails.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ftsupervise.rundir.paths import RESUMED
from ftsupervise.rundir.records import read_record, write_json


class Resumed(NamedTuple):
    """Where the training of an attempt began."""

    checkpoint: str  # its name; "" where there was none, and it began anew
    step: int | None = None
    passed: tuple[str, ...] = ()  # a sentence for each newer one that was passed over
    at: datetime | None = None

    def words(self) -> str:
        """A clause: "from step-00000100"."""
        over = f" ({len(self.passed)} newer passed over)" if self.passed else ""
        return f"from {self.checkpoint}{over}" if self.checkpoint else f"from the beginning{over}"


def write_resumed(attempt: Path, resumed: Resumed) -> None:
    """Raises OSError."""
    write_json(attempt / RESUMED, resumed, sync=False)


def read_resumed(attempt: Path) -> Resumed | None:
    """None where the loop did not ask, or the page cannot be read: the page of an attempt is told, and decides nothing."""
    try:
        return read_record(Resumed, attempt / RESUMED)
    except (OSError, ValueError):
        return None
