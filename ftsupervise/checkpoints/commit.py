"""Adopt a checkpoint that another program wrote, as it is: read every file once, and write the manifest beside them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.contents import Contents, FileFacts, contents_of, leads_inside
from ftsupervise.checkpoints.digest import best_algorithm, hash_link, hash_open, in_parallel, path_below
from ftsupervise.checkpoints.layouts import recognise
from ftsupervise.checkpoints.manifest import FileEntry, Manifest, root_of, write_manifest
from ftsupervise.host import files
from ftsupervise.host.ownership import user_name
from ftsupervise.rundir.paths import sync_directory


class NotComplete(ValueError):
    """The layout's own sign says that the checkpoint is not complete, or it changes while it is read."""


class Origin(NamedTuple):
    """What a manifest says besides the files. None: as the layout says."""

    at: datetime | None = None  # default: when the newest file was written
    step: int | None = None
    world: int | None = None
    run: str = ""
    attempt: int | None = None
    metrics: dict[str, float] = {}  # noqa: RUF012 - never changed


def commit(
    checkpoint: Path,
    origin: Origin = Origin(),  # noqa: B008 - a frozen value
    *,
    told: Callable[[int], object] = lambda done: None,
) -> Manifest:
    """Write the manifest of a checkpoint, a folder or one file. All of it is durable then.

    Raises NotComplete, and OSError; then no manifest was written.
    """
    contents = contents_of(checkpoint)
    found = recognise(checkpoint, contents)
    if found.complete is False:
        raise NotComplete(f"{checkpoint} is not complete: {found.why}")
    entries = entries_of(checkpoint, contents, told=told)
    after = contents_of(checkpoint)
    if changed := _changed(contents, after):
        raise NotComplete(f"{checkpoint} is still being written: {changed}")
    root = root_of(checkpoint)
    for folder in contents.folders:
        sync_directory(root / folder)
    manifest = Manifest(
        step=origin.step if origin.step is not None else found.step,
        files=entries,
        algorithm=best_algorithm(),
        layout=found.layout,
        world=origin.world if origin.world is not None else found.world,
        run=origin.run,
        attempt=origin.attempt,
        host=os.uname().nodename,
        user=user_name(),
        at=origin.at or newest_write(contents),
        metrics=origin.metrics,
    )
    write_manifest(checkpoint, manifest)
    return manifest


def newest_write(contents: Contents) -> datetime | None:
    from ftsupervise.rundir.records import time_of

    newest = max((one.facts for one in contents.files.values()), key=lambda facts: facts.st_mtime, default=None)
    return time_of(newest) if newest is not None else None


def entries_of(
    checkpoint: Path, contents: Contents, *, told: Callable[[int], object] = lambda done: None
) -> tuple[FileEntry, ...]:
    """Digests of all files, which are synced too. Raises NotComplete, OSError."""
    for path, kind in contents.odd.items():
        raise NotComplete(f"{checkpoint}/{path} is {kind}: a checkpoint holds files and folders only")
    for path, one in contents.files.items():
        if one.is_link and not leads_inside(checkpoint, path):
            raise NotComplete(f"{checkpoint}/{path} leads out of the checkpoint: copy the file in place of the link")
    algorithm, root = best_algorithm(), root_of(checkpoint)
    largest_first = sorted(contents.files.values(), key=lambda one: -one.facts.st_size)
    entries = in_parallel(lambda one: _entry(root, one, algorithm, told), largest_first)
    return tuple(sorted(entries))


def _entry(root: Path, one: FileFacts, algorithm: str, told: Callable[[int], object]) -> FileEntry:
    path = path_below(root, one.path)
    if one.is_link:
        linked = hash_link(path, algorithm)
        return FileEntry(one.path, linked.size, linked.digest, True)
    fd = files.open_regular(path)
    try:
        hashed = hash_open(fd, algorithm, told=told)
        _sync(fd)
    finally:
        os.close(fd)
    if not hashed.steady or hashed.size != one.facts.st_size:
        raise NotComplete(f"{path} changed while it was read: it is still being written")
    return FileEntry(one.path, hashed.size, hashed.digest)


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
