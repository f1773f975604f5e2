"""Create and read files so that nothing another account put in their place can block us, be followed or be overwritten.

A FIFO is not waited for, a symbolic link is not followed, a folder or a device is refused, and a temporary file has an
unguessable name and is created exclusively (O_EXCL). Standard library only: the guard uses this in the training loop.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice

from ftsupervise.host.links import anew, judge, judge_folder

Walked = tuple[str, list[str], list[str]]  # a folder, and the names of the folders and of the other things in it
TEMPORARY = ".tmp-"  # what the name of a temporary file begins with
NO_ROOM = 65_536  # bytes: where less is left on a disk, not even a page of ours is sure to fit
_NAMES = 4096  # that are read of a folder in which a few are looked for
_NAME = 120  # bytes of the final name that stand in a temporary one: 255 is the most that a file system takes


def create_temporary(
    folder: str | os.PathLike[str], name: str, mode: int = 0o644, *, read: bool = False, dir_fd: int | None = None
) -> tuple[int, str]:
    """Make a new empty file in ``folder`` to be renamed to ``name``; return its descriptor, open for writing, and its
    path.

    The name begins with TEMPORARY and ends in 64 random bits. ``mode`` is cut by the umask. ``read``: open for reading
    too. ``dir_fd``: ``folder``, open. Raises OSError.
    """
    short = name.encode("utf-8", "surrogateescape")[:_NAME].decode("utf-8", "ignore")
    path = f"{os.fspath(folder)}/{TEMPORARY}{short}-{os.getpid()}-{os.urandom(8).hex()}"
    return create_new(path, mode, read=read, dir_fd=dir_fd), path


def create_new(
    path: str | os.PathLike[str],
    mode: int = 0o644,
    *,
    read: bool = False,
    append: bool = False,
    dir_fd: int | None = None,
) -> int:
    """Make the file ``path`` and return its descriptor, open for writing. ``mode`` is cut by the umask.

    ``dir_fd``: the folder in which it is made, open and judged. Otherwise the one that ``path`` names is, before anything is
    made: what would have to be taken away again might be another file by then.

    Raises OSError: EEXIST whatever lies there already, a link too; EPERM for a stranger's link on the way (``links.py``).
    """
    if dir_fd is None:
        with folder_of(path) as (at, _):
            return create_new(path, mode, read=read, append=append, dir_fd=at)
    flags = (os.O_RDWR if read else os.O_WRONLY) | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(os.path.basename(path), flags | (os.O_APPEND if append else 0), mode, dir_fd=dir_fd)


@contextmanager
def folder_of(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Open the folder in which ``path`` lies, or will lie; yield it with the name there. Raises OSError as ``open_folder``
    does, which names ``path``."""
    folder, name = os.path.split(path)
    try:
        with open_folder(folder or ".", follow=True, flags=os.O_PATH) as at:
            yield at, name
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give ``source`` the name ``target``, in the place of what has it. Neither of their folders is looked up again once it was
    judged: another one may lie there by then. Raises OSError."""
    with folder_of(source) as (at, name), folder_of(target) as (there, new):
        os.rename(name, new, src_dir_fd=at, dst_dir_fd=there)


def walk(top: str | os.PathLike[str], onerror: Callable[[OSError], object] | None = None) -> Iterator[Walked]:
    """Do as ``os.walk``, but raise OSError for folders too deep for it: others may have made them, where they may write."""
    try:
        yield from os.walk(top, onerror=onerror)
    except RecursionError:
        raise OSError(errno.ENAMETOOLONG, "has too many folders within folders", os.fspath(top)) from None


def remove_tree(folder: str | os.PathLike[str]) -> None:
    """Delete ``folder`` and all in it, as far as that can be done. It follows no stranger's link on the way, and no link at the
    end of it."""
    import shutil

    with suppress(OSError, RecursionError), folder_of(folder) as (at, name):  # too deep, as for ``walk``
        shutil.rmtree(f"/proc/self/fd/{at}/{name}", ignore_errors=True)


@contextmanager
def open_folder(
    path: str | os.PathLike[str], *, follow: bool = False, dir_fd: int | None = None, flags: int = os.O_RDONLY
) -> Iterator[int]:
    """Open the folder ``path`` while something is done in it by its descriptor, whatever is put in its place meanwhile.
    ``dir_fd``: the open folder in which it lies.

    Raises OSError: ENOTDIR for a link unless ``follow``, EPERM for a stranger's link on the way (``links.py``).
    """
    fd = os.open(path, flags | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), dir_fd=dir_fd)
    try:
        if dir_fd is None:
            judge_folder(fd, path)
        yield fd
    finally:
        os.close(fd)


@anew
def open_append(path: str | os.PathLike[str], mode: int = 0o644) -> int:
    """Return a descriptor to append to the regular file ``path``, made if it is not there. Never waits for a FIFO.

    Raises OSError: ELOOP for a symbolic link, EINVAL for another kind of file, EPERM for a file of another account or
    with a second hard link, which may be any file of ours.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags)
        except FileNotFoundError:
            try:
                return create_new(path, mode, append=True)
            except FileExistsError:  # another process was faster
                fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a FIFO without a reader
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path)) from None
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        if found.st_uid not in (os.geteuid(), 0) or found.st_nlink != 1:
            raise OSError(errno.EPERM, "another user's file, or a file with a second hard link", os.fspath(path))
        judge(fd, path)
        os.set_blocking(fd, True)
    except OSError:
        os.close(fd)
        raise
    return fd


