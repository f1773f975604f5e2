"""A plan says what it is made of, agrees with the simulator where both apply, and says where they do not."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest

from ftsupervise.planning.certainty import poisson_bounds, student
from ftsupervise.planning.formulas import DAY, HOUR, MINUTE, Formula
from ftsupervise.planning.inputs import (
    KnownBy,
    PlanInputs,
    given,
    mean_of,
    share_of,
    time_between,
    usual_inputs,
)
from ftsupervise.planning.plan import plan_of, warning_lead


def simple(**changes: Any) -> PlanInputs:
    """One restart for each failure, as Daly has it."""
    sure: dict[str, Any] = dict.fromkeys(("detect", "queue", "hang", "lost", "silent"), given(0.0))
    base = usual_inputs(64, 8)._replace(
        mtbf=given(6 * HOUR), save=given(30.0), cold=given(5 * MINUTE), warm=given(5 * MINUTE), step=given(1.0), **sure
    )
    return base._replace(**changes)


def test_the_formula_and_the_simulator_agree_where_the_formula_knows_all() -> None:
    made = plan_of(simple())
    assert made.now.formula is Formula.DALY
    assert abs(made.simulated.ettr - made.planned.value) < 3 * made.simulated.certain + 1e-3
    assert made.planned.value > made.now.value and made.helps[0].change == "the planned interval"
    assert made.searched == pytest.approx(made.daly, rel=0.05)
    assert not any("simulated it is" in one for one in made.doubts)


def test_where_a_failure_costs_much_of_the_time_to_the_next_the_formula_is_doubted() -> None:
    made = plan_of(simple(mtbf=given(18 * MINUTE), cold=given(10 * MINUTE), warm=given(10 * MINUTE)))
    assert any("a failure costs 56% of the time to the next one" in one for one in made.doubts)


def test_what_is_only_assumed_is_named_and_makes_the_range_wide() -> None:
    sure, guessed = plan_of(simple()), plan_of(usual_inputs(64, 8))
    assert sure.now_range.high - sure.now_range.low < 1e-9, "all is given"
    assert guessed.now_range.high - guessed.now_range.low > 0.02
    assert guessed.now_range.low < guessed.now.value < guessed.now_range.high
    assert any(one.startswith("not measured, but assumed: time between failures") for one in guessed.doubts)


def test_help_is_counted_in_hours_and_money_of_all_gpus_for_a_month() -> None:
    made = plan_of(simple(), price=2.0)
    first = made.helps[0]
    assert first.gpu_hours == pytest.approx(first.gain * 512 * 365.25 / 12 * 24)
    assert first.money == pytest.approx(2 * first.gpu_hours)
    assert made.spend.money is not None and made.spend.money == pytest.approx(512 * 730.5 * 2)
    assert plan_of(simple()).helps[0].money is None


def test_a_run_that_never_fails_needs_no_other_interval() -> None:
    made = plan_of(simple(mtbf=given(math.inf)))
    assert made.now.value == pytest.approx(1 / (1 + 30 / HOUR))
    assert made.searched == HOUR


def test_what_is_not_sure_of_the_queue_widens_the_range_around_the_simulated_ratio() -> None:
    inputs = simple(limit=20 * HOUR, left=30 * DAY, queue=given(2 * HOUR))
    made = plan_of(inputs)
    assert made.now_range.low == pytest.approx(made.simulated_now.ettr) == made.now_range.high, "all is given"
    unsure = plan_of(inputs._replace(queue=inputs.queue._replace(low=0.3 * HOUR, high=6 * HOUR)))
    low, high = unsure.planned_range
    assert low < unsure.simulated.ettr < high and high - low > 0.1
    ends = next(one for one in unsure.items if one.name == "time to the last step")
    assert ends.value == pytest.approx(30 * DAY / unsure.simulated.ettr)


def test_short_jobs_and_rare_failures_are_planned_in_seconds() -> None:
    for mtbf in (1000 * DAY, math.inf):
        played = plan_of(simple(mtbf=given(mtbf), limit=HOUR)).simulated
        assert played.runs * played.jobs < 30_000
        assert played.ettr == pytest.approx(HOUR / (HOUR + 5 * MINUTE), rel=0.1)


def test_as_planned_has_the_spare_nodes_of_the_plan_and_their_hours_are_no_gain() -> None:
    inputs = simple(lost=given(1.0), queue=given(4 * HOUR))
    made = plan_of(inputs)
    spares = next(one for one in made.items if one.name == "spare nodes")
    assert made.planned_spares == spares.value == made.simulated.strategy.spares > 1
    assert made.planned.value == pytest.approx(made.simulated.ettr, abs=0.01), "hardly anybody waits in the queue"
    help_ = next(one for one in made.helps if one.change.startswith(f"{made.planned_spares} more spare nodes"))
    assert help_.gpu_hours == pytest.approx((help_.gain * 512 - made.planned_spares * 8) * 365.25 / 12 * 24)
    assert not any("spare nodes idle" in one for one in made.doubts)
    dear = plan_of(inputs._replace(queue=given(5 * MINUTE)))
    assert any("spare nodes idle for more than they bring" in one for one in dear.doubts)
    alone = plan_of(inputs._replace(in_place=False))
    assert alone.planned_spares == 0 and any("would only idle" in one.why for one in alone.items)


def test_replica_groups_are_planned_where_they_help_and_refused_where_they_do_not() -> None:
    def groups(inputs: PlanInputs) -> tuple[float, str]:
        return next((one.value, one.why) for one in plan_of(inputs).items if one.name == "replica groups")

    often, seldom = simple(mtbf=given(HOUR)), simple(mtbf=given(3000 * HOUR))
    assert groups(often)[0] == 4 and groups(seldom)[0] == 0 and "not worth it" in groups(seldom)[1]


def test_an_interval_beyond_all_hope_is_as_short_as_it_can_be_and_the_ratio_says_so() -> None:
    hopeless = plan_of(simple(mtbf=given(HOUR), save=given(1000 * DAY)))
    assert hopeless.planned.value == 0 and hopeless.searched == pytest.approx(hopeless.daly, rel=1e-3)
    made = plan_of(simple(mtbf=given(1.0)))
    assert made.planned.value < 1e-3 and made.simulated.ettr < 0.01 and made.searched == pytest.approx(1.0, rel=1e-3)
    assert made.planned_spares <= 64 and any("times the time to the next one" in one for one in made.doubts)


def test_the_warning_leaves_room_for_two_saves_and_two_steps() -> None:
    lead = warning_lead(simple(save=given(100.0), step=given(20.0)))
    assert lead >= 2 * 100 + 2 * 20 and lead % MINUTE == 0


def test_a_count_has_the_interval_of_poisson_s_law() -> None:
    exact = {0: (0, 3.689), 1: (0.0253, 5.572), 3: (0.6187, 8.767), 10: (4.795, 18.39), 100: (81.36, 121.63)}  # Garwood
    for times, bounds in exact.items():
        assert poisson_bounds(times) == pytest.approx(bounds, rel=2e-3)


def test_of_few_values_the_interval_is_student_s() -> None:
    exact = {1: 12.706, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 30: 2.0423, 1000: 1.9623}
    for degrees, width in exact.items():
        assert student(degrees) == pytest.approx(width, rel=2e-3)


def test_a_time_without_a_failure_bounds_what_is_assumed() -> None:
    before = usual_inputs(1).mtbf
    found = time_between(0, 1000 * DAY, before)
    assert found.origin is KnownBy.ASSUMED and found.low == pytest.approx(1000 * DAY / 3.69, rel=0.02)
    assert found.value >= found.low and time_between(4, 1000.0, before).value == 250
    for times in (0, 3):  # a run that has not trained yet, or fails before its first step
        assert time_between(times, 0.0, before) == before


@pytest.mark.parametrize("values", [2, 3, 4, 12])
def test_an_interval_of_95_percent_holds_the_truth_about_so_often(values: int) -> None:
    chance, hits = Random(values), 0
    for _ in range(2000):
        found = mean_of([chance.gauss(1000, 3) for _ in range(values)], "draw")
        assert found is not None
        hits += found.low <= 1000 <= found.high
    assert 0.935 < hits / 2000 < 0.965


def test_of_one_value_half_to_twice_is_taken_and_it_says_so() -> None:
    once = mean_of([7.0], "draw")
    assert once is not None and (once.low, once.high) == (3.5, 14)
    assert once.note == "of 1 draw alone: half to twice that is taken"
    assert mean_of([], "draw") is None and share_of(0, 0, once) is once and share_of(2, 4, once).value == 0.5
