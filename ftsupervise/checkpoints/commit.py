"""Adopt a checkpoint that another program wrote, as it is: read every file once, and write the manifest beside them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.checkpoints import block_lists
from ftsupervise.checkpoints.contents import Contents, FileFacts, contents_of, leads_inside
from ftsupervise.checkpoints.digest import (
    best_algorithm,
    hash_file,
    hash_link,
    hasher,
    in_parallel,
    path_below,
    threads,
)
from ftsupervise.checkpoints.find import checkpoints_in
from ftsupervise.checkpoints.layouts import recognise
from ftsupervise.checkpoints.manifest import (
    FOLDER_NAME,
    CheckpointLayout,
    FileEntry,
    Manifest,
    make_record_folder,
    read_manifest,
    root_of,
    write_manifest,
)
from ftsupervise.checkpoints.rank_lists import own_files, rank_in
from ftsupervise.host import files
from ftsupervise.host.ownership import reach, remove_entry, settle, user_name
from ftsupervise.rundir.lineage import Lineage
from ftsupervise.rundir.paths import sync_directory
from ftsupervise.rundir.records import read_record, time_of, write_json

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ftsupervise.rundir.lineage import Lineage

_SYNCED_AT_ONCE = 4  # files at least: they wait for the disk, not for a processor
_SMALL = 4 << 20  # bytes whose digests are taken sooner than a thread is begun


class NotComplete(ValueError):
    """The layout's own sign says that the checkpoint is not complete, or it changes while it is read."""


class Origin(NamedTuple):
    """The fields of a manifest besides its files. None: as the layout says."""

    at: datetime | None = None  # default: when the newest file was written
    step: int | None = None
    world: int | None = None
    run: str = ""
    attempt: int | None = None
    metrics: dict[str, float] = {}  # noqa: RUF012 - never changed
    run_id: str = ""
    run_dir: str = ""

    def written_by(self, me: Lineage | None) -> Origin:
        """Return it with the run that wrote the checkpoint."""
        return self if me is None else self._replace(run=me.name or self.run, run_id=me.id, run_dir=me.root)


def commit(
    checkpoint: Path,
    origin: Origin = Origin(),  # noqa: B008 - a frozen value
    *,
    by_its_sign: bool = False,
    progress: Callable[[int], object] = lambda done: None,
) -> Manifest:
    """Write the manifest of a checkpoint, a folder or one file. All of it is durable then.

    ``by_its_sign``: only one whose own sign says that it is complete. Of any other, only a person knows that it is.

    Raises NotComplete, and OSError; then no manifest was written.
    """
    contents = contents_of(checkpoint)
    found = recognise(checkpoint, contents)
    if found.complete is False:
        raise NotComplete(f"{checkpoint} is not complete: {found.why}")
    if by_its_sign and not found.complete:
        raise NotComplete(f"{checkpoint} may not be complete: {found.why}; name it by itself to adopt it")
    for path, kind in contents.irregular.items():
        raise NotComplete(f"{checkpoint}/{path} is {kind}: a checkpoint holds files and folders only")
    for path, one in contents.files.items():
        if one.is_link and not leads_inside(checkpoint, path):
            raise NotComplete(f"{checkpoint}/{path} leads out of the checkpoint: copy the file in place of the link")
    entries = entries_of(root_of(checkpoint), contents.files.values(), progress=progress)
    require_still(checkpoint, contents)
    sync_folders(checkpoint, contents)
    step = origin.step if origin.step is not None else found.step
    world = origin.world if origin.world is not None else found.world
    known = origin._replace(step=step, world=world, at=origin.at or newest_write(contents))
    manifest = manifest_from(entries, known, found.layout)._replace(adopted=True)
    write_manifest(checkpoint, manifest)
    return manifest


def manifest_from(entries: Iterable[FileEntry], origin: Origin, layout: CheckpointLayout) -> Manifest:
    """Return the manifest of files whose digests were taken here."""
    return Manifest(
        step=origin.step,
        files=tuple(sorted(entries)),
        algorithm=best_algorithm(),
        layout=layout,
        world=origin.world,
        run=origin.run,
        attempt=origin.attempt,
        host=os.uname().nodename,
        user=user_name(),
        at=origin.at,
        metrics=origin.metrics,
        run_id=origin.run_id,
        run_dir=origin.run_dir,
    )


def newest_write(contents: Contents) -> datetime | None:
    newest = max((one.facts for one in contents.files.values()), key=lambda facts: facts.st_mtime, default=None)
    return time_of(newest) if newest is not None else None


