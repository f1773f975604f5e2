"""The two pages by which rank 0 says from what its attempt went on.

``attempts/NNNN/resumed.json``: the checkpoint, and which newer ones were passed over; written when the loop asks
``guard.latest()``. It shows a checkpoint from which attempt after attempt fails.

``attempts/NNNN/not_from.json``: the snapshot that the attempt was to begin from, as the supervisor has it in the ledger, and
did not: the program as it is now cannot take it (other shapes, another version of the code, another number of ranks). Without
the page such an attempt's end would speak against a snapshot that is good, and the next one would go back to before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from ftsupervise.rundir.paths import NOT_FROM, RESUMED
from ftsupervise.rundir.records import read_record, write_json
from ftsupervise.truth import NotFrom, Resumed

_NAMES: dict[type, str] = {Resumed: RESUMED, NotFrom: NOT_FROM}
_Page = TypeVar("_Page", Resumed, NotFrom)


def write_began(attempt: Path, page: Resumed | NotFrom) -> None:
    """Write the page of that kind. Raises OSError."""
    write_json(attempt / _NAMES[type(page)], page, sync=False)


def read_began(attempt: Path, kind: type[_Page]) -> _Page | None:
    """Return the page; None where there is none (the loop did not ask, the attempt began as it was told), or it cannot be
    read."""
    try:
        return read_record(kind, attempt / _NAMES[kind])
    except (OSError, ValueError):
        return None
