"""A run as it is tried on this machine (``init --try``, ``drill``): its own command, and nothing that reaches beyond it.

No job goes to a cluster, nobody gets a message, and the list of a person's runs knows nothing of it. The command is their
own and works in their own folder, so it is not started where a checkpoint lies that it could go on from, or write over.
"""

from __future__ import annotations

import os
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.checkpoints.written import find_written
from ftsupervise.errors import Refused
from ftsupervise.host import processes
from ftsupervise.probe.errand import within

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

_MOST_NODES = 16
_LOOK = 10.0  # seconds to look for checkpoints
# These only a cluster of its own has, or they say where the output goes.
_DROPPED = (
    *("partition", "account", "qos", "constraint", "reservation", "licenses", "gres", "hint", "mem", "mem_per_cpu"),
    *("mem_per_gpu", "output", "error"),
)


def rehearsed(run: Run, folder: Path, scheduler: str, *, limit: timedelta, warn: timedelta, jobs: int) -> Run:
    """Return the run as it is tried: its command, ranks and setup, with none of what only its own cluster has, and nobody to
    be told. Raises Refused where this machine cannot hold it. Pure."""
    from ftsupervise.config.alerting import Alerts
    from ftsupervise.config.schema import Cron, NodeSettings

    if run.launch.nodes > _MOST_NODES:
        raise Refused(
            f"{run.name} has {run.launch.nodes} nodes, and a trial on this machine has {_MOST_NODES} at most",
            hint="set fewer in a copy of the file, and try that",
        )
    changed: dict[str, object] = dict.fromkeys(_DROPPED)
    gpus = _number_of(run.launch.gpus_per_node)
    changed |= {"sbatch": (), "exclude": (), "exclusive": False, "spare_nodes": 0, "jobs": jobs, "gpus_per_node": gpus}
    changed |= {"time": limit, "warn": warn, "env": {"WANDB_MODE": "disabled", **run.launch.env}}
    update = {
        "launch": run.launch.model_copy(update=changed),
        "run_dir": folder / "run",
        "scheduler": scheduler,
        "alerts": Alerts(),
        "cron": Cron(directory=folder / "cron"),
        "nodes": NodeSettings(),
        "checkpoints": run.checkpoints.model_copy(update={"path": None, "offload": None}),
    }
    return run.model_copy(update=update)


def _number_of(gpus: object) -> int | None:
    """Return 8 for "h100:8" and for 8: the sandbox has one kind."""
    return (
        None if gpus is None else sum(int(part) for part in re.findall(r"(?:^|[:,])([0-9]+)(?=,|$)", str(gpus))) or None
    )


def shape_for(run: Run, spare: int = 0) -> dict[str, int]:
    """Return the sandbox that holds the run, and ``spare`` nodes more. Pure."""
    launch = run.launch
    ranks = launch.tasks_per_node or launch.ntasks or 1
    return {
        "nodes": launch.job_nodes + spare,
        "cpus": max(96, ranks * (launch.cpus_per_task or 1)),
        "gpus_per_node": max(8, int(launch.gpus_per_node or 0)),
    }


def refuse_checkpoints(workdir: Path) -> None:
    """Raise Refused where a checkpoint lies in ``workdir``, or where that cannot be seen."""
    try:
        found = within(_LOOK, lambda: find_written([workdir], 0.0, datetime.now(timezone.utc).timestamp()))
    except TimeoutError:
        raise Refused(
            f"{workdir} could not be searched for checkpoints within {_LOOK:.0f} s",
            hint="try it in a copy of the script",
        ) from None
    if found is not None:
        raise Refused(
            f"{found.path} is there: the trial could go on from it, and write over it",
            hint="try it in a copy of this folder without checkpoints",
        )


def is_the_persons(pid: int) -> bool:
    """Return whether it is a process of the command, and neither srun nor one of ours."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    ours = os.fsencode(processes.START)
    return words[0].rpartition(b"/")[2] not in (b"", b"srun") and not any(ours in word for word in words[:4])


def rehearsal_folder(name: str) -> Path:
    """Return the path of a folder that nobody guesses, on a disk of this machine. It is not made."""
    import secrets

    from ftsupervise.host.local_disks import temporary_folder
    from ftsupervise.host.ownership import distrust_route

    return Path(temporary_folder(distrust_route)) / f"ftsupervise-{name}-{os.geteuid()}-{secrets.token_hex(4)}"
