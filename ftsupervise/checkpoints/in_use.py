"""What retention asks of each checkpoint: whether it is in use, of which kind and whose it is; and the leftovers of interrupted
work."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path

from ftsupervise.checkpoints.find import ONE_FILE, Found
from ftsupervise.checkpoints.manifest import FOLDER_NAME, CheckpointLayout, loop_file
from ftsupervise.checkpoints.offload import being_copied
from ftsupervise.checkpoints.restore import RESTORING
from ftsupervise.checkpoints.staged import A_DAY, left_alone, names_in, unchanged
from ftsupervise.model import Attempt, CauseKind
from ftsupervise.rundir import fence
from ftsupervise.rundir.ledger import backwards
from ftsupervise.rundir.lineage import Belongs, Lineage, whose
from ftsupervise.rundir.paths import RunDir

_BACK = 20  # newest attempts that are looked at


def in_use(rundir: RunDir | None, folder: Path, now: float, anchors: Mapping[str, str]) -> dict[str, str]:
    """Return name -> a clause that names its user: a living attempt or the newest one, a copy, a restore, a snapshot.

    ``now``: epoch seconds. ``anchors``: those that kept snapshots go on from. Raises OSError where that cannot be seen.
    """
    found = {**_copied(folder, now), **anchors}
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


def kind_of(one: Found) -> str:
    """Return the kind of a checkpoint, by what can load it, as people call it."""
    if loop_file(one.path, 0).is_file():
        return "guard.save"
    layout = one.head.layout if one.head is not None else CheckpointLayout.FILES
    return "other files" if layout is CheckpointLayout.FILES else layout.value


def of_others(found: Collection[Found], run: Lineage | None) -> dict[str, str]:
    """Return name -> a clause, for each that is not known to be of this ``run``, where another run saves there too.

    Where all of them are of one run, or nothing says whose they are, none is spared.
    """
    whole = [one for one in found if one.belongs(run) in (Belongs.ANOTHERS, Belongs.TAKEN)]
    spared = {one.path.name: f"{whose(one.head)} wrote it, and only that run removes it" for one in whole if one.head}
    if whole:
        unknown = "nothing says which run wrote it, and another run has saved here"
        spared |= {one.path.name: unknown for one in found if one.belongs(run) is Belongs.UNKNOWN}
    return spared


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
    found += _of_nothing(folder)
    return tuple(sorted(str(path.relative_to(folder)) for path in found if unchanged(path, now)))


def _of_nothing(folder: Path) -> list[Path]:
    """Return the manifests beside checkpoints of one file that their program has removed."""
    pages = [folder / FOLDER_NAME / name for name in names_in(folder / FOLDER_NAME)]
    manifests = [page for page in pages if page.name.endswith(tuple(f"{kind}.json" for kind in ONE_FILE))]
    return [page for page in manifests if not os.path.lexists(folder / page.name.removesuffix(".json"))]


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
