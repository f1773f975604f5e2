"""The schedulers that run jobs, behind one port: Slurm (``slurm.py``), this machine (``local.py``); ``SCHEDULERS`` lists them.

Every method answers or raises ``SchedulerUnavailable``: ``()`` is an empty queue, never "could not look".
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ftsupervise.rundir.paths import ENV_DEADLINE

if TYPE_CHECKING:  # the guard asks for the job's deadline here, and starts with every rank
    from ftsupervise.model import Job, Submitted


class Scheduler(Protocol):
    """The port that each scheduler offers to the rooms above."""

    kind: str  # its name in ``SCHEDULERS``
    warnings: set[str]  # warnings that came with its answers

    def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]:
        """Return all live jobs of ``users`` (default: mine), one record per array rest. One request to the controller."""

    def submit(self, script: str, *, script_path: Path, token: str, env: Mapping[str, str] | None = None) -> Submitted:
        """Hand in ``script`` (already written to ``script_path``).

        ``token`` stands in its ``--comment``: when the answer is ambiguous it is looked for before anything is tried
        again. Raises SubmitRejected with the scheduler's own words, SchedulerUnavailable when it cannot be known
        whether the job was taken.
        """

    def find(self, token: str) -> tuple[Job, ...]:
        """Live jobs whose comment carries ``token``."""

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None:
        """End a job or the pending rest of an array. A job that is gone already is no error."""

    def hold(self, job_id: str) -> None:
        """Keep the waiting part of a job or an array from starting, until ``release``.

        A job that is gone already is no error.
        """

    def release(self, job_id: str) -> None:
        """Undo ``hold``."""

    def put_back(self, job_id: str) -> bool:
        """Put a running job, the caller's own, back into the queue, on hold: it ends, and runs again once it is released.

        Returns False where it cannot be.
        """

    def remark(self, job_id: str, comment: str) -> None:
        """Change the comment of a job's waiting part. A job that is gone already is no error."""

    def describe(self, job_id: str) -> Job | None:
        """Return one job, also shortly after its end; None if the scheduler says there is no such job."""


class SchedulerKind(NamedTuple):
    """One scheduler that jobs can be handed to."""

    opens: str  # "module:class", called with the environment
    prefix: str  # prefix of its job ids, followed by digits: it tells them from those of the others
    # true if it is the one of this machine; asked in the table's order for ``auto``
    here: Callable[[Mapping[str, str]], bool]
    in_state: bool = False  # true if its queue lies in this account's state directory


_CONFIGURED = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")


def _slurm_here(env: Mapping[str, str]) -> bool:
    """Return whether ``sbatch`` is on the PATH and belongs to a cluster. A controller that is down is still a cluster.

    Slurm's commands without any configuration are none (they look for one for a minute each, so that is only tried
    where no file says where the cluster is).
    """
    from ftsupervise.host import bounded
    from ftsupervise.host.begin import on_path

    if not on_path("sbatch", env):
        return False
    return is_configured(env) or "Slurmctld" in bounded.run(["scontrol", "ping"], timeout=5, env=env).stdout


def is_configured(env: Mapping[str, str]) -> bool:
    """Return whether the environment or a file says where the Slurm cluster of this machine is."""
    return bool(env.get("SLURM_CONF") or env.get("SLURM_CONF_SERVER")) or any(map(os.path.exists, _CONFIGURED))


SLURM = "slurm"  # the only one with srun, partitions and nodes to be excluded
LOCAL = "local"
SCHEDULERS = {
    SLURM: SchedulerKind("ftsupervise.scheduler.slurm:Slurm", "", _slurm_here),
    LOCAL: SchedulerKind("ftsupervise.scheduler.local:Local", "local-", lambda env: True, in_state=True),
}


def kind_of(kind: str, env: Mapping[str, str] | None = None) -> str:
    """Return ``kind``, or for ``auto`` the first scheduler of the table that this machine has."""
    if kind != "auto":
        return kind
    env = os.environ if env is None else env
    return next(name for name, one in SCHEDULERS.items() if one.here(env))


