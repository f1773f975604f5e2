"""How often the guard looks when looking takes long: a rank without a turn for a moment has not met a slow file system."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from ftsupervise import Decision, Guard
from ftsupervise.guard.settings import NOW, Pace
from ftsupervise.guard.stop_reasons import StopReasons


def waits(seconds: float) -> None:
    time.sleep(seconds)


def works(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def look(pace: Pace, seconds: float, how: Callable[[float], None] = waits, end: float = NOW) -> None:
    """A look that takes so long."""
    pace.begin(end)
    if seconds:
        how(seconds)
    pace.done(end)


@pytest.mark.parametrize("how", [waits, works])
def test_one_slow_look_puts_no_other_off_and_two_do(how: Callable[[float], None]) -> None:
    pace = Pace(0.0)
    look(pace, 0.1, how)
    assert pace.due <= time.monotonic(), "poll is 0"
    look(pace, 0.1, how)
    assert pace.due > time.monotonic() + 2, "2 % of the time at most: 5 s"


def test_slow_looks_with_quick_ones_between_are_spread_too() -> None:
    """The beat, which is every second look, is what takes long."""
    pace = Pace(0.0)
    for seconds in (0.1, 0, 0, 0.1):
        assert pace.due <= time.monotonic()
        look(pace, seconds)
    assert pace.due > time.monotonic() + 2


def test_a_look_without_a_turn_is_not_slow() -> None:
    clock = count(0.0, 5.0)
    pace = Pace(0.0, clock=lambda: next(clock))
    for _ in range(3):
        look(pace, 0)
        assert pace.due <= next(clock)
    look(pace, 0.1)
    assert pace.due <= next(clock), "this was the first slow one"


def test_a_slow_look_puts_none_off_beyond_the_deadline() -> None:
    pace, end = Pace(0.0), time.monotonic() + 1.5
    for _ in range(2):
        look(pace, 0.1, end=end)
    assert pace.due == end


def test_the_guard_looks_rarely_where_its_looks_are_slow_and_stops_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def slow(self: StopReasons, now: float, **more: bool) -> Decision:
        looks.append(now)
        time.sleep(0.1)
        return reasons(self, now, **more)

    reasons = StopReasons.reasons
    monkeypatch.setattr(StopReasons, "reasons", slow)
    monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(tmp_path))
    (tmp_path / "switches").mkdir()
    began = time.monotonic()
    with Guard(poll=0, run_for=1.5) as guard:
        while not (decision := guard.step(len(looks))).stop:
            time.sleep(0.01)
    assert decision.cause == "run time reached"
    assert looks[2] >= began + 1.5, "after two slow looks the next one is that at the deadline"
