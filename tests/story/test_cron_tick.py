"""Ticks with a fake clock over a real folder: what runs, what is skipped, what is owed, what people are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from ftsupervise.config.alerting import Alerts
from ftsupervise.crontab import history
from ftsupervise.crontab.status import gather
from ftsupervise.model import JobState
from ftsupervise.rundir.heartbeat_page import watchers
from ftsupervise.rundir.paths import RunDir
from tests.story.cron_folder import NINE, Folder, make

P5 = timedelta(minutes=5)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return make(tmp_path)


def alerts_to(path: Path) -> Alerts:
    return Alerts.model_validate_json(json.dumps({"receivers": [{"file": {"path": str(path)}}]}))


def test_a_dropped_executable_runs_at_its_next_slot_and_its_output_is_where_status_says(folder: Folder) -> None:
    folder.drop("hourly", "hello.sh", 'echo "hello at $FTSUPERVISE_CRON_SLOT"; echo oh >&2')
    assert folder.tick(NINE).worked.ran == ("hourly/hello.sh",)
    assert folder.tick(NINE + P5).worked.ran == ()
    seen = gather(folder.cron, folder.installed, None, NINE + P5)
    (entry,) = seen.entries
    assert entry.last is not None
    assert entry.last.output.read_text() == "hello at 2026-11-21T09:00:00+00:00\noh\n"
    assert (entry.word, entry.last.end.code) == ("ok", 0)
    assert entry.next == NINE + timedelta(hours=1)


def test_a_slot_works_once_however_often_it_is_started(folder: Folder) -> None:
    folder.drop("minutely", "count", "echo x")
    done = [folder.tick(NINE + timedelta(seconds=n)).claimed for n in range(4)]
    assert done == [True, False, False, False]
    assert len(folder.runs("minutely.count")) == 1


def test_a_job_that_comes_late_does_the_work_of_the_slot_that_is_now(folder: Folder) -> None:
    """A queue that is always seven minutes late costs lateness, not slots."""
    folder.drop("minutely", "count", "echo x")
    for n in range(5):
        slot = NINE + P5 * n
        done = folder.tick(slot + timedelta(minutes=7), slot=slot)
        assert done.claimed
        assert done.slot == slot + P5
    assert len(folder.runs("minutely.count")) == 5


def test_overdue_jobs_that_all_start_at_once_work_once(folder: Folder) -> None:
    folder.drop("minutely", "count", "echo x")
    late = NINE + timedelta(hours=1, seconds=3)
    assert [folder.tick(late, slot=NINE + P5 * n).claimed for n in range(3)] == [True, False, False]


def test_a_node_whose_clock_is_a_little_behind_loses_no_slot(folder: Folder) -> None:
    assert folder.tick(NINE - timedelta(seconds=2), slot=NINE).slot == NINE
    assert folder.tick(NINE + P5 - timedelta(seconds=2), slot=NINE + P5).claimed


@pytest.mark.fault("Cron slots are missed", "the entry runs once for them, and that is said")
def test_missed_slots_are_made_good_once_and_said(folder: Folder) -> None:
    folder.drop("hourly", "job", "echo x")
    assert folder.tick(NINE).worked.ran
    done = folder.tick(NINE + timedelta(hours=3, minutes=10))
    assert done.worked.ran == ("hourly/job",)
    assert done.worked.missed == {"hourly/job": 3}
    assert folder.runs("hourly.job")[0].start.missed == 3
    assert not folder.tick(NINE + timedelta(hours=3, minutes=15)).worked.ran


def test_a_failure_is_told_once_and_so_is_its_end(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    folder = make(tmp_path, alerts=alerts_to(heard), minutely="@tick")
    path = folder.drop("minutely", "check", "echo the disk is on fire; exit 3")
    assert any("failed: exit code 3" in words for words in folder.tick(NINE).notified)
    assert folder.tick(NINE + P5).notified == ()
    path.write_text("#!/bin/sh\nexit 0\n")
    assert any(words.startswith("resolved") for words in folder.tick(NINE + P5 * 2).notified)
    text = heard.read_text()
    assert "the disk is on fire" in text
    assert "minutely/check" in text


def test_a_failing_daily_entry_stays_an_alert_until_it_is_good_again(tmp_path: Path) -> None:
    folder = make(tmp_path, alerts=alerts_to(tmp_path / "heard"), now=NINE)
    path = folder.drop("daily", "report", "exit 1")
    folder.change(times={**folder.installed.times, "daily": "0 9 * * *"})
    told = [words for n in range(24 * 12) for words in folder.tick(NINE + P5 * n).notified if "report" in words]
    assert [words.partition(":")[0] for words in told] == ["fired", *["repeated"] * 5]
    path.write_text("#!/bin/sh\nexit 0\n")
    assert folder.tick(NINE + timedelta(days=1)).notified[0].startswith("resolved")


def test_a_failing_entry_whose_file_is_taken_away_is_over(tmp_path: Path) -> None:
    folder = make(tmp_path, alerts=alerts_to(tmp_path / "heard"), minutely="@tick")
    path = folder.drop("minutely", "check", "exit 1")
    folder.tick(NINE)
    path.unlink()
    assert any(words.startswith("resolved: minutely/check") for words in folder.tick(NINE + P5).notified)


def test_a_forgotten_chmod_is_heard_of(tmp_path: Path) -> None:
    folder = make(tmp_path, alerts=alerts_to(tmp_path / "heard"))
    path = folder.drop("hourly", "check", "exit 0", mode=0o644)
    assert any("chmod +x check" in words for words in folder.tick(NINE).notified)
    path.chmod(0o755)
    assert any(words.startswith("resolved") for words in folder.tick(NINE + P5).notified)


def test_the_environment_is_that_of_the_install_and_not_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHOSEN", "yes")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    folder = make(tmp_path, env=("CHOSEN",))
    monkeypatch.setenv("CHOSEN", "changed")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "500")
    folder.drop("minutely", "env", "env | sort")
    folder.tick(NINE)
    seen = dict(line.split("=", 1) for line in folder.output("minutely.env").splitlines() if "=" in line)
    assert seen["CHOSEN"] == "yes"
    assert {key for key in seen if key.startswith("SLURM")} == {"SLURM_CONF"}
    assert seen["FTSUPERVISE_CRON_ENTRY"] == "minutely/env"


def test_the_crontab_file_runs_with_its_variables_and_standard_input(folder: Folder) -> None:
    folder.cron.crontab.write_text("WHO=ada\n@tick cat; echo $WHO%one%two\n0 10 * * * false\nnonsense\n")
    done = folder.tick(NINE)
    (name,) = done.worked.ran
    assert folder.output(name.replace("/", ".")) == "one\ntwo\nada\n"
    assert gather(folder.cron, folder.installed, None, NINE).passed[0].name == "crontab:4"


def test_no_entry_runs_beside_itself(folder: Folder) -> None:
    """An earlier tick, on another node, has not come back yet."""
    folder.drop("minutely", "slow", "echo x")
    start = history.RunStart(NINE, host="elsewhere", pid=1)
    assert history.claim_run(folder.cron, "minutely.slow", NINE, start) is not None
    assert history.claim_run(folder.cron, "minutely.slow", NINE, start) is None
    assert folder.tick(NINE + P5).worked.skipped == ("minutely/slow",)
    assert "it has been running since" in folder.runs("minutely.slow")[0].end.words
    assert folder.tick(NINE + P5 * 3).worked.ran == ("minutely/slow",)  # the bound of 10m is over: that tick was killed


def test_only_so_many_runs_are_kept(tmp_path: Path) -> None:
    folder = make(tmp_path, keep=4)
    folder.drop("minutely", "count", "echo x")
    for n in range(9):
        folder.tick(NINE + P5 * n)
    assert len(folder.runs("minutely.count")) == 4
    link = folder.cron.runs / "minutely.count" / "last" / "output"
    assert link.read_text() == "x\n"


def test_status_counts_missed_slots_and_lateness(folder: Folder) -> None:
    for n in (0, 1, 4, 5):
        folder.tick(NINE + P5 * n + timedelta(seconds=n))
    seen = gather(folder.cron, folder.installed, None, NINE + P5 * 5 + timedelta(seconds=9))
    assert seen.slots.missed == (NINE + P5 * 2, NINE + P5 * 3)
    assert (len(seen.slots.known), seen.slots.expected) == (4, 6)
    assert [round(late) for late in seen.slots.lates] == [0, 1, 4, 5]
    assert seen.verdict == "ALIVE"
    assert gather(folder.cron, folder.installed, None, NINE + timedelta(hours=1)).verdict == "DEAD"


def test_records_of_slots_do_not_pile_up(folder: Folder) -> None:
    period = timedelta(minutes=5)
    for n in range(history.KEEP + 5):
        history.claim_slot(folder.cron, NINE + period * n, NINE, "")
    history.prune_slots(folder.cron)
    kept = history.slots(folder.cron)
    assert len(kept) == history.KEEP
    assert kept[0] == NINE + period * 5


@pytest.mark.threat("Everybody may write a cron folder.", "Cron runs nothing in it.")
def test_a_folder_everybody_may_write_runs_nothing(folder: Folder) -> None:
    folder.drop("hourly", "check", "echo x")
    folder.cron.folder("hourly").chmod(0o777)
    assert folder.tick(NINE).worked.ran == ()


def test_files_that_are_no_files_and_runs_that_are_no_runs_do_no_harm(folder: Folder) -> None:
    os.mkfifo(folder.cron.folder("hourly") / "fifo")
    (folder.cron.folder("hourly") / "loop").symlink_to("loop")
    (folder.cron.folder("daily")).rmdir()
    folder.cron.folder("daily").write_text("a file")
    folder.drop("hourly", "good", "echo x")
    (folder.cron.runs / "hourly.good").mkdir(parents=True)
    (folder.cron.runs / "hourly.good" / "20261121T085500Z").write_text("not a directory")
    assert folder.tick(NINE).worked.ran == ("hourly/good",)


def test_a_run_whose_tick_was_killed_is_not_waited_for(folder: Folder) -> None:
    """Its process number is nobody's any more; only a second time in a row is an alert."""
    folder.drop("minutely", "slow", "echo x")
    gone = subprocess.Popen(["true"])
    gone.wait()
    start = history.RunStart(NINE, host=os.uname().nodename, pid=gone.pid)
    history.claim_run(folder.cron, "minutely.slow", NINE, start)
    assert folder.tick(NINE + P5).worked.ran == ("minutely/slow",)


