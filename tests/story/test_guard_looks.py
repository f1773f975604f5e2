"""How often the guard looks when looking takes long: a rank without a turn for a moment has not met a slow file system."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ftsupervise import Decision, Guard

Looks = Callable[..., Guard]


def waits(seconds: float) -> None:
    time.sleep(seconds)


def works(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Looks]:
    """A guard each of whose looks takes 0.1 s, or those that ``takes`` says."""
    made: list[Guard] = []
    monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(tmp_path))
    (tmp_path / "switches").mkdir()

    def make(how: Callable[[float], None] = waits, takes: Sequence[float] = (), **limits: Any) -> Guard:
        made.append(guard := Guard(poll=0, **limits))
        look, rest = guard._lookout.reasons, list(takes)

        def reasons(*words: Any, **more: Any) -> Decision:
            if seconds := rest.pop(0) if rest else 0.1:
                how(seconds)
            return look(*words, **more)

        monkeypatch.setattr(guard._lookout, "reasons", reasons)
        return guard

    yield make
    for guard in made:
        guard.close()


@pytest.mark.parametrize("how", [waits, works])
def test_one_slow_look_puts_no_other_off_and_two_do(slow: Looks, how: Callable[[float], None]) -> None:
    guard = slow(how)
    guard.step(1)
    assert guard._due <= time.monotonic(), "poll is 0"
    guard.step(2)
    assert guard._due > time.monotonic() + 2, "2 % of the time at most: 5 s"


def test_slow_looks_with_quick_ones_between_are_spread_too(slow: Looks) -> None:
    """The beat, which is every second look, is what takes long."""
    guard = slow(takes=(0.1, 0, 0, 0.1))
    for step in range(1, 5):
        assert guard._due <= time.monotonic()
        guard.step(step)
    assert guard._due > time.monotonic() + 2


def test_a_look_without_a_turn_is_not_slow(slow: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = slow(takes=(0, 0, 0))
    monkeypatch.setattr(guard._heart, "beat", lambda _: False)  # it may wait for the disk
    clock = count(0.0, 5.0)
    monkeypatch.setattr("ftsupervise.guard.guard._monotonic", lambda: next(clock))
    for _ in range(3):
        guard._look()
        assert guard._due <= next(clock)
    assert guard._slow_until == float("-inf")


def test_a_slow_look_puts_none_off_beyond_the_deadline(slow: Looks) -> None:
    guard = slow(run_for=1.5)
    for step in (1, 2):
        assert not guard.step(step).stop or time.monotonic() > guard._lookout.end
    time.sleep(max(0.0, guard._lookout.end - time.monotonic()))
    assert guard.step(3).cause == "run time reached"
