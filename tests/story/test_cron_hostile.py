"""Secrets, odd files and modules in the wrong place: none of it leaves the cron folder, holds a tick, or runs."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from ftsupervise.crontab import history
from ftsupervise.crontab.chain import command, script
from ftsupervise.crontab.status import gather
from ftsupervise.crontab.tick import tick
from ftsupervise.host import processes
from ftsupervise.model import Submitted
from tests.story.cron_folder import NINE, FakeQueue, Folder, make
from tests.story.test_cron_tick import alerts_to

P5 = timedelta(minutes=5)
PROXY = "http://ada:hunter2@proxy.example:3128"
HOOK = "https://hooks.slack.com/services/T000/B000/" + "x" * 24
HOSTILE = "import os; os.write(2, b'HOSTILE CODE RAN\\n'); raise SystemExit(3)\n"


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return make(tmp_path)


# --------------------------------------------------------------------------------------------------------- secrets


class Recording(FakeQueue):
    """A queue that keeps the environment of what is submitted, as slurmctld does."""

    def submit(self, script: str, **more: object) -> Submitted:
        self.__dict__.setdefault("environments", []).append(more["env"])
        return super().submit(script, **more)  # type: ignore[arg-type]


@pytest.fixture
def secretive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv("https_proxy", PROXY)
    monkeypatch.setenv("TELLING", HOOK)
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    found = make(tmp_path, backend="slurm", env=("TELLING",))
    found.queue = Recording(jobs=found.queue.jobs, scripts=found.queue.scripts)
    return found


@pytest.mark.threat(
    "The environment at `cron install` holds a password.",
    "Secrets, known by name or value, are kept in a separate file. Entries still get them.",
)
def test_no_secret_stands_in_the_settings_that_install_wrote_and_entries_have_them_all_the_same(
    secretive: Folder,
) -> None:
    text = secretive.cron.installed.read_text()
    assert "hunter2" not in text
    assert "hooks.slack.com" not in text
    assert json.loads(text)["environment"]["http_proxy"] == "http://proxy.example:3128"
    assert stat.S_IMODE(secretive.cron.installed.stat().st_mode) == 0o600
    assert stat.S_IMODE(secretive.cron.secrets.stat().st_mode) == 0o600
    assert stat.S_IMODE(secretive.cron.state.stat().st_mode) == 0o700
    secretive.drop("minutely", "env", 'echo "$https_proxy $TELLING"')
    secretive.tick(NINE, slot=NINE, job_id="1")
    assert secretive.output("minutely.env") == f"{PROXY} {HOOK}\n"


@pytest.mark.threat(
    "A secret would stand in the environment of a job, which Slurm keeps.",
    "sbatch does not get the secret. A dropped shell script reads it from the file.",
)
def test_no_secret_is_given_to_slurm_and_a_dropped_shell_script_has_them_all_the_same(secretive: Folder) -> None:
    secretive.drop("minutely", "report.slurm", 'echo "$https_proxy $TELLING"')
    (secretive.cron.folder("minutely") / "other.slurm").write_text("#!/usr/bin/env python3\nprint(1)\n")
    secretive.tick(NINE, slot=NINE, job_id="1")
    environments = secretive.queue.__dict__["environments"]
    assert len(environments) == 3  # two scripts and a successor
    assert "hunter2" not in str(environments)
    assert "hooks.slack.com" not in str(environments)
    scripts = sorted(secretive.cron.runs.glob("*/2*/job.sbatch"))
    assert len(scripts) == 2
    for one in scripts:
        assert "hunter2" not in one.read_text()
    assert "secrets.env" not in scripts[0].read_text()  # Python reads no such lines
    done = subprocess.run(["/bin/sh", scripts[1]], env={}, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == f"{PROXY} {HOOK}\n"


def test_an_install_without_the_secret_takes_the_file_away(
    secretive: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("https_proxy")
    monkeypatch.delenv("TELLING")
    make(tmp_path, backend="slurm")
    assert not secretive.cron.secrets.exists()
    assert secretive.installed.secret == {}


# --------------------------------------------------------------------------------------------------------- modules


@pytest.mark.threat(
    "A module such as `click.py` lies where a tick, a line of a table or the keep-alive starts.",
    "Each of them starts with a safe module path, and a tick on Slurm starts in `state/`.",
)
def test_no_module_in_the_current_directory_is_run_by_a_tick_a_table_or_the_keep_alive(
    folder: Folder, tmp_path: Path
) -> None:
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    for name in ("click", "signal", "json", "yaml", "ftsupervise", "sitecustomize"):
        (hostile / f"{name}.py").write_text(HOSTILE)
    folder.drop("minutely", "check", "echo x")
    slot = tmp_path / "tick.sbatch"
    slot.write_text(script(folder.cron, folder.installed))
    for argv in (
        command(folder.cron, folder.installed),
        ("/bin/sh", str(slot), "1795252200"),
        tuple(processes.own_command("cron", "ensure", "--run", str(tmp_path / "no-run"))),
    ):
        env = {**os.environ, "SLURM_JOB_ID": "7"}
        done = subprocess.run(argv, cwd=hostile, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert "HOSTILE" not in done.stderr + "".join(path.read_text() for path in folder.cron.log.iterdir()), argv
    assert f"#SBATCH --chdir={folder.cron.state}\n" in slot.read_text()
    assert len(history.slots(folder.cron)) >= 1, "and they did tick"


@pytest.mark.threat("PATH has a relative part when cron is installed.", "`cron install` does not record that part.")
def test_a_relative_part_of_the_path_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f".:bin:{os.environ['PATH']}:")
    path = make(tmp_path).installed.environment["PATH"].split(":")
    assert all(part.startswith("/") for part in path)


# ------------------------------------------------------------------------------------------------------- odd files


@pytest.mark.threat(
    "A FIFO, a device, a broken link or a name with escape sequences lies in a cron folder.",
    "Cron skips it, does not wait, and prints its name without control characters.",
)
def test_odd_files_in_the_folders_hold_nobody_and_are_printed_harmlessly(folder: Folder) -> None:
    folder.drop("minutely", "good", "echo x")
    for name in ("hourly", "minutely"):
        place = folder.cron.folder(name)
        os.mkfifo(place / "fifo.slurm")
        (place / "\x1b]0;title\x07\nodd").write_text("#!/bin/sh\n")
        (place / "huge.slurm").write_bytes(b"#!/bin/sh\n" + b"x" * 3_000_000)
        (place / "zero.slurm").symlink_to("/dev/zero")
        (place / "nowhere").symlink_to("nowhere-at-all")
        (place / os.fsdecode(b"\xff\xfe")).mkdir()
    folder.cron.crontab.unlink()
    os.mkfifo(folder.cron.crontab)
    done = folder.tick(NINE)
    assert "minutely/good" in done.worked.ran
    seen = gather(folder.cron, folder.installed, None, NINE)
    told = "".join(one.name + one.why for one in seen.passed)
    assert "crontab" in told
    assert told.isprintable()


@pytest.mark.threat(
    "An entry of cron prints escape sequences and fails.",
    "The alert shows the end of its output without control characters.",
)
def test_escape_sequences_in_the_output_of_an_entry_do_not_reach_those_who_are_told(tmp_path: Path) -> None:
    folder = make(tmp_path, alerts=alerts_to(tmp_path / "heard"))
    folder.drop("minutely", "check", r"printf '\033]0;owned\007 the disk \342\200\256 is full\n'; exit 1")
    folder.tick(NINE)
    heard = (tmp_path / "heard").read_text()
    assert "the disk" in heard
    assert all(char == "\n" or char.isprintable() for char in heard)


@pytest.mark.fault(
    "A crontab file of megabytes, thousands of files in one cron folder",
    "reading is bounded, and what is passed over is said",
)
def test_a_huge_table_and_a_crowded_folder_are_bounded_and_said(folder: Folder) -> None:
    folder.cron.crontab.write_bytes(b"@tick true\n" * 200_000)
    for n in range(1200):
        (folder.cron.folder("hourly") / f"note-{n}.txt").touch()
    folder.drop("minutely", "good", "echo x")
    done = folder.tick(NINE)
    assert done.worked.ran == ("minutely/good",)
    told = "; ".join(f"{one.name} {one.why}" for one in gather(folder.cron, folder.installed, None, NINE).passed)
    assert "larger than 1000000 bytes" in told
    assert "1200 files" in told


@pytest.mark.fault(
    "A record of cron is nonsense: infinite numbers, times without a zone or outside of the calendar",
    "it is read as nothing, and the entry runs",
)
@pytest.mark.parametrize(
    "start",
    [
        '{"at": "2026-11-21T09:00:00", "late": 1e309, "pid": 1e309, "missed": -1e400}',
        '{"at": "9999-12-31T23:59:59-14:00", "pid": "x", "late": null, "host": 3, "job_id": [1]}',
        '{"at": {"a": 1}, "missed": NaN, "late": NaN}',
        "[" * 100_000,
        "\0",
    ],
)
def test_records_of_nonsense_stop_no_entry(folder: Folder, start: str) -> None:
    folder.drop("minutely", "good", "echo x")
    ran = folder.cron.runs / "minutely.good" / "20261121T085500Z"
    ran.mkdir(parents=True)
    (ran / "start.json").write_text(start)
    (ran / "end.json").write_text('{"outcome": "ok", "code": 1e300, "seconds": "x"}')
    (ran.parent / "since").write_text("2026-11-21T09:00:00")
    slot = folder.cron.slots / "20261121T085500Z"
    slot.mkdir(parents=True)
    (slot / "claim.json").write_text('{"late": NaN, "job_id": 5}')
    (slot / "end.json").write_text(start)
    done = folder.tick(NINE)
    assert done.worked.ran == ("minutely/good",)
    assert not done.trouble
    gather(folder.cron, folder.installed, None, NINE + P5)


def test_a_run_whose_end_is_nonsense_holds_its_entry_no_longer_than_its_bound(folder: Folder) -> None:
    folder.drop("minutely", "good", "echo x")
    ran = folder.cron.runs / "minutely.good" / "20261121T085500Z"
    ran.mkdir(parents=True)
    (ran / "end.json").write_text('{"outcome": "ok", "seconds": NaN}')
    assert folder.tick(NINE).worked.skipped == ("minutely/good",)
    assert folder.tick(NINE + P5 * 2).worked.ran == ("minutely/good",)


@pytest.mark.fault(
    "A clock that was wrong left slots of another century",
    "they do not pass for the newest, and cost no time",
)
def test_slots_of_another_century_are_not_the_newest_and_cost_no_time(folder: Folder) -> None:
    for name in ("99991231T235500Z", "00010101T000000Z", "20991231T235500Z"):
        (folder.cron.slots / name).mkdir(parents=True)
    folder.tick(NINE)
    seen = gather(folder.cron, folder.installed, None, NINE + timedelta(seconds=5))
    assert seen.verdict == "ALIVE"
    assert seen.slots.last is not None
    assert seen.slots.last.at == NINE
    assert gather(folder.cron, folder.installed, None, NINE + timedelta(hours=1)).verdict == "DEAD"


@pytest.mark.threat(
    "A FIFO or a link lies in the place of an output or a record of cron.",
    "Cron neither waits for it nor writes through it.",
)
def test_what_lies_in_place_of_an_output_or_a_record_holds_no_tick(folder: Folder) -> None:
    folder.drop("minutely", "good", "echo x")
    place = folder.cron.runs / "minutely.good"
    place.mkdir(parents=True)
    os.mkfifo(place / "since")
    assert folder.tick(NINE).worked.ran == ("minutely/good",)
    ran = history.claim_run(folder.cron, "minutely.good", NINE + P5, history.RunStart(at=NINE))
    assert ran is not None
    from ftsupervise.crontab.dispatch import BoundedOutput

    os.mkfifo(ran / "output")
    output = BoundedOutput(ran / "output", 1000)
    output.write(b"x")
    output.close()
    (ran / "output").unlink()
    (ran / "output").symlink_to(folder.cron.root / "stolen")
    output = BoundedOutput(ran / "output", 1000)
    output.write(b"x")
    output.close()
    assert not (folder.cron.root / "stolen").exists()


@pytest.mark.fault("A folder lies among the logs of ticks", "the others are cleared all the same")
def test_a_folder_among_the_logs_does_not_keep_the_others_from_being_cleared(folder: Folder) -> None:
    (folder.cron.log / "job-0").mkdir()
    for n in range(1, 80):
        (folder.cron.log / f"job-{n}").write_text("words\n")
    folder.tick(NINE)
    assert len(list(folder.cron.log.iterdir())) == 51


def test_a_settings_file_that_is_no_file_is_an_error_and_no_wait(folder: Folder) -> None:
    folder.cron.installed.unlink()
    os.mkfifo(folder.cron.installed)
    from ftsupervise.errors import Error

    with pytest.raises(Error, match=r"installed\.json"):
        tick(folder.cron, slot=None, now=NINE, slurm=lambda _: folder.queue, jobs=lambda _: folder.queue)