def entries_of(
    root: Path, found: Iterable[FileFacts], *, progress: Callable[[int], object] = lambda done: None
) -> tuple[FileEntry, ...]:
    """Return the digests of files below ``root``. All of them are durable then.

    Raises NotComplete for one that changes meanwhile, OSError.
    """
    with Syncs() as syncs:
        return digests_of(root, found, syncs, progress=progress)


def digests_of(
    root: Path, found: Iterable[FileFacts], syncs: Syncs, *, progress: Callable[[int], object] = lambda done: None
) -> tuple[FileEntry, ...]:
    """Return the digests of files below ``root``, while ``syncs`` makes them durable: the disk writes as the processor
    works.

    Raises NotComplete for one that changes meanwhile, OSError.
    """
    algorithm = best_algorithm()
    largest_first = sorted(found, key=lambda one: -one.facts.st_size)
    for one in largest_first:
        if not one.is_link:
            syncs.file(path_below(root, one.path))
    at_once = 1 if sum(one.facts.st_size for one in largest_first) < _SMALL else 0
    return tuple(in_parallel(lambda one: _entry(root, one, algorithm, progress), largest_first, at_once))


class Syncs:
    """Files and folders on their way to the disk, all at once: a journal writes them together. Durable at the end of the block,
    which raises OSError where one is not."""

    def __init__(self) -> None:
        self._under_way: list[Future[None]] = []

    def __enter__(self) -> Syncs:
        from concurrent.futures import ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(max(_SYNCED_AT_ONCE, threads()), "checkpoint-sync")
        return self

    def file(self, path: str | os.PathLike[str]) -> None:
        self._under_way.append(self._pool.submit(_sync_file, path))

    def folder(self, path: Path) -> None:
        """Make the names in it durable. They are there already."""
        self._under_way.append(self._pool.submit(sync_directory, path))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for one in self._under_way:
                one.result()


def _entry(root: Path, one: FileFacts, algorithm: str, progress: Callable[[int], object]) -> FileEntry:
    path = path_below(root, one.path)
    if one.is_link:
        linked = hash_link(path, algorithm)
        return FileEntry(one.path, linked.size, linked.digest, True)
    blocks = bytearray()
    hashed = hash_file(path, algorithm, progress=progress, blocks=blocks)
    if not hashed.steady or hashed.size != one.facts.st_size:
        raise NotComplete(f"{path} changed while it was read: it is still being written")
    block_lists.leave(root, one.path, blocks)
    return FileEntry(one.path, hashed.size, hashed.digest)


def _sync_file(path: str | os.PathLike[str]) -> None:
    fd = files.open_regular(path)
    try:
        _sync(fd)
    finally:
        os.close(fd)


def sync_folders(checkpoint: Path, contents: Contents) -> None:
    """Make the names of all files durable, the deepest folders first."""
    for folder in sorted(contents.folders, key=len, reverse=True):
        sync_directory(checkpoint / folder)
    if not contents.folders:
        sync_directory(checkpoint.parent)


def require_still(checkpoint: Path, before: Contents) -> None:
    """Raise NotComplete unless the checkpoint is as it was when ``before`` was seen, OSError."""
    if changed := _changed(before, contents_of(checkpoint)):
        raise NotComplete(f"{checkpoint} is still being written: {changed}")


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EROFS, errno.EPERM):  # a file system that cannot
            raise


def _changed(before: Contents, after: Contents) -> str:
    def facts(contents: Contents) -> dict[str, tuple[int, int]]:
        return {path: (one.facts.st_size, one.facts.st_mtime_ns) for path, one in contents.files.items()}

    first, second = facts(before), facts(after)
    other = sorted(path for path in first.keys() | second.keys() if first.get(path) != second.get(path))
    return f"{other[0]} has changed" if other else ""


# ------------------------------------------------------------------------------------------

# Files that have not changed since the last checkpoint are kept once.
#
# Each file of a new checkpoint that has the path, size, digest and every byte of that of the newest committed one becomes a
# reflink of it, or a hard link where the file system has no reflinks. It happens before the new file is synced, so its bytes
# mostly never reach the disk. Both files are read and compared, the old one from the disk: a rotten old one is never shared.
# ``shared.json`` beside the manifest says how long the chain is; each n-th checkpoint shares nothing.

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
        next(
            (one for one in checkpoints_in(folder, run=run) if one.committed and one.trusted and one.path.is_dir()),
            None,
        )
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
        remove_entry(page)
    for one in left:
        if one.facts.st_nlink > 1:
            remove_entry(Path(path_below(staged, one.path)))


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
        files.rename(temporary, new)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)
