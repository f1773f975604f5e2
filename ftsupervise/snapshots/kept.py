"""Snapshots that are kept on the disk when their job ends: the next member of the chain begins there.

A job that is killed at its limit, or leaves because a node is bad, has made steps since the last checkpoint that only the
memory holds. Where the loop has not saved them, each node writes the newest snapshot that all ranks hold into one folder:

    CHECKPOINTS/.snapshot-00000118-0003-RUN/rank-N         one slot, as in memory (slots.py), with its digest
    CHECKPOINTS/.snapshot-00000118-0003-RUN/snapshot.json  written last: step, attempt, world, run

The folder is made in the staging area of the attempt and gets its name by one rename, so it is whole or not there, and nothing
of it appears once a newer attempt has begun. It is no checkpoint: only the same loop with the same number of ranks can load it,
and it goes when there is a newer checkpoint.

RUN is the id of the run, for several may keep theirs in one folder: none begins from another's, or removes it. A run directory
that was copied or brought back has the same id; so the page also says when its attempt began, as the ledger does.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints import digest
from ftsupervise.checkpoints.contents import distrust_folder
from ftsupervise.host.ownership import distrust, held_to_write, remedy, shown_user, stranger
from ftsupervise.rundir.lineage import Lineage
from ftsupervise.rundir.records import read_record, write_json
from ftsupervise.snapshots import state
from ftsupervise.snapshots.choice import Begun
from ftsupervise.snapshots.doubts import Beside
from ftsupervise.snapshots.room import rank_file
from ftsupervise.snapshots.slots import (
    ALGORITHMS,
    SlotFile,
    SlotHeader,
    SlotRoom,
    SnapshotId,
    as_bytes,
    create_slots,
    open_slots,
)
from ftsupervise.snapshots.slots import PAGE as PAGE_SIZE

PAGE = "snapshot.json"
_NAME = re.compile(r"\.snapshot-([0-9]{8,18})-([0-9]{4,9})(?:-([0-9a-f]{1,40}(?:\.g[0-9]{3,9})?))?")


class KeptPage(NamedTuple):
    """The page of a kept snapshot."""

    step: int
    attempt: int  # that made it
    world: int
    beside: Beside = Beside()
    run: str = ""  # its name
    run_id: str = ""
    run_dir: str = ""
    began: datetime | None = None  # when that attempt did, as its ledger has it
    line: tuple[Begun, ...] = ()  # the attempts that led to it, oldest first, and where each began
    code: str = ""  # the version of the loop's code, where it names one
    at: datetime | None = None


class KeptSnapshot(NamedTuple):
    """A snapshot on the disk."""

    path: Path
    step: int
    attempt: int
    run: str = ""  # the id of its run, and its replica group's name

    @property
    def id(self) -> SnapshotId:
        return SnapshotId(self.step, self.attempt)


def name_of(one: SnapshotId, run: str) -> str:
    return f".snapshot-{one.step:08d}-{one.attempt:04d}-{run}"


def run_of(me: Lineage, group: str = "") -> str:
    """Return by which word the names of a run's kept snapshots end. ``group``: its replica group, for each keeps its own."""
    return f"{me.id}.{group}" if group else me.id


def all_in(checkpoints: Path, run: str | None = None) -> list[KeptSnapshot]:
    """Return the kept snapshots in ``checkpoints``, oldest first; ``run``: of this one alone. Raises OSError."""
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError:
        return []
    found = ((name, _NAME.fullmatch(name)) for name in names)
    kept = [KeptSnapshot(checkpoints / name, int(by[1]), int(by[2]), by[3] or "") for name, by in found if by]
    kept = [one for one in kept if run is None or one.run == run]
    return sorted(kept, key=lambda one: (one.step, one.attempt))


def read_trusted(folder: Path, accounts: Collection[int]) -> KeptPage:
    """Read the page of one that an attempt may begin from. Raises as ``read_page``; ValueError also where another account than
    this one may write there. ``accounts``: those that may own the folder above, besides."""
    if reason := _distrust(folder, accounts) or _not_ours(os.lstat(folder / PAGE), folder / PAGE):
        raise ValueError(reason)
    return read_page(folder)


def read_page(folder: Path) -> KeptPage:
    """Read the page, whoever wrote it. Raises OSError; ValueError where it is none of ours."""
    found = read_record(KeptPage, folder / PAGE)
    if found is None:
        raise ValueError(f"{folder} has no {PAGE}")
    return found


