"""Bring a checkpoint back from a copy: resumable, and under its name only when every file has its digest.

It is made in ``.restoring-NAME`` beside the checkpoints and renamed at the end. What lies there already, with the right digest,
is not read again. A damaged checkpoint in its place goes into quarantine; nothing is deleted.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints import block_lists, digest
from ftsupervise.checkpoints.contents import leads_inside
from ftsupervise.checkpoints.manifest import FileEntry, Manifest, read_manifest, write_manifest
from ftsupervise.checkpoints.offload import MANIFEST_PATH, WORKERS, CopyDamaged, identity, manifest_in
from ftsupervise.checkpoints.quarantine import set_aside
from ftsupervise.checkpoints.stores import FolderStore, Rights, Store
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify
from ftsupervise.errors import AlreadyRunning, NotFound, NotPermitted
from ftsupervise.host.files import TEMPORARY, create_new, open_folder
from ftsupervise.host.ownership import (
    FOLDER,
    OWN,
    NotTrusted,
    Reach,
    held,
    make_folder,
    make_like,
    reach,
    set_mode,
    settle,
    shown_user,
)
from ftsupervise.host.processes import locked_by_the_killed
from ftsupervise.host.rate import RateLimit
from ftsupervise.printable import to_type
from ftsupervise.rundir.paths import sync_directory

RESTORING = ".restoring-"  # + the name; a restore that was interrupted goes on there
BEGUN = ".ftsupervise-restoring"  # in what a restore has begun
_GENERATION = re.compile(r"(.+)~\d+")


class FoundCopy(NamedTuple):
    """A whole copy in a store."""

    name: str
    folder: str
    manifest: Manifest
    store: Store

    @property
    def is_file(self) -> bool:
        """Return whether the checkpoint is one file, not a folder."""
        return [entry.path for entry in self.manifest.files] == [self.name]

    @property
    def rank(self) -> tuple[int, float]:
        """Return a key that sorts copies by their checkpoints: by step, and of one step by time."""
        at = self.manifest.at
        return (-1 if self.manifest.step is None else self.manifest.step, at.timestamp() if at else 0.0)


class StoreUnseen(NamedTuple):
    """A store, or a copy in it, that could not be looked at."""

    where: str
    why: str


def copies_in(stores: Iterable[Store]) -> tuple[tuple[FoundCopy, ...], tuple[StoreUnseen, ...]]:
    """Return the whole copies, newest first and of one checkpoint in the order of ``stores``, and what could not be seen."""
    found: list[FoundCopy] = []
    unseen: list[StoreUnseen] = []
    for store in stores:
        try:
            folders = store.names()
        except (OSError, NotPermitted) as error:
            unseen.append(StoreUnseen(store.url, str(getattr(error, "strerror", None) or error)))
            continue
        others = list[NotTrusted]()
        for folder in folders:
            if folder.startswith("."):  # no checkpoint is called so; our own folders beside it are
                continue
            try:
                manifest = manifest_in(store, folder)
            except NotTrusted as error:  # no more of it is read: others may have laid any number there, of any size
                others.append(error)
                continue
            except (OSError, ValueError, NotPermitted) as error:
                unseen.append(StoreUnseen(f"{store.url}/{folder}", str(error)))
                continue
            if manifest is not None:
                match = _GENERATION.fullmatch(folder)
                found.append(FoundCopy(match[1] if match else folder, folder, manifest, store))
        if others:
            unseen.append(
                StoreUnseen(store.url, f"{len(others):,} of the copies there are not read: {others[0].message}")
            )
    found.sort(key=lambda copy: copy.rank, reverse=True)
    return tuple(found), tuple(unseen)


def restore(
    copy: FoundCopy,
    folder: Path,
    *,
    now: Callable[[], datetime],
    rate: float | None = None,
    workers: int = WORKERS,
    progress: Callable[[int], object] = lambda size: None,
) -> Path:
    """Make ``folder/NAME`` from ``copy`` and return its path. One that is there and has all its digests is left as it
    is.

    ``rate``: bytes a second at most. ``progress`` is called with bytes, the size of the checkpoint in all. Raises
    CopyDamaged when the copy is not what its manifest says, NotPermitted when a stranger could have changed it,
    OSError.
    """
    if reason := copy.store.distrusted(copy.folder):
        raise NotPermitted(
            f"the copy {copy.store.url}/{copy.folder} is not trusted: {reason}", hint="restore from another copy"
        )
    target = folder / copy.name
    if _is_whole(target, copy.manifest):
        progress(copy.manifest.size)
        return target
    partial = folder / f"{RESTORING}{copy.name}"
    widest = _widest(copy, folder)
    make_like(folder, widest.folder)
    make_folder(partial, OWN)  # who could open it could hold its lock
    with _alone(partial) as inside:
        _require_half(partial, inside)
        with suppress(OSError):  # a file system without modes
            set_mode(partial, OWN)  # also where an earlier restore had begun
        limit = RateLimit(rate)
        _drop_links(inside)
        blocks_of = dict[str, bytes]()
        for links in (False, True):  # these last: nothing is written through one that the manifest has made up
            some = [entry for entry in copy.manifest.files if entry.link is links]
            made = digest.in_parallel(lambda entry: _fetch(copy, entry, inside, limit, progress, widest), some, workers)
            blocks_of.update(zip((entry.path for entry in some), made))
        for entry in copy.manifest.files:
            if entry.link and not leads_inside(inside, entry.path):
                raise _damaged(copy, f"{entry.path} leads out of the checkpoint")
        _drop_others(inside, copy.manifest)
        if not copy.is_file:
            with suppress(OSError), open_folder(inside, follow=True) as fd:
                settle(fd, widest.folder)
            for path, blocks in blocks_of.items():
                block_lists.leave(inside, path, blocks)
            write_manifest(inside, copy.manifest)
        (inside / BEGUN).unlink()
        _as_old_as_it_is(inside, copy)
        for here, _, _ in os.walk(inside, topdown=False):
            sync_directory(Path(here))
        with held(folder) as beside:
            if not os.path.samestat((beside / partial.name).lstat(), inside.stat()):
                raise NotPermitted(
                    f"{partial} was replaced meanwhile", hint=f"who may write there: ls -ld {to_type(folder)}"
                )
            if os.path.lexists(beside / target.name):
                set_aside(
                    target, f"it is not what its copy in {copy.store.url} says, which was restored in its place", now()
                )
            if copy.is_file:
                os.rename(inside / copy.name, beside / target.name)
                write_manifest(target, copy.manifest)
                (beside / partial.name).rmdir()
            else:
                os.rename(beside / partial.name, beside / target.name)
            sync_directory(beside)
    return target


def _require_half(partial: Path, inside: Path) -> None:
    """Raise NotPermitted for a folder that no restore has begun: what is no part of the checkpoint is removed there, and who
    may write beside it may have given its name to any folder of ours."""
    if not os.listdir(inside):
        os.close(create_new(inside / BEGUN, 0o600))
    elif not os.path.lexists(inside / BEGUN):
        raise NotPermitted(
            f"{partial} is not what a restore has left", hint=f"look at it, and move it away: ls -la {to_type(partial)}"
        )


def _widest(copy: FoundCopy, folder: Path) -> Rights:
    """Return the rights that what is brought back may have at most: those of the copy, and of the folder that it goes to; where
    neither says any, its owner's alone."""
    of_copy = copy.store.rights(f"{copy.folder}/{MANIFEST_PATH}")
    try:
        above = folder.stat().st_mode
    except FileNotFoundError:
        above = 0o777 if isinstance(copy.store, FolderStore) else 0o700
    return Rights(
        Reach(of_copy.file.mode & 0o666, of_copy.file.groups).within(Reach(above)),
        Reach(FOLDER).within(of_copy.folder, Reach(above)),
    )


