"""Unchanged files on file systems that have reflinks: real ones, on images that are mounted here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ftsupervise import Guard
from ftsupervise.checkpoints.retain import shared_ranges
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify
from tests.neighbours.patience import wait_until

pytestmark = pytest.mark.root

FROZEN, TRAINED = 8_000_000, 1_000_000  # bytes


@pytest.fixture(params=["xfs", "btrfs"])
def reflinks(request: pytest.FixtureRequest, tmp_path: Path, mounted: Callable[..., Path]) -> Path:
    make = f"mkfs.{request.param}"
    if shutil.which(make) is None:
        pytest.skip(f"needs {make} (apt-get install {'xfsprogs' if request.param == 'xfs' else 'btrfs-progs'})")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(400_000_000)
    options = ["-m", "reflink=1"] if request.param == "xfs" else []
    subprocess.run([make, "-q", *options, str(image)], check=True, timeout=60, capture_output=True)
    return mounted("-o", "loop", "-t", request.param, str(image))


def used(folder: Path) -> int:
    os.sync()
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def prune(folder: Path, *words: str) -> dict[str, object]:
    command = [
        sys.executable,
        "-m",
        "ftsupervise",
        "checkpoints",
        "prune",
        str(folder),
        "--last",
        "2",
        "--json",
        *words,
    ]
    found: dict[str, object] = json.loads(
        subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE).stdout
    )
    return found


def test_an_unchanged_file_shares_its_blocks_until_one_of_both_is_changed(
    reflinks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, frozen, before = reflinks / "ckpt", os.urandom(FROZEN), used(reflinks)
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(folder))
    monkeypatch.setenv("FTSUPERVISE_GUARD_INCREMENTAL", "10")
    with Guard(signals=(), rank=0, world=1) as guard:
        for step in range(1, 5):
            with guard.checkpoint(step) as staged:
                (staged / "frozen.bin").write_bytes(frozen)
                (staged / "trained.bin").write_bytes(os.urandom(TRAINED))
    first, last = folder / "step-00000001", folder / "step-00000004"
    wait_until(lambda: used(reflinks) - before < 2 * FROZEN, "the blocks of three files to be free")
    assert not first.joinpath("frozen.bin").samefile(last / "frozen.bin")
    assert shared_ranges(first / "frozen.bin") == shared_ranges(last / "frozen.bin") != []
    assert shared_ranges(last / "trained.bin") == []

    going = prune(folder, "--dry-run")
    assert going["frees"] == 2 * TRAINED, "the frozen file stays with those that stay"
    records = sum(
        one.stat().st_size for step in (1, 2) for one in (folder / f"step-0000000{step}/.ftsupervise").iterdir()
    )
    assert prune(folder)["freed"] == 2 * TRAINED + records
    (last / "frozen.bin").write_bytes(b"changed in place")
    assert verify(folder / "step-00000003", Scope(Thoroughness.FULL)).state is CheckpointState.VERIFIED
    assert verify(last).state is CheckpointState.TRUNCATED
