"""What the pages of DeepSpeed and Megatron-LM show is run as it stands there.

DeepSpeed where it is installed. Megatron-LM needs a GPU: a stand-in has its loop, its handler, and functions of the same names.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.model import Attempt
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.switches import read_finished
from tests.manual.blocks import marked
from tests.neighbours.supervised import SupervisedRun

PAGE = Path(__file__).parents[2] / "docs" / "frameworks" / "megatron.md"
# The parts of megatron/training/training.py that the hook meets: a signal that is noted, and a decision after each iteration.
MEGATRON = """
import os, signal, sys, time

received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))  # --exit-signal-handler


def save(iteration):
    folder = os.environ["FTSUPERVISE_CHECKPOINT_DIR"]
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/.new", "w") as file:
        file.write(str(iteration))
    os.replace(f"{folder}/.new", f"{folder}/latest_checkpointed_iteration.txt")


def checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration, flops, context, iterator, iter_log=None):
    if received:
        save(iteration)
        print(f"exiting program after receiving SIGTERM at iteration {iteration}", flush=True)
        return True
    return False


def train(last):
    iteration = 0
    try:
        with open(os.environ["FTSUPERVISE_CHECKPOINT_DIR"] + "/latest_checkpointed_iteration.txt") as file:
            iteration = int(file.read())
    except FileNotFoundError:
        pass
    print(f"begins at {iteration}", flush=True)
    while iteration < last:
        time.sleep(0.02)
        iteration += 1
        if checkpoint_and_decide_exit(None, None, None, iteration, 0, {}, None, iter_log=None):
            sys.exit()
"""


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    folder = tmp_path / "megatron" / "training"
    folder.mkdir(parents=True)
    for name in ("", "training"):
        (tmp_path / "megatron" / name / "__init__.py").touch()
    (folder / "training.py").write_text(MEGATRON)
    (hook,) = marked("run", "megatron")
    behind = re.search(r"^Behind `pretrain\(…\)` goes `(.+?)`", PAGE.read_text(), re.M)
    assert behind is not None
    program = f"{hook.text}\nimport sys\ntraining.train(int(sys.argv[1]))\n{behind[1]}\n"
    (tmp_path / "pretrain.py").write_text(program)
    return tmp_path


def attempt(run: SupervisedRun) -> Attempt:
    return run.attempts()[-1]


def test_megatron_saves_and_leaves_when_a_switch_is_raised(run: SupervisedRun, megatron: Path, until: Any) -> None:
    save, kill = (run.rundir.switches / f"{name}-switch" for name in ("save", "kill"))
    for switch in (save, kill):
        mine = str(len(run.attempts()) + 1)
        one = run.start(sys.executable, "pretrain.py", "100000")
        until(lambda number=mine: any(beat.facts["attempt"] == number for beat in read_beats(run.rundir)), "a step", 60)
        switch.touch()
        assert one.wait(60) == 0
        assert "exiting program after receiving SIGTERM at iteration" in one.said()
        assert attempt(run).last_step
        assert not attempt(run).failure
    assert not save.exists()
    assert f"begins at {run.attempts()[0].last_step}" in run.members[1].said()


def test_a_megatron_training_that_is_complete_finishes_the_run(run: SupervisedRun, megatron: Path) -> None:
    assert run.start(sys.executable, "pretrain.py", "30").wait(60) == 0
    mark = read_finished(run.rundir)
    assert mark is not None and mark.step == 30
    assert attempt(run).words == "finished"


@pytest.mark.torch
def test_the_loop_that_is_shown_for_deepspeed_resumes(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    (loop,) = marked("run", "deepspeed")
    program = (
        "import sys, deepspeed, torch, torch.distributed as dist\nfrom ftsupervise import Guard\n"
        "deepspeed.ops.__compatible_ops__['deepspeed_shm_comm'] = False  # would be compiled first, for minutes\n"
        "deepspeed.init_distributed('gloo')\ntorch.manual_seed(0)\n"
        "class Net(torch.nn.Linear):\n    def forward(self, x):\n        return (super().forward(x) - 1).square().mean()\n"
        "config = {'train_micro_batch_size_per_gpu': 8, 'zero_optimization': {'stage': 1},\n"
        "          'optimizer': {'type': 'Adam', 'params': {'torch_adam': True}}}\n"
        "engine, *_ = deepspeed.initialize(model=Net(4, 1), config=config)\n"
        "batches, last = iter(lambda: torch.ones(8, 4), None), int(sys.argv[1])\n"
        f"{loop.text}\nprint('began at', first, 'ended at', step)\n"
    )
    (tmp_path / "train.py").write_text(program)
    env = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    said = []
    for last in (3, 5):
        words = [sys.executable, "train.py", str(last)]
        given = env | {
            "MASTER_PORT": str(20_000 + os.getpid() % 10_000),
            "FTSUPERVISE_CHECKPOINT_DIR": str(tmp_path / "saved"),
        }
        done = subprocess.run(words, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        said += [line for line in done.stdout.splitlines() if line.startswith("began")]
    assert said == ["began at 1 ended at 3", "began at 4 ended at 5"]
