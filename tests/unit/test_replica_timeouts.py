"""Timeouts of replica groups: what is derived never races, and what a person sets wrong is said with the value to set."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.replicas.bounds import Timeouts, derive, environment, majority, problems

steps = st.floats(min_value=0.001, max_value=86_400)
states = st.integers(min_value=0, max_value=10**14)
counts = st.integers(min_value=2, max_value=2000)


@pytest.mark.parametrize(
    ("step", "wanted"),
    [
        (1.0, Timeouts(10, 0.9, 10, 60, 600, 599, 22)),
        (60.0, Timeouts(120, 0.9, 90, 240, 1350, 1349, 330)),
    ],
)
def test_the_timeouts_are_those_that_were_measured(step: float, wanted: Timeouts) -> None:
    assert derive(step, 0, 4) == wanted


@given(steps, states, counts, st.floats(min_value=0, max_value=36_000))
def test_derived_timeouts_never_race(step: float, state: int, groups: int, period: float) -> None:
    found = derive(step, state, groups, sync_period=period)
    assert problems(found, step, groups, state) == []
    assert step < found.process_group < found.manager
    assert found.join + found.process_group + found.manager < found.quorum
    assert step < found.hang < found.quorum / 2


@given(steps, states, counts)
def test_torchft_can_read_what_the_ranks_are_given(step: float, state: int, groups: int) -> None:
    found = environment(derive(step, state, groups))
    whole = {name: int(value) for name, value in found.items() if name.startswith("TORCHFT_")}
    assert whole["TORCHFT_QUORUM_TIMEOUT_SEC"] > whole["TORCHFT_QUORUM_RETRIES"] > 0
    assert float(found["FTSUPERVISE_PROCESS_GROUP_TIMEOUT"]) > step


def test_torchfts_own_defaults_are_refused_each_reason_with_a_value() -> None:
    found = problems(Timeouts(60, 5, 60, 60, 60, 0, 0), 1.0, 2)
    assert [re.findall(r"set \w+ to [\d.]+s?", line) for line in found] == [
        ["set quorum to 540s"],
        ["set retries to 59"],
        ["set hang to 22s"],
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"process_group": 7.0}, "set process_group to 14s"),
        ({"heartbeat": 0.5}, "set heartbeat to 0.9s"),
        ({"join": 5.0}, "set join to 10.5s"),
        ({"manager": 9.0}, "set manager to 60s"),
        ({"quorum": 80.0}, "set quorum to 254s"),
        ({"retries": 0}, "set retries to 599"),
        ({"hang": 6.0}, "set hang to 38.5s"),
        ({"hang": 400.0}, "set quorum to 802s"),
    ],
)
def test_a_wrong_value_is_named_with_the_one_to_set(change: dict[str, float], said: str) -> None:
    good = derive(7.0, 5_000_000_000, 4)
    (line, *more) = problems(good._replace(**change), 7.0, 4, 5_000_000_000)  # type: ignore[arg-type]
    assert line.endswith(said) and not more


@pytest.mark.parametrize("change", [{"process_group": 7.0}, {"heartbeat": 0.5}, {"join": 5.0}, {"hang": 6.0}])
def test_the_value_that_is_named_mends_it(change: dict[str, float]) -> None:
    wrong = derive(7.0, 0, 4)._replace(**change)  # type: ignore[arg-type]
    said = re.search(r"set (\w+) to ([\d.]+)s", problems(wrong, 7.0, 4)[0])
    assert said and problems(wrong._replace(**{said[1]: float(said[2])}), 7.0, 4) == []  # type: ignore[arg-type]


def test_two_groups_need_the_hang_watch_and_three_do_not() -> None:
    off = derive(1.0, 0, 2)._replace(hang=0)
    assert problems(off, 1.0, 2) and not problems(off, 1.0, 3)


def test_what_is_no_number_is_refused_first() -> None:
    assert problems(derive(1.0)._replace(join=float("nan"), hang=-1.0), 1.0, 4) == [
        "join must be a finite number, from 0",
        "hang must be a finite number, from 0",
    ]


def test_a_majority_is_more_than_half() -> None:
    assert [majority(groups) for groups in (1, 2, 3, 4, 5, 8)] == [1, 2, 2, 3, 3, 5]
