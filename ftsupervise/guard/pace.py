"""How often the guard looks at the outside world: as it was told, and more rarely where a look takes long."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from resource import RUSAGE_THREAD, getrusage, struct_rusage

NOW = -inf
_SLOW_LOOK = 0.05  # seconds; slower ones are spread so that they take no more than this share of the loop's time:
_LOOK_SHARE = 0.02
_LONGEST_POLL = 60.0


class Pace:
    """``due`` is the monotonic time of the next look. ``poll``: seconds between two looks."""

    def __init__(self, poll: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.due = NOW
        self._poll, self._clock = poll, clock
        self._began = self._slow_until = NOW  # a slow look before ``_slow_until`` is not the first one
        self._usage: struct_rusage | None = None

    def begin(self, end: float) -> float:
        """A look begins: the time. The next one is set first, at ``end`` at the latest, the deadline, if that is to come."""
        self._began = now = self._clock()
        self._usage = getrusage(RUSAGE_THREAD)
        self.due = self._by(now + self._poll, end)
        return now

    def done(self, end: float) -> None:
        """It is over. Of slow looks one alone, as when a server is away for a moment, puts no other off."""
        now = self._began
        if (took := self._clock() - now) <= _SLOW_LOOK or (spent := min(took, self._own_time())) <= _SLOW_LOOK:
            return
        if now < self._slow_until:
            self.due = self._by(now + max(self._poll, min(spent / _LOOK_SHARE, _LONGEST_POLL)), end)
        self._slow_until = now + 2 * _LONGEST_POLL

    def _by(self, due: float, end: float) -> float:
        return min(due, end) if end > self._began else due

    def _own_time(self) -> float:
        """Seconds that we ourselves have taken since then: all of them where we have waited for something, but not those in
        which this thread had no turn on a busy machine."""
        here, before = getrusage(RUSAGE_THREAD), self._usage
        if before is None or here.ru_nvcsw > before.ru_nvcsw:
            return inf
        return here.ru_utime + here.ru_stime - before.ru_utime - before.ru_stime
