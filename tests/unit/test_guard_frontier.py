"""What ranks agree on through one shared value: values in, values out, in every order of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftsupervise.guard.decider import Frontier, NamedStep, parse
from ftsupervise.guard.stop_reasons import CAUSES, Decision
from ftsupervise.truth import NOT_A_NUMBER

STOP = Decision(2, "warning signal", "warning signal SIGUSR1")
BAD_LOSS = Decision(2, NOT_A_NUMBER, f"{NOT_A_NUMBER}: nan at step 7")
SAVE = Decision(1, "save switch", "save switch raised by bob: look\nhere")
WISHES = {"save": SAVE, "stop": STOP, "loss": BAD_LOSS}


def test_a_decision_is_named_for_the_first_step_that_no_rank_may_make_yet() -> None:
    frontier = Frontier(10).wish(STOP, 3, after=4)
    assert frontier.passed == 11
    assert frontier.named[0].at == 11
    assert frontier.named[0].decision().reason == "warning signal SIGUSR1"


def test_a_second_wish_that_is_no_stronger_is_met_by_what_is_named_already() -> None:
    frontier = Frontier(10).wish(STOP, 3, after=4)
    assert frontier.wish(STOP, 1, after=9) == frontier
    assert frontier.wish(SAVE, 0, after=9) == frontier


def test_a_stop_while_a_save_is_to_come_has_a_step_of_its_own() -> None:
    frontier = Frontier(10).wish(SAVE, 0, after=4).wish(STOP, 3, after=5)
    assert [(one.at, int(one.decision())) for one in frontier.named] == [(11, 1), (12, 2)]


def test_a_save_that_is_asked_for_after_the_last_one_was_made_is_named_again() -> None:
    frontier = Frontier(10).wish(SAVE, 0, after=4)
    assert [one.at for one in frontier.wish(SAVE, 0, after=11).named] == [11, 12]


@given(
    st.integers(0, 1 << 40),
    st.lists(
        st.builds(
            lambda at, value, cause, rank, reason: NamedStep(at, value << 4 | cause, rank, reason),
            st.integers(0, 1 << 40),
            st.sampled_from((1, 2)),
            st.integers(1, len(CAUSES) - 1),
            st.integers(0, 100_000),
            st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=300),
        ),
        max_size=32,
    ),
)
def test_the_value_comes_back_from_its_text(passed: int, named: list[NamedStep]) -> None:
    frontier = Frontier(passed, tuple(named), passed)
    assert parse(frontier.text()) == frontier


@pytest.mark.parametrize(
    "text",
    [
        *("x", "1", "[]", "[1]", "[1,[]]", "[-1,[],0]", "[true,[],0]", "[1,[[1]],0]", '["1",[],0]', "[1,[],-1]"),
        *("[1,[[1,2,3,4,5]],0]", "[" * 70_000, "null"),
    ],
)
def test_what_somebody_else_wrote_there_is_refused(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        parse(text)


def test_a_reason_that_somebody_sent_cannot_move_the_cursor() -> None:
    assert parse('[1,[[1,33,0,"\\u001b[2J"]],0]').named[0].reason == "?[2J"


def test_a_loss_that_is_no_number_turns_the_stop_that_is_to_come_into_one_that_does_not_save() -> None:
    frontier = Frontier(10).wish(STOP, 3, after=4).wish(BAD_LOSS, 1, after=5)
    assert [(one.at, one.rank) for one in frontier.named] == [(11, 1)]
    assert not frontier.named[0].decision().save
    assert frontier.wish(STOP, 3, after=6) == frontier, "it is the stronger one"


def test_a_stop_that_a_rank_has_made_stays_what_it_was() -> None:
    frontier = Frontier(10).wish(STOP, 3, after=4).close(11)
    assert frontier.wish(BAD_LOSS, 1, after=10) == frontier


def test_a_loss_that_is_no_number_makes_no_save_out_of_reach() -> None:
    frontier = Frontier(10).wish(SAVE, 0, after=4).wish(BAD_LOSS, 1, after=5)
    assert [(one.at, int(one.decision())) for one in frontier.named] == [(11, 1), (12, 2)]


class Rank:
    """One rank as the protocol has it, with its own copy of the value."""

    def __init__(self) -> None:
        self.known, self.made, self.did = Frontier(), 0, []  # type: ignore[var-annotated]


@settings(max_examples=30)
@given(st.integers(1, 5), st.data())
def test_however_their_steps_and_questions_mix_all_ranks_do_the_same_at_the_same_step(
    world: int, data: st.DataObject
) -> None:
    shared, ranks = Frontier(), [Rank() for _ in range(world)]
    for _ in range(data.draw(st.integers(1, 120))):
        who = data.draw(st.integers(0, world - 1))
        rank, act = ranks[who], data.draw(st.sampled_from(("step", "step", "step", "ask", "save", "stop", "loss")))
        if act == "step" and rank.made < rank.known.passed:
            rank.made += 1
            if any(one.decision().stop for one in rank.known.between(rank.made - 1, rank.made)):
                shared = rank.known = shared.close(rank.made)
            rank.did += [(one.at, one.vote) for one in rank.known.between(rank.made - 1, rank.made)]
        elif act == "ask":
            shared = rank.known = shared.up_to(rank.made + data.draw(st.integers(1, 9)))
        elif act in WISHES:
            shared = rank.known = shared.wish(WISHES[act], who, rank.made)
    least = min(rank.made for rank in ranks)
    assert len({tuple(one for one in rank.did if one[0] <= least) for rank in ranks}) == 1
    assert all(rank.did == [(one.at, one.vote) for one in shared.named if one.at <= rank.made] for rank in ranks)
