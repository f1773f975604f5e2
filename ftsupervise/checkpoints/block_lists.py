"""The digests of the blocks of a rank's state, beside its manifest: so each block is compared as it is read, and used at once.

    step-00000100/.ftsupervise/rank-00003.state.blocks    16 bytes for each block of 1 MiB

The manifest holds the digest of these digests, so that the list proves itself. A checkpoint without one, or with a damaged one,
is read twice: once for the digests, and once more to be loaded.
"""

from __future__ import annotations

from pathlib import Path

from ftsupervise.checkpoints.digest import BlockDigests, hasher
from ftsupervise.checkpoints.manifest import FOLDER_NAME, FileEntry, make_record_folder
from ftsupervise.host import files
from ftsupervise.host.modes import page_inside
from ftsupervise.rundir.paths import write_whole

DIGEST = 16  # bytes


def leave(root: Path, path: str, blocks: bytes) -> None:
    """Leave the digests of the file ``path``. They need not be durable. Raises OSError."""
    list_of = _list_of(root, path)
    make_record_folder(list_of.parent)
    write_whole(list_of, blocks, sync=False, mode=page_inside(list_of.parent))


def known(root: Path, entry: FileEntry, algorithm: str) -> bytes:
    """Return the digests of the blocks of a file as it was committed; b"" where there is no list of them, or another one."""
    sums = hasher(algorithm)
    if not isinstance(sums, BlockDigests):
        return b""
    expected = DIGEST * -(-entry.size // sums.size)
    try:
        blocks = files.read_bounded(_list_of(root, entry.path), expected)
    except OSError:
        return b""
    for at in range(0, len(blocks), DIGEST):
        sums.add(blocks[at : at + DIGEST])
    return blocks if len(blocks) == expected and sums.hexdigest() == entry.digest else b""


def _list_of(root: Path, path: str) -> Path:
    return root / FOLDER_NAME / f"{path}.blocks"
