"""What lies in a folder of checkpoints under names that begin with a dot, for people: nothing there is out of sight.

.snapshot-STEP-ATTEMPT-RUN   the last state of a job that ended (kept.py)
.staging/NNNN/NAME           a checkpoint that attempt NNNN writes, or has left behind (rundir/fence.py)
.restoring-NAME              a copy that is being brought back (restore.py)
.removing-NAME               a checkpoint or a snapshot that is being deleted (retain.py)
.quarantine/NAME             a checkpoint that was set aside (quarantine.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.restore import RESTORING
from ftsupervise.checkpoints.retain import REMOVING, names_in
from ftsupervise.rundir import fence
from ftsupervise.rundir.lineage import whose
from ftsupervise.snapshots import kept


class HiddenEntry(NamedTuple):
    """``kind``: "kept snapshot", "staged", "being restored" or "being removed". ``use``: who may use it, as a clause."""

    kind: str
    path: Path
    use: str
    step: int | None = None
    attempt: int | None = None
    world: int | None = None  # ranks that it is of
    run: str = ""
    code: str = ""  # the version of the loop's code that made it


def hidden_in(folder: Path, users: Mapping[Path, str]) -> tuple[HiddenEntry, ...]:
    """Return all of it, kept snapshots first. ``users``: what becomes of those of the run in question. Raises OSError."""
    return (*_kept(folder, users), *_staged(folder / fence.STAGING), *_leftovers(folder))


def _kept(folder: Path, users: Mapping[Path, str]) -> Iterator[HiddenEntry]:
    for one in reversed(kept.all_in(folder)):
        entry = HiddenEntry("kept snapshot", one.path, users.get(one.path, ""), one.step, one.attempt)
        try:
            page = kept.read_page(one.path)
        except (OSError, ValueError) as error:
            yield entry._replace(use=f"nobody: {error}")
            continue
        use = entry.use or f"only {whose(page)} may begin from it"
        yield entry._replace(use=use, world=page.world, run=page.run, code=page.code)


def _staged(areas: Path) -> Iterator[HiddenEntry]:
    for name in sorted(names_in(areas)):
        area = areas / name
        if not area.is_dir() or area.is_symlink():
            continue
        if name.startswith("run-"):  # of one of several runs
            yield from _staged(area)
        elif name.startswith((fence.SEALED, fence.SWEPT)):
            yield HiddenEntry("staged", area, "nobody: an attempt that is over left it, and the next one deletes it")
        else:
            number = int(name) if name.isdecimal() else None
            who = f"attempt {number}" if number is not None else "a program without a supervisor"
            for inner in sorted(names_in(area)):
                yield HiddenEntry("staged", area / inner, f"{who} alone, until it is committed", attempt=number)


def _leftovers(folder: Path) -> Iterator[HiddenEntry]:
    for name in sorted(names_in(folder)):
        path = folder / name
        if name.startswith(RESTORING):
            yield HiddenEntry(
                "being restored", path, "nobody until it is whole: ftsupervise checkpoints restore goes on there"
            )
        elif name.startswith(REMOVING):
            yield HiddenEntry(
                "being removed",
                path,
                "nobody: it is deleted, or prune deletes the rest where nobody else may write here",
            )
