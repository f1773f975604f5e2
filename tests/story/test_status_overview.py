"""All runs of an account in one table: what it needs to know them, one request to Slurm, keys, and no terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ftsupervise.cli.status import record
from ftsupervise.cli.status_live import read_rows
from ftsupervise.report.published import SCHEMA_VERSION, json_schema
from ftsupervise.rundir.heartbeat_page import write_beat
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import ProgressPage, write_progress
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.watched import FiringAlert, WatchFound, read_found, write_found
from ftsupervise.truth import Beat
from tests.manual.status_screens import detail as screen
from tests.neighbours.queue import Queue
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed

Until = Callable[..., Any]
FT = [sys.executable, "-m", "ftsupervise"]
NOW = datetime.now(timezone.utc)
ROOT = Path(__file__).parents[2]


class Desk:
    """An account with runs in its state directory, and a Slurm that counts what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.here = folder, folder / "here"
        self.here.mkdir()
        jobs = {
            "70": {"excluded": [], "comment": "ftsupervise:pretrain:t-pretrain"},
            "80": {"excluded": [], "comment": "ftsupervise:elsewhere:t9"},
        }
        self.queue = Queue(folder, ["node-1"], jobs)
        self.env = outside_a_job(
            **{**self.queue.env, "FTSUPERVISE_STATE_DIR": str(folder / "state"), "SLURM_CONF": "/none"}
        )

    def run(self, name: str, job: str = "") -> RunDir:
        rundir = RunDir(self.folder / "runs" / name)
        for part in ("switches", "watch", "beats", "logs", "launches/0001", "state", "attempts/0001", "nodes"):
            (rundir.root / part).mkdir(parents=True)
        rundir.config.write_text(f"name: {name}\n")
        launch = {
            "state": "submitted",
            "token": f"t-{name}",
            "scheduler": "slurm",
            "at": NOW.isoformat(),
            "job_ids": [job],
        }
        write_json(rundir.launches / "0001/launch.json", launch)
        start = {"attempt": 1, "at": (NOW - timedelta(hours=2)).isoformat(), "host": "n", "job_id": job}
        write_json(rundir.attempt(1) / "start.json", start)
        names = self.folder / "state" / "runs"
        names.mkdir(parents=True, exist_ok=True)
        (names / name).symlink_to(rundir.root)
        return rundir

    def type(self, *words: str, **env: Any) -> subprocess.CompletedProcess[str]:
        return typed(*words, folder=self.here, env=self.env, **env)

    def asked(self) -> list[str]:
        page = self.folder / "queue.json.asked"
        return [line for line in page.read_text().splitlines() if line.startswith("squeue")] if page.exists() else []


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    one = Desk(tmp_path)
    page = ProgressPage(
        at=NOW, ranks=512, step=1000, ahead=1002, phase="train", rate=0.5, usual=1.0, last_step=4600, loss=2.5
    )
    write_progress(one.run("pretrain", "70").attempt(1), page)
    write_found(
        RunDir(tmp_path / "runs" / "pretrain"),
        WatchFound(
            NOW, 1, (FiringAlert("3f9a1c", "critical", "disk", "/scratch: full in 3h", NOW),), "full in 3h", NOW
        ),
    )
    one.run("ablation", "71")
    return one


def test_all_runs_are_shown_by_one_request_those_that_are_only_in_the_queue_too(desk: Desk) -> None:
    done = desk.type("status")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [
        ["RUN", "STATUS"],
        ["ablation", "GONE"],
        ["pretrain", "WAITING"],
        ["elsewhere", "WAITING"],
    ]
    assert "name its directory" in lines[3]
    assert len(desk.asked()) == 1
    rows = {row.name: row for row in read_rows(desk.type("status", "--json").stdout)}
    pretrain = rows["pretrain"]
    assert (pretrain.step, pretrain.loss, pretrain.firing, pretrain.disk) == (1000, 2.5, 1, "full in 3h")
    assert pretrain.alerts[0].watchdog == "disk"
    assert (rows["pretrain"].members_left, rows["ablation"].members_left) == (1, 0)


