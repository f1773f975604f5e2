"""An attempt that nobody lived to write down the end of, but that had been told to leave."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.heartbeat_page import write_beat
from ftsupervise.rundir.ledger import keep_reached, ledger
from ftsupervise.rundir.paths import WARNING, RunDir
from ftsupervise.rundir.progress import ProgressPage, write_progress
from ftsupervise.rundir.records import write_json
from ftsupervise.truth import Beat

TOLD = datetime(2026, 11, 21, 3, 0, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("told", "ends", "cause"),
    [
        (
            (15, TOLD),
            TOLD + timedelta(seconds=5),
            "time limit, and it did not leave in time",
        ),
        (
            (15, TOLD),
            TOLD + timedelta(seconds=24),  # within the warning, and before the end
            "cancelled or preempted (SIGTERM), and it did not leave in time",
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


@pytest.mark.fault(
    "The supervisor is killed and its last page is seconds old",
    "The next one keeps how far the ranks' own beats say that it came",
)
def test_how_far_a_lost_attempt_came_is_kept_before_the_next_ones_beats_take_the_place_of_its_own(
    tmp_path: Path,
) -> None:
    rundir = RunDir(tmp_path)
    for folder in (rundir.attempt(1), rundir.beats):
        folder.mkdir(parents=True)
    write_json(rundir.attempt(1) / "start.json", {"attempt": 1, "at": TOLD.isoformat(), "host": "elsewhere"})
    page = ProgressPage(TOLD + timedelta(seconds=10), 2, 100, 101, first=1, first_at=TOLD.timestamp() + 2, saving=1.0)
    write_progress(rundir.attempt(1), page._replace(active_at=TOLD.timestamp() + 9.9))

    def beat(rank: int, attempt: int, step: int, seconds: float) -> None:
        facts = {"attempt": str(attempt), "first": "1", "saving": "1.5", "saved": "130"}
        write_beat(rundir, Beat(rank, step, "train", TOLD + timedelta(seconds=seconds), facts=facts))

    beat(0, 1, 140, 14)
    beat(1, 1, 139, 13.8)
    keep_reached(rundir, 1)
    beat(0, 2, 131, 30)
    beat(1, 2, 131, 30)
    keep_reached(rundir, 1)  # another start of the next one finds nothing newer
    (one,) = ledger(rundir)
    assert (one.first_step, one.last_step, one.saved, one.saving, one.worked) == (1, 140, 130, 1.5, 14.0)
    assert one.heard == TOLD + timedelta(seconds=14)
    write_json(rundir.attempt(1) / "end.json", {"ended": TOLD.isoformat(), "exit_code": 0})
    before = (rundir.attempt(1) / "progress.json").read_text()
    beat(0, 1, 999, 60)
    keep_reached(rundir, 1)
    keep_reached(rundir, 0)
    assert (rundir.attempt(1) / "progress.json").read_text() == before, "it has an end on record"
