"""The nodes that waiting jobs are kept away from: Slurm's ExcNodeList, which the owner of a pending job may change.

Seen on 22.05: ``scontrol update JobId=88_[2-5]`` takes the members that wait (the plain id of an array of which one runs is
answered with an error, and changed all the same); an empty list clears; one unknown node and the whole list is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ftsupervise.errors import NotPermitted, SchedulerUnavailable
from ftsupervise.host.users import user_name
from ftsupervise.hostlist import compress_hostlist, expand_hostlist
from ftsupervise.nodes import incidents
from ftsupervise.rundir.records import as_count
from ftsupervise.scheduler.parse import SQUEUE_ENV, is_held
from ftsupervise.scheduler.slurm import Slurm, new_form

# squeue(1) letters: id, array's id, raw id, nodes, partition, excluded nodes, features, reason, comment
_LETTERS = "iFADPxfrk"
_FEATURES = re.compile(r"[\w.:=+-]+(?:&[\w.:=+-]+)*")  # what we understand of --constraint
_AWAY = re.compile(r"down|fail$|fail[*]|error|drain|unknown|no_respond|future|maint|reboot|inval|.*\*", re.I)


class Waiting(NamedTuple):
    """A job, or the rest of an array, that waits."""

    id: str  # "88_[2-5]" or "90"
    base_id: str
    nodes: int  # that it wants
    partitions: tuple[str, ...]
    excluded: tuple[str, ...]
    features: str
    comment: str
    held: bool = False  # by somebody, until it is released


class Room(NamedTuple):
    """The nodes there are."""

    known: frozenset[str]  # every node Slurm knows by name
    usable: Mapping[str, frozenset[str]]  # partition -> its nodes that are not down, drained or in maintenance
    default: str = ""  # the partition of who names none
    features: Mapping[str, frozenset[str]] = {}  # node -> what --constraint may ask of it

    def without(self, gone: Collection[str]) -> Room:
        """The same, for who knows more than Slurm does: ``gone`` are not usable, whatever it says of them."""
        return self._replace(usable={name: nodes - frozenset(gone) for name, nodes in self.usable.items()})


class Exclusions(Slurm):
    """Ask and change. Each method answers or raises SchedulerUnavailable."""

    def waiting(self, users: Sequence[str]) -> tuple[Waiting, ...]:
        """The pending jobs of ``users``."""
        form = new_form(_LETTERS)
        asked = ["squeue", "-h", "-t", "PENDING", "-u", ",".join(users) or user_name(), "-o", form.text]
        done = self._answer(asked, env=SQUEUE_ENV)
        try:
            return tuple(_waiting(*fields) for fields in form.rows(done.stdout))
        except ValueError as error:
            raise SchedulerUnavailable(f"squeue could not be read: {error}") from None

    def room(self) -> Room:
        """One question for all partitions."""
        done = self._answer(["sinfo", "-h", "-a", "-N", "-o", "%P|%N|%T|%f"])
        known: set[str] = set()
        usable: dict[str, set[str]] = {}
        features: dict[str, frozenset[str]] = {}
        default = ""
        for line in done.stdout.splitlines():
            partition, node, state, having = (*line.strip().split("|"), "", "", "")[:4]
            features[node] = frozenset(having.split(","))
            known.add(node)
            default = partition[:-1] if partition.endswith("*") else default
            usable.setdefault(partition.rstrip("*"), set()).update(() if _AWAY.match(state) else (node,))
        return Room(frozenset(known), {name: frozenset(nodes) for name, nodes in usable.items()}, default, features)

    def requeued(self, job_id: str) -> bool:
        """Does Slurm put this job back into the queue by itself when a node of it fails? With the list it started with."""
        done = self._ask(["scontrol", "show", "job", "-o", job_id])
        if done.code != 0:
            raise self._blind("scontrol show job", done)
        return re.search(r"\bRequeue=[1-9]", done.stdout) is not None

    def exclude(self, job_id: str, nodes: Sequence[str]) -> bool:
        """Keep a waiting job away from ``nodes`` and no others; False when it does not wait any more.

        Raises NotPermitted, SchedulerUnavailable.
        """
        done = self._ask(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={compress_hostlist(tuple(nodes))}"])
        text = done.stderr + done.stdout
        if done.code == 0:
            return True
        if re.search("denied|Invalid user id", text):
            raise NotPermitted(f"job {job_id} belongs to somebody else")
        if re.search("Invalid job id|no longer pending|already finish", text, re.I):
            return False
        raise self._blind("scontrol update", done)


def _waiting(
    job_id: str,
    base: str,
    raw: str,
    nodes: str,
    partitions: str,
    excluded: str,
    features: str,
    reason: str,
    comment: str,
) -> Waiting:
    return Waiting(
        id=re.sub(r"%\d+\]", "]", job_id),
        base_id=base or raw,
        nodes=1 if (count := as_count(nodes.partition("-")[0])) is None else count,
        partitions=tuple(partitions.split(",")),
        excluded=expand_hostlist("" if excluded in ("(null)", "N/A") else excluded),
        features="" if features == "(null)" else features,
        comment="" if comment == "(null)" else comment,
        held=is_held(reason),
    )


def reserve(needed: int) -> int:
    """How many nodes more than a job needs are to be up before others are excluded for their past: those that may go while no
    one of us runs, above all the batch host of the job that runs, with its supervisor."""
    return incidents.margin(needed, 0)


def fitting(
    wanted: Sequence[str], theirs: Sequence[str], needed: int, partitions: Sequence[str], room: Room, features: str = ""
) -> list[str]:
    """As many of ``wanted``, from the first on, as leave ``needed`` nodes that are up in a partition beside ``theirs``. Pure.

    Nodes that Slurm does not know are left away: one of them and it would refuse them all. One that is down is no exception
    where too few are up: once it is back it may be the one that is missing. ``features``: the job's --constraint; one that is
    more than names joined by & is taken for met by every node.
    """
    asked = frozenset(features.split("&")) if _FEATURES.fullmatch(features) else frozenset()
    fit = [{n for n in room.usable.get(name, ()) if asked <= room.features.get(n, asked)} for name in partitions]
    chosen: list[str] = []
    for node in wanted:
        if node not in room.known:
            continue
        out = {*theirs, *chosen, node}
        if any(len(nodes - out) >= needed for nodes in fit):
            chosen.append(node)
    return chosen
