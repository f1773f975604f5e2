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
import re
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

from ftsupervise.host import processes
from ftsupervise.host.memory import SHARED_MEMORY, HostMemory, hold, make_private, names_in, remove_empty
from ftsupervise.host.ownership import is_private
from ftsupervise.rundir.paths import ENV_SNAPSHOTS
from ftsupervise.snapshots.slots import PAGE, PIECE

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


# ------------------------------------------------------------------------------------------

# The folder of a job's snapshots in a node's memory: its name, whose it is, and its removal.
#
#     /dev/shm/ftsupervise-snapshots-UID-JOB-NONCE/NODE/rank-N    the snapshots of one rank (slots.py)
#     /dev/shm/ftsupervise-snapshots-UID-JOB-NONCE/NODE/pins      the generations that no rank overwrites (slots.py)
#
# The supervisor chooses the name, and the node's agent (or the supervisor itself, on one node) makes the folder. A rank never
# makes it: where a container has another /dev/shm the folder is not there, and the rank makes no snapshots. A file of a rank
# lies on the node that it runs on and, as a copy, on the buddy of that node; in each folder it has one writer. Several nodes of
# a test cluster share a host, so each has a folder of its own.
#
# Each process that writes the folder holds a shared lock on it. An unlocked folder that no process of ours works with belongs
# to a job that is gone, and the next job on the node removes it.

_NAME = "ftsupervise-snapshots"
_RANK = re.compile(r"rank-([0-9]{1,9})")


def new_folder(job: str, top: str = SHARED_MEMORY) -> str:
    """Return an unguessable name for the folder of ``job`` (its number, "" outside any job)."""
    word = re.sub(r"[^A-Za-z0-9_.]", "_", job)[:40] or "local"
    return f"{top}/{_NAME}-{os.geteuid()}-{word}-{os.urandom(8).hex()}"


def node_folder(folder: str, node: str = "") -> str:
    """Return the part of ``folder`` that is ``node``'s, without it this process's.

    Raises ValueError for a name that is a path.
    """
    name = node or os.environ.get("SLURMD_NODENAME", "") or os.uname().nodename
    if "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is not the name of a node")
    return f"{folder}/{name}"


def rank_file(place: str, rank: int) -> str:
    return f"{place}/rank-{rank}"


def ranks_in(place: str) -> dict[int, str]:
    """Return rank -> its file, own ones and copies. {} where the folder is not there, or not ours alone."""
    if not is_private(place):
        return {}
    return {int(found[1]): f"{place}/{name}" for name in names_in(place) if (found := _RANK.fullmatch(name))}


def make(folder: str, node: str = "") -> int | None:
    """Make ``folder`` and the part of ``node``, 0700 whatever the umask, and hold them: returns a descriptor to keep
    open.

    None where that cannot be, or a stranger was there first.
    """
    place = node_folder(folder, node)
    if not make_private(folder) or not make_private(place):
        return None
    return hold(folder)


def remove(folder: str, node: str = "") -> None:
    """Remove the files of ``node``, and the folder itself if it is empty then. A folder that is not ours alone stays."""
    if is_private(folder):
        _empty(node_folder(folder, node))
        remove_empty(folder)


def remove_leftovers(top: str = SHARED_MEMORY) -> None:
    """Remove the folders of this account's jobs that are gone from this node: no process holds them or was started with
    them.
    """
    mine = re.compile(rf"{_NAME}-{os.geteuid()}-[A-Za-z0-9_.]+-[0-9a-f]{{16}}")
    left = [f"{top}/{name}" for name in names_in(top) if mine.fullmatch(name)]
    held = [(folder, fd) for folder in left if is_private(folder) and (fd := hold(folder, alone=True)) is not None]
    used = processes.marked(ENV_SNAPSHOTS) if held else {}
    for folder, fd in held:
        try:
            if folder not in used:
                for name in names_in(folder):
                    _empty(f"{folder}/{name}")
                remove_empty(folder)
        finally:
            os.close(fd)


def _empty(place: str) -> None:
    if not is_private(place):
        return
    for name in names_in(place):
        try:
            os.unlink(f"{place}/{name}")
        except IsADirectoryError:  # a rank's staging area
            shutil.rmtree(f"{place}/{name}", ignore_errors=True)
        except OSError:
            continue
    remove_empty(place)


def folders(top: str = SHARED_MEMORY) -> Iterator[str]:
    """Yield the snapshot folders of this account on this host, of whatever job."""
    yield from (f"{top}/{name}" for name in names_in(top) if name.startswith(f"{_NAME}-{os.geteuid()}-"))


class SnapshotPlace(NamedTuple):
    """The place of the ranks' snapshots in memory; "" without them."""

    folder: str = ""
    copies: float = 0.0  # share of each node's cores for copying them
    at_once: bool = False  # the ranks wait for the copies

    def options(self) -> tuple[str, ...]:
        """Return options for an agent's command line."""
        if not self.folder:
            return ()
        waited = ("--at-once", "1") if self.at_once else ()
        return ("--snapshots", self.folder, "--copies", f"{self.copies:g}", *waited)
