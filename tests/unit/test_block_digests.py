"""The digest by blocks: the same one however the bytes come, by whatever number of threads; and copies made by several."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ftsupervise.checkpoints import digest
from ftsupervise.checkpoints.digest import BLOCK, BLOCKS, CRC32, XXH3
from ftsupervise.checkpoints.mapped_bytes import MappedBytes
from ftsupervise.snapshots.wait import Copies

SIZES = (0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", [BLOCKS, XXH3, CRC32])
def test_a_file_has_one_digest_however_it_is_read(size: int, algorithm: str, tmp_path: Path) -> None:
    data, path = random.Random(size).randbytes(size), tmp_path / "file"
    path.write_bytes(data)
    whole = digest.hash_buffer(data, algorithm)
    assert digest.hash_file(path, algorithm) == (size, whole, True)
    pieces, at, draw = digest.hasher(algorithm), 0, random.Random(1)
    while at < size:
        step = draw.randrange(1, 2 * BLOCK)
        pieces.update(data[at : at + step])
        at += step
    assert pieces.hexdigest() == whole
    fd = os.open(path, os.O_RDONLY)
    mapped, heard = MappedBytes(fd, 0, size), []
    os.close(fd)
    for aside in (False, True):
        assert mapped.digest(algorithm, lambda: heard.append(1), aside=aside) == whole
    assert len(heard) == 2 * -(-size // BLOCK)


def test_the_digest_of_a_file_is_that_of_the_digests_of_its_blocks_in_their_order() -> None:
    blocks = [random.Random(n).randbytes(BLOCK if n < 2 else 100) for n in range(3)]
    made, turned = digest.BlockDigests(), digest.BlockDigests()
    for one in blocks:
        made.add(digest.block_digest([one[:7], one[7:]]))
    for one in (blocks[1], blocks[0], blocks[2]):
        turned.update(one)
    assert made.hexdigest() == digest.hash_buffer(b"".join(blocks), BLOCKS) != turned.hexdigest()
    made.update(b"in the middle of a block")
    with pytest.raises(ValueError, match="under way"):
        made.add(b"")


def test_copies_are_made_at_their_run_and_hold_their_arrays_until_then() -> None:
    import numpy as np

    source, target = np.arange(3_000_000.0), np.zeros(3_000_000)
    copies = Copies()
    copies.add(target.ctypes.data, source.ctypes.data, source.nbytes, source.copy(), target)
    gone = np.arange(200_000.0)
    kept = np.zeros(200_000)
    copies.add(kept.ctypes.data, gone.ctypes.data, gone.nbytes, gone, kept)
    del gone
    assert not target.any()
    copies.run()
    assert np.array_equal(target, source) and kept[-1] == 199_999
    target[:] = 0
    copies.run()
    assert not target.any(), "each is made once"
