"""One writer: an attempt that still runs after a newer one has begun can no longer write the files that attempts share.

Slurm does not keep two attempts apart: an array's ``%1``, ``afterany`` and ``singleton`` all let the next job begin while
the old one is COMPLETING, and the ranks on a node whose slurmd is lost run on for ever. The generation is the attempt's
number, claimed by mkdir in the run directory. Checking for a greater one before a write is not enough: the writer may be
stopped between its check and its write. So nothing that attempts share is written in place:

    RUN/staging/NNNN/            the staging area of attempt NNNN: beats, state, answers to switches are made here, then renamed
    CHECKPOINTS/.staging/NNNN/   the same for its checkpoints

Before its command begins, an attempt seals every older area: it renames the area away, puts a plain file in its place, moves
out its contents and removes it. After that a rename out of the area (or into it: that is how an old checkpoint is removed) has
no source, wherever the old attempt was stopped:

- POSIX: a rename resolves the path again, which now leads to a file (ENOTDIR). One that had resolved it before finds the entry
  gone or, if it made one meanwhile, a removed directory, in which nothing can be made or found (ENOENT).
- NFS: the client may know the directory by its handle for a minute, whatever its name is now. The entries are gone and the
  handle of a removed directory is stale on the server: ENOENT or ESTALE. Files that are open are moved, not unlinked: an
  unlink by the client that holds one open leaves a ``.nfs…`` behind, and the directory could not be removed.
- Lustre and its like: the metadata server looks names up in the directory's object, and a removed one has none. The staging
  area lies beside the checkpoints, hence on their metadata target; where a rename from there is refused (EXDEV) the commit
  fails and says so.
- The plain file stays for good, so that ``makedirs`` of an old attempt (``torch.distributed.checkpoint`` calls it) cannot
  bring its area back. On a full disk the file may be missing; until the next attempt makes it only ``may_save`` protects.

The fence does not hold for files that were opened before the seal and are written through the handle (they lie in the
deleted area), for code that writes past the area, and for two file systems that do not show each other the same directory.

Anybody who may rename the run directory can lay a link in the place of the areas, and sealed areas are deleted in the end.
So areas are opened by their own names, links are not followed, and all is done below the open folder.

Standard library only: the guard imports this inside the training loop.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from ftsupervise.host.files import open_folder, rename
from ftsupervise.host.ownership import claim_folder, make_folder
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import as_counts

STAGING = ".staging"  # beside the checkpoints
_ALONE = "alone"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
SEALED = ".sealed-"  # a staging area that was renamed away, to be emptied and removed
SWEPT = ".swept-"  # its former contents, to be deleted when there is time
ASIDE = ".aside-"  # + the name of a checkpoint that its attempt is about to set aside: a sealer puts it back
_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
_PATIENCE = 10.0  # seconds for one staging area to be emptied; no process can add to it any more


def newer(attempts: str | os.PathLike[str], mine: int) -> int | None:
    """Return the newest attempt claimed after attempt ``mine``, None if mine is the newest. Raises OSError if it cannot
    read, and where another account has put another directory in its place: by the owner of ``mine``, or of the newest where
    ``mine`` does not lie there any more (the run directory was restored from a backup, and the run was started again in it).

    The directory is opened anew each time: on NFS that is what revalidates a cached listing.
    """
    if max(as_counts(os.listdir(attempts)), default=mine) <= mine:  # each rank asks once a second
        return None
    with open_folder(attempts, follow=True) as fd:
        numbers = as_counts(os.listdir(fd))
        newest = max(numbers, default=mine)
        if newest > mine > 0:
            judged = f"{mine if mine in numbers else newest:04d}"
            if os.lstat(judged, dir_fd=fd).st_uid not in (os.geteuid(), 0):
                raise PermissionError(errno.EPERM, "belongs to another account", f"{os.fspath(attempts)}/{judged}")
    return newest if newest > mine else None


def superseded(rundir: RunDir, mine: int) -> int | None:
    """Return the same as ``newer``, but None also when that cannot be read: an unknown stops no attempt."""
    try:
        return newer(rundir.attempts, mine)
    except OSError:
        return None


# ------------------------------------------------------------------------------------------------ one's own staging area


def staging(rundir: RunDir, checkpoints: Path) -> Path:
    """Return the folder where the attempts of this run stage checkpoints for ``checkpoints``.

    Two runs may share that folder, and the replica groups of a run do. The inode of the attempts tells them apart, on
    every client and by every path. Raises OSError.
    """
    if checkpoints == rundir.checkpoints and rundir.whole is None:
        return checkpoints / STAGING
    return checkpoints / STAGING / f"run-{rundir.attempts.stat().st_ino}"


def area_alone(world: int) -> str:
    """Return the name of the staging area of a program of ``world`` ranks that no supervisor started. No fence holds for it."""
    return f"{_ALONE}-{world}" if world > 1 else _ALONE


def is_alone(name: str) -> bool:
    """Return whether it is such a name."""
    return name == _ALONE or name.startswith(f"{_ALONE}-")


def open_area(areas: Path, number: int) -> Path | None:
    """Return the staging area of attempt ``number``; None when a newer attempt has sealed it. Raises OSError."""
    area = areas / f"{number:04d}"
    make_folder(areas, parents=True)
    with open_folder(areas):
        try:
            claim_folder(area)
        except FileExistsError:
            if is_sealed(area):
                return None
    return area


def is_sealed(area: Path) -> bool:
    """Return whether a newer attempt has sealed this staging area, or it was removed. Unknown counts as no."""
    try:
        fd = os.open(area, _DIRECTORY)
    except OSError as error:
        return error.errno in _GONE
    os.close(fd)
    return False


def move(source: Path, target: Path, area: Path) -> bool:
    """Rename out of ``area`` or into it: all or nothing, also against a seal.

    Returns False when the area is sealed and nothing was done. Raises OSError for every other error, EPERM too where a link of
    another account leads to one of the two.
    """
    try:
        rename(source, target)
    except OSError as error:
        if error.errno in _GONE and is_sealed(area):
            return False
        raise
    return True


# ----------------------------------------------------------------------------------------------------------- sealing


def last_area(areas: Path) -> int:
    """Return the greatest number that has a staging area or had one; 0 if there is none or it cannot be read."""
    try:
        return max(as_counts(os.listdir(areas)), default=0)
    except OSError:
        return 0


def seal(areas: Path, before: int, numbers: Iterable[int]) -> list[Path]:
    """Seal the staging areas of all attempts before ``before``: those of ``numbers``, and all others that lie there.

    When this returns, no older attempt can change anything through its area. Returns the folders that hold the former
    contents of the areas, also those an earlier attempt did not get to delete. Raises OSError when one could not be
    sealed.
    """
    make_folder(areas, parents=True)
    with open_folder(areas) as fd:
        return _seal(areas, fd, before, numbers)


def _seal(areas: Path, fd: int, before: int, numbers: Iterable[int]) -> list[Path]:
    with os.scandir(fd) as found:
        there = {entry.name: entry.is_dir(follow_symlinks=False) for entry in found}
    old = {number for number in numbers if number < before}
    old |= {number for number in as_counts(there) if number < before}
    full: OSError | None = None
    for number in sorted(old):
        name = f"{number:04d}"
        if there.get(name, True):
            full = _shut(areas, fd, name, before) or full
    for name in os.listdir(fd):
        if name.startswith(SEALED):
            _empty(areas, fd, name, f"{SWEPT}{name.removeprefix(SEALED)}")
    if full is not None:
        raise full
    return [areas / name for name in sorted(os.listdir(fd)) if name.startswith(SWEPT)]


def _shut(areas: Path, fd: int, name: str, by: int) -> OSError | None:
    """Rename the staging area away and put a plain file in its place; return the error when only the latter could not
    be done.
    """
    for turn in range(100):  # again when the old attempt made it anew in between
        try:
            # the slash: only if it is a directory, not the plain file that another sealer has just put there
            aside = f"{SEALED}{name}-by-{by}-{os.getpid()}-{turn}"
            os.rename(f"{name}/", aside, src_dir_fd=fd, dst_dir_fd=fd)
        except FileNotFoundError:
            pass
        except NotADirectoryError:
            return None
        try:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444, dir_fd=fd))
            return None
        except FileExistsError:
            if is_sealed(areas / name):  # a newer attempt was faster
                return None
        except OSError as error:
            return error
    return OSError(errno.EBUSY, "is made anew as fast as it is sealed", str(areas / name))


def _empty(areas: Path, at: int, sealed: str, swept: str) -> None:
    """Move out the contents of ``sealed`` and remove it: from then on its handle is dead too.

    ``at``: ``areas``, open. A link is left alone: none of ours is one, and its target was never in an area.
    """
    until = time.monotonic() + _PATIENCE
    count = 0
    while True:
        try:
            with open_folder(sealed, dir_fd=at) as fd:
                for name in os.listdir(fd):
                    if name.startswith(ASIDE) and _put_back(areas, name, fd):
                        continue
                    make_folder(areas / swept)
                    count += 1
                    os.rename(name, f"{swept}/{name}.{os.getpid()}.{count}", src_dir_fd=fd, dst_dir_fd=at)
        except FileNotFoundError:  # another one seals too
            pass
        except NotADirectoryError:
            # a plain file that a file system did not tell from a staging area
            if stat.S_ISREG(os.lstat(areas / sealed).st_mode):
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


def _put_back(areas: Path, name: str, fd: int) -> bool:
    """Put a checkpoint back in its place that an older attempt did not get to set aside: the newer one judges it anew. It gets
    another name where a newer one of its name was saved."""
    if STAGING not in (areas.name, areas.parent.name):
        return False
    home = areas.parent if areas.name == STAGING else areas.parent.parent
    label = name.removeprefix(ASIDE)
    for turn in range(1, 100):
        target = home / (label if turn == 1 else f"{label}~{turn}")
        if not os.path.lexists(target):
            os.rename(name, target, src_dir_fd=fd)
            return True
    raise OSError(errno.EEXIST, "is there a hundred times already", str(home / label))
