"""The last day of a run, as its messages draw it: from the ledger's newest attempts and the record of steps."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING

from ftsupervise.alerts.last_day import KINDS, PARTS, AboutRun, LastDay
from ftsupervise.printable import printable
from ftsupervise.report import Status
from ftsupervise.report.account import kinds_over
from ftsupervise.report.detail import account_of
from ftsupervise.report.placing import placed
from ftsupervise.report.queues import QueueSeen
from ftsupervise.report.reading import RunReading, read_run
from ftsupervise.report.row import RunRow, beside_running, row_of
from ftsupervise.report.verdict import verdict_of
from ftsupervise.rundir.ledger import backwards, numbers
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import StepRecord, read_steps
from ftsupervise.rundir.tracker import read_tracker
from ftsupervise.units import show_duration, show_percent

if TYPE_CHECKING:
    from ftsupervise.model import Job

_NEWEST = 200  # attempts that are read: a message is not to wait for a ledger of thousands
_YOUNG = timedelta(minutes=30)  # a younger run has no picture
_DAY = 86400.0
_FACT = 200  # characters


def last_day(
    rundir: RunDir, jobs: tuple[Job, ...] | None, now: datetime, run: RunReading | None = None
) -> LastDay | None:
    """Return the last day, or None where there is nothing to draw yet. ``run``: as it was just read. Raises Error and OSError
    where it cannot be read."""
    run = read_run(rundir, now, row=True) if run is None else run
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
    run = read_run(rundir, now, row=True)
    trouble = run.loss_trouble.kind if run.loss_trouble is not None else ""
    facts = facts_of(row_of(run, QueueSeen(jobs)), jobs, now, trouble)
    return AboutRun(last_day(rundir, jobs, now, run), page.url if page is not None else "", facts)


def facts_of(
    row: RunRow, jobs: tuple[Job, ...] | None, now: datetime, trouble: str = ""
) -> tuple[tuple[str, str], ...]:
    """Return how the run is now, for a reader who has nothing else at hand: what is not known is left out. ``trouble``: what
    kind of trouble its loss is in."""
    of = f" of {row.last_step:,} ({show_percent(row.step / row.last_step)})" if row.step and row.last_step else ""
    running = [job for job in jobs or () if not job.state.waiting and not job.state.ended]
    job = next(iter([*running, *(jobs or ())]), None)
    left = f", {show_duration((row.ends_at - now).total_seconds())} left" if row.ends_at and row.ends_at > now else ""
    eta = (
        f"{row.done_at:%Y-%m-%d %H:%M} UTC, in {show_duration((row.done_at - now).total_seconds())}"
        if row.done_at
        else ""
    )
    state = [row.verdict, *(words for words, _ in beside_running(row, trouble))]
    found = (
        ("now", f"{', '.join(state)}{f' ({row.why})' if row.why else ''}"),
        ("step", f"{row.step:,}{of}" if row.step is not None else ""),
        ("loss", row.loss_trouble or (f"{row.loss:.4g}" if row.loss is not None else "")),
        ("ETA", eta),
        ("job", f"{job.id} is {job.state.value}{left if running else ''}" if job is not None else ""),
    )
    return tuple((name, printable(text, _FACT)) for name, text in found if text)


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
