"""Adds to the attempts of runs what Slurm's accounting alone knows: who cancelled their jobs, or that nobody did.

It stands alone because the overview and the page of one run ask it, each once for all its runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ftsupervise.model import Cause, CauseKind, JobState

if TYPE_CHECKING:
    from ftsupervise.model import Attempt
    from ftsupervise.report.reading import RunReading
    from ftsupervise.scheduler.accounting import JobEnded

_ASKED = 20  # of the newest attempts of a run


def with_ends(runs: Sequence[RunReading], env: Mapping[str, str]) -> list[RunReading]:
    """Return ``runs``, their attempts with what Slurm's accounting knows of those that were asked to stop, or left no record.
    One question for all, and none where no attempt ended so."""
    asked = [{one.number: one.job_id for one in _last_of_jobs(run.attempts) if _may_be_known(one)} for run in runs]
    jobs = tuple(dict.fromkeys(job for of_run in asked for job in of_run.values()))
    if not jobs:
        return list(runs)
    from ftsupervise.scheduler.accounting import how_they_ended

    known = how_they_ended(jobs, env)
    ends = ({number: known[job] for number, job in of_run.items() if job in known} for of_run in asked)
    return [_told(run, of_run) for run, of_run in zip(runs, ends, strict=True)]


def _told(run: RunReading, ends: Mapping[int, JobEnded]) -> RunReading:
    """``ends``: those of the jobs of some attempts, by their numbers."""
    if not ends:
        return run
    told = (one._replace(cause=_cause(one, ends[one.number])) if one.number in ends else one for one in run.attempts)
    return run._replace(attempts=tuple(told))


def _last_of_jobs(attempts: Sequence[Attempt]) -> tuple[Attempt, ...]:
    """Return the last attempt of each job: the end of the job is none of those before it."""
    return tuple({one.job_id: one for one in attempts[-_ASKED:]}.values())


def _may_be_known(one: Attempt) -> bool:
    if one.cause is None or not one.job_id:
        return False
    from ftsupervise.scheduler import SLURM, kind_of_job

    unsaid = one.cause.kind is CauseKind.LOST and not one.cause.text
    return (one.cause.kind is CauseKind.CANCELLED or unsaid) and kind_of_job(one.job_id) == SLURM


def _cause(one: Attempt, end: JobEnded) -> Cause | None:
    cause = one.cause
    if cause is None:
        return None
    if cause.kind is CauseKind.LOST:
        by = f" by {end.by}" if end.by else ""
        return cause._replace(text=f"Slurm says {end.state.value}{by}")
    if end.state is JobState.CANCELLED:
        return cause._replace(text=f"by {end.by}") if end.by else cause
    kinds = {JobState.PREEMPTED: CauseKind.PREEMPTED, JobState.TIMEOUT: CauseKind.TIME_LIMIT}
    return cause._replace(kind=kinds.get(end.state, CauseKind.TOLD))  # TOLD: somebody has sent its processes the signal
