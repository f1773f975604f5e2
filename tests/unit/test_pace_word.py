"""HUNG and SLOW: the watch and the hang detector say so, and ``status`` judges only where they do not look."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.model import Attempt, Job, JobState
from ftsupervise.report.account import account
from ftsupervise.report.day import facts_of
from ftsupervise.report.headline import RunPresent, headline_of
from ftsupervise.report.pace_word import pace_word
from ftsupervise.report.queues import QueueSeen
from ftsupervise.report.reading import RunReading, WatchSeen
from ftsupervise.report.row import row_of
from ftsupervise.report.verdict import verdict_of
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import ENDS, OFF, RESTARTS, TOLD, ProgressPage
from ftsupervise.rundir.progress_writer import HourOfTraining, pause_after
from ftsupervise.rundir.switches import Brake
from ftsupervise.rundir.watched import FiringAlert, WatchFound
from ftsupervise.truth import Health, SwitchState

NOW = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)
JOB = Job("88_1", "88", "train", "ada", JobState.RUNNING)
HANG = FiringAlert("1", "critical", "hang", "no progress for 50m, at step 700")
CRAWL = FiringAlert("2", "warning", "throughput", "221 steps an hour, usually 357")


def ago(minutes: float) -> datetime:
    return NOW - timedelta(minutes=minutes)


def seen(
    *alerts: FiringAlert,
    moved: float = 0.1,
    tick: float | None = 1.0,
    late: bool = False,
    page: ProgressPage | None = None,
) -> RunReading:
    """``moved``: minutes since the last sign of progress; ``tick``: since the last tick of the watch, None without one."""
    made = page or ProgressPage(at=ago(0.1), ranks=8, step=700, phase="train", rate=0.0, usual=0.1, saving=20.0)
    judges = ("hang",)
    found = None if tick is None else WatchFound(ago(tick), len(alerts), alerts, judges=judges)
    return RunReading(
        name="train",
        rundir=RunDir(Path("/none")),
        at=NOW,
        records=(),
        attempts=(Attempt(1, "88_1", ago(600)),),
        not_read=0,
        page=made._replace(active_at=ago(moved).timestamp()),
        beats=(),
        switches=(SwitchState("kill-switch", Health.OK), SwitchState("save-switch", Health.OK)),
        finished=False,
        brake="",
        held_by_us=False,
        restarts=0,
        watch=WatchSeen(found, None, late),
    )


def test_what_the_hang_watchdog_says_holds_until_the_run_moves_again() -> None:
    assert pace_word(seen(HANG, moved=50)) == ("HUNG", HANG.summary)
    assert pace_word(seen(HANG, moved=0.1)).word == "", "it has moved since that tick"
    old = pace_word(seen(HANG, moved=200, tick=120, late=True))
    assert old == ("HUNG", f"{HANG.summary}; seen 2h ago")


def test_a_hang_that_the_watch_saw_is_no_word_on_the_attempt_that_has_begun_since() -> None:
    hung = seen(HANG, moved=50)
    again = Attempt(2, "88_1", ago(0.5))
    for page in (None, ProgressPage(at=ago(0.1), ranks=8, phase="start")):
        assert pace_word(hung._replace(attempts=(*hung.attempts, again), page=page)) == ("", "")
    older = again._replace(started=ago(2))
    assert pace_word(hung._replace(attempts=(*hung.attempts, older), page=None)).word == "HUNG", "it was judged itself"


def test_a_job_that_the_brake_has_stopped_does_not_run_though_it_has_not_left_the_queue_yet() -> None:
    why = "by the brake: exit 1, the same failure 3 times; fix the cause"
    braked = seen()._replace(brake=why, braked=Brake("exit 1", "the same failure 3 times"))
    failed = braked._replace(attempts=(Attempt(1, "88_1", ago(600), ended=ago(0.1)),))
    assert verdict_of(failed, (JOB,), "") == ("STOPPED", why)
    assert dict(facts_of(row_of(failed, QueueSeen((JOB,))), (JOB,), NOW))["now"].startswith("STOPPED (by the brake")
    assert verdict_of(braked, (JOB,), "")[0] == "RUNNING", "put on by hand: what trains goes on to its end"


def test_a_standstill_is_judged_here_only_where_no_watch_does() -> None:
    patient = pace_word(seen(moved=50))
    assert patient == ("", "no step for 50m, at step 700"), "the watch knows longer pauses of this run"
    assert pace_word(seen(moved=50, tick=None)) == ("HUNG", "no progress for 50m, at step 700")
    assert pace_word(seen(moved=50, tick=90, late=True)).word == "HUNG", "the watch has died"
    assert pace_word(seen(moved=9, tick=None)) == ("STALLED", "no step for 9m, at step 700")
    assert pace_word(seen(moved=1, tick=None)) == ("", ""), "its steps take 10 s"
    untold = ProgressPage(at=NOW, ranks=8, step=700, phase="train", usual=0.1)
    assert pace_word(seen(moved=9, tick=None, page=untold)) == ("", "no step for 9m, at step 700"), "it may evaluate"
    save = ProgressPage(at=NOW, ranks=8, step=700, phase="save", usual=0.1, saving=20.0)
    assert pace_word(seen(moved=50, tick=None, page=save)).word == "", "a save may take an hour"


def test_a_run_that_cannot_be_heard_keeps_its_word_with_its_age() -> None:
    silent = ProgressPage(at=ago(50), ranks=8, step=700, phase="train", usual=0.1, saving=20.0)
    run = seen(moved=50, tick=None, page=silent)
    assert pace_word(run) == ("SILENT", "nothing was heard of attempt 1 for 50m")
    full = "no space is left in /scratch"
    assert pace_word(run._replace(full=full)).why.startswith(f"{full}; nothing was heard of")
    assert not pace_word(run._replace(page=None)).why


def test_a_job_that_runs_between_two_attempts_stands() -> None:
    run = seen(tick=None)
    over = run._replace(attempts=(Attempt(1, "88_1", ago(600), ended=ago(1)),))
    assert pace_word(over).word == "", "a restart takes a while"
    over = run._replace(attempts=(Attempt(1, "88_1", ago(600), ended=ago(3)),))
    assert pace_word(over) == ("STALLED", "attempt 1 ended 3m ago, and none has begun since")


def test_a_run_whose_ranks_are_heard_runs_though_slurm_does_not_answer() -> None:
    run = seen(tick=None)
    assert verdict_of(run, None, "squeue failed") == ("RUNNING", "its ranks are heard, Slurm does not answer")
    page = ProgressPage(at=ago(3), ranks=8, step=700, phase="train")
    assert verdict_of(seen(tick=None, page=page), None, "squeue failed") == ("UNKNOWN", "squeue failed")


def test_rate_and_the_time_of_the_end_are_shown_of_a_run_that_moves() -> None:
    page = ProgressPage(at=ago(0.1), ranks=8, step=700, phase="train", rate=0.1, usual=0.1, saving=20.0, last_step=800)
    switches = (SwitchState("kill-switch", Health.OK), SwitchState("save-switch", Health.OK))
    queue = QueueSeen((JOB,))
    row = row_of(seen(tick=None, page=page)._replace(switches=switches), queue)
    assert row.rate == 0.1 and row.done_at is not None
    for word, stands in {"STALLED": page, "SILENT": page._replace(at=ago(9))}.items():
        row = row_of(seen(tick=None, page=stands, moved=9)._replace(switches=switches), queue)
        assert (row.verdict, row.rate, row.done_at) == (word, None, None)


def test_what_the_hang_detector_has_left_alone_is_hung() -> None:
    page = ProgressPage(
        at=NOW, ranks=8, step=700, phase="train", hung="rank 3 on node-1 makes no step; no progress for 9 s"
    )
    assert pace_word(seen(moved=0.5, page=page)) == ("HUNG", page.hung)


ENDED_BY_ITSELF = {
    (RESTARTS, 0.5): (True, "its supervisor restarts it at 12:00:30 UTC, in 30s, unless it moves"),
    (RESTARTS, -0.1): (True, "its supervisor restarts it now, unless it moves"),
    (ENDS, 40.0): (True, "its supervisor ends it at 12:40:00 UTC, in 40m, unless it moves"),
    (RESTARTS, None): (True, "its supervisor restarts it once it is sure that it hangs"),
    (TOLD, None): (False, "nothing ends it by itself, because a hang is only told"),
    (OFF, None): (False, "nothing ends it by itself, because launch.restart.hang is null"),
    ("", None): (None, ""),
}


@pytest.mark.parametrize(("does", "minutes"), ENDED_BY_ITSELF)
def test_a_run_that_stands_says_whether_it_is_ended_by_itself_and_when(does: str, minutes: float | None) -> None:
    by_itself, words = ENDED_BY_ITSELF[does, minutes]
    at = None if minutes is None else ago(-minutes).timestamp()
    page = ProgressPage(at=ago(0.1), ranks=8, step=700, phase="train", usual=0.1, saving=20.0, on_hang=does, hang_at=at)
    switches = (SwitchState("kill-switch", Health.OK), SwitchState("save-switch", Health.OK))
    runs = {
        ("HUNG", "no progress for 50m, at step 700"): seen(moved=50, tick=None, page=page),
        ("HUNG", HANG.summary): seen(HANG, moved=50, page=page),
        ("STALLED", "no step for 9m, at step 700"): seen(moved=9, tick=None, page=page),
    }
    for (word, why), run in runs.items():
        assert pace_word(run) == (word, f"{why}; {words}" if words else why)
        row = row_of(run._replace(switches=switches), QueueSeen((JOB,)))
        assert (row.verdict, row.ends_hang) == (word, by_itself)
        head = headline_of(RunPresent(row, account((), (), NOW), job_id="88_1", restarts_hangs=True))
        assert words in head.sentence
        assert word != "HUNG" or head.next.startswith(
            {True: "To end it now: ", False: "To restart it: ", None: "Its supervisor ends a hang"}[by_itself]
        )
    assert not pace_word(seen(moved=0.1, page=page)).why, "it does not stand"
    assert row_of(seen(moved=0.1, page=page)._replace(switches=switches), QueueSeen((JOB,))).ends_hang is None


def test_of_a_supervisor_that_is_not_heard_nobody_knows_what_it_does() -> None:
    page = ProgressPage(at=ago(50), ranks=8, step=700, phase="train", on_hang=RESTARTS, hang_at=ago(-1).timestamp())
    assert pace_word(seen(HANG, moved=50, page=page)).why == HANG.summary


@pytest.mark.parametrize(("steady", "word"), [(0.061, "SLOW"), (0.08, ""), (None, "")])
def test_a_run_is_slow_over_an_hour_and_not_over_a_minute(steady: float | None, word: str) -> None:
    page = ProgressPage(at=NOW, ranks=8, step=700, phase="train", rate=0.01, usual=0.1, steady=steady)
    assert pace_word(seen(page=page)).word == word
    assert pace_word(seen(CRAWL, page=page)) == ("SLOW", CRAWL.summary)


def test_only_a_run_whose_job_runs_hangs() -> None:
    run = seen(HANG, moved=50)._replace(switches=(), finished=True)
    assert verdict_of(run, (JOB,), "")[0] == "FINISHED"


def test_the_rate_of_the_last_hour_counts_training_alone() -> None:
    hour, step, rate = HourOfTraining(), 0, None
    for minute in range(200):
        training = minute % 10 < 5  # five minutes of training, then five of evaluation
        step += 6 if training else 0
        rate = hour.rate(60.0 * minute, step, training=training)
        assert rate is None or minute > 120
    assert rate == pytest.approx(0.1, rel=0.3)


def test_a_rank_that_the_others_do_not_wait_for_is_named_when_it_stays_behind() -> None:
    page = ProgressPage(at=ago(0.1), ranks=8, step=700, ahead=706, slowest="rank 3 on node-1", phase="train", usual=0.5)
    assert pace_word(seen(page=page)).why == "", "six steps are nothing"
    run = seen(page=page._replace(ahead=1340))
    assert pace_word(run) == ("", "rank 3 on node-1 is 640 steps behind the others, which go on without it")
    run = run._replace(switches=(SwitchState("kill-switch", Health.OK), SwitchState("save-switch", Health.OK)))
    assert verdict_of(run, (JOB,), "")[1].startswith("job 88_1; rank 3 on node-1 is 640 steps behind")


@pytest.mark.fault(
    "The run directory hangs for half a minute while the supervisor writes its page",
    "the next page comes after a minute at most",
)
def test_a_page_that_hung_is_followed_by_the_next_after_a_minute_at_most() -> None:
    assert pause_after(0.01) == 5.0
    assert pause_after(1.0) == 20.0, "a slow file system is not written to all the time"
    assert pause_after(30.0) == pause_after(3600.0) == 60.0


@pytest.mark.parametrize("asked", [True, False])
def test_the_rate_of_an_attempt_that_has_ended_is_not_shown_as_that_of_the_run(asked: bool) -> None:
    """Seconds after its end its page is fresh, also where Slurm does not say that no job runs."""
    page = ProgressPage(at=ago(0.1), ranks=8, step=700, phase="train", rate=0.1, usual=0.1, saving=20.0, last_step=800)
    switches = (SwitchState("kill-switch", Health.OK), SwitchState("save-switch", Health.OK))
    run = seen(tick=None, page=page)._replace(switches=switches)
    queue = QueueSeen((JOB,)) if asked else QueueSeen(None, "squeue failed")
    over = run._replace(attempts=(Attempt(1, "88_1", ago(600), ended=ago(0.2)),))
    row = row_of(over, queue)
    assert (row.verdict, row.rate, row.done_at) == ("RUNNING" if asked else "UNKNOWN", None, None)
