"""Where the ranks of an attempt meet: which node, which port, and which commands are given torch's names."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping

import pytest

from ftsupervise.host.ports import first_free, ports_of
from ftsupervise.model import Cause, CauseKind, FailureKind
from ftsupervise.run.exit_analysis import failure
from ftsupervise.run.rendezvous import (
    MeetingPoint,
    in_each_rank,
    in_rank_order,
    meeting_point,
    torchrun_env,
    wants_names,
)

NODES = ("node-0", "node-1", "node-2")
POINT = MeetingPoint("node-0", 20_008, 3)


def nobody(questions: Mapping[str, str], timeout: float) -> Mapping[str, str]:
    raise AssertionError("no agent is to be asked")


def test_no_attempt_has_a_port_of_the_thousand_before_it() -> None:
    for attempt in (1, 7, 5000):
        before = {port for older in range(max(0, attempt - 1000), attempt) for port in ports_of("/runs/a", older)}
        mine = set(ports_of("/runs/a", attempt))
        assert not mine & before
        assert all(20_000 <= port < 30_000 for port in mine)


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    ports = ports_of("/runs/busy", 1)
    free = first_free(ports)
    assert free is not None
    with socket.socket() as other:
        other.bind(("127.0.0.1", free))
        other.listen()
        assert first_free([free]) is None
        assert first_free(ports) not in (None, free)
    assert first_free([]) is None


def test_one_node_meets_at_its_own_loopback_and_several_at_the_node_of_rank_0() -> None:
    alone = meeting_point("/runs/a", 1, (), "here", lambda node: "", nobody)
    assert (alone.address, alone.nodes) == ("127.0.0.1", 1)
    assert meeting_point("/runs/a", 1, ("here",), "here", lambda node: "", nobody).address == "127.0.0.1"
    names = ("localhost", "node-1.invalid")
    assert meeting_point("/runs/a", 1, names, "localhost", lambda node: "10.0.0.7", nobody).address == "localhost"
    unnamed = ("node-1.invalid", "localhost")
    assert meeting_point("/runs/a", 1, unnamed, unnamed[0], lambda node: "10.0.0.7", nobody).address == "10.0.0.7"


def test_a_free_port_of_another_node_is_its_agents_to_say() -> None:
    asked: list[str] = []

    def agents(questions: Mapping[str, str], timeout: float) -> Mapping[str, str]:
        asked.append(questions["localhost"])
        return (
            {"localhost": questions["localhost"].split()[3]} if len(asked) > 1 else {}
        )  # it is still starting at first

    point = meeting_point("/runs/a", 4, ("localhost", "node-2"), "node-0", lambda node: "", agents)
    assert point.port == ports_of("/runs/a", 4)[2]
    assert asked[0].startswith("port 2")


def test_an_agent_that_says_nonsense_or_nothing_leaves_the_first_port() -> None:
    first = ports_of("/runs/a", 4)[0]
    for said in ("22", "", "no such question: port"):
        agents = lambda questions, timeout, said=said: {"localhost": said}  # noqa: E731
        assert meeting_point("/runs/a", 4, ("localhost", "x"), "y", lambda node: "", agents).port == first


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        ("srun python train.py", NODES),
        ("srun --nodelist=node-[1-2] python train.py", NODES[1:]),
        ("srun -w node-2 -n1 python train.py --nodelist=node-0", NODES[2:]),
        ("srun -m block:cyclic python train.py", NODES),
        ("srun --distribution=arbitrary python train.py", None),
        ("srun --relative=1 python train.py", None),
        ("srun -x node-0 python train.py", None),
        ("srun -w ./nodes python train.py", None),
        ("bash train.sh -x", NODES),
    ],
)
def test_rank_0_is_on_the_first_node_that_srun_was_given(words: str, nodes: tuple[str, ...] | None) -> None:
    assert in_rank_order(tuple(words.split()), NODES) == nodes


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("srun python train.py", True),
        ("srun --ntasks 4 -l /opt/venv/bin/python3.11 -u train.py", True),
        ("srun apptainer exec image.sif python train.py", True),
        ("srun ./train.py", True),
        ("python train.py", True),
        ("/home/deepspeed/ray/bin/python train.py", True),
        ("srun torchrun train.py", False),
        ("srun python -m torch.distributed.run train.py", False),
        ("accelerate launch train.py", False),
        ("srun deepspeed train.py", False),
        ("mpirun -n 4 python train.py", False),
        ("srun ./simulation", False),
        ("srun", False),
    ],
)
def test_torchs_names_are_given_to_python_without_a_launcher(words: str, wanted: bool) -> None:
    command = tuple(words.split())
    assert wants_names(command, words, {}, "auto") is wanted
    assert not wants_names(command, words, {}, "never")
    assert not wants_names(command, words, {"MASTER_PORT": "29500"}, "auto")


def test_shell_code_counts_by_the_programs_in_it() -> None:
    shell = ("bash", "-c", "set -o pipefail\ntrap : USR1 USR2\npython train.py 2>&1 | tee log")
    assert wants_names(("srun", *shell), "", {}, "auto")
    assert wants_names(shell, "\n".join(shell), {}, "auto")
    steps = ("bash", "-c", "srun --nodelist=$FTSUPERVISE_NODES python train.py")
    assert not wants_names(steps, "\n".join(steps), {}, "auto")


@pytest.mark.parametrize(("nodes", "tasks", "names"), [(1, 1, "--"), (2, 1, "0/1/-"), (1, 2, "0/2/0"), (2, 4, "0/4/0")])
def test_the_only_rank_of_a_job_is_not_told_that_it_is_one_of_several(nodes: int, tasks: int, names: str) -> None:
    """nanoGPT, where RANK is set, begins a group of processes and asks for LOCAL_RANK."""
    shown = 'echo "${RANK-}${RANK+/}${WORLD_SIZE--}${RANK+/}${LOCAL_RANK--}"'
    words = in_each_rank(("srun", "sh", "-c", shown), names=True)[1:]
    slurm = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
    slurm |= {"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_JOB_NUM_NODES": str(nodes), "PATH": os.environ["PATH"]}
    done = subprocess.run(words, env=slurm, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == names


def test_a_command_keeps_its_words_and_place_behind_sruns_options() -> None:
    command = ("srun", "--label", "-n", "2", "python", "train.py", "a b")
    words = in_each_rank(command, names=True)
    assert words[:4] == command[:4]
    assert words[-3:] == command[-3:]
    assert in_each_rank(command, names=False) == command
    assert in_each_rank(("python", "train.py"), names=True) == ("python", "train.py")
    assert len(in_each_rank(("srun", "sh", "-c", "echo $FTSUPERVISE_NODE_RANK"), names=False)) > 4


def test_torchrun_is_told_what_its_words_leave_open() -> None:
    told = torchrun_env("srun\ntorchrun\n--nproc-per-node=2\ntrain.py", POINT, "first", 3, {})
    assert told == {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "node-0:20008",
        "PET_RDZV_ID": "first-3",
        "PET_NNODES": "3",
    }
    assert "PET_NNODES" not in torchrun_env("torchrun --nnodes=1:4 train.py", POINT, "first", 3, {})
    for own in ("--standalone", "--rdzv-endpoint=a:1", "--master_port=1", "--node-rank=0"):
        assert torchrun_env(f"torchrun {own} train.py", POINT, "first", 3, {}) == {}
    assert torchrun_env("torchrun train.py", POINT, "first", 3, {"PET_RDZV_ENDPOINT": "a:1"}) == {}
    assert torchrun_env("python train.py", POINT, "first", 3, {}) == {}


def test_a_port_that_was_taken_meanwhile_is_named_as_the_cause() -> None:
    said = (
        'Traceback (most recent call last)\n  File "train.py", line 3, in <module>\n'
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: 20008, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"
    )
    found = failure(1, Cause(CauseKind.EXIT, code=1), output=said)
    assert found is not None
    assert (found.kind, found.sign) == (FailureKind.START, "port in use")
    assert "the next attempt meets at another port" in found.detail
    warned = "OSError: [Errno 98] Address already in use\n" + said.replace(
        said.splitlines()[2], "ValueError: no such shape"
    )
    other = failure(1, Cause(CauseKind.EXIT, code=1), output=warned)
    assert other is not None
    assert other.sign == "exit 1"
