"""The snapshot that an attempt was to begin from and did not: ``attempts/NNNN/not_from.json``.

The supervisor writes into the ledger what an attempt is to begin from. Where the program as it is now cannot take that (other
shapes, another version of the code, another number of ranks), rank 0 writes this page. Without it such an attempt's end would
speak against a snapshot that is good, and the next one would go back to before it.
"""

from __future__ import annotations

from pathlib import Path

from ftsupervise.rundir.paths import NOT_FROM
from ftsupervise.rundir.records import read_record, write_json
from ftsupervise.truth import NotFrom


def write_not_from(attempt: Path, found: NotFrom) -> None:
    """Write the page. Raises OSError."""
    write_json(attempt / NOT_FROM, found, sync=False)


def read_not_from(attempt: Path) -> NotFrom | None:
    """Return the page; None where the attempt began as it was told, or it cannot be read."""
    try:
        return read_record(NotFrom, attempt / NOT_FROM)
    except (OSError, ValueError):
        return None
