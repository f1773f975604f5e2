"""Keep the chain's successors in the queue, and bring a dead chain back.

The rule that keeps it from forking: one look at the queue, then only what that look proves to be missing; a look that
could not see changes nothing. The rule that keeps it from dying: the next K slots always have their jobs, and whoever starts a
run or runs one (``ensure``, ``look_after``) looks whether slots still come.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Protocol

from ftsupervise.crontab import backends, claims, render, successors
from ftsupervise.crontab.place import (
    CronDir,
    Installed,
    default_directory,
    dir_option,
    read_installed,
    stamp,
    user_name,
)
from ftsupervise.crontab.schedule import floor
from ftsupervise.errors import Error, SchedulerUnavailable
from ftsupervise.findings import Finding, Severity
from ftsupervise.host.modes import claim_folder, make_folder
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.model import Job, Submitted
from ftsupervise.truth import Health
from ftsupervise.units import format_slurm_time, show_duration

JOB_NAME = "ftsupervise-cron"
DUPLICATE = (
    "Duplicate jobid"  # Slurm's reason when it drains a node that has a job which a killed controller has forgotten
)
_MARGIN = timedelta(minutes=2)  # between the bound of the entries and the end of the tick's job


class Queue(Protocol):
    """What the chain needs of Slurm."""

    warnings: set[str]  # what its commands complained of beside their answers

    def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]: ...

    def submit(
        self,
        script: str,
        *,
        script_path: Path,
        token: str,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> Submitted: ...

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None: ...

    def drained(self, reason: str) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Extended:
    """What one look at the queue led to. ``chain`` is None when nobody could look: then nothing was changed."""

    chain: successors.Chain | None
    jobs: tuple[Job, ...] | None = None
    submitted: tuple[datetime, ...] = ()
    cancelled: tuple[str, ...] = ()
    trouble: str = ""

    @property
    def blind(self) -> bool:
        return self.chain is None


def options(installed: Installed, slot: datetime) -> tuple[str, ...]:
    """What sbatch is told on its command line for the job of ``slot``. Its times are UTC: the caller sets TZ."""
    begin = slot.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    return (f"--begin={begin}", f"--comment={successors.slot_comment(installed.id, slot)}")


def extend(cron: CronDir, installed: Installed, scheduler: Queue, now: datetime) -> Extended:
    """One look at the queue; submit what is missing, cancel what is there twice. Raises nothing of Slurm's."""
    try:
        jobs = scheduler.queue(users=(installed.owner,))
    except Error as error:  # SchedulerUnavailable, or no squeue on this node: nobody was asked
        return Extended(None, trouble=f"the queue could not be read: {error.message}")
    found = successors.chain(jobs, installed.id, now, installed.period, installed.spares)
    submitted: list[datetime] = []
    cancelled: list[str] = []
    trouble = ""
    env = {**installed.environment, "TZ": "UTC0"}  # no secret is in it: Slurm keeps a job's environment
    for slot in found.submit:
        try:
            scheduler.submit(
                "",
                script_path=cron.script,
                token=successors.slot_comment(installed.id, slot),
                env=env,
                options=options(installed, slot),
                arguments=(str(successors.epoch(slot)),),
            )
        except Error as error:
            trouble = f"no successor for {slot:%H:%M:%S} UTC: {error.message}"
            break
        submitted.append(slot)
    for job_id in found.cancel:
        try:
            scheduler.cancel(job_id, only_pending=True)
        except Error as error:
            trouble = trouble or f"job {job_id} is there twice and could not be cancelled: {error.message}"
            break
        cancelled.append(job_id)
    return Extended(found, jobs, tuple(submitted), tuple(cancelled), trouble)


def directives(cron: CronDir, installed: Installed) -> tuple[str, ...]:
    """The ``#SBATCH`` options of every tick: the smallest job there is, in a folder that is ours alone."""
    return (
        f"--job-name={JOB_NAME}",
        f"--chdir={cron.state}",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        "--no-requeue",
        "--output=/dev/null",
        f"--time={format_slurm_time(job_limit(installed.limit))}",
        *installed.options,
    )


