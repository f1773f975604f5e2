"""Real checkpoints of torch: each flipped bit, cut and missing file is caught, which torch itself does not notice."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftsupervise.checkpoints.commit import NotComplete, commit
from ftsupervise.checkpoints.layouts import shard_sizes
from ftsupervise.checkpoints.manifest import CheckpointLayout, read_manifest
from ftsupervise.checkpoints.verify import CheckpointState as State
from ftsupervise.checkpoints.verify import Scope, Thoroughness, verify

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
FULL = Scope(Thoroughness.FULL)
CASES = 250  # flipped bits in each of two checkpoints; and as many cuts and missing files


def state() -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 100}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """One by torch.save, one by torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    folder = tmp_path_factory.mktemp("saved")
    one, two = folder / "step-100", folder / "step-200"
    one.mkdir()
    torch.save(state(), one / "model.pt")
    torch.save({"rng": torch.get_rng_state()}, one / "rng.pt")
    dcp.save({"model": state()["model"]}, checkpoint_id=two, no_dist=True)
    yield one, two


def test_they_are_known_and_adopted(saved: tuple[Path, Path]) -> None:
    for path, layout in zip(saved, (CheckpointLayout.FILES, CheckpointLayout.DCP), strict=True):
        made = commit(path)
        assert made.layout is layout and read_manifest(path) == made
        assert verify(path, FULL).state is State.VERIFIED


def test_torch_loads_them_with_the_manifest_in_them(saved: tuple[Path, Path]) -> None:
    import torch.distributed.checkpoint as dcp

    into = {"model": state()["model"]}
    dcp.load(into, checkpoint_id=saved[1], no_dist=True)
    assert torch.load(saved[0] / "model.pt", weights_only=True)["step"] == 100


def damaged(path: Path, draws: random.Random) -> str:
    """Flip one bit of one file, in proportion to its size."""
    files = sorted(one for one in path.iterdir() if one.is_file())
    victim = draws.choices(files, [one.stat().st_size for one in files])[0]
    place, bit = draws.randrange(victim.stat().st_size), draws.randrange(8)
    with victim.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0] ^ 1 << bit
        file.seek(place)
        file.write(bytes([byte]))
    return f"bit {bit} of byte {place} of {victim.name}"


def test_a_thousand_damages_and_none_is_missed(saved: tuple[Path, Path], tmp_path: Path) -> None:
    draws, missed, silent = random.Random(20261122), [], 0
    for path in saved:
        commit(path)
        for case in range(2 * CASES):
            copy = tmp_path / path.name
            shutil.copytree(path, copy)
            if case < CASES:
                what, wanted = damaged(copy, draws), {State.DAMAGED}
                silent += loads(copy)
            elif case % 2:
                victim = draws.choice(sorted(one for one in copy.iterdir() if one.is_file()))
                victim.unlink()
                what, wanted = f"{victim.name} is missing", {State.MISSING}
            else:
                victim = draws.choice(sorted(one for one in copy.iterdir() if one.is_file()))
                length = draws.randrange(victim.stat().st_size)
                os.truncate(victim, length)
                what, wanted = f"{victim.name} is cut to {length}", {State.TRUNCATED}
            if verify(copy, FULL).state not in wanted:
                missed.append(f"{path.name}: {what}")
            shutil.rmtree(copy)
    assert not missed
    assert silent > CASES, "most of the flipped bits do load, with other weights"


def loads(path: Path) -> bool:
    """Does torch take it?"""
    try:
        if (path / "model.pt").exists():
            torch.load(path / "model.pt", weights_only=True)
        else:
            import torch.distributed.checkpoint as dcp

            dcp.load({"model": state()["model"]}, checkpoint_id=path, no_dist=True)
    except BaseException:  # DCP raises what is no Exception
        return False
    return True


def test_a_save_of_dcp_that_was_cut_off_is_torn(saved: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(saved[1], tmp_path / "step-3", ignore=shutil.ignore_patterns(".ftsupervise"))
    assert verify(tmp_path / "step-3").state is State.COMPLETE
    shard = next((tmp_path / "step-3").glob("*.distcp"))
    whole = shard.read_bytes()
    ends = [match.end() + 18 for match in re.finditer(rb"PK\x05\x06", whole)]  # each tensor is an archive
    assert len(ends) == 4 and ends[-1] == len(whole)
    for length in (0, 1, 100, *ends[:-1], *(end - 1 for end in ends)):
        os.truncate(shard, length)
        assert verify(tmp_path / "step-3").state is State.TORN, length
        shard.write_bytes(whole)
    assert verify(tmp_path / "step-3").state is State.COMPLETE
    shard.unlink()
    assert shard.name in verify(tmp_path / "step-3").words()
    (tmp_path / "step-3" / ".metadata").unlink()
    shard.write_bytes(b"x")
    with pytest.raises(NotComplete, match=r"\.metadata is missing"):
        commit(tmp_path / "step-3")


def test_a_save_of_dcp_that_holds_nothing_or_only_numbers_is_complete(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    saves: dict[str, dict[str, object]] = {
        "step-1": {},
        "step-2": {"step": 2, "name": "x"},
        "step-3": {"empty": torch.empty(0), "one": torch.tensor(1.0)},
        "step-4": {f"w{number}": torch.ones(1000) for number in range(300)},
    }
    for name, saved in saves.items():
        dcp.save(saved, checkpoint_id=tmp_path / name, no_dist=True)
        found = verify(tmp_path / name)
        assert (found.state, found.world) == (State.COMPLETE, 1), found
    with (tmp_path / "step-4" / ".metadata").open("rb") as file:
        raw = file.read()
    shard = tmp_path / "step-4" / "__0_0.distcp"
    assert shard_sizes(raw) == {shard.name: shard.stat().st_size}
