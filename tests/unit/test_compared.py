"""A verdict beside what was before it, and whether another start is any use: never against what the supervisor decided."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from ftsupervise.diagnosis.compared import NextMove, compare, ordinal
from ftsupervise.diagnosis.verdict import Confidence, Diagnosis
from ftsupervise.diagnosis.vocabulary import FailureClass
from ftsupervise.model import Attempt, Cause, CauseKind, Failure, FailureKind, NodeRanks
from ftsupervise.nodes.incidents import Incident
from ftsupervise.rundir.attempt_pages import VerdictPage
from ftsupervise.rundir.switches import Brake

NOW = datetime(2026, 11, 27, 20, 0, tzinfo=timezone.utc)
FOUR = tuple(f"gpu-0{number}" for number in range(4))


def failed(number: int, node: str = "", error: str = "KeyError", **more: object) -> Attempt:
    at = NOW + timedelta(hours=number)
    cause = Cause(CauseKind.EXIT, (NodeRanks(node, "5"),), code=1)
    failure = Failure(FailureKind.CODE, "exit 1", error=error)
    return Attempt(number, "42", at, "host", FOUR, at, 1, cause, failure=failure)._replace(**more)  # type: ignore[arg-type]


def verdict(number: int, place: str = "train.py:3 step", **more: object) -> Diagnosis:
    found = Diagnosis(number, FailureClass.USER_CODE, Confidence.HIGH, "KeyError", place=place)
    return found._replace(**more)  # type: ignore[arg-type]


def page(number: int, place: str = "train.py:3 step", node: str = "") -> VerdictPage:
    return VerdictPage(number, NOW, FailureClass.USER_CODE.value, "high", place=place, nodes=(node,) if node else ())


def test_the_same_place_in_the_program_is_the_same_failure_whatever_its_exit_code_says() -> None:
    attempts = [failed(3), failed(5), failed(7), failed(9, error="")]
    pages = {3: page(3), 5: page(5, "data.py:80 read"), 7: page(7)}
    found = compare(verdict(9), attempts[-1], attempts, pages)
    assert found.before == (3, 7), "attempt 5 left with the same code, from another place"
    assert found.sentences() == ("the third of this kind in this run (before: attempts 3, 7)",)


def test_without_a_verdict_about_the_earlier_ones_the_rule_of_the_brake_counts() -> None:
    attempts = [failed(1), failed(2, error="ValueError"), failed(3)]
    assert compare(verdict(3), attempts[-1], attempts, {}).before == (1,)


def test_a_node_that_was_named_before_is_told_where_there_was_a_choice() -> None:
    attempts = [failed(1, "gpu-01"), failed(2, "gpu-02"), failed(3), failed(4, "gpu-01")]
    pages = {3: page(3, "data.py:80 read", "gpu-03")}
    found = compare(verdict(4, nodes=("gpu-01",), kind=FailureClass.CRASH), attempts[-1], attempts, pages)
    assert "gpu-01 is named in 2 of the last 4 failures" in found.sentences()
    alone = [one._replace(nodes=("gpu-01",)) for one in attempts]
    assert not compare(verdict(4, nodes=("gpu-01",), kind=FailureClass.CRASH), alone[-1], alone, pages).nodes
    own = compare(verdict(4, nodes=("gpu-01",)), attempts[-1], attempts, pages)
    assert not own.nodes, "an error of the program blames no node"


def test_incidents_of_other_runs_on_the_node_are_told_and_not_its_own_or_old_ones() -> None:
    one = failed(4, "gpu-01")
    known = [
        Incident("gpu-01", "hang", NOW - timedelta(days=3), "sft"),
        Incident("gpu-01", "killed", NOW - timedelta(days=9), "sft"),
        Incident("gpu-01", "hang", NOW - timedelta(days=1), "thesis"),
        Incident("gpu-01", "hardware", NOW - timedelta(days=40), "old"),
        Incident("gpu-02", "hang", NOW, "sft"),
    ]
    found = compare(verdict(4, nodes=("gpu-01",), kind=FailureClass.CRASH), one, [one], {}, known, "thesis")
    assert found.sentences() == (
        "gpu-01 has 2 incidents of other runs in two weeks, the newest 2026-11-24, hang of sft",
    )


@pytest.mark.parametrize(
    ("kind", "before", "braked", "move"),
    [
        (FailureClass.USER_CODE, 0, False, NextMove.RESTART),
        (FailureClass.USER_CODE, 2, False, NextMove.MEND),
        (FailureClass.USER_CODE, 2, True, NextMove.STOP),
        (FailureClass.NODE, 4, False, NextMove.RESTART),
        (FailureClass.NODE, 9, True, NextMove.STOP),
        (FailureClass.GPU_MEMORY, 0, False, NextMove.MEND),
        (FailureClass.UNKNOWN, 3, False, NextMove.RESTART),
        (FailureClass.UNKNOWN, 3, True, NextMove.STOP),
    ],
)
def test_the_advice_goes_with_the_supervisor(kind: FailureClass, before: int, braked: bool, move: NextMove) -> None:
    attempts = [failed(number) for number in range(1, before + 2)]
    attempts[-1] = attempts[-1]._replace(braked=braked)
    found = compare(verdict(before + 1, kind=kind), attempts[-1], attempts, {})
    assert (found.move, len(found.before)) == (move, before)
    assert found.advice().startswith(f"{move.value}: ")
    assert (move is NextMove.STOP) is braked, "it stops where the supervisor has stopped, and there alone"


def test_where_a_later_member_has_put_the_brake_on_the_advice_is_to_stop_and_says_its_reason() -> None:
    one = failed(3)
    brake = Brake("ended without a record", "three members in a row were used up without a new step", 3, 3)
    found = compare(verdict(3, kind=FailureClass.NODE), one, [one], {}, brake=brake)
    assert found.advice() == f"stop: {brake.words()}"
    assert compare(verdict(3), one, [one], {}, brake=brake._replace(attempt=2)).move is NextMove.RESTART


def test_of_an_attempt_that_did_not_fail_nothing_is_advised() -> None:
    done = failed(1, failure=None, cause=Cause(CauseKind.FINISHED))
    assert compare(verdict(1, kind=FailureClass.NONE), done, [done], {}).advice() == ""


@pytest.mark.parametrize(
    ("number", "word"),
    [(1, "first"), (3, "third"), (10, "tenth"), (11, "11th"), (21, "21st"), (112, "112th"), (123, "123rd")],
)
def test_ordinals(number: int, word: str) -> None:
    assert ordinal(number) == word
