"""The shell example under launch on a real Slurm, interrupted at random: the short versions are in test_shell_example.py."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.paths import ENV_RUN_DIR
from tests.manual.blocks import ROOT
from tests.slurm.ring_scene import Scene
from tests.story.test_shell_example import undisturbed, weights

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
Until = Callable[..., Any]
EXAMPLE = ROOT / "examples" / "shell"
STEPS, PIECE = 600, 10


def test_a_shell_loop_that_is_interrupted_five_times_ends_with_the_same_weights(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2)
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(1 << 32)))
    draw = random.Random(seed)
    print(f"SEED={seed}")
    for name in ("train.sh", "trainer.py"):
        shutil.copy(EXAMPLE / name, here.folder)
    here.launch(
        f"bash train.sh {STEPS} {PIECE}", nodes=1, heartbeat={"log": r"step (\d+)"}, env={"STEP_TIME": "0.02"}, jobs=10
    )
    done = []
    for number in range(5):
        at = STEPS * (number + 1) // 7 + draw.randrange(STEPS // 7)
        until(lambda: newest_step(here) >= at or here.rundir.finished.exists(), f"step {at}", 300)  # noqa: B023
        assert not here.rundir.finished.exists()
        done.append(interrupt(here, draw, until))
    until(here.rundir.finished.exists, f"the end after {done}", 300)
    assert weights(here.log()) == undisturbed(here.folder, STEPS, PIECE), done
    print(done, [(one.number, one.sign, one.last_step) for one in here.attempts()])


def newest_step(here: Scene) -> int:
    return max((int(step) for step in re.findall(r"^step (\d+) ", here.log(), re.M)), default=0)


def interrupt(here: Scene, draw: random.Random, until: Until) -> str:
    how = draw.choice(["trainer", "loop", "everything", "kill switch", "scancel"])
    mine = processes.marked(ENV_RUN_DIR).get(str(here.rundir.root), [])
    if how == "kill switch":
        (here.rundir.switches / "kill-switch").touch()
        until(lambda: here.attempts()[-1].ended, "the end of the attempt", 120)
        here.type("clear")
        if not here.queue():
            here.type("launch")
    elif how == "scancel":
        here.sandbox.run(["scancel", "--state=RUNNING", f"--name={here.name}"])
    else:
        names = {"trainer": ("python",), "loop": ("bash",), "everything": ("bash", "python")}[how]
        for one in mine:
            if one.name.startswith(names):
                processes.signal_exactly(one, signal.SIGKILL)
    return how
