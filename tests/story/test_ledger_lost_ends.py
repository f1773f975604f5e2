"""An attempt that nobody lived to write down the end of, but that had been told to leave."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import WARNING, RunDir
from ftsupervise.rundir.records import write_json

TOLD = datetime(2026, 11, 21, 3, 0, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("told", "ends", "cause"),
    [
        (
            (15, TOLD),
            TOLD + timedelta(seconds=20),
            "time limit, and it did not leave in time",
        ),
        (
            (15, TOLD),
            TOLD - timedelta(seconds=20),
            "time limit, and it did not leave in time",
        ),
        (
            (15, TOLD),
            TOLD + timedelta(hours=9),
            "cancelled or preempted (SIGTERM), and it did not leave in time",
        ),
        ((15, TOLD), None, "cancelled or preempted (SIGTERM), and it did not leave in time"),
        ((15, None), TOLD, "cancelled or preempted (SIGTERM), and it did not leave in time"),
        ((0, TOLD), TOLD, "ended without a record"),
        ("", TOLD, "ended without a record"),
        ("SIGTERM at 2026-11-21 03:00:00 UTC", TOLD, "ended without a record"),
        (None, TOLD, "ended without a record"),
    ],
)
def test_the_cause_of_an_attempt_without_a_last_page_is_what_it_was_told(
    tmp_path: Path, told: tuple[int, datetime | None] | str | None, ends: datetime | None, cause: str
) -> None:
    rundir = RunDir(tmp_path)
    rundir.attempt(1).mkdir(parents=True)
    gone = {"pid": 1 << 22, "pid_start": 1, "boot_id": processes.boot_id(), "host": os.uname().nodename}
    write_json(
        rundir.attempt(1) / "start.json",
        {"attempt": 1, "at": "2026-11-21T02:00:00+00:00", "job_ends": ends.isoformat() if ends else None, **gone},
    )
    if isinstance(told, str):
        (rundir.attempt(1) / WARNING).write_text(told + "\n")
    elif told is not None:
        page = {"signal": told[0], "at": told[1].isoformat() if told[1] is not None else "soon"}
        (rundir.attempt(1) / WARNING).write_text(f"as people read it\n{json.dumps(page)}\n")
    assert ledger(rundir)[0].words == cause
