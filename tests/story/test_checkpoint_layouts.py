"""Checkpoints of six programs are told apart and judged by their own signs, and none of them is ever unpickled."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ftsupervise.checkpoints.commit import NotComplete, commit
from ftsupervise.checkpoints.find import choose
from ftsupervise.checkpoints.manifest import CheckpointLayout as Layout
from ftsupervise.checkpoints.manifest import read_manifest
from ftsupervise.checkpoints.verify import CheckpointState as State
from ftsupervise.checkpoints.verify import Scope, Thoroughness, Verdict, verify

FULL = Scope(Thoroughness.FULL)


class Bomb:
    """What it would do when somebody unpickled it."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (Path("/tmp/ftsupervise-unpickled-a-checkpoint"),)


def archive(path: Path) -> None:
    """A file as torch.save makes it: a zip, stored."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Bomb()))
        file.writestr("archive/data/0", os.urandom(5000))


def dcp(folder: Path, ranks: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"__{rank}_0.distcp" for rank in range(ranks)]
    for name in names:
        (folder / name).write_bytes(os.urandom(3000))
    (folder / ".metadata").write_bytes(pickle.dumps({"storage": names, "bomb": Bomb()}))
    return folder


@dataclass(frozen=True)
class StorageInfo:
    """Where an item lies, as torch pickles it into ``.metadata``."""

    relative_path: str
    offset: int
    length: int


def dcp_of_items(folder: Path, ranks: int = 2, items: int = 3) -> Path:
    """As torch writes one: a zip for each item, one after the other; the last rank had nothing to save."""
    folder.mkdir(parents=True)
    places = {}
    for rank in range(ranks):
        shard = folder / f"__{rank}_0.distcp"
        shard.touch()
        for item in range(items) if rank < ranks - 1 else ():
            archive(folder / "item")
            places[f"{rank}.{item}"] = StorageInfo(shard.name, shard.stat().st_size, (folder / "item").stat().st_size)
            with shard.open("ab") as file:
                file.write((folder / "item").read_bytes())
            (folder / "item").unlink()
    (folder / ".metadata").write_bytes(pickle.dumps({"storage_data": places, "bomb": Bomb()}))
    return folder


def deepspeed(folder: Path, ranks: int = 4) -> Path:
    for rank in range(ranks):
        archive(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    archive(folder / "mp_rank_00_model_states.pt")
    (folder.parent / "latest").write_text(folder.name)
    return folder


def megatron(folder: Path) -> Path:
    for rank in range(2):
        archive(folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def lightning(path: Path) -> Path:
    archive(path)
    return path


def safetensors(path: Path, size: int = 400) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + os.urandom(size))


def hugging_face(folder: Path) -> Path:
    folder.mkdir(parents=True)
    parts = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    for part in parts:
        safetensors(folder / part)
    weights = {f"w{number}": part for number, part in enumerate(parts)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    archive(folder / "optimizer.pt")
    # Hugging Face writes NaN where a gradient was none
    (folder / "trainer_state.json").write_text('{"global_step": 500, "log_history": [{"grad_norm": NaN}]}')
    return folder


WRITTEN: dict[Layout, tuple[Callable[[Path], Path], str, int]] = {
    Layout.DCP: (dcp, "step_100", 100),
    Layout.DEEPSPEED: (deepspeed, "global_step100", 100),
    Layout.MEGATRON: (megatron, "iter_0000100", 100),
    Layout.LIGHTNING: (lightning, "epoch=3-step=100.ckpt", 100),
    Layout.HUGGING_FACE: (hugging_face, "checkpoint-500", 500),
}


@pytest.fixture(params=list(WRITTEN), ids=lambda layout: layout.value)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Layout, Path, int]:
    write, name, step = WRITTEN[request.param]
    return request.param, write(tmp_path / "checkpoints" / name), step


def test_a_complete_checkpoint_of_each_program_is_known_and_counts(written: tuple[Layout, Path, int]) -> None:
    layout, path, step = written
    found = verify(path)
    assert (found.state, found.layout, found.step) == (State.COMPLETE, layout, step), found
    assert not Path("/tmp/ftsupervise-unpickled-a-checkpoint").exists()


def test_each_is_adopted_as_it_is(written: tuple[Layout, Path, int]) -> None:
    layout, path, step = written
    before = {one: one.read_bytes() for one in path.parent.rglob("*") if one.is_file()}
    made = commit(path)
    assert (made.layout, made.step) == (layout, step)
    assert read_manifest(path) == made
    assert verify(path, FULL).state is State.VERIFIED
    after = {
        one: one.read_bytes() for one in path.parent.rglob("*") if one.is_file() and ".ftsupervise" not in one.parts
    }
    assert after == before


def seen_after(path: Path, damage: Callable[[], object]) -> Verdict:
    damage()
    return verify(path)


def test_what_is_not_complete_by_its_own_sign_is_torn_and_not_adopted(tmp_path: Path) -> None:
    ones = {layout: write(tmp_path / layout.value / name) for layout, (write, name, _) in WRITTEN.items()}
    damage: dict[Layout, Callable[[], object]] = {
        Layout.DCP: (ones[Layout.DCP] / ".metadata").unlink,
        Layout.DEEPSPEED: (ones[Layout.DEEPSPEED].parent / "latest").unlink,
        Layout.MEGATRON: lambda: (ones[Layout.MEGATRON].parent / "latest_checkpointed_iteration.txt").write_text("90"),
        Layout.LIGHTNING: lambda: os.truncate(ones[Layout.LIGHTNING], 4000),
        Layout.HUGGING_FACE: (ones[Layout.HUGGING_FACE] / "trainer_state.json").unlink,
    }
    for layout, path in ones.items():
        found = seen_after(path, damage[layout])
        assert (found.state, found.layout) == (State.TORN, layout), found
        with pytest.raises(NotComplete, match="not complete"):
            commit(path)
        assert read_manifest(path) is None


def test_a_missing_shard_is_named_without_a_manifest_too(tmp_path: Path) -> None:
    one = dcp(tmp_path / "a" / "step-1")
    assert "__2_0.distcp is missing" in seen_after(one, (one / "__2_0.distcp").unlink).words()
    two = deepspeed(tmp_path / "b" / "global_step5")
    gone = two / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing" in seen_after(two, gone.unlink).words()
    three = hugging_face(tmp_path / "c" / "checkpoint-500")
    part = three / "model-00002-of-00002.safetensors"
    assert "model-00002-of-00002.safetensors is missing" in seen_after(three, part.unlink).words()
    safetensors(part)
    assert verify(three).state is State.COMPLETE
    assert (
        "bytes where its header says" in seen_after(three, lambda: os.truncate(part, part.stat().st_size - 1)).words()
    )
    cut = dcp(tmp_path / "d" / "step-1")
    assert ".metadata is cut short" in seen_after(cut, lambda: os.truncate(cut / ".metadata", 40)).words()
    state = three / "trainer_state.json"
    assert "trainer_state.json is cut short" in seen_after(three, lambda: os.truncate(state, 30)).words()


def test_an_older_one_of_deepspeed_or_megatron_counts_too(tmp_path: Path) -> None:
    """``latest`` names the newest only; all before it were named once."""
    old = deepspeed(tmp_path / "global_step50")
    deepspeed(tmp_path / "global_step100")
    assert verify(old).state is State.COMPLETE
    under_way = deepspeed(tmp_path / "global_step150")
    (tmp_path / "latest").write_text("global_step100")
    assert verify(under_way).state is State.TORN


def test_a_folder_that_says_nothing_of_itself_is_neither_complete_nor_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "step-7"
    folder.mkdir()
    (folder / "weights").write_bytes(b"w")
    found = verify(folder)
    assert found.state is State.UNSEEN and not found.good
    assert "nothing in it says that it is complete" in found.words()
    commit(folder)
    assert verify(folder).good


def test_a_cut_shard_of_dcp_is_torn_wherever_it_was_cut(tmp_path: Path) -> None:
    one = dcp_of_items(tmp_path / "step-1", ranks=3)
    found = verify(one)
    assert (found.state, found.world) == (State.COMPLETE, 3), found
    shard = one / "__1_0.distcp"
    whole = shard.read_bytes()
    assert len(whole) % 3 == 0
    for length in (0, 3, 100, len(whole) // 3, len(whole) - 1):  # also where an item ends
        os.truncate(shard, length)
        found = verify(one)
        assert found.state is State.TORN and "__1_0.distcp" in found.words(), (length, found)
        with pytest.raises(NotComplete, match=r"__1_0\.distcp"):
            commit(one)
        shard.write_bytes(whole)
    assert verify(one).state is State.COMPLETE
    (one / ".metadata").write_bytes(pickle.dumps({"storage": ["__0_0.distcp", "__1_0.distcp"]}))  # it tells no sizes
    assert verify(one).state is State.COMPLETE
    for length in (0, 100, len(whole) - 1):
        os.truncate(shard, length)
        assert verify(one).state is State.TORN
        shard.write_bytes(whole)
    assert not Path("/tmp/ftsupervise-unpickled-a-checkpoint").exists()


def test_a_dcp_checkpoint_of_fewer_ranks_is_passed_over_where_a_number_is_asked_for(tmp_path: Path) -> None:
    dcp(tmp_path / "step-8", ranks=8)
    dcp(tmp_path / "step-9", ranks=2)
    choice = choose(tmp_path, Scope(world=8))
    assert choice.verdict is not None and choice.verdict.path.name == "step-8"
    assert [one.state for one in choice.passed] == [State.WRONG_WORLD]
    any_world = choose(tmp_path).verdict
    assert any_world is not None and (any_world.path.name, any_world.world) == ("step-9", 2)
    with_gap = dcp(tmp_path / "step-10", ranks=1)
    (with_gap / "__2_0.distcp").write_bytes(b"x")
    assert verify(with_gap, Scope(world=8)).world is None


def test_a_cut_shard_is_noticed_where_it_is_a_link(tmp_path: Path) -> None:
    one = dcp_of_items(tmp_path / "step_100", ranks=3)
    shard, elsewhere = one / "__1_0.distcp", tmp_path / "tier" / "shard"
    elsewhere.parent.mkdir()
    shard.rename(elsewhere)
    shard.symlink_to(elsewhere)
    assert verify(one).state is State.COMPLETE
    os.truncate(elsewhere, elsewhere.stat().st_size - 1)
    assert "__1_0.distcp has " in seen_after(one, lambda: None).words()
    assert "leads to a file that is not there" in seen_after(one, elsewhere.unlink).words()
