"""A group takes the weights of groups of its own run alone: each start writes down where its manager is, and by which name.

    RUN/groups/G/attempts/NNNN/manager.json

It stands alone because it asks nobody but the run directory. Whoever reaches the lighthouse may join the quorum, tell the
highest step, and so be named to the others as the source of their weights; what a source sends is unpickled, in torchft. Who
writes the run directory is not decided by who reaches a port.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host.ownership import distrust
from ftsupervise.rundir import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import read_record, write_json

MANAGER = "manager.json"
_ATTEMPTS = 3  # of each group that are read: the newest


class ManagerPage(NamedTuple):
    """The page of one start of a group. ``start``: its name at the lighthouse, "g002:3f0c…"."""

    address: str = ""
    start: str = ""


def write_manager(attempt: Path, page: ManagerPage) -> None:
    """Write where the manager of this start is. Raises OSError."""
    write_json(attempt / MANAGER, page)


def managers(group: RunDir) -> frozenset[str]:
    """Return the addresses of the managers of the run that has this group, its own too. Raises OSError."""
    groups = group.root.parent
    return frozenset(page.address for name in os.listdir(groups) for page in pages_of(RunDir(groups / name)))


def pages_of(group: RunDir) -> list[ManagerPage]:
    """Return what the newest starts of a group have written. Raises OSError."""
    found: list[ManagerPage] = []
    try:
        for number in sorted(ledger.numbers(group))[-_ATTEMPTS:]:
            attempt = group.attempt(number)
            if MANAGER in os.listdir(attempt):  # on NFS that revalidates the folder, in which it may be new
                page = _read(attempt / MANAGER)
                found += [page] if page is not None and page.address else []
    except (FileNotFoundError, NotADirectoryError):
        return found
    return found


def _read(path: Path) -> ManagerPage | None:
    """Read a page of this account's own: the owner of the folder may have put another one in the place of the run's."""
    try:
        return read_record(ManagerPage, path, distrust=lambda page: distrust(page, path))
    except (OSError, ValueError):
        return None
