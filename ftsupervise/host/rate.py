"""A bound on how many bytes pass in a second, shared by the threads of one copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_BURST = 0.1  # seconds' worth of bytes that may pass at once
_NAP = 10.0  # seconds of one sleep at most: whoever watches this process sees it move


class RateLimit:
    """At most ``rate`` bytes in a second over all threads that call ``take``; None: no bound.

    The bytes of each call are booked one after the other, and a call returns when its turn has come. So a piece larger than a
    second's worth passes too, and the next one waits for it.
    """

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if rate is not None and rate <= 0:
            raise ValueError(f"{rate} bytes a second lets nothing pass")
        self.rate = rate
        self._clock, self._sleep = clock, sleep
        self._free = clock()  # when all that is booked has passed
        self._lock = threading.Lock()

    def take(self, size: int) -> None:
        """Wait until ``size`` more bytes may pass. Several threads may call it."""
        if self.rate is None:
            return
        with self._lock:
            now = self._clock()
            self._free = max(self._free, now - _BURST) + size / self.rate
            wait = self._free - now
        while wait > 0:
            self._sleep(min(wait, _NAP))
            wait -= _NAP
