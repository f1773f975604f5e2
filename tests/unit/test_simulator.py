"""The simulator agrees with what can be reckoned, closes its accounts, and repeats itself to the bit."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import pytest

from ftsupervise.planning.faults import Fault, Fleet, Lasting, faults
from ftsupervise.planning.formulas import DAY, HOUR, MINUTE, daly, daly_ettr, job_mtbf
from ftsupervise.planning.simulator import Strategy, TimeKind, events_of, play, replay, simulate, trace_of

RSC_1 = 6.50e-3 / DAY  # failures of a node in a second


def cold(interval: float, save: float, restart: float) -> Strategy:
    return Strategy("cold", interval, save, cold=Lasting(restart))


@pytest.mark.parametrize(
    ("mtbf", "save", "restart"),
    [(3 * HOUR, MINUTE, 10 * MINUTE), (DAY, 5 * MINUTE, 15 * MINUTE), (7 * DAY, 40.0, 20 * MINUTE)],
)
def test_it_agrees_with_daly_s_whole_formula_within_three_standard_errors(
    mtbf: float, save: float, restart: float
) -> None:
    interval = daly(save, mtbf)
    (found,) = simulate(Fleet(1, 1 / mtbf), [cold(interval, save, restart)], 2000 * mtbf, 40, seed=1)
    wanted = daly_ettr(interval, save, mtbf, restart).value
    error = found.certain / 1.96
    assert abs(found.ettr - wanted) < 3 * error
    assert error < 1e-3, "and that is a narrow bound"


def test_without_faults_it_is_exactly_what_the_saves_leave() -> None:
    for save, interval in ((50.0, 1000.0), (1.0, 3.0), (0.0, 60.0)):
        found = play(cold(interval, save, 300), [], 100 * (interval + save))
        assert found.ettr == pytest.approx(1 / (1 + save / interval), rel=1e-12)
        assert found.faults == 0


def test_the_faults_of_meta_s_cluster_come_as_often_as_was_published() -> None:
    for nodes, hours in ((2048, 1.8), (16_384, 0.225)):
        seconds = 20_000 * job_mtbf(nodes, 6.50e-3)
        count = len(trace_of(Fleet(nodes, RSC_1), seconds, 5, 0))
        assert seconds / count / HOUR == pytest.approx(hours, rel=0.03)


def any_strategy(chance: Random) -> Strategy:
    pick = chance.choice
    return Strategy(
        "any",
        interval=chance.uniform(1, 5000),
        save=pick((0.0, 1.0, 100.0)),
        flush=pick((0.0, 1000.0)),
        snapshot_every=pick((0.0, 7.0, 60.0)),
        snapshot=pick((0.0, 0.5)),
        copies=pick((True, False)),
        detect=pick((0.0, 100.0)),
        hang=pick((0.0, 2000.0)),
        warm=pick((None, Lasting(5.0), Lasting(50.0, 1.5))),
        cold=Lasting(pick((0.0, 500.0)), pick((0.0, 2.0))),
        queue=Lasting(pick((0.0, 1e-12, 5000.0)), pick((0.0, 2.0))),
        requeue=pick((None, Lasting(30.0))),
        spares=pick((0, 1, 9)),
        exclude_after=pick((0, 1, 2)),
        limit=pick((math.inf, 900.0, 20_000.0)),
        maintenance_every=pick((0.0, 30_000.0)),
        maintenance=pick((0.0, 3000.0)),
        groups=pick((1, 1, 4)),
        least=pick((1, 3)),
        stall=pick((0.0, 60.0)),
        away=pick((None, 0.0, 3000.0)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_every_account_closes_whatever_the_strategy(seed: int) -> None:
    strategy = any_strategy(Random(seed))
    fleet = Fleet(40, 1 / (40 * 2000.0), lemons=0.05, rack=8, rack_rate=1e-6, lost=0.5, silent=0.2)
    seconds = 100_000.0
    found = play(strategy, trace_of(fleet, seconds, seed, 0), seconds)
    assert found.total == pytest.approx(seconds, rel=1e-9)
    assert min(found.spent) >= 0
    assert found == play(strategy, trace_of(fleet, seconds, seed, 0), seconds), "to the bit"
    told = list(events_of(strategy, trace_of(fleet, seconds, seed, 0), seconds))
    assert math.fsum(one.seconds for one in told) == pytest.approx(seconds, rel=1e-9)
    assert all(later.at >= earlier.at for earlier, later in pairwise(told))


def test_one_fault_costs_its_detection_the_restart_and_the_steps_since_the_last_save() -> None:
    found = play(Strategy("one", 100.0, 10.0, detect=5.0, cold=Lasting(20.0)), [Fault(150.0, 0)], 1000.0)
    # 100 s of steps, 10 s saved, 40 s of steps that are undone; 5 + 20 s; the 40 s again; 785 s are left of the time
    assert found.spent[TimeKind.DETECT] == 5 and found.spent[TimeKind.RESTART] == 20
    assert found.spent[TimeKind.REDO] == pytest.approx(40)
    assert found.spent[TimeKind.SAVE] == 10 + 7 * 10 and found.faults == 1 and found.jobs == 2
    assert found.spent[TimeKind.TRAIN] == pytest.approx(1000 - 25 - 40 - 80)


def test_a_save_that_is_still_written_does_not_count() -> None:
    trace = [Fault(115.0, 0)]
    written, flying = (play(Strategy("x", 100.0, 10.0, flush=of), trace, 1000.0) for of in (0.0, 30.0))
    assert [one.spent[TimeKind.REDO] for one in (written, flying)] == pytest.approx([5, 105])


def test_a_snapshot_in_memory_outlives_a_process_and_with_its_copy_a_node() -> None:
    def redone(lost: bool, copies: bool, spares: int = 1) -> float:
        how = Strategy("x", 1e6, snapshot_every=10.0, copies=copies, warm=Lasting(5.0), spares=spares)
        return play(how, [Fault(995.0, 0, lost=lost)], 3000.0).spent[TimeKind.REDO]

    assert redone(lost=False, copies=False) == pytest.approx(5)
    assert redone(lost=True, copies=True) == pytest.approx(5)
    assert redone(lost=True, copies=False) == pytest.approx(995)
    assert redone(lost=True, copies=True, spares=0) == pytest.approx(995), "the memory of a job goes with it"


def test_a_spare_node_saves_the_queue_until_they_are_used_up_and_it_comes_back_repaired() -> None:
    trace = [Fault(1000.0, 0), Fault(2000.0, 1), Fault(9000.0, 2)]
    how = Strategy("x", 100.0, warm=Lasting(10.0), requeue=Lasting(700.0), repair=5000.0, spares=1)
    queued = [play(how._replace(spares=spares), trace, 20_000.0).spent[TimeKind.QUEUE] for spares in (0, 1, 2)]
    assert queued == [2100, 700, 0]
    assert play(how, [trace[0], trace[2]], 20_000.0).spent[TimeKind.QUEUE] == 0, "it was repaired by then"
    rack = [Fault(1000.0, 0, width=8)]
    assert [play(how._replace(spares=of), rack, 20_000.0).spent[TimeKind.QUEUE] for of in (7, 8)] == [700, 0]


def test_a_time_limit_costs_a_wait_and_a_start_and_undoes_no_step() -> None:
    how = Strategy("x", 300.0, 5.0, limit=3000.0, queue=Lasting(100.0), cold=Lasting(50.0))
    found = play(how, [], 20_000.0)
    assert found.spent[TimeKind.REDO] == 0
    assert found.jobs == 7 and found.spent[TimeKind.QUEUE] == 600 and found.spent[TimeKind.RESTART] == 300


def test_a_maintenance_holds_the_run_and_nothing_is_lost() -> None:
    how = Strategy("x", 300.0, 5.0, maintenance_every=5000.0, maintenance=1000.0, cold=Lasting(50.0))
    found = play(how, [Fault(5500.0, 0)], 20_000.0)
    assert found.spent[TimeKind.HELD] == pytest.approx(3 * 995.0) and found.spent[TimeKind.REDO] == 0
    assert found.faults == 0, "it met no job"


def test_replica_groups_lose_a_stall_and_the_share_of_the_one_that_is_away() -> None:
    how = Strategy("x", 1e9, groups=4, least=3, stall=30.0, away=600.0)
    trace = [Fault(1000.0, 0)]
    one = play(how, trace, 10_000.0)
    assert one.spent[TimeKind.RESTART] == 30 and one.spent[TimeKind.AWAY] == pytest.approx(150)
    two = play(how, [Fault(1000.0, 0), Fault(1100.0, 1)], 10_000.0)
    assert two.spent[TimeKind.RESTART] == pytest.approx(30 + 30 + (1630 - 1130)), (
        "two are too few, until the first is back"
    )
    same = play(how, [*trace, Fault(1100.0, 4)], 10_000.0)
    assert same == one, "node 4 belongs to the group that is away already, and has nothing to fail with"
    stalled = how._replace(stall=180.0, least=1, away=0.0)
    (many,) = simulate(Fleet(1000, 1 / (1000 * 18 * MINUTE)), [stalled], 30 * DAY, 10, 3)
    assert 1 - many.shares[TimeKind.RESTART] == pytest.approx(math.exp(-180 / (18 * MINUTE)), abs=0.005)


def test_a_group_is_away_as_long_as_its_restart_takes_and_longer_where_no_spare_node_is_left() -> None:
    how = Strategy("x", 1e9, groups=4, stall=0.0, warm=Lasting(100.0), cold=Lasting(300.0), queue=Lasting(700.0))
    trace = [Fault(1000.0, 0, lost=False), Fault(4000.0, 1), Fault(8000.0, 2)]
    away = [play(how._replace(spares=of), trace, 20_000.0).spent[TimeKind.AWAY] for of in (2, 1, 0)]
    assert away == pytest.approx([(100 + 100 + 100) / 4, (100 + 100 + 1000) / 4, (100 + 1000 + 1000) / 4])


def test_time_limits_and_maintenance_stop_all_groups_at_once() -> None:
    how = Strategy("x", 300.0, 5.0, groups=4, least=3, away=600.0, queue=Lasting(100.0), cold=Lasting(50.0))
    limited = play(how._replace(limit=3000.0), [], 20_000.0)
    assert limited.jobs == 7 and limited.spent[TimeKind.QUEUE] == 600 and limited.spent[TimeKind.RESTART] == 300
    held = play(how._replace(maintenance_every=5000.0, maintenance=1000.0), [Fault(5500.0, 0)], 20_000.0)
    assert held.spent[TimeKind.HELD] == pytest.approx(3 * 995.0) and held.faults == 0
    whole = play(how._replace(limit=3000.0), [Fault(2900.0, 0)], 6000.0)
    assert whole.spent[TimeKind.AWAY] == pytest.approx(25, rel=0.05), "the next job starts with all groups"


def test_a_planned_wait_has_the_mean_of_its_law_and_not_the_median() -> None:
    how = Strategy("x", 1000.0, limit=10_000.0, queue=Lasting(1000.0, 1.0), cold=Lasting(100.0, 1.0))
    even, spread = simulate(
        Fleet(1, 0.0), [how._replace(queue=Lasting(1000.0), cold=Lasting(100.0)), how], 100 * DAY, 10, 1
    )
    assert spread.shares[TimeKind.QUEUE] == pytest.approx(even.shares[TimeKind.QUEUE], rel=0.08)
    assert spread.shares[TimeKind.RESTART] == pytest.approx(even.shares[TimeKind.RESTART], rel=0.08)
    again = simulate(Fleet(1, 0.0), [how], 100 * DAY, 10, 1)[0]
    assert again.ettr == spread.ettr and again.certain > 0, "seeded, and different in each run"


def test_the_last_save_of_a_job_is_waited_for_until_it_is_written_and_a_fault_meanwhile_undoes_it() -> None:
    how = Strategy("x", 10_000.0, 5.0, flush=100.0, limit=3000.0, cold=Lasting(50.0))
    assert play(how, [], 6000.0).spent[TimeKind.SAVE] == 105
    hit = play(how, [Fault(3050.0, 0)], 6000.0)
    assert hit.faults == 1 and hit.spent[TimeKind.REDO] > 0


def test_a_wait_that_ends_in_a_maintenance_waits_for_its_end_and_none_is_kept_that_is_over() -> None:
    how = Strategy(
        "x", 300.0, maintenance_every=5000.0, maintenance=1000.0, requeue=Lasting(2000.0), cold=Lasting(50.0)
    )
    found = play(how, [Fault(3500.0, 0)], 9000.0)
    assert found.spent[TimeKind.QUEUE] == 2000 and found.spent[TimeKind.HELD] == 500
    long = play(how._replace(requeue=Lasting(30_000.0)), [Fault(3500.0, 0)], 40_000.0)
    assert long.spent[TimeKind.HELD] == pytest.approx(1000 + 0), "only the one that comes after the wait"


def test_a_save_is_not_begun_before_the_last_one_is_written() -> None:
    slow = play(Strategy("x", 100.0, 10.0, flush=400.0), [], 41_000.0)
    assert slow.spent[TimeKind.SAVE] == 1000


def test_to_exclude_nodes_that_are_no_lemons_helps_nothing() -> None:
    trace = trace_of(Fleet(16, 1 / (16 * HOUR)), 30 * DAY, 1, 0)
    kept, excluded = replay(
        [cold(600.0, 10.0, 300.0), cold(600.0, 10.0, 300.0)._replace(exclude_after=1)], trace, 30 * DAY
    )
    assert excluded.faults == kept.faults


@pytest.mark.parametrize("runs", [2, 4])
def test_the_confidence_interval_of_few_runs_holds_the_truth_nineteen_times_of_twenty(runs: int) -> None:
    mtbf, how = 3 * HOUR, cold(1200.0, 60.0, 600.0)
    wanted = daly_ettr(1200.0, 60.0, mtbf, 600.0).value
    hits = sum(
        abs(found.ettr - wanted) <= found.certain
        for seed in range(400)
        for found in simulate(Fleet(1, 1 / mtbf), [how], 100 * mtbf, runs, seed)
    )
    assert 0.92 < hits / 400 < 0.98


def test_one_run_alone_has_no_confidence_interval() -> None:
    (found,) = simulate(Fleet(1, 1 / HOUR), [cold(600.0, 10.0, 60.0)], DAY, 1, seed=1)
    assert math.isinf(found.certain) and found.runs == 1


def test_strategies_meet_the_same_faults_so_that_their_difference_is_surer_than_each_of_them() -> None:
    fleet = Fleet(2048, RSC_1)
    base = cold(1800.0, 30.0, 300.0)
    first, second = simulate(fleet, [base, base._replace(name="often", interval=600.0)], 10 * DAY, 30, seed=2)
    assert first.better == 0 and second.better > 3 * second.better_certain > 0
    assert second.better_certain < 0.7 * (first.certain + second.certain)


def test_lemons_fail_their_share_and_to_exclude_them_helps() -> None:
    fleet = Fleet(1000, RSC_1, lemons=0.01, lemon_factor=50.0)
    trace = trace_of(fleet, 400 * DAY, 1, 0)
    share = sum(one.node < fleet.bad for one in trace) / len(trace)
    usual = [one for one in trace if one.node < fleet.bad and not one.lemon]
    assert len(usual) == pytest.approx(400 * DAY * 10 * RSC_1 * 1000 / (10 * 50 + 990), rel=0.5), "as of another node"
    assert share == pytest.approx(10 * 50 / (10 * 50 + 990), abs=0.03)
    assert len(trace) == pytest.approx(400 * DAY / fleet.mtbf, rel=0.05), "the average over all nodes stays"
    base = cold(600.0, 10.0, 300.0)
    kept, excluded = replay([base, base._replace(exclude_after=2)], trace, 400 * DAY)
    assert excluded.faults < 0.75 * kept.faults and excluded.better > 0


def test_nodes_of_a_weibull_fail_as_often_on_average_and_new_ones_more_often_at_first() -> None:
    seconds = 100 * DAY
    old, new = (Fleet(2000, RSC_1, shape=0.6, new=of) for of in (False, True))
    met, infants = (trace_of(of, seconds, 4, 0) for of in (old, new))
    assert len(met) == pytest.approx(seconds / old.mtbf, rel=0.1)
    first = [sum(one.at < seconds / 10 for one in trace) for trace in (met, infants)]
    assert first[1] > 1.5 * first[0]
    assert [one.at for one in met] == sorted(one.at for one in met)


def test_a_heavy_tailed_restart_has_its_mean_and_a_small_median() -> None:
    tail = Lasting(38 * MINUTE + 54, 2.17)  # OLMo Hybrid: median 3m42s, mean 38m54s
    chance = Random(3)
    drawn = sorted(tail.of(chance.random()) for _ in range(200_000))
    assert drawn[100_000] == pytest.approx(3 * MINUTE + 42, rel=0.03)
    assert math.fsum(drawn) / len(drawn) == pytest.approx(tail.mean, rel=0.1)


def test_a_silent_fault_costs_the_hang_s_time_limit() -> None:
    how = Strategy("x", 100.0, detect=2.0, hang=600.0)
    assert [play(how, [Fault(500.0, 0, silent=of)], 5000.0).spent[TimeKind.DETECT] for of in (False, True)] == [2, 600]


def test_racks_fail_as_one() -> None:
    fleet = Fleet(100, 0.0, rack=16, rack_rate=1e-5)
    found = list(faults(fleet, 1e6, Random(1)))
    assert len(found) == pytest.approx(7 * 1e-5 * 1e6, rel=0.4) and {one.width for one in found} == {16, 4}
    assert fleet.mtbf == pytest.approx(1 / (7 * 1e-5))
