"""torch's DCP in the background, on two ranks: a checkpoint is there when it is durable, and said to be there only then."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.find import newest
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify
from ftsupervise.rundir import fence
from ftsupervise.rundir.paths import RunDir
from tests.manual.blocks import marked

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
FULL = Scope(Thoroughness.FULL)


class Scene:
    """Plays on two ranks of attempt 1 of a run."""

    def __init__(self, stage: subprocess.Popen[str], folder: Path, checkpoints: Path) -> None:
        self.folder, self.checkpoints, self.rundir = folder, checkpoints, RunDir(folder / "run")
        self._stage = stage
        for path in (self.rundir.switches, self.rundir.beats, self.rundir.attempts / "0001", folder / "ready"):
            path.mkdir(parents=True)
        self.areas = fence.staging(self.rundir, checkpoints)
        staging = fence.open_area(self.areas, 1)
        area = fence.open_area(self.rundir.root / "staging", 1)
        self._env = {
            "FTSUPERVISE_RUN_DIR": str(self.rundir.root),
            "FTSUPERVISE_ATTEMPT": "1",
            "FTSUPERVISE_ATTEMPT_DIR": str(self.rundir.attempts / "0001"),
            "FTSUPERVISE_CHECKPOINT_DIR": str(checkpoints),
            "FTSUPERVISE_STAGING_AREA": str(area),
            "FTSUPERVISE_STAGING": str(staging),
        }
        self.staging = staging
        self.ended: list[int] = []

    def play(self, name: str) -> list[dict[str, Any]]:
        """What each rank said; ``ended``: their exit codes."""
        assert self._stage.stdin is not None and self._stage.stdout is not None
        asked = {"play": name, "folder": str(self.folder), "env": self._env}
        print(json.dumps(asked), file=self._stage.stdin, flush=True)
        self.ended = json.loads(self._stage.stdout.readline())
        paths = [self.folder / f"said-{rank}" for rank in (0, 1)]
        return [json.loads(path.read_text()) if path.exists() else {} for path in paths]


@pytest.fixture(scope="module")
def stage() -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("dcp_ranks.py")
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as one:
        yield one
        assert one.stdin is not None
        one.stdin.close()


@pytest.fixture
def scene(stage: subprocess.Popen[str], tmp_path: Path) -> Scene:
    return Scene(stage, tmp_path, tmp_path / "ckpt")


def test_a_save_in_the_background_is_said_to_be_there_when_it_is_durable_and_not_before(scene: Scene) -> None:
    (scene.rundir.switches / "save-switch").touch()
    said = scene.play("goes_on")
    assert scene.ended == [0, 0]
    for one in said:
        assert one["asked"] and one["began"]
        assert one["during"]["committed"] == [] and one["during"]["switch"]
        assert one["during"]["facts"]["saved"] == ""
        assert one["during"]["facts"]["phase"] != "save"  # the loop trains, and a hang would be one
        assert one["done"] and one["committed"] == ["step-00000010"]
        assert (one["facts"]["saved"], one["facts"]["save_failed"]) == ("10", "")
        assert not one["switch"]
        assert one["loaded"] == [10.0]  # the state as it was when save() was called
    verdict = verify(scene.checkpoints / "step-00000010", FULL)
    assert verdict.state is CheckpointState.VERIFIED and (verdict.step, verdict.world) == (10, 2)


@pytest.mark.fault(
    "A rank is killed while torch's DCP writes in the background",
    "the checkpoint before stays the newest; the other ranks learn that the save failed",
)
def test_a_rank_that_is_killed_in_the_middle_of_a_save_leaves_the_checkpoint_before_as_the_newest(scene: Scene) -> None:
    said = scene.play("killed")
    assert scene.ended[1] == -9
    assert said[0]["first"] and not said[0]["done"]
    assert said[0]["committed"] == ["step-00000010"]
    assert said[0]["facts"]["saved"] == "10"
    assert said[0]["facts"]["save_failed"].startswith("step 20: ")
    found = newest(scene.checkpoints, FULL)
    assert found is not None and found.step == 10


@pytest.mark.fault(
    "The job ends while a save in the background is under way",
    "it is waited for as long as the job lasts",
)
def test_a_save_that_is_over_when_the_jobs_time_is_counts_as_failed_until_it_is_committed(scene: Scene) -> None:
    for one in scene.play("late"):
        assert not one["done"] and one["took"] < 5.0  # of the 6 s that were left
        assert one["at_end"]["save_failed"] == "step 10: the time was over before it was durable"
        assert one["afterwards"] and (one["facts"]["saved"], one["facts"]["save_failed"]) == ("10", "")


def test_one_save_at_a_time_is_under_way_and_all_ranks_skip_or_wait_alike(scene: Scene) -> None:
    for one in scene.play("second"):
        assert one["skipped"] is False and one["during"] == []
        assert one["third"] is True and one["there"][0] == "step-00000010"
        assert one["done"]
    assert sorted(path.name for path in scene.checkpoints.glob("step-*")) == ["step-00000010", "step-00000030"]


def test_a_save_takes_down_the_switch_that_it_answers_and_none_that_was_raised_since(scene: Scene) -> None:
    for one in scene.play("switch_between"):
        assert one["asked"] and one["first"] and one["up"] and one["second"] and one["down"]


def test_a_save_of_an_attempt_that_is_superseded_meanwhile_is_not_committed_and_no_alarm(scene: Scene) -> None:
    def next_attempt() -> None:
        while len(list((scene.folder / "ready").iterdir())) < 2:
            time.sleep(0.01)
        (scene.rundir.attempts / "0002").mkdir()
        fence.seal(scene.areas, 2, [1])
        (scene.folder / "sealed").touch()

    thread = threading.Thread(target=next_attempt)
    thread.start()
    said = scene.play("superseded")
    thread.join()
    assert [(one["done"], one["committed"], one["facts"]["save_failed"]) for one in said] == [(False, [], "")] * 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "small", str(disk)], check=True, timeout=30)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True, timeout=30)


@pytest.mark.fault(
    "The disk is full during a save in the background",
    "the save fails on all ranks, is reported, and gives its space back; the training goes on",
)
@pytest.mark.root
def test_a_full_disk_fails_the_save_says_so_and_gets_its_space_back(
    stage: subprocess.Popen[str], tmp_path: Path, small_disk: Path
) -> None:
    scene = Scene(stage, tmp_path, small_disk / "ckpt")
    for one in scene.play("full_disk"):
        assert one["began"] and not one["failed"]
        assert one["at_fault"]["saved"] == "" and "No space left" in one["at_fault"]["save_failed"]
        assert one["left"] == []
        assert one["again"] and (one["facts"]["saved"], one["facts"]["save_failed"]) == ("20", "")
    assert verify(scene.checkpoints / "step-00000020", FULL).state is CheckpointState.VERIFIED


# What the manual's loop leaves to its reader.
AROUND = """
import torch, torch.distributed.checkpoint as dcp
agree, last = (lambda vote: vote), 130
model = torch.nn.Linear(2, 2); optimizer = torch.optim.AdamW(model.parameters())

def load(newest):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if newest is not None: dcp.load(state, checkpoint_id=newest, no_dist=True)
    return 0

def train(step):
    optimizer.zero_grad(); model(torch.ones(2)).sum().backward(); optimizer.step()
"""


def test_the_loop_of_the_manual_runs_and_saves(tmp_path: Path) -> None:
    (block,) = marked("run", "background")
    env = {**os.environ, "FTSUPERVISE_CHECKPOINT_DIR": str(tmp_path / "ckpt")}
    done = subprocess.run(
        [sys.executable, "-c", AROUND + block.text], env=env, check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "ckpt").glob("step-*")) == ["step-00000100", "step-00000130"]
    assert verify(tmp_path / "ckpt" / "step-00000130", FULL).state is CheckpointState.VERIFIED
