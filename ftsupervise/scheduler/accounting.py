"""Asks Slurm's accounting how jobs have ended: nothing else that Slurm keeps tells who has cancelled one.

Many clusters have none, or a database that does not answer: then nothing is known, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ftsupervise.host import bounded
from ftsupervise.host.ownership import shown_user
from ftsupervise.model import Attempt, Cause, CauseKind, JobState
from ftsupervise.printable import printable
from ftsupervise.scheduler import SLURM, kind_of_job
from ftsupervise.scheduler.parse import may_have_run, parse_state
from ftsupervise.scheduler.slurm import clean_environment

_ASK = 3.0  # seconds: what is said without it is true too
_MOST = 100  # jobs of one question


class JobEnded(NamedTuple):
    """How a job has ended. ``by``: the account that cancelled it; "" where it was not cancelled, or nobody knows. ``start``:
    when it has started, in epoch seconds, "" where that was not seen: sacct answers with the newest job of a number, also with
    another account's."""

    state: JobState
    by: str = ""
    start: str = ""


def how_they_ended(jobs: Sequence[str], env: Mapping[str, str]) -> dict[str, JobEnded] | None:
    """Return job -> its end, of those among the last hundred ``jobs`` that have ended; None where there is no answer. Never
    raises."""
    told = _told("State", jobs[-_MOST:], env)
    if told is None:
        return None
    ended = {job: end for job, said in told.items() if (end := _end(said)) is not None}
    starts = _told("Start", tuple(ended), env) or {}
    return {job: end._replace(start=starts.get(job, "")) for job, end in ended.items()}


def _told(field: str, jobs: Sequence[str], env: Mapping[str, str]) -> dict[str, str] | None:
    """Return job -> what sacct says of this field; None where there is no answer."""
    if not jobs:
        return {}
    words = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--format=JobID,{field}",
        f"--jobs={','.join(jobs)}",
    ]
    asking = {key: value for key, value in clean_environment(env).items() if not key.startswith("SACCT_")}
    try:
        done = bounded.run(words, timeout=_ASK, env={**asking, "SLURM_TIME_FORMAT": "%s"})
    except OSError:
        return None
    rows = (line.strip().partition("|") for line in done.stdout.splitlines())
    return {job: said for job, _, said in rows} if done.code == 0 else None


def may_be_known(one: Attempt) -> bool:
    """Return whether the accounting may know more of the end of this attempt than its own record."""
    if one.cause is None or not one.job_id:
        return False
    unsaid = one.cause.kind is CauseKind.LOST and not one.cause.text
    return (one.cause.kind is CauseKind.CANCELLED or unsaid) and kind_of_job(one.job_id) == SLURM


def with_end(one: Attempt, end: JobEnded) -> Attempt:
    """Return the attempt with what the accounting says of the end of its job; as it is where that is about another job, which
    has got its number since."""
    if one.cause is None or (end.start and not may_have_run(end.start, one.started)):
        return one
    return one._replace(cause=_cause(one.cause, end))


def _cause(cause: Cause, end: JobEnded) -> Cause:
    if cause.kind is CauseKind.LOST:
        by = f" by {end.by}" if end.by else ""
        return cause._replace(text=f"Slurm says {end.state.value}{by}")
    if end.state is JobState.CANCELLED:
        return cause._replace(text=f"by {end.by}") if end.by else cause
    kinds = {JobState.PREEMPTED: CauseKind.PREEMPTED, JobState.TIMEOUT: CauseKind.TIME_LIMIT}
    return cause._replace(kind=kinds.get(end.state, CauseKind.TOLD))  # TOLD: somebody has sent its processes the signal


def _end(said: str) -> JobEnded | None:
    """Return what a state such as "CANCELLED by 1000" says; None of a job that has not ended."""
    state = parse_state(said)
    if not state.ended or state is JobState.OTHER:
        return None
    by = said.partition(" by ")[2].strip()
    return JobEnded(state, shown_user(int(by)) if by.isascii() and by.isdigit() else printable(by, 100))
