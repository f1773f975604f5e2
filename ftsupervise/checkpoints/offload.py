"""Copy checkpoints to a second place: resumable, and verified there before the copy counts.

The copy of ``step-00000100`` lies in the store's folder of that name, as it is here. Its manifest is written last, after every
file was read back and had the digest that the manifest gives it; so a folder with a manifest is a whole copy. What was read
back is remembered beside the checkpoint, so that a copy that was interrupted goes on where it was. Into a folder it goes on in
the middle of a large file too: that is written in parts, each is read back, and the digests of its blocks are remembered.

A copy that counts is never written over. When another checkpoint of that name was copied before (an attempt went back and made
the step again), the new one goes to ``step-00000100~2``.

Nothing here deletes a checkpoint. Retention does, and it may require a copy first (``retain.py``).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.checkpoints import digest
from ftsupervise.checkpoints.manifest import (
    FOLDER_NAME,
    LIMIT,
    MANIFEST,
    FileEntry,
    Manifest,
    encoded,
    manifest_of,
    parse_manifest,
    read_manifest,
    root_of,
)
from ftsupervise.checkpoints.part_files import PartFile, pieces_at
from ftsupervise.checkpoints.stores import FolderStore, Store, file_pieces, inside, rights_of
from ftsupervise.errors import Error, NotFound, UsageError
from ftsupervise.host import files
from ftsupervise.host.files import TEMPORARY
from ftsupervise.host.ownership import NotTrusted, held, held_to_write
from ftsupervise.host.rate import RateLimit
from ftsupervise.printable import to_type
from ftsupervise.rundir.records import read_record, write_json

MANIFEST_PATH = f"{FOLDER_NAME}/{MANIFEST}"
_GENERATIONS = 100  # checkpoints of one name in one store
WORKERS = 4  # files under way at once
_REMEMBER = 1 << 30  # bytes read back between two writes of what was
PART = 256 << 20  # bytes of a part, whole blocks; a file of two parts and more is copied in parts


class PartRecord(NamedTuple):
    """The parts of one file that were read back."""

    path: str
    digests: Annotated[str, 100_000_000]  # of its blocks, in their order


class CopyRecord(NamedTuple):
    """A copy of a checkpoint, whole or under way."""

    url: str
    folder: str
    of: str  # the identity of the manifest that is copied
    at: datetime | None = None  # when all of it had been read back; None: under way
    read_back: Annotated[tuple[str, ...], 1_000_000] = ()  # files that had, while it is under way
    parts: Annotated[tuple[PartRecord, ...], 10_000] = ()  # of files that had in part


class CopyRecords(NamedTuple):
    copies: tuple[CopyRecord, ...] = ()


class OffloadReport(NamedTuple):
    """The result of one call for one checkpoint, in bytes."""

    name: str
    folder: str
    sent: int
    there: int  # found there already, by this or an earlier call


class CopyDamaged(Error):
    """A file that was read, here or there, differs from the manifest."""


class _Known:
    """Keeps what of a copy has been read back so far. Several threads add to it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.files: set[str] = set()
        self.parts: dict[str, list[bytes]] = {}  # digests of blocks
        self.found = 0  # bytes of parts that an earlier call had written


class _Job(NamedTuple):
    checkpoint: Path
    manifest: Manifest
    store: Store
    folder: str
    limit: RateLimit
    progress: Callable[[int], object]
    part: int
    known: _Known


def copies_of(checkpoint: Path, manifest: Manifest) -> tuple[CopyRecord, ...]:
    """Return the copies of a checkpoint that were whole when they were made; one in fsspec's ``memory`` has gone with
    its process.

    Raises ValueError, OSError.
    """
    of = identity(manifest)
    made = (copy for copy in _records(checkpoint) if copy.at is not None and copy.of == of)
    return tuple(copy for copy in made if not copy.url.startswith("memory:"))


def being_copied(checkpoint: Path, since: float) -> bool:
    """Return whether a copy of it is under way that has written something since then (epoch seconds)."""
    try:
        return _page_of(checkpoint).stat().st_mtime > since and any(one.at is None for one in _records(checkpoint))
    except (OSError, ValueError):
        return False


def identity(manifest: Manifest) -> str:
    """Return a name of the content: two checkpoints of one name with the same files have the same one."""
    named = hashlib.blake2b(manifest.algorithm.encode(), digest_size=16)
    for entry in manifest.files:
        named.update(f"\0{entry.path}\0{entry.size}\0{entry.digest}".encode("utf-8", "surrogateescape"))
    return named.hexdigest()


