"""What ``status`` says: of the newest attempt, in agreement with ``check``, with the log that there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.report import gather
from ftsupervise.rundir.heartbeat_page import write_beat
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.truth import Beat, LossTrouble
from tests.neighbours.typed import typed

Until = Callable[..., Any]
NOW = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)
SETTINGS = "name: wrapped\nscheduler: local\nlaunch: {command: sleep 600}\nwatch: {hang: null, disk: null}\n"


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "wrapped")
    for folder in (run.switches, run.beats, run.attempts, run.state, run.watch, run.launches):
        folder.mkdir(parents=True)
    return run


def attempt(rundir: RunDir, number: int, minutes: int, **end: object) -> None:
    rundir.attempt(number).mkdir()
    at = NOW + timedelta(minutes=minutes)
    write_json(rundir.attempt(number) / "start.json", {"at": at.isoformat(), "host": "n", "job_id": ""})
    if end:
        write_json(
            rundir.attempt(number) / "end.json", {"ended": at.isoformat(), "cause": {"kind": "exit", "code": 1}, **end}
        )


def beat(rundir: RunDir, rank: int, step: int, minutes: int, **facts: str) -> None:
    write_beat(rundir, Beat(rank, step, "train", NOW + timedelta(minutes=minutes), 1, "n", facts))


@pytest.mark.fault(
    "After a restart with fewer ranks `status` shows the step of a rank of the attempt before.",
    "Only the heartbeats of the newest attempt count.",
)
@pytest.mark.parametrize("named", [True, False])
def test_the_beats_of_an_older_attempt_do_not_count(rundir: RunDir, named: bool) -> None:
    attempt(rundir, 1, 0, last_step=561)
    attempt(rundir, 2, 10)
    of = [{"attempt": "1"}, {"attempt": "2"}] if named else [{}, {}]
    beat(rundir, 1, 561, 9, **of[0])  # a rank that attempt 2 does not have
    beat(rundir, 0, 921, 12, **of[1])
    seen = gather(rundir, NOW + timedelta(minutes=13), {})
    assert seen.step == 921
    assert [one.rank for one in seen.beats] == [0]


def test_the_rank_whose_memory_is_at_its_limit_first_is_named(rundir: RunDir) -> None:
    attempt(rundir, 1, 0)
    beat(rundir, 0, 10, 1, attempt="1", memory="0.70", memory_left="30000", gpu_memory="0.5", gpu_memory_left="steady")
    beat(rundir, 1, 10, 1, attempt="1", memory="0.80", memory_left="7200")
    beat(rundir, 2, 10, 1, attempt="1", memory="0.90", memory_left="")
    told = type_in(rundir.root.parent.parent, "status", str(rundir.root)).stdout
    assert "memory    rank 1 on n: 2h until its memory is at the limit at which the guard leaves" in told, told
    assert told.count("memory    ") == 1


def type_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return typed(*words, folder=folder, FTSUPERVISE_STATE_DIR=str(folder / "state"))


@pytest.mark.fault(
    "A command that was started without Slurm runs, and the watch calls the run gone.",
    "An attempt whose supervisor lives on this machine is said to run outside the queue, by both.",
)
def test_status_and_check_agree_about_a_command_that_was_started_by_hand(tmp_path: Path, until: Until) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(SETTINGS)
    env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    argv = [sys.executable, "-m", "ftsupervise", "run", "--", "sleep", "600"]
    by_hand = subprocess.Popen(argv, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    try:
        until(lambda: list(tmp_path.glob("runs/wrapped/attempts/*/start.json")), "the attempt")
        found = json.loads(type_in(tmp_path, "status", ".", "--json").stdout)
        assert (found["verdict"], found["why"]) == ("running", "attempt 1, outside the queue")
        done = type_in(tmp_path, "check", "is-running")
        assert done.returncode == 0, done.stdout
        assert "attempt 1 runs on this machine, outside the queue" in done.stdout
    finally:
        by_hand.kill()
        by_hand.wait(60)
    assert "no job of it is in the queue" in type_in(tmp_path, "status", ".").stdout
    assert type_in(tmp_path, "check", "is-running").returncode == 2


@pytest.mark.fault(
    "The output of the jobs goes elsewhere (`launch.output`), and what is to be typed still names RUN/logs.",
    "`launch` and `status` name the files that the settings name; relative ones start at the settings file.",
)
def test_a_run_that_never_began_names_the_log_that_its_settings_name(rundir: RunDir) -> None:
    (rundir.launches / "0001").mkdir()
    record = {"state": "submitted", "token": "t", "scheduler": "local", "job_ids": ["local-1"]}
    write_json(rundir.launches / "0001/launch.json", record)
    rundir.config.write_text('name: wrapped\nlaunch:\n  output: "/logs of ada/%x-%A_%a.out"\n')
    seen = gather(rundir, NOW, {"FTSUPERVISE_STATE_DIR": str(rundir.root / "state")})
    assert seen.verdict == "GONE"
    assert seen.why.endswith("read what they wrote: tail '/logs of ada/wrapped-'*_*.out")
    rundir.config.write_text("name: wrapped\n")
    seen = gather(rundir, NOW, {"FTSUPERVISE_STATE_DIR": str(rundir.root / "state")})
    assert seen.why.endswith(f"tail {rundir.logs}/*")


def test_what_an_attempt_before_has_saved_is_the_newest_checkpoint_of_one_that_loaded_nothing(
    rundir: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(SETTINGS)
    rundir.config.write_text(SETTINGS)
    parts = {"kind": "cancelled or preempted", "signal": 15}
    attempt(rundir, 1, 1, cause="cancelled or preempted (SIGTERM)", parts=parts, last_step=23, saved=23)
    attempt(rundir, 2, 2, cause="cancelled or preempted (SIGTERM)", parts=parts)
    said = type_in(tmp_path, "status", ".").stdout
    assert "saved     step 23" in said and "(it goes on from step 23)" in said
    assert "| Checkpoint at step | **23** |" in type_in(tmp_path, "report", ".", "--markdown").stdout


def test_equal_ends_are_shown_once_with_their_times_and_after_a_cancel_nothing_failed(
    rundir: RunDir, tmp_path: Path
) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(SETTINGS)
    rundir.config.write_text(SETTINGS)
    failure = {"kind": "code", "sign": "exit 1", "detail": "ValueError: no such shape"}
    for number in (1, 2, 3):
        attempt(rundir, number, number, failure=failure, last_step=7)
    attempt(rundir, 4, 9, cause={"kind": "cancelled or preempted", "signal": 15}, last_step=90, saved=80)
    said = type_in(tmp_path, "status", ".").stdout
    lines = [line for line in said.splitlines() if line.startswith("  attempt")]
    assert lines == [
        "  attempt   1-3 (job -) 11-22 12:01:00, 3 times: exit 1, to step 7: ValueError: no such shape",
        "  attempt   4 (job -) 11-22 12:09:00 cancelled or preempted (SIGTERM) after 0s, to step 90",
    ]
    assert "  last      11-22 12:09:00 UTC, " in said and "attempt 4 ended: cancelled or preempted (SIGTERM)" in said
    assert said.startswith(
        "wrapped: GONE (no job of it is in the queue; attempt 4 ended: cancelled or preempted (SIGTERM))"
    )
    assert "what failed" not in said and f"ftsupervise launch {rundir.root}   (it goes on from step 80)" in said


def test_a_loss_that_is_no_number_is_said_with_its_numbers(rundir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(SETTINGS)
    rundir.config.write_text(SETTINGS)
    rundir.attempt(1).mkdir()
    me, now = processes.process(os.getpid()), datetime.now(timezone.utc)
    assert me is not None
    start: dict[str, object] = {
        "at": (now - timedelta(minutes=1)).isoformat(),
        "host": os.uname().nodename,
        "job_id": "",
    }
    start |= {"pid": me.pid, "pid_start": me.start, "boot_id": processes.boot_id()}
    write_json(rundir.attempt(1) / "start.json", start)
    trouble = LossTrouble(since=61, step=170, words="nan at step 170, since step 61")
    write_beat(rundir, Beat(0, 170, "train", now, 1, "n", {"loss": "nan", "attempt": "1"}, trouble))
    words = "loss is not a number: 110 steps since step 61 (rank 0)"
    assert f"  loss      {words}" in type_in(tmp_path, "status", ".").stdout
    found = json.loads(type_in(tmp_path, "status", ".", "--json").stdout)
    assert (found["verdict"], found["loss_trouble"]) == ("running", words)
