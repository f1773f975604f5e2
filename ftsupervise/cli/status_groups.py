"""The replica groups of a run in lines: how many run, a row for each, the lighthouse, and the last faults.

It stands alone because only a run of replica groups loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import click

from ftsupervise.cli.status_rows import ago
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.printable import printable
from ftsupervise.units import count, show_duration

if TYPE_CHECKING:
    from ftsupervise.replicas.table import ReplicaGroup
    from ftsupervise.report.groups import GroupFault, GroupsSeen

_COLOURS = {"running": "green", "stopped": "red", "waiting": "yellow", "unknown": "yellow"}
_FAULTS = 5  # that are shown
_ALL_ROWS = 16  # of more groups those that run well are left out


def group_lines(seen: GroupsSeen, now: datetime) -> Iterator[str]:
    old = "" if seen.fresh else f", as of {ago(seen.at, now)} ago"
    waits = ""
    if seen.waits and seen.below is not None:
        waits = ": " + click.style(f"the run waits since {ago(seen.below, now)}, and goes on by itself", fg="red")
    yield f"  groups    {seen.running} of {seen.wanted} run, at least {seen.least} have to{old}{waits}"
    if seen.slow:
        yield f"  groups    {printable(seen.slow)}"
    for row in seen.rows:
        if len(seen.rows) <= _ALL_ROWS or row.state.value != "running":
            yield f"  group     {_row(row, now)}"
    if seen.spares:
        yield f"  groups    spare: {compress_hostlist(seen.spares)}"
    if (light := seen.lighthouse) is not None:
        words = f"for {ago(light.since, now)}, {count(light.restarts, 'restart')}"
        if light.down_since is not None:
            words = f"down for {ago(light.down_since, now)}: {printable(light.trouble)}"
            words = click.style(words, fg="red") if seen.fresh else words
        yield f"  quorum    lighthouse {printable(light.address)}, {words}"
        if light.away:
            wait = "without it no group makes a step, and they go on by themselves when it is back"
            yield f"  quorum    {click.style('lighthouse away', fg='red')}: {printable(light.away)}; {wait}"
    yield from _stalls(seen, now)
    for fault in seen.faults[-_FAULTS:]:
        yield f"  fault     {_fault(fault, now)}"
    if len(seen.faults) > _FAULTS:
        yield f"  fault     {len(seen.faults) - _FAULTS} earlier ones: ftsupervise status --json"


def _stalls(seen: GroupsSeen, now: datetime) -> Iterator[str]:
    """Show the newest stalls of the groups that were left, oldest first."""
    from ftsupervise.report.groups import stall_rows

    rows = stall_rows(seen)
    for row in reversed(rows[:_FAULTS]):
        more = "; ".join(filter(None, (row.lost, row.steps, row.back)))
        yield f"  stall     {ago(row.at, now)} ago for {row.stall}: {printable(more)}"
    if seen.stalls is not None and seen.stalls.times > _FAULTS:
        page = seen.stalls
        yield f"  stall     {page.times} in all, for {show_duration(page.seconds)}, {count(page.lost, 'step')} lost"


def _row(row: ReplicaGroup, now: datetime) -> str:
    state = click.style(row.state.value, fg=_COLOURS.get(row.state.value, "cyan"))
    where = f" on {compress_hostlist(row.nodes)}" if row.nodes else ""
    job = f" (job {row.job})" if row.job else ""
    step = f", step {row.step}" if row.step is not None else ""
    attempt = f", attempt {row.attempt}" if row.attempt else ""
    stalled = f", no step for {show_duration(row.stalled)}" if row.stalled is not None and row.stalled > 10 else ""
    back = ""
    if row.back is not None:
        missed = f", {count(row.missed, 'step')} missed" if row.missed else ""
        redone = f", {count(row.redone, 'step')} made again" if row.redone else ""
        back = f"; was away for {show_duration(row.back)}{missed}{redone}"
    why = f": {printable(row.why)}" if row.why else ""
    return f"{row.name} {state} for {ago(row.since, now)}{where}{job}{step}{attempt}{stalled}{back}{why}"


def _fault(fault: GroupFault, now: datetime) -> str:
    step = f" at step {fault.step}" if fault.step is not None else ""
    return f"{ago(fault.at, now)} ago {fault.group}{step}: {printable(fault.cause)}; {printable(fault.then)}"