def offload(
    checkpoint: Path,
    store: Store,
    *,
    now: Callable[[], datetime],
    rate: float | None = None,
    workers: int = WORKERS,
    progress: Callable[[int], object] = lambda size: None,
    again: bool = False,
    part: int = PART,
) -> OffloadReport:
    """Copy ``checkpoint`` into ``store`` and read the copy back. A copy that is there already is left as it is; ``again``:
    every byte of it is read back once more, and what is not as it was sent is sent again.

    ``part``: bytes of a large file that are written and read back at once, whole blocks. ``rate``: bytes a second at most,
    reading back not counted. ``progress`` hears of bytes as they are sent and read back:
    twice the checkpoint's size in all. Raises NotFound for a checkpoint without a manifest, CopyDamaged when a file here or
    there is not what the manifest says, OSError when either place cannot be read or written.
    What was copied stays for the next call.
    """
    manifest = read_manifest(checkpoint)
    if manifest is None:
        raise NotFound(
            f"{checkpoint} has no manifest, so a copy of it could not be verified",
            hint=f"ftsupervise checkpoints commit {to_type(checkpoint)}",
        )
    _refuse_itself(checkpoint, store)
    folder, there = _folder_for(manifest, checkpoint.name, store)
    job = _Job(checkpoint, manifest, store, folder, RateLimit(rate), progress, part, _Known())
    if there:
        if (
            not again
            and any((one.url, one.folder) == (store.url, folder) for one in copies_of(checkpoint, manifest))
            and holds(store, folder, manifest)
        ):
            progress(2 * manifest.size)
            return OffloadReport(checkpoint.name, folder, 0, manifest.size)
        store.remove(f"{folder}/{MANIFEST_PATH}")  # until every file was read back it is no copy
    return _copy(job, now, workers, again=again)


def holds(store: Store, folder: str, manifest: Manifest) -> bool:
    """Return whether ``folder`` still holds this content, by its manifest, which no other account can have written, and the
    sizes of all files.

    Raises OSError, ValueError.
    """
    try:
        there = manifest_in(store, folder)
    except NotTrusted:
        return False
    if there is None or identity(there) != identity(manifest):
        return False
    sizes = store.sizes(folder)
    return all(sizes.get(entry.path) == entry.size for entry in manifest.files)


def _refuse_itself(checkpoint: Path, store: Store) -> None:
    """Refuse a checkpoint as a copy of itself, by whatever links the two are the same."""
    if not isinstance(store, FolderStore):
        return
    place, here = store.root.resolve(), checkpoint.resolve()
    if place == here.parent or here == place or here in place.parents:
        raise UsageError(
            f"{store.url} is where {checkpoint.name} lies itself: that would be no copy", hint="name another folder"
        )


def _folder_for(manifest: Manifest, name: str, store: Store) -> tuple[str, bool]:
    """Return the store's folder for this content, and whether a manifest of it lies there. Folders that other accounts have
    made are passed over, however many: who made one could exchange what is copied there."""
    names, own, of = set(store.names()), 0, identity(manifest)
    for number in count(1):
        folder = name if number == 1 else f"{name}~{number}"
        if folder not in names:
            return folder, False
        if store.of_others(folder):
            continue
        there = manifest_in(store, folder)
        if there is None:
            return folder, False
        if identity(there) == of:
            return folder, True
        own += 1
        if own >= _GENERATIONS:
            break
    raise Error(f"{store.url} holds {own} other checkpoints called {name}", hint="copy to another place")


def manifest_in(store: Store, folder: str) -> Manifest | None:
    """Return the manifest of a whole copy, judged as it is opened: all that is brought back is compared with it, whatever lies
    by that name then. None where there is none. Raises NotTrusted, ValueError for a damaged one, OSError."""
    try:
        raw = store.read_judged(f"{folder}/{MANIFEST_PATH}", LIMIT)
    except FileNotFoundError:
        return None
    return parse_manifest(raw, f"{store.url}/{folder}/{MANIFEST_PATH}")


