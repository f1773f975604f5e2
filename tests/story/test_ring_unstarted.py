"""No fit nodes: nothing is started. An older attempt that may be at work is not told that it is over by that."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.run import fencing
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import read_brake
from tests.neighbours.supervised import Program, SupervisedRun

Until = Callable[..., Any]
NOW = datetime(2026, 11, 21, 8, tzinfo=timezone.utc)


@pytest.fixture
def rundir(run: SupervisedRun) -> RunDir:
    for folder in (run.rundir.attempt(1), run.rundir.beats, run.rundir.state):
        folder.mkdir(parents=True)
    fencing.begin(run.rundir, 1, {}, print)
    return run.rundir


def member(run: SupervisedRun, *words: str) -> Program:
    """One whose only node is not healthy."""
    return run.start("--health", "echo GPU 3 is gone; exit 2", *words, "--", "true")


def page(rundir: RunDir, **more: object) -> None:
    """The first page of attempt 1: its supervisor is this process."""
    pid = os.getpid()
    here = {
        "host": os.uname().nodename,
        "pid": pid,
        "pid_start": processes.identity(pid),
        "boot_id": processes.boot_id(),
    }
    record = {"attempt": 1, "job_id": "7", "at": NOW.isoformat(), **here, **more}
    (rundir.attempt(1) / "start.json").write_text(json.dumps(record))


def beat(rundir: RunDir, at: datetime) -> None:
    facts = {"attempt": "1"}
    text = json.dumps({"rank": 0, "step": 7, "phase": "train", "at": at.isoformat(), "facts": facts})
    (rundir.beats / "rank-0").write_text(text)


def at_work(rundir: RunDir, lives: bool | None = None) -> int | None:
    return fencing.at_work(rundir, "8", lambda *_: lives, NOW)


def test_an_attempt_is_over_when_its_end_is_on_record_or_nothing_of_it_is_left(rundir: RunDir) -> None:
    page(rundir)
    assert at_work(rundir) == 1
    page(rundir, pid=1, pid_start=0)
    assert at_work(rundir) is None
    beat(rundir, NOW - timedelta(seconds=5))
    assert at_work(rundir) == 1, "its supervisor is gone, a rank on a lost node trains on"
    (rundir.attempt(1) / "end.json").write_text(json.dumps({"ended": NOW.isoformat(), "words": "exit 1"}))
    assert at_work(rundir) is None


def test_an_attempt_on_another_host_is_over_when_slurm_says_that_its_job_is_gone(rundir: RunDir) -> None:
    page(rundir, host="elsewhere")
    assert at_work(rundir, lives=True) == 1
    assert at_work(rundir, lives=None) == 1, "could not ask"
    assert at_work(rundir, lives=False) is None
    page(rundir, host="elsewhere", job_id="8")
    assert at_work(rundir, lives=True) is None, "our own job: Slurm has started it again"


def test_a_member_that_cannot_start_claims_nothing_while_an_older_attempt_is_at_work(
    rundir: RunDir, run: SupervisedRun
) -> None:
    page(rundir)
    one = member(run)
    one.until_said("attempt 1 may still be running; waiting for its end")
    assert [a.number for a in ledger(rundir)] == [1]
    assert (rundir.staging / "0001").is_dir()
    one.send_signal(signal.SIGTERM)
    assert one.wait(30) == 75
    assert [a.number for a in ledger(rundir)] == [1]
    assert (rundir.staging / "0001").is_dir(), "not sealed"


def test_a_member_that_cannot_start_shuts_a_dead_attempt_out_and_its_brake_goes_through_the_fence(
    rundir: RunDir, run: SupervisedRun
) -> None:
    page(rundir, pid=1, pid_start=0)
    one = member(run, "--budget", "start=1")
    assert one.wait(60) == 75, one.said()
    assert [(a.number, a.sign) for a in ledger(rundir)][1:] == [(2, "no node healthy")]
    assert (rundir.staging / "0001").is_file(), "sealed"
    brake = read_brake(rundir)
    assert brake is not None and brake.attempt == 2
