"""The examples minimal, ddp and fsdp_dcp, launched on Slurm and interrupted five times each, end with the same bits."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.manual.blocks import ROOT
from tests.slurm.ring_scene import Scene

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
Until = Callable[..., Any]
STEPS = 700
torch_only = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
TORCHRUN = f"{Path(sys.executable).parent}/torchrun --standalone --nproc-per-node 2"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "minimal": (sys.executable, {"nodes": 2, "tasks_per_node": 1}),
    "ddp": (sys.executable, {"nodes": 2, "tasks_per_node": 1}),
    "fsdp_dcp": (TORCHRUN, {"nodes": 1, "tasks_per_node": 1}),
}
HOW = ("SIGKILL", "SIGTERM", "SIGUSR1", "the warning of the time limit", "SIGKILL")


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["minimal", *(pytest.param(name, marks=torch_only) for name in ("ddp", "fsdp_dcp"))])
def test_an_example_that_is_interrupted_five_times_at_random_ends_with_the_bits_of_an_undisturbed_run(
    name: str, scene: Callable[..., Scene], until: Until
) -> None:
    seed = int(os.environ.get("SEED", time.time_ns()))
    chance = random.Random(seed)
    print(f"SEED={seed}")
    python, shape = SHAPES[name]
    here = scene(nodes=2)
    for file in (ROOT / "examples" / name).glob("*.py"):
        shutil.copy(file, here.folder)
    command = f"{python} train.py --steps {STEPS} --save-every 25 --log-every 1 --step-time"
    here.launch(f"{command} 0", jobs=1, **shape)
    until(here.rundir.finished.exists, "the undisturbed run", 400)
    alone = ending(here)
    here.name += "-again"
    here.launch(f"{command} 0.05", jobs=9, restart={"same_failure": 0}, **shape)
    for turn, how in enumerate(chance.sample(HOW, len(HOW))):
        attempt = max(1, len(here.attempts()))
        at = STEPS * (turn + 1) // 8 + chance.randrange(STEPS // 10)
        until(lambda: here.trains(attempt) and newest_step(here) >= at, f"step {at} of attempt {attempt}", 400)  # noqa: B023
        interrupt(here, how, chance.choice(sorted(here.trains(attempt).values())))
        print(f"step {newest_step(here)}: {how} in attempt {attempt}")
        until(lambda: len(here.attempts()) > attempt, f"the attempt after {how}", 400)  # noqa: B023
    until(here.rundir.finished.exists, "the end", 400)
    print([(one.number, one.sign, one.last_step) for one in here.attempts()])
    assert len(here.attempts()) >= len(HOW) + 1
    assert ending(here) == alone


def interrupt(here: Scene, how: str, rank: int) -> None:
    if how.startswith("SIG"):
        os.kill(rank, signal.Signals[how])
    else:  # as --signal=B:USR1@… does
        (job,) = re.findall(r"^(\S+) RUNNING", here.queue(), re.M)
        words = ["scancel", "--batch", "--signal=USR1", job]
        done = subprocess.run(words, env=here.sandbox.env(), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode in (0, 229), done.stderr  # 229 after it did it: 22.05


def newest_step(here: Scene) -> int:
    return max((int(step) for step in re.findall(r"^step (\d+) ", here.log(), re.M)), default=0)


def ending(here: Scene) -> str:
    found = re.findall(rf"finished at step {STEPS}, weights (\w+)", here.log())
    assert len(found) == 1, here.log()
    return str(found[0])
