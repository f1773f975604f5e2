"""The example of a shell loop: interrupted wherever it is, it ends with the same weights. On Slurm: test_shell_on_slurm.py."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, RunDir
from tests.manual.blocks import ROOT
from tests.manual.stories import Story
from tests.neighbours.supervised import SupervisedRun, outside_a_job

Until = Callable[..., Any]
EXAMPLE = ROOT / "examples" / "shell"


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    for name in ("train.sh", "trainer.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    return tmp_path


def weights(text: str) -> str:
    found = re.search(r"weights (\w+)", text)
    assert found, text
    return found[1]


def undisturbed(folder: Path, steps: int, piece: int) -> str:
    env = outside_a_job(STEP_TIME="0", FTSUPERVISE_CHECKPOINT_DIR=str(folder / "alone"))
    words = ["bash", "train.sh", str(steps), str(piece)]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=True)
    return weights(done.stdout)


def of_the_attempt(run: RunDir, number: int, *names: str) -> list[int]:
    mine = processes.marked(ENV_ATTEMPT_DIR).get(str(run.attempt(number)), [])
    return [one.pid for one in mine if one.name in names]


def test_a_loop_that_is_killed_resumes_and_ends_with_the_same_weights(
    run: SupervisedRun, loop: Path, until: Until
) -> None:
    one = run.start("--in-place", "5", "--heartbeat-log", "auto", "--", "bash", "train.sh", "60", "5", STEP_TIME="0.05")
    for attempt, names in ((1, ("python3", "python")), (2, ("bash",))):
        until(lambda: any(beat.facts["attempt"] == str(attempt) for beat in read_beats(run.rundir)), "a step", 60)  # noqa: B023
        (pid, *_) = until(lambda: of_the_attempt(run.rundir, attempt, *names), f"a process of {names}", 60)  # noqa: B023
        os.kill(pid, signal.SIGKILL)
    assert one.wait(120) == 0
    assert [attempt.last_step for attempt in run.attempts()][-1] == 60
    assert run.rundir.finished.exists()
    assert weights(one.said()) == undisturbed(loop, 60, 5)


def test_switches_and_the_warning_reach_a_shell(run: SupervisedRun, loop: Path, until: Until) -> None:
    words = ("--in-place", "5", "--heartbeat-log", "auto", "--", "bash", "train.sh", "100000", "5")
    save, kill = (run.rundir.switches / f"{name}-switch" for name in ("save", "kill"))
    one = run.start(*words, STEP_TIME="0.02")
    until(lambda: read_beats(run.rundir), "a step", 60)
    save.touch()
    until(lambda: not save.exists(), "the answer", 60)
    one.send_signal(signal.SIGUSR1)
    assert one.wait(60) == 0
    two = run.start(*words, STEP_TIME="0.02")
    until(lambda: any(beat.facts["attempt"] == "2" for beat in read_beats(run.rundir)), "a step", 60)
    kill.touch()
    assert two.wait(60) == 0
    for left, attempt in zip((one, two), run.attempts(), strict=True):
        found = re.search(r"leaving at step (\d+)", left.said())
        assert found, left.said()
        assert not attempt.failure
    assert "resumed" not in one.said()


def test_the_shell_example_is_run_as_its_page_says(tmp_path: Path) -> None:
    story = Story("shell", tmp_path / "shell", dict(os.environ))
    story.run_name = "shell"
    for name in ("train.sh", "trainer.py", "ftsupervise.yaml"):
        shutil.copy(EXAMPLE / name, story.place)
    config = story.place / "ftsupervise.yaml"
    config.write_text(config.read_text() + "scheduler: local\n")
    try:
        story.tell()
    finally:
        story.close()
    assert not RunDir(story.run).finished.exists()
