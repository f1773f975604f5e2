"""The example of FSDP2 and Distributed Checkpoint: a launched run that loses half of its ranks goes on with the others."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify
from ftsupervise.rundir.paths import RunDir
from tests.manual.blocks import ROOT

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
Until = Callable[..., Any]
TRAIN = ROOT / "examples" / "fsdp_dcp" / "train.py"
BIN = Path(sys.executable).parent
ENV = {
    **os.environ,
    "PATH": f"{BIN}:{os.environ['PATH']}",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # NCCL does not take four ranks to one
}
STEPS = 60
# half of the ranks are gone after the first attempt
SETTINGS = f"""
name: fsdp
scheduler: local
launch:
  command: >-
    torchrun --standalone --nproc-per-node $((FTSUPERVISE_ATTEMPT == 1 ? 4 : 2))
    train.py --steps {STEPS} --save-every 10 --step-time 0.05
  jobs: 1
"""


@pytest.mark.fault(
    "Half of the ranks are lost, and the checkpoint is of all of them",
    "two ranks load what four have written, to the bit",
)
def test_a_run_of_four_ranks_that_loses_one_goes_on_with_two_from_the_same_bits(tmp_path: Path, until: Until) -> None:
    shutil.copy(TRAIN, tmp_path)
    (tmp_path / "ftsupervise.yaml").write_text(SETTINGS)
    launch = [str(BIN / "ftsupervise"), "launch"]
    subprocess.run(launch, cwd=tmp_path, env=ENV, check=True, timeout=60, stdout=subprocess.DEVNULL)
    rundir = RunDir(tmp_path / "runs" / "fsdp")
    try:
        until((rundir.checkpoints / "step-00000020").exists, "the second checkpoint", 120)
        os.kill(ranks(tmp_path)[2], signal.SIGKILL)
        until(rundir.finished.exists, "the end", 120)
    finally:
        (rundir.switches / "kill-switch").touch()
    log = "".join(path.read_text() for path in sorted(rundir.logs.rglob("*")) if path.is_file())
    resumed = re.search(r"resumed after step (\d+) at world size 2, weights (\w+)", log)
    assert resumed is not None, log
    assert f"saving step {resumed[1]}, weights {resumed[2]}\n" in log  # by four ranks, and loaded by two
    newest = verify(rundir.checkpoints / f"step-{STEPS:08d}", Scope(Thoroughness.FULL))
    assert (newest.state, newest.world) == (CheckpointState.VERIFIED, 2)
    # undisturbed: the same steps on four ranks, the rest on two
    alone = tmp_path / "alone"
    alone.mkdir()
    train(alone, 4, int(resumed[1]))
    assert finished(train(alone, 2, STEPS)) == finished(log)


def ranks(folder: Path) -> list[int]:
    """The ranks that run in ``folder``: the children of torchrun there."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            words = (proc / "cmdline").read_bytes().split(b"\0")
            here = (proc / "cwd").resolve() == folder
        except OSError:
            continue
        if here and b"train.py" in words and not any(b"torchrun" in word for word in words):
            found.append(int(proc.name))
    return sorted(found)


def train(folder: Path, world: int, steps: int) -> str:
    words = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={world}", str(TRAIN)]
    words += ["--steps", str(steps), "--save-every", "10", "--step-time", "0"]
    return subprocess.run(
        words, cwd=folder, env=ENV, check=True, timeout=200, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    ).stdout  # fmt: skip


def finished(text: str) -> str:
    found = re.findall(rf"finished at step {STEPS}, weights (\w+)", text)
    assert len(found) == 1, text
    return str(found[0])
