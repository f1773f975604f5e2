"""Which nodes a launch excludes besides ``launch.exclude``: those with a bad score, and those a person has excluded."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from ftsupervise.errors import Error
from ftsupervise.hostlist import expand_hostlist
from ftsupervise.nodes import incidents, shared_store
from ftsupervise.nodes.exclude import fitting, reserve
from ftsupervise.nodes.settings import of_run
from ftsupervise.scheduler.slurm import Slurm

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run


def to_avoid(run: Run, now: datetime) -> tuple[tuple[incidents.JudgedNode, ...], tuple[str, ...]]:
    """The nodes to exclude, a person's own first, then the worst; what could not be read. Reads files only."""
    scoring, places = of_run(run)
    judged = shared_store.judge(places, scoring, now)
    avoided = sorted((node for node in judged.nodes if node.excluded), key=lambda node: node.state != "by hand")
    return tuple(avoided), judged.known.problems


def that_fit(
    nodes: Sequence[incidents.JudgedNode], run: Run, exclude: Sequence[str]
) -> tuple[tuple[incidents.JudgedNode, ...], tuple[str, ...]]:
    """Those of ``nodes`` that Slurm knows and that leave the partition large enough for the job, and a sentence for each
    other one. All of them when Slurm cannot be asked: the launch will tell."""
    try:
        there = Slurm(timeout=10.0).inventory()
    except Error as error:
        return tuple(nodes), (f"which of the excluded nodes the partition can spare is not known: {error.message}",)
    launch = run.launch
    partitions = launch.partition.split(",") if launch.partition else [there.default]
    theirs = [node for text in exclude for node in expand_hostlist(text)]
    by_hand = [node.name for node in nodes if node.state == "by hand" and node.name in there.known]
    bad = [node.name for node in nodes if node.state != "by hand"]
    needed = launch.nodes + launch.spare_nodes
    needed += reserve(needed)
    fit = fitting(bad, [*theirs, *by_hand], needed, partitions, there, launch.constraint or "")
    chosen = {*by_hand, *fit}
    left = [node for node in nodes if node.name not in chosen]
    return tuple(node for node in nodes if node.name in chosen), tuple(
        f"{node.name} is not excluded: "
        + (
            f"fewer than {needed} nodes would be left, with a reserve"
            if node.name in there.known
            else "Slurm knows no such node"
        )
        for node in left
    )
