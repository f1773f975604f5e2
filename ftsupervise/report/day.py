"""The last day of a run, as its messages draw it: from the ledger's newest attempts and the record of steps."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING

from ftsupervise.alerts.last_day import KINDS, PARTS, AboutRun, LastDay
from ftsupervise.report import Status
from ftsupervise.report.account import kinds_over
from ftsupervise.report.detail import account_of
from ftsupervise.report.placing import placed
from ftsupervise.report.reading import read_run
from ftsupervise.report.verdict import verdict_of
from ftsupervise.rundir.ledger import backwards, numbers
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.steps import StepRecord, read_steps
from ftsupervise.rundir.tracker import read_tracker

if TYPE_CHECKING:
    from ftsupervise.model import Job

_NEWEST = 200  # attempts that are read: a message is not to wait for a ledger of thousands
_YOUNG = timedelta(minutes=30)  # a younger run has no picture
_DAY = 86400.0


def last_day(rundir: RunDir, jobs: tuple[Job, ...] | None, now: datetime) -> LastDay | None:
    """Return the last day, or None where there is nothing to draw yet. Raises Error and OSError where it cannot be read."""
    run = read_run(rundir, now, row=True)
    if run.last is None:
        return None
    run = run._replace(attempts=tuple(islice(backwards(rundir), _NEWEST))[::-1])
    account = account_of(Status(run, *verdict_of(run, jobs, ""), jobs, ""))
    end = account.until.timestamp()
    begin = max(account.since.timestamp(), end - _DAY)
    if end - begin < _YOUNG.total_seconds():
        return None
    record = read_steps(rundir)
    drawn = placed(account.stretches, record).stretches
    kinds = tuple(kind.value if kind is not None else "unknown" for kind in kinds_over(drawn, begin, end, PARTS))
    shares = {kind.value: share for kind, share in account.within(begin, end).shares().items()}
    return LastDay(
        since=account.until - timedelta(seconds=end - begin),
        until=account.until,
        kinds=kinds,
        rates=rates_over(record, begin, end, PARTS),
        shares=tuple((kind, shares.get(kind, 0.0)) for kind in KINDS),
    )


def about_run(rundir: RunDir, jobs: tuple[Job, ...] | None, now: datetime) -> AboutRun:
    """Return what messages about a run carry besides. Raises as ``last_day`` does."""
    page = read_tracker(rundir, max(numbers(rundir), default=0))
    return AboutRun(last_day(rundir, jobs, now), page.url if page is not None else "")


def rates_over(record: StepRecord, begin: float, end: float, count: int) -> tuple[float | None, ...]:
    """Return steps a second in each of ``count`` equal parts; None before the record begins. A span of the record that lies in
    several parts is shared out among them."""
    size = (end - begin) / count
    made: list[float] = [0.0] * count
    for span in record.spans:
        low, high = span.number * record.every, (span.number + 1) * record.every
        for index in range(max(0, int((low - begin) // size)), min(count - 1, int((high - begin) // size)) + 1):
            left, right = begin + index * size, begin + (index + 1) * size
            made[index] += span.made * max(0.0, min(high, right) - max(low, left)) / record.every
    first = record.spans[0].number * record.every if record.spans else end
    return tuple(None if begin + (index + 1) * size <= first else steps / size for index, steps in enumerate(made))
