"""The directory of a run's heartbeat pages on a node: its name, its ownership, and its removal.

    /dev/shm/ftsupervise-UID-TOKEN/ATTEMPT/rank-N
    /dev/shm/ftsupervise-UID-TOKEN/exits-NODE-PID

The token is new for each ``ftsupervise run``, so that no other account can take the name before us. Each reader of the pages
holds a shared lock on the directory; an unlocked one was left by a killed process, and the next one removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Callable

from ftsupervise.rundir.heartbeat_page import EXIT_FIFO

SHARED_MEMORY = "/dev/shm"
STANDBY_LOG = "standby.log"  # in the directory of standbys (warm/standbys.py)
_OLD = 60.0  # seconds after which an unlocked directory is removed


def new_base(top: str = SHARED_MEMORY) -> str:
    """An unguessable name for the directory."""
    return f"{top}/ftsupervise-{os.getuid()}-{os.urandom(8).hex()}"


def create_locked(base: str) -> int | None:
    """Make ``base``, ours alone whatever the umask, and hold it: a descriptor to keep open. None when it cannot be had."""
    try:
        os.mkdir(base, 0o700)  # noqa: PTH102
    except FileExistsError:
        pass
    except OSError:
        return None
    try:
        fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # another process is removing it
        pass
    return fd


def remove_stale(top: str = SHARED_MEMORY) -> None:
    """Remove the directories that killed runs of ours have left on this node."""
    mine = re.compile(rf"ftsupervise-{os.getuid()}-[0-9a-f]{{16}}")
    for name in _names(top):
        base = f"{top}/{name}"
        if not mine.fullmatch(name) or not is_private(base):
            continue
        try:
            fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if time.time() - os.fstat(fd).st_mtime > _OLD:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                clear(base)
        except OSError:  # held
            continue
        finally:
            os.close(fd)


def newest_attempt(base: str) -> int | None:
    """The attempt whose pages count; None when there is none, or ``base`` is not ours alone."""
    if not is_private(base):
        return None
    try:
        return max((int(name) for name in os.listdir(base) if name.isascii() and name.isdigit()), default=None)
    except OSError:
        return None


def is_private(folder: str) -> bool:
    """Is it a directory that only this account may write?"""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def clear(base: str, before: int | None = None) -> None:
    """Remove the pages of attempts before ``before``, or all there is. What is not ours alone stays."""
    if not is_private(base):
        return
    for name in _names(base):
        # of standbys (warm/standbys.py), and of agents that were killed
        if before is None and (
            name.endswith((".sock", ".coming")) or name == STANDBY_LOG or name.startswith(EXIT_FIFO)
        ):
            _quietly(os.unlink, f"{base}/{name}")
        if not (name.isascii() and name.isdigit()) or (before is not None and int(name) >= before):
            continue
        folder = f"{base}/{name}"
        if is_private(folder):
            for page in _names(folder):
                _quietly(os.unlink, f"{folder}/{page}")
        _quietly(os.rmdir, folder)
    if before is None:
        remove_empty(base)


def remove_empty(base: str) -> None:
    """Remove the place itself if there is nothing in it."""
    _quietly(os.rmdir, base)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _quietly(do: Callable[[str], None], path: str) -> None:
    try:
        do(path)
    except OSError:
        pass


# A FIFO through which a failed rank announces its exit, so that the agent need not wait for its process to end.
#
#     BASE/exits-NODE-PID   a FIFO of the node's agent (several nodes may share a host); the rank writes a byte into each
#
# With torch and a communicator loaded the process takes a second to die, or for ever: its teardown may wait for peers. The
# rank's state is on its heartbeat page; a lost announcement costs that second, nothing else.


class ExitFifo:
    """The reading end. ``fd`` is ready when a rank has written; -1 when no FIFO can be made here."""

    def __init__(self, base: str, node: str) -> None:
        self.fd, self._path = -1, f"{base}/{EXIT_FIFO}{node}-{os.getpid()}"
        try:
            os.mkfifo(self._path, 0o600)
        except FileExistsError:  # of an agent that was killed, or in another container
            pass
        except OSError:
            return
        self._sweep(base, f"{EXIT_FIFO}{node}")
        try:
            # for writing too, so that the last rank to close it does not leave it ready for ever
            self.fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return

    def _sweep(self, base: str, mine: str) -> None:
        """Remove the FIFOs of earlier agents of this node, which were killed or are about to end."""
        for name in os.listdir(base):
            path = f"{base}/{name}"
            if path != self._path and name.rpartition("-")[0] == mine:
                try:
                    os.unlink(path)
                except OSError:
                    continue

    def drain(self) -> None:
        """Empty the FIFO after an announcement."""
        try:
            os.read(self.fd, 4096)
        except OSError:
            return

    def close(self) -> None:
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            os.unlink(self._path)
        except OSError:
            return
