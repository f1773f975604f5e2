"""The interruptions of a run add up with its training to all of its time, and each says where, why and what was done."""

from __future__ import annotations

from random import Random

import pytest

from ftsupervise.model import Attempt, Cause, CauseKind, Failure, FailureKind, NodeRanks
from ftsupervise.report.account import Spent, account
from ftsupervise.report.costs import CostItem
from ftsupervise.report.incidents import costs_of, incidents, no_job_waits, spent_by_attempt, steps_again
from ftsupervise.report.summary import explained, kind_and_cause
from ftsupervise.truth import LossTrouble
from tests.unit.test_time_account import CRASH, at, crashed, random_history, trained


def ended(number: int, job: str, start: float, end: float, cause: Cause, **more: object) -> Attempt:
    return Attempt(number, job, at(start), ended=at(end), cause=cause, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(60))
def test_what_is_trained_and_what_the_incidents_cost_is_all_the_time_but_the_first_wait_and_start(seed: int) -> None:
    attempts, launches, now = random_history(Random(seed))
    spent = account(attempts, launches, now)
    found = incidents(attempts, spent)
    kept = sum(one.seconds for one in spent.stretches if one.kind in (Spent.TRAIN, Spent.SAVE))
    blind = sum(one.seconds for one in spent.stretches if one.kind is Spent.UNKNOWN and one.attempt is not None)
    by_attempt = spent_by_attempt(attempts, spent)
    lost = {one.attempt: one.whole for one in found}
    assert all(one.lost + sum(seconds for _, seconds in one.apart) == pytest.approx(one.whole) for one in found)
    assert all(seconds == pytest.approx(sum(by_attempt.get(number, {}).values())) for number, seconds in lost.items())
    others = sum(sum(by.values()) for number, by in by_attempt.items() if number not in lost)
    assert kept + blind + sum(lost.values()) + others == pytest.approx(spent.total, rel=1e-9, abs=1e-5)
    unended = {one.number for one in attempts if one.cause is None or one.cause.kind is CauseKind.FINISHED}
    assert set(by_attempt) - set(lost) <= {0} | unended, (
        "the rest is the first wait and start, and what runs or is done"
    )


def test_an_incident_has_its_detection_the_way_back_and_the_steps_made_again() -> None:
    where = Cause(CauseKind.SIGNAL, (NodeRanks("node-7", "12"),), signal=9)
    first = crashed(1, "88_1", 0, 1000, cause=where, **trained(1, 90, 110, 910), then="the next job takes over")
    second = Attempt(2, "88_2", at(1600), **trained(41, 200, 100, 1800))  # type: ignore[arg-type]
    spent = account([first, second], (), at(3400), running=True)
    (one,) = incidents([first, second], spent)
    assert (one.attempt, one.kind, one.planned) == (1, "killed process", False)
    assert (one.ranks, one.nodes, one.step, one.steps_lost) == ("12", ("node-7",), 90, 50)
    assert one.done == "the next job takes over"
    costs = dict(one.spent)
    assert costs[Spent.DETECT] == 90
    assert costs[Spent.QUEUE] == 600
    assert costs[Spent.RESTART] == pytest.approx(90, abs=11)
    assert costs[Spent.REDO] == pytest.approx(spent.seconds()[Spent.REDO])
    assert one.lost == one.whole == pytest.approx(sum(costs.values()))


def test_the_whole_of_an_attempt_that_never_made_a_step_is_its_own_cost() -> None:
    import_error = Failure(FailureKind.CODE, "exit 1", "ModuleNotFoundError: no module named 'flash'")
    attempts = [
        ended(n, "7", 60 * n, 60 * n + 50, Cause(CauseKind.EXIT, code=1), failure=import_error, worked=40.0)
        for n in (1, 2, 3)
    ]
    attempts[2] = attempts[2]._replace(braked=True)
    found = incidents(attempts, account(attempts, (), at(300), afterwards=Spent.HELD))
    assert [one.lost for one in found] == [60, 60, 50]
    assert dict(found[2].spent)[Spent.HELD] == 70
    assert found[0].evidence == "ModuleNotFoundError: no module named 'flash'"
    assert found[0].done == "attempt 2 began in the same job"
    assert found[2].done == "stopped by the brake"
    said = "stopped by the brake: the same failure 3 times without progress"
    attempts[2] = attempts[2]._replace(then=said)
    assert incidents(attempts, account(attempts, (), at(300), afterwards=Spent.HELD))[2].done == said, "once"
    (cost,) = costs_of(found)
    assert (cost.kind, cost.times, cost.seconds) == ("program error", 3, 170)


def test_an_orderly_end_is_planned_and_the_last_one_of_a_run_is_none() -> None:
    attempts = [
        ended(1, "5_1", 0, 1000, Cause(CauseKind.TIME_LIMIT), **trained(1, 90, 100, 1000)),
        ended(2, "5_2", 5000, 6000, Cause(CauseKind.FINISHED), **trained(91, 180, 100, 1000)),
    ]
    (one,) = incidents(attempts, account(attempts, (), at(9000)))
    assert (one.kind, one.planned, one.steps_lost) == ("time limit", True, 0)
    assert one.lost == pytest.approx(100, abs=15), "the start of the next attempt"
    assert one.apart == ((Spent.QUEUE, 4000),), "it would have waited anyway"


