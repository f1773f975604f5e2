"""Keeps which checkpoint an attempt went on from, and which newer ones it passed over: ``attempts/NNNN/resumed.json``.

Written by rank 0 when its loop asks ``guard.latest()``. By it a checkpoint is found from which attempt after attempt fails.
"""

from __future__ import annotations

from pathlib import Path

from ftsupervise.rundir.paths import RESUMED
from ftsupervise.rundir.records import read_record, write_json
from ftsupervise.truth import Resumed


def write_resumed(attempt: Path, resumed: Resumed) -> None:
    """Raises OSError."""
    write_json(attempt / RESUMED, resumed, sync=False)


def read_resumed(attempt: Path) -> Resumed | None:
    """None where the loop did not ask, or the page cannot be read."""
    try:
        return read_record(Resumed, attempt / RESUMED)
    except (OSError, ValueError):
        return None
