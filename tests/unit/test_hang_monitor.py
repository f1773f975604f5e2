"""The hang monitor: what happens while it takes the evidence counts as well."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ftsupervise.ranks.hang_detector import Detector, GapHistory, HangLimits, PhaseStats
from ftsupervise.ranks.hang_monitor import HangMonitor, SeenFromOutside
from ftsupervise.truth import RankState


@pytest.mark.parametrize("phase", ["train", ""], ids=["the guard", "read from the output"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_stopped_rank_that_somebody_lets_go_on_meanwhile_is_let_alone(
    tmp_path: Path, goes_on: bool, phase: str
) -> None:
    """Its next step takes longer than the evidence. What is read from an output has no phase."""
    began, state = time.monotonic(), "T"

    def pulses() -> list[RankState]:
        now = time.monotonic()
        return [
            RankState(rank, "node-0", 50, phase, began, began, now, rank + 1, state if rank else "S", 1.0)
            for rank in (0, 1)
        ]

    def evidence(_questions: Mapping[str, str], _bound: float) -> Mapping[str, str]:
        nonlocal state
        state = "R" if goes_on else "T"
        return {}

    past = GapHistory({phase: PhaseStats(0.05, 1000)})
    monitor = HangMonitor(Detector(HangLimits(floor=1.0), past), pulses, evidence, tmp_path)
    verdict = None
    while verdict is None and time.monotonic() - began < 60 and state == "T":
        time.sleep(max(0.0, monitor.due - time.monotonic()))
        verdict = monitor.alarm()
    assert (verdict is None) == goes_on
    assert (tmp_path / "evidence" / "hang.txt").exists() != goes_on


def test_many_ranks_make_the_looks_rare_and_not_the_alarm(tmp_path: Path) -> None:
    """A look that takes 0.2 s where one each 0.1 s would be due: a fifth of the time at most goes to looking."""
    began, spent = time.monotonic(), 0.0

    def pulses() -> list[RankState]:
        nonlocal spent
        time.sleep(0.2)
        spent += 0.2
        now = time.monotonic()
        return [RankState(rank, "node-0", 50, "train", began, began, now, rank + 1, "S", 1.0) for rank in (0, 1)]

    past = GapHistory({"train": PhaseStats(0.05, 1000)})
    detector = Detector(HangLimits(floor=2.0), past)
    detector.pace.seen_here["train"] = 100
    monitor = HangMonitor(detector, pulses, lambda *_: {}, tmp_path)
    verdict = None
    while verdict is None and time.monotonic() - began < 150:
        time.sleep(max(0.0, monitor.due - time.monotonic()))
        verdict = monitor.alarm()
    assert verdict is not None, "as if we had not run in between"
    assert verdict.waited < 45
    assert spent < 0.5 * (time.monotonic() - began)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("how", [pytest.param("steps", marks=SLOW), pytest.param("waits", marks=SLOW), "silent"])
def test_the_word_of_the_others_counts_at_once_of_silent_ranks_and_of_those_that_report_when_it_lasts(
    tmp_path: Path, how: str
) -> None:
    """The others know of this attempt by a page of some seconds ago: it may have made steps since."""
    began = time.monotonic()

    def pulses() -> list[RankState]:
        now = time.monotonic()
        step = 50 + int(10 * (now - began)) if how == "steps" else 50
        heard = now if how != "silent" else began - 10
        return [RankState(rank, "node-0", step, "train", heard, heard, now, rank + 1, "S", 1.0) for rank in (0, 1)]

    past = GapHistory({"train": PhaseStats(0.05, 1000)})
    outside = SeenFromOutside(hangs=True)
    monitor = HangMonitor(Detector(HangLimits(floor=60.0), past), pulses, lambda *_: {}, tmp_path, lambda: outside)
    verdict = None
    while verdict is None and time.monotonic() - began < 8.5:
        time.sleep(max(0.0, monitor.due - time.monotonic()))
        verdict = monitor.alarm()
    lasted = time.monotonic() - began
    assert (verdict is None) == (how == "steps"), verdict
    assert lasted > 5.5 if how == "waits" else lasted < 3 or how == "steps", lasted