def test_steps_made_again_are_counted_from_steps_and_cost_the_end_that_undid_them() -> None:
    """A rollback after bad numbers, a start that failed, and a node that was lost in the midst of the way back."""
    bad = Failure(FailureKind.NUMBERS, "loss is not a number")
    lost = Failure(FailureKind.NODE, "node failure", "NODE_FAIL: node-7")
    attempts = [
        ended(1, "7", 0, 1000, Cause(CauseKind.EXIT, code=1), failure=bad, **trained(1, 1000, 0, 1000)),
        ended(2, "7", 1000, 1010, Cause(CauseKind.EXIT, code=1), failure=CRASH),
        ended(3, "7", 1010, 1191, Cause(CauseKind.NODE), failure=lost, **trained(640, 820, 0, 181)),
        Attempt(4, "7", at(1191), **trained(800, 1100, 0, 301)),  # type: ignore[arg-type]
    ]
    assert steps_again(attempts) == {3: {1: 181}, 4: {3: 21, 1: 180}}
    spent = account(attempts, (), at(1492), running=True)
    numbers, start, node = incidents(attempts, spent, running=True)
    assert (numbers.steps_lost, start.steps_lost, node.steps_lost) == (361, None, 21)
    assert dict(numbers.spent)[Spent.REDO] == pytest.approx(361, rel=0.01)
    assert dict(node.spent)[Spent.REDO] == pytest.approx(21, rel=0.01)
    assert spent.seconds()[Spent.REDO] == pytest.approx(382, rel=0.01)


def test_an_end_with_a_bad_loss_says_so_though_the_program_ended_by_itself() -> None:
    bad = LossTrouble(since=151, step=260, words="nan at step 260, since step 151")
    one = ended(1, "7", 0, 1000, Cause(CauseKind.EXIT, code=3), failure=CRASH, trouble=bad, **trained(1, 260, 0, 1000))
    two = Attempt(2, "7", at(1001), **trained(141, 200, 0, 60))  # type: ignore[arg-type]
    (found,) = incidents([one, two], account([one, two], (), at(1100), running=True), running=True)
    assert found.cause == "exit 3; loss is not a number: nan at step 260, since step 151"


@pytest.mark.parametrize("seed", range(60))
def test_steps_made_again_are_those_that_were_made_before_whoever_undid_them(seed: int) -> None:
    random, attempts, top = Random(seed), list[Attempt](), 0
    for number in range(1, 20):
        if random.random() < 0.2:
            attempts.append(crashed(number, "1", number, number + 1))
            continue
        first = max(1, top + 1 - random.choice((0, 0, 5, 40)))
        top = first + random.randrange(30)
        attempts.append(crashed(number, "1", number, number + 1, **trained(first, top, 0, 1)))
    made: set[int] = set()
    for one in attempts:
        steps = set(range(one.first_step or 0, (one.last_step or -1) + 1))
        assert sum(steps_again(attempts).get(one.number, {}).values()) == len(steps & made), one.number
        made |= steps


def test_the_last_end_of_a_run_that_is_gone_says_that_no_job_waits_and_what_to_type() -> None:
    left = "its supervisor left: no restart in place (--in-place 0)"
    attempts = [crashed(n, f"88_{n}", 1000 * n, 1000 * n + 900, then=left) for n in (1, 2)]
    spent = account(attempts, (), at(3400), afterwards=Spent.HELD)
    first, last = incidents(attempts, spent, then=no_job_waits("GONE", "/scratch/run"))
    assert first.done == left, "another attempt came after it"
    assert last.done == f"{left}; no job waits to go on: ftsupervise launch /scratch/run"
    for verdict in ("WAITING", "RUNNING", "STOPPED", "UNKNOWN"):
        assert incidents(attempts, spent, then=no_job_waits(verdict, "/scratch/run"))[1].done == left


def test_a_loop_that_left_at_the_warning_with_a_code_of_its_own_is_a_planned_restart() -> None:
    own = Cause(CauseKind.WARNING, then=Cause(CauseKind.EXIT, (NodeRanks("node-0", "0"),), code=99))
    taken = Cause(CauseKind.EXIT, code=124)  # ``timeout`` at the warning: no failure is in the ledger
    attempts = [
        crashed(1, "7_1", 0, 100),
        ended(2, "7_1", 110, 200, own),
        ended(3, "7_2", 210, 300, taken),
        Attempt(4, "7_3", at(310)),
    ]
    found = incidents(attempts, account(attempts, (), at(400), running=True), running=True)
    assert [one.planned for one in found] == [False, True, True]
    assert own.orderly and not own._replace(then=Cause(CauseKind.SIGNAL, signal=9)).orderly
    assert kind_and_cause(found[1]) == "warning signal, then rank 0 on node-0 exit 99"
    assert kind_and_cause(found[0]).startswith("killed process: ")
    lost = CostItem("warning signal", 9.0, times=2, fault=True, example=found[1])
    assert explained(lost) == "The costliest: warning signal, then rank 0 on node-0 exit 99"
