"""Ranks of torch.distributed that hang, with PyTorch's worker server in each: what it says is part of the verdict."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.neighbours.supervised import SupervisedRun
from tests.neighbours.typed import typed

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
Until = Callable[..., Any]
RANKS = str(Path(__file__).with_name("server_ranks.py"))
ALL = 'for r in 0 1 2; do RANK=$r WORLD_SIZE=3 GLOO_SOCKET_IFNAME=lo "$@" & done; wait'
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SupervisedRun]:
    with (
        tempfile.TemporaryDirectory(prefix="fts-ws-", dir="/dev/shm") as folder,
        closing(SupervisedRun(Path(folder) / "run", tmp_path)) as one,
    ):
        yield one


def start(run: SupervisedRun, *options: str, own: bool = False) -> None:
    words = [sys.executable, RANKS, str(run.rundir.root.parent), *(["own"] if own else [])]
    run.start(*options, "--", "sh", "-c", ALL, "sh", *words, PYTHONPATH=ROOT)


def test_a_rank_that_does_not_join_is_named_by_stack_and_flight_recorder_while_it_hangs(
    run: SupervisedRun, until: Until
) -> None:
    start(run, "--in-place", "1", "--hang", "600")

    def said() -> str:
        text = typed("diagnose", run.rundir.root).stdout
        return text if "it stands still" in text else ""

    text = until(said, "a run that stands", 120)
    assert "(confidence: high)" in text.splitlines()[0], text
    assert "the flight recorder: rank 1 did not join all_reduce, number 20 of group 0, which ranks 0,2 wait for" in text
    assert "the stack of rank 1: rank 1 is in main (server_ranks.py:" in text
    assert "ranks 0,2: waits for others in all_reduce (server_ranks.py:" in text


def test_the_evidence_of_a_hang_has_the_dumps_of_all_ranks(run: SupervisedRun, until: Until) -> None:
    start(run, "--in-place", "1", "--hang", "3", "--hang-unknown", "5", "--back-off", "0")
    until(lambda: run.attempts() and run.attempts()[0].ended, "the end of the hung attempt", 120)
    flight = run.rundir.attempt(1) / "evidence" / "flight"
    assert sorted(one.name for one in flight.iterdir()) == ["rank_0", "rank_1", "rank_2"]
    assert "it answers, so the process is not stopped" in run.evidence("rank-1.txt")
    text = typed("diagnose", run.rundir.root, "1", code=0).stdout
    assert "rank 1 did not join all_reduce, number 20" in text and "(confidence: high)" in text.splitlines()[0], text


def test_of_a_script_without_the_guard_the_server_shows_the_stacks(run: SupervisedRun, until: Until) -> None:
    """An address that a rank sets for itself is not seen from outside: here it is in the environment that it begins in."""
    folder = run.rundir.root.parent
    each = ALL.replace("WORLD_SIZE=3", f'WORLD_SIZE=3 TORCH_WORKER_SERVER_SOCKET="{folder}/$r.sock"')
    run.start("--", "sh", "-c", each, "sh", sys.executable, RANKS, str(folder), "own", PYTHONPATH=ROOT)
    until(run.attempts, "an attempt", 60)

    def said() -> str:
        text = typed("diagnose", run.rundir.root).stdout
        return text if "rank 1: is in main (server_ranks.py:" in text else ""

    text = until(said, "the stack of rank 1", 120)
    assert "ranks 0,2: waits for others in all_reduce (server_ranks.py:" in text
