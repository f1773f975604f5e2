"""A run directory as an hour or more of training leaves it: for what draws and measures."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import ProgressPage, write_progress
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.watched import FiringAlert, WatchFound, write_found

NOW = datetime.now(timezone.utc).replace(microsecond=0)


def make_run(folder: Path, name: str = "train", *, ranks: int = 8, failed: int = 1) -> RunDir:
    """A run with ``failed`` attempts that a rank's death ended, an hour each, and one that runs."""
    rundir = RunDir(folder / "runs" / name)
    for part in ("switches", "watch", "beats", "logs", "launches/0001", "state", "attempts", "nodes"):
        (rundir.root / part).mkdir(parents=True)
    rundir.config.write_text(f"name: {name}\n")
    begin = NOW - timedelta(hours=failed + 1)
    launch = {"state": "submitted", "token": "t", "scheduler": "local", "at": begin.isoformat(), "job_ids": ["88"]}
    write_json(rundir.launches / "0001/launch.json", launch)
    for number in range(1, failed + 2):
        at = begin + timedelta(hours=number - 1)
        rundir.attempt(number).mkdir()
        write_json(
            rundir.attempt(number) / "start.json",
            {"attempt": number, "at": at.isoformat(), "job_id": "88_2", "host": "n"},
        )
        if number <= failed:
            over = {
                "ended": (at + timedelta(minutes=50)).isoformat(),
                "exit_code": 1,
                "cause": {"kind": "exit", "code": 1},
                "failure": {"kind": "code", "sign": "exit 1"},
            }
            steps = {"first_step": 100 * number, "last_step": 100 * number + 99, "ready": 60.0, "worked": 2900.0}
            end = {**over, **steps, "saving": 100.0}
            write_json(rundir.attempt(number) / "end.json", end)
    page = ProgressPage(
        at=NOW - timedelta(seconds=4), ranks=ranks, step=1200, ahead=1201, phase="train", first=1000, saved=1100,
        first_at=(NOW - timedelta(minutes=50)).timestamp(), active_at=NOW.timestamp() - 4, saving=30.0, rate=0.5,
        saved_at=NOW - timedelta(minutes=5), usual=0.6, loss=2.25, last_step=4600,
    )  # fmt: skip
    write_progress(rundir.attempt(failed + 1), page)
    alert = FiringAlert("3f9a1c", "critical", "disk", "/scratch: full in 3h", NOW)
    write_found(rundir, WatchFound(NOW, 1, (alert,), "full in 3h", NOW))
    return rundir
