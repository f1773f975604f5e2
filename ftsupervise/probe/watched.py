"""Long work in a child that is watched: it may take hours, and it is given up when nothing in it moves any more.

A copy may take hours, and a thread of it that waits for a dead mount is never scheduled again. So the parent counts how often
the threads of the child were scheduled, and the child need not report anything. What is given up is killed; a child that does
not die of that is left behind and noted (``errand.py``), and no other one is sent after it while it lives.

    watched(work, key="copy to /archive")      # work(progress) runs in the child; progress.moved(bytes), progress.line("...")
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ftsupervise.errors import NoAnswer
from ftsupervise.host.processes import die_with_parent
from ftsupervise.probe.errand import Errand, Notes, Say

PATIENCE = 120.0  # seconds without a movement: a file server that changes over takes 90
_LOOK = 1.0  # seconds from one look at the child to the next, at most
_TELL = 0.1  # seconds from one word of progress to the next
T = TypeVar("T")


class Stuck(NoAnswer):
    """Nothing has moved in the work for too long, and it was given up."""


class _Line(NamedTuple):
    text: str


class _Value(NamedTuple):
    value: object


class WorkProgress:
    """The child's side of the work. Several threads may call it."""

    def __init__(self, say: Say) -> None:
        self._say, self._lock = say, threading.Lock()
        self._size, self._at = 0, 0.0

    def moved(self, size: int) -> None:
        """Report that ``size`` more bytes are done."""
        with self._lock:
            self._size += size
            if time.monotonic() - self._at >= _TELL:
                self._flush()

    def line(self, text: str) -> None:
        """Send a line to the person who waits."""
        with self._lock:
            self._say.tell(_Line(text))

    def value(self, value: object) -> None:
        with self._lock:
            self._flush()
            self._say.tell(_Value(value))

    def _flush(self) -> None:
        self._say.tell(self._size)
        self._size, self._at = 0, time.monotonic()


def watched(
    work: Callable[[WorkProgress], T],
    *,
    key: str,
    patience: float = PATIENCE,
    moved: Callable[[int], object] = lambda size: None,
    line: Callable[[str], object] = lambda text: None,
) -> T:
    """Run ``work`` in a child; return or raise what it does.

    ``moved`` is called with bytes, ``line`` with its messages. Raises Stuck when none of its threads has run for
    ``patience`` seconds, and when an earlier child of this ``key`` still hangs; ChildProcessError when the child was
    killed. An exception here (Ctrl-C) ends the child.
    """
    notes = Notes()
    if (left := next((note for note in notes.stuck() if note.key == key), None)) is not None:
        raise Stuck(f"process {left.pid} has been hanging in it for {left.seconds:.0f} s", hint="wait until it answers")
    before_work = die_with_parent(signal.SIGKILL)

    def begin(say: Say) -> None:
        before_work()
        progress = WorkProgress(say)
        progress.value(work(progress))

    errand = Errand(begin, notes=notes)
    found: list[_Value] = []
    stuck = gone = False
    try:
        pulse = _Pulse(errand.pid, patience)
        while not errand.ended and not stuck:
            for message in errand.wait(_LOOK if patience > 2 * _LOOK else patience / 2):
                if isinstance(message, _Value):
                    found.append(message)
                elif isinstance(message, _Line):
                    line(message.text)
                else:
                    moved(message)
            stuck = not errand.ended and pulse.stopped()
    finally:
        gone = errand.finish(key, key)
    if stuck:
        left_behind = "" if gone else f", and process {errand.pid} hangs in it until then"
        raise Stuck(f"nothing has moved for {patience:.0f} s: it was given up{left_behind}")
    if errand.error is not None:
        raise errand.error
    if not found:
        raise ChildProcessError(errand.died or "it ended without an answer")
    return found[0].value  # type: ignore[return-value]


class _Pulse:
    """Tells how long ago a thread of the process last ran. Time in which this process slept does not count."""

    def __init__(self, pid: int, patience: float) -> None:
        self._pid, self._patience = pid, patience
        self._switches, self._silent, self._looked = -1, 0.0, time.monotonic()

    def stopped(self) -> bool:
        now, seen = time.monotonic(), movements(self._pid)
        passed, self._looked = min(now - self._looked, 2 * _LOOK), now
        if seen != self._switches:
            self._switches, self._silent = seen, 0.0
        else:
            self._silent += passed
        return self._silent > self._patience


def movements(pid: int) -> int:
    """Return a number that changes when a thread of the process has run, or is about to: how often they have been taken off a
    processor, with the number of them."""
    count = 0
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return -1
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/status", "rb") as file:  # noqa: PTH123 - many times
                said = file.read()
        except OSError:
            continue
        count += 1 + sum(int(line.split()[1]) for line in said.splitlines() if b"ctxt_switches" in line)
        if b"\nState:\tR" in said:  # it waits for a processor, or has one to itself
            count += time.monotonic_ns()
    return count
