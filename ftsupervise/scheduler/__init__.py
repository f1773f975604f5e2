"""The door to whatever runs jobs: real Slurm (``slurm.py``) or this machine (``local.py``), behind one port.

Every method answers or raises ``SchedulerUnavailable``: ``()`` is an empty queue, never "could not look".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ftsupervise.model import Job, Submitted


class Scheduler(Protocol):
    """What the stories need of a scheduler."""

    kind: str  # "slurm" or "local"
    warnings: set[str]  # what it complained of beside its answers

    def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]:
        """All live jobs of ``users`` (default: mine), one record per array rest. One request to the controller."""

    def submit(self, script: str, *, script_path: Path, token: str, env: Mapping[str, str] | None = None) -> Submitted:
        """Hand in ``script`` (already written to ``script_path``). ``token`` stands in its ``--comment``: when the
        answer is ambiguous it is looked for before anything is tried again.

        Raises SubmitRejected with the scheduler's own words, SchedulerUnavailable when it cannot be known whether
        the job was taken.
        """

    def find(self, token: str) -> tuple[Job, ...]:
        """Live jobs whose comment carries ``token``."""

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None:
        """End a job or the pending rest of an array. Jobs that are gone already are fine."""

    def hold(self, job_id: str) -> None:
        """Keep what waits of a job or an array from starting, until ``release``. Jobs that are gone already are fine."""

    def release(self, job_id: str) -> None:
        """The opposite of ``hold``."""

    def describe(self, job_id: str) -> Job | None:
        """One job, also shortly after its end; None if the scheduler says there is no such job."""


_CONFIGURED = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")


def kind_of(kind: str, env: Mapping[str, str] | None = None) -> str:
    """``auto`` is Slurm where ``sbatch`` is on the PATH and belongs to a cluster, else this machine.

    A controller that is down is still a cluster. Slurm's commands without any configuration are none (they look for one
    for a minute each, so that is only tried where no file says where the cluster is).
    """
    import os
    import shutil

    from ftsupervise.host import bounded

    env = os.environ if env is None else env
    if kind != "auto":
        return kind
    if not shutil.which("sbatch", path=env.get("PATH")):
        return "local"
    if env.get("SLURM_CONF") or env.get("SLURM_CONF_SERVER") or any(map(os.path.exists, _CONFIGURED)):
        return "slurm"
    asked = bounded.run(["scontrol", "ping"], timeout=5, env=env)
    return "slurm" if "Slurmctld" in asked.stdout else "local"


def open_scheduler(kind: str = "auto", env: Mapping[str, str] | None = None) -> Scheduler:
    """The scheduler that ``scheduler:`` in the configuration names."""
    if kind_of(kind, env) == "slurm":
        from ftsupervise.scheduler.slurm import Slurm

        return Slurm(env)
    from ftsupervise.scheduler.local import Local

    return Local(env)
