"""The replica groups of a run for its report: a row for each with its own account of time."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from ftsupervise.replicas.groups import GroupState, ReplicaGroup
from ftsupervise.report.account import Spent, Stretch, account
from ftsupervise.report.groups import GroupFault, GroupsSeen
from ftsupervise.report.placing import placed
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import read_steps
from ftsupervise.units import count

_MOST = 64  # groups that are drawn
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
        rows.append(GroupRow(one, faults, _drawn(rundir.group(one.name), one, now) if index < _MOST else ()))
    return GroupsReport(seen, tuple(rows))


def _drawn(group: RunDir, row: ReplicaGroup, now: datetime) -> tuple[Stretch, ...]:
    try:
        attempts = ledger(group)
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
