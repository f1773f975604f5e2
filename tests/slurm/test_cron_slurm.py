"""The cron on real Slurm as a newcomer meets it: drop a file, it runs; look, and it is all there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.crontab.chain import slot_of
from ftsupervise.crontab.installation import need_installed
from ftsupervise.host.processes import identity
from ftsupervise.rundir.records import read_json
from ftsupervise.sandbox import Sandbox
from tests.slurm.cron_lab import OneCron

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


@pytest.fixture
def one(sandbox: Sandbox) -> Iterator[OneCron]:
    home = Path(tempfile.mkdtemp(prefix="fts-cron-", dir="/tmp"))
    home.chmod(0o755)
    newcomer = OneCron(sandbox, home / "home", 3.0, 6.0)
    newcomer.write_settings()
    yield newcomer
    if newcomer.cron.installed.exists():
        newcomer.type("remove")
        for job in [*newcomer.pending(), *newcomer.running()]:
            sandbox.run(["scancel", job])
    end_entries(home)
    shutil.rmtree(home, ignore_errors=True)


def end_entries(home: Path) -> None:
    """A cancelled tick cannot end what hears no SIGTERM and has a session of its own, where Slurm follows process groups."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{home}/".encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


def entries(one: OneCron) -> dict[str, Any]:
    return {entry["name"]: entry for entry in json.loads(one.type("status", "--json").stdout)["entries"]}


def count_commands(one: OneCron) -> Path:
    """Put squeue, sbatch and scancel that count themselves before the real ones, for all that is installed after."""
    folder, log = one.home / "counting", one.home / "counted"
    folder.mkdir()
    for name in ("squeue", "sbatch", "scancel", "scontrol", "sinfo"):
        path = folder / name
        path.write_text(f'#!/bin/sh\necho {name} >> {log}\nexec {shutil.which(name)} "$@"\n')
        path.chmod(0o755)
    one.sandbox_path = f"{folder}:{one.sandbox.env()['PATH']}"
    return log


def test_a_newcomer_drops_an_executable_and_a_job_script_and_both_run_at_the_next_slot(
    one: OneCron, until: Until
) -> None:
    """Hourly means every slot here, so that nobody waits for an hour."""
    settings = one.home / "ftsupervise.yaml"
    settings.write_text(settings.read_text().replace("cron: {", "cron: {hourly: '@tick', "))
    one.install()
    one.drop("hourly", "hello.sh", 'echo "hello from $SLURM_JOB_ID."')
    one.drop("hourly", "report.slurm", '#SBATCH --ntasks=2 --mem=20M\necho "job with $SLURM_NTASKS tasks"', mode=0o644)
    one.drop("hourly", "deaf", "trap '' TERM\nsetsid sleep 8888 & echo $!\nsleep 8888")

    def good(name: str) -> Any:
        """The entry, at a moment at which its newest run is over and was good."""
        entry = entries(one)[name]
        return entry if entry["state"] == "ok" else None

    until(lambda: good("hourly/hello.sh"), "the executable")
    until(lambda: good("hourly/report.slurm"), "the job script")
    hello, report = good("hourly/hello.sh") or {}, until(lambda: good("hourly/report.slurm"), "the job script")
    hello = hello or until(lambda: good("hourly/hello.sh"), "the executable")
    assert Path(hello["last"]["output"]).read_text() == "hello from .\n"  # nothing of the tick's job
    assert Path(report["last"]["output"]).read_text() == "job with 2 tasks\n"
    assert 0 <= hello["last"]["late"] < 30
    until(lambda: "hourly/deaf" in one.alerts(), "the end of what hangs, and its alert")
    runs = [read_json(path) or {} for path in sorted((one.cron.runs / "hourly.deaf").glob("2*/end.json"))]
    hung = next(run for run in runs if run["outcome"] == "failed")
    assert "ended at its bound of 6s, with all processes that it had started" in str(hung["words"])
    first = min((one.cron.runs / "hourly.deaf").glob("2*/output"))
    assert identity(int(first.read_text())) is None
    assert any("skipped: it has been running since" in str(run["words"]) for run in runs)
    until(lambda: "ALIVE" in one.type("status").stdout, "slots in time")
    assert "hourly/hello.sh" not in one.alerts()


