"""``status`` says who has cancelled a job where Slurm's accounting tells it, and nothing false where it does not."""

from __future__ import annotations

import json
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from tests.neighbours.typed import typed

AT = datetime.now(timezone.utc) - timedelta(hours=1)
CANCELLED = {"cause": {"kind": "cancelled or preempted", "signal": 15}}
UNSAID = "cancelled or preempted (SIGTERM)"
# what sacct of a job answers, as Slurm 22.05 does with --parsable2 -> the words of the end
KNOWN = {
    "echo '88_1|CANCELLED by 0'": "cancelled by root (SIGTERM)",
    "echo '88_1|CANCELLED by 4000123'": "cancelled by uid 4000123 (SIGTERM)",
    "echo '88_1|PREEMPTED'": "preemption",
    "echo '88_1|TIMEOUT'": "time limit",
    "echo '88_1|FAILED'": "asked to stop (SIGTERM)",
    "echo '88_1|RUNNING'": UNSAID,
    "echo '88_1|CANCELLED'": UNSAID,
    "echo '88_2|CANCELLED by 0'": UNSAID,
    "echo 'Slurm accounting storage is disabled' >&2; exit 1": UNSAID,
    "echo 'sacct: error: slurmdbd: Connection refused' >&2; exit 1": UNSAID,
    "head -c 3000 /dev/urandom": UNSAID,
    "sleep 300": UNSAID,
}


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder, self.rundir = folder, RunDir(folder / "runs" / "r")
        for part in (self.rundir.switches, self.rundir.state, self.rundir.launches / "0001", self.rundir.attempts):
            part.mkdir(parents=True)
        self.rundir.config.write_text(
            f"name: r\nrun_dir: {self.rundir.root}\nscheduler: slurm\nlaunch: {{command: a}}\n"
        )
        record = {"state": "submitted", "token": "t", "scheduler": "slurm", "job_ids": ["88"], "at": AT.isoformat()}
        write_json(self.rundir.launches / "0001/launch.json", record)
        for name in ("squeue", "sinfo", "scontrol"):
            self.program(name, "exit 0")

    def program(self, name: str, does: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{does}\n")
        path.chmod(0o755)

    def attempt(self, number: int, job: str, **end: object) -> None:
        folder = self.rundir.attempt(number)
        folder.mkdir()
        at = AT + timedelta(minutes=number)
        write_json(folder / "start.json", {"attempt": number, "at": at.isoformat(), "host": "n", "job_id": job})
        if end:
            write_json(folder / "end.json", {"ended": (at + timedelta(seconds=30)).isoformat(), **end})

    def says(self, *words: str) -> str:
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        state = str(self.folder / "state")
        return typed(*words, folder=self.folder, PATH=path, FTSUPERVISE_STATE_DIR=state, COLUMNS="300").stdout


def sacct(place: Place, answer: str) -> None:
    """A sacct that gives ``answer`` for the states of jobs; what is asked about starts beside it is long ago."""
    place.program("sacct", f"case \"$*\" in *JobID,Start*) echo '88_1|1000000000'; exit;; esac; {answer}")


@pytest.mark.parametrize("answer", KNOWN)
def test_who_cancelled_a_job_stands_in_status_where_the_accounting_knows_it(tmp_path: Path, answer: str) -> None:
    place = Place(tmp_path)
    place.attempt(1, "88_1", **CANCELLED, last_step=40)
    sacct(place, answer)
    first, *lines = place.says("status", str(place.rundir.root)).splitlines()
    words = KNOWN[answer]
    assert first == f"r: GONE (no job of it is in the queue; attempt 1 ended: {words}), step 40"
    assert any(line.startswith("  last ") and line.endswith(f"ago: attempt 1 ended: {words}") for line in lines), lines
    assert any(line.startswith("  attempt   1 (job 88_1)") and f"{words} after 30s" in line for line in lines), lines


def test_the_table_the_report_and_programs_say_the_same(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.attempt(1, "88_1", **CANCELLED)
    place.attempt(2, "88_1", **CANCELLED)  # Slurm had put the job back: who asked the first to stop is not known
    sacct(place, "echo '88_1|CANCELLED by 0'")
    root = str(place.rundir.root)
    (tmp_path / "state" / "runs").mkdir(parents=True)
    (tmp_path / "state" / "runs" / "r").symlink_to(root)
    assert "attempt 2 ended: cancelled by root (SIGTERM)" in place.says("status").split("STATUS")[1]
    assert json.loads(place.says("status", root, "--json"))["why"].endswith("cancelled by root (SIGTERM)")
    report = place.says("report", root, "--markdown")
    assert "| 2 | cancelled by root (SIGTERM) |" in report and "| 1 | cancelled or preempted (SIGTERM) |" in report


def test_the_page_of_a_week_says_it_too_and_asks_once_for_all_its_runs(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.attempt(1, "88_1", **CANCELLED, last_step=40)
    sacct(place, f"echo >> {tmp_path}/asked; echo '88_1|CANCELLED by 0'")
    page = tmp_path / "week.html"
    said = place.says("report", "--week", "--markdown", str(place.rundir.root))
    assert "cancelled by root (SIGTERM)" in said, said
    asked = len((tmp_path / "asked").read_text().splitlines())
    assert asked == 2, "the overview asks once, the page once"
    place.says("report", "--week", "-o", str(page), str(place.rundir.root))
    assert f"no job waits to go on: ftsupervise launch {place.rundir.root}" in page.read_text()


def test_the_message_that_a_run_is_gone_says_who_cancelled_its_job_and_does_not_ask_for_ever(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.attempt(1, "88_1", **CANCELLED, last_step=40)
    asked = tmp_path / "asked"

    def tick() -> str:
        said = place.says("watch", str(place.rundir.root))
        return next(line for line in said.splitlines() if "is-running:" in line)

    gone = "no job of this run is running or waiting; attempt 1 ended: "
    sacct(place, f"echo >> {asked}; echo '88_1|RUNNING'")  # the accounting learns of an end late
    assert tick().endswith(gone + UNSAID)
    sacct(place, f"echo >> {asked}; echo '88_1|CANCELLED by 0'")
    assert tick().endswith(gone + "cancelled by root (SIGTERM)")
    sacct(place, f"echo >> {asked}; exit 1")
    assert tick().endswith(gone + "cancelled by root (SIGTERM)"), "it is remembered"
    assert len(asked.read_text().splitlines()) == 2


@pytest.mark.parametrize(("answer", "times"), [("echo '88_1|RUNNING'", 3), ("exit 1", 1)])
def test_the_watch_asks_the_accounting_for_a_few_ticks_and_once_where_there_is_none(
    tmp_path: Path, answer: str, times: int
) -> None:
    place = Place(tmp_path)
    place.attempt(1, "88_1", **CANCELLED, last_step=40)
    asked = tmp_path / "asked"
    sacct(place, f"echo >> {asked}; {answer}")
    for _ in range(5):
        assert f"attempt 1 ended: {UNSAID}" in place.says("watch", str(place.rundir.root))
    assert len(asked.read_text().splitlines()) == times


def test_an_end_without_a_record_has_slurms_word_for_it(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.attempt(1, "88_1")
    write_json(place.rundir.attempt(1) / "lost.json", {"words": ""})
    sacct(place, "echo '88_1|NODE_FAIL'")
    start = json.loads((place.rundir.attempt(1) / "start.json").read_text())
    write_json(place.rundir.attempt(1) / "start.json", {**start, "host": os.uname().nodename, "pid": 1, "pid_start": 1})
    said = place.says("status", str(place.rundir.root))
    assert "attempt   1 (job 88_1)" in said and "ended without a record: Slurm says NODE_FAIL" in said, said


def test_nothing_is_asked_of_a_run_that_nobody_has_cancelled(tmp_path: Path) -> None:
    place = Place(tmp_path)
    failed = {"cause": {"kind": "exit", "code": 1}, "failure": {"kind": "code", "sign": "exit 1"}}
    place.attempt(1, "88_1", **failed)
    sacct(place, f"touch {tmp_path}/asked")
    place.says("status", str(place.rundir.root))
    assert not (tmp_path / "asked").exists()
