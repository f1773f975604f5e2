"""A run as one row: what ``status`` shows of it, as plain values."""

import os
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, NamedTuple

from ftsupervise.report import step_of
from ftsupervise.report.queues import QueueSeen
from ftsupervise.report.reading import RunReading
from ftsupervise.report.verdict import verdict_of
from ftsupervise.rundir.heartbeat_page import watchers
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.reached import counted
from ftsupervise.rundir.watched import FiringAlert, WatchFound, read_found

if TYPE_CHECKING:
    from ftsupervise.model import Job


_UNSTEADY = 0.2  # of the usual rate: what differs less is the usual rate


class RunRow(NamedTuple):
    """One run as ``status`` shows it. A value that is not known is None, or ""."""

    name: str
    directory: Annotated[str, 4096] = ""
    verdict: str = "UNKNOWN"
    why: Annotated[str, 1000] = ""
    step: int | None = None
    last_step: int | None = None
    rate: float | None = None  # steps a second
    usual: float | None = None
    done_at: datetime | None = None  # when the last step will be made, at ``pace_of`` its rates
    loss: float | None = None
    phase: str = ""
    seen_at: datetime | None = None  # the newest sign of its ranks
    saved: int | None = None  # the step of the newest checkpoint
    saved_at: datetime | None = None
    restarts: int = 0  # in the last day
    firing: int = 0  # alerts
    alerts: tuple[FiringAlert, ...] = ()  # the worst of them
    disk: str = ""  # forecast
    groups_away: str = ""  # which replica groups are away, in words
    attempts: int = 0  # that were made
    members_left: int | None = None  # jobs or array members that wait to take over
    ends_at: datetime | None = None  # when Slurm ends the job that runs
    watched_at: datetime | None = None  # the last tick of the watch
    watched_next: datetime | None = None
    watch_late: bool = False
    here: bool = False  # of the directory, or the job, in which this was asked


def row_of(run: RunReading, queue: QueueSeen, found: WatchFound | None, tick: datetime | None, *, late: bool) -> RunRow:
    verdict, why = verdict_of(run, queue.jobs, queue.blind)
    page, last, step, now = run.page, run.last, step_of(run), run.at
    beat = max((beat.at for beat in run.beats), default=None)
    runs = verdict not in ("FINISHED", "STOPPED", "GONE", "NEW", "WAITING")
    rate = (page.rate if page is not None else None) if runs else None
    usual = page.usual if page is not None else None
    goal = page.last_step if page is not None else None
    pace = pace_of(rate, usual)
    left = goal - step if goal is not None and step is not None else None
    done = now + timedelta(seconds=min(left / pace, 3e8)) if left is not None and left > 0 and pace and runs else None
    waiting = [job for job in queue.jobs or () if job.state.waiting]
    return RunRow(
        name=run.name,
        directory=str(run.rundir.root),
        verdict=verdict,
        why=why,
        step=step,
        last_step=goal,
        rate=rate,
        usual=usual,
        done_at=done,
        loss=_loss(run),
        phase=page.phase if page is not None and runs else "",
        seen_at=max((at for at in (beat, page.at if page is not None else None) if at is not None), default=None),
        saved=_newest_saved(run),
        saved_at=page.saved_at if page is not None else None,
        restarts=run.restarts,
        firing=found.firing if found is not None else 0,
        alerts=found.alerts if found is not None else (),
        disk=found.disk if found is not None else "",
        groups_away=_groups(run) if runs else "",
        attempts=last.number if last is not None else 0,
        members_left=None if queue.jobs is None else members(waiting),
        ends_at=next((job.end_time for job in queue.jobs or () if not job.state.waiting and job.end_time), None),
        watched_at=found.at if found is not None else None,
        watched_next=tick,
        watch_late=late,
    )


def pace_of(rate: float | None, usual: float | None) -> float | None:
    """The steps a second to reckon with: the usual ones, unless the last minute was much slower or faster. 0: it stands."""
    if rate is None or usual is None:
        return usual if rate is None else rate
    return usual if abs(rate - usual) <= _UNSTEADY * usual else rate


def _groups(run: RunReading) -> str:
    if not os.path.lexists(run.rundir.replicas):  # what reads them is imported where there are some
        return ""
    from ftsupervise.report.groups import running_words

    return running_words(run.rundir, run.at)


def _loss(run: RunReading) -> float | None:
    told = counted(run.beats).loss
    return told if told is not None or run.page is None else run.page.loss


def _newest_saved(run: RunReading) -> int | None:
    told = run.last.saved if run.last is not None else None
    page = run.page.saved if run.page is not None else None
    return max((step for step in (told, page) if step is not None), default=None)


def watch_of(rundir: RunDir, now: datetime) -> tuple[WatchFound | None, datetime | None, bool]:
    """What the last tick found, when the next one is due, and whether one is missing."""
    found = read_found(rundir)
    try:
        there = [one for one in watchers(rundir) if one.every is not None]
    except OSError:
        there = []
    late = bool(there) and all(one.late_by(now) is not None for one in there)
    due = min((one.at + one.every for one in there if one.every is not None), default=None)
    return found, due, late


def members(waiting: Sequence["Job"]) -> int:
    """How many jobs or members of arrays these are."""
    if not waiting:
        return 0
    from ftsupervise.scheduler.parse import array_size

    return sum(array_size(job.id) for job in waiting)
