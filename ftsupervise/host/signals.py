"""Signals that wait in a queue: a process that supervises hears them when it looks, and no handler does more than note them."""

from __future__ import annotations

import os
import signal
import time

from ftsupervise.host import pulse
from ftsupervise.host.ready import readable

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASS_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


class SignalQueue:
    """Signals as bytes in a pipe, so that they are waited for together with everything else and none is lost."""

    def __init__(self, warning: int = signal.SIGUSR1) -> None:
        """``warning``: announces the end of the job. Where it is one of ``STOP``, the first one does not ask to stop."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {n: signal.signal(n, lambda *_: None) for n in {*STOP, *PASS_ON, warning, signal.SIGCHLD}}
        self._announces = warning if warning in STOP else 0
        self.ends = frozenset(
            {*STOP, signal.SIGUSR1, signal.SIGUSR2, warning}
        )  # each says that the job is about to end
        self.stopped_at: float | None = None  # monotonic: the first time that we were asked to stop

    def wait(self, timeout: float | None) -> bytes:
        """Return the numbers of the signals that came, each once, in order (0: another thread has news); b"" after
        ``timeout`` seconds.

        Each comes once: a burst of thousands must not stand before the SIGTERM behind it.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            pulse.beat()
            rest = None if until is None else max(0.0, until - time.monotonic())
            if readable([self._read], pulse.part(rest)):
                break
            if until is not None and time.monotonic() >= until:
                return b""
        try:
            found = bytes(dict.fromkeys(os.read(self._read, 1 << 16)))  # all that a pipe holds
        except BlockingIOError:
            return b""
        for number in found:
            if number == self._announces:
                self._announces = 0
            elif self.stopped_at is None and number in STOP:
                self.stopped_at = time.monotonic()
        return found

    def wake(self) -> None:
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
