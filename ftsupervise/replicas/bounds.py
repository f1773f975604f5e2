"""Timeouts of each part of a run of replica groups, derived from its slowest step.

torchft's own defaults are 60 seconds everywhere, so that every long fault is a race: with four groups, one hung process ends
all of them. Only unequal values are safe. In seconds, T being the longest healthy time between two collectives:

    process_group   an all-reduce between groups; shorter than T, no step ever succeeds
    join            how long a quorum waits for a group that is alive and does not ask: the price of a hang between collectives
    manager         the calls inside a group, and the copy of the weights to a group that comes back
    quorum          how long a group waits for a quorum before it ends itself: longer than all of the above together
    hang            without a step for so long, a group is ended: before the others end themselves

Measured with torchft 0.2.0. Pure, and free of torchft.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, isfinite
from typing import NamedTuple

from ftsupervise.config.supervisor import default
from ftsupervise.replicas.table import name_of
from ftsupervise.rundir.heartbeat_page import ENV_PAGES
from ftsupervise.rundir.paths import (
    ENV_AREA,
    ENV_ATTEMPT,
    ENV_ATTEMPT_DIR,
    ENV_GROUP,
    ENV_MASTER_ADDR,
    ENV_MASTER_PORT,
    ENV_MIN_REPLICAS,
    ENV_NNODES,
    ENV_NODE_RANK,
    ENV_NODES,
    ENV_RESTART,
    ENV_RUN_DIR,
    ENV_SLOWEST_STEP,
    ENV_SNAPSHOT_KEPT,
    ENV_SNAPSHOT_STEP,
    ENV_SNAPSHOTS,
    ENV_STAGING,
)
from ftsupervise.units import show_duration, show_size

ENV_PROCESS_GROUP = (
    "FTSUPERVISE_PROCESS_GROUP_TIMEOUT"  # torchft reads none: the constructor gets it from our integration
)
HEARTBEAT_INTERVAL = 0.1  # seconds between two heartbeats of a group, torchft's default
COPY_SPEED = 500_000_000  # bytes a second of weights from one group to another, at least

_SOON = 10.0  # seconds: the least for a quorum and for an all-reduce, however short the steps are
_MANAGER, _QUORUM = 60.0, 600.0  # the least for these, in seconds
_LOST_HEARTBEATS = (
    9  # in a row, before a group counts as dead: two lost packets delay one by 0.7 s, a load of 20 by 0.2 s
)
_MANY = 100  # groups: 500 that ask at once are answered within 0.8 s, on two slow cores
_LOST_OF_MANY = 20  # heartbeats


class Timeouts(NamedTuple):
    """These are seconds, but for ``retries``. ``hang`` 0: hung groups are not ended."""

    process_group: float
    heartbeat: float
    join: float
    manager: float
    quorum: float
    retries: int  # of a call to the lighthouse, spread over ``quorum``: one a second
    hang: float


def majority(groups: int) -> int:
    """The fewest groups that may train on, so that no two halves ever train apart."""
    return groups // 2 + 1


def derive(
    slowest_step: float, state_bytes: int = 0, groups: int = 0, *, sync_period: float = 0.0, all_reduce: float = 0.0
) -> Timeouts:
    """The timeouts of a run.

    ``slowest_step``: the longest healthy time between two collectives of the slowest group, with its evaluations and saves, in
    seconds. ``state_bytes``: what a group copies when it comes back. ``groups``: of hundreds, the lighthouse hears a heartbeat
    late. ``sync_period``: the seconds between two quorums of LocalSGD and DiLoCo. ``all_reduce``: the seconds that one takes.
    """
    process_group = max(_SOON, 2 * slowest_step) + all_reduce
    join = max(_SOON, 1.5 * slowest_step)
    manager = max(_MANAGER, 2 * process_group, 3 * state_bytes / COPY_SPEED)
    quorum = float(ceil(max(_QUORUM, 3 * (join + process_group + manager)) + sync_period))
    return Timeouts(
        process_group=process_group,
        heartbeat=(_LOST_HEARTBEATS if groups <= _MANY else _LOST_OF_MANY) * HEARTBEAT_INTERVAL,
        join=join,
        manager=manager,
        quorum=quorum,
        retries=int(quorum) - 1,
        hang=min(join + process_group + 2 * slowest_step + sync_period, quorum / 2 - 1),
    )


def problems(timeouts: Timeouts, slowest_step: float, groups: int, state_bytes: int = 0) -> list[str]:
    """Return what would go wrong with these values, one sentence each with the value to set; none: the run can start."""
    if odd := [name for name, value in timeouts._asdict().items() if not isfinite(value) or value < 0]:
        return [f"{name} must be a finite number, from 0" for name in odd]
    process_group, heartbeat, join, manager, quorum, retries, _ = timeouts
    wanted = derive(slowest_step, state_bytes, groups)
    steps = f"the slowest step takes {show_duration(slowest_step)}"
    together = join + process_group + manager
    found = []
    if process_group <= slowest_step:
        found.append(
            f"{steps}, and an all-reduce may take {show_duration(process_group)}: no step would ever be committed; "
            f"set process_group to {_seconds(wanted.process_group)}"
        )
    if heartbeat < round(_LOST_HEARTBEATS * HEARTBEAT_INTERVAL, 3):
        found.append(
            f"a group counts as dead after {show_duration(heartbeat)} without a heartbeat, and a busy machine is that late; "
            f"set heartbeat to {_seconds(wanted.heartbeat)}"
        )
    if join <= slowest_step:
        found.append(
            f"{steps}, and a quorum waits {show_duration(join)} for a group that is alive: the slowest group would be left out "
            f"of every step; set join to {_seconds(wanted.join)}"
        )
    if manager < state_bytes / COPY_SPEED:
        found.append(
            f"the weights of a group ({show_size(state_bytes)}) are not copied within {show_duration(manager)}: a group that "
            f"died would never come back; set manager to {_seconds(wanted.manager)}"
        )
    if quorum <= together:
        found.append(
            f"a group ends itself after {show_duration(quorum)} without a quorum, and one fault takes up to "
            f"{show_duration(together)} (join + process_group + manager): all groups would end; "
            f"set quorum to {_seconds(ceil(3 * together))}"
        )
    if retries < 1:
        found.append(
            "a call to the lighthouse is not repeated (retries 0): all groups would end when it is restarted; "
            f"set retries to {max(1, int(quorum) - 1)}"
        )
    return found + _hang_problems(timeouts, slowest_step, groups, wanted)


def _hang_problems(timeouts: Timeouts, slowest_step: float, groups: int, wanted: Timeouts) -> list[str]:
    hang, quorum = timeouts.hang, timeouts.quorum
    if not hang:
        waits = (
            f"with {groups} groups there is no quorum while one of them hangs, and hung groups are not ended (hang 0): "
            f"set hang to {_seconds(wanted.hang)}, or use 3 groups"
        )
        return [] if groups >= 3 else [waits]
    found = []
    if hang <= slowest_step:
        found.append(
            f"a group is ended after {show_duration(hang)} without a step, and the slowest step takes "
            f"{show_duration(slowest_step)}: healthy groups would be ended; set hang to {_seconds(wanted.hang)}"
        )
    if hang >= quorum / 2:
        found.append(
            f"a hung group is ended after {show_duration(hang)}, and the others end themselves after {show_duration(quorum)}: "
            f"that is too close; set quorum to {_seconds(ceil(2 * hang) + 2)}"
        )
    return found


def _seconds(value: float) -> str:
    """Return it as a person types it: "10s", "2.5s"."""
    return f"{round(value, 1):g}s"


def environment(timeouts: Timeouts) -> dict[str, str]:
    """Return what the ranks of every group get. torchft reads whole numbers only, and ends itself at any other."""
    return {
        "TORCHFT_TIMEOUT_SEC": str(ceil(timeouts.manager)),
        "TORCHFT_QUORUM_TIMEOUT_SEC": str(ceil(timeouts.quorum)),
        "TORCHFT_QUORUM_RETRIES": str(timeouts.retries),
        ENV_PROCESS_GROUP: f"{timeouts.process_group:g}",
    }


# ------------------------------------------------------------------------------------------

# This module makes the environment of the ranks of each replica group, so that torchft and the integration find all they need.
#
# Nothing that two groups must not share is passed on: a port of torchft's manager, a meeting point, names of the attempt around
# them. Pure.

ENV_LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
_NOT_SHARED = frozenset(
    {
        *(ENV_AREA, ENV_ATTEMPT, ENV_ATTEMPT_DIR, ENV_NNODES, ENV_NODE_RANK, ENV_NODES, ENV_RESTART, ENV_RUN_DIR),
        *(
            ENV_MASTER_ADDR,
            ENV_MASTER_PORT,
            ENV_SNAPSHOTS,
            ENV_SNAPSHOT_STEP,
            ENV_SNAPSHOT_KEPT,
            ENV_STAGING,
            ENV_PAGES,
        ),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHFT_MANAGER_PORT", "TORCHELASTIC_ERROR_FILE"),
    }
)
_SLURMS = {
    "SLURM_JOB_NODELIST": "list",
    "SLURM_NODELIST": "list",
    "SLURM_JOB_NUM_NODES": "count",
    "SLURM_NNODES": "count",
}
_OF_ALL_NODES = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_NTASKS", "SLURM_NPROCS")


def environment_of(
    number: int,
    count: int,
    least: int,
    lighthouse: str,
    timeouts: Timeouts | None,
    slowest_step: float,
    job: str,
) -> dict[str, str]:
    """Return those of group ``number``. ``lighthouse``: its address, "" where there is none. ``timeouts`` None: no torchft."""
    found = {
        ENV_GROUP: name_of(number),
        ENV_MIN_REPLICAS: str(least),
        "REPLICA_GROUP_ID": name_of(number),
        "NUM_REPLICA_GROUPS": str(count),
    }
    if lighthouse:
        found[ENV_LIGHTHOUSE] = lighthouse
    if timeouts is not None:
        found.update(environment(timeouts))
        found[ENV_SLOWEST_STEP] = f"{slowest_step:g}"
    if job:
        found["JOB_ID"] = job
    return found


def for_group(outer: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """``outer``, without what belongs to the attempt around the groups, and with what is ``given`` to this one. What makes
    torchft quiet and small stays as a person has set it."""
    kept = {key: value for key, value in outer.items() if key not in _NOT_SHARED and not key.startswith("PET_RDZV")}
    kept.setdefault("RUST_LOG", "warn")  # at info 200 groups write 9 GB a day
    kept.setdefault("TOKIO_WORKER_THREADS", "2")  # of each server and each client
    return {**kept, **given}


def on_its_nodes(env: Mapping[str, str], nodes: tuple[str, ...]) -> dict[str, str]:
    """``env`` of a job of Slurm, as if it held only ``nodes``."""
    from ftsupervise.hostlist import compress_hostlist

    if not nodes or "SLURM_JOB_ID" not in env:
        return dict(env)
    words = {"list": compress_hostlist(nodes), "count": str(len(nodes))}
    kept = {key: value for key, value in env.items() if key not in _OF_ALL_NODES}
    return {**kept, **{key: words[what] for key, what in _SLURMS.items()}}


# ------------------------------------------------------------------------------------------

# The bounds of each group's hang detector, which have to fit between torchft's timeouts. Pure.
#
# A rank of a healthy group stands still while it waits for the others in an all-reduce, at most the process group's timeout:
# that is no hang. And a hung group is ended long before the others end themselves for want of a quorum.

_MORE = 2.0  # seconds after an all-reduce has failed, in which the group begins its next step


def hang_bounds(timeouts: Timeouts) -> dict[str, float]:
    """Return settings of ``ftsupervise run`` by parameter, in seconds.

    Half of torchft's quorum timeout is the most for a phase that is not known yet, and for the first step.
    """
    most = timeouts.quorum / 2
    return {
        "hang": min(most, max(float(default("hang.floor")), timeouts.process_group + _MORE)),
        "hang_unknown": min(most, float(default("hang.unknown"))),
        "hang_start": min(most, float(default("hang.start"))),
    }
