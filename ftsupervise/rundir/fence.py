"""One writer: an attempt that still breathes after a newer one has begun cannot write any more, whatever it believes.

Slurm does not keep two attempts apart: an array's ``%1``, ``afterany`` and ``singleton`` all let the next job begin while
the old one is COMPLETING, and the ranks on a node whose slurmd is lost run on for ever. The generation is the attempt's
number, claimed by mkdir in the run directory. Looking for a greater one before a write is not enough: the writer may be
stopped between its look and its write. So nothing that attempts share is written in place:

    RUN/desks/NNNN/              the desk of attempt NNNN: beats, marks, answers to switches are made here, then renamed
    CHECKPOINTS/.staging/NNNN/   the same for its checkpoints

A newer attempt, before its command begins, seals every older desk: renames it away, puts a plain file in its place, moves out
what lies in it, removes it. After that a rename out of it (or into it: that is how an old checkpoint is taken away) has no
source, wherever it was stopped:

- POSIX: a rename begins anew at the path, which now leads to a file (ENOTDIR); one that had resolved the path before finds
  the entry gone or, when it made one meanwhile, a removed directory, in which nothing can be made or found (ENOENT).
- NFS: the client may know the directory by its handle for a minute, whatever its name is now. The entries are gone and the
  handle of a removed directory is stale on the server: ENOENT or ESTALE. Files that are open are moved, not unlinked: an
  unlink by the client that holds one open leaves a ``.nfs…`` behind, and the directory could not be removed.
- Lustre and its like: names are looked up in the directory's object by the metadata server; a removed one has none. The
  staging folder lies beside the checkpoints, hence on their metadata target; where a rename from there is refused (EXDEV)
  the commit fails and says so.
- The plain file stays for good: ``makedirs`` of an old attempt (``torch.distributed.checkpoint`` does that) cannot bring its
  desk back. On a full disk it may be missing; then only ``may_save`` stands there until the next attempt makes it.

What does not hold: files opened before the seal and written through the handle (they lie in what is swept away), whatever
code writes past the desk, and two file systems that do not show each other the same directory.

Whoever may rename the run directory can lay a link in the place of the desks, and what is sealed is deleted in the end. So
desks are opened by their own names, links not followed, and all is done below the open folder.

Standard library only: the guard imports this inside the training loop.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ftsupervise.host.modes import claim_folder, make_folder
from ftsupervise.rundir.paths import RunDir

STAGING = ".staging"  # beside the checkpoints
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SEALED = ".sealed-"  # a desk that was renamed away, to be emptied and removed
_SWEPT = ".swept-"  # what lay on it, to be deleted when there is time
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
_PATIENCE = 10.0  # seconds for one desk to be emptied; nobody can add to it any more


def newer(attempts: str | os.PathLike[str], mine: int) -> int | None:
    """The newest attempt claimed after attempt ``mine``, None if mine is the newest. Raises OSError if it cannot look.

    The directory is opened anew each time: on NFS that is what revalidates a cached listing.
    """
    fd = os.open(attempts, _DIRECTORY)
    try:
        newest = max((int(name) for name in os.listdir(fd) if name.isascii() and name.isdigit()), default=mine)
    finally:
        os.close(fd)
    return newest if newest > mine else None


def superseded(rundir: RunDir, mine: int) -> int | None:
    """Like ``newer``; None as well when it cannot be told: what cannot be seen stops nobody."""
    try:
        return newer(rundir.attempts, mine)
    except OSError:
        return None


# ---------------------------------------------------------------------------------------------------- one's own desk


def staging(rundir: RunDir, checkpoints: Path) -> Path:
    """Where the attempts of this run stage checkpoints for ``checkpoints``.

    Two runs may share that folder. The inode of the run's attempts tells them apart, on every client and by every path.
    Raises OSError.
    """
    if checkpoints == rundir.checkpoints:
        return checkpoints / STAGING
    return checkpoints / STAGING / f"run-{rundir.attempts.stat().st_ino}"


def open_desk(desks: Path, number: int) -> Path | None:
    """The desk of attempt ``number``; None when a newer attempt has sealed it. Raises OSError."""
    desk = desks / f"{number:04d}"
    make_folder(desks, parents=True)
    with _opened(desks):
        try:
            claim_folder(desk)
        except FileExistsError:
            if is_sealed(desk):
                return None
    return desk


def is_sealed(desk: Path) -> bool:
    """Has a newer attempt sealed this desk? Also true when somebody has removed it. What cannot be seen is not so."""
    try:
        fd = os.open(desk, _DIRECTORY)
    except OSError as error:
        return error.errno in _GONE
    os.close(fd)
    return False


def move(source: Path, target: Path, desk: Path) -> bool:
    """Rename out of ``desk`` or into it: all or nothing, also against a seal. False: the desk is sealed, nothing was done.

    Raises OSError for everything else that goes wrong.
    """
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno in _GONE and is_sealed(desk):
            return False
        raise
    return True


# ----------------------------------------------------------------------------------------------------------- sealing


def last_desk(desks: Path) -> int:
    """The greatest number that has a desk or had one; 0 if there is none or nothing can be seen."""
    try:
        return max((int(name) for name in os.listdir(desks) if name.isascii() and name.isdigit()), default=0)
    except OSError:
        return 0


def seal(desks: Path, before: int, numbers: Iterable[int]) -> list[Path]:
    """Seal the desks of all attempts before ``before``: those of ``numbers``, and what else lies there.

    When this returns, no older attempt changes anything through its desk any more. Gives the folders that hold what lay on
    desks, also those an earlier attempt did not get to delete. Raises OSError when one could not be sealed.
    """
    make_folder(desks, parents=True)
    with _opened(desks) as fd:
        return _seal(desks, fd, before, numbers)


def _seal(desks: Path, fd: int, before: int, numbers: Iterable[int]) -> list[Path]:
    with os.scandir(fd) as found:
        there = {entry.name: entry.is_dir(follow_symlinks=False) for entry in found}
    old = {number for number in numbers if number < before}
    old |= {int(name) for name in there if name.isascii() and name.isdigit() and int(name) < before}
    full: OSError | None = None
    for number in sorted(old):
        name = f"{number:04d}"
        if there.get(name, True):
            full = _shut(desks, fd, name, before) or full
    for name in os.listdir(fd):
        if name.startswith(_SEALED):
            _empty(desks, fd, name, f"{_SWEPT}{name.removeprefix(_SEALED)}")
    if full is not None:
        raise full
    return [desks / name for name in sorted(os.listdir(fd)) if name.startswith(_SWEPT)]


def _shut(desks: Path, fd: int, name: str, by: int) -> OSError | None:
    """Rename the desk away and put a plain file in its place; the error when only the latter could not be done."""
    for turn in range(100):  # again when the old attempt made it anew in between
        try:
            # the slash: only if it is a directory, not the plain file that another sealer has just put there
            aside = f"{_SEALED}{name}-by-{by}-{os.getpid()}-{turn}"
            os.rename(f"{name}/", aside, src_dir_fd=fd, dst_dir_fd=fd)
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            return None
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444, dir_fd=fd))
            return None
        except FileExistsError:
            if is_sealed(desks / name):  # somebody newer was faster
                return None
        except OSError as error:
            return error
    return OSError(errno.EBUSY, "is made anew as fast as it is sealed", str(desks / name))


def _empty(desks: Path, at: int, sealed: str, swept: str) -> None:
    """Move out what lies in ``sealed`` and remove it: from then on its handle is dead too. ``at``: ``desks``, open.

    A link is left alone: none of ours is one, and what it leads to was never on a desk.
    """
    until = time.monotonic() + _PATIENCE
    count = 0
    while True:
        try:
            with _opened(sealed, at) as fd:
                for name in os.listdir(fd):
                    make_folder(desks / swept)
                    count += 1
                    os.rename(name, f"{swept}/{name}.{os.getpid()}.{count}", src_dir_fd=fd, dst_dir_fd=at)
        except FileNotFoundError:  # another one seals too
            pass
        except NotADirectoryError:
            # a plain file that a file system did not tell from a desk
            if stat.S_ISREG(os.lstat(desks / sealed).st_mode):
                os.unlink(sealed, dir_fd=at)
            return
        try:
            os.rmdir(sealed, dir_fd=at)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or time.monotonic() > until:
                raise


@contextmanager
def _opened(folder: str | os.PathLike[str], at: int | None = None) -> Iterator[int]:
    """A folder by its own name. Raises OSError: ENOTDIR where a link stands in its place."""
    fd = os.open(folder, _DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
    try:
        yield fd
    finally:
        os.close(fd)
