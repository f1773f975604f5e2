"""Checkpoints that are not to be started from, set aside and never deleted.

    CHECKPOINTS/.quarantine/step-00000100/                     the checkpoint as it was
    CHECKPOINTS/.quarantine/step-00000100/.ftsupervise/quarantine.json   why, when, by whom
    CHECKPOINTS/.quarantine/.last.ckpt.json                    the same of a checkpoint that is one file

``ftsupervise checkpoints list`` shows them with their reason. To use one again, move it back.

Two loaders look at all that lies in their folder. That of accelerate takes each name in ``checkpoints`` for a checkpoint,
and crashes on another one; Hugging Face's examples do not begin in a folder that holds no checkpoint, and is not empty. There
the quarantine lies beside that folder.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.checkpoints.manifest import FOLDER_NAME, record_folder
from ftsupervise.host.ownership import held_to_write, make_folder, strangers_link, user_name
from ftsupervise.rundir import fence, ledger
from ftsupervise.rundir.paths import RunDir, sync_directory
from ftsupervise.rundir.records import read_record, write_json

QUARANTINE = ".quarantine"
_PAGE = "quarantine.json"
_TURNS = 1000  # checkpoints of one name
_BY_ACCELERATE, _BY_TRAINER = re.compile(r"checkpoint_\d+"), re.compile(r"checkpoint-\d+")  # names that they give


class Quarantined(NamedTuple):
    """A checkpoint that was set aside."""

    name: str  # as it was called
    reason: str  # a clause
    at: datetime | None = None
    user: str = ""
    path: Path | None = None
    was: str = ""  # where it lay


class _Page(NamedTuple):
    name: str
    reason: str
    at: datetime | None = None
    user: str = ""
    was: Annotated[str, 4096] = ""  # its path


def set_aside(checkpoint: Path, reason: str, at: datetime, *, area: Path | None = None) -> Path:
    """Move ``checkpoint`` into the quarantine beside it, with the reason; return its new path. Raises OSError, also where a
    link of another account leads to it.

    ``area``: the staging area of the attempt that does so. It goes by way of that, so that an attempt that a newer one
    has sealed sets nothing aside (ESTALE), wherever it was stopped; the newer one puts back what it finds there.
    """
    if link := strangers_link(checkpoint):
        raise PermissionError(errno.EPERM, f"{link}, so it is not followed", str(checkpoint))
    quarantine = _place_for(checkpoint)
    make_folder(quarantine)
    with held_to_write(checkpoint.parent) as beside, held_to_write(quarantine) as into:
        here = beside / checkpoint.name
        if area is not None:
            here = area / f"{fence.ASIDE}{checkpoint.name}"
            _move(checkpoint, here, area)
        page = _Page(checkpoint.name, reason, at, user_name(), str(checkpoint))
        of_its_own = _has_a_place(here)
        if of_its_own:
            with record_folder(here / FOLDER_NAME) as records:
                write_json(records / _PAGE, page)
        target = _moved(here, into, checkpoint.name, area)
        if not of_its_own:
            write_json(_page_beside(target), page)
        sync_directory(into)
        sync_directory(beside)
    return quarantine / target.name


def _moved(source: Path, quarantine: Path, name: str, area: Path | None) -> Path:
    """Move it to the first name that is free. Raises OSError."""
    for turn in range(1, _TURNS):
        target = quarantine / (name if turn == 1 else f"{name}~{turn}")
        if os.path.lexists(target):
            continue
        try:
            _move(source, target, area)
        except OSError as error:  # another one was faster: a folder is never renamed over one that holds something
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue
            raise
        return target
    raise OSError(errno.EEXIST, f"holds {_TURNS} checkpoints called {name} already", str(quarantine))


def _move(source: Path, target: Path, area: Path | None) -> None:
    if area is None:
        os.rename(source, target)
    elif not fence.move(source, target, area):
        raise OSError(errno.ESTALE, "a newer attempt has begun", str(source))


def _place_for(checkpoint: Path) -> Path:
    folder = checkpoint.parent
    by_accelerate = folder.name == "checkpoints" and _BY_ACCELERATE.fullmatch(checkpoint.name)
    the_last = _BY_TRAINER.fullmatch(checkpoint.name) and os.listdir(folder) == [checkpoint.name]
    if not (by_accelerate or the_last):
        return folder / QUARANTINE
    above = folder.parent
    can_move = os.access(above, os.W_OK) and above.stat().st_dev == checkpoint.lstat().st_dev
    return (above if can_move and _is_of(above / QUARANTINE, folder) else folder) / QUARANTINE


def _is_of(quarantine: Path, folder: Path) -> bool:
    """Return whether a quarantine that lies beside ``folder`` is none of another account, which may write above it alone."""
    try:
        found = quarantine.lstat()
    except FileNotFoundError:
        return True
    accounts = {0, os.geteuid()}
    with suppress(FileNotFoundError):
        accounts.add(folder.stat().st_uid)
    return stat.S_ISDIR(found.st_mode) and found.st_uid in accounts


def _has_a_place(path: Path) -> bool:
    """Return whether its page lies in it: not in one file, nor where a link, which another account may have laid, stands in the
    place of our own folder."""
    return path.is_dir() and not path.is_symlink() and not (path / FOLDER_NAME).is_symlink()


def _page_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.json")


def quarantined(folder: Path) -> tuple[Quarantined, ...]:
    """Return the checkpoints of ``folder`` that were set aside, by name. Raises OSError."""
    found = [_one(folder / QUARANTINE / name) for name in _names(folder / QUARANTINE)]
    beside = folder.parent / QUARANTINE
    names = _names(beside) if _is_of(beside, folder) else []
    found += [one for one in (_one(beside / name) for name in names) if Path(one.was).parent == folder]
    return tuple(found)


def quarantined_of(folder: Path, rundir: RunDir | None) -> tuple[Quarantined, ...]:
    """Return those of ``folder``, and of the folders in which an attempt of the run has found a torn one. Raises OSError."""
    torn = () if rundir is None else ledger.torn_of(rundir)
    folders = dict.fromkeys((folder, *(Path(one.path).parent for one in torn)))
    return tuple(one for each in folders for one in quarantined(each))


def _names(area: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(area) if not name.startswith("."))
    except (FileNotFoundError, PermissionError):  # none, or another account's, which lets nobody in
        return []


def _one(path: Path) -> Quarantined:
    try:
        page = read_record(_Page, path / FOLDER_NAME / _PAGE if _has_a_place(path) else _page_beside(path))
    except (OSError, ValueError):
        page = None
    if page is None:
        return Quarantined(path.name, "the reason is not on record", path=path)
    return Quarantined(page.name, page.reason, page.at, page.user, path, page.was)
