"""Chooses the step from which the next attempt begins: the newest one whose snapshot all ranks hold, or that of the
disk. Pure.

A snapshot is only chosen where nothing is doubtful. All ranks hold the same step of the same attempt with the same world
size, and that attempt came to it before a later one went back behind it: an older attempt's steps after the one that
the next attempt began from are an abandoned future. A slot that is torn, or whose node did not answer, is not in the
list at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class Source(str, Enum):
    """The source from which an attempt begins."""

    MEMORY = "memory"
    KEPT = "kept"  # on the disk, from the memory of an older job
    DISK = "disk"
    START = "start"  # neither memory nor disk offer a step, as far as the supervisor knows


class HeldSnapshot(NamedTuple):
    """A whole snapshot of one rank in the memory of ``node``, the rank's own or a buddy's copy."""

    rank: int
    step: int
    attempt: int
    world: int
    node: str


class Begun(NamedTuple):
    """An attempt of this job and the step that it began from; -1 where that is not known."""

    attempt: int
    step: int


class Pull(NamedTuple):
    """``target`` fetches a rank's snapshot from ``source`` before the rank starts there."""

    rank: int
    source: str
    target: str


class MemoryChoice(NamedTuple):
    """The choice. ``step``: the attempt begins from it, as far as it is known.

    Every snapshot after it is invalidated (-1: all).
    """

    source: Source
    step: int = -1
    attempt: int = 0  # that made the snapshot
    world: int = 0
    pulls: tuple[Pull, ...] = ()
    copies: int = 0  # ranks whose snapshot comes from another node than they ran on or will run on
    why: str = ""  # the memory was not used, or not its newest step


def accepts(lineage: Sequence[Begun], step: int, attempt: int) -> bool:
    """Return whether ``step`` as ``attempt`` made it is part of what the run has kept."""
    if attempt not in (one.attempt for one in lineage):
        return False
    return all(step <= later.step for later in lineage if later.attempt > attempt)


def choose(
    held: Iterable[HeldSnapshot],
    lineage: Sequence[Begun],
    *,
    disk: int | None = None,
    refused: Collection[int] = (),
    places: Mapping[int, str] | None = None,
    homes: Mapping[int, str] | None = None,
) -> MemoryChoice:
    """The newest step that all ranks hold, unless the disk has a newer one.

    lineage  the attempts of this job, oldest first
    disk     the newest step that was saved, None where there is none or it is not known
    refused  steps from which attempts have failed too often
    places   rank -> the node that it will run on; ranks that are not named run where they ran
    homes    rank -> the node that it ran on
    """
    groups = _generations(held, lineage)
    whole = {key: group for key, group in groups.items() if len(group) == key[2]}
    open_to_us = {key: group for key, group in whole.items() if key[0] not in refused}
    why = _why_not_newest(groups, whole, refused)
    best = max(open_to_us, default=None)
    if best is None or (disk is not None and disk > best[0]):
        if best is not None:
            why = f"the disk has step {disk}, and the memory step {best[0]}"
        return MemoryChoice(Source.START if disk is None else Source.DISK, -1 if disk is None else disk, why=why)
    step, attempt, world = best
    where = {**(homes or {}), **(places or {})}
    pulls = tuple(pull for rank, nodes in sorted(open_to_us[best].items()) if (pull := _pull(rank, nodes, where)))
    moved = {pull.rank for pull in pulls}
    copies = sum(
        1 for rank, nodes in open_to_us[best].items() if rank in moved or (homes or {}).get(rank, nodes[0]) not in nodes
    )
    return MemoryChoice(Source.MEMORY, step, attempt, world, pulls, copies, why)


_Generation = tuple[int, int, int]  # step, attempt, world


def _generations(held: Iterable[HeldSnapshot], lineage: Sequence[Begun]) -> dict[_Generation, dict[int, list[str]]]:
    """Return each generation that is held: rank -> the nodes that hold it."""
    groups: dict[_Generation, dict[int, list[str]]] = {}
    for one in held:
        if 0 <= one.rank < one.world and one.step >= 0 and accepts(lineage, one.step, one.attempt):
            group = groups.setdefault((one.step, one.attempt, one.world), {})
            nodes = group.setdefault(one.rank, [])
            if one.node not in nodes:
                nodes.append(one.node)
    return groups


def _why_not_newest(
    groups: Mapping[_Generation, Mapping[int, object]],
    whole: Mapping[_Generation, object],
    refused: Collection[int],
) -> str:
    """Return one clause on the snapshots that were passed over; "" where the newest step is the one that is used."""
    if not groups:
        return "no rank has a snapshot"
    failed = sorted(key[0] for key in whole if key[0] in refused)
    if failed:
        return f"attempts have failed from step {failed[-1]}"
    newest = max(groups)
    if whole and max(whole) == newest:
        return ""
    missing = sorted(set(range(newest[2])) - set(groups[newest]))
    ranks = ", ".join(map(str, missing[:3])) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    have = "ranks {} have" if len(missing) > 1 else "rank {} has"
    return f"{have.format(ranks)} no snapshot of step {newest[0]}"


def _pull(rank: int, nodes: Sequence[str], where: Mapping[int, str]) -> Pull | None:
    target = where.get(rank)
    if target is None or target in nodes:
        return None
    return Pull(rank, nodes[rank % len(nodes)], target)
