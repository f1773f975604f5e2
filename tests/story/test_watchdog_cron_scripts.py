"""The scripts people drop into cron.hourly: run-parts takes them, they watch, and findings are not failures."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ftsupervise.watch.watchdogs import WATCHDOGS

CRON = Path(__file__).parents[2] / "cron"
SCRIPTS = sorted(path for path in CRON.glob("cron.*/*") if path.is_file())
WATCH = CRON / "cron.hourly" / "watch-disk"
JOBS = sorted(CRON.glob("as-jobs/*/*"))


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """An account that has launched one run, and ``ftsupervise`` on its PATH."""
    bin_dir, state, run = tmp_path / "bin", tmp_path / "state", tmp_path / "the run"
    (state / "runs").mkdir(parents=True)
    (run / "switches").mkdir(parents=True)
    (run / "watch").mkdir()
    (run / "run.yaml").write_text(f"name: r\nlaunch: {{command: a}}\nscheduler: local\nrun_dir: {run}\n")
    (state / "runs" / "r").symlink_to(run)
    bin_dir.mkdir()
    (bin_dir / "ftsupervise").write_text(f'#!/bin/sh\nexec {sys.executable} -m ftsupervise "$@"\n')
    (bin_dir / "ftsupervise").chmod(0o755)
    path = f"{bin_dir}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "FTSUPERVISE_STATE_DIR": str(state), "TMPDIR": str(tmp_path)}


def test_there_are_some() -> None:
    assert {path.name for path in SCRIPTS} >= {"watch-all", "watch-running", "watch-hang", "watch-disk", "watch-memory"}
    assert [path.name for path in JOBS] == ["watch-all.slurm"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_run_parts_takes_it(script: Path) -> None:
    assert re.fullmatch(r"[a-zA-Z0-9_-]+", script.name)  # run-parts(8): no dots
    assert script.stat().st_mode & 0o111
    if shutil.which("run-parts"):
        listed = subprocess.run(["run-parts", "--test", str(script.parent)], capture_output=True, text=True, check=True)
        assert str(script) in listed.stdout.split()


@pytest.mark.parametrize("script", [*SCRIPTS, *JOBS], ids=lambda path: path.name)
def test_it_is_shell_and_names_real_watchdogs(script: Path) -> None:
    subprocess.run(["sh", "-n", str(script)], check=True)
    assert set(re.findall(r"--only (\S+)", script.read_text())) <= set(WATCHDOGS)


@pytest.mark.parametrize("script", [WATCH, JOBS[0]], ids=lambda path: path.name)
def test_it_watches_every_launched_run_and_a_finding_is_no_failure(
    script: Path, env: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(["sh", str(script)], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "the run" / "watch" / "journal").is_dir()


def test_checkpoints_are_cared_for_as_the_settings_of_each_run_say(env: dict[str, str], tmp_path: Path) -> None:
    run = tmp_path / "the run"
    settings = (
        f"{{path: {run}/checkpoints, adopt: true, offload: {{to: {tmp_path}/far}}, retain: {{last: 2, copied: true}}}}"
    )
    (run / "run.yaml").write_text((run / "run.yaml").read_text() + f"checkpoints: {settings}\n")
    for step in range(1, 5):
        folder = run / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    script = CRON / "cron.hourly" / "checkpoints"
    done = subprocess.run(["sh", str(script)], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["checkpoint-3", "checkpoint-4"]
    assert sorted(path.name for path in (tmp_path / "far").iterdir()) == [f"checkpoint-{step}" for step in range(1, 5)]


def test_no_runs_is_nothing_to_do(env: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        ["sh", str(WATCH)], env={**env, "FTSUPERVISE_STATE_DIR": str(tmp_path / "none")}, timeout=60, check=False
    )
    assert done.returncode == 0


def test_a_watch_that_fails_is_a_failure(env: dict[str, str]) -> None:
    done = subprocess.run(
        ["sh", str(WATCH)],
        env={**env, "FTSUPERVISE_RUNS": "nothing-of-that-name"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 66
    assert "no run called" in done.stderr
