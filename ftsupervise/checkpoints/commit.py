"""Adopt a checkpoint that another program wrote, as it is: read every file once, and write the manifest beside them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.checkpoints import block_lists
from ftsupervise.checkpoints.contents import Contents, FileFacts, contents_of, leads_inside
from ftsupervise.checkpoints.digest import best_algorithm, hash_file, hash_link, in_parallel, path_below, threads
from ftsupervise.checkpoints.layouts import recognise
from ftsupervise.checkpoints.manifest import (
    CheckpointLayout,
    FileEntry,
    Manifest,
    root_of,
    write_manifest,
)
from ftsupervise.host import files
from ftsupervise.host.ownership import user_name
from ftsupervise.rundir.paths import sync_directory
from ftsupervise.rundir.records import time_of

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
