"""Restart, leave or stop: nights told as ledgers."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from ftsupervise.model import Attempt
from ftsupervise.run.cause import NO_STEP, Failure, Kind, failure
from ftsupervise.run.decide import Budgets, Move, Situation, decide, since_progress, time_needed

T0 = datetime(2026, 11, 21, 2, tzinfo=timezone.utc)
ON = Budgets(in_place=100)


def attempt(number: int, sign: str = "exit 1", kind: str = "code", **more: object) -> Attempt:
    began = T0 + timedelta(minutes=number)
    one = Attempt(number, "88_1", began, ended=began + timedelta(seconds=20), kind=kind, failure=sign)
    return one._replace(**more)  # type: ignore[arg-type]


def move(*attempts: Attempt, budgets: Budgets = ON, **more: object) -> tuple[Move, float]:
    verdict = decide(Situation(attempts, **more), budgets)  # type: ignore[arg-type]
    return verdict.move, verdict.delay


def test_the_first_failure_is_answered_at_once_and_the_next_ones_ever_later() -> None:
    many = Budgets(in_place=100, same_failure=100, back_off=2)
    night = [attempt(n) for n in range(1, 12)]
    delays = [move(*night[: n + 1], budgets=many)[1] for n in range(11)]
    assert delays == [0, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_three_times_the_same_without_progress_is_the_end() -> None:
    assert move(attempt(1), attempt(2))[0] is Move.RESTART
    assert move(attempt(1), attempt(2), attempt(3))[0] is Move.STOP


def test_a_failure_whose_traceback_was_lost_on_the_way_is_still_the_same_failure() -> None:
    named = "exit 1 (ModuleNotFoundError)"
    night = [attempt(1, sign=named, detail="ModuleNotFoundError: no such"), attempt(2), attempt(3, sign=named)]
    for last in (named, "exit 1"):
        verdict = decide(Situation([*night[:2], attempt(3, sign=last)]), ON)
        assert (verdict.move, verdict.times, verdict.failure) == (Move.STOP, 3, named)
        assert verdict.detail == "ModuleNotFoundError: no such"
    other = [attempt(1, sign="exit 1 (ValueError)"), attempt(2, sign=named), attempt(3, sign=named)]
    assert move(*other)[0] is Move.RESTART
    assert move(*night[:2], attempt(3, sign="exit 11"))[0] is Move.RESTART


def test_a_job_whose_nodes_take_no_step_is_left_at_once_and_the_chain_is_braked_in_the_end() -> None:
    night = [attempt(n, sign=NO_STEP, kind="start") for n in (1, 2, 3)]
    assert [move(*night[:n])[0] for n in (1, 2, 3)] == [Move.LEAVE, Move.LEAVE, Move.STOP]


def test_a_failure_every_hundred_steps_with_a_newer_checkpoint_goes_on_for_ever() -> None:
    night = [attempt(n, first_step=100 * n - 99, last_step=100 * n, saved=100 * n) for n in range(1, 200)]
    assert all(move(*night[: n + 1]) == (Move.RESTART, 0) for n in range(199))


def test_the_same_step_again_and_again_is_no_progress() -> None:
    night = [attempt(1, first_step=1, last_step=150, saved=100)]
    night += [attempt(n, first_step=101, last_step=149 + n) for n in (2, 3)]
    assert move(*night)[0] is Move.STOP


def test_without_checkpoints_told_a_later_first_step_is_progress() -> None:
    night = [attempt(1, first_step=1, last_step=150), *(attempt(n, first_step=101, last_step=150) for n in (2, 3))]
    assert move(*night)[0] is Move.RESTART
    assert move(*night, attempt(4, first_step=101, last_step=150))[0] is Move.STOP


def test_different_failures_without_progress_stop_it_later() -> None:
    night = [attempt(n, sign=f"exit {n}") for n in range(1, 13)]
    assert move(*night[:11])[0] is Move.RESTART
    assert move(*night)[0] is Move.STOP


def test_an_orderly_end_between_is_not_progress_by_itself() -> None:
    warned = attempt(2, sign="", kind="", cause="warning signal")
    assert len(since_progress([attempt(1), warned, attempt(3)])) == 2


def test_who_never_tells_its_steps_has_progressed_when_it_lived_for_ten_minutes() -> None:
    long = [attempt(n, ended=T0 + timedelta(minutes=n, seconds=700)) for n in (1, 2, 3, 4)]
    assert move(*long)[0] is Move.RESTART


def test_lost_nodes_have_a_larger_budget_and_every_kind_may_have_its_own() -> None:
    nodes = [attempt(n, "node failure", "node") for n in range(1, 11)]
    assert move(*nodes[:9])[0] is Move.RESTART
    assert move(*nodes)[0] is Move.STOP
    assert move(attempt(1, "out of memory", "memory"), budgets=replace(ON, of_kind={"memory": 1}))[0] is Move.STOP


def test_no_brake_when_it_is_switched_off() -> None:
    night = [attempt(n) for n in range(1, 60)]
    assert move(*night, budgets=Budgets(in_place=100, same_failure=0))[0] is Move.RESTART


def test_it_leaves_when_asked_when_done_and_when_the_budget_of_the_job_is_spent() -> None:
    assert move(attempt(1), asked="the kill switch is up")[0] is Move.LEAVE
    assert move(attempt(1, sign="", kind=""))[0] is Move.LEAVE
    assert move(attempt(1), restarts=100)[0] is Move.LEAVE
    assert move(attempt(1), budgets=Budgets())[0] is Move.LEAVE


def test_it_leaves_when_a_restart_would_not_reach_its_first_step() -> None:
    assert move(attempt(1, ready=100.0), time_left=299)[0] is Move.LEAVE
    assert move(attempt(1, ready=100.0), time_left=301)[0] is Move.RESTART
    assert time_needed([attempt(1)]) == 60
    assert time_needed([attempt(1, ready=1.0)]) == 30


TRACE = "Traceback (most recent call last):\n  File x\nRuntimeError: no\n\nConnectionError: gone\n"


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({"code": 0, "words": "exit 0"}, None),
        ({"code": 1, "words": "kill switch, then exit 1"}, None),
        ({"code": 143, "words": "exit 143", "asked": True}, None),
        ({"code": 1, "words": "exit 1", "output": TRACE}, (Kind.CODE, "exit 1 (RuntimeError)")),
        ({"code": -9, "words": "killed by SIGKILL"}, (Kind.SIGNAL, "killed by SIGKILL")),
        ({"code": -9, "words": "killed by SIGKILL", "oom": True}, (Kind.MEMORY, "out of memory")),
        ({"code": 143, "words": "x", "death": "rank 7 on n-3 killed by SIGSEGV"}, (Kind.SIGNAL, "killed by SIGSEGV")),
        ({"code": 1, "words": "x", "death": "ranks 0-7 on n-3 exit 17", "output": "in megatron/"}, (Kind.NUMBERS, "exit 17")),
        ({"code": 16, "words": "exit 16", "output": "my own code"}, (Kind.CODE, "exit 16")),
        ({"code": 93, "words": "exit 93"}, (Kind.GIVEN_UP, "exit 93")),
        ({"code": 137, "words": "x", "death": "node failure on n-3"}, (Kind.NODE, "node failure")),
        ({"code": 1, "words": "exit 1", "output": "OSError: [Errno 28] No space left on device"}, (Kind.DISK, "no space left")),
        ({"code": 1, "words": "exit 1", "output": "OutOfMemoryError: CUDA out of memory."}, (Kind.MEMORY, "GPU out of memory")),
        ({"code": 127, "words": "could not start (exit 127)"}, (Kind.START, "could not start")),
        ({"code": 0, "words": "host memory"}, (Kind.MEMORY, "host memory")),
    ],
)  # fmt: skip
def test_failures_have_a_kind_and_a_sign(seen: dict[str, object], expected: tuple[Kind, str] | None) -> None:
    found: Failure | None = failure(**{"asked": False, **seen})  # type: ignore[arg-type]
    assert (found and (found.kind, found.sign)) == expected


def test_a_command_that_leaves_with_0_again_and_again_and_does_nothing_is_stopped() -> None:
    quiet = [attempt(n, sign="", kind="", cause="exit 0", exit_code=0) for n in range(1, 9)]
    assert [move(*quiet[:n])[0] for n in (1, 2, 3)] == [Move.LEAVE, Move.LEAVE, Move.STOP]
    verdict = decide(Situation(quiet[:3]), ON)
    assert verdict.why == "3 times in a row without a step or a new checkpoint"
    assert "guard.finished" in verdict.detail
    assert move(*quiet, budgets=Budgets(in_place=100, same_failure=0))[0] is Move.LEAVE
    assert move(*quiet, asked="the run has finished at step 9")[0] is Move.LEAVE


def test_a_command_that_leaves_with_0_after_a_step_or_a_checkpoint_or_a_long_life_goes_on() -> None:
    quiet = [attempt(n, sign="", kind="", cause="exit 0", exit_code=0) for n in range(1, 9)]
    hours = quiet[4].started + timedelta(hours=1)
    for third in (
        quiet[2]._replace(first_step=1, last_step=1),
        quiet[2]._replace(saved=100),
        quiet[2]._replace(ended=hours),
        attempt(3),
    ):
        assert move(*quiet[:2], third, *quiet[3:5])[0] is Move.LEAVE
    never = quiet[2]._replace(cause="not started: the kill switch is up")
    assert move(*quiet[:2], never, quiet[3])[0] is Move.STOP, "one that nothing was started for is no progress"
