"""This module makes the environment of the ranks of each replica group, so that torchft and the integration find all they need.

Nothing that two groups must not share is passed on: a port of torchft's manager, a meeting point, names of the attempt around
them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from ftsupervise.replicas.groups import name_of
from ftsupervise.replicas.timeouts import Timeouts
from ftsupervise.replicas.timeouts import environment as of_timeouts
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
        found.update(of_timeouts(timeouts))
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
