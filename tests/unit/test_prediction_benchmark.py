"""The benchmark of the predictions calls nothing predicted that was assumed, and nothing measured that was over too early."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from benchmarks.prediction.__main__ import SCENARIOS, assumed_of, drawn, predicted, ratio_of, strategy_of
from ftsupervise.planning.inputs import KnownBy, PlanInput, PlanInputs, usual_inputs
from ftsupervise.planning.simulator import Strategy
from ftsupervise.report.account import Spent, Stretch, TimeAccount

AT = datetime(2026, 11, 1, tzinfo=timezone.utc)


def seen(value: float) -> PlanInput:
    return PlanInput(value, value, value, KnownBy.MEASURED)


def calibrated(*, in_place: bool = True) -> PlanInputs:
    """What a calibration of short steps measures."""
    return usual_inputs(1)._replace(
        detect=seen(0.3), step=seen(0.05), warm=seen(2.0), cold=seen(3.0), queue=seen(1.0), save=seen(0.5),
        interval=seen(3.0), in_place=in_place,
    )  # fmt: skip


def test_what_a_calibration_did_not_measure_is_named_for_each_strategy() -> None:
    usual, nothing = usual_inputs(1), {}
    for of in SCENARIOS:
        found = calibrated(in_place=of.name != "cold")
        assert assumed_of(of, found) == [], of.name
        nothing[of.name] = assumed_of(of, usual)
    assert nothing["cold"] == ["detect", "step", "cold", "queue", "save", "interval"]
    assert nothing["warm"] == ["detect", "step", "warm", "save", "interval"]
    assert nothing["groups"] == ["detect", "step", "warm"]
    half = calibrated()._replace(warm=usual.warm)
    assert assumed_of(SCENARIOS[0], half) == ["warm"]


def test_a_run_that_was_over_before_its_end_is_no_measurement() -> None:
    begin = AT.timestamp()
    account = TimeAccount(
        AT,
        AT + timedelta(seconds=100),
        (Stretch(Spent.TRAIN, begin, begin + 80), Stretch(Spent.RESTART, begin + 80, begin + 100)),
    )
    assert ratio_of(account, begin, 100.0, "warm") == pytest.approx(0.8)
    with pytest.raises(RuntimeError, match="warm was over after 100 of 150 s"):
        ratio_of(account, begin, 150.0, "warm")


@pytest.mark.parametrize("of", SCENARIOS, ids=lambda of: of.name)
def test_each_prediction_is_that_of_its_own_strategy(of: object) -> None:
    scenario = next(one for one in SCENARIOS if one is of)
    found = calibrated(in_place=scenario.name != "cold")._replace(spares=2 if scenario.node else 0)
    how: Strategy = strategy_of(scenario, found)
    from random import Random

    trace = drawn(Random(1), 150.0, scenario.gap)
    mean, around, these = predicted(scenario, how, trace, 150.0)
    assert 0.5 < mean < 1 and 0 < around < 0.1 and abs(mean - these) < 0.1
    slower = how._replace(warm=how.warm and how.warm._replace(mean=6.0), cold=how.cold._replace(mean=9.0))
    slower = slower._replace(away=6.3 if scenario.groups else None)
    assert predicted(scenario, slower, trace, 150.0)[0] < mean
