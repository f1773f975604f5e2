"""The last days of several runs in one report: what each trained, what interrupted them, what cost most over all of them.

A directory that does not answer is a row that says so, and delays no other for longer than some seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ftsupervise.errors import Error
from ftsupervise.host.in_time import in_time
from ftsupervise.printable import printable
from ftsupervise.report import Status
from ftsupervise.report.account import KEPT_OUT, Ettr, Spent, Stretch, TimeAccount
from ftsupervise.report.costs import CostItem, cost_items
from ftsupervise.report.detail import account_of, runs_now
from ftsupervise.report.everything import believed_settings, harmless
from ftsupervise.report.headline import Headline, RunPresent, faults_lately, headline_of, job_that_runs, restarts_hangs
from ftsupervise.report.incidents import RunIncident, incidents, no_job_waits, standing
from ftsupervise.report.observed import observes
from ftsupervise.report.placing import placed
from ftsupervise.report.queues import ask_queues
from ftsupervise.report.reading import RunReading, read_own
from ftsupervise.report.row import FINE, RunRow, need_of
from ftsupervise.report.rows import overview
from ftsupervise.report.slow import paces_of, slow_periods
from ftsupervise.report.who_ended import with_ends
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import StepRecord, read_steps
from ftsupervise.rundir.step_rates import paces, usual_rate

if TYPE_CHECKING:
    from ftsupervise.model import Job

DAYS = 7
_WITHIN = 4.0  # seconds for a run
_AT_ALL = 60.0  # seconds for all of them
_NODES = 10
_T = TypeVar("_T")


class WeekRow(NamedTuple):
    """A run that had time in these days, or could not be read (``problem``)."""

    row: RunRow
    head: Headline
    account: TimeAccount | None = None  # of these days
    incidents: tuple[RunIncident, ...] = ()  # whose cost lies in these days, at least in part
    costs: tuple[CostItem, ...] = ()
    steps: int | None = None  # made, those made again not counted
    problem: str = ""
    drawn: tuple[Stretch, ...] = ()  # the account since the launch, as pictures show it

    @property
    def needs_a_look(self) -> bool:
        """Should a person look at it now? ``status`` sorts its rows by the same rule."""
        return bool(self.problem) or need_of(self.row) < FINE or self.head.tone == "bad"

    @property
    def faults(self) -> int:
        return sum(1 for one in self.incidents if not one.planned)


class NodeFaults(NamedTuple):
    name: str
    faults: int
    runs: tuple[str, ...]


class WeekReport(NamedTuple):
    begin: datetime
    end: datetime
    rows: tuple[WeekRow, ...]
    idle: int = 0  # runs that had no time in these days

    @property
    def seconds(self) -> dict[Spent, float]:
        """Over all runs."""
        found = dict.fromkeys(Spent, 0.0)
        for one in self.rows:
            for kind, seconds in one.account.seconds().items() if one.account is not None else ():
                found[kind] += seconds
        return found

    def goodput(self) -> Ettr | None:
        """The training of all runs by all their time."""
        return self._ratio(frozenset())

    def ettr(self) -> Ettr | None:
        """Meta's, over all runs: their training by all their time but that in which they were kept out."""
        return self._ratio(KEPT_OUT)

    def _ratio(self, without: frozenset[Spent]) -> Ettr | None:
        spent = self.seconds
        whole = sum(seconds for kind, seconds in spent.items() if kind not in without)
        return (
            None
            if whole <= 0
            else Ettr(spent[Spent.TRAIN] / whole, (spent[Spent.TRAIN] + spent[Spent.UNKNOWN]) / whole)
        )

    def costs(self) -> tuple[CostItem, ...]:
        """Return the costs of all runs together, the costliest first."""
        by_name: dict[str, list[CostItem]] = {}
        for item in (item._replace(run=one.row.name) for one in self.rows for item in one.costs):
            by_name.setdefault(item.name, []).append(item)
        return tuple(sorted(map(_together, by_name.values()), key=lambda item: -item.seconds))

    def nodes(self) -> tuple[NodeFaults, ...]:
        """The nodes that most faults speak against, over all runs; a program's own error or a full disk speaks against none."""
        seen: dict[str, list[str]] = {}
        for one in self.rows:
            for name in (node for fault in one.incidents if fault.blames for node in fault.nodes):
                seen.setdefault(name, []).append(one.row.name)
        found = [NodeFaults(name, len(runs), tuple(dict.fromkeys(runs))) for name, runs in seen.items()]
        return tuple(sorted(found, key=lambda node: (-node.faults, node.name))[:_NODES])


def _together(items: Sequence[CostItem]) -> CostItem:
    """Return the items of one name, of several runs, as one: with the run that it cost most, and its example."""
    costliest = sorted(items, key=lambda item: -item.seconds)
    return costliest[0]._replace(
        seconds=sum(item.seconds for item in items),
        of_run=costliest[0].seconds,
        times=sum(item.times for item in items),
        nodes=tuple(dict.fromkeys(node for item in costliest for node in item.nodes)),
        goes_on=any(item.goes_on for item in items),
    )


