"""Bits of a snapshot that change after it was taken: no loop begins from them in silence."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftsupervise import Guard
from ftsupervise.rundir.paths import ENV_RESTART, ENV_SNAPSHOTS
from ftsupervise.snapshots import room
from ftsupervise.snapshots.node import Begin, Done, begin_from
from ftsupervise.snapshots.slots import Compared, SlotFile, SnapshotId, compare, open_slots
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import SupervisedRun
from tests.story.test_snapshots_in_a_run import ranks

SIZE = 3_000_000


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this node, for ranks without a supervisor."""
    top = Path(f"/dev/shm/ftsupervise-test-{os.getpid()}-{os.urandom(4).hex()}")
    top.mkdir(mode=0o700)
    (top / "here").mkdir(mode=0o700)
    named = {"SLURMD_NODENAME": "here", ENV_SNAPSHOTS: str(top), ENV_RESTART: "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    yield top / "here"
    shutil.rmtree(top)


def taken(state: dict[str, Any], *steps: int) -> None:
    """Snapshots of these steps, as a loop takes them, with their digests."""
    guard = Guard()
    guard.restore(state=state)
    for step in steps:
        state["done"] = step
        wait_until(partial(guard.snapshot, step), "the memory")
    guard.close()


def summed(place: Path, step: int) -> tuple[SlotFile, int]:
    """Rank 0's file, and the slot of that step, once its digest is there."""
    file = open_slots(room.rank_file(str(place), 0), write=True)
    slot = file.held()[SnapshotId(step, 0)]
    wait_until(lambda: (header := file.valid(slot)) is not None and header.algorithm, "its digest")
    return file, slot


def flip(file: SlotFile, slot: int, bit: int) -> None:
    """Change one bit of the data, or of the description where all is in there."""
    header = file.valid(slot)
    assert header is not None
    at = file.extent(slot, header, header.meta_size if header.data_size else 0)[0] + bit // 8
    byte = os.pread(file.fd, 1, at)[0]
    os.pwrite(file.fd, bytes([byte ^ 1 << bit % 8]), at)


@pytest.mark.resume(
    "A bit of a snapshot flips where the ranks have no xxhash",
    "not that snapshot: it has a digest (crc32) all the same",
    "the log: … is damaged",
)
@pytest.mark.parametrize("without", [(), ("xxhash",)], ids=["xxhash", "crc32"])
def test_each_flipped_bit_is_seen_and_none_where_nothing_changed(
    place: Path, monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...]
) -> None:
    for package in without:  # as in an environment of the ranks where it is not installed
        monkeypatch.setitem(sys.modules, package, None)
    taken({"weights": bytearray(random.Random(1).randbytes(SIZE)), "done": 0}, 2)
    file, slot = summed(place, 2)
    header = file.valid(slot)
    assert header is not None
    with file:
        assert compare(file, slot, header) is not Compared.DAMAGED
        for bit in random.Random(2).sample(range(header.data_size * 8), 200):
            flip(file, slot, bit)
            assert compare(file, slot, header) is Compared.DAMAGED
            flip(file, slot, bit)
        assert compare(file, slot, header) is not Compared.DAMAGED