def test_a_slot_costs_one_sbatch_and_one_squeue(one: OneCron, until: Until) -> None:
    """Of ten seconds: one that starts more than a period late works for the next one, beside that one's own."""
    log = count_commands(one)
    one.period = 10.0
    one.write_settings()
    one.install()
    before = until(lambda: len(one.worked()), "a slot") and len(one.worked())
    began = len(log.read_text().split())
    until(lambda: len(one.worked()) >= before + 2, "two slots more", 90)
    counted = Counter(log.read_text().split()[began:])
    slots = len(one.worked()) - before + 1  # one may be half done
    assert set(counted) == {"sbatch", "squeue"}
    assert counted["sbatch"] <= slots
    assert counted["squeue"] <= slots


def test_what_was_removed_stays_away_and_leaves_the_files(one: OneCron, until: Until) -> None:
    one.install()
    until(lambda: one.worked(), "a slot")
    one.drop("hourly", "mine", "true")
    said = one.type("remove").stdout
    assert "is removed" in said
    until(lambda: not one.pending(), "a queue without what a tick put there meanwhile")
    assert "was removed" in one.type("ensure").stdout
    assert one.type("status").stdout.count("REMOVED") == 1
    assert (one.cron.folder("hourly") / "mine").exists()
    until(lambda: not one.pending(), "a queue that stays empty")


def test_another_period_moves_the_chain_to_the_new_slots(one: OneCron, until: Until) -> None:
    one.install()
    one.period = 600.0
    one.write_settings()
    one.install()
    installed = need_installed(one.cron)

    def moved() -> bool:
        jobs = one.slurm().queue()
        print(f"{datetime.now():%T}", *(f"{job.id} {job.state} {job.comment};" for job in jobs))  # shown if it fails
        slots = [slot_of(job.comment, installed.id) for job in jobs if job.state.waiting]
        mine = [slot.timestamp() for slot in slots if slot is not None]
        if len(mine) > len(set(mine)):  # a slot of before has ticked meanwhile: the next look takes the second job away
            one.install()
        return len(mine) == 3 and all(at % 600 == 0 for at in mine)

    until(moved, "three slots of the new period and no other")


def test_a_partition_with_a_shorter_limit_is_kept_to_and_it_is_said(
    make_sandbox: Callable[..., Sandbox], one: OneCron, until: Until
) -> None:
    sandbox = make_sandbox(nodes=1)
    sandbox.run(["scontrol", "update", "PartitionName=prod", "MaxTime=5"])
    other = OneCron(sandbox, one.home / "limited", 4.0, 600.0)
    other.write_settings()
    said = other.type("install").stdout
    assert "entries are ended after 0:03:00" in said
    other.cron.crontab.write_text(f'@tick echo "$FTSUPERVISE_CRON_SLOT" >> {other.home}/work\n')
    until(lambda: other.worked(), "a slot within the limit")


def test_a_colleague_is_told_whose_cron_it_is(one: OneCron) -> None:
    one.install()
    record = json.loads(one.cron.installed.read_text())
    one.cron.installed.write_text(json.dumps({**record, "owner": "grace"}))
    done = one.type("install")
    assert done.returncode == 75
    assert "is grace's" in done.stderr
    one.cron.installed.write_text(json.dumps(record))


def test_the_ready_made_watch_looks_at_a_run_that_was_launched(one: OneCron, until: Until) -> None:
    """Dropped as it comes, found by the PATH of the install, for every run of this account."""
    settings = one.home / "ftsupervise.yaml"
    text = settings.read_text().replace("{command: a}", "{command: sleep 60, jobs: 1, srun: false}")
    settings.write_text(text.replace("cron: {", "cron: {minutely: '@tick', "))
    argv = [sys.executable, "-m", "ftsupervise", "launch"]
    subprocess.run(argv, cwd=one.home, env=one.env, check=True, capture_output=True, timeout=60)
    one.install()
    assert "added" in one.type("add", "watch-all").stdout
    try:
        until(lambda: list((one.home / "runs" / "x" / "watch").glob("watchers/*")), "a look at the run")
        until(lambda: entries(one)["minutely/watch-all"]["state"] == "ok", "a good end")
    finally:
        one.sandbox.run(["scancel", "-n", "x"])