def _as_old_as_it_is(partial: Path, copy: FoundCopy) -> None:
    """Give the files, and the folder, the time at which the checkpoint was made: an old one is no new progress."""
    if copy.manifest.at is None:
        return
    at = copy.manifest.at.timestamp()
    for entry in copy.manifest.files:
        os.utime(partial / entry.path, (at, at), follow_symlinks=False)
    os.utime(partial, (at, at))


@contextmanager
def _alone(partial: Path) -> Iterator[Path]:
    """Yield a path that leads to this very folder, whatever is put in its place. Raises AlreadyRunning while another restore
    works in it.

    A process that was killed and hangs in a dead mount works there no more, though its lock is still held: what it
    brought is moved into a new folder.
    """
    with open_folder(partial) as fd:
        if (owner := os.fstat(fd).st_uid) not in (os.geteuid(), 0):  # who could exchange what is brought there
            raise NotPermitted(
                f"{partial} belongs to {shown_user(owner)}", hint=f"have it removed: ls -ld {to_type(partial)}"
            )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not locked_by_the_killed(fd):
                raise AlreadyRunning(f"another restore works in {partial}", hint="wait until it is over") from None
            _begin_anew(partial, fd)
            with _alone(partial) as anew:
                _move_over(partial.with_name(f"{partial.name}~"), partial)
                yield anew
            return
        except OSError:  # a file system without locks
            pass
        _require_same(partial, fd)
        yield Path(f"/proc/self/fd/{fd}")


def _require_same(partial: Path, fd: int) -> None:
    if not partial.exists() or partial.stat().st_ino != os.fstat(fd).st_ino:
        raise AlreadyRunning(f"another restore has just made {partial.name.removeprefix(RESTORING)}", hint="look again")


