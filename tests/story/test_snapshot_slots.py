"""The slots of a rank's snapshots: whole or not valid, whatever moment its writer is killed at."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftsupervise.snapshots.slots import (
    PAGE,
    TORN,
    SlotFile,
    SlotHeader,
    SnapshotId,
    claim,
    create_slots,
    open_slots,
    pack_header,
    parse_header,
    room_for,
)

SIZE = 300_000


@pytest.fixture
def folder() -> Iterator[Path]:
    place = Path(f"/dev/shm/ftsupervise-test-{os.getpid()}-{os.urandom(4).hex()}")
    place.mkdir(mode=0o700)
    yield place
    shutil.rmtree(place)


def content(step: int, size: int = SIZE) -> bytes:
    return step.to_bytes(4, "little") * (size // 4)


def write(file: SlotFile, slot: int, step: int, attempt: int = 1) -> SlotHeader:
    """A snapshot whose bytes say which step it is."""
    meta, data = b"step %d" % step, content(step)
    turn = file.begin(slot)
    header = SlotHeader(turn, step, attempt, file.world, file.rank, len(meta), len(data), zlib.crc32(meta))
    file.write(slot, header, 0, meta + data)
    file.commit(slot, header)
    return header


def made(folder: Path, slots: int = 3, rank: int = 1, world: int = 2) -> SlotFile:
    return create_slots(folder / f"rank-{rank}", world, rank, room_for(slots, 100, SIZE))


def test_what_was_written_is_read_back_with_its_step_and_attempt(folder: Path) -> None:
    with made(folder) as file:
        for slot, step in enumerate((10, 12, 14)):
            write(file, slot, step)
        assert file.steps() == [10, 12, 14]
    with open_slots(folder / "rank-1") as again:
        assert list(again.held()) == [SnapshotId(10, 1), SnapshotId(12, 1), SnapshotId(14, 1)]
        header = again.valid(1)
        assert header is not None and again.meta(1, header) == b"step 12"
        assert b"".join(again.pieces(1, header, 7777)) == b"step 12" + content(12)
        assert again.still(1, header)


@pytest.mark.parametrize("step", [(1 << 24) + 1, (1 << 53) + 1, (1 << 62) - 1])
def test_a_step_that_no_float_holds_is_kept_exactly(folder: Path, step: int) -> None:
    with made(folder) as file:
        turn = file.begin(0)
        file.commit(0, SlotHeader(turn, step, 1, 2, 1, 0, 0, zlib.crc32(b"")))
        assert list(file.held()) == [SnapshotId(step, 1)]
        file.invalidate_newer(SnapshotId(step - 1, 1))
        assert file.held() == {}


def test_a_slot_that_is_being_written_holds_nothing(folder: Path) -> None:
    with made(folder) as file:
        header = write(file, 0, 10)
        file.begin(0)
        found = file.header(0)
        assert found is not None and found.step == TORN
        assert file.held() == {} and not file.still(0, header)


def test_a_slot_that_was_written_again_with_the_same_step_is_another_snapshot(folder: Path) -> None:
    with made(folder) as file:
        first = write(file, 0, 10)
        second = write(file, 0, 10)
        assert first._replace(turn=second.turn) == second and not file.still(0, first)


def test_snapshots_of_another_rank_or_world_are_not_valid(folder: Path) -> None:
    with made(folder) as file:
        write(file, 0, 10)
        held = folder / "rank-1"
        raw = held.read_bytes()
    with create_slots(folder / "rank-1", 4, 1, room_for(3, 100, SIZE)) as other, held.open("r+b") as page:
        page.seek(PAGE)
        page.write(raw[PAGE:])
        assert other.header(0) is not None and other.held() == {}


def test_what_is_newer_than_the_step_to_begin_from_is_given_up(folder: Path) -> None:
    with made(folder, slots=4) as file:
        for slot, (step, attempt) in enumerate(((8, 1), (10, 1), (9, 2), (12, 1))):
            write(file, slot, step, attempt)
        assert set(file.invalidate_newer(SnapshotId(10, 1))) == {SnapshotId(9, 2), SnapshotId(12, 1)}
        assert list(file.held()) == [SnapshotId(8, 1), SnapshotId(10, 1)]
        file.invalidate_newer(None)
        assert not file.held()


def test_a_snapshot_that_is_sent_is_committed_when_it_has_come_whole(folder: Path) -> None:
    (folder / "b").mkdir(mode=0o700)
    with made(folder) as mine, made(folder / "b") as theirs:
        write(mine, 2, 10)
        header = mine.valid(2)
        assert header is not None
        theirs.receive(0, parse_header(pack_header(header)), mine.pieces(2, header, 1000))
        (one,) = theirs.held()
        found = theirs.valid(0)
        assert found is not None and one == header.id
        assert b"".join(theirs.pieces(0, found)) == b"step 10" + content(10)
        with pytest.raises(ValueError, match="bytes of"):
            theirs.receive(0, header, iter([b"step 10", content(10, 4000)]))
        with pytest.raises(ValueError, match="description"):
            theirs.receive(1, header, iter([b"stop 10", content(10)]))
        with pytest.raises(ValueError, match="do not fit"):
            theirs.receive(1, header._replace(data_size=SIZE * 2), iter([b"step 10", content(10, SIZE * 2)]))
        assert not theirs.held()


def test_damage_to_any_byte_of_a_header_is_noticed(folder: Path) -> None:
    with made(folder) as file:
        raw = pack_header(write(file, 0, 10))
    for at in range(len(raw)):
        with pytest.raises(ValueError):
            parse_header(raw[:at] + bytes((raw[at] ^ 1,)) + raw[at + 1 :])
    path = folder / "rank-1"
    whole = path.read_bytes()
    for raw in (b"", whole[:20], b"x" + whole[1:], whole[:PAGE]):
        path.write_bytes(raw)
        with pytest.raises(ValueError):
            open_slots(path)


def test_a_file_that_others_may_read_or_that_is_a_link_is_not_opened(folder: Path) -> None:
    made(folder).close()
    path = folder / "rank-1"
    path.chmod(0o640)
    with pytest.raises(PermissionError):
        open_slots(path)
    path.chmod(0o600)
    (folder / "rank-0").symlink_to(path)
    with pytest.raises(OSError):
        open_slots(folder / "rank-0")


def test_where_there_is_no_room_no_file_is_left(folder: Path) -> None:
    asked: list[int] = []

    def may_take(size: int) -> None:
        asked.append(size)
        if len(asked) == 3:
            raise OSError(28, "no room")

    with pytest.raises(OSError, match="no room"):
        create_slots(folder / "rank-1", 1, 1, room_for(3, 100, 20 << 20), may_take)
    assert len(asked) == 3 and not list(folder.iterdir())


def test_a_second_process_that_lives_holds_the_file_and_a_dead_one_does_not(folder: Path) -> None:
    made(folder).close()
    come, go = os.pipe()
    child = os.fork()
    if not child:
        os.close(come)
        with open_slots(folder / "rank-1", write=True) as file:
            os.write(go, b"1" if claim(file.fd) else b"0")
            time.sleep(60)
        os._exit(0)
    os.close(go)
    with open_slots(folder / "rank-1", write=True) as file:
        assert os.read(come, 1) == b"1" and not claim(file.fd)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert claim(file.fd)
    os.close(come)


def kill_at_random_moments(folder: Path, kills: int) -> None:
    with made(folder, slots=2) as file:
        write(file, 0, 1)
        write(file, 1, 2)
        chance, torn = random.Random(kills), 0
        for _ in range(kills):
            before = max(file.held())
            come, go = os.pipe()
            child = os.fork()
            if not child:
                os.close(come)
                with open_slots(folder / "rank-1", write=True) as mine:
                    os.write(go, b"1")
                    for step in range(before.step + 1, 1 << 30):
                        steps = mine.steps()
                        write(mine, steps.index(min(steps)), step)
                os._exit(1)
            os.close(go)
            os.read(come, 1)
            os.close(come)
            time.sleep(chance.random() * 0.004)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            held = file.held()
            torn += TORN in file.steps()
            assert max(held) >= before
            for one, slot in held.items():
                header = file.valid(slot)
                assert header is not None
                assert file.meta(slot, header) == b"step %d" % one.step
                assert b"".join(file.pieces(slot, header)) == b"step %d" % one.step + content(one.step)
        assert torn, "no kill fell into a copy: the test proves nothing"


@pytest.mark.fault(
    "A rank is killed while it copies a snapshot",
    "that slot is torn and passed over, the one before is whole",
)
def test_a_writer_killed_at_random_moments_leaves_the_newest_snapshot_whole(folder: Path) -> None:
    kill_at_random_moments(folder, 40)


@pytest.mark.slow
def test_a_writer_killed_at_450_random_moments_leaves_the_newest_snapshot_whole(folder: Path) -> None:
    kill_at_random_moments(folder, 450)


def test_a_reader_beside_a_writer_never_takes_a_mixture_for_a_snapshot(folder: Path) -> None:
    with made(folder, slots=2) as file:
        write(file, 0, 1)
        child = os.fork()
        if not child:
            with open_slots(folder / "rank-1", write=True) as mine:
                for step in range(2, 1 << 30):
                    write(mine, step % 2, step)
            os._exit(1)
        try:
            taken = given_up = 0
            deadline = time.monotonic() + 20
            while (taken < 100 or not given_up) and time.monotonic() < deadline:
                held = file.held()
                if not held:
                    continue
                slot = next(iter(held.values()))
                header = file.valid(slot)
                if header is None:
                    continue
                found = b"".join(file.pieces(slot, header))
                if not file.still(slot, header):
                    given_up += 1
                    continue
                taken += 1
                assert found == b"step %d" % header.step + content(header.step)
            assert taken and given_up
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
