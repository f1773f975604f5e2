"""Says whether a job belongs to a run. The one answer for all rooms: watch, status, launch, the brake and the excluded nodes.

A job is a run's when one of the run's own people submitted it and a launch of the run did so (the launch's token stands in
the comment, or, where no token stands there, its id on the launch's page), or when the run's newest attempt runs in it. Two
runs may have the same name, in two directories: their tokens differ. A number alone is no identity: a cluster that was built
anew gives the same ones out again, and the job that has it now may be another run's.

For some jobs this is unknown: somebody submitted them by hand under the run's name, a launch was attached to them, or the page
of the launch cannot be read. They count where the question is whether the run is alive, and are never changed.

The watch's own job never counts because of its name, nor do its siblings: the watchdog published with the recipe this tool
serves was named like the job it watched, and so it always found that job alive.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from enum import Enum
from typing import NamedTuple

from ftsupervise.host.files import read_bounded
from ftsupervise.host.ownership import user_name
from ftsupervise.model import Attempt, Job, JobState
from ftsupervise.printable import printable
from ftsupervise.rundir.launches import LaunchRecord, of_this_account, people
from ftsupervise.rundir.ledger import newest
from ftsupervise.rundir.paths import RunDir
from ftsupervise.scheduler.parse import directives

_MARK = "ftsupervise"
_CRON = "ftsupervise-cron:"
_CLOCKS = timedelta(minutes=1)  # by which the clocks of two hosts may differ
_HELD = " held: "  # in a comment: what follows is the reason for which a member has put the job on hold


class Ownership(Enum):
    OURS = "ours"
    UNKNOWN = "unknown"  # it may be the run's
    NOT_OURS = "not ours"


def comment(name: str, token: str) -> str:
    """Return the ``--comment`` of a job: the run's name, and the token of the launch that submits it."""
    return f"{_MARK}:{name}:{token}"


def _read_comment(text: str) -> tuple[str, str]:
    """Return (the run's name, the launch's token without the number of a link); ("", "") for a comment that is not ours."""
    mark, _, rest = text.partition(_HELD)[0].partition(":")
    name, _, token = rest.rpartition(":")
    return (name, token.partition(".")[0]) if mark == _MARK else ("", "")


def run_in_comment(job: Job) -> str:
    """Return the name of the run that ``job`` was launched for, by the comment of our launches; "" for any other job."""
    return _read_comment(job.comment)[0]


def link_of(job: Job) -> int:
    """Return which submission of its launch ``job`` is, from 1, by the comment of our launches; 0 where it was the only one, or
    for any other job."""
    number = job.comment.partition(_HELD)[0].rpartition(":")[2].partition(".")[2] if run_in_comment(job) else ""
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else 0


def token_of(job: Job) -> str:
    """Return the token of the launch that submitted ``job``; "" for any other job."""
    return _read_comment(job.comment)[1]


def held_comment(job: Job, why: str) -> str:
    """Return the comment of ``job`` with the reason for which a member has put it on hold, where no page could be written."""
    text = " ".join(printable(why, 300).split())
    return f"{job.comment.partition(_HELD)[0]}{_HELD}{text}"


def comment_without_hold(job: Job) -> str:
    """Return the comment of ``job`` as its launch made it."""
    return job.comment.partition(_HELD)[0]


def why_held(job: Job) -> str:
    """Return that reason; "" where there is none."""
    return printable(job.comment.partition(_HELD)[2], 400)


def own_job_ids(env: Mapping[str, str]) -> frozenset[str]:
    """Return the ids of the job this process itself runs in, of an array member its own and the array's."""
    keys = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_ARRAY_JOB_ID", "FTSUPERVISE_JOB_ID")
    return frozenset(env[key].partition("_")[0] for key in keys if env.get(key))


class RunIdentity(NamedTuple):
    """The marks of a run's jobs. ``root``: the run directory; ``places``: where it was launched from (asked only if
    need be); ``watch``: ids of the job of the watch that asks."""

    name: str
    root: str
    users: frozenset[str]  # whose jobs may be the run's
    tokens: frozenset[str]  # of its launches
    submitted: frozenset[str]  # ids of jobs that its launches submitted, or that its newest attempt runs in
    attached: frozenset[str] = frozenset()  # ids of jobs that its launches were to wait for
    complete: bool = False  # true if there are launches, and all could be read
    watch: frozenset[str] = frozenset()
    places: Callable[[], frozenset[str]] = frozenset
    attempt: tuple[str, datetime] | None = None  # the job of the newest attempt, and when that began

    def ownership(self, job: Job, *, watch_has_the_name: bool = False) -> Ownership:
        """Return whether ``job`` is this run's, may be, or is not.

        ``watch_has_the_name``: the job of the watch that asks is named like the run.
        """
        name, token = _read_comment(job.comment)
        if job.comment.startswith(_CRON):
            return Ownership.NOT_OURS
        if job.user in self.users and token in self.tokens:
            return Ownership.OURS
        if job.user in self.users and not token and _is(job, self.submitted):  # else its number was given out anew
            return Ownership.UNKNOWN if self._began_before(job) else Ownership.OURS
        if _is(job, self.attached):  # its owner attached it, and it may be anybody's job
            return Ownership.UNKNOWN
        if job.user not in self.users or _is(job, self.watch):
            return Ownership.NOT_OURS
        if token:  # a job of another launch, which may be the one that could not be read
            return Ownership.UNKNOWN if name == self.name and not self.complete else Ownership.NOT_OURS
        by_hand = job.name == self.name and not watch_has_the_name and self._has_place(job.directory)
        return Ownership.UNKNOWN if by_hand else Ownership.NOT_OURS

    def _began_before(self, job: Job) -> bool:
        """Return whether the newest attempt began in a job of that number before this one has started.

        It may be another one, of a cluster whose numbers began anew, or the same one that was requeued.
        """
        if self.attempt is None or job.start_time is None or job.state is not JobState.RUNNING:
            return False
        job_id, began = self.attempt
        return _is(job, frozenset((job_id,))) and job.start_time > began + _CLOCKS

    def _has_place(self, directory: str) -> bool:
        """Return whether a job with this working directory was submitted for the run.

        It runs above the run directory, in it, or where the run was launched. An unknown directory is not held against
        it.
        """
        if directory in ("", self.root) or directory.startswith(self.root + "/"):
            return True
        above = directory.rstrip("/")
        return (above != "" and self.root.startswith(above + "/")) or directory in self.places()


