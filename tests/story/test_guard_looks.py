"""How often the guard looks when looking takes long: a rank without a turn for a moment has not met a slow file system."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise import Decision, Guard


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Guard]]:
    """A guard each of whose looks takes 0.1 s."""
    made: list[Guard] = []
    monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(tmp_path))
    (tmp_path / "switches").mkdir()

    def make(**limits: Any) -> Guard:
        made.append(guard := Guard(poll=0, **limits))
        look = guard._lookout.reasons

        def reasons(*words: Any, **more: Any) -> Decision:
            time.sleep(0.1)
            return look(*words, **more)

        monkeypatch.setattr(guard._lookout, "reasons", reasons)
        return guard

    yield make
    for guard in made:
        guard.close()


def test_one_slow_look_puts_no_other_off_and_two_do(slow: Callable[..., Guard]) -> None:
    guard = slow()
    guard.step(1)
    assert guard._due <= time.monotonic(), "poll is 0"
    guard.step(2)
    assert guard._due > time.monotonic() + 2, "2 % of the time at most: 5 s"


def test_a_slow_look_puts_none_off_beyond_the_deadline(slow: Callable[..., Guard]) -> None:
    guard = slow(run_for=1.5)
    for step in (1, 2):
        assert not guard.step(step).stop or time.monotonic() > guard._lookout.end
    time.sleep(max(0.0, guard._lookout.end - time.monotonic()))
    assert guard.step(3).cause == "run time reached"
