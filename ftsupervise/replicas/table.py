"""The replica groups of a run: their names, their nodes, and the table that says how each of them is.

Values, and the pure choice of nodes. The table is ``RUN/replicas/groups.json``, written whole by the one process that starts
the groups (``ftsupervise groups run``), and read by ``status`` and the watch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from ftsupervise.errors import NotFound, UsageError
from ftsupervise.host.ownership import distrust_in
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import EPOCH, read_record, write_json

T = TypeVar("T")
LEAVE = "leave"  # in a group's state/: it leaves for good
_TABLE, _QUORUM = "groups.json", "quorum.json"
_SLOWER = 1.5  # times the median: a group whose steps take so long is named
_STANDS = 5.0  # seconds without a step after which a group is not slow, but stands
_LEAST_STEP = 0.05  # seconds: shorter steps are compared with no one's


def name_of(number: int) -> str:
    """Names sort as text in the order of their numbers, and end with digits: torchft wants both."""
    return f"g{number:03d}"


def find_group(run: RunDir, name: str) -> RunDir:
    """The directory of one group, named by a person. Raises UsageError, NotFound."""
    found = run.group(name)
    if "/" in name or found.whole is None:
        raise UsageError(f"{name!r} is no group: they are called g000, g001 …")
    if not found.root.is_dir():
        raise NotFound(f"{run.root.name} has no group {name}", hint=f"it has {', '.join(run.group_names()) or 'none'}")
    return found


def leaves(group: RunDir, last: bool = False) -> bool:
    """Return whether a person has asked this group to leave for good. Where that cannot be seen, the ``last`` answer holds."""
    try:
        os.lstat(group.state / LEAVE)
    except FileNotFoundError:
        return False
    except OSError:
        return last
    return True


class GroupState(str, Enum):
    RUNNING = "running"
    WAITING = "waiting"  # for nodes, in the queue, or for the older copy to be gone
    STOPPED = "stopped"  # by its brake
    LEFT = "left"  # for good, until a person lets it join again
    OVER = "over"  # its command has ended by itself, or it was told to stop
    UNKNOWN = "unknown"


class ReplicaGroup(NamedTuple):
    """One group. Its directory has the rest: ``RUN/groups/NAME``."""

    name: str = ""
    state: GroupState = GroupState.UNKNOWN
    since: datetime = EPOCH
    why: Annotated[str, 1000] = ""
    nodes: tuple[str, ...] = ()
    job: str = ""
    attempt: int = 0  # the newest
    step: int | None = None
    seconds: float | None = None  # of a step, what it waits for other groups not counted where that is known
    stalled: float | None = None  # seconds since its last step
    back: float | None = None  # seconds from its last progress before it failed to its first step after that
    missed: int | None = None  # steps that the others made meanwhile
    redone: int | None = None  # steps that it made again after that
    back_in: int = 0  # the attempt that these three are of
    pid: int = 0  # of its supervisor, on the host that wrote the table


class GroupTable(NamedTuple):
    at: datetime = EPOCH
    host: str = ""
    wanted: int = 0  # groups
    least: int = 0
    place: str = "allocation"
    groups: tuple[ReplicaGroup, ...] = ()
    spares: tuple[str, ...] = ()
    below: datetime | None = None  # since when fewer than ``least`` run: the others wait for them
    slow: Annotated[str, 500] = ""  # the group that is slower than the others, and how much

    @property
    def running(self) -> int:
        return self._in(GroupState.RUNNING)

    @property
    def unknown(self) -> int:
        return self._in(GroupState.UNKNOWN)

    def _in(self, state: GroupState) -> int:
        return sum(1 for one in self.groups if one.state is state)


class Hung(NamedTuple):
    """An attempt of a group that stands still while the others wait for it."""

    group: str = ""
    attempt: int = 0
    why: Annotated[str, 500] = ""


class QuorumPage(NamedTuple):
    """This page tells each group's supervisor about all groups: ``RUN/replicas/quorum.json``. An old one is worth nothing."""

    at: datetime = EPOCH
    waits: bool = False  # the groups wait for others, and no standstill of theirs is a hang
    why: Annotated[str, 500] = ""
    hung: tuple[Hung, ...] = ()


def write_table(rundir: RunDir, table: GroupTable, area: Path | None = None) -> None:
    """Raises OSError; also once a newer attempt of the run has sealed ``area``."""
    write_json(rundir.replicas / _TABLE, table, sync=False, area=area)


def read_table(rundir: RunDir) -> GroupTable | None:
    """None where there is none, it cannot be read, or an account wrote it that is not trusted there."""
    return read_trusted(GroupTable, rundir.replicas / _TABLE)


def write_quorum(rundir: RunDir, page: QuorumPage, area: Path | None = None) -> None:
    write_json(rundir.replicas / _QUORUM, page, sync=False, area=area)


def read_quorum(rundir: RunDir) -> QuorumPage | None:
    return read_trusted(QuorumPage, rundir.replicas / _QUORUM)


def read_trusted(kind: type[T], path: Path) -> T | None:
    try:
        whose = path.parent.stat()
        return read_record(
            kind,
            path,
            limit=1_000_000,
            distrust=distrust_in(whose, path),
        )
    except (OSError, ValueError):
        return None


def first_nodes(nodes: Sequence[str], count: int, each: int) -> dict[str, tuple[str, ...]]:
    """The nodes of each group at the start, in Slurm's order; those that are left over are spare. A group for which there are
    too few gets none. Without any nodes (on one machine) every group runs here."""
    found = {}
    for number in range(count):
        mine = tuple(nodes[number * each : (number + 1) * each])
        found[name_of(number)] = mine if len(mine) == each else ()
    return found


def choose_nodes(
    own: Sequence[str],
    free: Sequence[str],
    each: int,
    unfit: Collection[str],
    scores: Mapping[str, float] = {},
) -> tuple[str, ...] | None:
    """The nodes for the next start of a group: its own that are fit, then free ones, the better ones first. None: too few.

    ``free``: nodes that no other group has, its own among them or not. ``unfit``: nodes that are lost, or not to be used.
    ``scores``: how bad the past of a node is.
    """
    bad = [node for node in own if scores.get(node, 0.0) > 0]
    stay = [node for node in own if node not in unfit and node not in bad]
    come = sorted(
        (node for node in free if node not in unfit and node not in own), key=lambda node: scores.get(node, 0.0)
    )
    doubtful = sorted((node for node in bad if node not in unfit), key=lambda node: scores[node])
    ranked = [*stay, *sorted([*come, *doubtful], key=lambda node: scores.get(node, 0.0))]
    return tuple(ranked[:each]) if len(ranked) >= each else None


def slower_one(groups: Sequence[ReplicaGroup]) -> str:
    """The group that is slower than the others, in words; "" where none is, or that cannot be told. Pure."""
    running = [one for one in groups if one.state is GroupState.RUNNING and (one.stalled or 0.0) < _STANDS]
    known = {one.name: one.seconds for one in running if one.seconds is not None}
    if len(known) < 3:
        return ""
    name = max(known, key=lambda one: known[one])
    from statistics import median  # here: it loads much

    others = median(seconds for one, seconds in known.items() if one != name)
    if others < _LEAST_STEP or known[name] < _SLOWER * others:
        return ""
    return f"{name} takes {known[name]:.3g} s for a step, the others {others:.3g} s"
