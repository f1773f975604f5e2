"""Which jobs of the queue are a run's?

A job belongs to a run when a launch submitted it (comment or id), when the launch was attached to it, or when somebody
submitted it by hand under the run's name. Names and comments are anybody's to choose: it must be a job of one of the run's own
people, and one submitted by hand must have been submitted where the run lives. The watch's own job never counts, nor do its
siblings: the watchdog published with the recipe this tool serves was named like the job it watched, and so it always found
that job alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ftsupervise.host.files import read_bounded
from ftsupervise.host.users import user_name
from ftsupervise.model import Attempt, Job
from ftsupervise.rundir.launches import LaunchRecord, people
from ftsupervise.rundir.paths import RunDir
from ftsupervise.scheduler.parse import directives

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
    name: str,
    launches: Iterable[LaunchRecord],
    queue_by_mark: Mapping[str, tuple[Job, ...]],
    attempt: Attempt | None = None,
) -> tuple[Job, ...]:
    """The few jobs of a large queue that ``jobs_of_run`` need be asked about, in the queue's order as far as it matters."""
    marks = [f"name {name}"]
    for record in launches:
        marks += [f"id {job_id}" for job_id in (*record.job_ids, record.after.partition("_")[0]) if job_id]
    marks += [f"id {job_id}" for job_id in _of(attempt)]
    found = {id(job): job for mark in marks for job in queue_by_mark.get(mark, ())}
    return tuple(found.values())


class Whose(NamedTuple):
    """What makes a job a run's besides its name. ``users``: whose jobs may be; ``root``: the run directory; ``places``: where
    it was launched from (asked only if need be)."""

    users: frozenset[str]
    root: str
    places: Callable[[], frozenset[str]] = frozenset

    def has_place(self, directory: str) -> bool:
        """Was a job with this working directory submitted for the run? It runs above the run directory, in it, or where
        the run was launched. One that is not known is not held against it."""
        if directory in ("", self.root) or directory.startswith(self.root + "/"):
            return True
        above = directory.rstrip("/")
        return (above != "" and self.root.startswith(above + "/")) or directory in self.places()


def jobs_of_run(
    name: str,
    launches: Iterable[LaunchRecord],
    queue: Iterable[Job],
    own: frozenset[str],
    whose: Whose,
    attempt: Attempt | None = None,
) -> tuple[Job, ...]:
    """The run's live jobs among ``queue``. ``own``: ids of the watch's own job; ``attempt``: the run's newest, whose job is
    the run's also where somebody wrapped ``ftsupervise run`` in a script of their own."""
    queue, launches = tuple(queue), tuple(launches)
    tokens = {record.token for record in launches}
    everything_known = bool(launches) and all(tokens)
    submitted = {job_id for record in launches for job_id in record.job_ids}.union(_of(attempt)) - own
    attached = {record.after.partition("_")[0] for record in launches} - own - {""}
    watch_has_the_name = any(job.name == name and _is(job, own) for job in queue)
    mark = f"{_OURS}{name}:"

    def belongs(job: Job) -> bool:
        if _is(job, own) or job.comment.startswith(_CRON):
            return False
        if _is(job, frozenset(attached)):  # by its owner's word, whoever's job that is
            return True
        if job.user not in whose.users:
            return False
        if _is(job, frozenset(submitted)):
            return True
        if job.comment.startswith(mark):  # a run of the same name in another directory has tokens of its own
            return not everything_known or job.comment[len(mark) :].partition(".")[0] in tokens
        by_hand = not job.comment.startswith(_OURS)
        return by_hand and job.name == name and not watch_has_the_name and whose.has_place(job.directory)

    return tuple(job for job in queue if belongs(job))


def whose_run(rundir: RunDir, launches: Iterable[LaunchRecord], also: Iterable[str] = ()) -> Whose:
    """Of the run in ``rundir``; its people, the account that asks, and ``also``."""
    launches = tuple(launches)

    def places() -> frozenset[str]:
        found = (_launched_from(rundir, record.number) for record in launches)
        return frozenset(place for place in found if place)

    users = frozenset({*people(rundir, launches), user_name(), *also})
    return Whose(users, str(rundir.root.absolute()), places)


def _launched_from(rundir: RunDir, number: int) -> str:
    """The working directory that a launch gave its jobs; "" if its script cannot be read."""
    folder = rundir.launches / f"{number:04d}"
    for name in ("train.sbatch", "train-1.sbatch"):
        try:
            script = read_bounded(folder / name, 1_000_000).decode("utf-8", "replace")
        except OSError:
            continue
        return directives(script).get("chdir", "")
    return ""


def _of(attempt: Attempt | None) -> tuple[str, ...]:
    return (attempt.job_id.partition("_")[0],) if attempt is not None and attempt.job_id else ()


def _is(job: Job, own: frozenset[str]) -> bool:
    return job.base_id in own or job.raw_id in own
