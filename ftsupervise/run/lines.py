"""Writes the supervisor's lines in threads of their own: its output or a log may lie on a dead mount, and a signal for
the ranks may be next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from ftsupervise.rundir.paths import Line, tell_by

_WITHIN = 0.25  # seconds that a line is waited for, unless an earlier one hangs
_KEPT = 10_000  # lines for a place that hangs


class Writer:
    """Writes lines to one place, in order."""

    def __init__(self, name: str) -> None:
        self._lines: SimpleQueue[Line | None] = SimpleQueue()
        self._news = threading.Condition()
        self._asked = self._done = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, line: Line) -> None:
        """Return when it is written, or does not come soon."""
        with self._news:
            behind = self._asked - self._done
            if behind > _KEPT:
                return
            self._asked += 1
            mine = self._asked
            self._lines.put(line)
            if not behind:
                self._news.wait_for(lambda: self._done >= mine, _WITHIN)

    def close(self, seconds: float) -> None:
        self._lines.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                line()
            except (OSError, ValueError, AttributeError):  # a full disk, or an output that is closed
                pass
            with self._news:
                self._done += 1
                self._news.notify_all()


@contextmanager
def lines_aside(seconds: float = 2.0) -> Iterator[None]:
    """From here on no line of this process waits for a place that hangs. At the end those not yet written are waited for, up to
    ``seconds``."""
    output, logs = Writer("output"), Writer("logs")

    def aside(to_the_output: Line, to_the_log: Line | None) -> None:
        output.write(to_the_output)
        if to_the_log is not None:
            logs.write(to_the_log)

    tell_by(aside)
    try:
        yield
    finally:
        tell_by(None)
        output.close(seconds)
        logs.close(seconds)
