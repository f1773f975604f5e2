"""Watching many runs: one whose settings cannot be read is told, and blinds nobody."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.paths import RunDir
from tests.neighbours.typed import typed

MESSAGES = "alerts:\n  receivers:\n    - file: {path: ../heard.jsonl}\n"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        text = f"name: {name}\nscheduler: local\nlaunch: {{command: sleep 600, jobs: 1}}\n"
        (tmp_path / name / "ftsupervise.yaml").write_text(text + MESSAGES)
    return tmp_path


def watch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return typed("watch", *words, folder=folder, FTSUPERVISE_STATE_DIR=str(folder / "state"))


def heard(folder: Path) -> list[str]:
    path = folder / "heard.jsonl"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.fault("The settings of one run are broken", "that is reported, the others are watched")
def test_a_run_whose_settings_are_broken_is_told_and_the_other_is_watched(two: Path) -> None:
    (two / "b" / "ftsupervise.yaml").write_text("name: [\n")
    for name in ("a", "b"):
        (two / name / "runs" / name / "switches").mkdir(parents=True)
        (two / name / "runs" / name / "watch").mkdir()
    done = watch(two, "a", "b")
    assert done.returncode == 2
    text = "\n".join(heard(two))
    assert "the settings of b cannot be read" in text
    assert "no job of this run" in text  # a was looked at
    before = len(heard(two))
    watch(two, "a", "b")
    assert len(heard(two)) == before  # told once
    (two / "b" / "ftsupervise.yaml").write_text(
        (two / "a" / "ftsupervise.yaml").read_text().replace("name: a", "name: b")
    )
    watch(two, "a", "b")
    assert any("RESOLVED" in line.upper() and "settings of b" in line for line in heard(two)[before:])


def test_the_only_run_s_broken_settings_are_said_at_once(two: Path) -> None:
    (two / "b" / "ftsupervise.yaml").write_text("name: [\n")
    done = watch(two, "b")
    assert done.returncode == 78
    assert "ftsupervise.yaml:" in done.stderr


def test_a_run_that_was_not_launched_yet_wakes_nobody_and_nothing_is_made_for_it(two: Path) -> None:
    done = watch(two, "a")
    assert done.returncode == 3
    assert "not been launched yet" in done.stdout
    assert heard(two) == []
    assert not (two / "a" / "runs").exists()


@pytest.mark.fault("The run directory vanishes", "one alert; it is not made anew")
def test_a_run_directory_that_vanishes_is_an_alert_and_is_not_made_anew(two: Path, until: Callable[..., Any]) -> None:
    env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(two / "state")}
    ft = [sys.executable, "-m", "ftsupervise"]
    subprocess.run([*ft, "launch"], cwd=two / "a", env=env, check=True, timeout=120, capture_output=True)
    try:
        until((two / "a/runs/a/attempts/0001/run.log").exists, "the job, which makes its directories when it begins")
        assert watch(two, "a").returncode in (0, 3)
        (two / "a" / "runs").rename(two / "a" / "moved")
        assert watch(two, "a").returncode == 2
        assert any("is gone" in line for line in heard(two))
        assert not (two / "a" / "runs").exists()
        (two / "a" / "moved").rename(two / "a" / "runs")
        watch(two, "a")
        assert any("RESOLVED" in line.upper() and "is gone" in line for line in heard(two))
    finally:
        subprocess.run([*ft, "kill", "--yes"], cwd=two / "a", env=env, check=False, timeout=60, capture_output=True)
        code = "from ftsupervise.scheduler.local import Local\nfor j in Local().queue(): Local().cancel(j.base_id)"
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)


def test_a_second_run_of_the_same_name_takes_no_other_one_s_place(two: Path) -> None:
    def type_it(*words: str, folder: Path = two) -> str:
        done = typed(*words, folder=folder, FTSUPERVISE_STATE_DIR=str(two / "state"), HOME=str(two))
        assert done.returncode in (0, 1, 2), done.stderr
        return done.stdout

    settings = "name: train\nscheduler: local\nlaunch: {command: 'true', jobs: 1}\n" + MESSAGES
    for project in ("a", "b"):
        (two / project / "ftsupervise.yaml").write_text(settings)
    assert "another run" not in type_it("launch", folder=two / "a")
    assert "note: another run is called train; from elsewhere this one is called train@b" in type_it(
        "launch", folder=two / "b"
    )
    links = {one.name: one.readlink() for one in (two / "state/runs").iterdir()}
    assert links == {"train": two / "a/runs/train", "train@b": two / "b/runs/train"}
    listed = type_it("list")
    assert str(two / "a/runs/train") in listed and "train@b" in listed and str(two / "b/runs/train") in listed
    assert str(two / "b/runs/train") in type_it("status", "train@b", "--json")
    type_it("watch", "--all")
    assert all((two / project / "runs/train/watch").is_dir() for project in ("a", "b"))
    shutil.rmtree(two / "a" / "runs")
    (two / "c").mkdir()
    (two / "c/ftsupervise.yaml").write_text(settings)
    assert "another run" not in type_it("launch", folder=two / "c"), "a run that is gone leaves its name"
    assert (two / "state/runs/train").readlink() == two / "c/runs/train"
    assert (two / "state/runs/train@b").readlink() == two / "b/runs/train"


def a_run(folder: Path, name: str, *, scheduler: str = "local") -> RunDir:
    """A run that this account has launched, as it lies in the state directory."""
    run = RunDir(folder / "runs" / name)
    for place in (run.switches, run.watch, run.state, run.attempts):
        place.mkdir(parents=True)
    text = f"name: {name}\nscheduler: {scheduler}\nlaunch: {{command: a}}\nrun_dir: {run.root}\n" + MESSAGES
    run.config.write_text(text.replace("../heard", str(folder / "heard")))
    (folder / "state" / "runs").mkdir(parents=True, exist_ok=True)
    (folder / "state" / "runs" / name).symlink_to(run.root)
    return run


def type_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return typed(*words, folder=folder, FTSUPERVISE_STATE_DIR=str(folder / "state"), HOME=str(folder))


def test_a_finished_run_that_is_deleted_is_simply_gone(tmp_path: Path) -> None:
    """One that had not finished is missed; ``forget`` ends that. The night as a table: (what happens, exit code, is told)."""
    done, going, _ = (a_run(tmp_path, name) for name in ("done", "going", "other"))
    done.finished.write_text("")
    going_on = type_in(tmp_path, "watch", "--all", "--quiet")
    assert going_on.returncode == 2  # going has no job
    shutil.rmtree(done.root)
    for _ in range(2):
        seen = type_in(tmp_path, "watch", "--all")
        assert "done" not in seen.stdout + seen.stderr
    assert not any("settings of done" in line or "is gone" in line for line in heard(tmp_path))
    assert "done" not in type_in(tmp_path, "list").stdout + type_in(tmp_path, "status").stdout
    named = type_in(tmp_path, "watch", "going", "done")
    assert "settings of done" not in named.stdout + "\n".join(heard(tmp_path))
    shutil.rmtree(going.root)
    assert type_in(tmp_path, "watch", "--all").returncode == 2
    assert any("settings of going cannot be read" in line for line in heard(tmp_path))
    forgotten = type_in(tmp_path, "forget", "going")
    assert forgotten.returncode == 0 and "going is forgotten" in forgotten.stdout, forgotten.stderr
    assert type_in(tmp_path, "list").stdout.startswith("other\t")
    seen = type_in(tmp_path, "watch", "--all")
    assert "going" not in seen.stdout + seen.stderr


def test_a_killed_run_that_is_deleted_is_missed_by_nobody(tmp_path: Path) -> None:
    run = a_run(tmp_path, "unwanted")
    assert type_in(tmp_path, "kill", "unwanted", "--yes").returncode == 0
    type_in(tmp_path, "watch", "--all")
    shutil.rmtree(run.root)
    seen = type_in(tmp_path, "watch", "--all")
    assert (seen.returncode, seen.stdout) == (0, "") and heard(tmp_path) == []


def test_finished_runs_of_a_cluster_that_is_no_more_say_nothing(tmp_path: Path) -> None:
    """After ``sandbox down``: nobody asks for jobs of what has finished, and the dead-man hears that all is well."""
    for name in ("a", "b", "c"):
        a_run(tmp_path, name, scheduler="slurm").finished.write_text("")
    seen = type_in(tmp_path, "watch", "--all")
    assert "DNS" not in seen.stdout and "Slurm" not in seen.stdout and "unknown" not in seen.stdout, seen.stdout
    assert seen.returncode == 0
    assert not any("slurm" in line for line in heard(tmp_path))


def test_a_run_that_has_a_job_is_not_forgotten(two: Path, until: Callable[..., Any]) -> None:
    assert type_in(two / "a", "launch").returncode == 0
    assert type_in(two / "a", "forget", "b").returncode != 0  # nobody knows it
    try:
        until((two / "a/runs/a/attempts/0001/run.log").exists, "its job")
        refused = type_in(two / "a", "forget", "a")
        assert refused.returncode != 0 and "ftsupervise kill a" in refused.stderr
        assert "a\t" in type_in(two / "a", "list").stdout
    finally:
        type_in(two / "a", "kill", "--yes")
        code = "from ftsupervise.scheduler.local import Local\nfor j in Local().queue(): Local().cancel(j.base_id)"
        env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(two / "a" / "state")}
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
    until(lambda: type_in(two / "a", "forget", "a").returncode == 0, "its job has left")
    assert type_in(two / "a", "list").stdout == "" and (two / "a/runs/a/launches").is_dir()


def test_a_watch_where_no_run_is_named_says_that_it_can_watch_all(tmp_path: Path) -> None:
    for words in ((), ("--every", "60s")):
        done = watch(tmp_path, *words)
        assert done.returncode == 66
        assert "name the run: " in done.stderr and done.stderr.rstrip().endswith("or all that you have launched: --all")
    assert "--all" not in watch(tmp_path, "unknown").stderr