def identify(
    rundir: RunDir,
    name: str,
    launches: Iterable[LaunchRecord],
    attempt: Attempt | None = None,
    *,
    member: frozenset[str] = frozenset(),
    watch: frozenset[str] = frozenset(),
) -> RunIdentity:
    """Return the marks of the jobs of the run in ``rundir``.

    ``attempt``: its newest, whose job is the run's also where somebody wrapped ``ftsupervise run`` in a script of their
    own. ``member``: ids of the asking process's own job, where that is one of the run's; ``watch``: where it is not.
    """
    launches = tuple(launches)
    of_attempt = {attempt.job_id.partition("_")[0]} if attempt is not None else set()
    return RunIdentity(
        name=name,
        root=str(rundir.root.absolute()),
        users=frozenset({*people(rundir, launches), user_name()}),
        tokens=frozenset(record.token for record in launches) - {""},
        submitted=frozenset({job_id for record in launches for job_id in record.job_ids} | of_attempt | member) - {""},
        attached=frozenset(record.after.partition("_")[0] for record in launches) - watch - {""},
        complete=bool(launches) and all(record.token or not record.written for record in launches),
        watch=watch,
        attempt=None if attempt is None else (attempt.job_id, attempt.started),
        places=lambda: frozenset(_launched_from(rundir, record.number) for record in launches) - {""},
    )


def identify_to_change(rundir: RunDir, launches: Iterable[LaunchRecord], member: frozenset[str]) -> RunIdentity:
    """For code that changes jobs because the run directory names them: in somebody else's directory, whose owner may write any
    job's number there, only what this account wrote itself is believed. Raises OSError."""
    attempt = newest(rundir) if rundir.root.stat().st_uid == os.geteuid() else None
    return identify(rundir, "", of_this_account(rundir, launches), attempt, member=member)


def jobs_of_run(run: RunIdentity, queue: Iterable[Job], *, certain: bool = False) -> tuple[Job, ...]:
    """Return the run's jobs in ``queue``, in its order. Jobs that may be the run's are among them, unless ``certain``."""
    queue = tuple(queue)
    wanted = {Ownership.OURS} if certain else {Ownership.OURS, Ownership.UNKNOWN}
    has_name = any(job.name == run.name and _is(job, run.watch) for job in queue)
    return tuple(job for job in queue if run.ownership(job, watch_has_the_name=has_name) in wanted)


def by_mark(queue: Iterable[Job]) -> dict[str, tuple[Job, ...]]:
    """Return the queue by everything a run may know a job by: its name, the run and the token in its comment, its ids."""
    found: dict[str, list[Job]] = {}
    for job in queue:
        name, token = _read_comment(job.comment)
        marks = {f"name {job.name}", f"id {job.base_id}", f"id {job.raw_id}"}
        for mark in marks | ({f"name {name}", f"token {token}"} if token else set()):
            found.setdefault(mark, []).append(job)
    return {mark: tuple(jobs) for mark, jobs in found.items()}


def candidates(run: RunIdentity, queue_by_mark: Mapping[str, tuple[Job, ...]]) -> tuple[Job, ...]:
    """Return the few jobs of a large queue that ``jobs_of_run`` has to check."""
    ids = sorted(run.submitted | run.attached)
    marks = [f"name {run.name}", *(f"token {token}" for token in sorted(run.tokens)), *(f"id {one}" for one in ids)]
    found = {id(job): job for mark in marks for job in queue_by_mark.get(mark, ())}
    return tuple(found.values())


def _launched_from(rundir: RunDir, number: int) -> str:
    """Return the working directory that a launch gave its jobs; "" if its script cannot be read."""
    folder = rundir.launches / f"{number:04d}"
    for name in ("train.sbatch", "train-1.sbatch"):
        try:
            script = read_bounded(folder / name, 1_000_000).decode("utf-8", "replace")
        except OSError:
            continue
        return directives(script).get("chdir", "")
    return ""


def _is(job: Job, ids: frozenset[str]) -> bool:
    return job.base_id in ids or job.raw_id in ids
