"""Serves replica groups that have jobs of their own (``in: jobs``) from a small job, and begins the job of each.

The small job runs the lighthouse and writes the pages. It never starts or ends a group: its own chain of jobs does that, and
while it waits in the queue it is not dead. What is known of a group comes from its directory and from the queue.
"""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from ftsupervise.errors import Error, from_os_error
from ftsupervise.host.in_time import Every, in_time
from ftsupervise.host.ownership import user_name
from ftsupervise.host.signals import SignalQueue
from ftsupervise.model import Job
from ftsupervise.probe.errand import answers, no_answer
from ftsupervise.replicas.bounds import environment_of, for_group
from ftsupervise.replicas.job import RunOfGroups
from ftsupervise.replicas.options import GroupOptions
from ftsupervise.replicas.process import GroupProcess
from ftsupervise.replicas.record import lighthouse_address
from ftsupervise.replicas.table import GroupState, name_of
from ftsupervise.rundir import ledger, pinned
from ftsupervise.rundir.launches import newest_script
from ftsupervise.rundir.paths import ENV_GROUP_JOB, RunDir, tell
from ftsupervise.rundir.switches import reason_not_to_start
from ftsupervise.scheduler.ownership import comment, link_of
from ftsupervise.scheduler.slurm import Slurm

_AGAIN = 1.0  # seconds between two looks at what a group waits for
_ANSWERS = 40.0  # seconds for a run directory to answer before the group is given up
_QUEUE_EVERY = 20.0  # seconds between two looks at the queue
_FRESH = timedelta(seconds=20)  # a page that young is of a group that runs
_ONE_LOOK = 2.0  # seconds for a folder to be read
_LIGHTHOUSE, _FIRST_GROUP = 1, 2  # which submission of the launch: those of the other groups follow
_NO_JOB = "no job of it is in the queue"
_LAST = 900.0  # seconds for the groups to end, once the run is over


class GroupsApart(RunOfGroups):
    """Follows all groups of a run, none of which is in this job."""

    tick = 1.0
    at_a_stop = "this job ends; the groups train on, and the next member serves them"

    def __init__(self, asked: GroupOptions, env: Mapping[str, str], signals: SignalQueue) -> None:
        super().__init__(asked, env, signals, {})
        self._queue, self._until = QueueOfGroups(asked), math.inf

    def look_after(self, group: GroupProcess, over: str) -> None:
        now = _now()
        state, why = state_apart(group, self._queue.of(group.number), over, now)
        group.runs_elsewhere = state is GroupState.RUNNING
        nodes = group.seen.newest.nodes if group.seen.newest is not None and group.runs_elsewhere else ()
        group.row = group.row._replace(nodes=nodes)
        if group.move(state, why, now):
            self.say(f"{group.row.name}: {state.value}{f': {why}' if why else ''}")

    def exit_code(self, over: str) -> int | None:
        if not over:
            return None
        self._until = min(self._until, time.monotonic() + _LAST)
        running = any(group.row.state in (GroupState.RUNNING, GroupState.UNKNOWN) for group in self.groups)
        return None if running and time.monotonic() <= self._until else 0

    def end(self) -> None:
        self._queue.close()


def state_apart(group: GroupProcess, jobs: Sequence[Job] | None, over: str, now: datetime) -> tuple[GroupState, str]:
    """Judge a group: PENDING is not dead, and a queue that does not answer says nothing. An attempt without an end runs as long
    as its page is fresh or its job runs: a command without the guard has no page. ``jobs``: of this group in the queue, None
    where that could not be asked."""
    page = group.seen.page
    newest = group.seen.newest if group.seen.newest is not None and group.seen.newest.ended is None else None
    if newest is not None and page is not None and abs(now - page.at) < _FRESH:
        return GroupState.RUNNING, ""
    run = [job for job in jobs or () if not job.state.waiting and not job.state.ended]
    if newest is not None and any(newest.job_id in (job.id, job.raw_id) for job in run):
        return GroupState.RUNNING, ""
    if newest is not None and jobs is None:
        return GroupState.UNKNOWN, "its last page is old, and the queue could not be asked"
    if over:
        return GroupState.OVER, over
    if why := group.seen.braked:
        return GroupState.STOPPED, why
    if jobs is None:
        return GroupState.UNKNOWN, "the queue could not be asked"
    if run:
        return GroupState.WAITING, "its job starts"
    if jobs:
        return GroupState.WAITING, f"in the queue as job {jobs[0].id} ({jobs[0].reason or jobs[0].state.value})"
    script = in_time(lambda: _to_submit(group.rundir, group.number + _FIRST_GROUP), _ONE_LOOK)
    return GroupState.WAITING, f"{_NO_JOB}{script or ''}"