def job_limit(limit: timedelta) -> timedelta:
    """The time limit of a tick's job whose entries may run for ``limit``: whole minutes, as Slurm keeps them."""
    return -(-(limit + _MARGIN) // timedelta(minutes=1)) * timedelta(minutes=1)


# ------------------------------------------------------------------------------------------------- keeping it alive


@dataclass(frozen=True)
class State:
    """How the cron of one folder is. ``health``: OK it lives (or was brought back), BAD it does not, UNKNOWN."""

    health: Health
    words: str
    revived: bool = False
    installed: bool = True


def ensure(directory: Path | None, scheduler: Queue, now: datetime) -> str:
    """Bring the chain back if it is dead, and say in one sentence how it is. Idempotent; one squeue at most.

    No question at all is asked while slots come. Raises nothing that a person can cause: a run is never harmed by its cron.
    """
    return see_to(directory, scheduler, now).words


def look_after(
    directory: Path | None, scheduler: Queue, now: datetime, *, run: str, install_hint: bool = False
) -> Finding | None:
    """What a running job says about the cron that watches it: revives it when slots stop coming, else a BAD finding.

    Call it once a period. None while there is no cron to look after (nothing installed, or removed by its owner).
    """
    state = see_to(directory, scheduler, now)
    if not state.installed and not install_hint:
        return None
    where = shlex.quote(str(default_directory(os.environ) if directory is None else directory))
    return Finding(
        run=run,
        watchdog="cron",
        subject="chain",
        health=state.health,
        severity=Severity.WARNING,
        summary=state.words,
        at=now,
        meaning="Nobody outside the job watches this run." if state.health is Health.BAD else "",
        look=f"ftsupervise cron status --dir {where}",
        do=f"ftsupervise cron ensure --dir {where}",
    )


def see_to(directory: Path | None, scheduler: Queue, now: datetime, *, thorough: bool = False) -> State:
    """``ensure`` with its verdict. ``thorough`` asks the queue even while slots come."""
    cron = CronDir(default_directory(os.environ) if directory is None else directory)
    try:
        installed = read_installed(cron)
        if installed is None:
            words = f"no cron is installed in {cron.root}: ftsupervise cron install{dir_option(cron)}"
            return State(Health.UNKNOWN, words, installed=False)
        if installed.removed:
            return State(Health.UNKNOWN, f"the cron in {cron.root} was removed: {installed.removed}", installed=False)
        newest = claims.newest(cron, installed, now)
    except Error as error:
        return State(Health.UNKNOWN, f"cannot tell whether cron is alive: {error.message}")
    except OSError as error:
        return State(Health.UNKNOWN, f"cannot tell whether cron is alive: {cron.root}: {error.strerror}")
    age = now - max(newest.at if newest is not None else installed.at, installed.at)
    fresh = age < 2 * installed.period
    if installed.backend != "slurm":
        return _kept_elsewhere(cron, installed, newest, now, thorough=thorough)
    last = f"its last slot was {_ago(now - newest.at)} ago" if newest is not None else "it has not had a slot yet"
    if fresh and not thorough:
        return State(Health.OK, f"cron is alive: {last}" if newest is not None else f"cron was installed: {last}")
    if installed.owner != user_name():
        words = f"the cron in {cron.root} belongs to {installed.owner}; {last}"
        return State(Health.OK if fresh else Health.BAD, words)
    if not thorough and not _first_to_revive(cron, floor(now, installed.period)):
        return State(Health.UNKNOWN, "somebody else is bringing cron back at this moment")
    state = _judge(extend(cron, installed, scheduler, now), installed, age)
    if fresh or state.health is Health.UNKNOWN:
        return state
    words = drained_words(drained(scheduler) or ())
    return replace(state, words=f"{state.words}; {words}") if words else state


def drained(scheduler: Queue) -> tuple[str, ...] | None:
    """The nodes that Slurm has drained by itself after its controller was killed; None when nobody could ask."""
    try:
        return scheduler.drained(DUPLICATE)
    except Error:
        return None


def drained_words(nodes: Sequence[str]) -> str:
    """That Slurm has drained ``nodes``, and why; "" for none."""
    if not nodes:
        return ""
    names = compress_hostlist(tuple(nodes))
    return f'Slurm has drained {names} ("{DUPLICATE}", as after a killed controller), and starts nothing there'


def _judge(done: Extended, installed: Installed, age: timedelta) -> State:
    if done.chain is None:
        return State(Health.UNKNOWN, f"cannot tell whether cron is alive: {done.trouble}")
    ahead = len(done.chain.ahead) + len(done.submitted)
    late = age > max(6 * installed.period, timedelta(minutes=30))
    if done.trouble and not ahead:
        return State(Health.BAD, f"cron is dead and could not be brought back: {done.trouble}")
    jobs = f"{ahead} jobs for its next slots in the queue"
    if not done.chain.alive:
        words = f"cron is started: {jobs}" if age < installed.period else f"cron was dead and was brought back: {jobs}"
        return State(Health.OK, words, revived=True)
    if done.chain.held:
        jobs += f", {len(done.chain.held)} held ({', '.join(done.chain.held[:3])}: scontrol release)"
    if late:
        return State(Health.BAD, f"cron has had no slot for {_ago(age)} although its jobs are in the queue: {jobs}")
    return State(Health.OK, f"cron is alive: {jobs}" + (f"; {done.trouble}" if done.trouble else ""))


def _kept_elsewhere(
    cron: CronDir, installed: Installed, newest: claims.Slot | None, now: datetime, *, thorough: bool
) -> State:
    """How a cron is that a table or a loop keeps. Lines that were disabled are put back; ``thorough`` looks for them even
    while slots come."""
    bound = max(3 * installed.period, timedelta(minutes=3))
    if newest is not None and now - newest.at < bound and not thorough:
        words = f"its last slot was {_ago(now - newest.at)} ago"
        return State(Health.OK, f"cron is alive (kept by {installed.backend}): {words}")
    if restored := _restore(cron, installed):
        return State(Health.OK, restored, revived=True)
    if newest is not None and now - newest.at < bound:
        words = f"its last slot was {_ago(now - newest.at)} ago"
        return State(Health.OK, f"cron is alive (kept by {installed.backend}): {words}")
    start = f": ftsupervise cron run --foreground --dir {shlex.quote(str(cron.root))}"
    todo = (
        start
        if installed.backend == "loop"
        else f"; it is kept by {installed.backend} on {installed.note.get('host', 'another machine')}"
    )
    if newest is None and now - installed.at < bound:
        kind = "nobody has started its loop yet" if installed.backend == "loop" else "it has not had a slot yet"
        return State(Health.UNKNOWN, f"cron is installed, and {kind}{todo}")
    last = f"its last slot was {_ago(now - newest.at)} ago" if newest is not None else "it has never had a slot"
    return State(Health.BAD, f"cron does not run: {last}{todo}")


def _restore(cron: CronDir, installed: Installed) -> str:
    """Put our lines back into the person's table if they are not there any more; what was done, "" if nothing was."""
    if installed.owner != user_name():
        return ""
    try:
        lost = backends.lost(installed)
        if not lost:
            return ""
        options = directives(cron, installed) if installed.backend == "scrontab" else ()
        command = render.command(cron, installed.python)
        ours = backends.block(installed.backend, installed.id, installed.period, command, options)
        table = backends.read(installed.backend, installed.environment)
        backends.write(installed.backend, backends.with_block(table, installed.id, ours), installed.environment)
    except Error:  # then it is as it was, and the last slot says how that is
        return ""
    return f"cron was stopped ({lost}); they were put back"


def _first_to_revive(cron: CronDir, slot: datetime) -> bool:
    """True for one caller per slot, so that twenty runs that find the chain dead make one new one."""
    folder = cron.state / "revivals"
    try:
        make_folder(folder)
        claim_folder(folder / stamp(slot))
        for name in sorted(os.listdir(folder))[:-20]:
            (folder / name).rmdir()
    except FileExistsError:
        return False
    except OSError:  # a full or read-only disk must not keep a dead chain dead
        return True
    return True


def _ago(age: timedelta) -> str:
    return show_duration(max(0.0, age.total_seconds()))


__all__ = ["Extended", "Queue", "SchedulerUnavailable", "ensure", "extend", "look_after", "see_to"]
