"""The hang detector fed with told histories: what stands still is found in time, what is only slow is left alone."""

from __future__ import annotations

import pytest

from ftsupervise.model import Standstill
from ftsupervise.ranks.hang_detector import CLOSER, GapHistory, HangLimits, HangState
from tests.unit.hang_world import RANKS, World, trained


def test_a_stopped_rank_among_ranks_that_wait_is_named_within_five_seconds() -> None:
    world = trained()
    world.change(2, state="T")
    alarm = world.wait(5.0)
    assert alarm is not None
    assert ([one.rank for one in alarm.outliers], alarm.how, alarm.sure) == ([2], Standstill.STOPPED, True)
    assert alarm.waited <= 5


def test_a_stopped_rank_too_gets_three_times_the_largest_gap_of_the_phase() -> None:
    world = trained(200, 3.0)
    world.change(2, state="T")
    assert world.wait(7.5) is None
    assert world.wait(1.5) is not None


@pytest.mark.parametrize(("state", "bound"), [("T", 5.0), ("S", 10.0)])
@pytest.mark.parametrize("first", [0.01, 0.3, 0.6, 0.99])
def test_with_a_word_a_second_and_five_while_they_stand_still_it_is_found_when_its_time_has_come(
    state: str, bound: float, first: float
) -> None:
    """As agents and witness go about it: ``first`` seconds from the last step to the first word that follows."""
    world = trained()
    began, told = world.now, list(world.pulses)
    look, word = began + 0.1, began + first
    while True:
        if word <= look:
            how = state if word > began + 0.5 else "S"  # stopped half a second after its last step
            told = [one._replace(seen=word, state=how if one.rank == 2 else "S") for one in told]
            word += 0.2 if word - began > 3 else 1.0
            continue
        verdict = world.detector.look(look, told)
        if verdict.health is HangState.HUNG:
            break
        look += world.patience.period if verdict.health is HangState.FINE else CLOSER
    assert 0.9 * bound <= look - began <= 0.9 * bound + 0.6


def test_a_rank_that_has_made_a_step_less_is_named_when_all_sleep() -> None:
    world = trained()
    world.wait(0.5)
    world.step(201, ranks=iter((0, 1, 3)))
    alarm = world.wait(10.0)
    assert alarm is not None
    assert ([one.rank for one in alarm.outliers], alarm.how, alarm.sure) == ([2], Standstill.IDLE, False)


def test_nobody_is_named_when_all_wait_at_the_same_step() -> None:
    alarm = trained().wait(10.0)
    assert alarm is not None
    assert alarm.outliers == ()
    assert alarm.step == 200


def test_the_bound_is_three_times_the_largest_gap_of_the_phase() -> None:
    world = trained(200, 6.0)
    assert world.wait(14.0) is None
    assert world.wait(4.0) is not None


@pytest.mark.parametrize(("floor", "within"), [(1.0, 1.0), (0.5, 0.5), (30.0, 30.0)])
def test_a_tuned_floor_is_the_bound(floor: float, within: float) -> None:
    world = trained(400, 0.05, patience=HangLimits(floor=floor))
    world.change(1, state="T")
    assert world.wait(within) is not None


def test_a_rank_that_uses_cpu_gets_three_times_the_bound_and_a_minute_at_least() -> None:
    world = trained()
    world.cpu[3] = 1.0
    assert world.wait(53.0) is None
    alarm = world.wait(7.0)
    assert alarm is not None
    assert ([one.rank for one in alarm.outliers], alarm.how) == ([3], Standstill.BUSY)


def test_a_rank_that_waits_for_a_cpu_is_not_taken_for_one_that_sleeps() -> None:
    world = trained()
    for rank in range(RANKS):
        world.change(rank, state="R")
    assert world.wait(50.0) is None


def test_a_rank_whose_process_cannot_be_looked_at_is_no_reason_to_end_the_run_at_once() -> None:
    world = trained()
    for rank in range(RANKS):
        world.change(rank, state="", cpu=None)
    assert world.wait(50.0) is None
    assert world.wait(11.0) is not None


def test_a_spinning_rest_does_not_hide_the_one_that_is_behind_and_asleep() -> None:
    """NCCL's ranks spin while they wait."""
    world = trained()
    world.cpu.update({0: 1.0, 1: 1.0, 3: 1.0})
    world.wait(0.5)
    world.step(201, ranks=iter((0, 1, 3)))
    alarm = world.wait(10.0)
    assert alarm is not None
    assert [one.rank for one in alarm.outliers] == [2]


def test_a_long_start_is_no_hang_and_an_endless_one_is() -> None:
    world = World(patience=HangLimits(start=300.0))
    assert world.wait(260.0) is None
    assert world.wait(60.0) is not None


def test_the_first_long_save_is_no_hang_and_after_three_a_bound_is_known() -> None:
    world = trained()
    for seconds in (60.0, 100.0, 70.0):
        world.phase("save", 0)  # rank 0 writes, the others wait in a barrier of "train"
        assert world.wait(seconds) is None
        world.phase("train", 0)
        world.train(50, 0.5)
        assert world.alarm is None
    assert world.past.phases["train"].largest < 3, "what the save took is the save's"
    world.change(1, state="T")
    assert world.wait(10.0) is not None


