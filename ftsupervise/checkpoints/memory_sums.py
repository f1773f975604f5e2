"""Takes the digest of a snapshot in memory beside the loop, right after the copy; it is compared before a rank begins
from it.

Memory without ECC, a driver or a process that writes where it should not can change a bit, and a copy that lies on
another node for hours can change too. The digest comes after the header that makes the slot valid: a rank that is
killed in between leaves a snapshot without one, which is used, and people are told that it is
not verified. Taking it costs half a copy of the state
(xxh3_128), beside the loop.
"""

from __future__ import annotations

import os
import threading
from enum import Enum

from ftsupervise.checkpoints import digest
from ftsupervise.checkpoints.memory_slots import ALGORITHMS, PIECE, SlotFile, SlotHeader


class Summing:
    """A thread that takes the digest of the newest snapshot. ``lock`` is held by who begins to write a slot: until then the
    slot is what it was."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._news = threading.Condition()
        self._next: tuple[SlotFile, int, SlotHeader, memoryview] | None = None
        self._algorithm = ALGORITHMS.index(digest.best_algorithm())
        self._thread: threading.Thread | None = None

    def take(self, file: SlotFile, slot: int, header: SlotHeader, data: memoryview) -> None:
        """Take the digest of the committed snapshot, unless a newer one comes first. Without xxhash it is crc32, which takes
        as long as four copies: beside the loop, and zlib lets go of the interpreter's lock."""
        with self._news:
            self._next = file, slot, header, data
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ftsupervise-digests", daemon=True)
                self._thread.start()
            self._news.notify()

    def forget(self) -> None:
        """Forget the file, which is about to be closed."""
        with self._news:
            self._next = None
        with self.lock:
            return

    def _run(self) -> None:
        while (
            True
        ):  # at the loop's own priority: a thread of a lower one could be stopped with the interpreter's lock in hand
            with self._news:
                while self._next is None:
                    self._news.wait()
                (file, slot, header, data), self._next = self._next, None
            try:
                found = self._sum(file, slot, header, data)
                with self.lock:
                    if file.fd >= 0 and file.still(slot, header):
                        file.commit(slot, found)
            except (OSError, ValueError):  # removed, or cut short: the loop finds out
                continue
            finally:
                del data

    def _sum(self, file: SlotFile, slot: int, header: SlotHeader, data: memoryview) -> SlotHeader:
        """Take the digest. Raises OSError; ValueError once it is not that snapshot any more, whose memory may be given back."""
        sums = digest.hasher(ALGORITHMS[self._algorithm])
        for begin in range(0, header.data_size, PIECE):
            if not file.still(slot, header):
                raise ValueError("written over")
            sums.update(data[begin : min(begin + PIECE, header.data_size)])
        return header._replace(algorithm=self._algorithm, digest=as_bytes(sums.hexdigest()))


class Compared(Enum):
    """The outcome of a comparison. UNKNOWN: the digest was not taken before the rank died, or cannot be taken here."""

    SAME = 0
    DAMAGED = 1
    UNKNOWN = 2


def is_damaged(file: SlotFile, slot: int, header: SlotHeader) -> bool:
    """Return whether its bytes differ from those that its checksums were taken of. Raises OSError."""
    return compare(file, slot, header) is Compared.DAMAGED


def compare(file: SlotFile, slot: int, header: SlotHeader) -> Compared:
    """Compare a snapshot with its checksums. Raises OSError."""
    try:
        file.meta(slot, header)
    except ValueError:
        return Compared.DAMAGED
    if not header.algorithm:
        return Compared.UNKNOWN
    try:
        sums = digest.hasher(ALGORITHMS[header.algorithm])
    except digest.CannotJudge:
        return Compared.UNKNOWN
    buffer = memoryview(bytearray(PIECE >> 3))  # it stays in the processor's cache
    offset = header.meta_size
    while offset < header.size:
        start, most = file.extent(slot, header, offset)
        size = os.preadv(file.fd, [buffer[: min(len(buffer), most)]], start)
        if not size:
            return Compared.DAMAGED  # cut short
        sums.update(buffer[:size])
        offset += size
    return Compared.SAME if as_bytes(sums.hexdigest()) == header.digest else Compared.DAMAGED


def as_bytes(hexdigest: str) -> bytes:
    """Return a digest as it stands in a header."""
    return bytes.fromhex(hexdigest).ljust(16, b"\0")
