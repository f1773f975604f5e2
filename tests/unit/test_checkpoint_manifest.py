"""The manifest of a checkpoint holds every name, and a flipped bit in it is never taken for one in a file."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.checkpoints.digest import CRC32, XXH3, CannotJudge, hash_buffer, hasher
from ftsupervise.checkpoints.manifest import (
    CheckpointLayout,
    FileEntry,
    Manifest,
    encoded,
    escaped,
    manifest_of,
    read_head,
    read_manifest,
    unescaped,
    write_manifest,
)

AT = datetime(2026, 11, 22, 2, 10, tzinfo=timezone.utc)
ENTRIES = (FileEntry("a", 3, "00"), FileEntry("b/c", 2**40, "ff"), FileEntry("l", 1, "0a", True))
ONE = Manifest(100, ENTRIES, CRC32, CheckpointLayout.DCP, 8, "tr11", 3, "node-7", "ada", AT, {"loss": 2.5})


def checkpoint(tmp_path: Path, raw: bytes) -> Path:
    folder = tmp_path / "step-1"
    manifest_of(folder).parent.mkdir(parents=True, exist_ok=True)
    manifest_of(folder).write_bytes(raw)
    return folder


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    write_manifest(tmp_path / "step-1", ONE)
    assert read_manifest(tmp_path / "step-1") == ONE
    head = read_head(tmp_path / "step-1")
    assert head is not None
    assert (head.step, head.listed, head.size, head.attempt) == (100, 3, ONE.size, 3)
    assert read_manifest(tmp_path) is None and read_head(tmp_path) is None


def test_a_manifest_is_one_json_object_that_any_program_reads() -> None:
    value = json.loads(encoded(ONE))
    assert value["step"] == 100 and [one["path"] for one in value["files"]] == ["a", "b/c", "l"]


def test_a_flipped_bit_in_any_byte_of_a_manifest_and_any_length_of_it_is_noticed(tmp_path: Path) -> None:
    raw = encoded(ONE._replace(algorithm=XXH3))
    for byte in range(len(raw)):
        flipped = bytearray(raw)
        flipped[byte] ^= 1 << byte * 5 % 8
        with pytest.raises(ValueError):
            read_manifest(checkpoint(tmp_path, bytes(flipped)))
    for length in range(0, len(raw), 3):
        with pytest.raises(ValueError):
            read_manifest(checkpoint(tmp_path, raw[:length]))


@given(st.binary(min_size=1, max_size=40).filter(lambda name: b"\0" not in name and b"/" not in name))
def test_every_name_that_a_file_can_have_is_kept(name: bytes) -> None:
    path = os.fsdecode(name)
    assert unescaped(json.loads(json.dumps(escaped(path)))) == path


@pytest.mark.parametrize("path", ["/etc/passwd", "../a", "a/../../b", "a//b", ".", ""])
def test_a_path_that_leads_out_of_the_checkpoint_makes_the_manifest_worthless(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="leads out"):
        read_manifest(checkpoint(tmp_path, encoded(ONE._replace(files=(FileEntry(path, 1, "00"),)))))


def test_a_manifest_of_a_newer_version_says_nothing_here(tmp_path: Path) -> None:
    with pytest.raises(CannotJudge, match="newer version"):
        read_manifest(checkpoint(tmp_path, encoded(ONE._replace(version=2))))
    with pytest.raises(CannotJudge, match="no kind of digest"):
        hasher("md5")


def test_a_manifest_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(encoded(ONE))
    folder = checkpoint(tmp_path, b"")
    manifest_of(folder).unlink()
    manifest_of(folder).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        read_manifest(folder)


def test_the_digests_are_those_that_other_tools_compute() -> None:
    """``xxhsum -H2`` and ``zlib`` say the same of these bytes."""
    assert hash_buffer(b"123456789", CRC32) == "cbf43926"
    assert hash_buffer(b"", XXH3) == "99aa06d3014798d86001c324468d497f"