def _copy(job: _Job, now: Callable[[], datetime], workers: int, *, again: bool) -> OffloadReport:
    there = job.store.sizes(job.folder)
    missing = [entry for entry in job.manifest.files if there.get(entry.path) != entry.size]
    lying = [entry for entry in job.manifest.files if there.get(entry.path) == entry.size]
    job.progress(sum(entry.size for entry in lying))
    if not again:
        _recall(job)
    proved = job.known.files
    proved &= {entry.path for entry in lying}
    job.progress(sum(entry.size for entry in lying if entry.path in proved))
    _remember(job)  # from now on it is being copied
    try:
        unproved = [entry for entry in lying if entry.path not in proved]
        wrong = _each(job, workers, {_send: missing, _read_back: unproved})
        missing += wrong
        wrong = _each(job, workers, {_send: wrong})
    except BaseException:
        _remember(job)
        raise
    if wrong:
        _remember(job)
        raise CopyDamaged(
            f"{wrong[0].path} of {job.checkpoint.name} does not come back from {job.store.url} as it was sent",
            hint=f"check that place; ftsupervise checkpoints verify {to_type(job.checkpoint)} checks the one here",
        )
    for name in there:
        if name.rpartition("/")[2].startswith(TEMPORARY):  # of a copy that was killed
            job.store.remove(f"{job.folder}/{name}")
    top = root_of(job.checkpoint)
    job.store.write(
        f"{job.folder}/{MANIFEST_PATH}", [encoded(job.manifest)], rights_of(manifest_of(job.checkpoint), top)
    )
    _remember(job, now())
    sent = sum(entry.size for entry in missing) - job.known.found
    return OffloadReport(job.checkpoint.name, job.folder, sent, job.manifest.size - sent)


def _each(
    job: _Job, workers: int, work: Mapping[Callable[[_Job, FileEntry], bool], list[FileEntry]]
) -> list[FileEntry]:
    """Do ``work`` for its files, several at once; return those for which it said no. The others are known from then on."""
    wrong, since = [], 0
    tasks = [(do, entry) for do, entries in work.items() for entry in entries]
    done = digest.in_parallel(lambda task: task[0](job, task[1]), tasks, workers)
    for (_, entry), well in zip(tasks, done):
        if not well:
            wrong.append(entry)
            continue
        with job.known.lock:
            job.known.files.add(entry.path)
        since += entry.size
        if since >= _REMEMBER:
            since = 0
            _remember(job)
    return wrong


def _send(job: _Job, entry: FileEntry) -> bool:
    """Send one file and read it back. Raises CopyDamaged when it is not what the manifest says here."""
    top, name = root_of(job.checkpoint), f"{job.folder}/{inside(entry.path)}"
    rights = rights_of(top / entry.path, top)
    if entry.size >= 2 * job.part and job.manifest.algorithm == digest.BLOCKS and not entry.link:
        tag = hashlib.blake2b(f"{identity(job.manifest)}{entry.path}".encode("utf-8", "surrogateescape"), digest_size=8)
        file = job.store.part(name, rights, tag.hexdigest())
        if file is not None:
            with file:
                return _send_in_parts(job, entry, file)
    job.store.write(name, _as_committed(job, entry), rights)
    return _read_back(job, entry)


def _send_in_parts(job: _Job, entry: FileEntry, file: PartFile) -> bool:
    """Send the rest of a file, part by part, and read each back. Raises as ``_send`` does."""
    blocks = _found_there(job, entry, file)
    found = len(blocks)
    with job.known.lock:
        job.known.parts[entry.path] = blocks
    source = root_of(job.checkpoint) / entry.path
    with held(source.parent) as folder:
        here = files.open_regular(folder / source.name)
    try:
        for begin in range(found * digest.BLOCK, entry.size, job.part):
            size = min(job.part, entry.size - begin)
            sent = _write_part(job, here, file, begin, size)
            file.sync(begin)
            if sent != _blocks(file, begin, size, job.progress):
                _forget(job, entry, file)
                return False
            with job.known.lock:
                blocks += sent
            _remember(job)
    finally:
        os.close(here)
    sums = digest.BlockDigests()
    for one in blocks:
        sums.add(one)
    if file.size != entry.size or sums.hexdigest() != entry.digest:
        _forget(job, entry, file)
        if found:  # what an earlier call has left: all of it is sent anew
            return False
        raise _not_as_committed(job, entry)
    file.finish()
    with job.known.lock:
        del job.known.parts[entry.path]
        job.known.found += found * digest.BLOCK
    return True


