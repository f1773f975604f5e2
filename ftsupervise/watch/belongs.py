"""Which jobs of the queue are a run's? Pure.

A job belongs to a run when a launch submitted it (comment or id), when the launch was attached to it, or when somebody
submitted it by hand under the run's name. The watch's own job never counts, nor do its siblings: the watchdog published with
the recipe this tool serves was named like the job it watched, and so always found it alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ftsupervise.model import Job
from ftsupervise.records import LaunchRecord

_OURS = "ftsupervise:"
_CRON = "ftsupervise-cron"


def own_job_ids(env: Mapping[str, str]) -> frozenset[str]:
    """The ids of the job this process itself runs in."""
    keys = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_ARRAY_JOB_ID", "FTSUPERVISE_JOB_ID")
    return frozenset(env[key].partition("_")[0] for key in keys if env.get(key))


def by_mark(queue: Iterable[Job]) -> dict[str, tuple[Job, ...]]:
    """The queue by everything a run may know a job by: its name, the run in its comment, its ids."""
    found: dict[str, list[Job]] = {}
    for job in queue:
        marks = {f"name {job.name}", f"id {job.base_id}", f"id {job.raw_id}"}
        if job.comment.startswith(_OURS):
            marks.add(f"name {job.comment.split(':')[1]}")
        for mark in marks:
            found.setdefault(mark, []).append(job)
    return {mark: tuple(jobs) for mark, jobs in found.items()}


def candidates(
    name: str, launches: Iterable[LaunchRecord], queue_by_mark: Mapping[str, tuple[Job, ...]]
) -> tuple[Job, ...]:
    """The few jobs of a large queue that ``jobs_of_run`` need be asked about, in the queue's order as far as it matters."""
    marks = [f"name {name}"]
    for record in launches:
        marks += [f"id {job_id}" for job_id in (*record.job_ids, record.after.partition("_")[0]) if job_id]
    found = {id(job): job for mark in marks for job in queue_by_mark.get(mark, ())}
    return tuple(found.values())


def jobs_of_run(
    name: str, launches: Iterable[LaunchRecord], queue: Iterable[Job], own: frozenset[str]
) -> tuple[Job, ...]:
    """The run's live jobs among ``queue``. ``own``: ids of the watch's own job."""
    queue, launches = tuple(queue), tuple(launches)
    tokens = {record.token for record in launches}
    everything_known = bool(launches) and all(tokens)
    ids = {job_id for record in launches for job_id in (*record.job_ids, record.after.partition("_")[0]) if job_id}
    ids -= own
    watch_has_the_name = any(job.name == name and _is(job, own) for job in queue)
    mark = f"{_OURS}{name}:"

    def belongs(job: Job) -> bool:
        if _is(job, own) or job.comment.startswith(_CRON):
            return False
        if job.base_id in ids or job.raw_id in ids:
            return True
        if job.comment.startswith(mark):  # a run of the same name in another directory has tokens of its own
            return not everything_known or job.comment[len(mark) :].partition(".")[0] in tokens
        by_hand = not job.comment.startswith(_OURS)
        return by_hand and job.name == name and not watch_has_the_name

    return tuple(job for job in queue if belongs(job))


def _is(job: Job, own: frozenset[str]) -> bool:
    return job.base_id in own or job.raw_id in own
