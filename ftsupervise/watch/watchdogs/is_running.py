"""Is a job of the run in the queue, running or able to run one day? And does a successor wait behind it?

PENDING is not health: a job whose dependency can never be satisfied, that is held, or whose request no node can meet
waits for ever and looks alive. An unanswered squeue is neither "running" nor "gone".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from ftsupervise.config.named import how_to_launch
from ftsupervise.findings import Finding, Severity
from ftsupervise.model import Attempt, Health, Job, JobState
from ftsupervise.rundir.brake import read_brake
from ftsupervise.rundir.ledger import lives_here, newest
from ftsupervise.rundir.switches import KILL, SAVE, read_switch
from ftsupervise.scheduler.parse import array_size, is_held, reason_word
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import IsRunning as Settings
    from ftsupervise.watch import Look

# Slurm's reason (squeue(1), JOB REASON CODES, and what it writes in place of one, as ``reason_word`` has it) -> what it means,
# and what to do about it. None of these ends by waiting.
NEVER = {
    "DependencyNeverSatisfied": ("it waits for a job that failed or is gone", "scancel it and launch again"),
    "JobHeldUser": ("its owner has put it on hold", "scontrol release JOBID"),
    "JobHeldAdmin": ("an administrator has put it on hold", "ask your administrator"),
    "JobHoldMaxRequeue": (
        "it was requeued too many times and is held",
        "find the failure, then scontrol release JOBID",
    ),
    "BadConstraints": ("no node has the features it asks for", "correct launch.constraint and launch again"),
    "InvalidQOS": ("its QOS does not exist or is not yours", "correct launch.qos and launch again"),
    "InvalidAccount": ("its account does not exist or is not yours", "correct launch.account and launch again"),
    "AccountNotAllowed": ("its account may not use this partition", "correct launch.account or launch.partition"),
    "QOSNotAllowed": ("its QOS may not be used here", "correct launch.qos or launch.partition"),
    "PartitionNodeLimit": ("it asks for more nodes than the partition has", "correct launch.nodes and launch again"),
    "PartitionTimeLimit": ("it asks for more time than the partition gives", "correct launch.time and launch again"),
    "PartitionDown": ("the partition is down", "ask your administrator"),
    "PartitionInactive": ("the partition is inactive", "ask your administrator"),
    "ReservationDeleted": ("its reservation was deleted", "correct launch.reservation and launch again"),
    "AssocGrpCPUMinutesLimit": ("the account's budget is used up", "ask for more, or use another account"),
    "AssocGrpGRESMinutes": ("the account's GPU budget is used up", "ask for more, or use another account"),
    "QOSMaxWallDurationPerJobLimit": ("it asks for more time than its QOS gives", "correct launch.time"),
    "launch_failed_requeued_held": ("it could not be started and is held", "find out why, then scontrol release JOBID"),
    "launch_failure_limit_exceeded_requeued_held": (
        "it could not be started too many times and is held",
        "find out why, then scontrol release JOBID",
    ),
    "user_env_retrieval_failed_requeued_held": (
        "the environment of its user could not be loaded and it is held",
        "launch without --get-user-env, or scontrol release JOBID",
    ),
    "job_requeued_in_held_state": ("it was requeued and is held", "scontrol release JOBID"),
}
_OTHER = {"successor": "chain", KILL: "switches", SAVE: "switches"}  # told apart from is-running when it mutes
_NEVER = {reason.lower(): words for reason, words in NEVER.items()}
_HELD = {JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT, JobState.RESV_DEL_HOLD}


@dataclass(frozen=True)
class IsRunning:
    """The watchdog every run has."""

    name: str = "is-running"

    def check(self, look: Look, settings: Settings) -> Iterator[Finding]:
        if look.jobs is None:
            yield _finding(look, "job", Health.UNKNOWN, Severity.CRITICAL, f"Slurm could not be asked: {look.blind}")
        else:
            yield self._job(look, look.jobs, settings)
            yield _successor(look, look.jobs)
        yield from _switches(look)

    def _job(self, look: Look, jobs: tuple[Job, ...], settings: Settings) -> Finding:
        if over := _over(look):
            return _finding(look, "job", Health.OK, Severity.CRITICAL, over)
        running = [job for job in jobs if not job.state.waiting and not job.state.ended]
        completing = [job for job in running if job.state is JobState.COMPLETING]
        if len(running) > len(completing):
            job = next(job for job in running if job.state is not JobState.COMPLETING)
            return _finding(look, "job", Health.OK, Severity.CRITICAL, f"job {job.id} is {job.state.value}")
        if completing:
            return _completing(look, completing[0], settings.completing_for)
        waiting = [job for job in jobs if job.state.waiting]
        if waiting:
            return _waiting(look, waiting, settings.pending_for)
        attempt = _newest(look)
        if attempt is not None and lives_here(attempt):
            words = f"attempt {attempt.number} runs on this machine, outside the queue"
            return _finding(look, "job", Health.OK, Severity.CRITICAL, words)
        return _finding(
            look,
            "job",
            Health.BAD,
            Severity.CRITICAL,
            "no job of this run is running or waiting",
            meaning="Nothing trains, and nothing will until somebody launches it again.",
            look_at=f"ftsupervise status {shlex.quote(str(look.rundir.root))}; squeue --me",
            do=f"find out why it ended, then: {how_to_launch(look.rundir)}",
        )


def _newest(look: Look) -> Attempt | None:
    try:
        return newest(look.rundir)
    except OSError:
        return None


def _over(look: Look) -> str:
    """Why there need not be a job: the run is finished, or somebody stopped it."""
    if look.rundir.finished.exists():
        return "the run has finished"
    switch = read_switch(look.rundir, KILL)
    if switch.up:
        return f"stopped by the kill switch{f' ({switch.who})' if switch.who else ''}"
    try:
        return "stopped by the brake" if read_brake(look.rundir) is not None else ""
    except OSError:
        return ""


def _switches(look: Look) -> Iterator[Finding]:
    """What lies in a switch's place and is not obeyed: somebody believes that the run stops, or saves, and it does not."""
    for name, wish in ((KILL, "stop"), (SAVE, "save")):
        switch = read_switch(look.rundir, name)
        if switch.health is Health.UNKNOWN:
            continue  # not launched yet, or storage that does not answer, which is told by itself
        yield _finding(
            look,
            name,
            Health.BAD if switch.problem else Health.OK,
            Severity.WARNING,
            switch.problem or f"nothing odd in the place of the {name}",
            meaning=f"Whoever put it there may believe that the run will {wish}. It will not.",
            look_at=f"ls -la {shlex.quote(str(look.rundir.switches))}",
            do=f"remove it; to make the run {wish}: ftsupervise {name.partition('-')[0]} {shlex.quote(str(look.rundir.root))}",
        )


