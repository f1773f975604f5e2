"""The folder of a job's snapshots in a node's memory: its name, whose it is, and its removal.

    /dev/shm/ftsupervise-snapshots-UID-JOB-NONCE/NODE/rank-N    the snapshots of one rank (memory_slots.py)
    /dev/shm/ftsupervise-snapshots-UID-JOB-NONCE/NODE/kept      the generations that no rank overwrites (memory_pins.py)

The supervisor chooses the name, and the node's agent (or the supervisor itself, on one node) makes the folder. A rank never
makes it: where a container has another /dev/shm the folder is not there, and the rank makes no snapshots. A file of a rank lies
on the node that it runs on and, as a copy, on the buddy of that node; in each folder it has one writer. Several nodes of a test
cluster share a host, so each has a folder of its own.

Who writes the folder holds a shared lock on it. An unlocked folder that no process of ours works with belongs to a job that is
gone, and the next job on the node removes it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

from ftsupervise.host import processes
from ftsupervise.host.shared_memory import SHARED_MEMORY, hold, is_private, make_private, names_in, remove_empty
from ftsupervise.rundir.paths import ENV_SNAPSHOTS

_NAME = "ftsupervise-snapshots"
_RANK = re.compile(r"rank-([0-9]{1,9})")


def new_folder(job: str, top: str = SHARED_MEMORY) -> str:
    """Return an unguessable name for the folder of ``job`` (its number, "" outside any job)."""
    word = re.sub(r"[^A-Za-z0-9_.]", "_", job)[:40] or "local"
    return f"{top}/{_NAME}-{os.geteuid()}-{word}-{os.urandom(8).hex()}"


def node_folder(folder: str, node: str = "") -> str:
    """Return the part of ``folder`` that is ``node``'s, without it this process's.

    Raises ValueError for a name that is a path.
    """
    name = node or os.environ.get("SLURMD_NODENAME", "") or os.uname().nodename
    if "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} is not the name of a node")
    return f"{folder}/{name}"


def rank_file(place: str, rank: int) -> str:
    return f"{place}/rank-{rank}"


def ranks_in(place: str) -> dict[int, str]:
    """Return rank -> its file, own ones and copies. {} where the folder is not there, or not ours alone."""
    if not is_private(place):
        return {}
    return {int(found[1]): f"{place}/{name}" for name in names_in(place) if (found := _RANK.fullmatch(name))}


def make(folder: str, node: str = "") -> int | None:
    """Make ``folder`` and the part of ``node``, 0700 whatever the umask, and hold them: returns a descriptor to keep
    open.

    None where that cannot be, or a stranger was there first.
    """
    place = node_folder(folder, node)
    if not make_private(folder) or not make_private(place):
        return None
    return hold(folder)


def remove(folder: str, node: str = "") -> None:
    """Remove the files of ``node``, and the folder itself if it is empty then. A folder that is not ours alone stays."""
    if is_private(folder):
        _empty(node_folder(folder, node))
        remove_empty(folder)


def remove_leftovers(top: str = SHARED_MEMORY) -> None:
    """Remove the folders of this account's jobs that are gone from this node: no process holds them or was started with
    them.
    """
    mine = re.compile(rf"{_NAME}-{os.geteuid()}-[A-Za-z0-9_.]+-[0-9a-f]{{16}}")
    left = [f"{top}/{name}" for name in names_in(top) if mine.fullmatch(name)]
    held = [(folder, fd) for folder in left if is_private(folder) and (fd := hold(folder, alone=True)) is not None]
    used = processes.marked(ENV_SNAPSHOTS) if held else {}
    for folder, fd in held:
        try:
            if folder not in used:
                for name in names_in(folder):
                    _empty(f"{folder}/{name}")
                remove_empty(folder)
        finally:
            os.close(fd)


def _empty(place: str) -> None:
    if not is_private(place):
        return
    for name in names_in(place):
        try:
            os.unlink(f"{place}/{name}")
        except IsADirectoryError:  # a rank's staging area
            shutil.rmtree(f"{place}/{name}", ignore_errors=True)
        except OSError:
            continue
    remove_empty(place)


def folders(top: str = SHARED_MEMORY) -> Iterator[str]:
    """Yield the snapshot folders of this account on this host, of whatever job."""
    yield from (f"{top}/{name}" for name in names_in(top) if name.startswith(f"{_NAME}-{os.geteuid()}-"))
