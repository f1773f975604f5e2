"""This rank's part of a snapshot that was kept on the disk when its job ended (``checkpoints/memory_kept.py``)."""

from __future__ import annotations

import mmap
from collections.abc import Collection
from pathlib import Path

from ftsupervise.checkpoints.memory_folder import rank_file
from ftsupervise.checkpoints.memory_kept import read_trusted
from ftsupervise.checkpoints.memory_slots import SnapshotId, open_slots
from ftsupervise.checkpoints.memory_sums import is_damaged


class KeptRank:
    """This rank's snapshot, compared with its digest and mapped.

    Raises OSError, ValueError where this rank cannot begin from it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        with open_slots(rank_file(str(folder), rank)) as file:
            header = file.valid(0)
            if header is None or is_damaged(file, 0, header):
                raise ValueError(f"{file.path} is damaged")
            self.id = header.id
            self.description = file.meta(0, header)
            at = file.data_at(0)
            self._map = mmap.mmap(
                file.fd, at + file.room.data, access=mmap.ACCESS_COPY
            )  # torch wants memory that could be written
            self.data = memoryview(self._map)[at : at + file.room.data]


def kept_for(folder: Path, world: int, accounts: Collection[int]) -> SnapshotId:
    """Return what is kept there, by the page that all ranks read. Raises OSError; ValueError for another number of ranks, or
    where others than this account may write. ``accounts``: those that may own the folder above, besides."""
    page = read_trusted(folder, accounts)
    if page.world != world:
        raise ValueError(
            f"{'1 rank' if page.world == 1 else f'{page.world} ranks'} made it, and {world} would begin from it"
        )
    return SnapshotId(page.step, page.attempt)
