"""Says whether this node's memory has room for snapshots. Asked before each piece is taken, since nothing else says no.

Where a job's memory is full, taking more of it ends in SIGKILL (exit code 137), also in ``posix_fallocate``; where a tmpfs is
full, the first store into a mapped file ends in SIGBUS. Memory that a file in tmpfs has taken is charged to the job until the
file is gone, whichever process took it: a rank that was killed leaves it behind. So:

- The share of memory in use stays below ``most`` of every limit above this process, and of the host. File pages that nothing
  has used lately are not counted, because the kernel takes them back.
- A file's memory is taken whole at the start, piece by piece, and mapped before the loop stores anything into it.
- Where the memory becomes tight later, snapshots go first: the next thing the kernel would take is a rank.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

from ftsupervise.checkpoints.memory_slots import PAGE, PIECE
from ftsupervise.host.memory import HostMemory

MOST = 0.90  # of every limit
TIGHTER = 0.03  # beyond which snapshots are given up again
_LEVELS = 16  # limits above us that are checked: all
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14


class NoRoom(OSError):
    """The memory would be too full. The message says which memory."""

    def __init__(self, text: str) -> None:
        super().__init__(errno.ENOSPC, text)

    def __str__(self) -> str:
        return str(self.strerror)


class MemoryRoom:
    """The room in ``folder``, a tmpfs. ``most``: the share (0-1) of each limit that may be in use with the snapshots.

    Raises OSError at construction where the memory cannot be looked at: then there are no snapshots.
    """

    def __init__(self, folder: str | os.PathLike[str], most: float = MOST, memory: HostMemory | None = None) -> None:
        self._folder, self._most = folder, most
        self._memory = memory if memory is not None else HostMemory(levels=_LEVELS)

    def close(self) -> None:
        self._memory.close()

    def may_take(self, size: int) -> None:
        """Raise NoRoom when ``size`` bytes more would be too many; OSError when that cannot be seen."""
        for (free, total), whose in self._levels():
            left = free - int((1 - self._most) * total)
            if left < size:
                raise NoRoom(
                    f"a snapshot needs {_mb(size)} more, and of the {whose} ({_mb(total)}) {_mb(free)} are free: "
                    f"{1 - self._most:.0%} stay free"
                )
        found = os.statvfs(self._folder)
        if found.f_bavail * found.f_frsize < size:
            raise NoRoom(
                f"a snapshot needs {_mb(size)} more, and {os.fspath(self._folder)} has "
                f"{_mb(found.f_bavail * found.f_frsize)} free"
            )

    def tight(self) -> str:
        """Return why snapshots must be given up now, as a clause; "" while they may stay.

        Raises OSError where that cannot be seen.
        """
        for (free, total), whose in self._levels():
            if free < (1 - self._most - TIGHTER) * total:
                return f"of the {whose} ({_mb(total)}) {_mb(free)} are free"
        return ""

    def _levels(self) -> list[tuple[tuple[int, int], str]]:
        try:
            rooms = self._memory.rooms(active=False)
        except ValueError as error:
            raise OSError(errno.EINVAL, str(error)) from None
        return [(room, "job's memory" if n else "host's memory") for n, room in enumerate(rooms)]


def populate(mapping: mmap.mmap) -> None:
    """Give a mapping of a file whose memory is taken its page tables, so that the first copy into it costs no faults.

    Its contents stay. Call it from a side thread: 0.2 s per GB for memory that is there, and the interpreter's lock is
    not held. Raises OSError, where ``posix_fallocate`` did not come first and there is no room.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    first: Any = ctypes.c_char.from_buffer(mapping)
    address, size = ctypes.addressof(first), len(mapping)
    del first
    for at in range(0, size, PIECE):
        length = min(PIECE, size - at)
        if not libc.madvise(ctypes.c_void_p(address + at), ctypes.c_size_t(length), _POPULATE_WRITE):
            continue
        number = ctypes.get_errno()
        if number != errno.EINVAL:
            raise OSError(number, os.strerror(number))
        for page in range(at, at + length, PAGE):  # an older kernel: its memory is taken already, so no store can fail
            mapping[page] = mapping[page]


def give_up(mapping: mmap.mmap) -> None:
    """Give the memory back at once, even where another process has the file open; its contents read as zeros.

    Raises OSError.
    """
    mapping.madvise(mmap.MADV_REMOVE)


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