def test_ranks_that_agree_alone_do_not_begin_from_a_damaged_one(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    taken({"weights": bytearray(SIZE), "done": 0}, 2)
    file, slot = summed(place, 2)
    flip(file, slot, 12345)
    file.close()
    state: dict[str, Any] = {"weights": bytearray(SIZE), "done": 0}
    assert Guard(agree=lambda value: value).restore(state=state) is None
    assert state["done"] == 0
    assert "it is damaged" in capfd.readouterr().err


def test_a_node_gives_up_what_is_damaged_and_names_it(place: Path) -> None:
    taken({"weights": bytearray(SIZE), "done": 0}, 2, 4)
    file, slot = summed(place, 4)
    begin = Begin(4, 0, here=(0,))
    assert begin_from(str(place), begin, b"") == Done("")
    flip(file, slot, 77)
    assert begin_from(str(place), begin, b"").damaged == (0,)
    with file:
        assert list(file.held()) == [SnapshotId(2, 0)], "it holds nothing any more, and the one before is left"


def test_a_slot_that_is_written_again_while_its_digest_is_taken_keeps_its_own(place: Path) -> None:
    """The digest comes late, and the loop may have begun to write over what it belongs to."""
    state: dict[str, Any] = {"weights": bytearray(SIZE), "done": 0}
    guard = Guard()
    guard.restore(state=state)
    wait_until(lambda: guard.snapshot(2), "the memory")
    with open_slots(room.rank_file(str(place), 0)) as file:
        for step in range(4, 400, 2):
            state["weights"][step] = step % 251
            assert guard.snapshot(step)
            for one, slot in file.held().items():
                header = file.valid(slot)
                if header is not None and header.algorithm and compare(file, slot, header) is Compared.DAMAGED:
                    assert not file.still(slot, header), f"step {one.step}"
    guard.close()


FLIPS = (
    "if attempt == 1 and step == 31 and rank == 1: "
    "from tests.story.test_snapshot_damage import damage_newest; damage_newest(); os.kill(os.getpid(), 9)"
)


def damage_newest() -> None:
    """In a rank: change a bit of its own newest snapshot."""
    place = room.node_folder(os.environ[ENV_SNAPSHOTS])
    with open_slots(room.rank_file(place, int(os.environ["RANK"])), write=True) as file:
        newest = max(file.held().items())
        wait_until(lambda: (header := file.valid(newest[1])) is not None and header.algorithm, "its digest")
        flip(file, newest[1], 3)


@pytest.mark.fault(
    "A bit of a snapshot changes in memory",
    "it is not used: a copy on another node is, or the one before, or the disk",
)
def test_a_run_whose_snapshot_is_damaged_begins_from_what_is_left(
    run: SupervisedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    one = run.start("--in-place", "5", "--warm", "off", "--", *ranks(FLIPS))
    assert one.wait(60) == 0, one.said()
    said = one.said()
    begins = run.attempts()[1].begins
    assert "the snapshot of step 30 cannot be used: that of rank 1 on" in said and "is damaged" in said
    assert begins is not None and (begins.source, begins.step) == ("disk", 20), "with two slots rank 0 has no step 28"
    for rank in (0, 1):
        assert f"rank {rank} sum {sum(range(61)) * (rank + 1)}" in said


NO_DIGEST = (
    "if attempt == 1 and step == 31 and rank == 1: "
    "from tests.story.test_snapshot_damage import lose_the_digest; lose_the_digest(); os.kill(os.getpid(), 9)"
)


def lose_the_digest() -> None:
    """In a rank: leave its own newest snapshot as a rank that dies before the digest is taken leaves it."""
    place = room.node_folder(os.environ[ENV_SNAPSHOTS])
    with open_slots(room.rank_file(place, int(os.environ["RANK"])), write=True) as file:
        slot = max(file.held().items())[1]
        wait_until(lambda: (header := file.valid(slot)) is not None and header.algorithm, "its digest")
        header = file.valid(slot)
        assert header is not None
        file.commit(slot, header._replace(algorithm=0, digest=b""))


@pytest.mark.resume(
    "A rank dies between the data of its snapshot and its digest",
    "that snapshot",
    "the log, `status`: the snapshot of rank 1 is not verified",
)
@pytest.mark.parametrize("in_place", ["5", "0"])
def test_a_snapshot_whose_rank_died_before_its_digest_is_told_to_be_unverified(
    run: SupervisedRun, monkeypatch: pytest.MonkeyPatch, in_place: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    one = run.start("--in-place", in_place, "--warm", "off", "--", *ranks(NO_DIGEST))
    one.wait(60)
    word = "the snapshot of rank 1 is not verified: it has no digest that could be compared"
    assert word in one.said(), one.said()
    if in_place != "0":
        begins = run.attempts()[1].begins
        assert begins is not None and (begins.source, begins.step) == ("memory", 30) and word in begins.why
