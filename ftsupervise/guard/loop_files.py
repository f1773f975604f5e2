"""The state of a training loop in the files of a checkpoint: one of each rank, without pickle.

What all ranks hold alike (the weights and moments of a data-parallel training) rank 0 alone writes. Which arrays those are is
seen, not assumed: each rank compares the digests of its arrays with those of rank 0, and writes what differs. The file of a
rank is the description that snapshots have (``snapshots/state.py``), and the bytes of its arrays behind it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftsupervise.checkpoints import block_lists
from ftsupervise.checkpoints.compared_file import ComparedFile, Damaged
from ftsupervise.checkpoints.digest import CRC32, CannotJudge, best_algorithm, hash_buffer
from ftsupervise.checkpoints.manifest import Manifest, loop_file, read_manifest
from ftsupervise.host import files
from ftsupervise.snapshots.state import ALIGNED, PAGE, Described, StoredArray, parse
from ftsupervise.snapshots.wait import LARGE

if TYPE_CHECKING:
    from ftsupervise.guard.loop_state import LoopState

_MAGIC = b"ftsupervise loop state 1\n"
_HEADER = PAGE  # bytes, the magic included
_PIECE = 1 << 30  # bytes written at once: the kernel takes 2 GiB at most


class FirstArray(NamedTuple):
    """An array of rank 0: its digest, type and shape in one word, and its place in that rank's file."""

    word: str
    offset: int


class SavedRank(NamedTuple):
    """The state that one rank saved, as it lies in its file: each array is to be compared before it is used."""

    step: int
    rank: int
    world: int
    description: bytes
    own: frozenset[int]  # the arrays that lie in this rank's file; the others lie in rank 0's
    data: memoryview
    file: ComparedFile

    def arrays(self) -> tuple[StoredArray, ...]:
        return parse(self.description)[1]


def first_arrays(loop: LoopState, described: Described) -> list[FirstArray]:
    """Return the arrays of this rank as rank 0 describes them to the others: where it would write them, were it rank 0."""
    rows, _ = _pack(described.arrays, frozenset(range(len(described.arrays))))
    return [FirstArray(_word(row, loop.raw(described, at)), row.offset) for at, row in enumerate(rows)]


def write(
    checkpoint: Path, loop: LoopState, described: Described, who: tuple[int, int, int], first: Sequence[FirstArray] = ()
) -> None:
    """Write the file of the rank: ``who`` is its step, its rank and the number of ranks. ``first``: the arrays of rank 0, to
    compare with; without them all are written. Raises OSError."""
    step, rank, world = who
    shared: dict[int, int] = {}
    if rank and first:
        places = {one.word: one.offset for one in first}
        mine = first_arrays(loop, described)
        shared = {at: places[one.word] for at, one in enumerate(mine) if one.word in places}
    own = frozenset(range(len(described.arrays))) - shared.keys()
    rows, size = _pack(described.arrays, own)
    rows = [row._replace(offset=shared.get(at, row.offset)) for at, row in enumerate(rows)]
    tree, _, _ = described.description.partition(b"\n")
    description = b"\n".join((_json(_ranges(own)), tree, _json(rows)))
    header = {"step": step, "rank": rank, "world": world, "description": len(description), "size": size}
    head = _MAGIC + _json(header) + b"\n"
    begin = _page(_HEADER + len(description))
    fd = os.open(
        loop_file(checkpoint, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
    )
    try:
        _write_at(fd, memoryview(head), 0)
        _write_at(fd, memoryview(description), _HEADER)
        for at in sorted(own):
            _write_at(fd, loop.raw(described, at), begin + rows[at].offset)
        os.ftruncate(fd, begin + size)
    finally:
        os.close(fd)


def read(checkpoint: Path, rank: int, beat: Callable[[], object] = lambda: None, *, whole: bool = False) -> SavedRank:
    """Return the state of a rank. Its description was compared with the manifest; its arrays are, each before it is used, by
    its ``file``. ``whole``: every byte was.

    Raises Damaged for one that is not what was committed, CannotJudge where the digest cannot be taken here, ValueError for
    one of another version, OSError, FileNotFoundError where there is none.
    """
    manifest, path = _manifest(checkpoint), loop_file(checkpoint, rank)
    entry = next((one for one in manifest.files if one.path == path.name), None)
    if entry is None:
        raise Damaged(f"{path} is not in the manifest")
    fd = files.open_regular(path)
    try:
        before = os.fstat(fd)
        if before.st_size != entry.size or not entry.size:
            raise Damaged(f"{path} has {before.st_size} bytes of {entry.size}")
        blocks = b"" if whole else block_lists.known(checkpoint, entry, manifest.algorithm)
        file = ComparedFile(fd, before.st_size, manifest.algorithm, entry.digest, path, blocks, beat)
    finally:
        os.close(fd)
    file.hold([(0, _HEADER)])
    if file.data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path} is not the state of a loop, or of another version of ftsupervise")
    try:
        return _parsed(json.loads(bytes(file.data[len(_MAGIC) : _HEADER]).partition(b"\n")[0]), file, rank)
    except Damaged:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path} is damaged: {error}") from None


def _manifest(checkpoint: Path) -> Manifest:
    try:
        manifest = read_manifest(checkpoint)
    except CannotJudge:
        raise
    except ValueError as error:
        raise Damaged(str(error)) from None
    if manifest is None:
        raise FileNotFoundError(errno.ENOENT, "has no manifest", str(checkpoint))
    return manifest


def _parsed(said: dict[str, Any], file: ComparedFile, rank: int) -> SavedRank:
    whole = file.data
    step, of, world, length, size = (int(said[name]) for name in ("step", "rank", "world", "description", "size"))
    begin = _page(_HEADER + length)
    if of != rank or min(length, size) < 0 or begin + size != len(whole):
        raise ValueError(f"it has {len(whole)} bytes, and {begin + size} were written")
    file.hold([(_HEADER, _HEADER + length)])
    numbers, _, description = bytes(whole[_HEADER : _HEADER + length]).partition(b"\n")
    own = frozenset(at for first, last in json.loads(numbers) for at in range(int(first), int(last) + 1))
    state = SavedRank(step, rank, world, description, own, whole[begin:], file)
    for number, row in enumerate(state.arrays()):
        if number in own and not 0 <= row.offset <= row.offset + row.size <= size:
            raise ValueError("an array lies outside of it")
    return state


def _pack(arrays: Sequence[StoredArray], own: frozenset[int]) -> tuple[list[StoredArray], int]:
    """Return the rows with the places of our own arrays, one behind the other; and the bytes that they take. The small ones
    come first: they are read together, and a block of large ones is copied as it is read."""
    rows, at = list(arrays), 0
    for number in sorted(own, key=lambda one: (arrays[one].size >= LARGE, one)):
        at = -(-at // ALIGNED) * ALIGNED
        rows[number] = arrays[number]._replace(offset=at)
        at += arrays[number].size
    return rows, at


def _word(row: StoredArray, data: memoryview) -> str:
    algorithm = best_algorithm()
    digest = blake2b(data, digest_size=16).hexdigest() if algorithm == CRC32 else hash_buffer(data, algorithm)
    return f"{digest} {row.kind} {row.dtype} {row.shape} {row.strides}"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _write_at(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data[:_PIECE], at)
        data, at = data[done:], at + done


def _ranges(numbers: frozenset[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for one in sorted(numbers):
        if found and found[-1][1] == one - 1:
            found[-1] = found[-1][0], one
        else:
            found.append((one, one))
    return found


def _page(at: int) -> int:
    return -(-at // PAGE) * PAGE
