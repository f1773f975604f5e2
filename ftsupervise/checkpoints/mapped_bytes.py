"""A part of a file in mapped memory, to be compared before it is loaded and once more afterwards (``guard/loaded_again.py``).

A copy in memory of our own would have to be compared once only. But new memory costs several times as much as the copy
(``snapshots/memory.py``), on each rank, and the ranks of a node share the pages of a mapped file. Who touches a page of it
that lies behind the end of the file by now, or that the disk cannot read, is killed (SIGBUS): so each is asked for before.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from ftsupervise.checkpoints.digest import BLOCK, BlockDigests, block_digest, hasher, in_parallel, threads

_HASHED = 1 << 19  # bytes whose digest is taken at once
AT_ONCE = 4  # blocks at least that are read at once: a disk that is asked for several answers sooner
AHEAD = 32  # blocks before one is compared that the disk is asked for it
_POPULATE_READ = 22  # madvise: map the pages, without a fault for each
_UNREADABLE = (errno.EFAULT, 133)  # its errors for a page that cannot be read: by the disk; by the memory (EHWPOISON)


class MappedBytes:
    """Bytes ``at`` and on of the open file ``fd``; ``at`` is a multiple of the page size. What a program does with them does
    not reach the file. Each call of ``digest`` takes the digest of all of them anew. Each method raises OSError where the file
    cannot be read, and ValueError where it has been cut short."""

    def __init__(self, fd: int, at: int, size: int) -> None:
        self.fd, self._at = os.dup(fd), at
        try:
            self._map = mmap.mmap(fd, size, access=mmap.ACCESS_COPY, offset=at) if size else None
        except BaseException:
            os.close(self.fd)
            raise
        self.data = memoryview(self._map if self._map is not None else b"")

    def digest(self, algorithm: str, beat: Callable[[], object] = lambda: None, *, aside: bool = False) -> str:
        """Return the digest. ``aside``: one thread takes it, for the program is at work beside it. Raises CannotJudge where it
        cannot be taken here."""
        sums = hasher(algorithm)
        size = sums.size if isinstance(sums, BlockDigests) else BLOCK
        blocks = range(0, len(self.data), size)
        for at in blocks[:AHEAD]:
            self.ask_for(at)
        if not isinstance(sums, BlockDigests):
            for at in blocks:
                for piece in self._pieces(at, size):
                    sums.update(piece)
                beat()
            return sums.hexdigest()
        for one in in_parallel(lambda at: self.block(at, size), blocks, 1 if aside else max(AT_ONCE, threads())):
            sums.add(one)
            beat()
        return sums.hexdigest()

    def block(self, at: int, size: int) -> bytes:
        """Return the digest of the block of ``size`` bytes that begins at ``at``, of the memory where it lies."""
        return block_digest(self._pieces(at, size))

    def _pieces(self, begin: int, size: int) -> Iterator[memoryview]:
        """Yield a block in pieces, once its pages are mapped."""
        self.ask_for(begin + AHEAD * BLOCK)
        end = min(begin + size, len(self.data))
        self.map_in(begin, end - begin)
        for at in range(begin, end, _HASHED):
            yield self.data[at : min(at + _HASHED, end)]

    def map_in(self, at: int, size: int) -> None:
        """Map the pages of some bytes, so that whoever touches them now is not killed."""
        if os.fstat(self.fd).st_size < self._at + at + size:
            raise ValueError("was cut short while it was read")
        begin = at - at % mmap.PAGESIZE
        if _populate(self._map, begin, at + size - begin) in _UNREADABLE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def ask_for(self, at: int) -> None:
        """Ask the disk for the bytes from ``at`` on. It reads on while another block is compared."""
        if at < len(self.data):
            with suppress(OSError):
                os.posix_fadvise(self.fd, self._at + at, min(BLOCK, len(self.data) - at), os.POSIX_FADV_WILLNEED)

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self.fd)


def _populate(mapped: Any, at: int, size: int) -> int:
    """Map the pages; return the number of the error, 0 for none. On an older kernel, which cannot do it, they come one by one.

    ``mmap.madvise`` would hold the interpreter's lock while the disk is read, and with it the heartbeat and all that the loop
    does.
    """
    import ctypes

    first = ctypes.c_char.from_buffer(mapped, at)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.madvise(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), _POPULATE_READ)
    return ctypes.get_errno() if failed else 0
