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


def set_aside(checkpoint: Path, reason: str, at: datetime) -> Path:
    """Move ``checkpoint`` into the quarantine beside it, with the reason; its new path. Raises OSError.

    The reason is written first, so that a crash in between leaves a checkpoint in its place, not one without a reason.
    """
    area = checkpoint.parent / QUARANTINE
    make_folder(area)
    if checkpoint.is_dir() and not checkpoint.is_symlink():
        page = checkpoint / FOLDER_NAME / _PAGE
        make_folder(page.parent)
        write_json(page, _Page(checkpoint.name, reason, at, user_name()))
    for turn in range(1, _TURNS):
        target = area / (checkpoint.name if turn == 1 else f"{checkpoint.name}~{turn}")
        if os.path.lexists(target):
            continue
        try:
            os.rename(checkpoint, target)
        except OSError as error:  # another one was faster: a folder is never renamed over one that holds something
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue
            raise
        sync_directory(area)
        sync_directory(checkpoint.parent)
        return target
    raise OSError(errno.EEXIST, f"holds {_TURNS} checkpoints called {checkpoint.name} already", str(area))


def quarantined(folder: Path) -> tuple[Quarantined, ...]:
    """The checkpoints of ``folder`` that were set aside, by name. Raises OSError."""
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
