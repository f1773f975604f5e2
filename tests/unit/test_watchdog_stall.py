"""When is standing still a hang? Seconds in, a verdict out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.rundir.stalls import (
    Progress,
    ProgressHistory,
    Signal,
    StallLimits,
    bound,
    judge,
)
from ftsupervise.truth import START, TRAIN, UNTOLD

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
PHASES = ProgressHistory(tells_phases=True)


def test_one_fresh_signal_is_enough() -> None:
    signals = [Signal("step", 9 * HOUR), Signal("log", 8 * HOUR), Signal("checkpoint", 60.0)]
    assert judge(signals, 10 * HOUR, [TRAIN], PHASES, StallLimits()).state is Progress.MOVING


def test_all_signals_stale_is_a_hang() -> None:
    verdict = judge(
        [Signal("step", 2 * HOUR, "step 7"), Signal("log", 3 * HOUR)], 10 * HOUR, [TRAIN], PHASES, StallLimits()
    )
    assert (verdict.state, verdict.age, verdict.words) == (Progress.HUNG, 2 * HOUR, "step 7")


def test_a_stale_signal_beside_one_that_could_not_be_seen_is_unknown() -> None:
    signals = [Signal("step", 2 * HOUR), Signal("checkpoint", None, blind="the disk hangs")]
    assert judge(signals, 10 * HOUR, [TRAIN], PHASES, StallLimits()).state is Progress.UNSEEN


def test_nothing_to_judge_by_is_not_a_hang() -> None:
    assert judge([], 10 * HOUR, [], ProgressHistory(), StallLimits()).state is Progress.NOTHING
    assert judge([], 10 * MINUTE, [], ProgressHistory(), StallLimits()).state is Progress.MOVING


def test_what_moved_before_the_job_started_does_not_count() -> None:
    waited_in_the_queue = [Signal("step", 5 * HOUR)]
    verdict = judge(waited_in_the_queue, 2 * MINUTE, [TRAIN], PHASES, StallLimits())
    assert (verdict.state, verdict.phase, verdict.age) == (Progress.MOVING, START, 2 * MINUTE)
    assert judge(waited_in_the_queue, 2 * HOUR, [TRAIN], PHASES, StallLimits()).state is Progress.HUNG


def test_the_most_patient_rank_decides() -> None:
    signals = [Signal("step", 40 * MINUTE)]
    assert judge(signals, DAY, [TRAIN], PHASES, StallLimits()).state is Progress.HUNG
    assert judge(signals, DAY, [TRAIN, "save"], PHASES, StallLimits()).state is Progress.MOVING


def test_a_loop_that_tells_no_phases_gets_the_time_of_a_save() -> None:
    assert bound(TRAIN, PHASES, StallLimits()) == 10 * MINUTE
    assert bound(TRAIN, ProgressHistory(), StallLimits()) == HOUR
    assert bound(UNTOLD, ProgressHistory(), StallLimits()) == HOUR


def test_slow_steps_are_given_ten_of_their_own() -> None:
    slow = ProgressHistory(step_times=[240.0] * 9, tells_phases=True)
    assert bound(TRAIN, slow, StallLimits()) == 2400.0


def test_after_a_day_the_run_is_known() -> None:
    known = ProgressHistory(pauses={UNTOLD: [30.0, 200.0], "save": [40.0, 50.0, 60.0]}, watched=DAY)
    assert bound(UNTOLD, known, StallLimits()) == 1000.0
    assert bound("save", known, StallLimits()) == 720.0
    assert bound("eval", known, StallLimits()) == HOUR  # never seen


def test_what_the_person_sets_for_a_phase_holds() -> None:
    assert (
        bound("eval", ProgressHistory(pauses={"eval": [9 * HOUR]}), StallLimits(phases={"eval": 2 * HOUR})) == 2 * HOUR
    )


SECONDS = st.floats(0, 1e7)


@given(
    st.lists(
        st.tuples(st.sampled_from(["step", "log"]), st.none() | SECONDS, st.sampled_from(["", "dark"])), max_size=4
    ),
    SECONDS,
    st.lists(st.sampled_from([TRAIN, UNTOLD, "save", START]), max_size=3),
    st.lists(SECONDS, max_size=5),
)
def test_hung_means_that_every_signal_is_older_than_the_bound(
    raw: list[tuple[str, float | None, str]], started: float, phases: list[str], pauses: list[float]
) -> None:
    signals = [Signal(name, age, blind=blind) for name, age, blind in raw]
    verdict = judge(signals, started, phases, ProgressHistory(pauses={TRAIN: pauses}), StallLimits())
    if verdict.state is Progress.HUNG:
        assert started >= verdict.bound
        assert signals
        assert not any(signal.blind for signal in signals)
        assert all(signal.age is None or signal.age >= min(verdict.bound, started) for signal in signals)


@pytest.mark.parametrize("pause", [10 * HOUR, 100 * HOUR])
def test_one_long_pause_does_not_make_the_watch_blind_for_ever(pause: float) -> None:
    assert bound(TRAIN, ProgressHistory(pauses={TRAIN: [pause]}), StallLimits()) <= 4 * HOUR
    assert bound("save", ProgressHistory(pauses={"save": [pause]}), StallLimits()) <= 8 * HOUR


@pytest.mark.fault(
    "One long pause that ended well makes the watch wait ever longer",
    "What is learned of a phase is bounded by watch.hang.at_most",
)
def test_no_phase_that_was_learned_may_last_longer_than_at_most() -> None:
    slow = StallLimits(at_most=4 * HOUR)
    for watched in (0.0, 30 * HOUR):
        past = ProgressHistory(pauses={"eval": [9 * HOUR] * 5}, watched=watched)
        assert bound("eval", past, slow) == 4 * HOUR
    assert bound("eval", ProgressHistory(), StallLimits(slow=6 * HOUR)) == 6 * HOUR, (
        "what is set is no matter of learning"
    )
