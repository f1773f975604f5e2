"""The digests of the blocks of a rank's state, beside its manifest: so each block is compared as it is read, and used at once.

    step-00000100/.ftsupervise/rank-00003.state.blocks    16 bytes for each block of 1 MiB

The manifest holds the digest of these digests, so that the list proves itself. A checkpoint without one, or with a damaged one,
is read twice: once for the digests, and once more to be loaded. A copy in another place has no list: what brings it back reads
all of it, and leaves one.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ftsupervise.checkpoints.digest import BlockDigests, hasher
from ftsupervise.checkpoints.manifest import FOLDER_NAME, FileEntry, is_loop_file, make_record_folder
from ftsupervise.host import files
from ftsupervise.host.ownership import page_inside
from ftsupervise.rundir.paths import write_whole

DIGEST = 16  # bytes


def leave(root: Path, path: str, blocks: bytes | bytearray) -> None:
    """Leave the digests of the blocks of the file ``path`` in the checkpoint ``root``, where that is the state of a rank.

    They need not be durable, and where they cannot be written the file is read twice when it is loaded.
    """
    if not is_loop_file(path) or len(blocks) <= DIGEST:  # a single block is read at once, with or without a list
        return
    list_of = _list_of(root, path)
    with suppress(OSError):
        make_record_folder(list_of.parent)
        write_whole(list_of, bytes(blocks), sync=False, mode=page_inside(list_of.parent))


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
