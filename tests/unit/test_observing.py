"""Decisions that are only told: the settings, the move without the brake, what happened then, and what people get."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.config.load import loads
from ftsupervise.errors import ConfigError
from ftsupervise.findings import EventKind
from ftsupervise.guard.held_back import HeldBack
from ftsupervise.guard.loss_policy import LossAction, LossPolicy, LossWatch
from ftsupervise.guard.settings import RankContext
from ftsupervise.launch.plan import words_of
from ftsupervise.model import Attempt, Cause, CauseKind, Failure, FailureKind
from ftsupervise.report.observed import observed_rows
from ftsupervise.run.decide import Budgets, NextAction, Situation, decide, without_brake
from ftsupervise.rundir.observing import note, observed_alone, phrase, read_observed
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import BACK, BRAKE, DECISIONS, EXCLUSION, HANG, LossTrouble, OnlyTold, Resumed
from ftsupervise.watch.tour import events

T0 = datetime(2026, 11, 27, 2, tzinfo=timezone.utc)
RUN = "name: a\nlaunch: {command: python t.py}\n"
CODE = Failure(FailureKind.CODE, "exit 1")


def attempt(number: int, *told: OnlyTold, **more: object) -> Attempt:
    began = T0 + timedelta(minutes=10 * number)
    end = Cause(CauseKind.EXIT, code=1)
    one = Attempt(number, f"{number}", began, ended=began + timedelta(minutes=9), cause=end, failure=CODE, host="n1")
    return one._replace(observed=told, **more)  # type: ignore[arg-type]


def at(number: int, minutes: int, decision: str = HANG, **more: object) -> OnlyTold:
    when = T0 + timedelta(minutes=10 * number + minutes)
    return OnlyTold(decision, "restarted it", "rank 3 stopped", when)._replace(**more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "of"),
    [
        ("", ()),
        ("act: act\n", ()),
        ("act: observe\n", DECISIONS),
        ("act: {brake: observe, hang: observe}\n", (HANG, BRAKE)),
    ],
)
def test_one_word_stands_for_all_and_a_section_for_each(text: str, of: tuple[str, ...]) -> None:
    run = loads(RUN + text)
    assert run.act.observed == of
    words = words_of(run)
    assert [words[index + 1] for index, word in enumerate(words) if word == "--observe"] == list(of)


@pytest.mark.parametrize("text", ["act: watch\n", "act: {hangs: observe}\n", "act: {hang: observed}\n", "act: true\n"])
def test_another_word_is_an_error_that_names_the_key(text: str) -> None:
    with pytest.raises(ConfigError, match="act"):
        loads(RUN + text)


def test_without_the_brake_it_starts_again_after_ever_longer_pauses() -> None:
    night = [attempt(n) for n in range(1, 12)]
    assert decide(Situation(night), Budgets(in_place=100)).move is NextAction.STOP
    there = without_brake(Situation(night), Budgets(in_place=100))
    assert (there.move, there.delay) == (NextAction.RESTART, 300.0)
    spent = without_brake(Situation(night, restarts=100), Budgets(in_place=100))
    assert spent.move is NextAction.LEAVE


def test_what_left_with_0_goes_on_without_the_brake_and_what_the_program_asks_for_does_not() -> None:
    zero = attempt(1, cause=Cause(CauseKind.EXIT, code=0), failure=None, last_step=60, exit_code=0)
    assert decide(Situation([zero], asks=True), Budgets()).move is NextAction.STOP
    assert without_brake(Situation([zero], asks=True), Budgets()).move is NextAction.LEAVE
    given_up = attempt(1, failure=Failure(FailureKind.GIVEN_UP, "exit 93"))
    assert without_brake(Situation([given_up]), Budgets(in_place=9)).move is NextAction.STOP
    refused = attempt(1, resumed=Resumed(refused="nothing may be used"))
    assert without_brake(Situation([refused]), Budgets(in_place=9)).move is NextAction.STOP


def test_a_loss_whose_stop_is_only_told_makes_nothing_go_back() -> None:
    assert LossTrouble(then="resume").stops
    assert not LossTrouble(then="resume", observed=True).stops


def test_what_happened_then_is_its_own_word_or_the_end_of_the_attempt() -> None:
    (own,) = observed_rows([attempt(1, at(1, 3, then="it went on by itself after 4m"))])
    assert own.then == "it went on by itself after 4m"
    (ended,) = observed_rows([attempt(1, at(1, 3))])
    assert ended.then == "attempt 1 ended 6m later: exit 1"
    (stands,) = observed_rows([attempt(1, at(1, 3), ended=None, cause=None, failure=None)])
    assert stands.then == "it still stands"


def test_a_chain_that_would_be_held_again_and_again_is_one_row_that_says_how_far_it_came() -> None:
    held = [attempt(n, at(n, 9, BRAKE, step=100), last_step=step) for n, step in ((3, 100), (4, 100), (5, 240))]
    (row,) = observed_rows([attempt(1), attempt(2), *held])
    assert (row.attempt, row.then) == (3, "2 attempts since: they came to step 240, 140 further")
    (row,) = observed_rows(held, [held[1].started + timedelta(seconds=1)])
    assert row.then == "1 attempt since: it came to step 100, no further", "then a person has launched it again"
    (row,) = observed_rows(held[:1])
    assert row.then == "no attempt has begun since"


def test_a_node_that_would_be_left_out_is_followed_to_the_next_attempt_on_it() -> None:
    out = at(1, 9, EXCLUSION, node="n7")
    assert observed_rows([attempt(1, out)])[0].then == "no attempt has run on n7 since"
    later = [attempt(2, nodes=("n1",)), attempt(3, nodes=("n1", "n7"))]
    assert observed_rows([attempt(1, out), *later])[0].then == "attempt 3 ran on it, and ended: exit 1"


def test_what_members_without_an_attempt_come_to_is_one_row_and_one_event_for_each_launch(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.state.mkdir()
    for place, minute in enumerate((1, 2, 9)):
        note(
            rundir.state, f"exclusion-7_{place}", at(1, minute, EXCLUSION, node="n7", what="excluded n7", standing=True)
        )
    note(rundir.state, "brake-7_3", at(1, 10, BRAKE))
    times = [T0 + timedelta(minutes=10 + minute) for minute in (1, 2, 9, 10)]
    assert len(observed_alone(rundir, ())) == 2
    alone = observed_alone(rundir, [times[0] - timedelta(seconds=1), times[2] - timedelta(seconds=1)])
    assert [(one.decision, one.at) for one in alone] == [
        (EXCLUSION, times[0]),
        (EXCLUSION, times[2]),
        (BRAKE, times[3]),
    ]
    in_its_second = observed_alone(
        rundir, [times[0] + timedelta(seconds=0.4)]
    )  # whose member's shell writes whole seconds
    assert [one.decision for one in in_its_second] == [EXCLUSION, BRAKE]
    ran = attempt(2, nodes=("n7",))._replace(started=times[2] + timedelta(minutes=2))
    rows = observed_rows([ran], (), alone)
    assert [row.attempt for row in rows] == [0, 0, 0]
    assert rows[0].then == "attempt 2 ran on it, and ended: exit 1"
    own_launch = [times[0] + timedelta(seconds=0.4)]
    assert observed_rows([ran], own_launch, alone)[0].then == rows[0].then, "what came after its own launch counts"
    assert rows[2].then.startswith("1 attempt since: ")
    told = [one for one in events([ran], finished_at=None, alone=alone) if one.event is EventKind.OBSERVED]
    assert len({one.key for one in told}) == 3 and told[0].finding.summary.startswith("no attempt began at ")


def test_each_is_an_event_once_and_so_is_what_happened_then() -> None:
    held = [attempt(n, at(n, 9, BRAKE)) for n in (2, 3)]
    night = [attempt(1, at(1, 3)), *held]
    told = [one for one in events(night, finished_at=None, run="/runs/a") if one.event is EventKind.OBSERVED]
    assert [one.attempt for one in told] == [1, 2]
    assert told[0].finding.meaning.endswith("To act on them: ftsupervise observe --off /runs/a")
    assert told[0].finding.summary == "attempt 1 at 02:13 UTC: would have restarted it: rank 3 stopped"
    over = attempt(1, at(1, 3, then="it went on by itself after 4m"))
    again = [one for one in events([over, *held], finished_at=None) if one.event is EventKind.OBSERVED]
    assert {one.key for one in told} < {one.key for one in again}
    assert len({one.key for one in again}) == len(again) == 3


def test_the_phrase_names_them() -> None:
    assert phrase(()) == ""
    assert phrase((HANG, BACK)) == "only told: hang, going back"
    assert "nothing is ended, held or left out" in phrase(DECISIONS)


def test_two_nodes_that_would_be_left_out_at_once_are_two_events_and_each_is_told_once_in_a_row() -> None:
    both = [at(1, 9, EXCLUSION, node=node, what=f"excluded {node}", standing=True) for node in ("n7", "n8")]
    again = [one._replace(at=T0 + timedelta(minutes=25), why="score 3 of 1.5") for one in both[:1]]
    night = [attempt(1, *both), attempt(2, *again)]
    told = [one for one in events(night, finished_at=None) if one.event is EventKind.OBSERVED]
    assert len({one.key for one in told}) == 2
    assert [one.attempt for one in observed_rows(night)] == [1, 1]


def test_what_many_ranks_have_seen_is_one_decision_that_ends_when_one_of_them_says_so(tmp_path: Path) -> None:
    for rank in range(4):
        note(tmp_path, f"going_back-rank-{rank}", at(1, 3, BACK)._replace(then="again" if rank == 2 else ""))
    (only,) = read_observed(tmp_path)
    assert only.then == "again"


def test_a_loss_that_is_no_number_after_it_diverged_is_a_decision_of_its_own(tmp_path: Path) -> None:
    place = RankContext(RunDir(tmp_path / "run"), tmp_path / "1", 1, 0, 1, tmp_path, observe=(BACK,))
    (tmp_path / "1").mkdir()
    policy = LossPolicy(LossAction.STOP, LossAction.STOP, patience=16)
    watch = LossWatch(policy, 0, lambda _: None, lambda: None, HeldBack(place))
    for step, loss in enumerate([2.0] * 32 + [9.0] * 16 + [math.nan, 8.0], 1):
        watch.take(loss, step)
    diverged, bad = read_observed(place.attempt_dir or tmp_path)
    assert diverged.why.startswith("loss diverges") and diverged.then == ""
    assert bad.why == "loss is not a number: nan at step 49" and bad.then == "the loss is a number again at step 50: 8"
