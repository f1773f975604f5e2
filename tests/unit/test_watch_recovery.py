"""Has the run come on again? Told when it stands still, not while it starts, and over when it trains."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.config.schema import Launch, Run
from ftsupervise.config.watchdogs import IsRunning, Watch
from ftsupervise.config.watchdogs import Recovery as Settings
from ftsupervise.findings import Finding
from ftsupervise.model import OUTPUT, Cause, CauseKind, Job, JobState
from ftsupervise.rundir.attempt_pages import EndPage, write_page
from ftsupervise.rundir.heartbeat_page import write_beat
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.switches import KILL, Brake, write_brake
from ftsupervise.truth import Beat, Health, LeftCheckpoint, PercentReached
from ftsupervise.watch import Look
from ftsupervise.watch.watchdogs.recovery import check

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=timezone.utc)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    for name in ("attempts", "launches", "state", "beats"):
        (tmp_path / name).mkdir()
    return RunDir(tmp_path)


def attempt(rundir: RunDir, number: int, ago: float, cause: str = "", first: int | None = None) -> None:
    folder = rundir.attempt(number)
    folder.mkdir()
    at = NOW - timedelta(minutes=ago)
    write_json(
        folder / "start.json", {"attempt": number, "job_id": f"88_{number}", "at": at.isoformat(), "host": "node-9"}
    )
    if cause:
        word, _, code = cause.partition(" ") if cause.startswith("exit ") else (cause, "", "1")
        why = Cause(CauseKind(word), code=int(code) if word == "exit" else None)
        write_page(folder, EndPage(ended=at + timedelta(minutes=1), exit_code=int(code), cause=why, first_step=first))


def found(rundir: RunDir, jobs: tuple[Job, ...] = (), **settings: object) -> Finding:
    run = Run(name="r", run_dir=rundir.root, launch=Launch(command="true"))
    (finding,) = check(Look(run=run, rundir=rundir, now=NOW, jobs=jobs), Settings(**settings))  # type: ignore[arg-type]
    return finding


def look(rundir: RunDir, jobs: tuple[Job, ...] = (), **settings: object) -> tuple[Health, str]:
    finding = found(rundir, jobs, **settings)
    return finding.health, finding.summary


def test_a_failure_with_nobody_to_take_over_is_told(rundir: RunDir) -> None:
    attempt(rundir, 1, 5, "killed by a signal", first=1)
    assert look(rundir)[0] is Health.BAD


def test_a_tick_between_the_failure_and_the_restart_in_the_same_job_tells_nothing(rundir: RunDir) -> None:
    attempt(rundir, 1, 1.5, "exit 1", first=1)
    at_work, leaves = (Job("88_1", "88", "r", "me", state) for state in (JobState.RUNNING, JobState.COMPLETING))
    there = "the supervisor of its job is there, to start the next attempt: too early to say whether it recovers"
    assert look(rundir, (at_work,)) == (Health.UNKNOWN, there)
    assert look(rundir, (leaves,))[0] is Health.BAD
    write_brake(rundir, Brake())
    assert look(rundir, (at_work,))[0] is Health.BAD, "the brake keeps it from starting another"


def test_the_next_member_is_given_time_to_take_over_and_not_for_ever(rundir: RunDir) -> None:
    """A page 1.7 s after the end of an attempt, with the next member RUNNING, was followed by a RESUMED in the same minute."""
    attempt(rundir, 1, 6, "exit 1", first=1)
    ended = NOW - timedelta(minutes=5)
    runs = Job("88_2", "88", "r", "me", JobState.RUNNING, start_time=ended)
    waits, again = runs._replace(state=JobState.PENDING, start_time=None), runs._replace(id="88_1", start_time=NOW)
    held = waits._replace(reason="JobHeldUser")
    for job, words in (
        (runs, "job 88_2 is there, to start the next attempt"),
        (runs._replace(state=JobState.CONFIGURING), "job 88_2 is there, to start the next attempt"),
        (again, "job 88_1 is there, to start the next attempt"),
        (waits, "job 88_2 waits in the queue"),
    ):
        assert look(rundir, (job,)) == (Health.UNKNOWN, f"{words}: too early to say whether it recovers")
        assert job is again or look(rundir, (job,), start=timedelta(minutes=4))[0] is Health.BAD
    for job in (held, runs._replace(state=JobState.COMPLETING), again._replace(start_time=None)):
        assert look(rundir, (job,))[0] is Health.BAD, job
    watch = Watch(is_running=IsRunning(pending_for=timedelta(minutes=4)))
    run = Run(name="r", run_dir=rundir.root, launch=Launch(command="true"), watch=watch)
    (finding,) = check(Look(run=run, rundir=rundir, now=NOW, jobs=(waits,)), Settings())
    assert finding.health is Health.BAD, "the queue's own alert says that it waits for too long"
    write_brake(rundir, Brake())
    assert look(rundir, (runs,))[0] is Health.BAD, "the brake keeps it from starting another"


def test_a_restart_that_does_not_come_is_told(rundir: RunDir) -> None:
    attempt(rundir, 1, 2.5, "exit 1", first=1)
    assert look(rundir, (Job("88_1", "88", "r", "me", JobState.RUNNING),))[0] is Health.BAD


def test_where_to_read_follows_the_output_that_the_settings_name(rundir: RunDir, tmp_path: Path) -> None:
    attempt(rundir, 1, 5, "exit 1", first=1)
    launch = Launch(command="true", output=f"{tmp_path}/out/%x-%A_%a.txt", error=f"{tmp_path}/out/%x-%A_%a.err")
    run = Run(name="r", run_dir=rundir.root, launch=launch, scheduler="slurm")
    (finding,) = check(Look(run=run, rundir=rundir, now=NOW, jobs=()), Settings())
    assert f"{tmp_path}/out/r-*_*.txt {tmp_path}/out/r-*_*.err" in finding.do
    assert "/logs" not in finding.do


def test_an_attempt_that_starts_is_given_time_and_not_for_ever(rundir: RunDir) -> None:
    attempt(rundir, 1, 30, "exit 1", first=1)
    attempt(rundir, 2, 3)  # of another host: no end on record says nothing
    assert look(rundir) == (Health.UNKNOWN, "attempt 2 is starting: too early to say whether it recovers")
    attempt(rundir, 3, 11)
    assert look(rundir)[0] is Health.UNKNOWN, "the supervisor gives a start 30 minutes"
    assert look(rundir, start=timedelta(minutes=10))[0] is Health.BAD
    attempt(rundir, 4, 31)
    assert look(rundir)[0] is Health.BAD


def test_a_script_without_a_known_step_that_is_at_work_has_recovered(rundir: RunDir) -> None:
    """It is not "none has trained since" for all the days of a program that prints no step."""
    attempt(rundir, 1, 200, "exit 1")
    attempt(rundir, 2, 180)
    assert look(rundir)[0] is Health.BAD
    rundir.beats.mkdir(exist_ok=True)
    facts = {"attempt": "2", "source": "launch.heartbeat"}
    write_beat(rundir, Beat(0, None, "", NOW, 1, "node-9", facts))
    assert look(rundir) == (Health.OK, "attempt 2 prints or computes; it shows no step")
    write_page(rundir.attempt(2), PercentReached(63.2, 0.1, of="Progress: %"))
    run = Run(name="r", run_dir=rundir.root, launch=Launch(command="true"))
    found = list(check(Look(run=run, rundir=rundir, now=NOW, jobs=()), Settings()))
    assert [one.summary for one in found] == [
        "no attempt has begun anew",
        "attempt 2 is at 63.2 % by its own words",
    ]


def test_a_script_without_a_known_step_has_recovered_though_the_next_job_is_starting(rundir: RunDir) -> None:
    """It said "attempt 1 failed and none has trained since" of a run that had worked up to its time limit."""
    attempt(rundir, 1, 200, "exit 1")
    attempt(rundir, 2, 180, "time limit")
    end = rundir.attempt(2) / "end.json"
    write_json(end, {**json.loads(end.read_text()), "source": OUTPUT})
    attempt(rundir, 3, 1)
    assert look(rundir) == (Health.OK, "attempt 2 printed or computed; it showed no step")


def test_nothing_is_to_recover_from_where_a_person_has_stopped_the_run(rundir: RunDir) -> None:
    attempt(rundir, 1, 30, "exit 1", first=1)
    assert look(rundir)[0] is Health.BAD
    rundir.switches.mkdir()
    (rundir.switches / KILL).touch()
    assert look(rundir) == (Health.OK, "a person has stopped the run by the kill switch: nothing is to recover")


def test_a_run_that_was_launched_again_just_now_is_given_time(rundir: RunDir) -> None:
    attempt(rundir, 1, 30, "exit 1", first=1)
    (rundir.launches / "0002").mkdir()
    write_json(
        rundir.launches / "0002" / "launch.json",
        {"state": "submitted", "token": "t", "at": (NOW - timedelta(minutes=1)).isoformat()},
    )
    assert look(rundir) == (Health.UNKNOWN, "it has been launched again: too early to say whether it recovers")


@pytest.mark.parametrize("cause", ["warning signal", "kill switch", "exit 0", "finished"])
def test_an_orderly_end_is_no_failure(rundir: RunDir, cause: str) -> None:
    attempt(rundir, 1, 30, cause, first=1)
    assert look(rundir)[0] is Health.OK


def test_it_is_over_when_a_later_attempt_has_trained(rundir: RunDir) -> None:
    attempt(rundir, 1, 30, "exit 1", first=1)
    attempt(rundir, 2, 20, "warning signal", first=101)
    assert look(rundir) == (Health.OK, "attempt 2 trains, from step 101")
    assert found(rundir).attempt == 2, "as a value: a mail with its restart says it once"


def test_members_that_save_each_into_a_folder_of_its_own_job_are_told(rundir: RunDir) -> None:
    for number in (1, 2):
        attempt(rundir, number, 60.0 / number, "time limit")
        left = LeftCheckpoint(f"/s/out/{30 * number}/state.pth", by_job=True)
        write_page(rundir.attempt(number), left if number == 2 else left._replace(by_job=False))
    run = Run(name="r", run_dir=rundir.root, launch=Launch(command="true"))

    def resume() -> tuple[Health, str]:
        found = {one.subject: one for one in check(Look(run=run, rundir=rundir, now=NOW, jobs=()), Settings())}
        one = next(one for name, one in found.items() if "resume" in name)
        return one.health, one.summary

    assert resume()[0] is Health.OK
    write_page(rundir.attempt(1), LeftCheckpoint("/s/out/30/state.pth", by_job=True))
    health, words = resume()
    assert health is Health.BAD
    assert words == (
        "attempt 2 saved into /s/out/60/state.pth, a folder of its own job's number, and attempt 1 into /s/out/30/state.pth: "
        "it was not seen to resume"
    )
