"""This account's own folder on this host, under $TMPDIR, for files that must not lie on a home directory that may hang.

Its name is predictable, so a stranger may have made it first. Then another one is made under an unguessable name, and
found again by its owner: a folder that belongs to this account was made by this account.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from ftsupervise.host.ownership import shown_user


def home() -> Path:
    """The folder, which is maybe still to be made. Another account's is returned only where no other can be made."""
    first = _first()
    return first if _free(first) else _others(first) or first


def taken() -> str:
    """Whose the usual folder is, where it is not this account's, and what is used instead, as a sentence; else ""."""
    first = _first()
    if _free(first):
        return ""
    try:
        found = first.lstat()
    except OSError:
        return ""
    if found.st_uid == os.geteuid():
        whose = "may be written by others" if stat.S_ISDIR(found.st_mode) else "is no folder"
    else:
        whose = f"belongs to {shown_user(found.st_uid)}"
    other = _others(first)
    return f"{first} {whose}: {f'{other} is used' if other else 'nothing is kept on this host'} instead"


def private(directory: Path) -> Path | None:
    """``directory``, made if need be; None if it, or the one above it, belongs to somebody else or others may write to it."""
    try:
        for part in (directory.parent, directory):
            part.mkdir(mode=0o700, exist_ok=True)
            if not is_private(part):
                return None
    except OSError:
        return None
    return directory


def is_private(folder: Path) -> bool:
    """Is it a folder of this account that nobody else may write? False where that cannot be seen."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _first() -> Path:
    return Path(tempfile.gettempdir()) / f"ftsupervise-{os.geteuid()}"


def _free(first: Path) -> bool:
    return not os.path.lexists(first) or is_private(first)


def _others(first: Path) -> Path | None:
    """The replacement folder, or a new one. Two processes may make one each: the first by name stays."""
    try:
        return _found(first) or _made(first)
    except OSError:
        return None


def _found(first: Path) -> Path | None:
    name = re.compile(re.escape(first.name) + r"\.[0-9a-f]{16}")
    with os.scandir(first.parent) as there:
        names = sorted(entry.name for entry in there if name.fullmatch(entry.name))
    return next((first.with_name(one) for one in names if is_private(first.with_name(one))), None)


def _made(first: Path) -> Path | None:
    mine = first.with_name(f"{first.name}.{os.urandom(8).hex()}")
    mine.mkdir(mode=0o700)
    chosen = _found(first)
    if chosen != mine:
        mine.rmdir()
    return chosen