def test_where_slurm_does_not_answer_runs_are_unknown_with_their_age(desk: Desk) -> None:
    desk.queue.change(away=True)
    page = ProgressPage(at=datetime.now(timezone.utc) - timedelta(minutes=5), ranks=512, step=1000)
    write_progress(desk.folder / "runs/pretrain/attempts/0001", page)
    done = desk.type("status")
    assert done.returncode == 0
    assert [row.verdict for row in read_rows(desk.type("status", "--json").stdout)] == ["UNKNOWN", "UNKNOWN"]
    assert "last seen" in done.stdout
    write_progress(desk.folder / "runs/pretrain/attempts/0001", page._replace(at=datetime.now(timezone.utc)))
    heard = {row.name: (row.verdict, row.why) for row in read_rows(desk.type("status", "--json").stdout)}
    assert heard["ablation"][0] == "UNKNOWN" and heard["pretrain"][0] == "RUNNING"
    assert heard["pretrain"][1] == "its ranks are heard, Slurm does not answer"


@pytest.mark.parametrize(("facts", "phase"), [({"source": "launch.heartbeat"}, ""), ({}, "start")])
def test_a_script_whose_output_shows_no_step_is_not_said_to_be_starting(
    desk: Desk, facts: dict[str, str], phase: str
) -> None:
    desk.queue.change(away=True)
    rundir, now = desk.run("quiet", "72"), datetime.now(timezone.utc)
    write_progress(rundir.attempt(1), ProgressPage(at=now, ranks=1, step=None, phase="start"))
    write_beat(rundir, Beat(0, None, "start", now, facts={"attempt": "1", **facts}))
    (row,) = (row for row in read_rows(desk.type("status", "--json").stdout) if row.name == "quiet")
    assert (row.verdict, row.phase) == ("RUNNING", phase)
    assert ("phase start" in desk.type("status").stdout) is bool(phase)


def test_the_run_of_this_directory_stands_first_and_is_shown_in_full_by_a_dot(desk: Desk) -> None:
    (desk.here / "ftsupervise.yaml").write_text(f"name: pretrain\nrun_dir: {desk.folder}/runs/pretrain\n")
    lines = desk.type("status").stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["RUN", "pretrain", "ablation", "elsewhere"]
    assert lines[1].startswith("pretrain (here)") and "(here)" not in "".join(lines[2:])
    assert desk.type("status", ".").stdout.startswith("pretrain: WAITING")


def test_a_run_that_only_this_directory_knows_stands_first_and_one_not_launched_is_named(desk: Desk) -> None:
    unknown = desk.run("unknown")
    (desk.folder / "state/runs/unknown").unlink()
    settings = desk.here / "ftsupervise.yaml"
    settings.write_text(f"name: unknown\nrun_dir: {unknown.root}\n")
    assert desk.type("status").stdout.splitlines()[1].startswith("unknown (here)")
    in_a_job = desk.type("status", "--json", FTSUPERVISE_RUN_DIR=f"{desk.folder}/runs/pretrain")
    assert [(row.name, row.here) for row in read_rows(in_a_job.stdout)][:2] == [("pretrain", True), ("ablation", False)]
    settings.write_text("name: fresh\n")
    done = desk.type("status")
    assert done.returncode == 0 and "fresh" not in done.stdout
    assert "note: fresh has not been launched yet" in done.stderr


def test_json_keeps_to_the_published_schema(desk: Desk) -> None:
    """With no field that the schema does not name, for one run, for several and for all."""
    strict = jsonschema.Draft202012Validator(json_schema(strict=True), format_checker=jsonschema.FormatChecker())
    for words in ((), ("pretrain",), ("pretrain", "ablation")):
        strict.validate(json.loads(desk.type("status", *words, "--json").stdout))
    full = {"schema_version": SCHEMA_VERSION, **json.loads(json.dumps(record(screen())))}
    strict.validate(full)
    assert full["ledger"][0]["cause"]["kind"] == "exit" and full["time"]["goodput"]["least"] > 0.5
    for damage in ({"step": "7"}, {"schema_version": 2}, {"time": None}, {"at": 7}):
        assert not strict.is_valid({**full, **damage}), damage
    printed = json.loads(desk.type("status", "--schema").stdout)
    assert printed == json_schema()
    assert not strict.is_valid({**full, "later": 1}) and jsonschema.Draft202012Validator(printed).is_valid(
        {**full, "later": 1}
    )


