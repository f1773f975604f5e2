"""Writes a large file into a folder part by part, so that a copy that was interrupted goes on in the middle of it.

It lies beside the place where it will be, under a name that the same copy finds again, and gets its own name when all of it is
there. What somebody else put there is never gone on with: it is removed, and another file is made.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ftsupervise.host import files
from ftsupervise.host.files import TEMPORARY
from ftsupervise.host.ownership import Reach, settle
from ftsupervise.rundir.paths import sync_directory

_READ = 1 << 20  # bytes that are read at once
_TRIES = 10
_NAME = 100  # bytes of the final name that stand in this one


class PartFile:
    """Such a file, open. All methods raise OSError. ``at_the_end``: called when it is closed."""

    def __init__(self, fd: int, path: Path, target: Path, source: Reach) -> None:
        self.at_the_end: Callable[[], object] = lambda: None
        self._fd, self._path, self._target, self._source = fd, path, target, source

    def __enter__(self) -> PartFile:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
        self.at_the_end()

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def cut(self, size: int) -> None:
        """Drop what lies behind."""
        os.ftruncate(self._fd, size)

    def write(self, at: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done

    def sync(self, at: int) -> None:
        """Make all of it durable, and forget what lies in memory from ``at`` on: it is to be read back from there."""
        os.fsync(self._fd)
        with suppress(OSError):
            os.posix_fadvise(self._fd, at, 0, os.POSIX_FADV_DONTNEED)

    def read(self, at: int, size: int) -> Iterator[bytes]:
        """Yield so many bytes, or those that there are, piece by piece."""
        return pieces_at(self._fd, at, size)

    def finish(self) -> None:
        """Give it its own name, durably."""
        settle(self._fd, self._source)
        os.fsync(self._fd)
        os.replace(self._path, self._target)
        sync_directory(self._target.parent)

    def discard(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)


def open_part(target: Path, source: Reach, tag: str) -> PartFile | None:
    """Return the part of ``target`` that an earlier call with the same ``tag`` has left, or an empty one; None while another
    process works at it. ``source``: who may reach the whole file. Until it is whole, only this account may read it. Raises
    OSError."""
    short = target.name.encode("utf-8", "surrogateescape")[:_NAME].decode("utf-8", "ignore")
    path = target.with_name(f"{TEMPORARY}part-{tag}-{short}")
    for _ in range(_TRIES):
        fd = _open(path)
        if fd is None:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:  # a file system without locks: two that write the same bytes to the same places
            pass
        if _is_still(path, fd):
            return PartFile(fd, path, target, source)
        os.close(fd)
    raise OSError(errno.EBUSY, "is made and removed by another process again and again", str(path))


def _open(path: Path) -> int | None:
    """Return a descriptor of ours to read and write; None: look again."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        try:
            return files.create_new(path, 0o600, read=True)
        except FileExistsError:
            return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENXIO):
            raise
        os.unlink(path)  # a link, or a file of somebody else
        return None
    found = os.fstat(fd)
    ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1
    if ours and not found.st_mode & 0o022:
        return fd
    os.close(fd)
    os.unlink(path)
    return None


def _is_still(path: Path, fd: int) -> bool:
    try:
        there, mine = os.lstat(path), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def pieces_at(fd: int, at: int, size: int) -> Iterator[bytes]:
    """Yield so many bytes of an open file, or those that there are, piece by piece. Raises OSError."""
    while size > 0 and (piece := os.pread(fd, min(_READ, size), at)):
        yield piece
        at, size = at + len(piece), size - len(piece)
