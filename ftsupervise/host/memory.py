"""The share of memory in use: of the host, and of every cgroup above this process that has a limit.

File pages count as free, because the kernel takes them back: a run that reads its data through the page cache would
otherwise look full for ever. Descriptors are kept: one look costs a few microseconds.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host.ownership import is_private

_NO_LIMIT = 1 << 60  # v1 writes about 2^63 for "no limit"
_LEVELS = 3  # the tightest cgroups above us; Slurm nests job, step and task
HOST, JOB, THROTTLED = "host", "job", "job up to memory.high"  # whose share


class _Level(NamedTuple):
    whose: str
    limit: int
    usage: int  # descriptor
    stat: int  # descriptor
    keys: tuple[bytes, ...]  # lines of memory.stat that are file pages, the inactive ones first


class HostMemory:
    """The fullest of the limits on this process. Raises OSError at construction when /proc cannot be read."""

    def __init__(self, proc: str = "/proc", cgroups: str = "/sys/fs/cgroup", levels: int = _LEVELS) -> None:
        self._meminfo = os.open(f"{proc}/meminfo", os.O_RDONLY | os.O_CLOEXEC)
        self._levels: list[_Level] = []
        total = self._host()[0]
        above = list(_cgroups(f"{proc}/self/cgroup", Path(cgroups)))
        for whose in (JOB, THROTTLED):
            found = [(_limit(folder, v2, whose), v2, folder) for v2, folder in above]
            tightest = sorted((one for one in found if 0 < one[0] < total), key=lambda one: one[0])
            for limit, v2, folder in tightest[:levels]:
                try:
                    self._levels.append(_open_level(whose, limit, v2, folder))
                except OSError:
                    continue

    def shares(self, worth_a_look: float = 0.0) -> dict[str, float]:
        """Return the share (0-1) that is used of HOST, of JOB where there is a limit that ends it, and of THROTTLED
        where there is one beyond which the kernel slows it down; of several the fullest counts.

        Below ``worth_a_look`` file pages are counted as used, which is cheaper. Raises OSError or ValueError when the
        kernel's files have another form than they used to.
        """
        total, available = self._host()
        found = {HOST: 1 - available / total}
        for level in self._levels:
            used = int(os.pread(level.usage, 32, 0))
            if used / level.limit >= worth_a_look:
                used -= _file_pages(os.pread(level.stat, 8192, 0), level.keys)
            found[level.whose] = max(used / level.limit, found.get(level.whose, 0.0))
        return found

    def rooms(self, *, active: bool = True) -> list[tuple[int, int]]:
        """Return the bytes that are free and those there are in all, of the host and of each limit.

        File pages are free, those in use (``active``) only where the caller says so. Raises OSError or ValueError, as
        ``shares`` does.
        """
        total, available = self._host()
        levels = [(available << 10, total << 10)]
        for level in self._levels:
            keys = level.keys if active else level.keys[:1]
            used = int(os.pread(level.usage, 32, 0)) - _file_pages(os.pread(level.stat, 8192, 0), keys)
            levels.append((level.limit - used, level.limit))
        return levels

    def _host(self) -> tuple[int, int]:
        return _host(os.pread(self._meminfo, 256, 0))

    def close(self) -> None:
        for fd in (self._meminfo, *(fd for level in self._levels for fd in (level.usage, level.stat))):
            try:
                os.close(fd)
            except OSError:
                continue
        self._levels.clear()


def _host(meminfo: bytes) -> tuple[int, int]:
    """Return total and available kB.

    Source: proc(5), /proc/meminfo; the first three lines have stood still since Linux 3.14.
    """
    words = meminfo.split(None, 8)
    if len(words) < 8 or words[0] != b"MemTotal:" or words[6] != b"MemAvailable:":
        raise ValueError("cannot read /proc/meminfo")
    return int(words[1]), int(words[7])


def _cgroups(proc: str, mount: Path) -> Iterator[tuple[bool, Path]]:
    """Yield our memory cgroup and those above it up to the root, each with whether it is of version 2. None without cgroups."""
    try:
        text = Path(proc).read_text("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        v2 = number == "0" and not controllers
        if not v2 and "memory" not in controllers.split(","):
            continue
        base = mount if v2 else mount / "memory"
        folder = base / path.lstrip("/")
        yield v2, folder
        while base in folder.parents:
            folder = folder.parent
            yield v2, folder


def _limit(folder: Path, v2: bool, whose: str) -> int:
    """Return the limit in kB; 0 without one. Version 1 has none that throttles."""
    if whose == THROTTLED and not v2:
        return 0
    name = ("memory.high" if whose == THROTTLED else "memory.max") if v2 else "memory.limit_in_bytes"
    try:
        value = int((folder / name).read_bytes())
    except (OSError, ValueError):  # not there, or "max"
        return 0
    return value // 1024 if value < _NO_LIMIT else 0


def _open_level(whose: str, limit: int, v2: bool, folder: Path) -> _Level:
    flags = os.O_RDONLY | os.O_CLOEXEC
    usage = os.open(folder / ("memory.current" if v2 else "memory.usage_in_bytes"), flags)
    try:
        stat = os.open(folder / "memory.stat", flags)
    except OSError:
        os.close(usage)
        raise
    prefix = b"" if v2 else b"total_"
    keys = (b"\n" + prefix + b"inactive_file ", b"\n" + prefix + b"active_file ")
    return _Level(whose, limit * 1024, usage, stat, keys)


def _file_pages(stat: bytes, keys: tuple[bytes, ...]) -> int:
    total = 0
    for key in keys:
        at = stat.find(key)
        if at >= 0:
            total += int(stat[at + len(key) :].split(None, 1)[0])
    return total


# The kernel counts the processes of a cgroup that it killed for their memory. Every process may read the counts.

_COUNT = re.compile(r"^oom_kill (\d+)$", re.M)


class OomKillCounter:
    """Counts OOM kills from the moment it is made; ``more()`` tells whether there were any since. Without cgroups: never."""

    def __init__(self, proc: str = "/proc/self/cgroup", mount: str = "/sys/fs/cgroup") -> None:
        self._files = [
            folder / ("memory.events" if v2 else "memory.oom_control")
            for v2, folder in _cgroups(proc, Path(mount))
            if "/job_" in str(folder)  # a process killed in a cgroup above the job's own may belong to another user
        ]
        self._before = self._count()

    def more(self) -> bool:
        now = self._count()
        return any(now.get(path, 0) > count for path, count in self._before.items())

    def _count(self) -> dict[Path, int]:
        found = {}
        for path in self._files:
            try:
                match = _COUNT.search(path.read_text("ascii", "replace"))
            except OSError:
                continue
            if match:
                found[path] = int(match[1])
        return found


_KILLED = re.compile(r"\b(?:memory|oom[-_]kill\w*): ?killed process (\d+)\b", re.I)
_NEWS = 100_000  # records that are looked at


def oom_victim(record: str) -> int | None:
    """Return the process that the kernel killed for its memory, by a record of its log, /dev/kmsg; None for any other, and for
    one that a program has written there."""
    head, _, text = record.partition(";")
    facility, found = head.partition(",")[0], _KILLED.search(text.partition("\n")[0])
    return int(found[1]) if found is not None and facility.isdigit() and int(facility) < 8 else None


def oom_victims(lines: str) -> set[int]:
    """Return the processes that the kernel killed for their memory, by lines of its log."""
    return {int(number) for number in _KILLED.findall(lines)}


class OomVictims:
    """The processes that the kernel of this machine has killed for their memory since it was made: of a site whose Slurm makes
    no cgroups, nobody else tells it. None where the kernel's log may not be read."""

    def __init__(self, log: str = "/dev/kmsg") -> None:
        self._found = set[int]()
        try:
            self._fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
            return
        os.lseek(self._fd, 0, os.SEEK_END)

    def has(self, pid: int) -> bool:
        """Return whether ``pid`` is one of them. Never blocks."""
        for _ in range(_NEWS if self._fd >= 0 else 0):
            try:
                record = os.read(self._fd, 8192)
            except BrokenPipeError:  # overwritten meanwhile: what is there begins with the next
                continue
            except OSError:  # that was all
                break
            if not record:
                break
            if (victim := oom_victim(record.decode("utf-8", "replace"))) is not None:
                self._found.add(victim)
        return pid in self._found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


# ------------------------------------------------------------------------------------------

# Makes, holds and removes folders in a node's shared memory that belong to this account alone.
#
# Other accounts may make any name there. A folder counts when this account owns it and no other may write it, and it is
# opened by its own name, never through a link. Standard library only: the node agents and the guard load this.

SHARED_MEMORY = "/dev/shm"


def make_private(folder: str) -> bool:
    """Make it, 0700 whatever the umask; return False where that cannot be, or a stranger was there first."""
    try:
        os.mkdir(folder, 0o700)  # noqa: PTH102
    except FileExistsError:  # another process of ours
        pass
    except OSError:
        return False
    return is_private(folder)


def hold(folder: str, *, alone: bool = False) -> int | None:
    """Return a descriptor that holds ``folder`` by a lock, shared or ``alone``, until it is closed; None where that
    cannot be had.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:  # held by another process, or being removed
        os.close(fd)
        return None
    return fd


def names_in(folder: str) -> list[str]:
    """Return the names in it; [] where it cannot be listed."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def remove_empty(folder: str) -> None:
    """Remove it if there is nothing in it."""
    try:
        os.rmdir(folder)  # noqa: PTH106
    except OSError:
        return
