"""Launchers as the command: what torchrun is told, what it says of the rank that failed first, and whom it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.host.ports import ports_of
from ftsupervise.model import ended
from ftsupervise.ranks.rpc import answer
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


NAMES = """
import os, sys
names = "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK FTSUPERVISE_NODE_RANK FTSUPERVISE_NNODES".split()
print("told", *(os.environ.get(name, "-") for name in names), flush=True)
sys.exit(1 if os.environ["FTSUPERVISE_ATTEMPT"] == "1" else 0)
"""


def test_a_command_on_this_machine_is_told_the_place_but_no_rank_for_it_may_start_its_ranks_itself(
    run: SupervisedRun, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(NAMES)
    assert run.start("--in-place", "1", "--", sys.executable, "train.py").wait(60) == 0
    told = [line.split()[1:] for line in run.members[0].said().splitlines() if line.startswith("told")]
    assert [[*words[:1], *words[2:]] for words in told] == [["127.0.0.1", "-", "-", "-", "0", "1"]] * 2
    first, second = (words[1] for words in told)
    assert first != second


def test_names_that_a_person_has_set_or_does_not_want_stay_as_they_are(run: SupervisedRun, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NAMES.replace("1 if", "0 if"))
    own = run.start(sys.executable, "train.py", MASTER_PORT="29500")
    assert own.wait(60) == 0
    assert "told - 29500 - - - 0 1" in own.said()
    never = run.start("--distributed", "never", "--", sys.executable, "train.py")
    assert never.wait(60) == 0
    assert "told - - - - - 0 1" in never.said()


@pytest.mark.threat(
    "Another account listens on the port at which the ranks of an attempt would meet.",
    "The attempt is given another port.",
)
def test_an_attempt_is_not_sent_to_a_port_on_which_somebody_listens(run: SupervisedRun, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NAMES.replace("1 if", "0 if"))
    first, second, *_ = ports_of(str(run.rundir.root), 1)
    with socket.create_server(("127.0.0.1", first)):
        assert run.start(sys.executable, "train.py").wait(60) == 0
    assert f"told 127.0.0.1 {second} - - -" in run.members[0].said()


@pytest.mark.threat(
    "Another account knows the name of the run, and with it the eight ports that its next attempt may have, and listens at all "
    "of them.",
    "The attempt is given a port that the kernel chooses, or none.",
)
def test_an_attempt_is_sent_to_none_of_its_ports_where_somebody_listens_at_all(
    run: SupervisedRun, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(NAMES.replace("1 if", "0 if"))
    mine = ports_of(str(run.rundir.root), 1)
    with ExitStack() as stack:
        for port in mine:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        assert run.start(sys.executable, "train.py").wait(60) == 0
    told = re.search(r"told 127\.0\.0\.1 (\d+) - - -", run.members[0].said())
    assert told is not None and int(told[1]) not in (0, *mine)


TAKEN = """
import os, socket, subprocess, sys
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["FTSUPERVISE_ATTEMPT"] == "1":
    other = socket.create_server(place)  # somebody else is faster
server = socket.create_server(place)
print("listens at", place[1], flush=True)
"""


@pytest.mark.fault(
    "Somebody takes the port of an attempt before rank 0 binds it",
    "the ledger says so; the next attempt has another port",
)
def test_a_port_that_is_taken_before_rank_0_binds_it_costs_one_restart(run: SupervisedRun, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TAKEN)
    assert run.start("--in-place", "3", "--", sys.executable, "train.py").wait(60) == 0
    failed, done = run.attempts()
    assert failed.sign == "port in use"
    assert failed.failure is not None
    assert failed.failure.detail.startswith(
        "the next attempt meets at another port: OSError: [Errno 98] Address already"
    )
    assert done.number == 2
    assert f"listens at {ports_of(str(run.rundir.root), 2)[0]}" in run.members[0].said()


def test_a_node_says_which_port_is_free_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        taken = busy.getsockname()[1]
        other = answer(f"port {taken}", "")
        assert other not in ("", "0", str(taken)), "any other one, where all that are meant are taken"
        free = answer("port 20000 20001 20002 20003", "")
        assert answer(f"port {taken} {free}", "") == free
    assert answer("port", "") == answer("port twenty", "") == "no such question: port"


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
