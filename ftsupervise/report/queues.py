"""Asks for the jobs of many runs by one request to each scheduler that they use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def ask_queues(runs: Sequence[RunReading], env: Mapping[str, str], *, always: str = "") -> QueuesSeen:
    """Ask each scheduler once. ``always``: one that is asked even where no run needs it."""
    kinds = [_kind(run) for run in runs]
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


def _kind(run: RunReading) -> str:
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
