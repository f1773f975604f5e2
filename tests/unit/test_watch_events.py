"""What people are told of a ledger: starts, take-overs with both halves, a stop that somebody asked for, the end."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from ftsupervise.findings import EventKind
from ftsupervise.model import OUTPUT, Attempt, Cause, CauseKind
from ftsupervise.truth import PercentReached
from ftsupervise.watch.tour import events

T0 = datetime(2026, 11, 21, 3, 0, tzinfo=timezone.utc)


def known_cause(words: str) -> Cause:
    """The one of these that has those words."""
    plain = *(Cause(kind) for kind in CauseKind), Cause(CauseKind.EXIT, code=1), Cause(CauseKind.SIGNAL, signal=9)
    return next((one for one in plain if one.words() == words), Cause(CauseKind.OTHER, text=words))


def attempt(
    number: int, cause: str = "", *, first: int | None = 1, last: int | None = 140, minutes: float = 0
) -> Attempt:
    started = T0 + timedelta(minutes=minutes)
    ended = started + timedelta(minutes=5) if cause else None
    why = known_cause(cause) if cause else None
    return Attempt(
        number, f"88_{number}", started, host="node-9", ended=ended, cause=why, first_step=first, last_step=last
    )


def test_a_fault_that_was_over_before_anybody_looked_is_told_as_one_event_with_both_halves() -> None:
    told = events([attempt(1, "killed by SIGKILL"), attempt(2, first=101, minutes=5.05)], finished_at=None)
    assert [event.event for event in told] == [EventKind.STARTED, EventKind.RESUMED]
    assert told[1].finding.summary == (
        "attempt 2 (job 88_2) goes on from step 101, 3s after attempt 1 ended at step 140 (killed by SIGKILL); "
        "40 steps are done again"
    )


def test_a_run_goes_on_when_it_has_made_its_first_step_and_not_when_its_program_was_started() -> None:
    back = attempt(2, first=101, minutes=5)._replace(ready=45.0)
    told = events([attempt(1, "killed by SIGKILL"), back], finished_at=None)
    assert "goes on from step 101, 45s after attempt 1 ended" in told[1].finding.summary and told[1].quick
    told = events([attempt(1, "killed by SIGKILL"), back._replace(ready=600.0)], finished_at=None)
    assert not told[1].quick, "ten minutes without training are no quick restart"


def test_what_begins_at_its_first_step_does_not_go_on() -> None:
    """Its steps were read for a moment only, so no start over was seen: "goes on from step 1", from nothing."""
    began = attempt(2, first=1, last=None, minutes=6)._replace(source=OUTPUT)
    told = events([attempt(1, "time limit", first=None, last=None), began], finished_at=None)
    assert [event.event for event in told] == [EventKind.STARTED, EventKind.STARTED]
    assert told[1].finding.summary == "attempt 2 (job 88_2) begins at step 1, 1m after attempt 1 ended (time limit)"
    later = events([attempt(1, "time limit", first=None, last=None), began._replace(epoch=5)], finished_at=None)
    assert later[1].event is EventKind.RESUMED, "the steps of its sixth epoch"


def test_what_is_made_again_counts_from_the_last_that_trained_though_others_crashed_at_once_since() -> None:
    crashed = [attempt(number, "exit 1", first=None, last=None, minutes=5 * number) for number in (2, 3)]
    told = events([attempt(1, "time limit"), *crashed, attempt(4, first=101, minutes=21)], finished_at=None)
    assert told[1].finding.summary == (
        "attempt 4 (job 88_4) goes on from step 101, 1m after attempt 3 ended (exit 1); "
        "40 steps are done again: attempt 1 had reached 140"
    )
    slow = attempt(1, "time limit")._replace(started=T0 - timedelta(hours=2))
    (_, told_slow) = events([slow, *crashed, attempt(4, first=101, minutes=21)], finished_at=None)
    assert told[1].quick and not told_slow.quick, "forty steps of a minute are five minutes of training lost"
    past = attempt(4, first=141, minutes=21)
    assert "again" not in events([attempt(1, "time limit"), *crashed, past], finished_at=None)[1].finding.summary


def test_what_ends_a_stop_that_was_told_is_told_at_once() -> None:
    """The relaunch after a STOPPED came in a digest, up to six hours later."""
    stopped = attempt(1, "kill switch")
    no_step = attempt(2, "killed by SIGKILL", first=None, last=None, minutes=5.1)
    again, next_one = attempt(3, "killed by SIGKILL", first=141, minutes=5.2), attempt(4, first=141, minutes=10.3)
    for attempts in ([stopped, no_step, again, next_one], [stopped, again, next_one]):
        told = events(attempts, finished_at=None)
        kinds = [(one.event, one.quick) for one in told[1:]]
        assert kinds == [(EventKind.STOPPED, False), (EventKind.RESUMED, False), (EventKind.RESUMED, True)]


def test_one_step_that_is_made_again_is_one_step() -> None:
    told = events([attempt(1, "killed by SIGKILL"), attempt(2, first=140, minutes=5.05)], finished_at=None)
    assert told[1].finding.summary.endswith("; one step is done again")


def test_of_replica_groups_the_mark_says_at_which_step_they_finished() -> None:
    told = events([attempt(1, first=None, last=None)], finished_at=T0 + timedelta(minutes=5), step=571)
    assert told[-1].finding.summary == "done at step 571 after 5m, in 1 attempt"


def test_a_restart_that_costs_little_is_a_quick_one() -> None:
    def second(**more: object) -> bool:
        told = events([attempt(1, "killed by SIGKILL"), attempt(2, **more)], finished_at=None)  # type: ignore[arg-type]
        return told[1].quick

    assert second(first=141, minutes=5.05) and second(first=101, minutes=5.05), "three seconds, and 40 steps of two"
    assert not second(first=1, minutes=5.05), "all five minutes are made again"
    assert not second(first=141, minutes=12)
    lost = [attempt(1)._replace(cause=Cause(CauseKind.LOST)), attempt(2, first=141, minutes=5.05)]
    assert not events(lost, finished_at=None)[1].quick, "nobody knows when it ended"


def test_an_attempt_that_has_not_trained_yet_has_not_taken_over() -> None:
    told = events([attempt(1, "exit 1"), attempt(2, first=None, last=None, minutes=6)], finished_at=None)
    assert [event.event for event in told] == [EventKind.STARTED]


def test_a_kill_switch_is_told_because_nobody_takes_over() -> None:
    told = events([attempt(1, "kill switch")], finished_at=None)
    assert [event.event for event in told] == [EventKind.STARTED, EventKind.STOPPED]


def test_a_script_that_hears_no_switch_is_not_said_to_have_saved() -> None:
    told = events([attempt(1, "kill switch")._replace(source=OUTPUT)], finished_at=None)
    assert told[1].finding.summary == "attempt 1 stopped at step 140: kill switch"


def test_a_stop_is_said_to_have_saved_only_where_the_loop_said_so() -> None:
    def said(**more: Any) -> str:
        return events([attempt(1, "kill switch")._replace(**more)], finished_at=None)[1].finding.summary

    assert said(saved=None) == "attempt 1 stopped at step 140: kill switch"
    assert said(saved=140, source=OUTPUT) == "attempt 1 saved and stopped at step 140: kill switch"  # as replica groups
    assert said(saved=100, kept=140) == "attempt 1 saved and stopped at step 140: kill switch"
    assert said(saved=100) == "attempt 1 stopped at step 140, last saved at step 100: kill switch"


def test_one_that_begins_again_by_its_percentage_is_told_once() -> None:
    percents = [PercentReached(63.2, 0.1, of="a"), PercentReached(1.4, 0.1, of="a")]
    runs = [attempt(n, first=None, last=None)._replace(percent=one) for n, one in enumerate(percents, 1)]
    told = events(runs, finished_at=None)
    assert [event.event for event in told] == [EventKind.STARTED, EventKind.STARTED], "it is not told as RESUMED"
    assert told[1].finding.summary.startswith("attempt 2 began again at 0.1 %, attempt 1 had reached 63.2 %")


def test_who_is_told_of_a_stop_is_told_who_asked_for_it() -> None:
    runs = [attempt(1, "kill switch"), attempt(2, "kill switch", minutes=6)]
    told = [
        event.finding.summary
        for event in events(runs, finished_at=None, raised="raised by ada on login-1 (wrong data mix)")
    ]
    stops = [summary for summary in told if " stopped at step " in summary]
    assert "ada" not in stops[0]  # another switch, long down
    assert stops[1].endswith(": kill switch, raised by ada on login-1 (wrong data mix)")


def test_the_end_says_how_long_and_in_how_many_attempts() -> None:
    runs = [attempt(1, "warning signal"), attempt(2, "finished", first=141, last=300, minutes=6)]
    told = events(runs, finished_at=T0 + timedelta(hours=2))
    assert told[-1].event is EventKind.FINISHED
    assert told[-1].finding.summary == "done at step 300 after 2h, in 2 attempts"


def test_every_event_has_a_name_of_its_own_and_keeps_it() -> None:
    first = events([attempt(1, "exit 1"), attempt(2, minutes=6)], finished_at=None)
    later = events([attempt(1, "exit 1"), attempt(2, "exit 1", minutes=6), attempt(3, minutes=12)], finished_at=T0)
    assert [e.key for e in later][: len(first)] == [e.key for e in first]
    assert len({e.key for e in later}) == len(later)


def test_a_run_that_was_trained_on_after_its_end_finishes_once_more_and_that_is_told_too() -> None:
    runs = [attempt(1, "finished", last=300)]
    first = events(runs, finished_at=T0 + timedelta(hours=1))[-1]
    runs += [attempt(2, "finished", first=301, last=400, minutes=90)]
    second = events(runs, finished_at=T0 + timedelta(hours=2))[-1]
    assert first.event is second.event is EventKind.FINISHED
    assert first.key != second.key and "step 400" in second.finding.summary


def test_orderly_ends_wake_nobody() -> None:
    kinds = CauseKind.WARNING, CauseKind.KILL_SWITCH, CauseKind.TIME_LIMIT, CauseKind.RUN_TIME, CauseKind.FINISHED
    assert all(Cause(kind).orderly for kind in kinds)
    assert Cause(CauseKind.EXIT, code=0).orderly
    assert not Cause(CauseKind.KILL_SWITCH, then=Cause(CauseKind.EXIT, code=1)).orderly
    assert not Cause(CauseKind.EXIT, code=1).orderly
    assert not Cause(CauseKind.LOST).orderly
