"""A group takes the weights of groups of its own run alone: each rank of a start writes down where its manager is, by which
name, and where its weights are.

    RUN/groups/G/attempts/NNNN/manager-RANK.json

It stands alone because it asks nobody but the run directory. Whoever reaches the lighthouse may join the quorum, tell the
highest step, and so be named to the others as the source of their weights; whoever reaches a manager may tell it where the
weights of a rank are; and what a source sends is unpickled, in torchft. Who writes the run directory is not decided by who
reaches a port.

Weights are taken from starts at work: the port of one that has ended may be another account's by now. And a page counts that
this account has written: somebody who may write above the run may have put another directory in its place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host.ownership import distrust
from ftsupervise.rundir import ledger
from ftsupervise.rundir.attempt_pages import NAMES, EndPage
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import read_record, write_json

_ATTEMPTS = 3  # of each group that are read: the newest
_LIMIT = 64_000  # bytes of a page


class ManagerPage(NamedTuple):
    """The page of a rank of one start of a group. ``start``: its name at the lighthouse, "g002:3f0c…"."""

    address: str = ""
    start: str = ""
    weights: str = ""  # where the others copy those of this rank from


def write_manager(attempt: Path, rank: int, page: ManagerPage) -> None:
    """Write where the manager of this start is, and the weights of its rank. Raises OSError."""
    write_json(attempt / _name(rank), page)


def at_work(group: RunDir, rank: int) -> frozenset[ManagerPage]:
    """Return what this rank of the newest start of each group has written, in the run that has this group, unless that start
    has ended. Raises OSError."""
    groups = group.root.parent
    found: set[ManagerPage] = set()
    for name in os.listdir(groups):
        found.update(_pages(RunDir(groups / name), rank, newest=1, over=False))
    return frozenset(found)


def pages_of(group: RunDir) -> list[ManagerPage]:
    """Return what the newest starts of a group have written. Raises OSError."""
    return _pages(group, 0, newest=_ATTEMPTS, over=True)


def _pages(group: RunDir, rank: int, *, newest: int, over: bool) -> list[ManagerPage]:
    """``over``: also those of starts that have ended."""
    found: list[ManagerPage] = []
    try:
        for number in sorted(ledger.numbers(group))[-newest:]:
            attempt = group.attempt(number)
            names = os.listdir(attempt)  # on NFS that revalidates the folder, in which it may be new
            if _name(rank) in names and (over or NAMES[EndPage] not in names):
                page = _read(attempt / _name(rank))
                found += [page] if page is not None and page.address else []
    except (FileNotFoundError, NotADirectoryError):
        return found
    return found


def _read(path: Path) -> ManagerPage | None:
    try:
        return read_record(ManagerPage, path, limit=_LIMIT, distrust=lambda page: distrust(page, path))
    except (OSError, ValueError):
        return None


def _name(rank: int) -> str:
    return f"manager-{rank}.json"
