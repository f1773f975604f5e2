"""Tells another process that the main thread of this one goes on: a byte now and then, into a pipe that it has given us.

Each wait of the main thread that has a bound sends one (``SignalQueue.wait``, ``bounded.run``, ``in_time``). So a thread is
silent only where nothing ends its wait. Without a pipe all of this does nothing.
"""

from __future__ import annotations

import os
import time
from threading import get_ident, main_thread

ENV_PULSE = "FTSUPERVISE_PULSE"  # of a group's supervisor: the number of the descriptor that it sends the bytes into
PULSE = b"\0"
_EVERY = 2.0  # seconds: the longest part of a wait
_LEAST = 1.0  # seconds between two bytes

_fd = -1
_last = 0.0


def start(fd: int) -> None:
    """Send them into ``fd`` from now on; a write to it must not block."""
    global _fd
    _fd = fd


def beat() -> None:
    """Send one, if this is the main thread and it is time for one."""
    global _last
    if _fd < 0 or get_ident() != main_thread().ident or (now := time.monotonic()) - _last < _LEAST:
        return
    _last = now
    send(PULSE)


def send(news: bytes) -> None:
    """Send a byte. Where nobody reads them any more, or has not for long, it is dropped."""
    if _fd >= 0:
        try:
            os.write(_fd, news)
        except OSError:
            return


def part(seconds: float | None) -> float | None:
    """Return how much of a wait of ``seconds`` (None: without end) goes by before the next ``beat``."""
    if _fd < 0:
        return seconds
    return _EVERY if seconds is None else min(seconds, _EVERY)
