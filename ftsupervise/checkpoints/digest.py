"""Digests of files, taken at the speed of memory and outside the interpreter's lock.

xxh3_128 reads a file from the page cache as fast as it can be copied. It is taken of each block of a file, and then of these
digests: so several threads take that of one large file, and a part of a copy is compared by itself. Where xxhash is not
installed, crc32 of the standard library does it four times slower, and sees every single flipped bit all the same. Both are
against accidents, not forgers: who may write a checkpoint at all is ``host/ownership.py``'s question. Standard library at
import: the guard loads this.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from ftsupervise.host import files

BLOCKS = "xxh3_128-1M"  # of blocks of 1 MiB, and then of these digests
BLOCKS_8M = "xxh3_128-8M"  # likewise, of 8 MiB: it is read, and not written any more
XXH3 = "xxh3_128"  # of the whole file: it is read, and not written any more
CRC32 = "crc32"
ALGORITHMS = (BLOCKS, BLOCKS_8M, XXH3, CRC32)
BLOCK = 1 << 20  # bytes of a block: it stays in the cache of a processor between its digest and its use
_BYTES_OF = {BLOCKS: BLOCK, BLOCKS_8M: 8 << 20}
_PIECE = 1 << 19  # bytes read at once: they are still in the processor's own cache when the digest is taken
_MOST_THREADS = 8
S = TypeVar("S")
T = TypeVar("T")


class CannotJudge(ValueError):
    """A manifest that this installation does not understand says nothing about its checkpoint."""


class Hasher(Protocol):
    """A digest under way."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class Hashed(NamedTuple):
    """A file as it was read."""

    size: int  # bytes that were read
    digest: str
    steady: bool  # nothing changed the file meanwhile


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class BlockDigests:
    """The digest of a file by its blocks. ``add`` takes the digests of whole blocks that somebody else has taken, in their
    order, and the last one's; ``update`` takes bytes."""

    def __init__(self, size: int = BLOCK) -> None:
        import xxhash

        self.size = size  # bytes of a block
        self._whole, self._block, self._left = xxhash.xxh3_128(), xxhash.xxh3_128(), size
        self._blocks = bytearray()

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            piece = view[: self._left]
            self._block.update(piece)
            self._left -= len(piece)
            if not self._left:
                self._left = self.size
                self.add(self._block.digest())
                self._block.reset()
            view = view[len(piece) :]

    def add(self, digest: bytes) -> None:
        """Raises ValueError in the middle of a block."""
        if self._left != self.size:
            raise ValueError("a block is under way")
        self._whole.update(digest)
        self._blocks += digest

    def blocks(self) -> bytes:
        """Return the digests of the blocks, one behind the other."""
        return bytes(self._blocks) + (self._block.digest() if self._left != self.size else b"")

    def hexdigest(self) -> str:
        whole = self._whole.copy()
        if self._left != self.size:
            whole.update(self._block.digest())
        found: str = whole.hexdigest()
        return found


def block_digest(pieces: Iterable[bytes | memoryview]) -> bytes:
    """Return the digest of one block, for ``BlockDigests.add``."""
    import xxhash

    one = xxhash.xxh3_128()
    for piece in pieces:
        one.update(piece)
    found: bytes = one.digest()
    return found


def best_algorithm() -> str:
    """Return xxh3_128, by blocks, where xxhash is installed; else crc32."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return CRC32
    return BLOCKS


def hasher(algorithm: str) -> Hasher:
    """Return a new digest. Raises CannotJudge for an algorithm that cannot be computed here."""
    if algorithm == CRC32:
        return _Crc32()
    if algorithm in (*_BYTES_OF, XXH3):
        try:
            import xxhash
        except ImportError:
            raise CannotJudge(f"digests of the kind {algorithm} need the package xxhash (pip install xxhash)") from None
        made: Hasher = BlockDigests(_BYTES_OF[algorithm]) if algorithm in _BYTES_OF else xxhash.xxh3_128()
        return made
    raise CannotJudge(f"{algorithm!r} is no kind of digest that is known here ({', '.join(ALGORITHMS)})")


def hash_buffer(data: bytes | memoryview, algorithm: str) -> str:
    """Return the digest of bytes in memory. Raises CannotJudge as ``hasher`` does."""
    one = hasher(algorithm)
    one.update(data)
    return one.hexdigest()


def hash_file(
    path: str | os.PathLike[str],
    algorithm: str,
    *,
    progress: Callable[[int], object] = lambda done: None,
    blocks: bytearray | None = None,
) -> Hashed:
    """Read the regular file ``path`` once. ``progress`` is called with the bytes of each piece. ``blocks`` gets the digests of
    its blocks, where the algorithm takes them.

    Raises OSError as ``files.open_regular`` does (never follows a link, never waits for a FIFO), and CannotJudge.
    """
    fd = files.open_regular(path)
    try:
        return hash_open(fd, algorithm, progress=progress, blocks=blocks)
    finally:
        os.close(fd)


def hash_open(
    fd: int,
    algorithm: str,
    *,
    progress: Callable[[int], object] = lambda done: None,
    blocks: bytearray | None = None,
) -> Hashed:
    """Read an open regular file from its beginning to the size that it has now, so that one that grows has an end."""
    one, before = hasher(algorithm), os.fstat(fd)
    left, offset = before.st_size, 0
    buffer = memoryview(bytearray(min(_PIECE, left) or 1))
    while left > 0:
        count = os.preadv(fd, [buffer[: min(left, len(buffer))]], offset)
        if count == 0:  # it was cut meanwhile
            break
        one.update(buffer[:count])
        left, offset = left - count, offset + count
        progress(count)
    if blocks is not None and isinstance(one, BlockDigests):
        blocks += one.blocks()
    return Hashed(offset, one.hexdigest(), left == 0 and _same(before, os.fstat(fd)))


def _same(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)


def hash_link(path: str | os.PathLike[str], algorithm: str) -> Hashed:
    """Return the digest of where a symbolic link leads to. Raises OSError."""
    if not stat.S_ISLNK(os.lstat(path).st_mode):
        raise OSError(f"{os.fspath(path)} is no link any more")
    target = os.fsencode(os.readlink(path))  # noqa: PTH115
    return Hashed(len(target), hash_buffer(target, algorithm), True)


def threads() -> int:
    """Return how many files are read at once: as many as this process may use cores, eight at most."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        cores = os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, cores))


def in_parallel(work: Callable[[S], T], items: Iterable[S], at_once: int = 0) -> Iterator[T]:
    """Yield ``work`` of each item, in the order of the items, by ``at_once`` threads (default ``threads()``).

    An error of one is raised here, and the rest is not begun.
    """
    wanted = list(items)
    count = min(at_once or threads(), len(wanted))
    if count <= 1:
        yield from map(work, wanted)
        return
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(count, "checkpoint-files")
    try:
        yield from pool.map(work, wanted)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def path_below(root: Path, path: str) -> str:
    """Return the path of a file of a checkpoint, by its name in the manifest."""
    return f"{os.fspath(root)}/{path}"
