"""The page with the share of its work that a program prints where it prints no step: "Progress: 4.09 %".

It is progress of a kind of its own. It is shown, and where it begins again that is told; it never counts as a step, and nothing
is ended for it. The follower of an attempt's output writes it, because it is a process of its own. Standard library only:
``status`` reads it.
"""

from pathlib import Path

from ftsupervise.rundir.records import read_record, write_json
from ftsupervise.truth import PercentReached

_PAGE = "percent.json"


def write_percent(folder: Path, found: PercentReached | None) -> None:
    """Write the page of the attempt in ``folder``. None: what was told is no progress after all. Raises OSError."""
    page = {"last": -1.0} if found is None else {**found._asdict()}
    write_json(folder / _PAGE, page, sync=False, indent=None)


def read_percent(folder: Path) -> PercentReached | None:
    """Return the page; None where there is none, or it cannot be read."""
    try:
        found = read_record(PercentReached, folder / _PAGE, limit=4096)
    except (OSError, ValueError):
        return None
    return found if found is not None and 0 <= found.last <= 100 else None
