"""Signals as votes: a handler only sets a flag, then calls whoever held the signal before us.

Forked children (loader workers, pools) inherit the handlers of their parent. In them the warning is not for the child to
act on, and SIGTERM must end it as it would have without us, or ``terminate()`` would hang.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class Signals:
    """Listens to ``numbers``. ``got`` is the first that came (SIGTERM overrides a warning), 0 while none has."""

    def __init__(self, numbers: Iterable[int], wake: Callable[[], None]) -> None:
        self.got = 0
        self.pid = os.getpid()
        self._wake = wake
        self._previous: dict[int, Any] = {}
        self._numbers = tuple(numbers)

    def listen(self) -> str:
        """Install the handlers; "" or why it cannot be done (only the main thread of a process may)."""
        try:
            for number in self._numbers:
                self._previous[number] = signal.signal(number, self._on_signal)
        except (ValueError, OSError) as error:
            self.ignore()
            return str(error)
        return ""

    def ignore(self) -> None:
        """Give each signal back to whoever had it, unless somebody has taken it from us since."""
        for number, previous in self._previous.items():
            try:
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL if previous is None else previous)
            except ValueError:  # not in the main thread
                continue
        self._previous.clear()

    def last_words(self) -> None:
        """At the interpreter's end, which takes our handlers away: a warning that was heard already by the file, and comes once
        more as a signal, must not kill a process that leaves in order. SIGTERM may."""
        for number in self._previous:
            if number != signal.SIGTERM and signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_IGN)

    def taken(self) -> list[str]:
        """Names of the signals that somebody else handles now."""
        return [signal.Signals(n).name for n in self._previous if signal.getsignal(n) != self._on_signal]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if os.getpid() != self.pid:
            if number == signal.SIGTERM and not callable(previous):
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        elif not self.got or number == signal.SIGTERM:
            self.got = number
            self._wake()
        if callable(previous):
            previous(number, frame)
