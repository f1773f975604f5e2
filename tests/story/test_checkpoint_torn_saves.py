"""Saves of DeepSpeed and Megatron that broke off, and that their program has passed since: how many ranks must have written is
known from the checkpoint itself or from its neighbours, and what cannot be known never displaces a verified one."""

from __future__ import annotations

import io
import pickle
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftsupervise.checkpoints.commit import commit
from ftsupervise.checkpoints.find import newest
from ftsupervise.checkpoints.layouts import numbers_in
from ftsupervise.checkpoints.manifest import read_manifest
from ftsupervise.checkpoints.verify import CheckpointState as State
from ftsupervise.checkpoints.verify import verify
from ftsupervise.cli import ftsupervise
from tests.story.test_checkpoint_layouts import archive


def saved(path: Path, state: object) -> None:
    """A file as torch.save makes it, with this state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = io.BytesIO()
    pickle.Pickler(raw, protocol=2).dump(state)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", raw.getvalue())
        file.writestr("archive/data/0", bytes(1000))


def deepspeed(folder: Path, step: int, ranks: int, world: int | None = None) -> Path:
    one = folder / f"global_step{step}"
    for rank in range(ranks):
        archive(one / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    known = {} if world is None else {"dp_world_size": world, "mp_world_size": 1}
    saved(one / "mp_rank_00_model_states.pt", {"module": None, "global_steps": step, **known})
    return one


def megatron(folder: Path, step: int, places: list[str], **known: int) -> Path:
    one = folder / f"iter_{step:07d}"
    for place in places:
        saved(one / f"mp_rank_{place}" / "model_optim_rng.pt", {"args": Namespace(seed=1, **known), "iteration": step})
        archive(one / f"mp_rank_{place}" / "distrib_optim.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return one


GRID = ["00_000", "00_001", "01_000", "01_001"]


def upkeep_and_prune(folder: Path) -> None:
    for words in (["commit", str(folder)], ["prune", str(folder), "--last", "2"]):
        CliRunner().invoke(ftsupervise, ["checkpoints", *words])


@pytest.mark.resume(
    "a save of DeepSpeed broke off, and `latest` names a later one",
    "the newest whole one",
    '"is torn: 2 of 4 ranks have written their part"',
)
def test_a_torn_save_of_deepspeed_that_was_passed_since_is_torn_by_the_world_in_its_states(tmp_path: Path) -> None:
    whole = [deepspeed(tmp_path, step, 4, world=4) for step in (10, 20)]
    torn = deepspeed(tmp_path, 30, 2, world=4)
    (tmp_path / "latest").write_text("global_step40")
    assert [verify(one).state for one in (*whole, torn)] == [State.COMPLETE, State.COMPLETE, State.TORN]
    assert "2 of 4 ranks have written their part" in verify(torn).words()
    fewer = deepspeed(tmp_path, 40, 2, world=2)
    assert verify(fewer).state is State.COMPLETE, "a run of fewer ranks"


@pytest.mark.resume(
    "a save of Megatron broke off, and the tracker names a later one",
    "the newest whole one",
    '"is torn: 2 of 4 model-parallel ranks have written their part"',
)
def test_a_torn_save_of_megatron_is_torn_by_the_sizes_in_its_arguments(tmp_path: Path) -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    one, torn = megatron(tmp_path, 10, GRID, **sizes), megatron(tmp_path, 20, GRID[:2], **sizes)
    assert (verify(one).state, verify(torn).state) == (State.COMPLETE, State.TORN)
    assert "2 of 4 model-parallel ranks" in verify(torn).words()
    assert numbers_in(one / "mp_rank_00_000/model_optim_rng.pt", list(sizes)) == sizes


def test_a_gap_in_the_grid_of_megatrons_ranks_is_seen(tmp_path: Path) -> None:
    one = megatron(tmp_path, 10, [*GRID[:2], GRID[3]])
    assert "mp_rank_01_000 is missing" in verify(one).words()
    two = megatron(tmp_path, 20, GRID)
    (two / "mp_rank_01_001" / "distrib_optim.pt").unlink()
    assert "mp_rank_01_001/distrib_optim.pt is missing" in verify(two).words()


@pytest.mark.resume(
    "nothing says how many ranks there are, and a later save has fewer files than the verified ones",
    "the newest verified one; prune removes none for it",
    '"has files that it lacks: it may be torn, or of fewer ranks"',
)
def test_where_only_the_neighbours_know_how_many_ranks_there_are_a_torn_one_is_unseen_and_takes_nobodys_place(
    tmp_path: Path,
) -> None:
    whole = [megatron(tmp_path, step, GRID) for step in (10, 20, 30)]
    for one in whole:
        commit(one)
    torn = [megatron(tmp_path, step, GRID[:2]) for step in (40, 50)]
    megatron(tmp_path, 60, GRID[:2])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("70")
    assert [verify(one).state for one in torn] == [State.UNSEEN] * 2
    assert "iter_0000030 has files that it lacks: it may be torn" in verify(torn[0]).words()
    upkeep_and_prune(tmp_path)
    assert [read_manifest(one) for one in torn] == [None, None]
    assert [one.exists() for one in whole] == [False, True, True], "the last two verified ones stay"
    found = newest(tmp_path)
    assert found is not None and found.path == whole[-1]


def test_an_older_one_with_nothing_to_compare_it_with_is_not_known_to_be_whole(tmp_path: Path) -> None:
    one = deepspeed(tmp_path, 10, 4)
    (tmp_path / "latest").write_text("global_step10")
    assert verify(one).state is State.COMPLETE
    (tmp_path / "latest").write_text("global_step20")
    assert verify(one).state is State.UNSEEN and "global_step20 has come since" in verify(one).words()
    deepspeed(tmp_path, 20, 4)
    assert verify(one).state is State.COMPLETE, "as many ranks as the newest"
