"""Files that have not changed since the last checkpoint are kept once.

Each file of a new checkpoint that has the path, size, digest and every byte of that of the newest committed one becomes a
reflink of it, or a hard link where the file system has no reflinks. It happens before the new file is synced, so its bytes
mostly never reach the disk. Both files are read and compared, the old one from the disk: a rotten old one is never shared.
``shared.json`` beside the manifest says how long the chain is; each n-th checkpoint shares nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.contents import FileFacts, contents_of
from ftsupervise.checkpoints.digest import best_algorithm, hasher, in_parallel, path_below
from ftsupervise.checkpoints.find import checkpoints_in
from ftsupervise.checkpoints.manifest import FOLDER_NAME, FileEntry, make_record_folder, read_manifest
from ftsupervise.checkpoints.shards import own_files, rank_in
from ftsupervise.host import files
from ftsupervise.host.modes import reach, settle
from ftsupervise.rundir.lineage import Lineage
from ftsupervise.rundir.records import read_record, write_json

_FICLONE = 0x40049409
_SMALLEST = 64 * 1024  # bytes: smaller ones are not worth two system calls
_PIECE = 1 << 20
_PAGE = "shared.json"


class Shared(NamedTuple):
    """``.ftsupervise/shared.json``: what a checkpoint has in common with the one before."""

    base: str
    generation: int  # checkpoints since the last one that was written in full
    files: int = 0
    size: int = 0  # bytes


class Base(NamedTuple):
    """The checkpoint whose files may be shared."""

    path: Path
    generation: int
    entries: dict[str, FileEntry]


def base_for(folder: Path, every: int, run: Lineage | None = None) -> Base | None:
    """Return the newest committed checkpoint of ``folder`` that is not another ``run``'s; None where the next is to be
    written in full. Raises OSError."""
    newest = (
        next((one for one in checkpoints_in(folder, run=run) if one.committed and one.path.is_dir()), None)
        if every > 1
        else None
    )
    if newest is None:
        return None
    try:
        page = read_record(Shared, newest.path / FOLDER_NAME / _PAGE)
        manifest = read_manifest(newest.path)
    except (OSError, ValueError):  # a damaged one is no base
        return None
    generation = page.generation if page is not None else 0
    if manifest is None or manifest.algorithm != best_algorithm() or generation + 1 >= every:
        return None
    return Base(newest.path, generation, {one.path: one for one in manifest.files if not one.link})


def share(staged: Path, found: Iterable[FileFacts], base: Base | None) -> tuple[FileEntry, ...]:
    """Replace the files among ``found`` that ``base`` has too; return their entries.

    A file that cannot be shared stays as it is.
    """
    if base is None:
        return ()
    wanted = []
    for one in found:
        entry = base.entries.get(one.path)
        if entry is not None and not one.is_link and one.facts.st_size == entry.size >= _SMALLEST:
            wanted.append(entry)
    return tuple(entry for entry in in_parallel(lambda entry: _share_one(staged, base.path, entry), wanted) if entry)


def write_shared(staged: Path, base: Base | None, entries: Iterable[FileEntry]) -> tuple[Path, ...]:
    """Record how long the chain is, where there may be one; nothing for a checkpoint that was written in full.

    It is written before anything is shared as well, without ``entries``: so ``cut_off`` sees that a commit has begun. Returns
    the pages that were written and are not durable yet. Raises OSError.
    """
    if base is None:
        return ()
    same = [one for one in entries if base.entries.get(one.path) == one and one.size >= _SMALLEST]
    make_record_folder(staged / FOLDER_NAME)
    page = Shared(base.path.name, base.generation + 1, len(same), sum(one.size for one in same))
    write_json(staged / FOLDER_NAME / _PAGE, page, sync=False)
    return (staged / FOLDER_NAME / _PAGE,)


def cut_off(staged: Path, rank: int, others: Collection[int]) -> None:
    """Remove what a save of that name that failed has left as hard links of a committed checkpoint: who opens such a file to
    write it anew writes into that checkpoint. Each rank does it before it writes, for the files that bear its number; rank 0
    for all the rest too. ``others``: ranks that may be at work here by now. Raises OSError.
    """
    left = list(own_files(staged, rank))
    page = staged / FOLDER_NAME / _PAGE
    if not rank and page.exists():  # rank 0 had begun to commit
        left += [one for path, one in contents_of(staged).files.items() if rank_in(path) not in others]
        page.unlink()
    for one in left:
        if one.facts.st_nlink > 1:
            Path(path_below(staged, one.path)).unlink(missing_ok=True)


def _share_one(staged: Path, base: Path, entry: FileEntry) -> FileEntry | None:
    new = path_below(staged, entry.path)
    try:
        old = files.open_regular(path_below(base, entry.path))
        try:
            mine = files.open_regular(new)
            try:
                if not _equal(old, mine, entry):
                    return None
            finally:
                os.close(mine)
            _replace(old, path_below(base, entry.path), Path(new))
        finally:
            os.close(old)
    except OSError:  # it stays a file of its own
        return None
    return entry


def _equal(old: int, new: int, entry: FileEntry) -> bool:
    """Return whether both have the owner, the size and the bytes, and these the digest."""
    first, second = os.fstat(old), os.fstat(new)
    if (first.st_uid, first.st_size, first.st_dev) != (
        second.st_uid,
        entry.size,
        second.st_dev,
    ) or first.st_mode & 0o022:
        return False
    os.posix_fadvise(old, 0, 0, os.POSIX_FADV_DONTNEED)  # what the disk has, not what the memory still has of it
    digest, offset = hasher(best_algorithm()), 0
    while offset < entry.size:
        piece = os.pread(new, _PIECE, offset)
        if not piece or piece != os.pread(old, len(piece), offset):
            return False
        digest.update(piece)
        offset += len(piece)
    return offset == second.st_size == os.fstat(new).st_size and digest.hexdigest() == entry.digest


def _replace(old: int, path: str, new: Path) -> None:
    """Put a reflink or a hard link of the open ``old`` in the place of ``new``, whole. Raises OSError."""
    fd, temporary = files.create_temporary(new.parent, new.name, 0o600)
    try:
        try:
            fcntl.ioctl(fd, _FICLONE, old)
            settle(fd, reach(old).within(reach(new)))
            os.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS):
                raise
            os.unlink(temporary)
            os.link(path, temporary, follow_symlinks=False)
            if not os.path.samestat(os.lstat(temporary), os.fstat(old)):
                raise OSError(errno.ESTALE, "was replaced meanwhile", path) from None
        os.rename(temporary, new)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
