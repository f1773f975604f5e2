"""The value that ranks share, in this process, with the moods of a store: slow, stopped, gone, written to by others."""

from __future__ import annotations

import threading
import time


class SharedRegister:
    """``stopped``: a question is not answered until it is not. ``gone``: it fails. ``slow``: seconds that each answer takes."""

    def __init__(self, world: int) -> None:
        self.world, self.text, self.asked, self.have_left = world, "", 0, 0
        self.slow, self.gone = 0.0, False
        self._goes_on, self._lock = threading.Event(), threading.Lock()
        self._goes_on.set()

    def stop(self) -> None:
        self._goes_on.clear()

    def go_on(self) -> None:
        self._goes_on.set()

    def swap(self, expected: str, desired: str) -> str:
        self._answers()
        with self._lock:
            self.asked += 1
            if self.text == expected:
                self.text = desired
            return self.text

    def left(self, more: int) -> int:
        self._answers()
        with self._lock:
            self.have_left += more
            return self.have_left

    def _answers(self) -> None:
        self._goes_on.wait(60)
        time.sleep(self.slow)
        if self.gone:
            raise ConnectionError("Broken pipe")
