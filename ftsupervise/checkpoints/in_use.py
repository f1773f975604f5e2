"""The checkpoints that are in use now, which retention leaves alone, and the leftovers of interrupted work."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ftsupervise.checkpoints.offload import being_copied
from ftsupervise.checkpoints.restore import RESTORING
from ftsupervise.checkpoints.staged import A_DAY, left_alone, names_in, unchanged
from ftsupervise.model import Attempt, CauseKind
from ftsupervise.rundir import fence
from ftsupervise.rundir.ledger import backwards
from ftsupervise.rundir.paths import RunDir

_BACK = 20  # newest attempts that are looked at


def in_use(rundir: RunDir | None, folder: Path, now: float) -> dict[str, str]:
    """Return name -> a clause that names its user: a living attempt or the newest one, a copy, a restore.

    ``now``: epoch seconds. Raises OSError where that cannot be seen.
    """
    found = _copied(folder, now)
    if rundir is None:
        return found
    try:
        newest = list(islice(backwards(rundir), _BACK))
    except FileNotFoundError:
        return found
    for place, one in reversed(list(enumerate(newest))):
        if one.resumed is not None and one.resumed.checkpoint and (place == 0 or _may_live(one)):
            found[one.resumed.checkpoint] = f"attempt {one.number} began from it"
    return found


def _may_live(one: Attempt) -> bool:
    return one.ended is None and (one.cause is None or one.cause.kind is CauseKind.UNKNOWN)


def _copied(folder: Path, now: float) -> dict[str, str]:
    found = {}
    for name in names_in(folder):
        if name.startswith(RESTORING) and not unchanged(folder / name, now):
            found[name.removeprefix(RESTORING)] = "it is being restored"
        elif not name.startswith(".") and being_copied(folder / name, now - A_DAY):
            found[name] = "it is being copied"
    return found


def leftovers(rundir: RunDir | None, folder: Path, now: float) -> tuple[str, ...]:
    """Return paths below ``folder`` that an interrupted restore or save left and that have not changed for a day.

    Raises OSError.
    """
    found = [folder / name for name in names_in(folder) if name.startswith(RESTORING)]
    if rundir is not None and rundir.attempts.is_dir():  # without an attempt nothing was staged
        found += _staged(fence.staging(rundir, folder))
    found += left_alone(folder, now)
    return tuple(sorted(str(path.relative_to(folder)) for path in found if unchanged(path, now)))


def _staged(areas: Path) -> Iterator[Path]:
    """Yield the contents of the staging areas and of swept, sealed ones; never an area or its seal itself."""
    try:
        with os.scandir(areas) as entries:
            inside = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in inside:
        if entry.name.isdecimal():
            yield from (Path(entry.path, name) for name in os.listdir(entry.path))
        elif entry.name.startswith((fence.SEALED, fence.SWEPT)):
            yield Path(entry.path)
