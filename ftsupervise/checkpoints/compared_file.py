"""A file whose blocks are compared with what was committed before any of their bytes are used.

A large array is read block by block, into a buffer that stays in the processor's cache, is compared there, and is copied from
there to its place. So memory is passed once, and the file cannot change between the comparison and the copy. Small arrays are
compared and then copied into the mapping (what is written there reaches no file): they too stay what was compared, whatever the
file does afterwards. What a framework copies by itself, to a GPU for instance, it takes from the mapping of the file: those
blocks are compared there, and once more when the loading is over (``guard/loaded_again.py``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

from ftsupervise.checkpoints.block_lists import DIGEST
from ftsupervise.checkpoints.digest import BLOCK, BlockDigests, block_digest, hasher, in_parallel, threads
from ftsupervise.checkpoints.mapped_bytes import AHEAD, AT_ONCE, MappedBytes

Beat = Callable[[], object]
T = TypeVar("T")
_TOGETHER = 8  # blocks that a thread takes at once: each hand-over holds the interpreter's lock


class Damaged(ValueError):
    """The file has other bytes than were committed."""


class FilePart(NamedTuple):
    """Bytes of the file that are to be copied."""

    target: int  # an address
    at: int  # in the file
    size: int


class _Buffer:
    def __init__(self, size: int) -> None:
        self.bytes = memoryview(mmap.mmap(-1, size))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))


class ComparedFile:
    """The open file ``fd`` of ``size`` bytes (one at least), with the digest that its manifest says; ``path`` is for messages.
    ``blocks``: the digests of its blocks (``block_lists.known``); where there are none, all of it is read and compared here.

    Each method raises Damaged for bytes that are not those of the manifest, OSError, and the constructor CannotJudge where
    the digest cannot be taken here.
    """

    def __init__(
        self,
        fd: int,
        size: int,
        algorithm: str,
        digest: str,
        path: Path,
        blocks: bytes = b"",
        beat: Beat = lambda: None,
    ) -> None:
        self._path = path
        self._mapped = MappedBytes(fd, 0, size)
        self.data = self._mapped.data
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        self._size, self._algorithm, self._digest = size, algorithm, digest
        self._buffers: list[_Buffer] = []
        self._seen: set[int] = set()  # blocks that were compared
        self._ready: set[int] = set()  # those of them that may be used where they are mapped
        self._again: set[int] = set()  # those of these that are the file's own pages still
        self._beat = beat
        sums = hasher(algorithm)
        self._block = sums.size if isinstance(sums, BlockDigests) else size
        self._blocks = blocks  # b"": no digest of a block is known, and all of it was compared in the mapping
        if not isinstance(sums, BlockDigests):
            with self._whole():
                right = self._mapped.digest(algorithm, beat) == digest
            if not right:
                raise self._damaged()
            self._seen, self._ready, self._again = {0}, {0}, {0}
        elif not blocks:
            taken = self._in_parallel(self._taken, range(-(-size // self._block)))
            for one in taken:
                sums.add(one)
            if sums.hexdigest() != digest:
                raise self._damaged()
            self._blocks, self._seen = sums.blocks(), set(range(-(-size // self._block)))

    def owns(self, address: int) -> bool:
        """Return whether ``address`` lies in its mapping."""
        return self.address <= address < self.address + self._size

    def hold(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Compare the blocks of some small parts (begin, end), and hold them in memory of our own, where they are mapped."""
        self._each(self._hold, self._of(ranges) - self._ready)

    def compare(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Compare the blocks of some parts in the mapping, to be used there; ``unchanged`` is to be asked afterwards."""
        self._each(self._compare, self._of(ranges) - self._ready)

    def copy(self, parts: Iterable[FilePart]) -> None:
        """Compare the blocks of some parts, and copy each part as its block is compared."""
        by_block: dict[int, list[FilePart]] = {}
        block = self._block if self._blocks else BLOCK
        for target, at, size in parts:
            while size:
                number, inside = divmod(at, block)
                length = min(size, block - inside)
                by_block.setdefault(number, []).append(FilePart(target, at, length))
                target, at, size = target + length, at + length, size - length

        def one(number: int) -> None:
            self._copy(number, by_block[number])

        self._each(one, by_block.keys())

    def rest(self) -> None:
        """Compare all blocks that were not compared yet."""
        self._each(self._look, set(range(-(-self._size // self._block))) - self._seen)

    @property
    def is_held(self) -> bool:
        """Return whether what was used could not change after it was compared: nobody needs to ask ``unchanged``."""
        return not self._again

    def unchanged(self) -> bool:
        """Return whether what was used in the mapping still is what was compared. One thread compares it: the program is at
        work beside it."""
        if not self._blocks:
            with self._whole():
                return self._mapped.digest(self._algorithm, self._beat, aside=True) == self._digest
        for number in sorted(self._again):
            if self._digest_of(number) != self._said(number):
                return False
            self._beat()
        return True

    def _of(self, ranges: Iterable[tuple[int, int]]) -> set[int]:
        found: set[int] = set()
        for begin, end in ranges:
            if begin < end:
                found.update(range(begin // self._block, (end - 1) // self._block + 1))
        return found

    def _each(self, work: Callable[[int], None], numbers: Iterable[int]) -> None:
        for _ in self._in_parallel(work, sorted(numbers)):
            pass

    def _in_parallel(self, work: Callable[[int], T], numbers: Iterable[int]) -> Iterator[T]:
        wanted, at_once = list(numbers), max(AT_ONCE, threads())
        for number in wanted[:AHEAD]:
            self._mapped.ask_for(number * self._block)
        count = max(1, min(_TOGETHER, len(wanted) // (2 * at_once)))
        runs = [wanted[at : at + count] for at in range(0, len(wanted), count)]
        for found in in_parallel(lambda run: [work(number) for number in run], runs, at_once):
            self._beat()
            yield from found

    def _taken(self, number: int) -> bytes:
        with self._read(number) as buffer:
            return block_digest((buffer.bytes[: self._length(number)],))

    def _look(self, number: int) -> None:
        with self._right(number):
            pass

    def _hold(self, number: int) -> None:
        with self._right(number) as buffer:
            ctypes.memmove(self.address + number * self._block, buffer.address, self._length(number))
        self._ready.add(number)

    def _compare(self, number: int) -> None:
        if self._digest_of(number) != self._said(number):
            raise self._damaged()
        self._seen.add(number)
        self._ready.add(number)
        self._again.add(number)

    def _digest_of(self, number: int) -> bytes:
        with self._whole():
            return self._mapped.block(number * self._block, self._block)

    def _copy(self, number: int, parts: list[FilePart]) -> None:
        if number in self._ready or not self._blocks:
            for target, at, size in parts:
                with self._whole():
                    self._mapped.map_in(at, size)
                ctypes.memmove(target, self.address + at, size)
            return
        with self._right(number) as buffer:
            first = buffer.address - number * self._block
            for target, at, size in parts:
                ctypes.memmove(target, first + at, size)

    @contextmanager
    def _right(self, number: int) -> Iterator[_Buffer]:
        """Read a block, and raise Damaged unless it is as it was committed."""
        with self._read(number) as buffer:
            if block_digest((buffer.bytes[: self._length(number)],)) != self._said(number):
                raise self._damaged()
            self._seen.add(number)
            yield buffer

    @contextmanager
    def _read(self, number: int) -> Iterator[_Buffer]:
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = _Buffer(self._block)
        try:
            self._mapped.ask_for((number + AHEAD) * self._block)
            at, size, done = number * self._block, self._length(number), 0
            while done < size:
                count = os.preadv(self._mapped.fd, [buffer.bytes[done:size]], at + done)
                if not count:
                    raise Damaged(f"{self._path} ends at {at + done} bytes of {self._size}")
                done += count
            yield buffer
        finally:
            self._buffers.append(buffer)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise Damaged(f"{self._path} {error}") from None

    def _damaged(self) -> Damaged:
        return Damaged(f"{self._path} has other bytes than were committed")

    def _length(self, number: int) -> int:
        return min(self._block, self._size - number * self._block)

    def _said(self, number: int) -> bytes:
        return self._blocks[number * DIGEST : (number + 1) * DIGEST]
