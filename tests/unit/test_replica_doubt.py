"""When a group doubts the step that another one tells: a lie of a billion steps, and never an honest group. Pure."""

from __future__ import annotations

import random
from math import inf

import pytest

from ftsupervise.integrations.torchft_group import StepDoubt, ToldStep

LIE = ToldStep(10**9, 1, "g003")


def trained(steps: int = 50, seconds: float = 0.1) -> tuple[StepDoubt, float]:
    doubt = StepDoubt(3)
    for step in range(1, steps + 1):
        doubt.committed(step, step * seconds)
    return doubt, steps * seconds


def test_a_step_that_one_group_alone_tells_far_ahead_of_the_others_is_not_believed_and_it_is_named() -> None:
    doubt, at = trained()
    assert doubt.of(LIE, at + 0.1).startswith(
        "g003 reports step 1000000000, and the last step that this group has made with the others is 50"
    )


def test_a_group_that_has_made_no_step_yet_believes_what_it_is_told() -> None:
    doubt = StepDoubt(3)
    assert doubt.of(LIE, 0.0) == "" and doubt.furthest(0.0) == inf
    doubt.committed(7, 1.0)
    assert doubt.of(LIE, 1.1) == "", "one step says nothing about its pace"


def test_what_as_many_groups_tell_as_may_train_on_is_believed() -> None:
    doubt, at = trained()
    assert doubt.of(LIE._replace(tellers=3), at) == ""


def test_a_group_that_says_less_than_the_others_is_no_liar() -> None:
    doubt, at = trained()
    assert doubt.of(ToldStep(50, 3), at) == doubt.of(ToldStep(3, 1, "g003"), at) == ""


@pytest.mark.parametrize("seed", range(5))
def test_a_group_that_was_away_never_doubts_those_that_trained_on_up_to_ten_times_as_fast(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        doubt, at = trained(seconds=draw.choice((0.01, 0.1, 1.0, 60.0)))
        pace, away = at / 50, draw.expovariate(1 / 600)
        step = 50 + int(away / pace * draw.uniform(0, 10))
        assert doubt.of(ToldStep(step, 1, "g001"), at + away) == "", "also where one of them alone is left"


def test_the_weights_that_a_group_has_got_from_others_are_a_step_like_any() -> None:
    doubt, at = trained()
    doubt.committed(5000, at + 600)
    assert doubt.of(ToldStep(5003, 1), at + 600.1) == "" and doubt.of(LIE, at + 600.1)
