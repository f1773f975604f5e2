"""The newest checkpoint that an attempt has committed: ``attempts/NNNN/anchor.json``. Its snapshots go on from that one.

Rank 0 writes it with each commit. A snapshot whose anchor is not there any more is not used: somebody has taken the run back
to before it (``snapshots/doubts.py``).
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ftsupervise.rundir.records import read_record, write_json

_PAGE = "anchor.json"


class Anchor(NamedTuple):
    """A checkpoint, as it was when it was the newest one. ``checkpoint`` "": there was none."""

    checkpoint: str = ""  # its name
    step: int | None = None
    committed: datetime | None = None  # None: it had no manifest


def write_anchor(attempt: Path, anchor: Anchor) -> None:
    """Write the page. Raises OSError."""
    write_json(attempt / _PAGE, anchor, sync=False)


def read_anchor(attempt: Path) -> Anchor | None:
    """Return the page; None where the attempt has committed nothing, or it cannot be read."""
    try:
        return read_record(Anchor, attempt / _PAGE)
    except (OSError, ValueError):
        return None