def odd_kind(path: str | os.PathLike[str]) -> str:
    """Return the kind of file at ``path``, "a FIFO" or "a folder"; "" for a regular file, a link to one, or no file.

    Raises OSError where that cannot be seen.
    """
    link = False
    try:
        link = stat.S_ISLNK(os.lstat(path).st_mode)
        mode = os.stat(path).st_mode  # noqa: PTH116
    except FileNotFoundError:
        return "a link to nothing" if link else ""
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a link to itself"
        raise
    kinds = ((stat.S_ISREG, ""), (stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket"))
    kind = next((word for is_kind, word in kinds if is_kind(mode)), "device")
    return f"a {'link to a ' if link else ''}{kind}" if kind else ""


@anew
def open_regular(path: str | os.PathLike[str], *, follow: bool = False, dir_fd: int | None = None) -> int:
    """Return a descriptor to read the regular file ``path``. Never waits for a FIFO.

    Raises OSError: ELOOP for a symbolic link unless ``follow``, EINVAL for a FIFO, a folder or a device, EPERM for a stranger's
    link on the way (``links.py``). ``follow``: the caller has judged the way. ``dir_fd``: the open folder in which it lies.
    """
    return reopened(path, follow=follow, dir_fd=dir_fd)


def reopened(path: str | os.PathLike[str], *, follow: bool = False, dir_fd: int | None = None) -> int:
    """Do as ``open_regular``, once: a name of the kernel's for what is open (``/proc/self/fd``) never leads to a newer file."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        if not follow and dir_fd is None:
            judge(fd, path)
    except OSError:
        os.close(fd)
        raise
    return fd


@anew
def read_bounded(path: str | os.PathLike[str], limit: int, *, follow: bool = False, dir_fd: int | None = None) -> bytes:
    """Return the whole regular file ``path``.

    Raises OSError as ``open_regular`` does, and EFBIG for more than ``limit`` bytes.
    """
    fd = open_regular(path, follow=follow, dir_fd=dir_fd)
    with os.fdopen(fd, "rb") as file:
        return read_open(file.fileno(), limit, path)


def read_open(fd: int, limit: int, path: str | os.PathLike[str] = "") -> bytes:
    """Return the rest of ``fd``. Raises OSError, EFBIG when that is more than ``limit`` bytes."""
    parts, left = [], limit + 1
    while left > 0 and (part := os.read(fd, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    if left <= 0:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", os.fspath(path))
    return b"".join(parts)


def among(folder: str | os.PathLike[str] | int, names: Iterable[str] = ()) -> set[str]:
    """Return those of ``names`` that lie in ``folder`` (a path or a descriptor), however full it is. Raises OSError.

    Each call opens a path anew and lists it: on NFS that revalidates the cached folder. Where others may write there,
    the listing may have no end: beyond the first thousands each name is asked for by itself.
    """
    with os.scandir(folder) as found:
        listed = {entry.name for entry in islice(found, _NAMES + 1)}
    if len(listed) <= _NAMES:
        return listed.intersection(names)
    return {name for name in names if _is_there(name, folder)}


def _is_there(name: str, folder: str | os.PathLike[str] | int) -> bool:
    try:
        if isinstance(folder, int):
            os.stat(name, dir_fd=folder, follow_symlinks=False)
        else:
            os.lstat(f"{os.fspath(folder)}/{name}")
    except FileNotFoundError:
        return False
    return True
