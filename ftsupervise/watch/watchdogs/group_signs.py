"""Judges the replica groups for *is-running*: do enough of them run, and has one been away for long?

The table is written every few seconds by the process that starts the groups. An old table says nothing about them now.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.replicas.groups import GroupState, GroupTable, ReplicaGroup, read_table
from ftsupervise.replicas.lighthouse_record import PAGE_NAME
from ftsupervise.scheduler.lighthouse_job import lighthouse_job
from ftsupervise.truth import Health
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.watch import Look

_FRESH = timedelta(minutes=2)
_STATUS = "ftsupervise status {run_dir}"
_QUORUM = Words(
    "No group trains until enough of them run; then they go on by themselves.",
    _STATUS,
    "find out why the others are away: the status has a line for each group",
    Severity.CRITICAL,
)
_LIGHTHOUSE = Words(
    "No group makes a step without it. They wait, and go on by themselves when its job runs.",
    _STATUS,
    "see to it that its job starts: the status names it",
    Severity.CRITICAL,
)
_AWAY = Words(
    "The other groups train on without it, with a smaller batch.",
    _STATUS,
    "read why it is away; to do without it for good: ftsupervise groups leave {group} {run_dir}",
)


def group_findings(look: Look, away_for: timedelta, *, over: bool, runs: bool) -> Iterator[Finding]:
    """Yield nothing where the run has no groups, or where its table is old because no job runs: *is-running* reports
    that.

    ``over``: the run need not run at all. ``runs``: a job of it does, or may.
    """
    table = read_table(look.rundir)
    if table is None:
        return
    if not over and abs(look.now - table.at) > _FRESH:
        if not runs:
            return
        since = show_duration(abs((look.now - table.at).total_seconds()))
        if (away := _lighthouse_away(look, table)) is not None:
            text = f"the groups have had no lighthouse for {since}: {away}"
            yield look.finding("quorum", Health.BAD, text, _LIGHTHOUSE, since=table.at)
            return
        yield look.finding("quorum", Health.UNKNOWN, f"there has been no news of the groups for {since}", _QUORUM)
        return
    yield _quorum(look, table, over=over)
    for group in table.groups:
        yield _of_one(look, group, away_for, over=over)


def _lighthouse_away(look: Look, table: GroupTable) -> str | None:
    """Say where the job of the lighthouse is, where it has one and that is known not to run."""
    if table.place != "jobs" or not (look.rundir.replicas / PAGE_NAME).exists():
        return None
    job = lighthouse_job(look.rundir, look.jobs)
    return job.words if job.runs is False else None


def _quorum(look: Look, table: GroupTable, *, over: bool) -> Finding:
    text = f"{table.running} of {table.wanted} groups run, at least {table.least} must"
    bad = table.below is not None and not over
    unsure = not over and not bad and table.running < table.least <= table.running + table.unknown
    health = Health.UNKNOWN if unsure else Health.of(bad)
    return look.finding("quorum", health, text, _QUORUM, since=table.below if bad else None)


def _of_one(look: Look, group: ReplicaGroup, away_for: timedelta, *, over: bool) -> Finding:
    fine = over or group.state in (GroupState.RUNNING, GroupState.LEFT, GroupState.OVER)
    age = look.now - group.since
    bad = not fine and (age > away_for or group.state is GroupState.STOPPED)
    shown = show_duration(max(0.0, age.total_seconds()))
    why = f": {group.why}" if group.why else ""
    text = f"group {group.name}: {group.state.value} for {shown}{why if not fine else ''}"
    names = {"group": group.name, "run_dir": shlex.quote(str(look.rundir.root))}
    unsure = group.state is GroupState.UNKNOWN and not fine
    return look.finding(
        group.name,
        Health.UNKNOWN if unsure else Health.of(bad),
        text,
        _AWAY,
        names=names,
        value=shown,
        limit=show_duration(away_for.total_seconds()),
        since=group.since if bad else None,
    )