def kind_of_job(job_id: str) -> str:
    """Return the scheduler that gave a job its id."""
    found = [name for name, one in SCHEDULERS.items() if job_id.startswith(one.prefix)]
    return max(found, key=lambda name: len(SCHEDULERS[name].prefix))


class EndOfJob(NamedTuple):
    """A person ends a job that runs, at once, by typing ``types``.

    ``before_next``: what must be typed before the run is launched again; "": its other jobs stay, and the next one goes on.
    """

    types: str
    before_next: str = ""


def how_to_end(job_id: str, run: str) -> EndOfJob:
    """Return how a job of ``run``, its directory as a shell takes it, is ended. Only Slurm has a command for one job: of other
    schedulers all jobs of the run are ended."""
    if kind_of_job(job_id) == SLURM:
        return EndOfJob(f"scancel {job_id}")
    return EndOfJob(f"ftsupervise kill --now {run}", f"ftsupervise clear {run}")


def is_job_id(text: str) -> bool:
    """Return whether it is one, such as 87, 88_3 or local-4."""
    return any(re.fullmatch(rf"{re.escape(one.prefix)}\d+(_\d+)?", text) for one in SCHEDULERS.values())


def open_scheduler(kind: str = "auto", env: Mapping[str, str] | None = None) -> Scheduler:
    """Return the scheduler that ``scheduler:`` in the configuration names. Raises SchedulerUnavailable for an unknown name, and
    where it cannot be opened: one may come from somebody else."""
    from ftsupervise.errors import Error, SchedulerUnavailable

    found = SCHEDULERS.get(kind_of(kind, env))
    if found is None:
        raise SchedulerUnavailable(f"no scheduler is called {kind!r}", hint=f"there are: {', '.join(SCHEDULERS)}")
    module, _, name = found.opens.partition(":")
    try:
        opened: Scheduler = getattr(import_module(module), name)(env)
    except Error:
        raise
    except Exception as error:
        raise SchedulerUnavailable(f"{found.opens} cannot be opened: {type(error).__name__}: {error}") from error
    return opened


# Finds when the scheduler will end this job. The environment knows on new Slurms; on 22.05 the controller has to be
# asked once.

_END_TIME = re.compile(r"\bEndTime=(\S+)")
USUAL_KILL_WAIT = 30.0  # seconds
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*(\d{1,9})", re.M)
_JOB_STATE = re.compile(r"\bJobState=(\w+)")


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


class JobNow(NamedTuple):
    """What Slurm says of the job that this process belongs to."""

    end: float | None  # epoch seconds; None: it has no limit
    ending: bool  # it is cancelled, preempted or past its limit: its processes are being ended


def ask_slurm_for_the_deadline(env: Mapping[str, str], *, timeout: float = 8.0) -> float | None:
    """Epoch seconds at which this job ends, as ``scontrol show job`` says; None if there is no limit or no answer."""
    now = ask_slurm_about_the_job(env, timeout=timeout)
    return None if now is None else now.end


def ask_slurm_about_the_job(env: Mapping[str, str], *, timeout: float = 8.0) -> JobNow | None:
    """Return how it is with this job, as ``scontrol show job`` says; None without an answer, and outside of Slurm.

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
    return parse_job_now(answer.stdout, job) if answer.code == 0 else None


def ask_slurm_for_kill_wait(env: Mapping[str, str], *, timeout: float = 8.0) -> float | None:
    """Return the seconds between Slurm's SIGTERM and its SIGKILL; None without an answer, and outside of Slurm."""
    if not env.get("SLURM_JOB_ID", "").isdigit():
        return None
    from ftsupervise.host import bounded

    try:
        answer = bounded.run(["scontrol", "show", "config"], timeout=timeout, env=env)
    except OSError:  # no scontrol here
        return None
    found = _KILL_WAIT.search(answer.stdout) if answer.code == 0 else None
    return float(found[1]) if found else None


def parse_job_now(text: str, job: str) -> JobNow | None:
    """Parse the answer: that about an array's own number has a line for each of its members."""
    lines = [line for line in text.splitlines() if f"JobId={job} " in line]
    state = _JOB_STATE.search(lines[0]) if lines else None
    return None if state is None else JobNow(parse_end_time(lines[0]), state[1] not in ("RUNNING", "SUSPENDED"))


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
