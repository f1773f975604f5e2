"""Makes a call that may hang (a file system, a name server, Slurm) in a thread, which is left behind where it does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from typing import Generic, TypeVar

from ftsupervise.host import pulse

LOOK = 4.0  # seconds for a look at a user's path while a person waits: a server that is only slow has answered by then

A = TypeVar("A")
T = TypeVar("T")


class PendingCall(Generic[T]):
    """A call that is made beside this thread from now on. Raises RuntimeError where the machine has no more threads."""

    def __init__(self, work: Callable[[], T], name: str = "beside") -> None:
        self._done: list[T] = []
        self._failed: list[Exception] = []
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def __call__(self, seconds: float | None) -> T | None:
        """Return what the call returns, or None where that takes ``seconds`` from now. Raises what it raises."""
        if not self.is_over(seconds):
            return None
        if self._failed:
            raise self._failed[0]
        return self._done[0]

    def is_over(self, within: float | None = 0.0) -> bool:
        """Return whether the call has returned, as soon as it has; False after ``within`` seconds (None: it has bounds of its
        own)."""
        until = None if within is None else monotonic() + within
        while True:
            pulse.beat()
            self._thread.join(pulse.part(None if until is None else max(0.0, until - monotonic())))
            if not self._thread.is_alive():
                return True
            if until is not None and monotonic() >= until:
                return False

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._done.append(work())
        except Exception as error:  # raised again in the thread that waits
            self._failed.append(error)


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
        self._asked: PendingCall[T] | None = None

    def __call__(self, work: Callable[[], T], seconds: float) -> T | None:
        if self._asked is None:
            try:
                self._asked = PendingCall(work)
            except RuntimeError:  # the machine has no more threads at present
                return None
        asked = self._asked
        if not asked.is_over(seconds):
            return None
        self._asked = None
        return asked(0.0)


def all_at_once(work: Callable[[A], T], of: Iterable[A], seconds: float | None = None) -> list[T | None]:
    """Return what ``work`` returns for each of ``of``, all at the same time; None for those that take longer than ``seconds``.
    Raises what it raises. A thread each and no pool: to import one takes 20 ms, and a restart waits for this."""
    until = None if seconds is None else monotonic() + seconds
    asked = [PendingCall(partial(work, one)) for one in of]
    return [one(None if until is None else until - monotonic()) for one in asked]


class Every:
    """A thread that calls ``look`` again and again, until it is closed: a file system, or Slurm, blocks only this thread.

    ``pause``: seconds from one look to the next, or what tells them from the seconds that the last one took. The first look
    comes after a pause of its own, ``first``. ``last`` is called once it is closed. The thread tells once on stderr what a
    look raises, and looks again: nobody would see that it has ended, and that no switch is looked at any more.
    """

    def __init__(
        self,
        pause: float | Callable[[float], float],
        look: Callable[[], object],
        name: str,
        *,
        first: float | None = None,
        last: Callable[[], object] | None = None,
    ) -> None:
        self._pause, self._look, self._first, self._last = pause, look, first, last
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, within: float = 0.0) -> None:
        """End it, and wait ``within`` seconds for the look that is under way, and the last one."""
        self._over.set()
        self._thread.join(within)

    def _run(self) -> None:
        pause, told = self._until_next(0.0) if self._first is None else self._first, ""
        while not self._over.wait(pause):
            began = monotonic()
            try:
                self._look()
            except Exception as error:  # nobody would see that this thread has ended
                if repr(error) != told:
                    told = repr(error)
                    threading.excepthook(
                        threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread))
                    )
            pause = self._until_next(monotonic() - began)
        if self._last is not None:
            self._last()

    def _until_next(self, took: float) -> float:
        return self._pause(took) if callable(self._pause) else self._pause
