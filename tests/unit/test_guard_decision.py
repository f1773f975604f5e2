"""Decisions and votes: values in, values out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.guard.settings import limits, place
from ftsupervise.guard.stop_reasons import CAUSES, Decision, as_vote, from_vote

EVERY = [Decision.CONTINUE, *(Decision(v, c) for v, c in itertools.product((1, 2), filter(None, CAUSES.values())))]


def test_continue_is_less_than_save_is_less_than_stop() -> None:
    assert Decision.CONTINUE < Decision.SAVE < Decision.STOP
    assert not Decision.CONTINUE


def test_who_stops_saves_first() -> None:
    assert [(d.save, d.stop) for d in (Decision.CONTINUE, Decision.SAVE, Decision.STOP)] == [
        (False, False),
        (True, False),
        (True, True),
    ]


def test_a_vote_carries_decision_and_cause() -> None:
    for decision in EVERY:
        back = from_vote(as_vote(decision))
        assert (int(back), back.cause) == (int(decision), decision.cause)


def test_the_largest_vote_is_the_strongest_decision() -> None:
    for one, other in itertools.product(EVERY, EVERY):
        agreed = from_vote(max(as_vote(one), as_vote(other)))
        assert agreed == max(one, other)


@given(st.integers())
def test_no_int_makes_the_guard_raise(vote: int) -> None:
    assert from_vote(vote) in (Decision.CONTINUE, Decision.SAVE, Decision.STOP)


def test_ranks_are_found_under_torchrun_srun_and_mpirun() -> None:
    assert place({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "1"}, None, None, None).rank == 3
    assert place({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, None, None, None).world == 4
    assert place({"OMPI_COMM_WORLD_RANK": "2"}, None, None, None).rank == 2
    assert place({}, None, None, None).rank == 0


def test_the_attempt_of_another_run_is_not_ours() -> None:
    env = {"FTSUPERVISE_RUN_DIR": "/a", "FTSUPERVISE_ATTEMPT_DIR": "/a/attempts/0001", "FTSUPERVISE_ATTEMPT": "1"}
    assert place(env, None, None, None).attempt == 1
    assert place(env, "/b", None, None).attempt_dir is None


def test_arguments_go_before_the_environment() -> None:
    env = {"FTSUPERVISE_GUARD_POLL": "5", "FTSUPERVISE_GUARD_MEMORY": "0.9", "FTSUPERVISE_GUARD_STOP_BEFORE": "60"}
    found, problems = limits(env, 2.0, None, None, None)
    assert (found.poll, found.memory, found.stop_before, found.run_for, problems) == (2.0, 0.9, 60.0, None, [])
    assert limits({"FTSUPERVISE_GUARD_MEMORY": "off"}, None, None, None, None)[0].memory is None


@pytest.mark.parametrize("text", ["95", "much", "-1", "nan"])
def test_a_memory_share_that_makes_no_sense_is_told_and_not_used(text: str) -> None:
    found, problems = limits({"FTSUPERVISE_GUARD_MEMORY": text}, None, None, None, None)
    assert found.memory is None
    assert "FTSUPERVISE_GUARD_MEMORY" in problems[0]


def test_a_share_of_95_is_refused_with_what_was_meant() -> None:
    with pytest.raises(ValueError, match=r"95 % is 0\.95"):
        limits({}, None, 95, None, None)
