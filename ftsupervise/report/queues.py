"""Asks for the jobs of many runs by one request to each scheduler that they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.errors import Error
from ftsupervise.report.reading import RunReading
from ftsupervise.rundir.launches import people

if TYPE_CHECKING:
    from ftsupervise.model import Job


class QueueSeen(NamedTuple):
    """The jobs of one run. ``jobs`` None: the queue could not be asked, and ``blind`` says why."""

    jobs: tuple[Job, ...] | None = ()
    blind: str = ""


class QueuesSeen(NamedTuple):
    of: tuple[QueueSeen, ...]  # of each run, in order
    warnings: tuple[str, ...] = ()  # of Slurm's commands beside their answers
    others: tuple[Job, ...] = ()  # jobs of runs that are none of these, by the comment of our launches


class JobsLeft(NamedTuple):
    """The job that runs and those that wait for it, of a run of which one runs at a time."""

    ends_at: datetime  # the one that runs
    each: float  # seconds that it has in all, and so each of the others
    waiting: int
    last: str  # id of the last of them, for ``launch --after``

    def seconds(self, now: datetime) -> float:
        """Return for how long they run from now on, all together; waits between them are not counted."""
        return max(0.0, (self.ends_at - now).total_seconds()) + self.waiting * self.each


def jobs_left(jobs: Sequence[Job]) -> JobsLeft | None:
    """Return None where it cannot be told: no job runs, or several do, or its time limit is not known, or others do not wait
    for their turn alone."""
    from ftsupervise.scheduler.parse import array_size, is_held

    runs = [job for job in jobs if not job.state.waiting and not job.state.ended]
    waiting = [job for job in jobs if job.state.waiting]
    if len(runs) != 1 or runs[0].start_time is None or runs[0].end_time is None:
        return None
    if any(is_held(job.reason) for job in waiting):
        return None
    last = max((*runs, *waiting), key=lambda job: (len(job.base_id), job.base_id))
    each = (runs[0].end_time - runs[0].start_time).total_seconds()
    return JobsLeft(runs[0].end_time, each, sum(array_size(job.id) for job in waiting), last.base_id)


def ask_queues(runs: Sequence[RunReading], env: Mapping[str, str], *, always: str = "") -> QueuesSeen:
    """Ask each scheduler once. ``always``: one that is asked even where no run needs it."""
    kinds = [scheduler_of(run) for run in runs]
    wanted = dict.fromkeys([kind for kind in kinds if kind] + ([always] if always else []))
    if not wanted:
        return QueuesSeen(tuple(QueueSeen() for _ in runs))
    from ftsupervise.scheduler.ownership import by_mark, candidates, identify, jobs_of_run, own_job_ids, run_in_comment

    answers: dict[str, QueueSeen] = {}
    warnings: set[str] = set()
    for kind in wanted:
        users = [user for run, of in zip(runs, kinds, strict=True) if of == kind for user in _people(run)]
        answers[kind] = _ask(kind, users, env, warnings)
    marks = {kind: by_mark(seen.jobs or ()) for kind, seen in answers.items()}
    mine, found = own_job_ids(env), list[QueueSeen]()
    taken: set[str] = set()
    for run, kind in zip(runs, kinds, strict=True):
        seen = answers[kind] if kind else QueueSeen()
        if seen.jobs:
            known_by = identify(run.rundir, run.name, run.records, run.last, watch=mine)
            jobs = jobs_of_run(known_by, candidates(known_by, marks[kind]))
            taken.update(job.id for job in jobs)
            seen = QueueSeen(jobs)
        found.append(seen)
    every = (job for seen in answers.values() for job in seen.jobs or ())
    others = tuple(job for job in every if job.id not in taken and run_in_comment(job))
    return QueuesSeen(tuple(found), tuple(sorted(warnings)), others)


def scheduler_of(run: RunReading) -> str:
    """Return the scheduler whose queue its jobs are in; "" where it has none."""
    if run.records:
        return run.records[-1].scheduler or "auto"
    if run.last is None or not run.last.job_id:
        return ""
    from ftsupervise.scheduler import kind_of_job

    return kind_of_job(run.last.job_id)


def _people(run: RunReading) -> tuple[str, ...]:
    return people(run.rundir, run.records)


def _ask(kind: str, users: Sequence[str], env: Mapping[str, str], warnings: set[str]) -> QueueSeen:
    from ftsupervise.scheduler import open_scheduler

    try:
        scheduler = open_scheduler(kind, env)
        jobs = scheduler.queue(users=tuple(dict.fromkeys(users)))
    except Error as error:
        return QueueSeen(None, error.message)
    warnings |= scheduler.warnings
    return QueueSeen(jobs)
