"""The DistributedDataParallel example, where torch is installed: ``make test-torch`` does that, ``make test`` does not."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery.launchers import LAUNCHERS
from benchmarks.recovery.scene import play
from ftsupervise.rundir.paths import RunDir
from tests.manual.blocks import ROOT
from tests.manual.stories import Story
from tests.slurm.ring_scene import Scene

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
DDP = ROOT / "examples" / "ddp"
Until = Callable[..., Any]


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slurm
def test_four_ranks_of_which_one_is_killed_train_to_the_same_bits(scene: Callable[..., Scene], until: Until) -> None:
    here = scene(nodes=3)
    shutil.copy(DDP / "train.py", here.folder)
    words = "--steps 200 --step-time 0.02 --save-every 30"
    shape = {"tasks_per_node": 2, "spare_nodes": 1, "jobs": 1}
    here.train(words, **shape)
    until(here.rundir.finished.exists, "the undisturbed run", 120)
    alone = weights(here)
    here.name += "-again"
    here.train(words, **shape)
    until(lambda: len(here.trains(1, 4)) == 4 and "step 50 " in here.log(), "step 50", 120)
    os.kill(here.trains(1, 4)[2], signal.SIGKILL)
    until(here.rundir.finished.exists, "the end", 120)
    assert [one.sign for one in here.attempts()[:1]] == ["killed by SIGKILL"]
    assert "resumed after step " in here.log()
    assert weights(here) == alone


def weights(here: Scene) -> str:
    found = re.search(r"weights (\w+)", here.log())
    assert found, here.log()
    return found[1]


def test_the_example_is_run_as_its_page_says(tmp_path: Path) -> None:
    story = Story("ddp", tmp_path / "ddp", dict(os.environ))
    story.run_name = "ddp"
    for name in ("train.py", "ftsupervise.yaml"):
        shutil.copy(DDP / name, story.place)
    config = story.place / "ftsupervise.yaml"
    config.write_text(config.read_text() + "scheduler: local\n")
    try:
        story.tell()
    finally:
        story.close()
    assert not RunDir(story.run).finished.exists()


@pytest.mark.slurm
def test_the_benchmark_sees_a_killed_rank_come_back(slurm_installed: None) -> None:
    launcher = next(one for one in LAUNCHERS if one.ours)
    trial = play(launcher, "SIGKILL", bound=120)
    assert trial.new is not None, trial
    assert trial.redone == 10
    assert 0 < (trial.acts or 0) <= (trial.down or 0) < (trial.first or 0) < trial.new
