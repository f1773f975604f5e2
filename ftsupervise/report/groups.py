"""The replica groups of a run as ``status`` shows them: a row for each, the quorum, and every fault with its group.

Read from the run directory alone. The table is written every few seconds by the process that starts the groups; the faults
stand in the groups' own ledgers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

from ftsupervise.model import CauseKind
from ftsupervise.replicas.groups import GroupState, ReplicaGroup, group_names, read_table
from ftsupervise.replicas.lighthouse_record import read_lighthouse
from ftsupervise.replicas.stalls import StallPage, read_stalls
from ftsupervise.rundir import ledger
from ftsupervise.rundir.paths import RunDir

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
        from ftsupervise.scheduler.lighthouse_job import lighthouse_job  # most runs with groups have one job

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
    for name in group_names(rundir)[:_MOST]:
        group = rundir.group(name)
        try:
            newest = max(ledger.numbers(group), default=0)
            for one in ledger.backwards(group, first=max(1, newest - _EACH)):
                moved = one.cause is not None and one.cause.kind is CauseKind.MOVED
                if (one.failure is not None or moved) and one.ended is not None:
                    yield GroupFault(name, one.number, one.ended, one.why(), one.then, one.last_step, one.nodes)
        except OSError:
            continue
