"""The directory of a run's heartbeat pages on a node: its name, its ownership, and its removal.

    /dev/shm/ftsupervise-UID-TOKEN/ATTEMPT/rank-N
    /dev/shm/ftsupervise-UID-TOKEN/exits-NODE-PID

The token is new for each ``ftsupervise run``, so that no other account can take the name before us. Each reader of the pages
holds a shared lock on the directory; an unlocked one was left by a killed process, and the next one removes it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection

from ftsupervise.host.memory import SHARED_MEMORY, hold, make_private, names_in, remove_empty
from ftsupervise.host.ownership import is_private
from ftsupervise.rundir.heartbeat_page import EXIT_FIFO

STANDBY_LOG = "standby.log"  # in the directory of standbys (warm/restarts.py)
_OLD = 60.0  # seconds after which an unlocked directory is removed


def new_base(top: str = SHARED_MEMORY) -> str:
    """Return an unguessable name for the directory."""
    return f"{top}/ftsupervise-{os.getuid()}-{os.urandom(8).hex()}"


def create_locked(base: str) -> int | None:
    """Make ``base``, ours alone whatever the umask, and hold it: returns a descriptor to keep open.

    None when it cannot be had.
    """
    return hold(base) if make_private(base) else None


def remove_stale(top: str = SHARED_MEMORY) -> None:
    """Remove the directories that killed runs of ours have left on this node."""
    mine = re.compile(rf"ftsupervise-{os.getuid()}-[0-9a-f]{{16}}")
    for name in names_in(top):
        base = f"{top}/{name}"
        if not mine.fullmatch(name) or not is_private(base):
            continue
        # a young one is left alone: it is about to be held
        if _age(base) > _OLD and (fd := hold(base, alone=True)) is not None:
            clear(base)
            os.close(fd)


def _age(folder: str) -> float:
    """Return the seconds since something was made or removed in it; 0 when it has gone."""
    try:
        return time.time() - os.lstat(folder).st_mtime
    except OSError:
        return 0.0


def newest_attempt(base: str) -> int | None:
    """Return the attempt whose pages count; None when there is none, or ``base`` is not ours alone."""
    if not is_private(base):
        return None
    try:
        return max((int(name) for name in os.listdir(base) if name.isascii() and name.isdigit()), default=None)
    except OSError:
        return None


def was_removed(base: str) -> bool:
    """Return whether pages that were there may have been removed by a process of ours: nobody else could make or change it."""
    return is_private(base) or not os.path.lexists(base)


def clear(base: str, before: int | None = None, keep: Collection[str] = ()) -> None:
    """Remove the pages of attempts before ``before``, or all of them, but none with a name of ``keep``. A directory that is not
    ours alone stays."""
    if not is_private(base):
        return
    for name in names_in(base):
        # of standbys (warm/restarts.py), and of agents that were killed
        if before is None and (
            name.endswith((".sock", ".coming")) or name == STANDBY_LOG or name.startswith(EXIT_FIFO)
        ):
            _quietly(os.unlink, f"{base}/{name}")
        if not (name.isascii() and name.isdigit()) or (before is not None and int(name) >= before):
            continue
        folder = f"{base}/{name}"
        if is_private(folder):
            for page in set(names_in(folder)) - set(keep):
                _quietly(os.unlink, f"{folder}/{page}")
        _quietly(os.rmdir, folder)
    if before is None:
        remove_empty(base)


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
    """The reading end of the FIFO. ``fd`` is ready when a rank has written; -1 when no FIFO can be made here."""

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
