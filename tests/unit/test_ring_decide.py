"""Restart, leave or stop: nights told as ledgers."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from ftsupervise.checkpoints.suspicion import suspect
from ftsupervise.model import Attempt, Cause, CauseKind, Failure, FailureKind, NodeRanks, ended
from ftsupervise.run.decide import (
    TOO_SHORT,
    Budgets,
    NextAction,
    Situation,
    decide,
    since_progress,
    stop_before,
    time_needed,
    used_up,
)
from ftsupervise.run.exit_analysis import failure
from ftsupervise.truth import Resumed

T0 = datetime(2026, 11, 21, 2, tzinfo=timezone.utc)
ON = Budgets(in_place=100)


NO_STEP = CauseKind.NO_STEP.value
EXIT_0 = Cause(CauseKind.EXIT, code=0)


def attempt(
    number: int, sign: str = "exit 1", kind: str = "code", error: str = "", detail: str = "", **more: object
) -> Attempt:
    began = T0 + timedelta(minutes=number)
    failed = Failure(FailureKind(kind), sign, detail, error) if sign else None
    one = Attempt(number, "88_1", began, ended=began + timedelta(seconds=20), failure=failed)
    return one._replace(**more)  # type: ignore[arg-type]


def move(*attempts: Attempt, budgets: Budgets = ON, **more: object) -> tuple[NextAction, float]:
    verdict = decide(Situation(attempts, **more), budgets)  # type: ignore[arg-type]
    return verdict.move, verdict.delay


def test_the_first_failure_is_answered_at_once_and_the_next_ones_ever_later() -> None:
    many = Budgets(in_place=100, same_failure=100, back_off=2)
    night = [attempt(n) for n in range(1, 12)]
    delays = [move(*night[: n + 1], budgets=many)[1] for n in range(11)]
    assert delays == [0, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_three_times_the_same_without_progress_is_the_end() -> None:
    assert move(attempt(1), attempt(2))[0] is NextAction.RESTART
    assert move(attempt(1), attempt(2), attempt(3))[0] is NextAction.STOP


def test_a_group_whose_lighthouse_moves_begins_again_at_once_however_often_and_without_a_failure() -> None:
    moved = Cause(CauseKind.MOVED)
    assert failure(-9, moved) is None
    night = [attempt(n, sign="", cause=moved) for n in range(1, 30)]
    assert all(move(*night[:n]) == (NextAction.RESTART, 0) for n in range(1, 30))
    assert move(*night, attempt(30), attempt(31))[0] is NextAction.RESTART, "two failures, and none of the moves"
    for why in ({"restarts": 100}, {"asked": "kill switch"}, {"time_left": 5.0}):
        assert move(*night, **why)[0] is NextAction.LEAVE, "the next member of its chain has more of it"


def test_a_failure_whose_traceback_was_lost_on_the_way_is_still_the_same_failure() -> None:
    named = "ModuleNotFoundError"
    night = [attempt(1, error=named, detail="ModuleNotFoundError: no such"), attempt(2), attempt(3, error=named)]
    for last in (named, ""):
        verdict = decide(Situation([*night[:2], attempt(3, error=last)]), ON)
        assert (verdict.move, verdict.times, verdict.failure) == (NextAction.STOP, 3, f"exit 1 ({named})")
        assert verdict.detail == "ModuleNotFoundError: no such"
    other = [attempt(1, error="ValueError"), attempt(2, error=named), attempt(3, error=named)]
    assert move(*other)[0] is NextAction.RESTART
    assert move(*night[:2], attempt(3, sign="exit 11"))[0] is NextAction.RESTART


def test_a_job_whose_nodes_take_no_step_is_left_at_once_and_the_chain_is_braked_in_the_end() -> None:
    night = [attempt(n, sign=NO_STEP, kind="start") for n in (1, 2, 3)]
    assert [move(*night[:n])[0] for n in (1, 2, 3)] == [NextAction.LEAVE, NextAction.LEAVE, NextAction.STOP]


def test_a_failure_every_hundred_steps_with_a_newer_checkpoint_goes_on_for_ever() -> None:
    night = [attempt(n, first_step=100 * n - 99, last_step=100 * n, saved=100 * n) for n in range(1, 200)]
    assert all(move(*night[: n + 1]) == (NextAction.RESTART, 0) for n in range(199))


def test_the_same_step_again_and_again_is_no_progress() -> None:
    night = [attempt(1, first_step=1, last_step=150, saved=100)]
    night += [attempt(n, first_step=101, last_step=149 + n) for n in (2, 3)]
    assert move(*night)[0] is NextAction.STOP


def test_without_checkpoints_told_a_later_first_step_is_progress() -> None:
    night = [attempt(1, first_step=1, last_step=150), *(attempt(n, first_step=101, last_step=150) for n in (2, 3))]
    assert move(*night)[0] is NextAction.RESTART
    assert move(*night, attempt(4, first_step=101, last_step=150))[0] is NextAction.STOP


def test_different_failures_without_progress_stop_it_later() -> None:
    night = [attempt(n, sign=f"exit {n}") for n in range(1, 13)]
    assert move(*night[:11])[0] is NextAction.RESTART
    assert move(*night)[0] is NextAction.STOP


def test_an_orderly_end_between_is_not_progress_by_itself() -> None:
    warned = attempt(2, sign="", cause=Cause(CauseKind.WARNING))
    assert len(since_progress([attempt(1), warned, attempt(3)])) == 2


def test_who_never_tells_its_steps_has_progressed_when_it_lived_for_ten_minutes() -> None:
    long = [attempt(n, ended=T0 + timedelta(minutes=n, seconds=700)) for n in (1, 2, 3, 4)]
    assert move(*long)[0] is NextAction.RESTART


def test_lost_nodes_have_a_larger_budget_and_every_kind_may_have_its_own() -> None:
    nodes = [attempt(n, "node failure", "node") for n in range(1, 11)]
    assert move(*nodes[:9])[0] is NextAction.RESTART
    assert move(*nodes)[0] is NextAction.STOP
    assert move(attempt(1, "out of memory", "memory"), budgets=replace(ON, of_kind={"memory": 1}))[0] is NextAction.STOP


def test_no_brake_when_it_is_switched_off() -> None:
    night = [attempt(n) for n in range(1, 60)]
    assert move(*night, budgets=Budgets(in_place=100, same_failure=0))[0] is NextAction.RESTART


def test_it_leaves_when_asked_when_done_and_when_the_budget_of_the_job_is_spent() -> None:
    assert move(attempt(1), asked="the kill switch is up")[0] is NextAction.LEAVE
    assert move(attempt(1, sign=""))[0] is NextAction.LEAVE
    assert move(attempt(1), restarts=100)[0] is NextAction.LEAVE
    assert move(attempt(1), budgets=Budgets())[0] is NextAction.LEAVE


def test_it_leaves_when_a_restart_would_not_reach_its_first_step() -> None:
    assert move(attempt(1, ready=100.0), time_left=299)[0] is NextAction.LEAVE
    assert move(attempt(1, ready=100.0), time_left=301)[0] is NextAction.RESTART
    assert time_needed([attempt(1)]) == 60
    assert time_needed([attempt(1, ready=1.0)]) == 30


def exit_(code: int) -> Cause:
    return Cause(CauseKind.EXIT, code=code)


KILLED = Cause(CauseKind.SIGNAL, signal=9)
REQUEUE = Cause(CauseKind.OTHER, text="job requeue")
SEGV = Cause(CauseKind.SIGNAL, (NodeRanks("n-3", "7"),), signal=11)
TRACE = "Traceback (most recent call last):\n  File x\nRuntimeError: no\n\nConnectionError: gone\n"


@pytest.mark.parametrize(
    ("of", "seen", "expected"),
    [
        (EXIT_0, {}, None),
        (Cause(CauseKind.KILL_SWITCH, then=exit_(1)), {"code": 1}, None),
        (exit_(143), {"asked": True}, None),
        (exit_(1), {"output": TRACE}, (FailureKind.CODE, "exit 1 (RuntimeError)")),
        (KILLED, {}, (FailureKind.SIGNAL, "killed by SIGKILL")),
        (KILLED, {"oom": True}, (FailureKind.MEMORY, "out of memory")),
        (exit_(143), {"death": SEGV}, (FailureKind.SIGNAL, "killed by SIGSEGV")),
        (exit_(1), {"death": ended(17, "n-3", "0-7"), "output": "in megatron/"}, (FailureKind.NUMBERS, "exit 17")),
        (exit_(16), {"output": "my own code"}, (FailureKind.CODE, "exit 16")),
        (exit_(93), {}, (FailureKind.GIVEN_UP, "exit 93")),
        (exit_(137), {"death": Cause(CauseKind.NODE, (NodeRanks("n-3"),))}, (FailureKind.NODE, "node failure")),
        (exit_(1), {"output": "OSError: [Errno 28] No space left on device"}, (FailureKind.DISK, "no space left")),
        (exit_(1), {"output": "OutOfMemoryError: CUDA out of memory."}, (FailureKind.MEMORY, "GPU out of memory")),
        (Cause(CauseKind.NO_START, code=127), {}, (FailureKind.START, "could not start")),
        (Cause(CauseKind.HOST_MEMORY), {"code": 0}, (FailureKind.MEMORY, "host memory")),
        (REQUEUE, {"code": 1, "death": REQUEUE}, (FailureKind.SIGNAL, "job requeue")),
    ],
)  # fmt: skip
def test_failures_have_a_kind_and_a_sign(
    of: Cause, seen: dict[str, object], expected: tuple[FailureKind, str] | None
) -> None:
    code = of.code if of.code is not None else -of.signal
    found: Failure | None = failure(**{"code": code, "of": of, **seen})  # type: ignore[arg-type]
    assert (found and (found.kind, found.words())) == expected


def test_a_command_that_leaves_with_0_again_and_again_and_does_nothing_is_stopped() -> None:
    quiet = [attempt(n, sign="", cause=EXIT_0, exit_code=0) for n in range(1, 9)]
    assert [move(*quiet[:n])[0] for n in (1, 2, 3)] == [NextAction.LEAVE, NextAction.LEAVE, NextAction.STOP]
    verdict = decide(Situation(quiet[:3]), ON)
    assert verdict.why == "3 times in a row without a step or a new checkpoint"
    assert "guard.finished" in verdict.detail
    assert move(*quiet, budgets=Budgets(in_place=100, same_failure=0))[0] is NextAction.LEAVE
    assert move(*quiet, asked="the run has finished at step 9")[0] is NextAction.LEAVE


def test_a_command_that_leaves_with_0_after_a_step_or_a_checkpoint_or_a_long_life_goes_on() -> None:
    quiet = [attempt(n, sign="", cause=EXIT_0, exit_code=0) for n in range(1, 9)]
    hours = quiet[4].started + timedelta(hours=1)
    for third in (
        quiet[2]._replace(first_step=1, last_step=1),
        quiet[2]._replace(saved=100),
        quiet[2]._replace(ended=hours),
        attempt(3),
    ):
        assert move(*quiet[:2], third, *quiet[3:5])[0] is NextAction.LEAVE
    never = quiet[2]._replace(cause=Cause(CauseKind.NOT_STARTED, text="the kill switch is up"))
    assert move(*quiet[:2], never, quiet[3])[0] is NextAction.STOP, "one that nothing was started for is no progress"


def lost(number: int, **more: object) -> Attempt:
    """One of a member of its own, whose supervisor was killed a second after its start."""
    began = T0 + timedelta(minutes=number)
    one = attempt(number, CauseKind.LOST.value, "lost", job_id=f"88_{number}", ended=began + timedelta(seconds=1))
    return one._replace(**more)  # type: ignore[arg-type]


WARNED = Cause(CauseKind.WARNING)


def warned(number: int, seconds: float = 29.0, **more: object) -> Attempt:
    one = lost(number, failure=None, cause=WARNED, **more)
    return one._replace(ended=one.started + timedelta(seconds=seconds))


def test_three_members_that_were_lost_in_a_row_stop_the_next_before_it_claims_the_run() -> None:
    night = [lost(n) for n in (1, 2, 3)]
    assert stop_before(night[:2], ON) is None
    verdict = stop_before(night, ON)
    assert verdict is not None and (verdict.move, verdict.times) == (NextAction.STOP, 3)
    assert verdict.failure == "ended without a record"
    assert stop_before(night, Budgets(same_failure=0)) is None, "no brake: a person's word"
    assert stop_before(night[:1], Budgets(of_kind={"lost": 1})) is not None
    assert stop_before(night, Budgets(of_kind={"lost": 5})) is None


def test_attempts_of_one_job_use_up_one_member() -> None:
    night = [lost(n, job_id="88_1") for n in range(1, 9)]
    assert len(used_up(night)) == 1
    assert not used_up([one._replace(job_id="") for one in night]), "outside a job there is no chain"


@pytest.mark.chain(
    "Members end in different ways (an exit code, a lost supervisor, a lost node), none with a new checkpoint",
    "After the third the brake comes on, though no failure came three times",
    "3",
    "The brake alert names the three ways",
)
def test_members_that_end_in_different_ways_are_three_too() -> None:
    night = [attempt(1, "exit 1", job_id="88_1"), lost(2), attempt(3, "node failure", "node", job_id="88_3")]
    verdict = decide(Situation(night), Budgets())
    assert (verdict.move, verdict.failure) == (NextAction.STOP, "exit 1, ended without a record, node failure")
    assert decide(Situation(night[:2]), Budgets()).move is NextAction.LEAVE
    assert decide(Situation(night), ON).move is NextAction.RESTART, "a restart in place uses no member up"
    assert decide(Situation(night, asked="asked to stop (SIGTERM)"), Budgets()).move is NextAction.LEAVE


@pytest.mark.chain(
    "A member is cancelled or preempted between members that fail",
    "It counts neither for nor against the run",
    "only the others count",
    "Nothing for that",
)
def test_what_somebody_asked_for_uses_no_member_up_and_does_not_make_the_others_good() -> None:
    cancelled = Cause(CauseKind.CANCELLED, signal=15)
    asked = [lost(n, failure=None, cause=cancelled, stop_signal=15) for n in (2, 3, 4)]
    assert not used_up(asked)
    assert [one.number for one in used_up([lost(1), *asked, lost(5)])] == [1, 5]


@pytest.mark.chain(
    "A supervisor of a loop that tells no steps is killed after 20 hours",
    "Its log says until when it lived: that was progress",
    "none",
    "The ledger: ended without a record",
)
def test_a_member_that_saved_a_later_step_or_ran_for_hours_without_telling_is_not_used_up() -> None:
    assert not used_up([lost(1), lost(2), lost(3, first_step=1, last_step=120, saved=100)])
    assert [one.number for one in used_up([lost(1, first_step=1, saved=100), lost(2), lost(3)])] == [2, 3]
    day = timedelta(hours=20)
    assert not used_up([lost(1), lost(2), lost(3, ended=T0 + timedelta(minutes=3) + day)])
    later = lost(3, first_step=101, last_step=101)
    assert [one.number for one in used_up([lost(1), lost(2, first_step=1, last_step=150), later])] == [3], "2 left 100"


def test_a_guarded_loop_that_stands_at_its_start_for_half_an_hour_makes_no_progress() -> None:
    hangs = [lost(n, ended=T0 + timedelta(minutes=n + 31), worked=20.0) for n in (1, 2, 3)]
    assert len(used_up(hangs)) == 3


def test_a_time_limit_too_short_for_the_start_is_said_with_both_numbers() -> None:
    night = [warned(n, ready=28.6, first_step=1, last_step=1) for n in (1, 2, 3)]
    over = "the job ends soon: the next member, if any, takes over"
    assert decide(Situation(night[:2], over=over), ON) == decide(Situation(night[:1], over=over), ON)
    verdict = decide(Situation(night, over=over, warned_after=28.0), ON)
    assert (verdict.move, verdict.failure) == (NextAction.STOP, TOO_SHORT)
    assert "the start takes 29s, and the time limit less the warning is 28s" in verdict.why
    unready = decide(Situation([warned(n, last_step=None) for n in (1, 2, 3)], over=over, warned_after=28.0), ON)
    assert "the start is not over by then, and the time limit less the warning is 28s" in unready.why


def test_members_that_were_warned_and_saved_or_trained_for_most_of_their_time_go_on() -> None:
    over = "the job ends soon"
    for one in (
        [warned(n, ready=28.6, first_step=n, last_step=n, saved=n) for n in range(1, 9)],
        [warned(n, 4000, ready=28.6, first_step=1, last_step=5000) for n in range(1, 9)],
        [warned(n, 4000) for n in range(1, 9)],
    ):
        assert decide(Situation(one, over=over), ON).move is NextAction.LEAVE


@pytest.mark.chain(
    "Somebody takes the run back to an older checkpoint",
    "Progress counts from there, and the failures before count no more; this is believed once until the run is "
    "further than ever",
    "none",
    "Nothing",
)
def test_a_run_that_somebody_took_back_makes_progress_from_there_and_the_failure_before_counts_no_more() -> None:
    before = [attempt(1, first_step=1, last_step=1050, saved=1000)]
    before += [attempt(n, first_step=1001, last_step=1050) for n in (2,)]
    back = attempt(3, first_step=501, last_step=720, saved=700)
    assert len(since_progress([*before, back])) == 1, "those before it count no more"
    again = [attempt(4, first_step=701, last_step=820, saved=800), attempt(5, first_step=801, last_step=920, saved=900)]
    assert move(*before, back, *again)[0] is NextAction.RESTART
    still = [attempt(n, first_step=901, last_step=950) for n in (6, 7)]
    assert move(*before, back, *again, *still)[0] is NextAction.STOP


def test_a_run_whose_checkpoints_get_lost_again_and_again_is_not_taken_back_each_time() -> None:
    night = [attempt(n, first_step=1, last_step=150, saved=100, job_id=f"88_{n}") for n in range(1, 9)]
    assert decide(Situation(night[:4]), ON).move is NextAction.STOP, "one of them was believed"


def test_an_attempt_that_was_refused_is_neither_a_way_back_nor_a_witness_against_the_checkpoint() -> None:
    good = Resumed("step-00000030", 30, T0)
    refused = Resumed("step-00000030", 30, T0, refused="it does not fit")
    night = [
        attempt(1, saved=30, first_step=1, last_step=34),
        attempt(2, resumed=Resumed(at=T0, refused="it does not fit")),
        attempt(3, resumed=good),
    ]
    assert [one.number for one in since_progress(night)] == [1, 2, 3], "nobody took the run back to the beginning"
    assert suspect([attempt(3, resumed=good), attempt(2, resumed=good)], 2) is not None
    assert suspect([attempt(3, resumed=refused), attempt(2, resumed=refused)], 2) is None
