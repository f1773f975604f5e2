"""The replica groups of a run as ``status`` shows them: a row for each, the quorum, and every fault with its group.

Read from the run directory alone. The table is written every few seconds by the process that starts the groups; the faults
stand in the groups' own ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

from ftsupervise.model import CauseKind
from ftsupervise.replicas.record import read_lighthouse
from ftsupervise.replicas.stalls import StallPage, read_stalls
from ftsupervise.replicas.table import GroupState, ReplicaGroup, read_table
from ftsupervise.report.account import Spent, Stretch, account
from ftsupervise.report.placing import placed
from ftsupervise.rundir import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import read_steps
from ftsupervise.units import count, show_duration

if TYPE_CHECKING:
    from ftsupervise.model import Job

_FRESH = 30.0  # seconds: an older table is not of now
_MOST = 1000  # groups that are read
_EACH = 20  # attempts of each that are read
_STALLS = 50  # that are told


class GroupFault(NamedTuple):
    """The end of an attempt of one group that was a failure, or that its lighthouse has left."""

    group: str
    attempt: int
    at: datetime
    cause: Annotated[str, 2000]
    then: Annotated[str, 2000] = ""
    step: int | None = None
    nodes: tuple[str, ...] = ()


class LighthouseSeen(NamedTuple):
    """``away``: why nobody writes of it, where it has a job of its own; "" while somebody does."""

    address: str
    since: datetime
    restarts: int
    down_since: datetime | None
    trouble: str
    away: Annotated[str, 2000] = ""


class GroupsSeen(NamedTuple):
    """``running`` and the rows are as of ``at``. ``fresh`` False: nobody has written them for a while."""

    at: datetime
    fresh: bool
    wanted: int
    least: int
    running: int
    below: datetime | None
    rows: tuple[ReplicaGroup, ...]
    spares: tuple[str, ...] = ()
    slow: str = ""
    lighthouse: LighthouseSeen | None = None
    faults: tuple[GroupFault, ...] = ()  # newest last
    stalls: StallPage | None = None  # the newest last; None: nobody has seen any, or they cannot be read

    @property
    def waits(self) -> bool:
        return self.fresh and self.below is not None


def groups_of(
    rundir: RunDir, now: datetime, jobs: Sequence[Job] | None = None, *, over: bool = False
) -> GroupsSeen | None:
    """None where the run has no groups, or nothing of them can be read. Raises nothing.

    ``jobs``: of the run in the queue, None where that could not be asked. ``over``: no group of it is to train any more.
    """
    table = read_table(rundir)
    if table is None:
        return None
    page = read_stalls(rundir)
    fresh = abs((now - table.at).total_seconds()) < _FRESH
    lighthouse = _lighthouse(rundir)
    if lighthouse is not None and table.place == "jobs" and not fresh and not over:
        from ftsupervise.replicas.apart import lighthouse_job  # most runs with groups have one job

        lighthouse = lighthouse._replace(away=lighthouse_job(rundir, jobs).words)
    return GroupsSeen(
        at=table.at,
        fresh=fresh,
        wanted=table.wanted,
        least=table.least,
        running=table.running,
        below=table.below,
        rows=table.groups,
        spares=table.spares,
        slow=table.slow,
        lighthouse=lighthouse,
        faults=tuple(sorted(_faults(rundir), key=lambda one: one.at)),
        stalls=page and page._replace(stalls=page.stalls[-_STALLS:]),
    )


def running_words(rundir: RunDir, now: datetime) -> str:
    """ "3 of 4 groups" for the row of a run; "" where all run, or there are none, or that is not known."""
    table = read_table(rundir)
    if table is None or abs((now - table.at).total_seconds()) > _FRESH or table.running == table.wanted:
        return ""
    away = ", ".join(one.name for one in table.groups if one.state is not GroupState.RUNNING)
    waits = f", fewer than {table.least}: the run waits" if table.below is not None else ""
    return f"{table.running} of {table.wanted} groups run ({away} {'are' if ',' in away else 'is'} away){waits}"


def _lighthouse(rundir: RunDir) -> LighthouseSeen | None:
    try:
        page = read_lighthouse(rundir.replicas)
    except (OSError, ValueError):
        return None
    if page is None:
        return None
    return LighthouseSeen(page.address, page.since, page.restarts, page.down_since, page.trouble)


def _faults(rundir: RunDir) -> Iterator[GroupFault]:
    for name in rundir.group_names()[:_MOST]:
        group = rundir.group(name)
        try:
            newest = max(ledger.numbers(group), default=0)
            for one in ledger.backwards(group, first=max(1, newest - _EACH)):
                moved = one.kind is CauseKind.MOVED
                if (one.failure is not None or moved) and one.ended is not None:
                    yield GroupFault(name, one.number, one.ended, one.why(), one.then, one.last_step, one.nodes)
        except OSError:
            continue


# ------------------------------------------------------------------------------------------

# The stalls of replica groups in words, the same ones in ``status`` and in the report. Pure.


class StallRow(NamedTuple):
    """One stall. A text is "" where nothing is known, or nothing is to be said."""

    at: datetime
    stall: str  # "1.1s"
    lost: str  # "g001 was lost"
    steps: str  # "1 step lost"
    back: str  # "back after 7.9s, 60 steps missed"


def stall_rows(seen: GroupsSeen | None) -> tuple[StallRow, ...]:
    """The newest first."""
    page = seen.stalls if seen is not None else None
    return tuple(_rows(page)) if page is not None else ()


def stall_sentence(seen: GroupsSeen | None) -> str:
    """All of them in one sentence; "" where there were none."""
    page = seen.stalls if seen is not None else None
    if page is None or not page.times:
        return ""
    times = "once" if page.times == 1 else f"{page.times:,} times"
    return (
        f"Its replica groups waited {times} for one that was lost or made no progress, {show_duration(page.seconds)} in all, "
        f"and lost {_steps(page.lost)} by it."
    )


def _rows(page: StallPage) -> Iterator[StallRow]:
    for one in reversed(page.stalls):
        names = ", ".join(one.gone[:4]) + (f" and {len(one.gone) - 4} more" if len(one.gone) > 4 else "")
        back = ""
        if one.away is not None:
            missed = f", {_steps(one.missed)} missed" if one.missed else ""
            back = f"back after {show_duration(one.away)}{missed}"
        yield StallRow(
            at=one.at,
            stall=show_duration(one.seconds),
            lost=f"{names} {'was' if len(one.gone) == 1 else 'were'} lost" if names else "no group was lost",
            steps=f"{_steps(one.lost)} lost" if one.lost else "",
            back=back or ("not back yet" if names else ""),
        )


def _steps(number: int) -> str:
    return f"{number:,} step{'' if number == 1 else 's'}" if number else "no step"


# ------------------------------------------------------------------------------------------

# The replica groups of a run for its report: a row for each with its own account of time.

_MOST_GROUPS = 64  # groups that are drawn
_AFTER = {GroupState.WAITING: Spent.QUEUE, GroupState.STOPPED: Spent.BRAKED, GroupState.LEFT: Spent.HELD}
_TONES = {GroupState.RUNNING: "good", GroupState.UNKNOWN: "unknown"}


class GroupRow(NamedTuple):
    """A group as it is now, its faults, and its time since it first began."""

    now: ReplicaGroup
    faults: tuple[GroupFault, ...] = ()  # newest last
    drawn: tuple[Stretch, ...] = ()

    @property
    def tone(self) -> str:
        return _TONES.get(self.now.state, "watch")


class GroupsReport(NamedTuple):
    seen: GroupsSeen
    rows: tuple[GroupRow, ...]


def groups_report(rundir: RunDir, seen: GroupsSeen | None, now: datetime) -> GroupsReport | None:
    """None where the run has no groups. A ledger that cannot be read draws nothing. It reads a ledger for each group."""
    if seen is None:
        return None
    rows = []
    for index, one in enumerate(seen.rows):
        faults = tuple(fault for fault in seen.faults if fault.group == one.name)
        rows.append(GroupRow(one, faults, _drawn(rundir.group(one.name), one, now) if index < _MOST_GROUPS else ()))
    return GroupsReport(seen, tuple(rows))


def _drawn(group: RunDir, row: ReplicaGroup, now: datetime) -> tuple[Stretch, ...]:
    try:
        attempts = ledger.ledger(group)
    except OSError:
        return ()
    if not attempts:
        return ()
    running = row.state is GroupState.RUNNING and attempts[-1].ended is None
    after = _AFTER.get(row.state, Spent.UNKNOWN)
    return placed(account(attempts, (), now, running=running, afterwards=after).stretches, read_steps(group)).stretches


def groups_sentence(found: GroupsReport) -> str:
    """Return how many groups run, and how many must."""
    seen = found.seen
    when = "" if seen.fresh else f" (as of {seen.at:%Y-%m-%d %H:%M} UTC)"
    words = f"{seen.running} of {count(seen.wanted, 'group')} {'run' if seen.wanted != 1 else 'runs'}{when}; "
    words += f"the training needs at least {seen.least}."
    if seen.waits and seen.below is not None:
        words += f" Fewer have run since {seen.below:%Y-%m-%d %H:%M} UTC: the others wait, and go on by themselves."
    return words
