"""Makes, holds and removes folders in a node's shared memory that belong to this account alone.

Other accounts may make any name there. A folder counts when this account owns it and no other may write it, and it is
opened by its own name, never through a link. Standard library only: the node agents and the guard load this.
"""

from __future__ import annotations

import fcntl
import os
import stat

SHARED_MEMORY = "/dev/shm"


def is_private(folder: str) -> bool:
    """Return whether it is a directory that only this account may write."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


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