def _found_there(job: _Job, entry: FileEntry, file: PartFile) -> list[bytes]:
    """Return the digests of the blocks that lie there and are those that were read back before. The rest is dropped."""
    known, size = job.known.parts.get(entry.path, []), min(file.size, entry.size)
    blocks: list[bytes] = []
    for begin in range(0, min(len(known), size // digest.BLOCK) * digest.BLOCK, digest.BLOCK):
        one = digest.block_digest(file.read(begin, digest.BLOCK))
        if one != known[len(blocks)]:
            break
        blocks.append(one)
        job.progress(2 * digest.BLOCK)
    file.cut(len(blocks) * digest.BLOCK)
    return blocks


def _write_part(job: _Job, here: int, file: PartFile, begin: int, size: int) -> list[bytes]:
    """Write one part; return the digests of its blocks, as they were read here."""
    blocks = []
    for at in range(begin, begin + size, digest.BLOCK):

        def pieces(at: int = at) -> Iterator[bytes]:
            for piece in pieces_at(here, at, min(digest.BLOCK, begin + size - at)):
                job.limit.take(len(piece))
                job.progress(len(piece))
                file.write(at, piece)
                at += len(piece)
                yield piece

        blocks.append(digest.block_digest(pieces()))
    return blocks


def _blocks(file: PartFile, begin: int, size: int, progress: Callable[[int], object]) -> list[bytes]:
    blocks = []
    for at in range(begin, begin + size, digest.BLOCK):
        blocks.append(digest.block_digest(file.read(at, min(digest.BLOCK, begin + size - at))))
        progress(min(digest.BLOCK, begin + size - at))
    return blocks


def _forget(job: _Job, entry: FileEntry, file: PartFile) -> None:
    file.discard()
    with job.known.lock:
        job.known.parts.pop(entry.path, None)


def _as_committed(job: _Job, entry: FileEntry) -> Iterator[bytes]:
    hasher, size = digest.hasher(job.manifest.algorithm), 0
    for piece in pieces_of(root_of(job.checkpoint), entry):
        size += len(piece)
        if size > entry.size:  # it may have no end, and would fill the place for copies
            break
        hasher.update(piece)
        job.limit.take(len(piece))
        job.progress(len(piece))
        yield piece
    if size != entry.size or hasher.hexdigest() != entry.digest:
        raise _not_as_committed(job, entry)


def _not_as_committed(job: _Job, entry: FileEntry) -> CopyDamaged:
    return CopyDamaged(
        f"{root_of(job.checkpoint) / entry.path} is not what was committed: it is damaged and was not copied",
        hint=f"ftsupervise checkpoints verify {to_type(job.checkpoint)}",
    )


def pieces_of(root: Path, entry: FileEntry) -> Iterator[bytes]:
    """Yield the bytes of a file; of a link, the path that it leads to. Others may write into the checkpoint: no link of theirs
    leads to what is ours. Raises NotTrusted, OSError."""
    path = root / entry.path
    with held(path.parent) as here:
        if entry.link:
            yield os.fsencode((here / path.name).readlink())
        else:
            yield from file_pieces(here / path.name)


def _read_back(job: _Job, entry: FileEntry) -> bool:
    hasher, size = digest.hasher(job.manifest.algorithm), 0
    try:
        for piece in job.store.read(f"{job.folder}/{entry.path}"):
            size += len(piece)
            if size > entry.size:
                return False
            hasher.update(piece)
            job.progress(len(piece))
    except FileNotFoundError:
        return False
    return size == entry.size and hasher.hexdigest() == entry.digest


# ----------------------------------------------------------------------------------------------- what is known of the copies


def _page_of(checkpoint: Path) -> Path:
    """Return the page beside the manifest that lists the copies of this checkpoint."""
    manifest = manifest_of(checkpoint)
    return manifest.with_name(f"{manifest.stem}.copies")


def _records(checkpoint: Path) -> tuple[CopyRecord, ...]:
    found = read_record(CopyRecords, _page_of(checkpoint), limit=LIMIT)
    return found.copies if found is not None else ()


def _recall(job: _Job) -> None:
    """Recall what an earlier call has read back of this copy, which is still under way."""
    try:
        known = _records(job.checkpoint)
    except (OSError, ValueError):
        return
    of = identity(job.manifest)
    for copy in known:
        if (copy.url, copy.folder, copy.of, copy.at) != (job.store.url, job.folder, of, None):
            continue
        job.known.files.update(copy.read_back)
        for part in copy.parts:
            with suppress(ValueError):
                job.known.parts[part.path] = _split(bytes.fromhex(part.digests))


def _split(digests: bytes) -> list[bytes]:
    size = len(digest.block_digest(()))
    return [digests[at : at + size] for at in range(0, len(digests), size)]


def _remember(job: _Job, at: datetime | None = None) -> None:
    """Replace the record of this copy. A failure here is no reason to fail: the copy would be read back once more."""
    with job.known.lock:
        try:
            known = _records(job.checkpoint)
        except (OSError, ValueError):
            known = ()
        others = tuple(copy for copy in known if (copy.url, copy.folder) != (job.store.url, job.folder))
        mine = CopyRecord(job.store.url, job.folder, identity(job.manifest), at)
        if at is None:
            parts = (PartRecord(path, b"".join(blocks).hex()) for path, blocks in job.known.parts.items() if blocks)
            mine = mine._replace(read_back=tuple(sorted(job.known.files)), parts=tuple(parts))
        page = _page_of(job.checkpoint)
        with suppress(OSError), held_to_write(page.parent) as here:
            write_json(here / page.name, CopyRecords((*others, mine)))
