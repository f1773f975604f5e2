"""Files that have not changed are kept once, and only then."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ftsupervise import Guard
from ftsupervise.checkpoints.commit import base_for, share
from ftsupervise.checkpoints.contents import contents_of
from ftsupervise.checkpoints.retain import remove, sweep
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, ENV_RUN_DIR, ENV_STAGING

FULL = Scope(Thoroughness.FULL)
FROZEN = os.urandom(1_000_000)


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(tmp_path / "ckpt"))
    monkeypatch.setenv("FTSUPERVISE_GUARD_INCREMENTAL", "3")
    return tmp_path / "ckpt"


def save(step: int, frozen: bytes = FROZEN, *, world: int = 1) -> None:
    for rank in reversed(range(world)):
        with (
            Guard(signals=(), rank=rank, world=world) as guard,
            guard.checkpoint(step, barrier=lambda: None) as folder,
        ):
            (folder / f"frozen-rank{rank}.bin").write_bytes(frozen)
            (folder / f"trained-rank{rank}.bin").write_bytes(os.urandom(100_000))
            (folder / f"small-rank{rank}.bin").write_bytes(b"s")


def same_file(folder: Path, one: int, other: int, name: str = "frozen-rank0.bin") -> bool:
    return (folder / f"step-{one:08d}" / name).samefile(folder / f"step-{other:08d}" / name)


def test_a_file_that_is_the_same_is_kept_once_and_each_third_checkpoint_is_full(checkpoints: Path) -> None:
    for step in range(1, 6):
        save(step)
    assert [same_file(checkpoints, step, step + 1) for step in range(1, 5)] == [True, True, False, True]
    assert not same_file(checkpoints, 1, 2, "trained-rank0.bin") and not same_file(checkpoints, 1, 2, "small-rank0.bin")
    assert [verify(checkpoints / f"step-{step:08d}", FULL).state for step in range(1, 6)] == [
        CheckpointState.VERIFIED
    ] * 5


@pytest.mark.usefixtures("one_after_the_other")
def test_each_rank_shares_its_own_files(checkpoints: Path) -> None:
    save(1, world=3)
    save(2, world=3)
    assert all(same_file(checkpoints, 1, 2, f"frozen-rank{rank}.bin") for rank in range(3))
    assert verify(checkpoints / "step-00000002", FULL).state is CheckpointState.VERIFIED


def test_without_the_setting_nothing_is_shared(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FTSUPERVISE_GUARD_INCREMENTAL")
    save(1)
    save(2)
    assert not same_file(checkpoints, 1, 2)


@pytest.mark.fault("A file that rotted in the checkpoint before", "it is not shared with the new one, which is whole")
def test_a_rotten_old_file_is_never_shared_and_the_new_checkpoint_is_whole(checkpoints: Path) -> None:
    save(1)
    rotten = checkpoints / "step-00000001" / "frozen-rank0.bin"
    facts = rotten.stat()
    with rotten.open("r+b") as file:
        file.seek(900_001)
        file.write(bytes([FROZEN[900_001] ^ 4]))
    os.utime(rotten, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # as a disk does it
    save(2)
    assert not same_file(checkpoints, 1, 2)
    assert verify(checkpoints / "step-00000001", FULL).state is CheckpointState.DAMAGED
    assert verify(checkpoints / "step-00000002", FULL).state is CheckpointState.VERIFIED


def test_the_bytes_of_a_shared_file_are_freed_with_its_last_name(checkpoints: Path) -> None:
    save(1)
    save(2)
    remove(checkpoints, ["step-00000001"])
    assert sweep(checkpoints) < 200_000
    assert verify(checkpoints / "step-00000002", FULL).state is CheckpointState.VERIFIED
    remove(checkpoints, ["step-00000002"])
    assert sweep(checkpoints) > 1_100_000


def test_what_cannot_be_linked_stays_a_file_of_its_own(checkpoints: Path) -> None:
    save(1)
    staged = checkpoints / "staged"
    shutil.copytree(checkpoints / "step-00000001", staged)
    base = base_for(checkpoints, 3)
    assert base is not None
    (checkpoints / "step-00000001" / "frozen-rank0.bin").unlink()
    kept = share(staged, contents_of(staged).files.values(), base)
    assert [one.path for one in kept] == ["trained-rank0.bin"]
    assert (staged / "frozen-rank0.bin").read_bytes() == FROZEN
    assert not [one.name for one in staged.iterdir() if one.name.startswith(".tmp")]


def one_part(rank: int, step: int, frozen: bytes, barrier: Callable[[], object] | None, name: str) -> str:
    """What the save of one of two ranks raised, if it did."""
    try:
        with Guard(signals=(), rank=rank, world=2) as guard, guard.checkpoint(step, barrier=barrier) as folder:
            (folder / name.format(rank)).write_bytes(frozen)
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.resume(
    "A save that shared files with the checkpoint before (`checkpoints.incremental`) fails, and the loop saves that "
    "step again",
    "both: nothing is written into a file that a checkpoint shares",
    "nothing",
)
def test_a_save_that_is_tried_again_writes_into_no_checkpoint_that_shares_its_files(checkpoints: Path) -> None:
    def together(step: int, frozen: bytes, *, fails: bool = False) -> list[str]:
        meet = threading.Barrier(2, timeout=60)

        def barrier() -> None:
            meet.wait()
            if fails:
                raise RuntimeError("the network is down")

        with ThreadPoolExecutor(2) as pool:
            parts = [pool.submit(one_part, rank, step, frozen, barrier, "frozen-rank{}.bin") for rank in range(2)]
            return [part.result() for part in parts]

    assert together(1, FROZEN) == ["", ""]
    assert together(2, FROZEN, fails=True) == ["the network is down"] * 2
    staged = checkpoints / ".staging" / "alone-2" / "step-00000002"
    assert (staged / "frozen-rank1.bin").samefile(checkpoints / "step-00000001" / "frozen-rank1.bin")
    assert together(2, os.urandom(len(FROZEN))) == ["", ""]
    assert [verify(checkpoints / f"step-{step:08d}", FULL).state for step in (1, 2)] == [CheckpointState.VERIFIED] * 2


@pytest.mark.resume("… by rank 0 alone", "both", "nothing")
def test_a_commit_of_rank_0_that_is_tried_again_writes_into_no_checkpoint_either(checkpoints: Path) -> None:
    assert one_part(0, 2, FROZEN, None, "frozen.bin") == ""
    away = checkpoints.rename(checkpoints.with_name("away")) / "step-00000002"
    with Guard(signals=(), rank=0, world=2) as guard:
        assert guard.latest() is None
        shutil.copytree(away.parent, checkpoints)  # it was not mounted
        with pytest.raises(FileExistsError, match="was saved before this loop began"), guard.checkpoint(2) as folder:
            (folder / "frozen.bin").write_bytes(FROZEN)
        away = (checkpoints / away.name).rename(checkpoints / "step-00000001")
        assert away.joinpath("frozen.bin").samefile(folder / "frozen.bin")
        with guard.checkpoint(2) as folder:
            (folder / "frozen.bin").write_bytes(os.urandom(len(FROZEN)))
    assert [verify(checkpoints / f"step-{step:08d}", FULL).state for step in (1, 2)] == [CheckpointState.VERIFIED] * 2


@pytest.mark.resume(
    "A save under a supervisor fails at its commit, and is tried again with other files",
    "both: the later one has nothing of the one that failed",
    "nothing",
)
def test_a_save_that_is_tried_again_under_a_supervisor_has_nothing_of_the_one_that_failed(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(2)
    attempt, away = tmp_path / "run" / "attempts" / "0001", checkpoints.rename(checkpoints.with_name("away"))
    attempt.mkdir(parents=True)
    names = {ENV_RUN_DIR: tmp_path / "run", ENV_ATTEMPT_DIR: attempt, ENV_STAGING: checkpoints / ".staging" / "0001"}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.latest() is None
        shutil.copytree(away, checkpoints)  # it was not mounted
        with pytest.raises(FileExistsError, match="was saved before this loop began"), guard.checkpoint(2) as folder:
            (folder / "of-the-first-try.bin").write_bytes(FROZEN)
            (folder / "frozen-rank0.bin").write_bytes(FROZEN)
        away = (checkpoints / "step-00000002").rename(checkpoints / "step-00000001")
        assert away.joinpath("frozen-rank0.bin").samefile(folder / "frozen-rank0.bin")
        with guard.checkpoint(2) as folder:
            (folder / "frozen-rank0.bin").write_bytes(os.urandom(len(FROZEN)))
    assert not (checkpoints / "step-00000002" / "of-the-first-try.bin").exists()
    assert [verify(checkpoints / f"step-{step:08d}", FULL).state for step in (1, 2)] == [CheckpointState.VERIFIED] * 2
