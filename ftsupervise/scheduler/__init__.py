"""The door to whatever runs jobs: real Slurm (``slurm.py``) or this machine (``local.py``), behind one port.

Every method answers or raises ``SchedulerUnavailable``: ``()`` is an empty queue, never "could not look".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ftsupervise.rundir.paths import ENV_DEADLINE

if TYPE_CHECKING:  # the guard asks for the job's deadline here, and starts with every rank
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


# When will the scheduler end this job? The environment knows on new Slurms; on 22.05 the controller has to be asked once.

_END_TIME = re.compile(r"\bEndTime=(\S+)")


def deadline_from_environment(env: Mapping[str, str]) -> float | None:
    """Epoch seconds from FTSUPERVISE_DEADLINE, else SLURM_JOB_END_TIME; None if neither says."""
    for name in (ENV_DEADLINE, "SLURM_JOB_END_TIME"):
        try:
            value = float(env.get(name, ""))
        except ValueError:
            continue
        if value > 0:
            return value
    return None


def ask_slurm_for_the_deadline(env: Mapping[str, str], *, timeout: float = 8.0) -> float | None:
    """Epoch seconds at which this job ends, as ``scontrol show job`` says; None if there is no limit or no answer.

    Asked in a child that is abandoned when it hangs. One request to the controller: ask once per job, not per rank.
    """
    job = env.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        return None
    from ftsupervise.host import bounded

    try:
        answer = bounded.run(
            ["scontrol", "show", "job", "-o", job], timeout=timeout, env={**env, "SLURM_TIME_FORMAT": "%s"}
        )
    except OSError:  # no scontrol here
        return None
    return parse_end_time(answer.stdout) if answer.code == 0 else None


def parse_end_time(text: str) -> float | None:
    """``EndTime=`` of ``scontrol show job``: epoch seconds, or local time as Slurm prints it; None for Unknown."""
    match = _END_TIME.search(text)
    if match is None:
        return None
    word = match[1]
    if word.isascii() and word.isdigit():
        return float(word[:18]) or None
    try:
        return datetime.fromisoformat(word).timestamp()
    except ValueError:
        return None
