"""The page of an attempt whose last snapshot was kept on the disk when its job ended (``checkpoints/memory_kept.py``)."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from ftsupervise.rundir.records import as_whole, read_json, write_json

_PAGE = "kept.json"


def write_kept(folder: Path, step: int, path: str, now: datetime) -> None:
    """Record where it is kept: ``folder`` of the attempt, ``path`` of the snapshot. Raises OSError."""
    write_json(folder / _PAGE, {"at": now.isoformat(), "step": step, "path": path}, sync=False)


def read_kept(folder: Path) -> int | None:
    """Return the step; None where nothing was kept."""
    if not os.path.lexists(folder / _PAGE):
        return None
    try:
        return as_whole((read_json(folder / _PAGE) or {}).get("step"))
    except (OSError, ValueError):
        return None
