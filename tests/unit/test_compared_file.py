"""No byte of a file is used that was not compared with what was committed, whatever happens to the file meanwhile."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ftsupervise.checkpoints.block_lists import known, leave
from ftsupervise.checkpoints.compared_file import ComparedFile, Damaged, FilePart
from ftsupervise.checkpoints.digest import BLOCK, BLOCKS, BLOCKS_8M, CRC32, XXH3, hash_file
from ftsupervise.checkpoints.manifest import FileEntry

SIZES = (1, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1)
NAME = "rank-00000.state"


def hold(file: ComparedFile, begin: int, end: int) -> bytes:
    file.hold([(begin, end)])
    return bytes(file.data[begin:end])


def compare(file: ComparedFile, begin: int, end: int) -> bytes:
    file.compare([(begin, end)])
    return bytes(file.data[begin:end])


def copy(file: ComparedFile, begin: int, end: int) -> bytes:
    target = bytearray(end - begin)
    file.copy([FilePart(ctypes.addressof(ctypes.c_char.from_buffer(target)), begin, end - begin)])
    return bytes(target)


USES = pytest.mark.parametrize("use", [hold, compare, copy])
LISTED = pytest.mark.parametrize("listed", [True, False], ids=["with a list", "without"])
Use = Callable[[ComparedFile, int, int], bytes]


def committed(root: Path, data: bytes, algorithm: str, *, listed: bool) -> FileEntry:
    (root / NAME).write_bytes(data)
    blocks = bytearray()
    hashed = hash_file(root / NAME, algorithm, blocks=blocks)
    if listed:
        leave(root, NAME, blocks)
    return FileEntry(NAME, hashed.size, hashed.digest)


def opened(root: Path, entry: FileEntry, algorithm: str) -> ComparedFile:
    fd = os.open(root / NAME, os.O_RDONLY)
    try:
        return ComparedFile(fd, entry.size, algorithm, entry.digest, root / NAME, known(root, entry, algorithm))
    finally:
        os.close(fd)


@USES
@LISTED
@pytest.mark.parametrize("algorithm", [BLOCKS, BLOCKS_8M, XXH3, CRC32])
@pytest.mark.parametrize("size", SIZES)
def test_a_part_is_what_was_committed_and_no_flipped_bit_passes(
    size: int, algorithm: str, listed: bool, use: Use, tmp_path: Path
) -> None:
    data = random.Random(size).randbytes(size)
    entry = committed(tmp_path, data, algorithm, listed=listed)
    edges = sorted({0, size - 1, *(at for at in (BLOCK - 1, BLOCK, 2 * BLOCK) if at < size)})
    for begin, end in ((0, size), (edges[-1], size), (size // 2, size)):
        file = opened(tmp_path, entry, algorithm)
        assert use(file, begin, end) == data[begin:end]
        file.rest()
        assert file.unchanged()
    for at in edges:
        flipped = bytearray(data)
        flipped[at] ^= 1
        (tmp_path / NAME).write_bytes(flipped)
        with pytest.raises(Damaged, match="has other bytes than were committed"):
            use(opened(tmp_path, entry, algorithm), at, size)
        with pytest.raises(Damaged, match="has other bytes than were committed"):
            opened(tmp_path, entry, algorithm).rest()


@USES
@pytest.mark.parametrize("algorithm", [BLOCKS, XXH3])
def test_a_file_that_is_cut_short_meanwhile_is_damaged_and_kills_nobody(
    algorithm: str, use: Use, tmp_path: Path
) -> None:
    data = random.Random(1).randbytes(3 * BLOCK)
    entry = committed(tmp_path, data, algorithm, listed=True)
    used, file = opened(tmp_path, entry, algorithm), opened(tmp_path, entry, algorithm)
    assert compare(used, 0, len(data)) == data
    os.truncate(tmp_path / NAME, BLOCK + 100)
    if algorithm == BLOCKS or use is copy:  # else all was compared when it was opened, and is asked for afterwards
        with pytest.raises(Damaged, match=f"{NAME} (was cut short|ends at 1048676 bytes of 3145728)"):
            use(file, 0, len(data))
    for one in (used, file) if algorithm == XXH3 else (used,):
        with pytest.raises(Damaged, match=f"{NAME} was cut short"):
            one.unchanged()


@USES
@pytest.mark.parametrize("algorithm", [BLOCKS, XXH3])
def test_a_file_that_is_replaced_once_it_is_open_is_used_as_it_was(algorithm: str, use: Use, tmp_path: Path) -> None:
    data = random.Random(2).randbytes(2 * BLOCK + 5)
    file = opened(tmp_path, committed(tmp_path, data, algorithm, listed=True), algorithm)
    (tmp_path / "new").write_bytes(bytes(len(data)))
    (tmp_path / "new").rename(tmp_path / NAME)
    assert use(file, 0, len(data)) == data
    file.rest()
    assert file.unchanged()


@pytest.mark.parametrize("harm", ["longer", "shorter", "empty", "a FIFO", "a link"])
def test_a_list_of_another_length_or_kind_is_none(harm: str, tmp_path: Path) -> None:
    entry = committed(tmp_path, random.Random(3).randbytes(2 * BLOCK + 5), BLOCKS, listed=True)
    path = tmp_path / ".ftsupervise" / f"{NAME}.blocks"
    raw = path.read_bytes()
    assert known(tmp_path, entry, BLOCKS) == raw
    if harm in ("a FIFO", "a link"):
        path.rename(tmp_path / "list")
        os.mkfifo(path) if harm == "a FIFO" else path.symlink_to(tmp_path / "list")
    else:
        path.write_bytes({"longer": raw + raw[:16], "shorter": raw[:-1], "empty": b""}[harm])
    assert known(tmp_path, entry, BLOCKS) == b""
    assert opened(tmp_path, entry, BLOCKS).unchanged()