def _distrust(folder: Path, accounts: Collection[int]) -> str:
    """Return why others than this account could have put a kept snapshot there, or changed it, as a clause; "" when none could.
    The files of the ranks are judged when they are opened (``open_slots``). Raises OSError."""
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode):
        return f"{folder} is no folder"
    reason, at = distrust_folder(folder.parent, accounts), folder.parent
    if not reason:
        reason, at = _not_ours(facts, folder), folder
    return f"{reason} (type: {remedy(at.stat(), at)})" if reason else ""


def _not_ours(facts: os.stat_result, path: Path) -> str:
    """Return the same of one thing in it, which this account alone makes: nobody shares it."""
    if facts.st_uid != os.geteuid():
        return f"{path} belongs to {shown_user(facts.st_uid)}"
    return distrust(facts, path)


def write_page(folder: Path, page: KeptPage) -> None:
    """Write the page: all ranks have written theirs. Raises OSError."""
    write_json(folder / PAGE, page)


def code_of(folder: Path) -> str:
    """Return the version of the loop's code that it was made by, "" where the loop names none. Raises OSError, ValueError."""
    with open_slots(rank_file(str(folder), 0)) as file:
        header = file.valid(0)
        return "" if header is None else state.code_of(file.meta(0, header))


def anchors(checkpoints: Path) -> dict[str, str]:
    """Return the checkpoints that kept snapshots go on from: name -> a clause. Raises OSError."""
    found = {}
    for one in all_in(checkpoints):
        try:
            if stranger(os.stat(checkpoints), os.lstat(one.path)):  # noqa: PTH116
                continue
            found[read_page(one.path).beside.anchor.checkpoint] = (
                f"the kept snapshot of step {one.step} goes on from it"
            )
        except (ValueError, PermissionError):  # another account's may let nobody in
            continue
    return found


def remove(kept: KeptSnapshot) -> None:
    """Remove it, by a rename first, so that no rank begins from half of it."""
    try:
        with held_to_write(kept.path.parent) as here:
            gone = here / f".removing-{kept.path.name.removeprefix('.')}"
            (here / kept.path.name).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
    except OSError:
        return


def write_rank(place: str, folder: str, rank: int, wanted: SnapshotId) -> bool:
    """Write that snapshot of a rank from the memory of this node, durably. False: there was no digest to compare it with.
    Raises OSError; ValueError for one that is not there, damaged, or written over meanwhile."""
    with open_slots(rank_file(place, rank)) as source:
        slot = source.held().get(wanted)
        header = source.valid(slot) if slot is not None else None
        if slot is None or header is None:
            raise ValueError(f"step {wanted.step} is not in memory any more")
        room = SlotRoom(1, source.room.meta, -(-max(1, header.data_size) // PAGE_SIZE) * PAGE_SIZE)
        with create_slots(rank_file(folder, rank), source.world, rank, room) as target:
            algorithm = _algorithm_for(header)
            sums = digest.hasher(ALGORITHMS[algorithm])
            target.receive(0, header, _summed(source, slot, header, sums))
            found = as_bytes(sums.hexdigest())
            if not source.still(slot, header):
                raise ValueError("it was written over")
            if header.algorithm == algorithm and found != header.digest:
                raise ValueError("it is damaged: its bytes are not those that were copied there")
            mine = target.header(0)
            assert mine is not None
            target.commit(0, mine._replace(algorithm=algorithm, digest=found))
            os.fsync(target.fd)
            return header.algorithm == algorithm


def _algorithm_for(header: SlotHeader) -> int:
    """Return the kind of digest that its rank took, for that rank can take it again; where this process cannot, crc32."""
    if not header.algorithm:
        return ALGORITHMS.index(digest.best_algorithm())
    try:
        digest.hasher(ALGORITHMS[header.algorithm])
    except digest.CannotJudge:
        return ALGORITHMS.index(digest.CRC32)
    return header.algorithm


def _summed(source: SlotFile, slot: int, header: SlotHeader, sums: digest.Hasher) -> Iterator[bytes]:
    offset = 0
    for piece in source.pieces(slot, header):
        data = piece[max(0, header.meta_size - offset) :] if offset < header.meta_size else piece
        sums.update(data)
        offset += len(piece)
        yield piece