def test_a_save_that_hangs_is_found_by_what_saves_have_taken() -> None:
    world = trained()
    for _ in range(30):
        world.phase("save")
        world.wait(20.0)
        world.phase("train")
        world.train(4, 0.5)
    world.phase("save")
    assert world.wait(52.0) is None
    alarm = world.wait(8.0)
    assert alarm is not None
    assert alarm.phase == "save"


def test_a_beat_inside_a_long_step_is_a_sign_of_progress() -> None:
    world = trained()
    for _ in range(20):
        world.wait(8.0)
        world.change(0, beaten=world.now)
    assert world.alarm is None


def test_ranks_that_leave_or_have_finished_do_not_hang() -> None:
    for change in ({"leaving": True}, {"phase": "finished"}):
        world = trained()
        for rank in range(RANKS):
            world.change(rank, **change)
        assert world.wait(1200.0) is None


def test_a_rank_that_leaves_and_never_gets_out_is_found_late() -> None:
    world = trained()
    world.change(0, leaving=True)
    assert world.wait(500.0) is None
    assert world.wait(100.0) is not None


def test_ranks_nobody_hears_of_never_make_a_hang() -> None:
    world = trained()
    world.deaf = set(range(RANKS))
    assert world.wait(1200.0) is None


def test_what_one_unheard_rank_does_is_unknown_so_the_others_are_given_the_time_of_an_unknown_phase() -> None:
    world = trained()
    world.deaf = {3}
    assert world.wait(500.0) is None
    assert world.wait(120.0) is not None


def test_a_supervisor_that_was_suspended_forgives_that_time() -> None:
    world = trained()
    world.wait(2.0)
    world.now += 3600.0  # everything stood still, we too
    world.due = world.now
    assert world.wait(5.0) is None
    world.train(5, 0.5)
    assert world.alarm is None
    assert world.past.phases["train"].largest < 10, "the pause teaches nothing"
    assert world.wait(30.0) is not None


def test_what_an_earlier_attempt_learned_counts_after_a_first_few_steps() -> None:
    past = trained().past
    world = World(past=past)
    world.wait(20.0)
    world.train(5, 0.5)
    world.change(1, state="T")
    alarm = world.wait(10.0)
    assert alarm is not None


@pytest.mark.parametrize("phase", ["start", "a phase never seen before", "train"])
def test_a_stopped_rank_is_found_within_five_seconds_in_any_phase(phase: str) -> None:
    world = World() if phase == "start" else trained(5)
    world.phase(phase)
    world.change(2, state="T")
    world.cpu[0] = 1.0
    alarm = world.wait(5.0)
    assert alarm is not None
    assert alarm.sure
    assert [one.rank for one in alarm.outliers] == [2]


def test_a_rank_that_is_stopped_for_a_moment_or_held_by_a_debugger_is_no_hang() -> None:
    world = trained()
    world.phase("save")
    for _ in range(20):
        world.wait(5.0)
        world.change(1, state="T")
        world.wait(3.0)
        world.change(1, state="S")
    world.change(1, state="t")
    assert world.wait(100.0) is None


def test_a_place_at_which_the_run_was_ended_before_gets_three_times_as_long() -> None:
    """An evaluation that nobody announced, of two minutes, at step 200."""
    past = GapHistory()
    patience = HangLimits()
    for waited in (10.0, 30.0, 90.0):
        world = trained(past=past, patience=patience)
        alarm = world.wait(waited)
        assert alarm is not None
        assert alarm.waited > 0.8 * waited
        past.remember(alarm)
    world = trained(past=past)
    assert world.wait(120.0) is None
    world.train(300, 0.5)
    assert world.alarm is None


def test_a_start_that_was_ended_gets_three_times_as_long_the_next_time() -> None:
    past = GapHistory()
    for seconds in (20.0, 60.0):
        world = World(past=past, patience=HangLimits(start=20.0))
        assert world.wait(0.9 * seconds) is None
        alarm = world.wait(0.1 * seconds)
        assert alarm is not None
        past.remember(alarm)


def test_looks_that_were_planned_far_apart_are_no_time_in_which_we_did_not_run() -> None:
    """A hundred thousand ranks take a look a second, and so one is taken every few seconds only; or it comes late."""
    for late, within in ((0.0, 13.0), (2.0, 30.0)):
        world = trained()
        began, due = world.now, world.now
        while True:
            world.advance(due + late)
            verdict = world.detector.look(world.now, world.pulses, due)
            if verdict.health is HangState.HUNG:
                break
            due = world.now + 3.0
        assert 9.0 <= world.now - began <= within


def test_long_bounds_are_kept_but_for_a_second() -> None:
    world = World(patience=HangLimits(start=1800.0))
    assert world.wait(1798.0) is None
    assert world.wait(2.0) is not None


def test_a_stopped_rank_at_the_same_place_is_found_as_fast_as_before() -> None:
    past = GapHistory()
    for _ in range(3):
        world = trained(past=past)
        world.change(1, state="T")
        alarm = world.wait(5.0)
        assert alarm is not None
        past.remember(alarm)
