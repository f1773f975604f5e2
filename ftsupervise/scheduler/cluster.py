"""What a cluster is set to, as its own commands show it: its settings, partitions, nodes' hosts, and an account's limits.

Pure: the questions are ``Slurm``'s (slurm.py). A key that a Slurm does not print has the value that Slurm has without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import NamedTuple

from ftsupervise.printable import printable
from ftsupervise.scheduler.parse import is_away, is_leaving, offers_expedited_requeue
from ftsupervise.units import parse_slurm_time

NODE_HOSTS = "%P|%N|%n|%T"  # the argument of ``sinfo -h -a -N -o``
QOS_FIELDS = "Name,MaxWall,MaxJobsPU,MaxSubmitPU"
ASSOC_FIELDS = "Account,Partition,QOS,MaxJobs,MaxSubmit,MaxWall"
_UNLIMITED = ("UNLIMITED", "INFINITE", "NONE", "")


class ClusterSettings(NamedTuple):
    """The lines of ``scontrol show config``: key -> value, as printed."""

    values: Mapping[str, str]
    expedites: bool  # whether it takes ``--requeue=expedite``

    @property
    def version(self) -> str:
        return self.values.get("SLURM_VERSION", "")

    @property
    def most_of_an_array(self) -> int:
        """Return MaxArraySize: the highest number of a member is one less."""
        return self._number("MaxArraySize", 1001)

    @property
    def requeues(self) -> bool:
        return self.values.get("JobRequeue", "1") != "0"

    @property
    def kill_wait(self) -> int:
        """Return the seconds between SIGTERM and SIGKILL."""
        return self._number("KillWait", 30)

    @property
    def over_time_limit(self) -> int | None:
        """Return the minutes for which a job may go on behind its limit; None: for ever."""
        return None if self.values.get("OverTimeLimit") == "UNLIMITED" else self._number("OverTimeLimit", 0)

    @property
    def slurmd_timeout(self) -> int:
        """Return the seconds after which a silent node is given up; 0: never."""
        return self._number("SlurmdTimeout", 300)

    @property
    def private(self) -> frozenset[str]:
        """Return what an account cannot see of others: "jobs", "nodes", …"""
        words = self.values.get("PrivateData", "none").lower().split(",")
        return frozenset(word.strip() for word in words) - {"none", ""}

    @property
    def preempts(self) -> bool:
        kind, mode = self.values.get("PreemptType", ""), self.values.get("PreemptMode", "OFF").upper()
        return not kind.endswith("none") and kind not in ("", "(null)") and mode.split(",")[0] not in ("OFF", "")

    @property
    def warns_the_preempted(self) -> bool:
        """Return whether a job that is preempted gets the signal that it asked for before its end."""
        both = self.values.get("SlurmctldParameters", "") + "," + self.values.get("PreemptParameters", "")
        return "send_user_signal" in both

    @property
    def has_accounting(self) -> bool:
        """Return whether a database holds limits of accounts."""
        return self.values.get("AccountingStorageType", "").endswith("slurmdbd")

    def _number(self, key: str, usual: int) -> int:
        found = re.match(r"\d{1,9}", self.values.get(key, ""))
        return int(found[0]) if found else usual


class PartitionLimits(NamedTuple):
    """One partition. ``time``: the longest that a job may ask for; None: no limit."""

    name: str
    default: bool
    up: bool
    time: timedelta | None
    nodes: int
    most_nodes: int | None  # of one job; None: no limit


class NodeHost(NamedTuple):
    """A node of a partition: the host that it is, and whether it takes new jobs."""

    partition: str
    node: str
    host: str
    takes_jobs: bool


class AccountLimit(NamedTuple):
    """What a QOS, or an account in accounting, may have; None: no limit. ``whose``: "QOS normal", "account physics"."""

    whose: str
    jobs: int | None
    submitted: int | None  # array members count one by one
    time: timedelta | None
    partition: str = ""  # "": in each


def parse_settings(text: str) -> ClusterSettings:
    """Parse the output of ``scontrol show config``."""
    rows = (line.partition("=") for line in text.splitlines() if "=" in line)
    values = {key.strip(): printable(value.strip(), 300) for key, _, value in rows}
    return ClusterSettings(values, offers_expedited_requeue(text))


def parse_partitions(text: str) -> tuple[PartitionLimits, ...]:
    """Parse the output of ``scontrol show partition -o``."""
    return tuple(
        PartitionLimits(
            name=found["PartitionName"],
            default=found.get("Default") == "YES",
            up=found.get("State", "UP") == "UP",
            time=_time(found.get("MaxTime", "")),
            nodes=_count(found.get("TotalNodes", "")) or 0,
            most_nodes=_count(found.get("MaxNodes", "")),
        )
        for found in (dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines())
        if "PartitionName" in found
    )


def parse_node_hosts(text: str) -> tuple[NodeHost, ...]:
    """Parse the output of ``sinfo -h -a -N -o NODE_HOSTS``."""
    found = []
    for line in text.splitlines():
        partition, node, host, state = (*line.strip().split("|"), "", "", "")[:4]
        if node:
            takes = not (is_away(state) or is_leaving(state))
            found.append(NodeHost(partition.rstrip("*"), node, host, takes))
    return tuple(found)


def parse_limits(text: str, of_qos: str) -> tuple[AccountLimit, ...]:
    """Parse ``sacctmgr -nP`` of ASSOC_FIELDS, and of QOS_FIELDS for the QOS that those name."""
    associations = [(*line.split("|"), *[""] * 6)[:6] for line in text.splitlines() if line.strip("|")]
    named = {name for row in associations for name in row[2].split(",") if name}
    found = [
        AccountLimit(f"account {printable(row[0], 60)}", _count(row[3]), _count(row[4]), _time(row[5]), row[1])
        for row in associations
    ]
    return (*found, *_of_qos(of_qos, named))


def _of_qos(text: str, named: set[str]) -> Iterator[AccountLimit]:
    for line in text.splitlines():
        name, wall, jobs, submitted = (*line.split("|"), "", "", "")[:4]
        if name in named:
            yield AccountLimit(f"QOS {printable(name, 60)}", _count(jobs), _count(submitted), _time(wall))


def other_hosts(nodes: Iterable[NodeHost], here: str) -> tuple[str, ...]:
    """Return the hosts of ``nodes`` that are not ``here``: () for a cluster on this machine alone."""
    mine = here.partition(".")[0]
    return tuple(sorted({one.host for one in nodes if one.host.partition(".")[0] != mine}))


def _count(text: str) -> int | None:
    return None if text.upper() in _UNLIMITED or not text.isdigit() else int(text[:9])


def _time(text: str) -> timedelta | None:
    if text.upper() in _UNLIMITED:
        return None
    try:
        return parse_slurm_time(text)
    except ValueError:
        return None