def _to_submit(rundir: RunDir, submission: int) -> str:
    """Name its script alone: a new launch of the run would start a second copy of each group that runs."""
    script = newest_script(rundir, submission)
    return f": sbatch {shlex.quote(str(script))}" if script is not None else ""


class QueueOfGroups:
    """Finds the jobs of each group by the comments of their launch, in a thread, because Slurm may not answer."""

    def __init__(self, asked: GroupOptions) -> None:
        self._name, self._token, self._user = asked.name, asked.launched, user_name()
        self._jobs: tuple[Job, ...] | None = None
        self._look()
        self._looking = Every(_QUEUE_EVERY, self._look, "queue")

    def of(self, number: int) -> tuple[Job, ...] | None:
        """Return the jobs of this group; None where the queue could not be asked."""
        if self._jobs is None:
            return None
        mark = comment(self._name, f"{self._token}.{number + _FIRST_GROUP}")
        return tuple(
            job for job in self._jobs if job.comment == mark and job.user == self._user
        )  # anybody may write a comment

    def close(self) -> None:
        self._looking.close()

    def _look(self) -> None:
        try:
            self._jobs = Slurm().queue()
        except (Error, OSError):
            self._jobs = None


# A group's own job begins here. The lighthouse may start later than the group: it is waited for, and then this process becomes
# the group's supervisor.


def member_command(asked: GroupOptions, number: int, env: Mapping[str, str]) -> tuple[list[str], dict[str, str]] | str:
    """Return the command that this process becomes, and its environment; or why it is not to start. Raises an error where the
    run directory is not the one that was launched, or cannot be written."""
    name = name_of(number)
    group = asked.rundir.group(name)

    def begin() -> None:
        if asked.launched:
            pinned.refuse(asked.rundir, asked.launched)
        try:
            asked.prepare(number)
        except OSError as error:
            raise from_os_error(error, f"write {group.state}") from None

    until = time.monotonic() + _ANSWERS
    while not answers(group, begin):
        if time.monotonic() >= until:
            raise no_answer(asked.rundir.root)
        time.sleep(_AGAIN)
    begin()
    address, told = "", False
    while asked.timeouts is not None and not (address := lighthouse_address(asked.rundir.replicas)):
        if why := reason_not_to_start(group):
            return why
        if not told:
            told = True
            tell(None, f"group {name} waits for the lighthouse of the run: {asked.rundir.replicas}/lighthouse.json")
        time.sleep(_AGAIN)
    job = ledger.job_id(env)
    given = environment_of(number, asked.count, asked.least, address, asked.timeouts, asked.slowest_step, job)
    return asked.supervisor(number, asked.command), {**for_group(env, given), ENV_GROUP_JOB: "1"}


def _now() -> datetime:
    return datetime.now(timezone.utc)


# ------------------------------------------------------------------------------------------

# Finds the small job that runs the lighthouse where each replica group has jobs of its own, in the queue as it was asked.
#
# While it does not run, no group makes a step, and nobody writes of them.


class LighthouseJob(NamedTuple):
    """``runs`` None: that could not be seen."""

    runs: bool | None
    words: str


def lighthouse_job(rundir: RunDir, jobs: Sequence[Job] | None) -> LighthouseJob:
    """Say where it is. ``jobs``: of the run in the queue, None where that could not be asked."""
    if jobs is None:
        return LighthouseJob(None, "the queue could not be asked for its job")
    mine = [job for job in jobs if link_of(job) == _LIGHTHOUSE and not job.state.ended]
    for job in mine:
        if not job.state.waiting:
            return LighthouseJob(True, f"its job {job.id} is {job.state.value}, and has written nothing for a while")
    if mine:
        return LighthouseJob(
            False, f"its job {mine[0].id} waits in the queue ({mine[0].reason or mine[0].state.value})"
        )
    return LighthouseJob(False, f"{_NO_JOB}{_to_submit(rundir, _LIGHTHOUSE)}")
