"""The table of a job's states: every way through it ends, and each state can be reached. No process is started here."""

from __future__ import annotations

from ftsupervise.run.decide import NEXT, Outcome, State


def follow(*outcomes: Outcome) -> list[State]:
    found = [State.PLACE]
    for outcome in outcomes:
        found.append(NEXT[found[-1]][outcome])
    return found


def reachable(start: State) -> set[State]:
    found, new = {start}, [start]
    while new:
        after = set(NEXT.get(new.pop(), {}).values()) - found
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
