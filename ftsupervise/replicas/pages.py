"""Writes the pages about the replica groups: their table, the page about the quorum, and the progress of the whole run.

It stands alone because it starts and ends nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from ftsupervise.errors import Error
from ftsupervise.host.in_time import OneAtATime
from ftsupervise.nodes.judging import judge, of_run_dir
from ftsupervise.replicas.members import SuspectMember
from ftsupervise.replicas.options import GroupOptions
from ftsupervise.replicas.process import GroupProcess
from ftsupervise.replicas.table import (
    GroupState,
    GroupTable,
    Hung,
    QuorumPage,
    slower_one,
    write_quorum,
    write_table,
)
from ftsupervise.rundir.fence import is_sealed
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import ProgressPage
from ftsupervise.scheduler.allocation import Allocation
from ftsupervise.scheduler.parse import is_away

_EVERY = 2.0  # seconds between two writings of the same about the quorum
_WITHIN = 1.0  # seconds for both to be written
_LAST_WITHIN = 5.0  # seconds for the last ones, behind older ones that still hang
_AGAIN = 0.1  # seconds between two tries
_JUDGED = 3.0  # seconds for the past of the nodes to be read
_NODES_EVERY = 5.0  # seconds between two looks at the nodes
_STILL = 8.0  # seconds without a step after which a node that does not answer counts as lost under its group
_FAR = 2  # steps: a group that much behind the first one is named


class NodesSeen:
    """Knows which nodes of the job are lost. Slurm is asked in a thread, because it may not answer."""

    def __init__(self, allocation: Allocation, rundir: RunDir) -> None:
        self.all = frozenset(allocation.nodes)
        self.scores: Mapping[str, float] = {}  # how bad the past of each is
        self._allocation, self._rundir = allocation, rundir
        self._states: Mapping[str, str] = {}
        self._over = threading.Event()
        if len(self.all) > 1:
            threading.Thread(target=self._look_on, name="nodes", daemon=True).start()

    def lost(self) -> frozenset[str]:
        return frozenset(node for node, state in self._states.items() if is_away(state))

    def close(self) -> None:
        self._over.set()

    def _look_on(self) -> None:
        judged = OneAtATime[dict[str, float]]()  # a run directory that does not answer hides no lost node
        while not self._over.wait(_NODES_EVERY):
            try:
                found = self._allocation.how_they_are()
                self._states = found or self._states  # no answer is no news
                scores = judged(self._judge, _JUDGED)
                self.scores = self.scores if scores is None else scores
            except (OSError, Error):
                continue

    def _judge(self) -> dict[str, float]:
        return {one.name: one.score for one in judge(*of_run_dir(self._rundir), _now()).nodes}


class GroupPages:
    """Writes the pages of one job's groups."""

    def __init__(
        self,
        asked: GroupOptions,
        groups: Sequence[GroupProcess],
        nodes: NodesSeen,
        say: Callable[[str], None],
        area: Path | None,
    ) -> None:
        self._asked, self._groups, self._nodes, self._say, self._area = asked, groups, nodes, say, area
        self.below: datetime | None = None  # since when fewer than the least run
        self._written = 0.0  # monotonic
        self._quorum, self._turn = QuorumPage(), OneAtATime[QuorumPage]()
        self._slow = ""
        self.lighthouse_restarted: float | None = None  # monotonic
        self.moved: datetime | None = None  # when the lighthouse began at another address
        self.liars: Mapping[str, SuspectMember] = {}  # groups that report steps which no group can have made
        self._accused: dict[
            str, int
        ] = {}  # the attempt of each such start: the next one of its group has told nothing yet

    def write(self, over: str, *, last: bool = False) -> None:
        """``over``: why no group is started any more."""
        now, at = _now(), time.monotonic()
        why = self._below_the_least(over, now)
        quorum = QuorumPage(now, bool(why), why, self._hung())
        same = quorum._replace(at=self._quorum.at) == self._quorum
        if same and not last and at < self._written + _EVERY:
            return
        table = self._table(now)

        def put() -> QuorumPage:
            write_quorum(self._asked.rundir, quorum, self._area)
            write_table(self._asked.rundir, table, self._area)
            return quorum

        if last:
            self._put_the_last(put, quorum)
            return
        try:
            if self._turn(put, _WITHIN) is not quorum:
                return  # the directory does not answer, or has taken an older page only now: soon again
        except OSError:  # a full disk, or a newer attempt: the groups go on
            return
        self._quorum, self._written = quorum, at

    def _put_the_last(self, put: Callable[[], QuorumPage], quorum: QuorumPage) -> None:
        """Write the pages that others will find when we have ended, once an older write that hangs is through."""
        until, why = time.monotonic() + _LAST_WITHIN, f"{self._asked.rundir.replicas} does not answer"
        begun = list[QuorumPage]()

        def mine() -> QuorumPage:
            begun.append(quorum)
            return put()

        while time.monotonic() < until:
            try:
                done = self._turn(mine, until - time.monotonic())
            except OSError as error:
                if not begun:  # it was the older one's
                    continue
                if self._area is not None and is_sealed(self._area):
                    return  # the pages belong to a newer attempt
                why = error.strerror or str(error)
                break
            if done is quorum:
                return
            time.sleep(_AGAIN if done is None else 0.0)
        self._say(f"the last page of the groups could not be written: {why}; the one before stays")

    def _below_the_least(self, over: str, now: datetime) -> str:
        """Say why the groups that run wait; "" when they do not, or when nobody knows how the others are."""
        least, wanted = self._asked.least, self._asked.count
        states = [group.row.state for group in self._groups]
        running = states.count(GroupState.RUNNING)
        why = f"{running} of {wanted} groups run, and fewer than {least} do not train on: they wait"
        if over or running + states.count(GroupState.UNKNOWN) >= least:
            if self.below is not None and not over:
                self._say(f"{running} of {wanted} groups run again: the run goes on")
            self.below = None
            return ""
        if self.below is None:
            self.below = now
            self._say(why)
        return why

    def _hung(self) -> tuple[Hung, ...]:
        """Name the groups that their own supervisors cannot judge: their node does not answer and is silent; they wait for a
        quorum in which the others train without them; or they report steps that nobody has made, and the others wait until
        they are gone."""
        lost, found = self._nodes.lost(), list[Hung]()
        for group in self._groups:
            row = group.row
            gone = [node for node in row.nodes if node in lost]
            if not group.alive:
                continue
            if gone and (row.stalled is None or row.stalled >= _STILL):
                found.append(Hung(row.name, row.attempt, f"{', '.join(gone)} does not answer"))
            elif self.moved is not None and group.seen.newest is not None and group.seen.newest.started < self.moved:
                found.append(Hung(row.name, row.attempt, "the lighthouse is at another address now"))
            elif (lie := self.liars.get(row.name)) and self._accused.setdefault(
                lie.replica, row.attempt
            ) == row.attempt:
                found.append(Hung(row.name, row.attempt, lie.words))
            elif why := self._left_out(group):
                found.append(Hung(row.name, row.attempt, why))
        return tuple(found)

    def _left_out(self, group: GroupProcess) -> str:
        """Say why it is to be started again: torchft has lost its call for a quorum, as at a restart of the lighthouse."""
        timeouts, stalled = self._asked.timeouts, group.row.stalled
        if timeouts is None or stalled is None or stalled < timeouts.hang:
            return ""
        others = [one.row.stalled for one in self._groups if one is not group and one.alive]
        if sum(1 for one in others if one is not None and one < timeouts.hang / 2) < self._asked.least:
            return ""
        after = self.lighthouse_restarted is not None and time.monotonic() - self.lighthouse_restarted < 2 * stalled
        return f"the others train on without it{' since the lighthouse was restarted' if after else ''}"

    def _table(self, now: datetime) -> GroupTable:
        rows = tuple(group.row for group in self._groups)
        used = {node for row in rows for node in row.nodes}
        slow = slower_one(rows)
        if slow and slow.partition(" ")[0] != self._slow:
            self._slow = slow.partition(" ")[0]
            self._say(f"a slower group: {slow}")
        return GroupTable(
            at=now,
            host=os.uname().nodename,
            wanted=self._asked.count,
            least=self._asked.least,
            place="jobs" if self._asked.apart else "allocation",
            groups=rows,
            spares=tuple(sorted(self._nodes.all - used - self._nodes.lost())),
            below=self.below,
            slow=slow,
        )

    def progress(self) -> ProgressPage | None:
        """Sum the groups up: the step that the first of them has reached counts, because one that comes back begins there."""
        pages = [(group.row.name, page) for group in self._groups if group.alive and (page := group.seen.page)]
        if not pages:
            return None
        every, now = [page for _, page in pages], _now()
        first = max(every, key=_reached)
        name, last = min(pages, key=lambda one: _reached(one[1]))
        ages = [page.stepped + (now - page.at).total_seconds() for page in every if page.stepped is not None]
        return first._replace(
            at=now,
            ranks=sum(page.ranks for page in every),
            step=first.ahead,
            slowest=f"group {name}" if _reached(first) - _reached(last) > _FAR else "",
            stepped=round(max(0.0, min(ages)), 3) if ages else None,
            first=min((page.first for page in every if page.first is not None), default=None),
            first_at=min((page.first_at for page in every if page.first_at is not None), default=None),
            active_at=max((page.active_at for page in every if page.active_at is not None), default=None),
            saved=max((page.saved for page in every if page.saved is not None), default=None),
        )


def _reached(page: ProgressPage) -> int:
    return -1 if page.ahead is None else page.ahead


def _now() -> datetime:
    return datetime.now(timezone.utc)
