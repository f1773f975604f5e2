"""A file of a person that a command changes: read, shown, perhaps asked about, and written back whole with its rights.

Minutes may lie between the reading and the writing, and others may write the folder in which it lies. So the file that was read
is found again by itself, and the folder in which it really lies is held open while it is replaced: no link and no other file
that was put in its place meanwhile leads the writing elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ftsupervise.errors import NotPermitted, Refused, Untranslatable, from_os_error
from ftsupervise.host import files, ownership
from ftsupervise.printable import to_type
from ftsupervise.rundir.paths import write_whole


class OwnFile(NamedTuple):
    """A file as it was read. ``path``: as it was named; ``found``: its stat."""

    path: Path
    text: str
    found: os.stat_result


def read_own(path: Path, *, limit: int, links: bool) -> OwnFile:
    """Return a file of this account that is to be changed. ``links``: also what a link leads to; else the file itself has to
    stand there. Links on the way are judged as ``open_judged`` does.

    Raises NotPermitted for a link, a file of another account or one that stands in two places, NotFound, Untranslatable for
    what is no UTF-8 text.
    """
    if not links and path.is_symlink():
        raise NotPermitted(
            f"{path} is a link, and nothing is written through one", hint=f"name the file: {path.resolve()}"
        )
    try:
        fd = ownership.open_judged(path)
        try:
            found, data = os.fstat(fd), files.read_open(fd, limit, path)
        finally:
            os.close(fd)
    except OSError as error:
        raise from_os_error(error, f"read {path}") from None
    if found.st_uid != os.geteuid():
        raise NotPermitted(
            f"{path} belongs to {ownership.shown_user(found.st_uid)}: nothing was changed",
            hint=f"copy it first: cp {to_type(path)} mine{path.suffix}",
        )
    if found.st_nlink != 1:
        raise NotPermitted(
            f"{path} has a second name (a hard link), which would keep the old text", hint="copy it first"
        )
    try:
        return OwnFile(path, data.decode("utf-8"), found)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Untranslatable(f"{path}: line {line} is no UTF-8 text") from None


def write_back(one: OwnFile, text: str) -> None:
    """Write ``text`` in its place, with the same rights. Raises Refused where the file is another one by now, NotTrusted for a
    link of another account, else Error."""
    try:
        fd = ownership.open_judged(one.path)
        try:
            _require_same(os.fstat(fd), one)
            place = Path(f"/proc/self/fd/{fd}").readlink()  # where it really lies, whatever links led to it
            rights = ownership.reach(fd)
        finally:
            os.close(fd)
        with ownership.held(place.parent) as here:
            _require_same((here / place.name).lstat(), one)
            write_whole(here / place.name, text, mode=rights)
    except OSError as error:
        raise from_os_error(error, f"write {one.path}") from None


def _require_same(now: os.stat_result, one: OwnFile) -> None:
    if _mark(now) != _mark(one.found):
        raise Refused(f"{one.path} has changed since it was read", hint="nothing was written; type this again")


def _mark(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_mode, found.st_uid
