"""Waiting for a state instead of a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

import pytest

from ftsupervise.errors import SchedulerUnavailable

T = TypeVar("T")


def wait_until(question: Callable[[], T | Literal[False] | None], what: str = "it", seconds: float = 60.0) -> T:
    """The first true answer; fails with the last one after ``seconds``.

    A file that is not there yet is an answer too: not yet. So is a controller that has no turn for a moment.
    """
    deadline = time.monotonic() + seconds
    while True:
        answer: T | Literal[False] | Exception | None
        try:
            answer = question()
        except (FileNotFoundError, SchedulerUnavailable) as error:
            answer = error
        if answer and not isinstance(answer, (FileNotFoundError, SchedulerUnavailable)):
            return answer
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come true within {seconds:.0f} s: {answer!r}")
        time.sleep(0.05)


def waited_for_a_processor() -> float:
    """The seconds for which somebody on this machine had to: they do not count, a minute at most."""
    try:
        words = Path("/proc/pressure/cpu").read_text().split()
    except OSError:
        return 0.0
    return int(next(word for word in words if word.startswith("total="))[6:]) / 1e6


def waited_of(*pids: int) -> float:
    """The seconds for which these processes stood in line for a processor since their start: of each the thread that waited
    longest. One at nice 19 waits a minute for its 30 ms where others keep all processors busy."""
    total = 0.0
    for pid in pids:
        longest = 0
        for one in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since it was listed
                longest = max(longest, int(one.read_text().split()[1]))
        total += longest / 1e9
    return total
