"""The screens of ``status`` for docs/status.md, drawn by the program of a made-up account: values in, lines out."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ftsupervise.cli.status import lines_of
from ftsupervise.cli.status_rows import advice, table
from ftsupervise.model import Attempt, Cause, CauseKind, Failure, FailureKind, Job, JobState
from ftsupervise.report import Status
from ftsupervise.report.detail import RunDetail, account_of
from ftsupervise.report.placing import placed
from ftsupervise.report.queues import QueueSeen
from ftsupervise.report.reading import RunReading, WatchSeen
from ftsupervise.report.row import RunRow, row_of
from ftsupervise.rundir.launches import LaunchRecord
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import ProgressPage, StepRecord
from ftsupervise.rundir.watched import FiringAlert, WatchFound
from ftsupervise.truth import Health, OutputPart, SwitchState
from ftsupervise.watch.tour import EventLine

NOW = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)
RUN = RunDir("/scratch/ada/train-10b")
EVENT = EventLine(
    at=NOW,
    run="train-10b",
    directory=str(RUN.root),
    event="fired",
    severity="critical",
    watchdog="is-running",
    subject="queue",
    summary="no job of train-10b is in the queue",
    since=NOW - timedelta(minutes=5),
    alert="3f9a1c",
)


def before(**ago: float) -> datetime:
    return NOW - timedelta(**ago)


def detail() -> RunDetail:
    """A run that lost a rank to the hardware half a day ago and waited for its next job."""
    fault = Failure(FailureKind.CODE, "exit 1", "uncorrectable ECC error encountered", "RuntimeError")
    log = str(RUN.logs / "train-10b-88_2.out")
    first = Attempt(
        number=1,
        job_id="88_1",
        started=before(hours=23),
        ended=before(hours=10.8),
        exit_code=1,
        cause=Cause(CauseKind.EXIT, code=1),
        failure=fault,
        first_step=1,
        last_step=4360,
        saved=4200,
        ready=310.0,
        saving=900.0,
        worked=43_500.0,
    )
    second = Attempt(
        number=2,
        job_id="88_2",
        started=before(hours=9.5),
        first_step=4201,
        last_step=7580,
        saved=7500,
        ready=280.0,
        saving=700.0,
        worked=34_190.0,
        outputs=(OutputPart(log),),
    )
    page = ProgressPage(
        at=before(seconds=3),
        ranks=512,
        step=7580,
        ahead=7580,
        phase="train",
        active_at=before(seconds=8).timestamp(),
        first=4201,
        saved=7500,
        saved_at=before(minutes=13),
        rate=0.098,
        usual=0.101,
        loss=2.3144,
        last_step=100_000,
    )
    running = Job("88_2", "88", "train-10b", "ada", JobState.RUNNING, nodes=tuple(f"node-{n}" for n in range(1, 65)))
    rest = Job("88_[3-10%1]", "88", "train-10b", "ada", JobState.PENDING, "JobArrayTaskLimit")
    jobs = running._replace(end_time=NOW + timedelta(hours=10.5)), rest
    switches = tuple(SwitchState(name, Health.OK) for name in ("kill-switch", "save-switch"))
    launch = LaunchRecord(1, "submitted", "t", before(hours=24), scheduler="slurm", job_ids=("88",))
    alert = FiringAlert("3f9a1c", "warning", "disk", "/scratch: full in 2d 6h at 1.3 TB a day (24h)", before(hours=2))
    found = WatchFound(
        before(seconds=40), 1, (alert,), "full in 2d 6h at 1.3 TB a day (24h)", before(seconds=40), judges=("hang",)
    )
    run = RunReading(
        name="train-10b",
        rundir=RUN,
        at=NOW,
        records=(launch,),
        attempts=(first, second),
        not_read=0,
        page=page,
        beats=(),
        switches=switches,
        finished=False,
        brake="",
        held_by_us=False,
        restarts=1,
        watch=WatchSeen(found, NOW + timedelta(seconds=20)),
    )
    row = row_of(run, QueueSeen(jobs))
    status = Status(run, "RUNNING", "job 88_2", jobs, "")
    spent = account_of(status)
    return RunDetail(status, row, spent, ("node-17",), Path(log), placed(spent.stretches, StepRecord()))


def rows() -> tuple[RunRow, ...]:
    dead = RunRow("ablation-3", why="/dead/ablation-3 has not answered for 4 s", seen_at=before(hours=2))
    done = RunRow("tokenizer", verdict="FINISHED", step=20_000, loss=1.873, saved=20_000)
    stopped = RunRow(
        "sft-10b", verdict="STOPPED", why="kill switch, raised by grace: wrong data", step=812, members_left=3
    )
    return (dead, detail().row._replace(disk=""), stopped, done)


def screens() -> dict[str, str]:
    """name of a block -> its text."""
    one, every = lines_of(detail(), 80), [*table(rows(), NOW, 140), *advice(rows(), 140)]
    return {name: _plain(lines) for name, lines in (("status-one", one), ("status-all", every))}


def _plain(lines: list[str]) -> str:
    return "\n".join(re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines) + "\n"
