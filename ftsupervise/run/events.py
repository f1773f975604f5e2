"""The events that ``ftsupervise run`` waits for: signals and news of the run directory, as bytes in one pipe."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ftsupervise.rundir.fence import superseded
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import KILL, read_switch

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASS_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


class SignalQueue:
    """Signals as bytes in a pipe, so that they are waited for together with everything else and none is lost."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {n: signal.signal(n, lambda *_: None) for n in (*STOP, *PASS_ON, signal.SIGCHLD)}

    def heard(self, timeout: float | None) -> bytes:
        """Numbers of the signals that came, each once, in order (0: the lookout has news); b"" after ``timeout`` seconds.

        Once: a burst of thousands must not stand before the SIGTERM behind it.
        """
        if not select.select([self._read], [], [], timeout)[0]:
            return b""
        try:
            return bytes(dict.fromkeys(os.read(self._read, 1 << 16)))  # all that a pipe holds
        except BlockingIOError:
            return b""

    def nudge(self) -> None:
        """Wake the waiting thread, from another one."""
        try:
            os.write(self._write, b"\0")
        except OSError:  # full: it wakes anyway
            return

    def close(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read)
        os.close(self._write)


@dataclass
class Observed:
    """The last state of the run directory."""

    kill_since: float | None = None  # monotonic time since which the kill switch is known to be up
    newer: int | None = None  # an attempt that has begun after ours


class RunDirWatcher:
    """A thread that watches the run directory while the command runs: a hung file system blocks only this thread."""

    def __init__(
        self,
        rundir: RunDir,
        attempt: int,
        ears: SignalQueue,
        every: float,
        also: Callable[[], bool] = lambda: False,
    ) -> None:
        self.seen = Observed()
        self._also = also  # another check to make there
        self._rundir, self._attempt, self._ears, self._every = rundir, attempt, ears, every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="lookout", daemon=True)
        self._thread.start()

    def close(self, patience: float = 1.0) -> None:
        self._over.set()
        self._thread.join(patience)

    def _look_on(self) -> None:
        while not self._over.wait(self._every):
            if self._look() | self._also():
                self._ears.nudge()

    def _look(self) -> bool:
        """Is there anything new?"""
        seen = self.seen
        before = (seen.kill_since, seen.newer)
        switch = read_switch(self._rundir, KILL)
        if not switch.up:
            seen.kill_since = None
        elif seen.kill_since is None:
            seen.kill_since = time.monotonic()
        seen.newer = superseded(self._rundir, self._attempt)
        return (seen.kill_since, seen.newer) != before
