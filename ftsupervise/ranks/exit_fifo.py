"""A rank whose interpreter ends after a failure rings for those who look at its node: they need not wait for its process.

    BASE/bell-NODE-PID   a FIFO of the node's agent (several nodes may share a host); the rank writes a byte into each

With torch and a communicator loaded the process takes a second to die, or for ever: its teardown may wait for peers. What the
rank has to say stands on its page (``pages.py``); a bell that nobody hears costs that second, nothing else.
"""

from __future__ import annotations

import os

from ftsupervise.rundir.heartbeat_page import BELL


class ExitFifo:
    """The hearing end. ``fd`` is ready when somebody has rung; -1 when there can be no bell here."""

    def __init__(self, base: str, node: str) -> None:
        self.fd, self._path = -1, f"{base}/{BELL}{node}-{os.getpid()}"
        try:
            os.mkfifo(self._path, 0o600)
        except FileExistsError:  # of an agent that was killed, or in another container
            pass
        except OSError:
            return
        self._sweep(base, f"{BELL}{node}")
        try:
            # for writing too, so that the last rank to close it does not leave it ready for ever
            self.fd = os.open(self._path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return

    def _sweep(self, base: str, mine: str) -> None:
        """Bells that earlier agents of this node have left: they were killed, or are about to leave."""
        for name in os.listdir(base):
            path = f"{base}/{name}"
            if path != self._path and name.rpartition("-")[0] == mine:
                try:
                    os.unlink(path)
                except OSError:
                    continue

    def hush(self) -> None:
        """Take note: it has rung."""
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