@pytest.mark.fault("Three cron ticks in a row do not end", "an alert")
@pytest.mark.fault("Three ticks in a row never end", "that is an alert, and the next good one resolves it")
def test_three_ticks_in_a_row_that_never_ended_are_an_alert(tmp_path: Path) -> None:
    folder = make(tmp_path, alerts=alerts_to(tmp_path / "heard"))
    for n in range(3):
        history.claim_slot(folder.cron, NINE + P5 * n, NINE + P5 * n, "")
    assert any("cut off before their end" in words for words in folder.tick(NINE + P5 * 3).notified)
    folder.tick(NINE + P5 * 4)
    assert "RESOLVED" in (tmp_path / "heard").read_text()


def test_a_mistake_of_ours_is_told_and_does_not_end_the_keeping_of_time(tmp_path: Path) -> None:
    folder = make(tmp_path, alerts=alerts_to(tmp_path / "heard"))
    folder.drop("minutely", "job.slurm", "echo x")
    folder.queue.breaks = "nobody thought of this"
    done = folder.tick(NINE)
    assert any("RuntimeError: nobody thought of this" in words for words in done.notified)
    assert "Traceback" in "".join(done.trouble)


def test_a_time_that_somebody_edited_wrongly_is_told(folder: Folder) -> None:
    folder.change(times={**folder.installed.times, "hourly": "now and then"})
    folder.drop("hourly", "check", "echo x")
    folder.drop("minutely", "other", "echo x")
    assert folder.tick(NINE).worked.ran == ("minutely/other",)
    assert "hourly/" in gather(folder.cron, folder.installed, None, NINE).passed[0].name


