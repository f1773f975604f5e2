"""The examples of frameworks, launched on Slurm and interrupted again and again, end with the bits of an undisturbed run."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.manual.blocks import ROOT
from tests.slurm.ring_scene import Scene

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
Until = Callable[..., Any]
TORCHRUN = Path(sys.executable).parent / "torchrun"


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("framework", "ranks"),
    [("lightning", "torchrun"), ("huggingface", "torchrun"), ("accelerate", "torchrun"), ("lightning", "srun")],
)
def test_an_example_that_is_interrupted_five_times_at_random_ends_with_the_bits_of_an_undisturbed_run(
    framework: str, ranks: str, scene: Callable[..., Scene], until: Until
) -> None:
    chance = random.Random(seed := time.time_ns())
    print(f"seed {seed}")
    here = scene(nodes=1)
    shutil.copy(ROOT / "examples" / framework / "train.py", here.folder)
    words = "train.py --epochs 12 --step-time 0.05 --save-every 7"
    command = f"{TORCHRUN} --nproc-per-node 2 {words}" if ranks == "torchrun" else f"{sys.executable} {words}"
    launch: dict[str, Any] = {"nodes": 1, "tasks_per_node": 1 if ranks == "torchrun" else 2, "jobs": 8}
    here.launch(command, **launch)
    until(lambda: "ended: finished" in here.log(), "the undisturbed run", 300)
    alone = ending(here)
    here.name += "-again"
    here.launch(command, **launch)
    for turn in range(1, 6):
        before = newest(here)
        until(lambda: here.trains(len(here.attempts())) and newest(here) > before, f"progress of turn {turn}", 300)  # noqa: B023
        time.sleep(chance.uniform(0, 2))
        assert not here.rundir.finished.exists(), "the example ends too early for this test"
        attempt = len(here.attempts())
        rank = chance.choice(list(here.trains(attempt).values()))
        os.kill(rank, how := chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1]))
        print(f"turn {turn}: {how.name} in attempt {attempt}, newest checkpoint {newest(here)}")
        until(lambda: len(here.attempts()) > attempt, f"the attempt after turn {turn}", 300)  # noqa: B023
    until(lambda: "ended: finished" in here.log(), "the end", 300)
    assert len(here.attempts()) >= 6
    assert ending(here) == alone
    by_slurm = framework == "lightning" and ranks == "srun"  # then it would requeue the job itself
    assert ("Lightning's auto_requeue is off in this run" in here.log()) is by_slurm


def checkpoints(here: Scene) -> list[int]:
    """The steps of those that are committed."""
    found = (re.fullmatch(r"(?:step|checkpoint)-(\d+)", path.name) for path in here.rundir.checkpoints.glob("*-*"))
    return sorted(int(match[1]) for match in found if match)


def newest(here: Scene) -> int:
    return max(checkpoints(here), default=0)


def ending(here: Scene) -> str:
    """The last line of the example: its step and the digest of its weights."""
    found = re.findall(r"^finished at step \d+, weights \w+", here.log(), re.M)
    assert len(found) == 1, here.log()
    return str(found[0])
