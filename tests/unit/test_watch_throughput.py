"""Days of steps, looked at every minute: a slow node is told, an evaluation is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.config.schema import Launch, Run
from ftsupervise.config.watchdogs import Throughput as Settings
from ftsupervise.findings import Finding
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Health
from ftsupervise.watch import Look
from ftsupervise.watch.watchdogs.throughput import NewestStep, count_training, judge_pace

HOUR = 3600.0


def week(
    hours: float, phase: Callable[[float], str], speed: Callable[[float], float], *, window: float, every: float = 60.0
) -> list[tuple[float, Finding]]:
    """What is found at each tick, with the hour; ``phase`` and ``speed`` (steps a second) by the hour."""
    settings = Settings(window=timedelta(seconds=window))
    run = Run(name="r", run_dir=Path("/r"), launch=Launch(command="true"))
    look = Look(run, RunDir("/r"), datetime(2026, 11, 21, tzinfo=timezone.utc), None, watchdog="throughput")
    memory: dict[str, Any] = {}
    out: list[Any] = []
    steps, second = 0.0, 0.0
    while second < hours * HOUR:
        trains = phase(second / HOUR) == "train"
        steps += every * speed(second / HOUR) if trains else 0.0
        second += every
        if len(out) % 100 == 0:
            memory = json.loads(json.dumps(memory))  # as the page between two ticks keeps it
        count_training(memory, NewestStep(1e9 + second, int(steps), f"{int(second / HOUR / 20)}", trains), window)
        out.append((second / HOUR, judge_pace(look, settings, memory, window)))
        assert len(memory["trained"]) < 500
    return out


def evaluates(hour: float) -> str:
    """Forty minutes every ten hours."""
    return "eval" if hour % 10 < 2 / 3 else "train"


@pytest.mark.parametrize("every", [60.0, 300.0])
def test_an_evaluation_is_no_slow_training(every: float) -> None:
    found = week(4 * 24, evaluates, lambda hour: 1.0, window=HOUR, every=every)
    assert [hour for hour, one in found if one.health is Health.BAD] == []
    assert sum("% of the usual" in one.summary for _, one in found) > 0.9 * len(found), "it measures all the while"


def test_a_long_window_measures_with_a_tick_every_minute_and_over_attempts(window: float = 24 * HOUR) -> None:
    slow_from = 7 * window / HOUR
    found = week(slow_from + window / HOUR, evaluates, lambda hour: 1.0 if hour < slow_from else 0.5, window=window)
    bad = [hour for hour, one in found if one.health is Health.BAD]
    assert bad and bad[0] > slow_from, bad[:1]


def test_a_node_that_becomes_slow_is_told_within_a_window(window: float = HOUR) -> None:
    found = week(60, evaluates, lambda hour: 1.0 if hour < 45 else 0.6, window=window)
    bad = [hour for hour, one in found if one.health is Health.BAD]
    assert 45 < bad[0] <= 46.1 and len(bad) > 10 * 60, "and as long as it is slow"