@pytest.mark.fault("The disk of the cron folder is full", "the queue decides who is first, and the disk watchdog runs")
@pytest.mark.root
def test_a_full_disk_does_not_keep_the_disk_watchdog_from_running(tmp_path: Path) -> None:
    """The slot and the run cannot be claimed on it; then the queue decides who is first."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=120", "tmpfs", place], check=True)
    try:
        folder = make(place, backend="slurm")
        folder.drop("minutely", "disk", f"echo ran >> {tmp_path}/ran")
        for n in range(200):
            try:
                (place / f"fill-{n}").mkdir()
            except OSError:
                break
        folder.queue.end("1", JobState.RUNNING)
        assert folder.tick(NINE, slot=NINE, job_id="1").claimed
        assert (tmp_path / "ran").read_text() == "ran\n"
        assert len(folder.queue.jobs) == 4  # and the successor is there
        assert not folder.tick(NINE + timedelta(seconds=1), slot=NINE, job_id="9").claimed
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_watch_by_the_crontab_states_when_it_comes_again_and_one_name_on_all_nodes(
    folder: Folder, tmp_path: Path
) -> None:
    """The watch of an entry whose chain has died is missed: three hours of slots, and then none."""
    run = RunDir(tmp_path / "runs" / "r")
    for place in (run.switches, run.watch, run.state, run.attempts):
        place.mkdir(parents=True)
    (run.root / "run.yaml").write_text(f"name: r\nscheduler: local\nlaunch: {{command: a}}\nrun_dir: {run.root}\n")
    state = f"FTSUPERVISE_STATE_DIR={tmp_path}/state"
    folder.drop("hourly", "watch", f"{state} {sys.executable} -m ftsupervise watch --quiet {run.root}; exit 0")
    folder.tick(NINE)
    folder.tick(NINE + timedelta(hours=1))
    (page,) = watchers(run)
    assert page.name == f"cron-{folder.installed.id}-hourly.watch"
    assert page.every == timedelta(hours=1)
    assert page.late_by(page.at + timedelta(hours=2)) is None
    assert page.late_by(page.at + timedelta(hours=4)) is not None
