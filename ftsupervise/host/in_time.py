"""Makes a call that may hang on a file system or a name server, in a thread that is left behind where it does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Generic, TypeVar

from ftsupervise.host import pulse

T = TypeVar("T")


def in_time(work: Callable[[], T], seconds: float, *, late: Callable[[T], object] | None = None) -> T | None:
    """Return what ``work`` returns, or None where it takes longer than ``seconds``, or there is no thread for it. Raises what
    it raises in time. ``late`` gets a result that comes after that: a descriptor, which nobody else would close."""
    if late is None:
        return OneAtATime[T]()(work, seconds)
    lock, found, given_up = threading.Lock(), list[T](), False

    def kept() -> None:
        result = work()
        with lock:
            if not given_up:
                found.append(result)
                return
        late(result)

    OneAtATime[None]()(kept, seconds)
    with lock:
        given_up = True
    return found[0] if found else None


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
        until = monotonic() + max(0.0, seconds)
        while True:
            pulse.beat()
            self._thread.join(pulse.part(max(0.0, until - monotonic())))
            if not self._thread.is_alive():
                break
            if monotonic() >= until:
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
