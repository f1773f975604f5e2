"""Reads a training script that is to be changed, and writes it back: whole, with its rights, and only a file of this account.

It stands alone because the rest of the room is pure.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ftsupervise.errors import NotPermitted, Refused, Untranslatable, from_os_error
from ftsupervise.host import files
from ftsupervise.host.ownership import reach, shown_user
from ftsupervise.rundir.paths import write_whole

_LARGEST = 4 << 20  # bytes


class ScriptFile(NamedTuple):
    """A script as it was read. ``found``: the stat of the file."""

    path: Path
    text: str
    found: os.stat_result


def read_own(path: Path) -> ScriptFile:
    """Return the script. Raises NotPermitted for a link, a file of another account or one that stands in two places, NotFound,
    Untranslatable for what is no UTF-8 text."""
    if path.is_symlink():
        raise NotPermitted(
            f"{path} is a link, and nothing is written through one", hint=f"name the file: {path.resolve()}"
        )
    try:
        fd = files.open_regular(path)
        try:
            found, data = os.fstat(fd), files.read_open(fd, _LARGEST, path)
        finally:
            os.close(fd)
    except OSError as error:
        raise from_os_error(error, f"read {path}") from None
    if found.st_uid != os.geteuid():
        raise NotPermitted(f"{path} belongs to {shown_user(found.st_uid)}", hint=f"copy it first: cp {path} mine.py")
    if found.st_nlink != 1:
        raise NotPermitted(
            f"{path} has a second name (a hard link), which would keep the old text", hint="copy it first"
        )
    try:
        return ScriptFile(path, data.decode("utf-8"), found)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Untranslatable(f"{path}: line {line} is no UTF-8 text") from None


def write_back(script: ScriptFile, text: str) -> None:
    """Write ``text`` in its place, with the same rights. Raises Refused where the file is another one by now, else Error."""
    try:
        before = script.path.lstat()
        if _mark(before) != _mark(script.found):
            raise Refused(f"{script.path} has changed since it was read", hint="nothing was written; type this again")
        write_whole(script.path, text, mode=reach(script.path))
    except OSError as error:
        raise from_os_error(error, f"write {script.path}") from None


def _mark(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode, found.st_uid
