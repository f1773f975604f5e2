"""This rank's part of a snapshot that was kept on the disk when its job ended (``checkpoints/memory_kept.py``)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ftsupervise.checkpoints.mapped_bytes import MappedBytes
from ftsupervise.checkpoints.memory_folder import rank_file
from ftsupervise.checkpoints.memory_kept import read_trusted
from ftsupervise.checkpoints.memory_slots import ALGORITHMS, SnapshotId, open_slots
from ftsupervise.checkpoints.memory_sums import as_bytes


class KeptRank:
    """This rank's snapshot, compared with its digest and mapped.

    Raises OSError, ValueError where this rank cannot begin from it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        with open_slots(rank_file(str(folder), rank)) as file:
            header = file.valid(0)
            if header is None:
                raise ValueError(f"{file.path} is damaged")
            if not header.algorithm:
                raise ValueError(f"{file.path} has no digest to compare it with")
            self.id, self._digest, self._algorithm = header.id, header.digest, ALGORITHMS[header.algorithm]
            self.description = file.meta(0, header)
            self._mapped = MappedBytes(file.fd, file.data_at(0), header.data_size)
            self.data = self._mapped.data
            if not self._compare():
                raise ValueError(f"{file.path} is damaged")

    def is_unchanged(self) -> bool:
        """Return whether its bytes still are those that were kept: asked when they have been loaded."""
        return self._compare(aside=True)

    def _compare(self, *, aside: bool = False) -> bool:
        return as_bytes(self._mapped.digest(self._algorithm, aside=aside)) == self._digest


def kept_for(folder: Path, world: int, accounts: Collection[int]) -> SnapshotId:
    """Return what is kept there, by the page that all ranks read. Raises OSError; ValueError for another number of ranks, or
    where others than this account may write. ``accounts``: those that may own the folder above, besides."""
    page = read_trusted(folder, accounts)
    if page.world != world:
        raise ValueError(
            f"{'1 rank' if page.world == 1 else f'{page.world} ranks'} made it, and {world} would begin from it"
        )
    return SnapshotId(page.step, page.attempt)
