"""The records of a cron as files: those written before today's code stay readable, and what is damaged takes its default."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.crontab import history
from ftsupervise.crontab.history import RunEnd, RunStart, SlotClaim, SlotEnd
from ftsupervise.crontab.installation import CronDir, Installed, read_installed, stamp, write_installed
from ftsupervise.errors import Error

GOLDEN = Path(__file__).parents[1] / "golden" / "records" / "cron"
NINE = datetime(2026, 11, 21, 9, tzinfo=timezone.utc)
INSTALLED = Installed(
    id="3f9a1c20",
    owner="alice",
    backend="slurm",
    why="a chain of small Slurm jobs, because sbatch is on the PATH",
    python="/opt/py/bin/python",
    period=timedelta(minutes=5),
    spares=3,
    limit=timedelta(minutes=10),
    timezone="Europe/Berlin",
    times={"minutely": "@tick", "hourly": "@hourly", "daily": "@daily", "weekly": "@weekly"},
    keep=50,
    options=("--partition=short", "--mem=1G"),
    job_options=("--partition=short",),
    environment={"HOME": "/home/alice", "PATH": "/opt/py/bin:/usr/bin:/bin", "PS1": "\x1b[1m$ \u200d"},
    alerts={"receivers": {"me": {"email": {"to": ["alice@example.org"]}}}, "repeat": 7200.0},
    alerts_from="/home/alice/ftsupervise.yaml",
    at=NINE,
    since=NINE - timedelta(days=3),
    removed="by alice on login-1, 2026-11-22 10:00 UTC",
    note={"host": "login-1"},
    trusted=("bob",),
    trusted_group="team",
    secret={"https_proxy": "http://me:pa ss@proxy:1"},
)
CLAIM = SlotClaim(NINE + timedelta(seconds=7.25), 7.25, "88", "slurm", "login-1", 4711)
SLOT_END = SlotEnd(
    NINE + timedelta(seconds=9),
    ran=("hourly/disk",),
    skipped=("minutely/long",),
    missed={"daily/report": 2},
    trouble=("no successor for 09:05:00 UTC: down",),
    drained=("node-1", "node-2"),
    submitted=("09:05:00",),
    cancelled=("91",),
)
COMMENT = "ftsupervise-cron:3f9a1c20:entry:hourly.disk:20261121T090000Z"
START = RunStart(NINE + timedelta(seconds=8), 8.125, "login-1", 4711, "88", 2, COMMENT, "/scratch/disk.out", "95")
END = RunEnd(NINE + timedelta(seconds=70), "failed", "exit code 3", 3, 61.5)


@pytest.fixture
def cron(tmp_path: Path) -> CronDir:
    cron = CronDir(tmp_path)
    slot, run = cron.slots / stamp(NINE), cron.runs / "hourly.disk" / stamp(NINE)
    for folder in (slot, run):
        folder.mkdir(parents=True)
    for name, path in {
        "installed.json": cron.installed,
        "secrets.env": cron.secrets,
        "slot-claim.json": slot / "claim.json",
        "slot-end.json": slot / "end.json",
        "run-start.json": run / "start.json",
        "run-end.json": run / "end.json",
    }.items():
        shutil.copy(GOLDEN / name, path)
        path.chmod(0o600)
    return cron


def test_records_written_before_are_read_to_the_last_field(cron: CronDir) -> None:
    assert read_installed(cron) == INSTALLED
    slot = history.read_slot(cron, NINE)
    assert (slot.claim, slot.end) == (CLAIM, SLOT_END)
    (run,) = history.runs(cron, "hourly.disk")
    assert (run.start, run.end) == (START, END)


def test_records_written_now_are_read_to_the_last_field(tmp_path: Path) -> None:
    cron = CronDir(tmp_path)
    cron.state.mkdir()
    least = replace(INSTALLED, removed="", note={}, trusted=(), trusted_group="", secret={})
    for installed in (INSTALLED, least):
        write_installed(cron, installed)
        assert read_installed(cron) == installed
    history.claim_slot(cron, NINE, NINE, "")
    history.end_slot(cron, NINE, SLOT_END)
    assert history.read_slot(cron, NINE).end == SLOT_END
    assert history.read_slot(cron, NINE).claim.late == 0
    folder = history.claim_run(cron, "hourly.disk", NINE, START)
    assert folder is not None
    history.write_end(folder, END)
    (run,) = history.runs(cron, "hourly.disk")
    assert (run.start, run.end) == (START, END)


@pytest.mark.parametrize(
    "field", ["at", "late", "host", "pid", "tick_job", "missed", "job_comment", "output", "job_id"]
)
def test_a_damaged_field_takes_its_default_and_the_others_stay(cron: CronDir, field: str) -> None:
    path = cron.runs / "hourly.disk" / stamp(NINE) / "start.json"
    import json

    path.write_text(json.dumps({**json.loads(path.read_text()), field: [{}]}))
    (run,) = history.runs(cron, "hourly.disk")
    assert run.start == replace(START, **{field: getattr(RunStart(), field)})


@pytest.mark.parametrize("change", ['"period": 300.0', '"spares": 3', '"owner": "alice"', '"at": "2026'])
def test_settings_that_are_damaged_are_an_error_and_never_half_believed(cron: CronDir, change: str) -> None:
    name = change.partition(":")[0]
    for value in ("-1", "[]", "null"):
        text = "".join(
            f" {name}: {value},\n" if line.startswith(f" {name}:") else f"{line}\n"
            for line in (GOLDEN / "installed.json").read_text().splitlines()
        )
        cron.installed.write_text(text)
        with pytest.raises(Error, match="is damaged"):
            read_installed(cron)