def _begin_anew(partial: Path, fd: int) -> None:
    """Put an empty folder in the place of ``partial``, open as ``fd``; its contents go to ``partial~``."""
    aside = partial.with_name(f"{partial.name}~")
    if aside.exists():  # an earlier one was killed here too
        _move_over(aside, partial)
    _require_same(partial, fd)
    os.rename(partial, aside)
    make_folder(partial, OWN)


def _move_over(source: Path, target: Path) -> None:
    """Move all files that are whole; ``source`` is gone then. Files that lie there already stay."""
    with open_folder(source) as fd:  # no link, which another account may have laid there
        inside = Path(f"/proc/self/fd/{fd}")
        for here, _, names in os.walk(inside):
            for name in names:
                path = Path(here, name)
                there = target / path.relative_to(inside)
                if not name.startswith(TEMPORARY) and not os.path.lexists(there):
                    make_like(there.parent, Reach(FOLDER).within(reach(path.parent, follow=True)))
                    os.rename(path, there)
    shutil.rmtree(source, ignore_errors=True)


def _fetch(
    copy: FoundCopy,
    entry: FileEntry,
    partial: Path,
    limit: RateLimit,
    progress: Callable[[int], object],
    widest: Rights,
) -> bytes:
    """Bring one file, unless it is there already. Return the digests of its blocks, as they were read now."""
    blocks = bytearray()
    if _has_digest(partial / entry.path, entry, copy.manifest.algorithm, blocks):
        progress(entry.size)
        return bytes(blocks)
    hasher, size = digest.hasher(copy.manifest.algorithm), 0

    def pieces() -> Iterator[bytes]:
        nonlocal size
        for piece in copy.store.read(f"{copy.folder}/{entry.path}"):
            size += len(piece)
            if size > entry.size:  # it may have no end, and would fill this disk
                break
            hasher.update(piece)
            limit.take(len(piece))
            progress(len(piece))
            yield piece
        if size != entry.size or hasher.hexdigest() != entry.digest:
            raise _damaged(copy, f"{entry.path} is not what its manifest says")

    try:
        if entry.link:
            _make_link(partial / entry.path, b"".join(pieces()), widest.folder)
        else:
            of_copy = copy.store.rights(f"{copy.folder}/{entry.path}")
            rights = Rights(of_copy.file.within(widest.folder), widest.folder.within(of_copy.folder))
            FolderStore(partial).write(entry.path, pieces(), rights)
    except FileNotFoundError:
        raise NotFound(f"{copy.store.url}/{copy.folder} lacks {entry.path}", hint="restore another copy") from None
    return hasher.blocks() if isinstance(hasher, digest.BlockDigests) else b""


def _damaged(copy: FoundCopy, why: str) -> CopyDamaged:
    return CopyDamaged(
        f"the copy {copy.store.url}/{copy.folder} is damaged: {why}",
        hint="ftsupervise checkpoints restore --from PLACE takes another copy, --name NAME another checkpoint",
    )


def _drop_links(partial: Path) -> None:
    """Remove the links that an earlier restore has made there."""
    for here, folders, names in os.walk(partial):
        for name in (*folders, *names):
            if (path := Path(here, name)).is_symlink():
                path.unlink()


def _make_link(path: Path, target: bytes, source: Reach) -> None:
    make_like(path.parent, source)
    path.unlink(missing_ok=True)
    path.symlink_to(os.fsdecode(target))


def _is_whole(checkpoint: Path, manifest: Manifest) -> bool:
    """Return whether it holds this very content, every byte of it."""
    try:
        here = read_manifest(checkpoint)
    except (OSError, ValueError):
        return False
    if here is None or identity(here) != identity(manifest):
        return False
    return verify(checkpoint, Scope(Thoroughness.FULL)).state is CheckpointState.VERIFIED


def _has_digest(path: Path, entry: FileEntry, algorithm: str, blocks: bytearray) -> bool:
    """Return whether it is what the manifest says; ``blocks`` gets the digests of its blocks."""
    try:
        if path.lstat().st_size != entry.size:
            return False
        found = digest.hash_link(path, algorithm) if entry.link else digest.hash_file(path, algorithm, blocks=blocks)
    except FileNotFoundError:
        return False
    return found.digest == entry.digest


def _drop_others(partial: Path, manifest: Manifest) -> None:
    """Remove leftovers of an earlier restore of another checkpoint of that name, and halves of files."""
    known = {BEGUN, *(entry.path for entry in manifest.files)}
    for here, _, names in os.walk(partial):
        for name in names:
            path = Path(here, name)
            if path.relative_to(partial).as_posix() not in known:
                path.unlink(missing_ok=True)
