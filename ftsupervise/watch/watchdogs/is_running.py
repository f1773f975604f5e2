"""Checks that a job of the run is in the queue, running or able to run one day, and that a successor waits behind it.

PENDING is not health: a job whose dependency can never be satisfied, that is held, or whose request no node can meet
waits for ever and looks alive. An unanswered squeue is neither "running" nor "gone".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from ftsupervise.config.find_run import how_to_launch
from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.model import Job, JobState
from ftsupervise.rundir.ledger import lives_here
from ftsupervise.rundir.switches import KILL, SAVE, read_brake, read_switch
from ftsupervise.scheduler.ownership import why_held
from ftsupervise.scheduler.parse import array_size, is_held, reason_word
from ftsupervise.truth import Health
from ftsupervise.units import show_duration
from ftsupervise.watch.watchdogs.group_signs import group_findings

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import IsRunning as Settings
    from ftsupervise.watch import Look

# Slurm's reason (squeue(1), JOB REASON CODES, and the text that it writes in place of one, as ``reason_word`` returns
# it) -> its meaning, and what to do about it. None of these ends by waiting.
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
# "chain" and "switches" have alerts of their own, which are sent also while is-running is muted.
_STATUS = "ftsupervise status {run_dir}"
WORDS = {
    "job": Words(look=_STATUS, severity=Severity.CRITICAL),
    "gone": Words(
        "Nothing trains, and nothing will until the run is launched again.",
        _STATUS + "; squeue --me",
        "find out why it ended, then: {launch}",
        Severity.CRITICAL,
    ),
    "never": Words(
        "The job stands in the queue and looks alive, but it will not start by itself.",
        "scontrol show job {job}",
        "{do}",
        Severity.CRITICAL,
    ),
    "waiting": Words(
        "Nothing trains until Slurm starts it.",
        "squeue --start -j {job}",
        "ask for fewer nodes, less time or another partition, or wait",
    ),
    "completing": Words(
        "Its processes do not die (a hung file system or device); Slurm may start the next member beside them.",
        "scontrol show job {job}; sinfo -N -l",
        "tell your administrator which node it is",
    ),
    "successor": Words(
        "When this job ends, by its limit or by a fault, the run stands still.",
        "squeue --me",
        "{launch}",
        watchdog="chain",
    ),
    "switch": Words(
        "The person who put it there may believe that the run will {wish}. It will not.",
        "ls -la {switches}",
        "remove it; to make the run {wish}: ftsupervise {verb} {run_dir}",
        watchdog="switches",
    ),
}
_NEVER = {reason.lower(): words for reason, words in NEVER.items()}
_HELD = {JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT, JobState.RESV_DEL_HOLD}


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    if look.jobs is None and look.rundir.finished.exists():
        yield look.finding("job", Health.OK, _over(look), WORDS["job"])
    elif look.jobs is None:
        yield look.finding("job", Health.UNKNOWN, f"Slurm could not be asked: {look.blind}", WORDS["job"])
    else:
        yield _job(look, look.jobs, settings)
        yield _successor(look, look.jobs)
    yield from _switches(look)
    yield from group_findings(look, settings.group_away_for, over=bool(_over(look)), runs=_may_run(look))


def _job(look: Look, jobs: tuple[Job, ...], settings: Settings) -> Finding:
    if over := _over(look):
        return look.finding("job", Health.OK, over, WORDS["job"])
    running = [job for job in jobs if not job.state.waiting and not job.state.ended]
    completing = [job for job in running if job.state is JobState.COMPLETING]
    if len(running) > len(completing):
        job = next(job for job in running if job.state is not JobState.COMPLETING)
        return look.finding("job", Health.OK, f"job {job.id} is {job.state.value}", WORDS["job"])
    if completing:
        return _completing(look, completing[0], settings.completing_for)
    waiting = [job for job in jobs if job.state.waiting]
    if waiting:
        return _waiting(look, waiting, settings.pending_for)
    attempt = look.attempts[-1] if look.attempts else None
    if attempt is not None and lives_here(attempt):
        words = f"attempt {attempt.number} runs on this machine, outside the queue"
        return look.finding("job", Health.OK, words, WORDS["job"])
    names = {"launch": how_to_launch(look.rundir)}
    return look.finding("job", Health.BAD, "no job of this run is running or waiting", WORDS["gone"], names=names)


def _may_run(look: Look) -> bool:
    """Return False where the queue has no running job of the run, and its newest attempt does not run here."""
    if look.jobs is None or any(not job.state.waiting and not job.state.ended for job in look.jobs):
        return True
    return bool(look.attempts) and lives_here(look.attempts[-1])


def _over(look: Look) -> str:
    """Return why no job is needed: the run is finished, or a person or the brake has stopped it; "" if one is."""
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
    """Yield a finding for each file in a switch's place that is not obeyed: its author believes that the run will stop
    or save.
    """
    for name, wish in ((KILL, "stop"), (SAVE, "save")):
        switch = read_switch(look.rundir, name)
        if switch.health is Health.UNKNOWN:
            continue  # not launched yet, or storage that does not answer, which has an alert of its own
        text = switch.problem or f"no stray file in the place of the {name}"
        names = {"wish": wish, "verb": name.partition("-")[0], "switches": shlex.quote(str(look.rundir.switches))}
        yield look.finding(name, Health.of(bool(switch.problem)), text, WORDS["switch"], names=names)


def _completing(look: Look, job: Job, bound: timedelta) -> Finding:
    since = job.end_time
    age = look.now - since if since is not None and since <= look.now else timedelta(0)
    shown = show_duration(age.total_seconds())
    return look.finding(
        "job",
        Health.of(age > bound),
        f"job {job.id} has been COMPLETING for {shown}",
        WORDS["completing"],
        names={"job": job.id},
        value=shown,
        limit=show_duration(bound.total_seconds()),
        since=since,
    )


def _waiting(look: Look, waiting: list[Job], bound: timedelta | None) -> Finding:
    hopeless = [job for job in waiting if _never_starts(job)]
    ones = hopeless if len(hopeless) == len(waiting) else [j for j in waiting if j not in hopeless]
    job = min(
        ones, key=lambda job: job.state is not JobState.EXPEDITING
    )  # one that begins again is in front of all others
    if len(hopeless) == len(waiting):
        what, do = _NEVER.get(_reason(job), ("it is held", "scontrol release JOBID"))
        if why := next(filter(None, map(why_held, waiting)), ""):
            what = f"held by a member of the chain: {why}"
            do = f"repair it, then: ftsupervise clear --brake {shlex.quote(str(look.rundir.root))}"
        text = f"job {job.id} waits for something that never comes: {job.reason or job.state.value} ({what})"
        names = {"job": job.base_id, "do": do.replace("JOBID", job.base_id)}
        return look.finding("job", Health.BAD, text, WORDS["never"], names=names, since=job.submit_time)
    age = look.now - job.submit_time if job.submit_time else timedelta(0)
    waited = show_duration(max(0.0, age.total_seconds()))
    again = " to begin again after the loss of a node" if job.state is JobState.EXPEDITING else ""
    return look.finding(
        "job",
        Health.of(bound is not None and age > bound),
        f"job {job.id} has been waiting in the queue for {waited}{again}{f' ({job.reason})' if job.reason else ''}",
        WORDS["waiting"],
        names={"job": job.base_id},
        value=waited,
        limit=show_duration(bound.total_seconds()) if bound else "",
        since=job.submit_time,
    )


def _reason(job: Job) -> str:
    """Return the reason in the spelling of ``_NEVER``.

    Some reasons have more behind a comma or a colon: nodes, a plugin's words.
    """
    return reason_word(re.split("[,:]", job.reason, maxsplit=1)[0]).lower()


def _never_starts(job: Job) -> bool:
    return _reason(job) in _NEVER or is_held(job.reason) or job.state in _HELD or bool(why_held(job))


def _successor(look: Look, jobs: tuple[Job, ...]) -> Finding:
    """When the last member of the chain runs, no job takes over after it."""
    waiting = sum(array_size(job.id) for job in jobs if job.state.waiting and not _never_starts(job))
    # a job that is leaving needs no successor any more; the next finding says that it is gone
    left = (JobState.COMPLETING,)
    running = next((j for j in jobs if not (j.state.waiting or j.state.ended or j.state in left)), None)
    if look.run.launch.jobs < 2 or waiting or running is None or _over(look):
        text = f"{waiting} waiting to take over" if waiting else "no successor needed"
        return look.finding("successor", Health.OK, text, WORDS["successor"], names={"launch": ""})
    text = f"job {running.id} is the last of its chain: nothing waits to take over"
    names = {"launch": how_to_launch(look.rundir, after=running.base_id)}
    return look.finding("successor", Health.BAD, text, WORDS["successor"], names=names)
