"""Each example is launched, killed at random moments, and ends with the bits of a run that nothing disturbed."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.paths import RunDir
from tests.manual.blocks import ROOT
from tests.neighbours.supervised import outside_a_job

Until = Callable[..., Any]
BIN = Path(sys.executable).parent
STEPS = 150
torch_only = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
EXAMPLES = {
    "minimal": f"{sys.executable} train.py",
    "ddp": f"{BIN}/torchrun --standalone --nproc-per-node 2 train.py",
    "fsdp_dcp": f"{BIN}/torchrun --standalone --nproc-per-node 2 train.py",
}


class Launched:
    """A copy of an example, launched on this machine."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.command = folder / name, EXAMPLES[name]
        self.rundir = RunDir(self.folder / "runs" / "tried")
        shutil.copytree(ROOT / "examples" / name, self.folder, ignore=shutil.ignore_patterns("runs", "checkpoints"))
        self.env = outside_a_job(
            FTSUPERVISE_STATE_DIR=str(folder / "state"), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"
        )
        (self.folder / "ftsupervise.yaml").write_text(
            "name: tried\nscheduler: local\n"
            f"launch:\n  command: {self.command} --steps {STEPS} --step-time 0.05 --save-every 20 --log-every 1\n"
            f"  jobs: 1\n  restart: {{back_off: 100ms, same_failure: 0}}\n"
        )

    def type(self, *words: str) -> None:
        command = [sys.executable, "-m", "ftsupervise", *words]
        subprocess.run(command, cwd=self.folder, env=self.env, check=True, timeout=60, stdout=subprocess.DEVNULL)

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.rundir.logs.rglob("*")) if path.is_file())

    def step(self, attempt: int) -> int:
        """The last step of this attempt, as the log has it; 0: it has made none."""
        parts = re.split(rf"^.*: attempt {attempt} of tried: ", self.log(), flags=re.M)
        return int((re.findall(r"^step (\d+) ", parts[1], re.M) or ["0"])[-1]) if len(parts) > 1 else 0

    def ranks(self) -> list[int]:
        """The processes that train: not what started them."""
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            try:
                words = (proc / "cmdline").read_bytes().split(b"\0")
                here = (proc / "cwd").resolve() == self.folder
            except OSError:
                continue
            trains = b"train.py" in words and not any(
                word in (b"ftsupervise", b"run") or b"torchrun" in word for word in words
            )
            if here and trains and words[0].endswith((b"python", b"python3", b"python3.11")):
                found.append(int(proc.name))
        return sorted(found)

    def undisturbed(self) -> str:
        """The weights that the same command comes to without a supervisor."""
        place = self.folder / "alone"
        place.mkdir()
        words = self.command.replace("train.py", str(self.folder / "train.py")).split()
        done = subprocess.run(
            [*words, "--steps", str(STEPS), "--step-time", "0"],
            cwd=place, env=self.env, check=True, timeout=250, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        return finished(done.stdout)


def finished(text: str) -> str:
    found = re.findall(rf"finished at step {STEPS}, weights (\w+)", text)
    assert len(found) == 1, text
    return str(found[0])


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[[str], Launched]]:
    made: list[Launched] = []

    def make(name: str) -> Launched:
        made.append(Launched(tmp_path, name))
        return made[-1]

    yield make
    for one in made:
        (one.rundir.switches / "kill-switch").touch()


def kill_at_random(run: Launched, kills: int, until: Until) -> None:
    chance = random.Random(f"{run.command} {kills}")
    run.type("launch")
    at = sorted(chance.sample(range(5, STEPS - 10), kills))
    for attempt, stop in enumerate(at, start=1):
        until(lambda attempt=attempt, stop=stop: run.step(attempt) >= stop, f"step {stop} of attempt {attempt}", 200)
        os.kill(chance.choice(run.ranks()), signal.SIGKILL)
    until(lambda: "finished at step" in run.log(), "the end", 250)
    assert len(re.findall("^.* ended: .*killed by SIGKILL.*last step", run.log(), re.M)) == kills
    assert finished(run.log()) == run.undisturbed()


def test_the_smallest_example_that_is_killed_ends_with_the_bits_of_an_undisturbed_run(
    launched: Callable[[str], Launched], until: Until
) -> None:
    kill_at_random(launched("minimal"), 2, until)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["minimal", *(pytest.param(name, marks=torch_only) for name in ("ddp", "fsdp_dcp"))])
def test_an_example_that_is_killed_five_times_ends_with_the_bits_of_an_undisturbed_run(
    launched: Callable[[str], Launched], until: Until, name: str
) -> None:
    kill_at_random(launched(name), 5, until)
