"""The tables of states of a job and of an attempt: every way through them ends, and each state can be reached. No process is
started here."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.run import attempt, command, supervisor
from ftsupervise.run.states import (
    AFTER,
    NEXT,
    AttemptEvent,
    AttemptProgress,
    AttemptState,
    Outcome,
    State,
)


def follow(*outcomes: Outcome) -> list[State]:
    found = [State.PLACE]
    for outcome in outcomes:
        found.append(NEXT[found[-1]][outcome])
    return found


def reachable(start: Any, table: Mapping[Any, Mapping[Any, Any]] = NEXT) -> set[Any]:
    found, new = {start}, [start]
    while new:
        after = set(table.get(new.pop(), {}).values()) - found
        found |= after
        new += after
    return found


def test_every_state_but_the_last_is_followed_and_every_state_is_reached() -> None:
    assert set(NEXT) == set(State) - {State.EXIT}
    assert reachable(State.PLACE) == set(State)


def test_the_end_is_reached_from_everywhere() -> None:
    assert all(State.EXIT in reachable(state) for state in State)


def test_every_outcome_is_used() -> None:
    assert {outcome for after in NEXT.values() for outcome in after} == set(Outcome)


def test_a_failure_that_is_answered_with_a_restart_leads_to_the_next_claim() -> None:
    done, again = Outcome.DONE, Outcome.RESTART
    assert follow(done, done, done, done, again, done, again, done) == [
        State.PLACE, State.BACK_OFF, State.CLAIM, State.ATTEMPT, State.JUDGE, State.REPLACE, State.RECORD, State.PAUSE,
        State.CLAIM,
    ]  # fmt: skip


def test_nothing_is_left_or_stopped_unrecorded() -> None:
    """From a judgement every way to the end leads through the ledger, and a brake through its mark."""
    for outcome in NEXT[State.JUDGE]:
        ways = [[State.JUDGE, NEXT[State.JUDGE][outcome]]]
        while ways:
            way = ways.pop()
            assert way[-1] is not State.EXIT, way
            if way[-1] is not State.RECORD:
                ways += [[*way, after] for after in NEXT[way[-1]].values()]
    assert NEXT[State.RECORD][Outcome.STOP] is State.BRAKE
    assert set(NEXT[State.BRAKE].values()) == {State.EXIT}


def test_the_command_starts_only_after_a_claim() -> None:
    assert [state for state, after in NEXT.items() if State.ATTEMPT in after.values()] == [State.CLAIM]


# ---------------------------------------------------------------------------------------------------------- the attempt

S, E = AttemptState, AttemptEvent


def progress(*events: AttemptEvent) -> AttemptProgress:
    found = AttemptProgress()
    for event in events:
        found = found.after(event)
    return found


def test_every_state_of_an_attempt_is_reached_and_its_end_is_reached_from_everywhere() -> None:
    assert set(AFTER) == set(S) - {S.ENDED}
    assert reachable(S.STARTING, AFTER) == set(S)
    assert all(S.ENDED in reachable(state, AFTER) for state in S)
    assert {event for after in AFTER.values() for event in after} == set(E)


def test_a_signal_is_answered_in_every_state_between_the_start_and_the_end() -> None:
    for state in set(S) - {S.STARTING, S.ENDED}:
        assert {E.WARNING, E.STOP} <= set(AFTER[state]), state


def test_once_the_command_is_being_ended_nothing_seen_begins_another_end() -> None:
    seen = {E.MUST_END, E.RANK_DIED, E.HUNG}
    assert {state for state in AFTER if seen & set(AFTER[state])} == {S.RUNNING, S.WARNED}
    for state in set(AFTER) - {S.STARTING}:
        assert not {S.RUNNING, S.WARNED} & set(AFTER[state].values()) or state in (S.RUNNING, S.WARNED)


def test_a_command_that_was_asked_to_save_is_ended_for_no_hang() -> None:
    assert E.HUNG not in AFTER[S.WARNED]
    assert progress(E.STARTED, E.WARNING, E.STOP).warned
    assert progress(E.STARTED, E.STOP, E.WARNING) == AttemptProgress(S.STOPPING, warned=True)


def test_each_way_to_end_a_running_command_has_its_time_to_leave_before_the_kill() -> None:
    leaving = {S.FAILING, S.ENDING, S.STOPPING}
    assert {state for state in AFTER if S.KILLING in AFTER[state].values()} == leaving | {S.KILLING}
    assert {AFTER[state].get(E.TIME_UP) for state in leaving} == {S.KILLING}
    assert all(E.TIME_UP not in AFTER[state] for state in set(AFTER) - leaving)


def test_what_a_command_left_running_is_ended_before_the_attempt_is_over() -> None:
    assert {state for state, after in AFTER.items() if S.ENDED in after.values()} == {S.STARTING, S.CLEARING}
    assert progress(E.STARTED, E.RANK_DIED, E.TIME_UP, E.UNKILLABLE, E.CLEARED).state is S.ENDED


def test_facts_stay_until_a_later_event_replaces_them() -> None:
    over = progress(E.STARTED).after(E.STOP, kill_at=3.0, by=15).after(E.EXITED, code=7).after(E.CLEARED)
    assert over == AttemptProgress(S.ENDED, 3.0, by=15, code=7)


def test_an_event_that_a_state_does_not_have_moves_nothing() -> None:
    with pytest.raises(KeyError):
        progress(E.STARTED, E.STOP, E.HUNG)


def named(module: Any, *kinds: str) -> set[str]:
    """The members of these enumerations that a module names."""
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    found = (one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name))
    return {one.attr for one in found if ast.unparse(one.value) in kinds}


def test_the_code_raises_every_event_of_the_table_and_moves_an_attempt_at_no_other_place() -> None:
    assert named(command, "AttemptEvent") == {event.name for event in E}
    for module in (attempt, command, supervisor):
        assert module.__file__ is not None
        text = Path(module.__file__).read_text("utf-8")
        assert text.count("self.now.after(") == (module is command)
        assert "AttemptProgress(AttemptState" not in text
        assert not named(module, "AFTER")
    assert named(supervisor, "State") == {state.name for state in State}
