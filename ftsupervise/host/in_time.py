"""Makes a call that may hang on a file system or a name server, in a thread that is left behind where it does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def in_time(work: Callable[[], T], seconds: float) -> T | None:
    """Return what ``work`` returns, or None where it takes longer than ``seconds``, or there is no thread for it. Raises what
    it raises in time."""
    return OneAtATime[T]()(work, seconds)


class OneAtATime(Generic[T]):
    """The same for a call that is made again and again: while one hangs, none is begun behind it. The result of one that took
    too long is that of a later call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._done: list[T] = []
        self._failed: list[Exception] = []

    def __call__(self, work: Callable[[], T], seconds: float) -> T | None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, args=(work,), daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the machine has no more threads at present
                return None
            self._thread = thread
        self._thread.join(max(0.0, seconds))
        if self._thread.is_alive():
            return None
        self._thread = None
        done, failed, self._done, self._failed = self._done, self._failed, [], []
        if failed:
            raise failed[0]
        return done[0] if done else None

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._done.append(work())
        except Exception as error:  # raised again in the thread that waits
            self._failed.append(error)
