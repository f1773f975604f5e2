"""A part of a file in mapped memory, to be compared before it is loaded and once more afterwards (``guard/loaded_again.py``).

A copy in memory of our own would have to be compared once only. But new memory costs several times as much as the copy
(``guard/snapshot_memory.py``), on each rank, and the ranks of a node share the pages of a mapped file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress

from ftsupervise.checkpoints.digest import hasher

_HASHED = 1 << 19  # bytes whose digest is taken at once
_FETCHED = 1 << 25  # bytes that are mapped at once, before their digest is taken
_AHEAD = 2  # such pieces that the disk is asked for while a digest is taken
_POPULATE_READ = 22  # madvise: map the pages, without a fault for each


class MappedBytes:
    """Bytes ``at`` and on of the open file ``fd``; ``at`` is a multiple of the page size. What a program does with them does
    not reach the file. Each call of ``digest`` takes the digest of all of them anew. Raises OSError, ValueError."""

    def __init__(self, fd: int, at: int, size: int) -> None:
        self._fd, self._at = os.dup(fd), at
        try:
            self._map = mmap.mmap(fd, size, access=mmap.ACCESS_COPY, offset=at) if size else None
        except BaseException:
            os.close(self._fd)
            raise
        self.data = memoryview(self._map if self._map is not None else b"")

    def digest(self, algorithm: str, beat: Callable[[], object] = lambda: None) -> str:
        """Raises CannotJudge where it cannot be taken here."""
        sums, view, size = hasher(algorithm), self.data, len(self.data)
        for begin in range(0, size, _FETCHED):
            end = min(begin + _FETCHED, size)
            with suppress(OSError):  # the disk reads on while this piece is compared
                os.posix_fadvise(self._fd, self._at + end, _AHEAD * _FETCHED, os.POSIX_FADV_WILLNEED)
            with suppress(OSError, ValueError):  # an older kernel: the pages come one by one
                assert self._map is not None
                self._map.madvise(_POPULATE_READ, begin, end - begin)
            for at in range(begin, end, _HASHED):
                sums.update(view[at : min(at + _HASHED, end)])
            beat()
        return sums.hexdigest()

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self._fd)
