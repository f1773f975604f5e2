"""Snapshots that are kept on the disk when their job ends: the next member of the chain begins there.

A job that is killed at its limit, or leaves because a node is bad, has made steps since the last checkpoint that only the
memory holds. Where the loop has not saved them, each node writes the newest snapshot that all ranks hold into one folder:

    CHECKPOINTS/.snapshot-00000118-0003/rank-N         one slot, as in memory (memory_slots.py), with its digest
    CHECKPOINTS/.snapshot-00000118-0003/snapshot.json  written last: step, attempt, world

The folder is made in the staging area of the attempt and gets its name by one rename, so it is whole or not there, and nothing
of it appears once a newer attempt has begun. It is no checkpoint: only the same loop with the same number of ranks can load it,
and it goes when there is a newer checkpoint.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints import digest
from ftsupervise.checkpoints.memory_folder import rank_file
from ftsupervise.checkpoints.memory_slots import (
    ALGORITHMS,
    SlotFile,
    SlotHeader,
    SlotRoom,
    SnapshotId,
    create_slots,
    open_slots,
)
from ftsupervise.checkpoints.memory_slots import PAGE as PAGE_SIZE
from ftsupervise.checkpoints.memory_sums import as_bytes
from ftsupervise.rundir.records import read_record, write_json

PAGE = "snapshot.json"
_NAME = re.compile(r"\.snapshot-([0-9]{8,18})-([0-9]{4,9})")


class KeptPage(NamedTuple):
    """The page of a kept snapshot."""

    step: int
    attempt: int  # that made it
    world: int


class KeptSnapshot(NamedTuple):
    """A snapshot on the disk."""

    path: Path
    step: int
    attempt: int


def name_of(one: SnapshotId) -> str:
    return f".snapshot-{one.step:08d}-{one.attempt:04d}"


def all_in(checkpoints: Path) -> list[KeptSnapshot]:
    """Return the kept snapshots in ``checkpoints``, oldest first. Raises OSError."""
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError:
        return []
    found = ((name, _NAME.fullmatch(name)) for name in names)
    kept = [KeptSnapshot(checkpoints / name, int(by[1]), int(by[2])) for name, by in found if by]
    return sorted(kept, key=lambda one: (one.step, one.attempt))


def read_page(folder: Path) -> KeptPage:
    """Read the page. Raises OSError; ValueError where it is none of ours, or another account may write there."""
    found = read_record(KeptPage, folder / PAGE)
    if found is None:
        raise ValueError(f"{folder} has no {PAGE}")
    return found


def write_page(folder: Path, one: SnapshotId, world: int) -> None:
    """Write the page: all ranks have written theirs. Raises OSError."""
    write_json(folder / PAGE, KeptPage(one.step, one.attempt, world))


def remove(kept: KeptSnapshot) -> None:
    """Remove it, by a rename first, so that no rank begins from half of it."""
    gone = kept.path.with_name(f".removing-{kept.path.name.removeprefix('.')}")
    try:
        kept.path.rename(gone)
    except OSError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def write_rank(place: str, folder: str, rank: int, wanted: SnapshotId) -> None:
    """Write that snapshot of a rank from the memory of this node, durably. Raises OSError; ValueError for one that is not
    there, damaged, or written over meanwhile."""
    with open_slots(rank_file(place, rank)) as source:
        slot = source.held().get(wanted)
        header = source.valid(slot) if slot is not None else None
        if slot is None or header is None:
            raise ValueError(f"step {wanted.step} is not in memory any more")
        room = SlotRoom(1, source.room.meta, -(-max(1, header.data_size) // PAGE_SIZE) * PAGE_SIZE)
        with create_slots(rank_file(folder, rank), source.world, rank, room) as target:
            sums = digest.hasher(digest.best_algorithm())
            target.receive(0, header, _summed(source, slot, header, sums))
            found = as_bytes(sums.hexdigest())
            if not source.still(slot, header):
                raise ValueError("it was written over")
            algorithm = ALGORITHMS.index(digest.best_algorithm())
            if header.algorithm == algorithm and found != header.digest:
                raise ValueError("it is damaged: its bytes are not those that were copied there")
            mine = target.header(0)
            assert mine is not None
            target.commit(0, mine._replace(algorithm=algorithm, digest=found))
            os.fsync(target.fd)


def _summed(source: SlotFile, slot: int, header: SlotHeader, sums: digest.Hasher) -> Iterator[bytes]:
    offset = 0
    for piece in source.pieces(slot, header):
        data = piece[max(0, header.meta_size - offset) :] if offset < header.meta_size else piece
        sums.update(data)
        offset += len(piece)
        yield piece
