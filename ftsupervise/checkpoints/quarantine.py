"""Checkpoints that are not to be started from, set aside and never deleted.

    CHECKPOINTS/.quarantine/step-00000100/                     the checkpoint as it was
    CHECKPOINTS/.quarantine/step-00000100/.ftsupervise/quarantine.json   why, when, by whom

``ftsupervise checkpoints list`` shows them with their reason. To use one again, move it back.
"""

from __future__ import annotations

import errno
import os
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.manifest import FOLDER_NAME
from ftsupervise.host.modes import make_folder
from ftsupervise.host.ownership import user_name
from ftsupervise.rundir import fence
from ftsupervise.rundir.paths import sync_directory
from ftsupervise.rundir.records import read_record, write_json

QUARANTINE = ".quarantine"
_PAGE = "quarantine.json"
_TURNS = 1000  # checkpoints of one name


class Quarantined(NamedTuple):
    """A checkpoint that was set aside."""

    name: str  # as it was called
    reason: str  # a clause
    at: datetime | None = None
    user: str = ""
    path: Path | None = None


class _Page(NamedTuple):
    name: str
    reason: str
    at: datetime | None = None
    user: str = ""


def set_aside(checkpoint: Path, reason: str, at: datetime, *, area: Path | None = None) -> Path:
    """Move ``checkpoint`` into the quarantine beside it, with the reason; return its new path. Raises OSError.

    ``area``: the staging area of the attempt that does so. It goes by way of that, so that an attempt that a newer one
    has sealed sets nothing aside (ESTALE), wherever it was stopped; the newer one puts back what it finds there.
    """
    quarantine = checkpoint.parent / QUARANTINE
    make_folder(quarantine)
    here = checkpoint
    if area is not None:
        here = area / f"{fence.ASIDE}{checkpoint.name}"
        _move(checkpoint, here, area)
    if here.is_dir() and not here.is_symlink():
        page = here / FOLDER_NAME / _PAGE
        make_folder(page.parent)
        write_json(page, _Page(checkpoint.name, reason, at, user_name()))
    for turn in range(1, _TURNS):
        target = quarantine / (checkpoint.name if turn == 1 else f"{checkpoint.name}~{turn}")
        if os.path.lexists(target):
            continue
        try:
            _move(here, target, area)
        except OSError as error:  # another one was faster: a folder is never renamed over one that holds something
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue
            raise
        sync_directory(quarantine)
        sync_directory(checkpoint.parent)
        return target
    raise OSError(errno.EEXIST, f"holds {_TURNS} checkpoints called {checkpoint.name} already", str(quarantine))


def _move(source: Path, target: Path, area: Path | None) -> None:
    if area is None:
        os.rename(source, target)
    elif not fence.move(source, target, area):
        raise OSError(errno.ESTALE, "a newer attempt has begun", str(source))


def quarantined(folder: Path) -> tuple[Quarantined, ...]:
    """Return the checkpoints of ``folder`` that were set aside, by name. Raises OSError."""
    try:
        names = sorted(os.listdir(folder / QUARANTINE))
    except FileNotFoundError:
        return ()
    return tuple(_one(folder / QUARANTINE / name) for name in names)


def _one(path: Path) -> Quarantined:
    try:
        page = read_record(_Page, path / FOLDER_NAME / _PAGE)
    except (OSError, ValueError):
        page = None
    if page is None:
        return Quarantined(path.name, "the reason is not on record", path=path)
    return Quarantined(page.name, page.reason, page.at, page.user, path)
