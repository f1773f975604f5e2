"""Checks that a job of the run is in the queue, running or able to run one day, and that a successor waits behind it.

PENDING is not health: a job whose dependency can never be satisfied, that is held, or whose request no node can meet
waits for ever and looks alive. Nor is a state that a job passes through, or is put into by others (SUSPENDED, CONFIGURING):
nothing trains in it, and it has a bound. An unanswered squeue is neither "running" nor "gone".

Slurm does not say since when a job is in such a state, nor how long the members before it waited: ``look.memory`` has both.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from ftsupervise.config.find_run import how_to_launch
from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.model import CauseKind, Job, JobState
from ftsupervise.replicas.apart import lighthouse_job
from ftsupervise.replicas.record import PAGE_NAME
from ftsupervise.replicas.table import GroupState, GroupTable, ReplicaGroup, read_table
from ftsupervise.rundir.ledger import lives_here
from ftsupervise.rundir.switches import KILL, SAVE
from ftsupervise.scheduler.accounting import how_they_ended, may_be_known, with_end
from ftsupervise.scheduler.ownership import why_held
from ftsupervise.scheduler.parse import array_size, is_held
from ftsupervise.scheduler.pending import never_starts
from ftsupervise.truth import Health
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import IsRunning as Settings
    from ftsupervise.model import Attempt
    from ftsupervise.watch import Look

# Judges the replica groups for *is-running*: do enough of them run, and has one been away for long?
#
# The table is written every few seconds by the process that starts the groups. An old table says nothing about them now.

_FRESH = timedelta(minutes=2)
_STATUS = "ftsupervise status {run_dir}"
_QUORUM = Words(
    "No group trains until enough of them run; then they go on by themselves.",
    _STATUS,
    "find out why the others are away: the status has a line for each group",
    Severity.CRITICAL,
)
_LIGHTHOUSE = Words(
    "No group makes a step without it. They wait, and go on by themselves when its job runs.",
    _STATUS,
    "see to it that its job starts: the status names it",
    Severity.CRITICAL,
)
_AWAY = Words(
    "The other groups train on without it, with a smaller batch.",
    _STATUS,
    "read why it is away; to do without it for good: ftsupervise groups leave {group} {run_dir}",
)


def group_findings(look: Look, away_for: timedelta, *, over: bool, runs: bool) -> Iterator[Finding]:
    """Yield nothing where the run has no groups, or where its table is old because no job runs: *is-running* reports
    that.

    ``over``: the run need not run at all. ``runs``: a job of it does, or may.
    """
    table = read_table(look.rundir)
    if table is None:
        return
    if not over and abs(look.now - table.at) > _FRESH:
        if not runs:
            return
        since = show_duration(abs((look.now - table.at).total_seconds()))
        if (away := _lighthouse_away(look, table)) is not None:
            text = f"the groups have had no lighthouse for {since}: {away}"
            yield look.finding("quorum", Health.BAD, text, _LIGHTHOUSE, since=table.at)
            return
        yield look.finding("quorum", Health.UNKNOWN, f"there has been no news of the groups for {since}", _QUORUM)
        return
    yield _quorum(look, table, over=over)
    for group in table.groups:
        yield _of_one(look, group, away_for, over=over)


def _lighthouse_away(look: Look, table: GroupTable) -> str | None:
    """Say where the job of the lighthouse is, where it has one and that is known not to run."""
    if table.place != "jobs" or not (look.rundir.replicas / PAGE_NAME).exists():
        return None
    job = lighthouse_job(look.rundir, look.jobs)
    return job.words if job.runs is False else None


def _quorum(look: Look, table: GroupTable, *, over: bool) -> Finding:
    text = f"{table.running} of {table.wanted} groups run, at least {table.least} must"
    bad = table.below is not None and not over
    unsure = not over and not bad and table.running < table.least <= table.running + table.unknown
    health = Health.UNKNOWN if unsure else Health.of(bad)
    return look.finding("quorum", health, text, _QUORUM, since=table.below if bad else None)


def _of_one(look: Look, group: ReplicaGroup, away_for: timedelta, *, over: bool) -> Finding:
    fine = over or group.state in (GroupState.RUNNING, GroupState.LEFT, GroupState.OVER)
    age = look.now - group.since
    bad = not fine and (age > away_for or group.state is GroupState.STOPPED)
    shown = show_duration(max(0.0, age.total_seconds()))
    why = f": {group.why}" if group.why else ""
    text = f"group {group.name}: {group.state.value} for {shown}{why if not fine else ''}"
    names = {"group": group.name, "run_dir": shlex.quote(str(look.rundir.root))}
    unsure = group.state is GroupState.UNKNOWN and not fine
    return look.finding(
        group.name,
        Health.UNKNOWN if unsure else Health.of(bad),
        text,
        _AWAY,
        names=names,
        value=shown,
        limit=show_duration(away_for.total_seconds()),
        since=group.since if bad else None,
    )


# ------------------------------------------------------------------------------------------


# "chain" and "switches" have alerts of their own, which are sent also while is-running is muted.
WORDS = {
    "job": Words(look=_STATUS, severity=Severity.CRITICAL),
    "gone": Words(
        "Nothing trains, and nothing will until the run is launched again.",
        "{look}; squeue --me",
        "find out why it ended, then: {launch}",
        Severity.CRITICAL,
    ),
    "taken": Words(
        "Nothing trains, and nothing will until the run is launched again.",
        "{look}; squeue --me",
        "was that meant? then: {kill}; else: {launch}",
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
    "passing": Words(
        "Nothing trains while it is so.",
        "scontrol show job {job}; sinfo -N -l",
        "{do}",
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
# A state that a job passes through, or that others put it into -> how it is said, and what to do when it does not end.
_PASSING = {
    JobState.SUSPENDED: ("is suspended", "ask your administrator why, or: scontrol resume {job}"),
    JobState.STOPPED: ("is stopped by SIGSTOP", "scancel --signal=CONT {job}"),
    JobState.CONFIGURING: ("waits for its nodes to be ready", "ask your administrator, or: scontrol requeue {job}"),
    JobState.STAGE_OUT: ("moves its files out", "tell your administrator; the burst buffer does not come to an end"),
    JobState.EXPEDITING: (
        "waits to begin again after the loss of a node",
        "ask for a spare node, or wait for a free one",
    ),
}
_LAUNCHES = 300.0  # seconds from ``clear`` to ``launch``: whoever types the one is at it
_COMPLETING_FOR = timedelta(minutes=10)  # of COMPLETING: an epilog that takes longer is stuck
_WAITS_KEPT = 20  # waits of this run in the queue, the newest
_WAITS_ENOUGH = 3  # from so many on they say what is usual
_ASKS = 3  # ticks in which the accounting is asked who cancelled a job
_TIMES = 3  # a wait this many times the longest of them is told …
_AT_LEAST = timedelta(hours=6)  # … from here on
_ASKED_FOR = ("BeginTime", "Dependency")  # reasons to wait that a person has given it
_HELD = {JobState.REQUEUE_HOLD, JobState.SPECIAL_EXIT, JobState.RESV_DEL_HOLD}


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    if look.jobs is None and look.rundir.finished.exists():
        yield look.finding("job", Health.OK, _over(look), WORDS["job"])
    elif look.jobs is None:
        yield look.finding("job", Health.UNKNOWN, f"the queue could not be asked: {look.blind}", WORDS["job"])
    else:
        yield _job(look, look.jobs, settings)
        yield _successor(look, look.jobs)
    yield from _switches(look)
    yield from group_findings(look, settings.group_away_for, over=bool(_over(look)), runs=_may_run(look))


def _job(look: Look, jobs: tuple[Job, ...], settings: Settings) -> Finding:
    if over := _over(look):
        look.memory["over"] = look.now.timestamp()
        return look.finding("job", Health.OK, over, WORDS["job"])
    running = [job for job in jobs if not job.state.waiting and not job.state.ended]
    waiting = [job for job in jobs if job.state.waiting]
    seen = _remember(look, running, waiting)
    trains = [job for job in running if job.state not in _PASSING and job.state is not JobState.COMPLETING]
    if trains:
        return look.finding("job", Health.OK, f"job {trains[0].id} is {trains[0].state.value}", WORDS["job"])
    passing = [j for j in (*running, *waiting) if j.state in _PASSING and not (j.state.waiting and is_hopeless(j))]
    if passing:
        return _passing(look, passing[0], seen[passing[0].id], settings.passing_for)
    if running:
        return _completing(look, running[0], seen[running[0].id])
    if waiting:
        return _waiting(look, waiting, settings.pending_for)
    attempt = look.attempts[-1] if look.attempts else None
    if attempt is not None and lives_here(attempt):
        words = f"attempt {attempt.number} runs on this machine, outside the queue"
        return look.finding("job", Health.OK, words, WORDS["job"])
    if (stopped := look.memory.get("over")) and 0 <= look.now.timestamp() - stopped < _LAUNCHES:
        words = "no job of it is in the queue: it was stopped until a moment ago, and is about to be launched"
        return look.finding("job", Health.UNKNOWN, words, WORDS["job"])
    verb = "diagnose" if attempt is not None and attempt.has_failed else "status"
    quoted = look.rundir.quoted()
    names = {
        "launch": how_to_launch(look.rundir),
        "look": f"ftsupervise {verb} {quoted}",
        "kill": f"ftsupervise kill {quoted}",
    }
    text = "no job of this run is running or waiting"
    if attempt is not None and (ended := _how_it_ended(look, attempt)):
        text += f"; attempt {attempt.number} ended: {ended}"
    how = WORDS["taken" if attempt is not None and attempt.kind is CauseKind.CANCELLED else "gone"]
    return look.finding("job", Health.BAD, text, how, names=names, why=look.why(attempt))


def _how_it_ended(look: Look, last: Attempt) -> str:
    """Return how the newest attempt ended, in words, with who cancelled its job where Slurm's accounting knows it. That is
    asked in the first ticks after the end, because it learns of it late, and not again where it does not answer."""
    if last.ended is None or not may_be_known(last):
        return last.words if last.ended is not None else ""
    before = look.memory.get("accounting")
    known = before if isinstance(before, dict) and before.get("attempt") == last.number else {"attempt": last.number}
    words, asked = known.get("words"), known.get("asked")
    if isinstance(words, str):
        return words
    times = asked if isinstance(asked, int) else 0
    if times < _ASKS:
        answer = how_they_ended((last.job_id,), os.environ)
        known["asked"] = times + 1 if answer is not None else _ASKS
        if answer and last.job_id in answer:
            known["words"] = with_end(last, answer[last.job_id]).words
        look.memory["accounting"] = known
    words = known.get("words")
    return words if isinstance(words, str) else last.words


def _may_run(look: Look) -> bool:
    """Return False where the queue has no running job of the run, and its newest attempt does not run here."""
    if look.jobs is None or any(not job.state.waiting and not job.state.ended for job in look.jobs):
        return True
    return bool(look.attempts) and lives_here(look.attempts[-1])


def _over(look: Look) -> str:
    """Return why no job is needed: the run is finished, or a person or the brake has stopped it; "" if one is."""
    if look.rundir.finished.exists():
        return "the run has finished"
    switch = look.switch(KILL)
    if switch.up:
        return f"stopped by the kill switch{f' ({switch.who})' if switch.who else ''}"
    try:
        return "stopped by the brake" if look.brake() is not None else ""
    except OSError:
        return ""


def _switches(look: Look) -> Iterator[Finding]:
    """Yield a finding for each file in a switch's place that is not obeyed: its author believes that the run will stop
    or save.
    """
    for name, wish in ((KILL, "stop"), (SAVE, "save")):
        switch = look.switch(name)
        if switch.health is Health.UNKNOWN:
            continue  # not launched yet, or storage that does not answer, which has an alert of its own
        text = switch.problem or f"no stray file in the place of the {name}"
        names = {"wish": wish, "verb": name.partition("-")[0], "switches": shlex.quote(str(look.rundir.switches))}
        yield look.finding(name, Health.of(bool(switch.problem)), text, WORDS["switch"], names=names)


def _remember(look: Look, running: list[Job], waiting: list[Job]) -> dict[str, datetime]:
    """Return since when each job has been in its state, as far as it was seen; remember that, and how long this run waits in
    the queue until a job starts.
    """
    memory, now = look.memory, look.now.timestamp()
    before = memory.get("states")
    states: dict[str, list[Any]] = {}
    for job in (*running, *waiting):
        last = before.get(job.id) if isinstance(before, dict) else None
        known = isinstance(last, list) and len(last) == 2 and last[0] == job.state.value and _is_time(last[1], now)
        states[job.id] = last if known and last is not None else [job.state.value, now]
    memory["states"] = states
    _remember_wait(look, running, waiting)
    return {ident: datetime.fromtimestamp(since, timezone.utc) for ident, (_, since) in states.items()}


def _is_time(value: object, now: float) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= now + 60


def _remember_wait(look: Look, running: list[Job], waiting: list[Job]) -> None:
    """Add the wait of a job that has started since the last check. One that was held, or had to wait for what never comes,
    says nothing of the queue."""
    memory = look.memory
    if not running:
        if waiting and all(is_hopeless(job) for job in waiting):
            memory["held"] = True
        return
    job = running[0]
    held, known = memory.pop("held", False), memory.get("started")
    memory["started"] = job.id
    if held or job.id == known or job.start_time is None:
        return
    waited = (job.start_time - _begun(look, job, job.start_time)).total_seconds()
    memory["waits"] = [*_waits(memory), round(max(0.0, waited), 1)][-_WAITS_KEPT:]


def _waits(memory: dict[str, Any]) -> list[float]:
    kept = memory.get("waits")
    return [float(one) for one in kept if isinstance(one, (int, float)) and one >= 0] if isinstance(kept, list) else []


def _begun(look: Look, job: Job, until: datetime) -> datetime:
    """Return since when the run has waited for ``job``: since it was submitted, or the attempt before it ended. The members
    of an array are submitted days before it is their turn. What has ended after ``until`` was still there then."""
    before = [one.ended or one.heard or one.started for one in look.attempts if one.started < until]
    return max((min(at, until) for at in (job.submit_time, *before[-1:]) if at is not None), default=until)


def _learned(look: Look) -> timedelta | None:
    """Return how long this run may wait, by its own waits: three times the longest; None while too few are known."""
    waits = _waits(look.memory)
    if len(waits) < _WAITS_ENOUGH:
        return None
    return max(_AT_LEAST, timedelta(seconds=_TIMES * max(waits)))


def _passing(look: Look, job: Job, since: datetime, bound: timedelta) -> Finding:
    what, do = _PASSING[job.state]
    if job.state is JobState.CONFIGURING and job.start_time is not None and job.start_time < since:
        since = job.start_time
    shown = show_duration((look.now - since).total_seconds())
    return look.finding(
        "job",
        Health.of(look.now - since > bound),
        f"job {job.id} {what} ({job.state.value}), for {shown} so far",
        WORDS["passing"],
        names={"job": job.base_id, "do": do.format(job=job.base_id)},
        value=shown,
        limit=show_duration(bound.total_seconds()),
        since=since,
    )


def _completing(look: Look, job: Job, seen: datetime) -> Finding:
    since = job.end_time if job.end_time is not None and job.end_time <= look.now else seen
    age = look.now - since
    shown = show_duration(age.total_seconds())
    return look.finding(
        "job",
        Health.of(age > _COMPLETING_FOR),
        f"job {job.id} has been COMPLETING for {shown}",
        WORDS["completing"],
        names={"job": job.id},
        value=shown,
        limit=show_duration(_COMPLETING_FOR.total_seconds()),
        since=since,
    )


def _waiting(look: Look, waiting: list[Job], bound: timedelta | None) -> Finding:
    hopeless = [job for job in waiting if is_hopeless(job)]
    ones = hopeless if len(hopeless) == len(waiting) else [j for j in waiting if j not in hopeless]
    job = ones[0]
    since = _begun(look, job, look.now)
    if len(hopeless) == len(waiting):
        what, do = never_starts(job.reason) or ("it is held", "scontrol release JOBID")
        if why := next(filter(None, map(why_held, waiting)), ""):
            what = f"held by a member of the chain: {why}"
            do = f"repair it, then: ftsupervise clear --brake {shlex.quote(str(look.rundir.root))}"
        text = f"job {job.id} waits for something that never comes: {job.reason or job.state.value} ({what})"
        names = {"job": job.base_id, "do": do.replace("JOBID", job.base_id)}
        return look.finding(
            "job", Health.BAD, text, WORDS["never"], names=names
        )  # since when it is so, Slurm does not say
    usual = ""
    if bound is None and job.reason not in _ASKED_FOR:
        bound = _learned(look)
        waits = _waits(look.memory)
        usual = f", longer than each of its last {len(waits)} waits" if bound and look.now - since > bound else ""
    age = look.now - since
    waited = show_duration(age.total_seconds())
    return look.finding(
        "job",
        Health.of(bound is not None and age > bound),
        f"job {job.id} has been waiting in the queue for {waited}{f' ({job.reason})' if job.reason else ''}{usual}",
        WORDS["waiting"],
        names={"job": job.base_id},
        value=waited,
        limit=show_duration(bound.total_seconds()) if bound else "",
        since=since,
    )


def is_hopeless(job: Job) -> bool:
    """Return whether a job that waits will not start by itself."""
    return never_starts(job.reason) is not None or is_held(job.reason) or job.state in _HELD or bool(why_held(job))


def _successor(look: Look, jobs: tuple[Job, ...]) -> Finding:
    """When the last member of the chain runs, no job takes over after it."""
    waiting = sum(array_size(job.id) for job in jobs if job.state.waiting and not is_hopeless(job))
    # a job that is leaving needs no successor any more; the next finding says that it is gone
    left = (JobState.COMPLETING,)
    running = next((j for j in jobs if not (j.state.waiting or j.state.ended or j.state in left)), None)
    if look.run.launch.jobs < 2 or waiting or running is None or _over(look):
        text = f"{waiting} waiting to take over" if waiting else "no successor needed"
        return look.finding("successor", Health.OK, text, WORDS["successor"], names={"launch": ""})
    text = f"job {running.id} is the last of its chain: nothing waits to take over"
    names = {"launch": how_to_launch(look.rundir, after=running.base_id)}
    return look.finding("successor", Health.BAD, text, WORDS["successor"], names=names)
