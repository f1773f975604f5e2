"""What the doctor has seen, as values. ``None`` in ``Sights``: it was not looked at; ``NotSeen``: it could not be seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ftsupervise.probe import NotSeen, Space
from ftsupervise.scheduler.cluster import AccountLimit, ClusterSettings, NodeHost, PartitionLimits
from ftsupervise.truth import Health


class Examined(NamedTuple):
    """One line: what was examined, how it is, and what to type where that is not well."""

    health: Health  # UNKNOWN: it could not be seen
    about: str
    what: str
    do: str = ""


class ClusterSeen(NamedTuple):
    """What Slurm answers. ``limits``: None where the cluster keeps none."""

    settings: ClusterSettings
    partitions: tuple[PartitionLimits, ...]
    hosts: tuple[NodeHost, ...]
    limits: tuple[AccountLimit, ...] | NotSeen | None


class PlaceSeen(NamedTuple):
    """A directory that has to take files. ``trouble``: the step that failed there, and how; "" where all went well."""

    path: str
    there: bool  # else the nearest one above it was tried
    at: str
    trouble: str
    full: bool  # ... because no space, inode or quota is left
    stranger: str  # why another account could change what lies there, as a clause
    owner: str  # the account it belongs to, "" for this one
    local_kind: str  # the kind of the file system where it is one of this machine's own disks, else ""
    space: Space | None = None
    ahead: float | None = None  # seconds by which the file server's clock is ahead of this machine's


class PythonSeen(NamedTuple):
    """An interpreter that was asked. ``package``: the version of ftsupervise that it imports; "" where it finds none.
    ``late``: it was not done in time, which on a busy machine says nothing about it."""

    path: str
    version: str
    package: str
    trouble: str = ""  # why it did not answer, in its own words
    late: bool = False


class ReceiverSeen(NamedTuple):
    """A receiver. ``trouble``: why it cannot be reached; ``late``: that could not be found out in time."""

    name: str
    where: str
    trouble: str = ""
    late: bool = False


class CronSeen(NamedTuple):
    """The cron of this account. ``verdict``: of ``CronStatus``, or ABSENT; ``watches``: an entry of it watches runs."""

    verdict: str
    backend: str
    directory: str
    option: str
    watches: bool = False
    passed_over: tuple[str, ...] = ()
    blind: str = ""


class ScriptSeen(NamedTuple):
    """The training script and the settings of its launch. ``doubts``: sentences of ``launch.doubts``; ``unguarded``: those of
    them about a script without the guard."""

    doubts: tuple[str, ...] = ()
    unguarded: tuple[str, ...] = ()
    missing: str = ""  # the script that is not there
    uses_guard: bool = False
    refusal: str = ""  # why launch would refuse now
    remedy: str = ""


class AccountSeen(NamedTuple):
    """This account. ``groups``: the names of those it is in."""

    umask: int
    groups: frozenset[str]


class MemorySeen(NamedTuple):
    """The memory of a machine that trains, in bytes. ``shared``: free in /dev/shm; None: there is none."""

    free: int
    total: int
    shared: int | None


class NodeSeen(NamedTuple):
    """A node of the trial job, as a task on it has found it."""

    node: str
    sees: bool  # the file that was made beside the run directory before the job
    ahead: float  # seconds by which its clock is ahead of the file server's
    reached: str  # why it could not reach the first node's port; "" where it did


@dataclass(frozen=True)
class TrialSeen:
    """What the job of ``--probe`` has found. Seconds."""

    job: str
    host: str
    python: PythonSeen | None
    place: PlaceSeen
    memory: MemorySeen | None
    switch_after: float | None  # from the touch of a file to the job's seeing it; None: it never saw it
    ahead: float | None  # by which the clock of the first node is ahead of this machine's
    signal_lead: float | None  # from the warning signal to the limit of the job; None: it did not come
    nodes: tuple[NodeSeen, ...] = ()


@dataclass(frozen=True)
class Sights:
    """All that was looked at."""

    slurm: bool  # the run goes to Slurm
    here: str  # the name of this host
    version: str  # ours
    missing_commands: tuple[str, ...] = ()
    cluster: ClusterSeen | NotSeen | None = None
    places: Mapping[str, PlaceSeen | NotSeen] | None = None  # what it is -> how it is
    receivers: tuple[ReceiverSeen, ...] = ()
    cron: CronSeen | NotSeen | None = None
    account: AccountSeen | None = None
    python: PythonSeen | NotSeen | None = None
    script: ScriptSeen | NotSeen | None = None
    watchdogs: tuple[str, ...] = ()  # settings of theirs that are well written and still wrong
    memory: MemorySeen | NotSeen | None = None
    trial: TrialSeen | NotSeen | None = None
    trial_failed: str = ""  # why the job of --probe ended before it could say anything
    trial_refused: tuple[str, str] = ("", "")  # why none was submitted where others may write, and what to do
