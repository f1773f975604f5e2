"""The ranks' agreement through a store that they share: what each does at its steps, and what a bad store costs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ftsupervise import Decision, Guard
from ftsupervise.guard.decider import MOST_AHEAD, AskedAgreement, ReducedAgreement, StepPace, StoreAgreement
from ftsupervise.truth import NOT_A_NUMBER
from tests.neighbours.register import SharedRegister

CONTINUE = Decision.CONTINUE
STOP = Decision(2, "warning signal", "warning signal SIGUSR1")
SAVE = Decision(1, "save switch")
BAD_LOSS = Decision(2, NOT_A_NUMBER, f"{NOT_A_NUMBER}: nan at step 7")
Join = Callable[..., StoreAgreement]


@pytest.fixture
def register() -> SharedRegister:
    return SharedRegister(2)


@pytest.fixture
def join(register: SharedRegister) -> Iterator[Join]:
    joined: list[StoreAgreement] = []

    def one(rank: int, *, hosts: bool = False, patience: float = 30.0) -> StoreAgreement:
        joined.append(StoreAgreement(register, rank, hosts=hosts, patience=patience))
        return joined[-1]

    yield one
    register.go_on()
    for agreement in joined:
        agreement.close(in_order=False)


def step(agreement: StoreAgreement | ReducedAgreement, want: Decision = CONTINUE) -> Decision:
    """As ``Guard.step`` does."""
    agreement.count += 1
    return CONTINUE if agreement.count <= agreement.free and not want else agreement.decide(want)


def test_two_ranks_that_are_apart_stop_at_the_same_step(join: Join) -> None:
    ahead, behind = join(0), join(1)
    for _ in range(40):
        assert not step(ahead)
    for _ in range(7):
        assert not step(behind)
    left: dict[Any, Any] = {}
    n = 0
    while len(left) < 2 and (n := n + 1) < 1000:
        for one in (ahead, behind):
            if one not in left and step(one, STOP if one is behind else CONTINUE):
                left[one] = one.count
    assert left[ahead] == left[behind] > 40


def test_a_rank_names_its_reason_and_the_others_repeat_it(join: Join) -> None:
    first, second = join(0), join(1)
    while not (said := step(second, STOP)):
        pass
    while not (heard := step(first)):
        pass
    assert (said.reason, heard.reason) == ("rank 1: warning signal SIGUSR1",) * 2
    assert heard.cause == "warning signal"


@pytest.mark.fault("A loss is no number while the ranks are about to stop for another reason", "none of them saves")
@pytest.mark.parametrize("first_there", [0, 1])
def test_a_loss_that_is_no_number_keeps_all_ranks_from_saving_at_the_stop_that_is_to_come(
    join: Join, until: Callable[..., object], first_there: int
) -> None:
    """A signal has led to a step at which all stop; before it the loss of the other rank is no number."""
    ranks = [join(0), join(1)]
    for one in ranks:
        step(one)
    ranks[0].tell(STOP)
    until(lambda: ranks[0].pending().stop, "a step is named")
    ranks[1].tell(BAD_LOSS)
    until(lambda: ranks[1].pending().cause == NOT_A_NUMBER, "it has another cause")
    said: dict[int, tuple[int, Decision]] = {}
    for rank in (first_there, 1 - first_there):
        while rank not in said:
            if decision := step(ranks[rank], (STOP, BAD_LOSS)[rank]):
                said[rank] = ranks[rank].count, decision
    assert said[0][0] == said[1][0], "at the same step"
    for _, decision in said.values():
        assert decision.stop and not decision.save
        assert decision.reason == f"rank 1: {BAD_LOSS.reason}"


def test_a_loss_that_comes_after_the_first_rank_has_left_changes_nothing(join: Join) -> None:
    early, late = join(0), join(1)
    while not (said := step(early, STOP)):
        pass
    while late.count < early.count - 1:
        assert not step(late)
    heard = step(late, BAD_LOSS)
    assert (heard.cause, heard.save) == (said.cause, said.save) == ("warning signal", True)


def test_each_save_is_answered_once_by_both_ranks_and_the_stop_that_follows_too(join: Join) -> None:
    first, second = join(0), join(1)
    did: dict[StoreAgreement, list[tuple[int, int]]] = {first: [], second: []}
    wish = {first: SAVE, second: CONTINUE}
    while not all(done and done[-1][1] == 2 for done in did.values()):
        for one in (first, second):
            if not (did[one] and did[one][-1][1] == 2) and (decision := step(one, wish[one])):
                did[one].append((one.count, int(decision)))
                wish[one] = SAVE if one is first and len(did[one]) == 1 else CONTINUE
        if len(did[first]) == 2:
            wish[second] = STOP
    assert did[first] == did[second]
    assert [value for _, value in did[first]] == [1, 1, 2]


def test_quick_steps_ask_the_store_rarely(join: Join, register: SharedRegister) -> None:
    alone = join(0)
    for _ in range(20_000):
        assert not step(alone)
    assert 0 < register.asked <= 20_000 // (MOST_AHEAD // 2) + 10


def test_a_step_before_which_nothing_was_asked_waits_for_the_answer(join: Join, register: SharedRegister) -> None:
    register.slow = 0.2
    began = time.monotonic()
    assert not step(join(0))
    assert 0.2 <= time.monotonic() - began < 20


def test_a_step_that_overtakes_the_question_under_way_asks_again(join: Join, register: SharedRegister) -> None:
    rank = join(0)
    for n in range(200):
        register.slow = 0.02 if n > 100 else 0.0
        assert not step(rank)
    assert not rank.lost


@pytest.mark.fault(
    "The store that ranks agree through gives no answer",
    "a step waits for it once, with a bound; then each rank decides alone until it answers",
)
def test_a_store_that_is_stopped_costs_the_patience_once_and_then_each_decides_alone(
    join: Join, register: SharedRegister, until: Callable[..., object]
) -> None:
    rank = join(1, patience=0.3)
    register.stop()
    began = time.monotonic()
    assert not step(rank)
    assert 0.3 <= time.monotonic() - began < 20
    assert "has not answered" in rank.lost
    began = time.monotonic()
    assert step(rank, STOP) == STOP
    assert not any(step(rank) for _ in range(100))
    assert time.monotonic() - began < 0.3 * 50
    register.go_on()
    until(lambda: not step(rank) and not rank.lost, "the agreement that is there again")


def test_what_was_decided_while_a_rank_could_not_ask_is_answered_as_soon_as_it_can(
    join: Join, register: SharedRegister, until: Callable[..., object]
) -> None:
    late, other = join(1, patience=0.1), join(0)
    while not step(other, STOP):
        pass
    register.stop()
    assert not step(late)
    register.go_on()
    until(lambda: step(late).stop, "the stop")


@pytest.mark.fault("That store is gone, or a stranger has written into it", "each rank decides alone, and says so")
def test_a_store_that_is_gone_is_waited_for_no_longer(join: Join, register: SharedRegister) -> None:
    rank = join(1)
    assert not step(rank)
    register.gone = True
    while not rank.lost:
        assert not step(rank)
    assert rank.lost == "ConnectionError: Broken pipe"
    assert step(rank, SAVE) == SAVE


@pytest.mark.parametrize("text", ["[1", "[1,[[1]]]", "\0", "[1,[[2,33,0," + "9" * 100])
def test_what_a_stranger_wrote_into_the_store_ends_the_agreement_and_nothing_else(
    join: Join, register: SharedRegister, text: str
) -> None:
    register.text = text
    rank = join(0)
    assert not step(rank)
    assert rank.lost


def test_a_forked_child_decides_for_itself_and_waits_for_nothing(join: Join) -> None:
    rank = join(0)
    assert not step(rank)
    child = os.fork()
    if child == 0:
        began = time.monotonic()
        alone = [int(step(rank, STOP)) for _ in range(40)]
        rank.close(in_order=True)
        os._exit(0 if alone[-1] == 2 and time.monotonic() - began < 5 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not any(step(rank) for _ in range(100)) and not rank.lost


def test_who_holds_the_store_stays_until_the_others_have_left(join: Join, register: SharedRegister) -> None:
    holder, other = join(0, hosts=True), join(1)
    while not step(holder, STOP):
        pass
    began = time.monotonic()
    holder.close(in_order=True)
    assert 2.5 < time.monotonic() - began < 20, "the other has not left, and is waited for no longer than this"
    assert register.have_left == 1
    while not step(other):
        pass
    other.close(in_order=True)
    assert register.have_left == 2


def test_after_a_fault_nobody_is_waited_for(join: Join) -> None:
    holder = join(0, hosts=True)
    step(holder)
    began = time.monotonic()
    holder.close(in_order=False)
    assert time.monotonic() - began < 2.5


def test_a_rank_so_far_behind_that_it_would_come_too_late_stops_where_it_is(join: Join) -> None:
    ahead, behind = join(0), join(1, patience=0.5)
    for _ in range(3):
        step(behind)
        time.sleep(0.05)  # its steps are slow
    for _ in range(500):
        assert not step(ahead)
    while not step(ahead, STOP):
        pass
    began, made = time.monotonic(), behind.count
    while not step(behind):
        time.sleep(0.05)
    assert behind.count < made + 60 < ahead.count and time.monotonic() - began < 20


def test_what_is_to_come_is_known_before_its_step(join: Join, until: Callable[..., object]) -> None:
    first, second = join(0), join(1)
    for one in (first, second):
        for _ in range(40):
            step(one)
    first.tell(STOP)
    until(lambda: first.pending().stop, "the rank's own wish")
    assert first.count == 40 and not second.pending()


def test_the_steps_ahead_grow_from_one_and_shrink_at_once_when_steps_get_slow() -> None:
    pace, now, count = StepPace(0.5, 32), 100.0, 0
    grown = []
    for _ in range(7):
        grown.append(pace.measure(count, now))
        count, now = count + 10, now + 0.1
    assert grown == [0, 1, 3, 7, 15, 31, 32]
    assert pace.measure(count + 1, now + 10) == 0


def test_without_a_store_the_ranks_meet_in_the_same_steps_and_rarely() -> None:
    votes: list[tuple[int, ...]] = []

    def maximum(*values: int) -> list[int]:
        votes.append(values)
        return [
            max(values[0], 33 if len(votes) == 9 else 0),
            values[1] + 1,
        ]  # the other rank is slower by one, and stops

    rank, n = ReducedAgreement(maximum), 0
    while not (decision := step(rank)):
        n += 1
    assert decision.stop and 9 <= n < 9 * (MOST_AHEAD + 1)


def test_a_collective_that_fails_does_not_raise_into_the_loop() -> None:
    def broken(*values: int) -> list[int]:
        raise RuntimeError("Connection closed by peer")

    rank = ReducedAgreement(broken)
    assert step(rank, STOP) == STOP
    assert "Connection closed" in rank.lost


def test_the_users_own_function_is_asked_in_every_kth_call_whatever_the_numbers() -> None:
    asked: list[int] = []
    agreement = AskedAgreement(lambda vote: asked.append(vote) or vote, 3)  # type: ignore[func-returns-value]
    for _ in range(10):
        agreement.count += 1
        if agreement.count > agreement.free:
            agreement.decide(CONTINUE)
    assert len(asked) == 3


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_ranks_that_have_nothing_to_agree_with_say_so_once_and_by_rank_0(
    rank: int, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FTSUPERVISE_RUN_DIR", raising=False)
    with Guard(rank=rank, world=2, poll=0, signals=()) as guard:
        for n in range(50):
            guard.step(n)
    assert capsys.readouterr().err.count("decides alone") == lines


@pytest.mark.parametrize("given", [{"agree": False}, {"agree": int}, {"world": 1}])
def test_where_ranks_need_not_agree_or_do_nothing_is_said(
    given: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FTSUPERVISE_RUN_DIR", raising=False)
    with Guard(**{"rank": 0, "world": 2, "poll": 0, "signals": (), **given}) as guard:  # type: ignore[arg-type]
        for n in range(50):
            guard.step(n)
    assert "alone" not in capsys.readouterr().err
