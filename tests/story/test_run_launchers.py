"""Launchers as the command: what torchrun is told, what it says of the rank that failed first, and whom it leaves behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.model import ended
from ftsupervise.run.exit_analysis import first_death, root_error
from tests.neighbours.supervised import SupervisedRun

Until = Callable[..., Any]

# What torchrun 2.13 prints at its end, as seen.
BLOCK = """
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_20:17:50
  host      : node-3
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 11168)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 11168
============================================================
"""
# Stands in for torchrun: an agent that is told where errors go, and always leaves with 1.
AGENT = (
    "import json, os, sys\n"
    "json.dump({'message': {'message': 'ValueError: no such shape', 'extraInfo': {'timestamp': '1'}}},\n"
    "          open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
    "print('Traceback (most recent call last)', 'ConnectionError: closed by peer', sep='\\n', flush=True)\n"
    "sys.exit(1)\n"
)


def test_the_block_at_torchruns_end_says_which_rank_died_and_how() -> None:
    assert first_death(BLOCK) == ended(-9, "node-3", "1")
    assert first_death(BLOCK.replace("-9", "7 ")) == ended(7, "node-3", "1")


def test_of_several_agents_the_one_whose_rank_died_first_is_believed() -> None:
    """Each node's tells of its own; a rank that it ended itself, with SIGTERM, is none."""
    victim = BLOCK.replace("node-3", "node-4").replace("rank      : 1", "rank      : 3").replace("-9", "1 ")
    late, told = victim.replace("17:50", "17:51"), victim.replace("17:50", "17:49").replace("1  (pid", "-15 (pid")
    assert "-15 (pid" in told
    assert first_death(late + BLOCK + told) == ended(-9, "node-3", "1")


def test_the_first_error_is_taken_from_where_torchrun_writes_it_and_not_from_its_victims(run: SupervisedRun) -> None:
    assert run.start(sys.executable, "-c", AGENT).wait(60) == 1
    assert run.attempts()[-1].sign == "exit 1 (ValueError)"


def test_an_error_file_that_is_damaged_is_no_error(tmp_path: Path) -> None:
    for text in ("", "[]", "{", '{"message": null}', '{"message": {"other": 1}}'):
        (tmp_path / "error.json").write_text(text)
        assert root_error(tmp_path / "error.json") in ("", "None")


def test_what_a_person_told_torchrun_stays(run: SupervisedRun) -> None:
    names = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_ERROR_FILE", "FTSUPERVISE_MASTER_PORT")
    shown = " ".join(f"${name}" for name in names)
    one = run.start("sh", "-c", f"echo told {shown}", TORCHELASTIC_ERROR_FILE="mine")
    assert one.wait(60) == 0
    (line,) = [line for line in one.said().splitlines() if line.startswith("told")]
    assert line.split()[1:3] == ["1", "mine"]
    assert 20_000 <= int(line.split()[3]) < 30_000


def test_workers_whose_agent_was_killed_are_ended(run: SupervisedRun, tmp_path: Path, until: Until) -> None:
    """torchrun's own would train on to the end."""
    agent = "setsid sh -c 'echo $$ > worker; while :; do sleep 0.1; done' & echo $$ > agent; wait"
    one = run.start("sh", "-c", agent)
    pids = [until(lambda name=name: (tmp_path / name).exists() and (tmp_path / name).read_text(), name) for name in
            ("worker", "agent")]  # fmt: skip
    os.kill(int(pids[1]), signal.SIGKILL)
    assert one.wait(60) == 137
    assert processes.identity(int(pids[0])) is None


@pytest.mark.torch
def test_torchrun_itself_is_understood(run: SupervisedRun, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make test-torch")
    code = "import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(60)"
    (tmp_path / "train.py").write_text(code)
    words = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=0", "--rdzv-endpoint=localhost:0")
    one = run.start(sys.executable, *words, "--rdzv-backend=c10d", "train.py")
    assert one.wait(120) == 1
    assert run.attempts()[-1].sign == "killed by SIGKILL"
    assert run.attempts()[-1].words.startswith("rank 1 on ")
