"""A thread beside the loop for all that may hang: what the guard reads and writes in the run directory while the loop trains.

A file system whose server is gone gives neither an answer nor an error, and nothing ends the wait for it. So the loop asks this
thread, and waits for it within a bound or not at all. Each kind of work has one place: when it is asked for again before it has
begun, it is done once, as it was asked for last. Everything is done in one thread, so that no older beat follows a newer one.

A program that makes no step has no thread: there, and where none can be started, the work is done at once.
"""

from __future__ import annotations

import atexit
import os
import signal
import time
from _thread import RLock, allocate_lock
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from _thread import LockType
    from threading import Thread

WITHIN = 1.0  # seconds that the loop waits for the run directory, once for each time that it stops answering
_SHORTEST, _LONGEST = 0.02, 1.0  # seconds of a nap
_FEW = 4  # naps in which nothing was asked for: then the thread sleeps until it is woken
LAST_WITHIN = 5.0  # seconds that the end of the loop waits for the last beat
_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS)

Work = Callable[[], object]
T = TypeVar("T")


class _Asked(NamedTuple):
    work: Work
    done: LockType | None  # held until the work is done; None: nobody waits for it


class _Worker:
    """The thread of one process. ``began``: monotonic time at which the work under way was begun; None while there is none.

    To wake a thread costs the loop more than all else. So while work keeps coming the thread wakes by itself, every ``nap``
    seconds, and only what is waited for wakes it at once.
    """

    def __init__(self, nap: float) -> None:
        from threading import Thread

        self.began: float | None = None
        self._nap = nap
        self._naps = False  # it wakes by itself
        self._places: dict[str, _Asked] = {}
        self._putting = RLock()  # of two threads that ask for the same, neither is forgotten
        self._bell = allocate_lock()  # held while there is nothing new
        self._bell.acquire()
        self._ends = False
        self._thread: Thread = Thread(target=self._run, name="ftsupervise-guard", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._ends

    def put(self, kind: str, work: Work, done: LockType | None) -> None:
        with self._putting:
            replaced = self._places.pop(kind, None)
            self._places[kind] = _Asked(work, done)
        if replaced is not None and replaced.done is not None:
            replaced.done.release()
        if done is not None or not self._naps:
            self._ring()

    def end(self, seconds: float) -> None:
        """Have all requested work done, and the thread end; wait for it this long."""
        self._ends = True
        self._ring()
        self._thread.join(seconds)

    def _ring(self) -> None:
        if self._bell.locked():
            try:
                self._bell.release()
            except RuntimeError:  # another thread was faster
                return

    def _run(self) -> None:
        # whatever the kernel would deliver here, Python handles in the main thread, which must be the one to wake
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals().difference(_FAULTS))
        idle = _FEW
        while not self._ends or self._places:
            if not self._places:
                self._wait(idle < _FEW)
            idle = 0 if self._places else idle + 1
            for kind in list(self._places):
                asked = self._places.pop(kind, None)
                if asked is not None:
                    self._do(asked)

    def _wait(self, naps: bool) -> None:
        self._naps = naps
        if naps:
            self._bell.acquire(timeout=self._nap)
        elif not self._places:  # asked for before this thread said that it wants to be woken
            self._bell.acquire()
        self._naps = False

    def _do(self, asked: _Asked) -> None:
        self.began = time.monotonic()
        try:
            asked.work()
        except Exception:  # law 7: the work reports its own errors, and this thread goes on
            pass
        finally:
            self.began = None
            if asked.done is not None:
                asked.done.release()


class SideThread:
    """The thread of the guard in this process. A forked child that trains gets one of its own."""

    def __init__(self) -> None:
        self._nap: float | None = None
        self._worker: _Worker | None = None
        self._pid = 0

    def start(self, every: float) -> None:
        """Note that the loop makes steps, and asks once in ``every`` seconds: from now on there is a thread."""
        self._nap = min(max(every, _SHORTEST), _LONGEST)

    def ask(self, kind: str, work: Work) -> None:
        """Have it done soon, within a second or so. Returns at once."""
        worker = self._present()
        if worker is None:
            work()
        else:
            worker.put(kind, work, None)

    def do(self, kind: str, work: Work, seconds: float = WITHIN) -> bool:
        """Have it done; return False if the run directory does not answer: it will be done when it does."""
        worker = self._present()
        if worker is None:
            work()
            return True
        done = allocate_lock()
        done.acquire()
        worker.put(kind, work, done)
        return done.acquire(timeout=max(0.0, seconds - self._waits(worker)))

    def answer(self, kind: str, question: Callable[[], T], seconds: float = WITHIN) -> T | None:
        """Return what ``question`` returns; None: the run directory does not answer."""
        found: list[T] = []
        self.do(kind, lambda: found.append(question()), seconds)
        return found[0] if found else None

    def waits(self) -> float:
        """Return the seconds for which the work under way has waited for the run directory."""
        return 0.0 if self._worker is None or self._pid != os.getpid() else self._waits(self._worker)

    def close(self, seconds: float = LAST_WITHIN) -> None:
        """Finish: all requested work is done, if the run directory answers in time, and the thread ends."""
        worker = self._worker
        if worker is not None and self._pid == os.getpid():
            worker.end(max(0.0, seconds - self._waits(worker)))

    @staticmethod
    def _waits(worker: _Worker) -> float:
        began = worker.began
        return 0.0 if began is None else max(0.0, time.monotonic() - began)

    def _present(self) -> _Worker | None:
        here = os.getpid()
        worker = self._living(here)
        if worker is not None or self._nap is None:
            return worker
        with _making:  # two threads of the program may find that there is none
            return self._living(here) or self._made(here, self._nap)

    def _living(self, here: int) -> _Worker | None:
        worker = self._worker
        lives = self._pid == here and worker is not None and (worker.is_alive or worker.began is not None)
        return worker if lives else None

    def _made(self, here: int, nap: float) -> _Worker | None:
        try:
            self._worker = worker = _Worker(nap)
        except RuntimeError:  # no thread can be started: too many, or the interpreter ends
            return None
        if self._pid != here:
            self._pid = here
            atexit.register(self.close, WITHIN)
        return worker


_making = RLock()  # a signal handler of the program may ask while this thread holds it


def _anew() -> None:
    """In a forked child: the thread that held it is not there."""
    global _making
    _making = RLock()


os.register_at_fork(after_in_child=_anew)
