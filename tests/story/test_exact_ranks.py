"""Several ranks save and restore by the guard: all the same step or all an error, and what they hold alike is written once."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
OURS = ("FTSUPERVISE_", "SLURM_", "RANK", "WORLD_SIZE")


class Ranks:
    """Starts ranks that share a checkpoint folder."""

    def __init__(self, parent: subprocess.Popen[str], folder: Path) -> None:
        self._parent, self._folder, self._orders = parent, folder, 0
        self.checkpoints = folder / "ckpt"

    def train(self, what: str, world: int, steps: int, **more: Any) -> list[dict[str, Any]]:
        """What each rank says at the end of its loop."""
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._orders += 1
        places = {"store": f"store-{self._orders}", "into": "ckpt", "said": "stderr"}
        order = {"what": what, "world": world, "steps": steps, **more}
        order |= {name: str(self._folder / place) for name, place in places.items()}
        self._parent.stdin.write(json.dumps(order) + "\n")
        self._parent.stdin.flush()
        answer = self._parent.stdout.readline()
        assert answer, "the parent of the ranks is gone"
        found: list[dict[str, Any]] = json.loads(answer)
        return found

    def forget(self) -> None:
        shutil.rmtree(self.checkpoints)

    def said(self) -> str:
        return (self._folder / "stderr").read_text()


@pytest.fixture(scope="module")
def parent() -> Iterator[subprocess.Popen[str]]:
    """It imports torch once for all tests here."""
    env = {name: text for name, text in os.environ.items() if not name.startswith(OURS)}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(Path(__file__).with_name("exact_ranks.py"))]
    one = subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield one
    one.communicate(timeout=60)


@pytest.fixture
def ranks(parent: subprocess.Popen[str], tmp_path: Path) -> Ranks:
    return Ranks(parent, tmp_path)


@pytest.mark.parametrize("what", ["ddp", "fsdp"])
def test_ranks_that_are_restarted_end_with_the_bits_of_undisturbed_ones(ranks: Ranks, what: str) -> None:
    whole = ranks.train(what, 2, 30)
    assert not any("error" in one for one in whole), whole
    ranks.forget()
    for number, stop in enumerate((6, 14, 27)):
        ranks.train(what, 2, stop, seed=7 + 20 * number, workers=number % 2)
    end = ranks.train(what, 2, 30, seed=90)
    assert [one["start"] for one in end] == [24, 24]
    assert [one["end"] for one in end] == [one["end"] for one in whole]
    assert [one["losses"] for one in end] == [one["losses"][24:] for one in whole]
    assert sorted(one.name for one in ranks.checkpoints.glob("step-*"))[-1] == "step-00000028"


def test_what_the_ranks_hold_alike_is_written_once(ranks: Ranks) -> None:
    ranks.train("ddp", 3, 4, wide=40)
    (newest,) = ranks.checkpoints.glob("step-*")
    sizes = [(newest / f"rank-{rank:05d}.state").stat().st_size for rank in range(3)]
    assert sizes[0] > 700_000 and max(sizes[1:]) < 120_000
    assert verify(newest, Scope(Thoroughness.FULL)).state is CheckpointState.VERIFIED


def test_another_number_of_ranks_goes_on_with_the_weights_and_says_what_is_not_exact(ranks: Ranks) -> None:
    ranks.train("ddp", 4, 5)
    end = ranks.train("ddp", 2, 6, every=100)
    assert [one["start"] for one in end] == [4, 4]
    assert [one["counters"] for one in end] == [{"tokens": 60}] * 2  # what rank 0 had counted, and two steps
    assert len({one["end"] for one in end}) == 2, "each rank has random numbers of its own"
    assert "was saved by 4 ranks, and 2 go on from it: random numbers and the place in the data are not" in ranks.said()


@pytest.mark.parametrize("what", ["fsdp", "own"])
def test_where_each_rank_keeps_a_part_another_number_of_ranks_cannot_go_on(ranks: Ranks, what: str) -> None:
    ranks.train(what, 4, 4)
    end = ranks.train(what, 2, 6)
    assert all("each with a part of its own of model, optimizer: begin with 4 ranks" in one["error"] for one in end), (
        end
    )
    again = ranks.train(what, 4, 4, seed=50)
    assert [one["start"] for one in again] == [4] * 4, again


def test_a_disk_that_is_full_for_one_rank_is_an_error_on_each_and_nothing_is_committed(ranks: Ranks) -> None:
    ranks.train("ddp", 3, 4)
    end = ranks.train("ddp", 3, 8, full=1)
    assert all(
        one["error"].startswith("OSError: [Errno 5] step 8 was not saved: rank 1: File too large") for one in end
    ), end
    assert [one.name for one in ranks.checkpoints.glob("[!.]*")] == ["step-00000004"]
    assert not list(ranks.checkpoints.glob(".staging/*/step-*")), "the disk has its space back"
    end = ranks.train("ddp", 3, 8)
    assert [one["start"] for one in end] == [4] * 3
    assert verify(ranks.checkpoints / "step-00000008", Scope(Thoroughness.FULL)).state is CheckpointState.VERIFIED


def test_a_newest_checkpoint_that_is_cut_is_passed_over_by_all_ranks(ranks: Ranks) -> None:
    ranks.train("ddp", 2, 8)
    os.truncate(ranks.checkpoints / "step-00000008" / "rank-00001.state", 100)
    assert [one["start"] for one in ranks.train("ddp", 2, 9)] == [4, 4]
    assert "step-00000008 is truncated" in ranks.said()