def week_of(
    runs: Mapping[str, Path],
    now: datetime,
    env: Mapping[str, str],
    *,
    days: float = DAYS,
    extend: Callable[[float], None] = lambda _: None,
    step: Callable[[str], object] = lambda _: None,
) -> WeekReport:
    """``extend`` is told how many seconds the next part may take, ``step`` hears of each run twice. Raises Error
    where no queue can be asked."""
    import time

    begin = now - timedelta(days=days)
    seen = overview(runs, now, env)
    found: list[WeekRow] = []
    idle, until = 0, time.monotonic() + _AT_ALL

    def left() -> float:
        extend(2 * _WITHIN)
        return min(_WITHIN, max(0.1, until - time.monotonic()))

    read: list[tuple[RunRow, RunReading]] = []
    for row in seen.rows:
        step(row.name)
        if row.name not in runs:  # only its jobs are known
            continue
        if row.verdict == "UNKNOWN" and row.attempts == 0 and row.seen_at is None:
            found.append(_unread(row, row.why))
            continue
        one = _in_time(row, partial(read_own, RunDir(row.directory), now), left())
        if isinstance(one, WeekRow):
            found.append(one)
        else:
            read.append((row, one))
    extend(2 * _WITHIN)
    ended = with_ends([run for _, run in read], env)
    for (row, _), run in zip(read, ended, strict=True):
        step(row.name)
        one = _in_time(row, partial(_of_run, row, run, begin, now, env), left())
        if one.problem or (one.account is not None and one.account.total > 0):
            found.append(one)
        else:
            idle += 1
    found.sort(key=lambda one: (not one.needs_a_look, need_of(one.row), -_lost(one.costs), one.row.name))
    return WeekReport(begin, now, tuple(found), idle)


def _lost(costs: Iterable[CostItem]) -> float:
    return sum(item.seconds for item in costs)


def _in_time(row: RunRow, do: Callable[[], _T], seconds: float) -> _T | WeekRow:
    """Return what ``do`` returns, or a row that says why it does not."""
    try:
        found = in_time(do, seconds)
    except (Error, OSError, ValueError) as error:
        return _unread(row, printable(str(error), 300))
    if found is not None:
        return found
    late = f"not read: all runs together took longer than {_AT_ALL:.0f} s"
    return _unread(row, f"no answer within {seconds:.0f} s" if seconds >= 1 else late)


def _unread(row: RunRow, problem: str) -> WeekRow:
    return WeekRow(row, Headline(row.verdict, "unknown", f"It could not be read: {problem}."), problem=problem)


def _of_run(row: RunRow, run: RunReading, begin: datetime, now: datetime, env: Mapping[str, str]) -> WeekRow:
    rundir = run.rundir
    seen = Status(run, row.verdict, row.why, None, "")
    whole = account_of(seen)
    first, last = begin.timestamp(), now.timestamp()
    then = no_job_waits(row.verdict, rundir.quoted())
    running, hung = runs_now(seen), row.verdict == "HUNG"
    behind = run.page.slowest if run.page is not None else ""
    record = read_steps(rundir)
    rates = paces_of(run.attempts, paces(record, [one.started.timestamp() for one in run.attempts]))
    head = headline_of(
        RunPresent(
            row=row,
            account=whole,
            reached=max((one.last_step for one in run.attempts if one.last_step is not None), default=None),
            usual=row.usual or usual_rate(rates),
            stood=standing(run.attempts, whole) if running else 0.0,
            job_id=job_that_runs(_jobs(run, env) if hung else None, run.last),
            behind=behind,
            brake=run.braked,
            last=run.last,
            restarts_hangs=restarts_hangs(believed_settings(rundir, env)) if hung else None,
            observes=observes(rundir, run.last) if hung else (),
            lately=faults_lately(incidents(run.attempts, whole, running=running), now),
        )
    )
    if whole.until.timestamp() <= first:
        return WeekRow(row, head)
    part = whole.within(first, last)
    ends = tuple(
        harmless(one)
        for one in incidents(run.attempts, part, running=running, hung=hung, behind=behind, then=then)
        if one.at.timestamp() >= first or one.whole > 0
    )
    slow = tuple(one for one in slow_periods(rates) if one.begin >= first)
    return WeekRow(
        row,
        head,
        part,
        ends,
        cost_items(run.attempts, part, ends, slow),
        _made(record, first),
        drawn=placed(whole.stretches, record).stretches,
    )


def _jobs(run: RunReading, env: Mapping[str, str]) -> tuple[Job, ...] | None:
    """Its jobs in the queue. None: no answer in time, which must not cost the run its row."""
    found = in_time(lambda: ask_queues([run], env), _WITHIN / 2)
    return None if found is None else found.of[0].jobs


def _made(record: StepRecord, begin: float) -> int | None:
    """Steps since ``begin``, without those made again. None: nothing is on record."""
    before = _highest(record, lambda at: at < begin)
    since = _highest(record, lambda at: at >= begin)
    return None if since is None else max(0, since - (before or 0))


def _highest(record: StepRecord, wanted: Callable[[float], bool]) -> int | None:
    steps: Sequence[int] = [span.step for span in record.spans if wanted(span.number * record.every)]
    return max(steps, default=None)