def _completing(look: Look, job: Job, bound: timedelta) -> Finding:
    since = job.end_time
    age = look.now - since if since is not None and since <= look.now else timedelta(0)
    bad = age > bound
    return _finding(
        look,
        "job",
        Health.BAD if bad else Health.OK,
        Severity.WARNING,
        f"job {job.id} has been COMPLETING for {show_duration(age.total_seconds())}",
        value=show_duration(age.total_seconds()),
        limit=show_duration(bound.total_seconds()),
        meaning="Its processes do not die (a hung file system or device); Slurm may start the next member beside them.",
        look_at=f"scontrol show job {job.id}; sinfo -N -l",
        do="tell your administrator which node it is",
        since=since,
    )


def _waiting(look: Look, waiting: list[Job], bound: timedelta | None) -> Finding:
    hopeless = [job for job in waiting if _never_starts(job)]
    job = (hopeless if len(hopeless) == len(waiting) else [j for j in waiting if j not in hopeless])[0]
    if len(hopeless) == len(waiting):
        what, do = _NEVER.get(_reason(job), ("it is held", "scontrol release JOBID"))
        return _finding(
            look,
            "job",
            Health.BAD,
            Severity.CRITICAL,
            f"job {job.id} waits for something that never comes: {job.reason or job.state.value} ({what})",
            meaning="The job stands in the queue and looks alive, but it will not start by itself.",
            look_at=f"scontrol show job {job.base_id}",
            do=do.replace("JOBID", job.base_id),
            since=job.submit_time,
        )
    age = look.now - job.submit_time if job.submit_time else timedelta(0)
    bad = bound is not None and age > bound
    waited = show_duration(max(0.0, age.total_seconds()))
    return _finding(
        look,
        "job",
        Health.BAD if bad else Health.OK,
        Severity.WARNING,
        f"job {job.id} has been waiting in the queue for {waited}{f' ({job.reason})' if job.reason else ''}",
        value=waited,
        limit=show_duration(bound.total_seconds()) if bound else "",
        meaning="Nothing trains until Slurm starts it.",
        look_at=f"squeue --start -j {job.base_id}",
        do="ask for fewer nodes, less time or another partition, or wait",
        since=job.submit_time,
    )


def _reason(job: Job) -> str:
    """The reason in the spelling of ``_NEVER``. Some have more behind a comma or a colon: the nodes, the plugin's words."""
    return reason_word(re.split("[,:]", job.reason, maxsplit=1)[0]).lower()


def _never_starts(job: Job) -> bool:
    return _reason(job) in _NEVER or is_held(job.reason) or job.state in _HELD


def _successor(look: Look, jobs: tuple[Job, ...]) -> Finding:
    """A run whose last member runs has nobody to take over."""
    waiting = sum(array_size(job.id) for job in jobs if job.state.waiting and not _never_starts(job))
    left = (JobState.COMPLETING,)  # what is leaving has nobody to hand over from; "gone" is the next word
    running = next((j for j in jobs if not (j.state.waiting or j.state.ended or j.state in left)), None)
    if look.run.launch.jobs < 2 or waiting or running is None or _over(look):
        text = f"{waiting} waiting to take over" if waiting else "no successor needed"
        return _finding(look, "successor", Health.OK, Severity.WARNING, text)
    return _finding(
        look,
        "successor",
        Health.BAD,
        Severity.WARNING,
        f"job {running.id} is the last of its chain: nothing waits to take over",
        meaning="When this job ends, by its limit or by a fault, the run stands still.",
        look_at="squeue --me",
        do=how_to_launch(look.rundir, after=running.base_id),
    )


def _finding(
    look: Look,
    subject: str,
    health: Health,
    severity: Severity,
    summary: str,
    *,
    look_at: str = "",
    **more: object,
) -> Finding:
    return Finding(
        run=look.run.name,
        watchdog=_OTHER.get(subject, "is-running"),
        subject=subject,
        health=health,
        severity=severity,
        summary=summary,
        at=look.now,
        look=look_at or f"ftsupervise status {shlex.quote(str(look.rundir.root))}",
        **more,  # type: ignore[arg-type]
    )
