"""``ftsupervise init --try``: one minute of a run in a Slurm that is made for it, one interruption, and what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ftsupervise.host import processes
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed
from tests.story.warm_scene import at_home

pytestmark = pytest.mark.slurm

JOB = """#!/bin/bash
#SBATCH --job-name=tried --partition=gpu --account=physics --qos=long --nodes=2 --ntasks-per-node=1 --gpus-per-node=h100:8
#SBATCH --constraint=h100 --mem=900G --time=2-00:00:00 --output=logs/%j.out
srun python3 train.py
"""
GUARD = """import os, time
from ftsupervise import Guard
guard = Guard()
newest = guard.latest()
first = int((newest / "step").read_text()) + 1 if newest else 1
for step in range(first, 9000):
    time.sleep(0.05)
    decision = guard.step(step)
    if decision.save:
        with guard.checkpoint(step) as folder:
            if os.environ["SLURM_PROCID"] == "0":  # the other would write it again while its digest is made
                (folder / "step").write_text(str(step))
    if decision.stop:
        break
"""
PRINTS = """import os, time
for step in range(9000):
    time.sleep(0.1)
    if os.environ["SLURM_PROCID"] == "0":
        print(f"step {step} loss 0.5", flush=True)
"""
FAILS = "raise SystemExit('no data here')\n"


def tried(folder: Path, script: str, code: int, *words: str) -> list[str]:
    """Return the five lines; nothing of a trial may be left."""
    (folder / "train.py").write_text(script)
    (folder / "job.sbatch").write_text(JOB)
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    places = {"XDG_STATE_HOME": str(folder / "st"), "TMPDIR": str(temporary)}
    done = typed(
        "init", "--force", "--try", *words, folder=folder, env={**os.environ, **places}, code=code, seconds=300
    )
    assert not at_home(folder)  # no process of it lives
    assert not list(temporary.glob("ftsupervise-trial-*"))
    assert not (folder / "runs").exists()
    assert not (folder / "logs").exists()
    lines = done.stdout.splitlines()[-5:]
    assert [line.split("  ")[0] for line in lines] == ["started", "reached", "interrupted", "came back", "log"]
    assert "attempt 1 of run" in Path(lines[-1].split()[-1]).read_text()
    return lines


def test_a_run_with_the_guard_saves_is_killed_and_goes_on(tmp_path: Path) -> None:
    lines = tried(tmp_path, GUARD, 0, "job.sbatch")
    assert "yes, on 2 nodes of the sandbox" in lines[0]
    assert "seen by the guard; saved at " in lines[1]
    assert "its processes were killed; attempt 2 began " in lines[2]
    assert " yes: it went on at step " in lines[3]
    tried(tmp_path, GUARD, 0)  # and once more, from the ftsupervise.yaml that is there


def test_a_script_that_begins_again_at_its_beginning_is_called_that(tmp_path: Path) -> None:
    lines = tried(tmp_path, PRINTS, 1, "job.sbatch")
    assert "seen in its output" in lines[1]
    assert " no: it began again at step 0, and had left at " in lines[3]


def test_a_script_that_fails_at_once_says_why(tmp_path: Path) -> None:
    lines = tried(tmp_path, FAILS, 1, "job.sbatch")
    assert "its end, in " in lines[1]
    assert lines[1].endswith(": no data here")
    assert "it was not interrupted" in lines[3]
    assert "no data here" in (tmp_path / "st/ftsupervise/trial.log").read_text()


def test_a_checkpoint_that_is_there_is_not_gone_on_from_or_written_over(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/ckpt.pt").write_bytes(b"x" * 100)
    (tmp_path / "train.py").write_text(PRINTS)
    (tmp_path / "job.sbatch").write_text(JOB)
    done = typed("init", "--try", "job.sbatch", folder=tmp_path, code=75)
    assert "ckpt.pt is there: the trial could go on from it, and write over it" in done.stderr


@pytest.mark.fault("`init --try` is killed while it works", "its folder, its Slurm and its command go within seconds")
def test_a_trial_that_is_killed_leaves_nothing(tmp_path: Path, until: Callable[..., object]) -> None:
    (tmp_path / "train.py").write_text(PRINTS)
    (tmp_path / "job.sbatch").write_text(JOB)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = [sys.executable, "-I", "-m", "ftsupervise", "init", "--try", "job.sbatch"]
    env = outside_a_job(XDG_STATE_HOME=str(tmp_path / "st"), TMPDIR=str(temporary))
    with (tmp_path / "said").open("wb") as said:
        one = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=said, stderr=said, start_new_session=True)
    try:
        until(lambda: list(temporary.glob("ftsupervise-trial-*/run/attempts/0001")), "an attempt at work")
        os.killpg(one.pid, signal.SIGKILL)
        one.wait(30)
        until(lambda: not list(temporary.glob("ftsupervise-trial-*")), "the end of its folder")
        until(lambda: not at_home(tmp_path), "the end of its command")
        until(lambda: not processes.marked("TMPDIR").get(str(temporary)), "the end of its Slurm, and of its keepers")
    finally:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait(30)