def test_the_schema_in_the_repository_is_the_one_that_status_prints() -> None:
    page = ROOT / "docs" / "status.schema.json"
    text = json.dumps(json_schema(), ensure_ascii=False, indent=1) + "\n"
    if os.environ.get("UPDATE_MANUAL"):
        page.write_text(text)
    assert page.read_text() == text, "rewrite it: UPDATE_MANUAL=1 pytest tests/story/test_status_overview.py"


def test_an_account_without_runs_is_told_how_to_begin(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.queue.change(jobs={})
    assert "ftsupervise launch" in desk.type("status").stdout
    assert desk.type("list").stdout == ""


def test_list_is_for_scripts(desk: Desk) -> None:
    at = desk.folder / "runs"
    assert desk.type("list").stdout == f"ablation\t{at}/ablation\npretrain\t{at}/pretrain\n"
    assert [one["name"] for one in json.loads(desk.type("list", "--json").stdout)["runs"]] == ["ablation", "pretrain"]
    assert desk.asked() == []
    told = desk.type("list", "--status").stdout
    assert told == f"ablation\t{at}/ablation\tGONE\npretrain\t{at}/pretrain\tWAITING\n"
    listed = json.loads(desk.type("list", "--status", "--json").stdout)["runs"]
    assert [one["verdict"] for one in listed] == ["gone", "waiting"]


@pytest.mark.threat(
    "Somebody writes into the page of the watch that `status` shows.",
    "A page that others may write is not believed.",
)
def test_a_page_of_the_watch_by_a_stranger_is_not_believed(desk: Desk) -> None:
    rundir = RunDir(desk.folder / "runs" / "pretrain")
    assert read_found(rundir) is not None
    (rundir.watch / "found.json").chmod(0o666)
    assert read_found(rundir) is None


def test_the_watch_writes_down_what_it_found(desk: Desk) -> None:
    settings = desk.folder / "ftsupervise.yaml"
    settings.write_text(
        f"name: ablation\nrun_dir: {desk.folder}/runs/ablation\nscheduler: slurm\nlaunch: {{command: a}}\n"
        "watch: {hang: null, disk: null}\n"
    )
    assert desk.type("watch", str(settings), "--no-send").returncode in (0, 1, 2)
    desk.type("watch", str(settings))
    found = read_found(RunDir(desk.folder / "runs" / "ablation"))
    assert found is not None
    assert "is-running" in {one.watchdog for one in found.alerts}
    assert found.firing == len(found.alerts)


# ------------------------------------------------------------------------------------------------------------ --watch


class Terminal:
    """``status --watch`` on a terminal of 24 lines and 80 columns."""

    def __init__(self, desk: Desk, *words: str) -> None:
        self._parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = {**desk.env, "TERM": "xterm-256color", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [*FT, "status", "--watch", *words], cwd=desk.here, env=env, stdin=child, stdout=child, stderr=child
        )
        os.close(child)
        self.shown = ""

    def until(self, text: str, seconds: float = 40.0) -> None:
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, f"{text!r} is not in {self.shown[-3000:]!r}"
            if select.select([self._parent], [], [], 0.2)[0]:
                self.shown += os.read(self._parent, 65_536).decode("utf-8", "replace")

    def key(self, text: str) -> None:
        self.shown = ""
        os.write(self._parent, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        os.close(self._parent)


@pytest.fixture
def terminal(desk: Desk) -> Iterator[Terminal]:
    one = Terminal(desk)
    yield one
    one.close()


def test_keys_choose_a_run_show_it_and_lead_back(terminal: Terminal) -> None:
    terminal.until("pretrain")
    terminal.key("\x1b[B\r")
    terminal.until("pretrain: WAITING")
    terminal.until("Enter back")
    terminal.key("\x1b")
    terminal.until("Enter one run")
    terminal.key("q")
    terminal.until("\x1b[?1049l")
    assert terminal.process.wait(20) == 0


def test_without_a_terminal_the_lines_come_again_and_again(desk: Desk, until: Until) -> None:
    out = desk.folder / "out"
    with out.open("w") as file:
        watch = subprocess.Popen([*FT, "status", "--watch", "--every", "5"], cwd=desk.here, env=desk.env, stdout=file)
    try:
        until(lambda: out.read_text().count("pretrain") >= 2, "two looks")
        assert "\x1b" not in out.read_text()
    finally:
        watch.kill()
        watch.wait(20)
