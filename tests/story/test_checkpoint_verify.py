"""A checkpoint that is torn, cut, flipped, incomplete, of another world or a stranger's is named and passed over."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from ftsupervise.checkpoints import digest
from ftsupervise.checkpoints.commit import NotComplete, Origin, commit
from ftsupervise.checkpoints.find import checkpoints_in, choose, newest
from ftsupervise.checkpoints.manifest import manifest_of
from ftsupervise.checkpoints.verify import CheckpointState as State
from ftsupervise.checkpoints.verify import Scope, Thoroughness, verify

FULL, SIZES = Scope(Thoroughness.FULL), Scope()


def made(folder: Path, step: int, *, files: int = 3, size: int = 2000, world: int | None = None) -> Path:
    path = folder / f"step-{step:08d}"
    (path / "sub").mkdir(parents=True)
    for number in range(files):
        (path / "sub" / f"shard-{number}").write_bytes(random.Random(step * 100 + number).randbytes(size))
    commit(path, Origin(world=world))
    return path


def rot(path: Path, raw: bytes) -> None:
    """Change the bytes as a disk does that rots: nobody wrote them, so the time of the last write stays."""
    before = path.stat()
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.fault(
    "A file of a checkpoint is cut, flipped or lost",
    "the checkpoint is named and passed over, and the one before it is used",
)
def test_each_kind_of_damage_has_its_name(tmp_path: Path) -> None:
    ones = [made(tmp_path, step) for step in range(6)]
    shard = ones[0] / "sub" / "shard-1"
    raw = bytearray(shard.read_bytes())
    raw[77] ^= 4
    rot(shard, bytes(raw))
    os.truncate(ones[1] / "sub" / "shard-1", 1999)
    (ones[2] / "sub" / "shard-1").unlink()
    manifest = bytearray(manifest_of(ones[3]).read_bytes())
    manifest[200] ^= 1
    manifest_of(ones[3]).write_bytes(manifest)
    (ones[4] / "sub" / "shard-1").unlink()
    os.mkfifo(ones[4] / "sub" / "shard-1")
    states = [verify(one, FULL).state for one in ones]
    assert states == [State.DAMAGED, State.TRUNCATED, State.MISSING, State.DAMAGED, State.MISSING, State.VERIFIED]
    assert "sub/shard-1 has 1999 bytes of 2000" in verify(ones[1]).words()
    assert "sub/shard-1 is a FIFO" in verify(ones[4]).words()
    assert verify(ones[0], SIZES).good, "sizes alone do not see a flipped bit"


def test_a_sample_sees_a_flipped_bit_sooner_or_later(tmp_path: Path) -> None:
    one = made(tmp_path, 1, files=20)
    rot(one / "sub" / "shard-7", b"x" * 2000)
    verdicts = [verify(one, Scope(Thoroughness.SAMPLED)) for _ in range(200)]
    assert any(not one.good for one in verdicts) and any(one.good for one in verdicts)


def test_another_number_of_ranks_is_refused_only_where_it_is_asked(tmp_path: Path) -> None:
    one = made(tmp_path, 1, world=4)
    assert verify(one, Scope(world=4)).good and verify(one).good
    assert verify(one, Scope(world=2)).state is State.WRONG_WORLD
    assert "4 ranks wrote it, and 2 would read it" in verify(one, Scope(world=2)).words()


def test_the_newest_good_one_is_found_and_the_others_are_named(tmp_path: Path) -> None:
    ones = [made(tmp_path, step) for step in (1, 2, 3)]
    (tmp_path / "step-00000004.tmp").mkdir()
    (tmp_path / ".staging" / "0001" / "step-00000005").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("of a person")
    (ones[2] / "sub" / "shard-0").unlink()
    choice = choose(tmp_path, FULL)
    assert choice.verdict is not None and choice.verdict.path == ones[1]
    assert [one.state for one in choice.passed] == [State.MISSING]
    assert [one.step for one in checkpoints_in(tmp_path)] == [3, 2, 1]
    assert newest(tmp_path / "none") is None


def test_among_equal_steps_the_later_attempt_is_the_newer(tmp_path: Path) -> None:
    for name, attempt in (("a-7", 3), ("b-7", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w").write_bytes(b"w")
        commit(tmp_path / name, Origin(step=7, attempt=attempt))
    found = newest(tmp_path)
    assert found is not None and found.path.name == "a-7"


def test_a_checkpoint_that_is_one_file_has_its_manifest_beside_it(tmp_path: Path) -> None:
    one = tmp_path / "epoch=1-step=20.ckpt"
    one.write_bytes(b"weights" * 100)
    commit(one)
    assert manifest_of(one) == tmp_path / ".ftsupervise" / "epoch=1-step=20.ckpt.json"
    assert verify(one, FULL).state is State.VERIFIED
    assert [found.path for found in checkpoints_in(tmp_path)] == [one]
    rot(one, b"Weights" * 100)
    assert verify(one, FULL).state is State.DAMAGED


def test_a_file_that_changes_while_it_is_read_is_not_damaged(tmp_path: Path) -> None:
    one = made(tmp_path, 1, files=1, size=30_000_000)
    shard, begun = one / "sub" / "shard-0", threading.Event()

    def told(done: int) -> None:
        if not begun.is_set():
            begun.set()
            with shard.open("r+b") as file:
                file.seek(29_000_000)
                file.write(b"changed")
            os.utime(shard)

    found = verify(one, Scope(Thoroughness.FULL, progress=told))
    assert found.state is State.UNSEEN
    assert "changed while it was read" in found.words()
    assert verify(one, FULL).state is State.DAMAGED


def test_a_save_that_still_goes_on_is_not_adopted(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / "a").write_bytes(b"a" * 5_000_000)
    with pytest.raises(NotComplete, match="still being written"):
        commit(folder, progress=lambda done: (folder / "b").write_bytes(b"b"))
    with pytest.raises(NotComplete, match="still being written"):
        commit(folder, progress=lambda done: (folder / "a").write_bytes(b"c"))
    assert not manifest_of(folder).exists()


def test_links_within_a_checkpoint_are_kept_and_those_that_lead_out_refuse_it(tmp_path: Path) -> None:
    one = tmp_path / "step-1"
    one.mkdir()
    (one / "weights").write_bytes(b"w")
    (one / "last").symlink_to("weights")
    commit(one)
    assert verify(one, FULL).good
    (one / "last").unlink()
    (one / "last").symlink_to("Weights")
    assert verify(one, FULL).state is State.DAMAGED
    two = tmp_path / "step-2"
    two.mkdir()
    (two / "weights").symlink_to(one / "weights")
    with pytest.raises(NotComplete, match="leads out of the checkpoint"):
        commit(two)
    os.mkfifo(two / "pipe")
    with pytest.raises(NotComplete, match="is a FIFO"):
        commit(two)


def test_odd_names_and_holes_are_digested_as_any_other(tmp_path: Path) -> None:
    one = tmp_path / "step-1"
    one.mkdir()
    for name in (b"\xff\xfe", b"a\nb", b"\\x41", "ü".encode(), b" "):
        (one / os.fsdecode(name)).write_bytes(name)
    with (one / "hole").open("wb") as file:
        file.truncate(50_000_000)
    commit(one)
    assert verify(one, FULL).state is State.VERIFIED
    (one / os.fsdecode(b"\xff\xfe")).write_bytes(b"\xff\xff")
    assert verify(one, FULL).state is State.DAMAGED


def test_without_xxhash_crc32_stands_in_and_what_xxhash_wrote_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(tmp_path, 1)
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)  # as where it is not installed
    assert digest.best_algorithm() == digest.CRC32
    found = verify(one, FULL)
    assert found.state is State.UNSEEN and "xxhash" in found.words()
    assert verify(one, SIZES).good, "the sizes are seen without it"
    with pytest.raises(OSError, match="xxhash"):  # and not None, with which a run would begin anew
        choose(tmp_path, FULL)
    two = made(tmp_path, 2)
    assert verify(two, FULL).state is State.VERIFIED
    (two / "sub" / "shard-0").write_bytes(b"y" * 2000)
    assert verify(two, FULL).state is State.DAMAGED
