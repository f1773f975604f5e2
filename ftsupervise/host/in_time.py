"""Makes a call that may hang on a file system or a name server, in a thread that is left behind where it does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_time(work: Callable[[], T], seconds: float) -> T | None:
    """Return what ``work`` returns, or None where it takes longer than ``seconds``. Raises what it raises in time."""
    return OneAtATime()(work, seconds)


class OneAtATime:
    """The same for calls that are made again and again: while one of them hangs, no other is begun behind it."""

    def __init__(self) -> None:
        self._last: threading.Thread | None = None

    def __call__(self, work: Callable[[], T], seconds: float) -> T | None:
        if self._last is not None and self._last.is_alive():
            return None
        done: list[T] = []
        failed: list[Exception] = []

        def run() -> None:
            try:
                done.append(work())
            except Exception as error:  # raised again in the thread that waits
                failed.append(error)

        thread = threading.Thread(target=run, daemon=True)
        self._last = thread
        thread.start()
        thread.join(max(0.0, seconds))
        if failed:
            raise failed[0]
        return done[0] if done else None
