"""Tells from outside whether a process that makes no progress may wait for a file system, or stands for another reason.

One that waits for a dead disk goes on when the disk answers. One that waits for a lock, a child, a socket or a time, or that
computes, does not. The kernel shows in which system call each thread is: proc(5), /proc/PID/task/TID/syscall.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

from ftsupervise.host.processes import stat_fields

# The numbers of the system calls in which no file system is waited for: locks, times, children, sockets, and poll.
_NO_DISK = {
    "x86_64": "7 23 24 34 35 42 43 44 45 46 47 61 128 130 202 219 230 232 247 270 271 281 288 299 441 449",
    "aarch64": "22 72 73 95 98 101 115 124 128 133 137 202 203 206 207 211 212 242 243 260 441 449",
}
# Those of read, write, readv and writev, which wait for a pipe or a socket as often as for a disk.
_BY_FILE = {"x86_64": "0 1 19 20", "aarch64": "63 64 65 66"}


class Standing(Enum):
    """Where a silent process stands."""

    FREE = "it waits for no file system"
    DISK = "it may wait for a file system"
    STOPPED = "it is stopped"
    UNSEEN = "whether it waits for a file system cannot be seen"


def standing(pid: int) -> Standing:
    """Judge the threads of a process as they are now. One that waits for a lock may wait for another thread, which waits for a
    disk: so all of them count. UNSEEN where there is no such process, or /proc does not show it to us."""
    machine = os.uname().machine
    if machine not in _NO_DISK:
        return Standing.UNSEEN
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
        found = [_of_thread(pid, one, machine) for one in threads]
    except OSError:
        return Standing.UNSEEN
    for worst in (Standing.STOPPED, Standing.DISK):
        if worst in found:
            return worst
    return Standing.FREE if found else Standing.UNSEEN


def turns_if_on_disk(pid: int) -> int | None:
    """Return how often the main thread of a process has had a processor, if it may wait for a file system now; None if it does
    not, or that cannot be seen. Twice the same number: it has not gone on in between."""
    machine = os.uname().machine
    try:
        if machine not in _NO_DISK or _of_thread(pid, pid, machine) is not Standing.DISK:
            return None
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_bytes().split()[2])
    except (OSError, IndexError, ValueError):
        return None


def _of_thread(pid: int, thread: int, machine: str) -> Standing:
    """Raises PermissionError where this account may not see it."""
    place = f"/proc/{pid}/task/{thread}"
    stat = stat_fields(f"{place}/stat")
    state = stat[1][0] if stat is not None else "X"
    if state in "Tt":
        return Standing.STOPPED
    if state in "RZX":
        return Standing.FREE
    try:
        call = (
            Path(f"{place}/syscall").read_bytes().decode().split()
        )  # a codec of its own might have to be loaded from a disk
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return Standing.FREE
    if not call or call[0] == "running":
        return Standing.FREE
    number = call[0]  # "-1": it waits for a page of memory, which may be that of a file
    if number in _BY_FILE[machine].split() and thread != pid and _is_pipe(f"/proc/{pid}/fd/{int(call[1], 16)}"):
        return Standing.FREE
    return Standing.FREE if number in _NO_DISK[machine].split() else Standing.DISK


def _is_pipe(link: str) -> bool:
    try:
        name = str(Path(link).readlink())  # the name only: no file is touched
    except OSError:
        return False
    return name.startswith(("pipe:", "socket:", "anon_inode:"))
