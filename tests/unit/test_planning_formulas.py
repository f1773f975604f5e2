"""The formulas give the figures that were published, each by the formula that its authors used."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ftsupervise.planning.formulas import (
    ASSUMES,
    DAY,
    HOUR,
    MINUTE,
    Formula,
    all_survive,
    away_for,
    best_interval,
    bytes_a_day,
    cost,
    daly,
    daly_ettr,
    first_order,
    job_mtbf,
    loss_allowed,
    meta_ettr,
    node_rate,
    replica_ettr,
    spares_for,
    stall_ettr,
    young,
)

RSC_1, LLAMA_3 = 6.50e-3, 3.8e-3  # failures of a node in a day
LLAMA_MTBF = 54 * DAY / 419  # unexpected interruptions


def test_of_a_thousand_machines_that_each_survive_a_day_with_999_in_1000_all_do_on_one_day_in_three() -> None:
    assert all_survive(0.999, 1000) == pytest.approx(0.3677, abs=5e-5)


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.225)])
def test_a_job_of_meta_s_cluster_fails_as_often_as_was_published(gpus: int, hours: float) -> None:
    assert job_mtbf(gpus // 8, RSC_1) / HOUR == pytest.approx(hours, rel=0.01)
    assert node_rate(gpus // 8, job_mtbf(gpus // 8, RSC_1)) == pytest.approx(RSC_1)


def test_meta_s_expected_ettr_is_the_published_one_and_the_one_outside_its_range_says_so() -> None:
    mtbf = job_mtbf(2048, RSC_1)
    hourly, often = (meta_ettr(minutes * MINUTE, 0, mtbf, 5 * MINUTE) for minutes in (60, 5))
    assert [hourly.value, often.value] == pytest.approx([0.676, 0.931], abs=0.002)
    assert (hourly.formula, often.formula) == (Formula.META, Formula.META)
    assert "a failure costs 32% of the time" in hourly.doubt and not often.doubt


@pytest.mark.parametrize(
    ("mtbf", "save", "restart", "interval", "whole", "simple"),
    [
        (3 * HOUR, MINUTE, 10 * MINUTE, 18.3 * MINUTE, 0.8497, 0.8613),
        (DAY, 5 * MINUTE, 15 * MINUTE, 116.7 * MINUTE, 0.9094, 0.9143),
        (7 * DAY, 40.0, 20 * MINUTE, 115.5 * MINUTE, 0.9866, 0.9867),
    ],
)
def test_daly_s_interval_is_the_best_one_by_his_whole_formula(
    mtbf: float, save: float, restart: float, interval: float, whole: float, simple: float
) -> None:
    best = daly(save, mtbf)
    assert best == pytest.approx(interval, rel=1e-3)
    assert daly_ettr(best, save, mtbf, restart).value == pytest.approx(whole, abs=5e-5)
    assert first_order(best, save, mtbf, restart).value == pytest.approx(simple, abs=5e-5)
    searched = best_interval(lambda one: daly_ettr(one, save, mtbf, restart).value, 1.0, 10 * mtbf)
    assert searched == pytest.approx(best, rel=0.05), "and the search finds it"
    assert searched == pytest.approx(young(save, mtbf), rel=0.05)


def test_ft_hsdp_has_its_44_and_83_percent_by_one_formula_and_80_needs_a_group_to_be_back_in_time() -> None:
    mtbf = 18 * MINUTE
    assert stall_ettr(10 * MINUTE, mtbf).value == pytest.approx(0.444, abs=5e-4)
    assert stall_ettr(3 * MINUTE, mtbf).value == pytest.approx(0.833, abs=5e-4)
    for groups, minutes in ((16, 11.5), (32, 23.0)):
        away = away_for(0.80, 3 * MINUTE, mtbf, groups)
        assert away / MINUTE == pytest.approx(minutes, abs=0.05)
        assert replica_ettr(3 * MINUTE, mtbf, groups, away).value == pytest.approx(0.80)
    assert away_for(0.80, 10 * MINUTE, mtbf, 32) < 0, "with the long stall it cannot be had"


def test_three_formulas_of_a_stall_differ_by_twenty_points_and_each_says_its_name() -> None:
    found = {
        formula: stall_ettr(10 * MINUTE, 18 * MINUTE, formula)
        for formula in (Formula.STALL, Formula.STALL_ALONE, Formula.STALL_AGAIN)
    }
    assert [round(100 * one.value, 1) for one in found.values()] == [44.4, 64.3, 57.4]
    assert all(one.formula is formula for formula, one in found.items())
    assert found[Formula.STALL].doubt and set(ASSUMES) == set(Formula)


def test_llama_3_allows_an_interruption_16_7_minutes_and_saves_of_a_minute_cannot_give_its_90_percent() -> None:
    assert loss_allowed(0.90, 54 * DAY / 466) / MINUTE == pytest.approx(16.7, abs=0.05)
    assert job_mtbf(2048, LLAMA_3) == pytest.approx(LLAMA_MTBF, rel=0.01)

    def best(save: float) -> float:
        return daly_ettr(daly(save, LLAMA_MTBF), save, LLAMA_MTBF, 10 * MINUTE).value

    assert best(20.0) == pytest.approx(0.892, abs=5e-4)
    assert best(60.0) == pytest.approx(0.853, abs=5e-4)


def test_byterobust_s_97_and_91_percent_leave_an_incident_22_and_31_minutes() -> None:
    assert loss_allowed(0.97, 90 * DAY / 175) / MINUTE == pytest.approx(22.2, abs=0.1)
    assert loss_allowed(0.91, 30 * DAY / 125) / MINUTE == pytest.approx(31.1, abs=0.1)
    mtbf = 90 * DAY / 175
    assert 1 - 22.2 * MINUTE / mtbf == pytest.approx(0.97, abs=5e-4)


def test_bloom_s_saves_took_0_37_percent_and_its_disk_18_4_terabytes_a_day() -> None:
    mtbf = 7 * DAY
    assert 1 - daly_ettr(3 * HOUR, 40.0, math.inf, 0).value == pytest.approx(0.0037, abs=5e-5)
    assert pytest.approx(0.0038, abs=5e-5) == 40.0 / (100 * 105.0), "counted by its 100 iterations"
    assert first_order(3 * HOUR, 0.0, mtbf, 0).value == pytest.approx(1 - 0.0087, abs=5e-4), "the steps made again"
    assert bytes_a_day(2.3e12, 3 * HOUR) == pytest.approx(18.4e12)


def test_two_thousand_gpus_for_a_fortnight_cost_1_344_000() -> None:
    assert cost(2000, 14 * DAY, 2.0) == 1_344_000


def test_spare_nodes_keep_the_risk_and_one_fewer_does_not() -> None:
    for failures in (0.1, 1.0, 4.0, 900.0):
        spares = spares_for(failures, 0.01)
        terms = [math.exp(k * math.log(failures) - failures - math.lgamma(k + 1)) for k in range(spares + 1)]
        assert 1 - math.fsum(terms) <= 0.01 < 1 - math.fsum(terms[:-1])
    assert spares_for(0, 0.01) == 0


@given(some.floats(1, 1e5), some.floats(0, 1e3), some.floats(1e-9, 1e9))
def test_without_failures_only_the_saves_cost(interval: float, save: float, lost: float) -> None:
    exact = 1 / (1 + save / interval)
    assert daly_ettr(interval, save, math.inf, lost).value == exact
    assert first_order(interval, save, math.inf, lost).value == exact


@given(some.floats(60, 1e6), some.floats(0.1, 1e4), some.floats(0, 1e4), some.floats(1.01, 10))
def test_more_failures_and_longer_restarts_never_help(mtbf: float, save: float, lost: float, times: float) -> None:
    interval = max(1.0, daly(save, mtbf))
    base = daly_ettr(interval, save, mtbf, lost).value
    assert 0 <= base <= 1
    assert daly_ettr(interval, save, mtbf / times, lost).value <= base + 1e-12
    assert daly_ettr(interval, save, mtbf, lost * times + 1).value <= base + 1e-12
