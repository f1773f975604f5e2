"""Records which checkpoint an attempt went on from, and which newer ones it passed over:
``attempts/NNNN/resumed.json``.

Written by rank 0 when its loop asks ``guard.latest()``. It shows a checkpoint from which attempt after attempt fails.
"""

from __future__ import annotations

from pathlib import Path

from ftsupervise.rundir.paths import RESUMED
from ftsupervise.rundir.records import read_record, write_json
from ftsupervise.truth import Resumed


def write_resumed(attempt: Path, resumed: Resumed) -> None:
    """Write the page. Raises OSError."""
    write_json(attempt / RESUMED, resumed, sync=False)


def read_resumed(attempt: Path) -> Resumed | None:
    """Return the page; None where the loop did not ask, or it cannot be read."""
    try:
        return read_record(Resumed, attempt / RESUMED)
    except (OSError, ValueError):
        return None
