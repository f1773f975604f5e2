"""The common part of ``kill``, ``save`` and ``clear``: they work like ``touch`` and ``rm``, with a name and a reason.

These are typed in a hurry on a loaded login node: nothing is imported that they do not need.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import say
from ftsupervise.host.ownership import shown_user

if TYPE_CHECKING:
    from ftsupervise.rundir.paths import RunDir

Found = tuple["RunDir", str]  # and the name of the run
_SILENT = 60.0  # seconds after which a guard would have reported

RUNS = click.argument("runs", nargs=-1, metavar="[RUN]...", type=RUN)
WHY = click.option("--why", default="", metavar="TEXT", help="The reason, shown to everybody who sees the switch.")
DELAY = "at the next step after its guard looks: within a second or so, 60 s at worst on a shared file system"


def find(runs: tuple[str, ...], *, brake: bool = False) -> list[Found]:
    """Find all of them before anything is done to one. Raises NotTrusted where a switch would be written through a link of
    another account."""
    from ftsupervise.config.find_run import each_run, find_run
    from ftsupervise.host.ownership import refuse_link

    found = {rundir.root: rundir for rundir in (find_run(run) for run in each_run(runs) or (None,))}
    for rundir in found.values() if not brake else ():
        _refuse_a_group(rundir)
    for rundir in found.values():
        refuse_link(rundir.switches)
        refuse_link(rundir.state)
    return [(rundir, rundir.root.name) for rundir in found.values()]


def _refuse_a_group(rundir: RunDir) -> None:
    """Refuse a replica group: its switches are those of its run."""
    from ftsupervise.errors import UsageError

    if rundir.whole is not None:
        leave = f"ftsupervise groups leave {rundir.root.name} {rundir.whole}"
        raise UsageError(
            f"{rundir.root.name} is a replica group, and a switch is for its whole run: name {rundir.whole}",
            hint=f"to let only this group leave: {leave}",
        )


def is_up(rundir: RunDir, switch: str, name: str) -> bool:
    """Return whether it is raised already, and say so: the first reason stays."""
    from ftsupervise.rundir.switches import read_switch

    state = read_switch(rundir, switch)
    if state.problem:
        say(f"ftsupervise: {state.problem}", err=True)
    if state.up:
        since = f" since {state.since:%Y-%m-%d %H:%M} UTC" if state.since else ""
        why = f": {state.why}" if state.why else ""
        say(f"The {switch.replace('-', ' ')} of {name} is up already{since}, raised by {state.who}{why}")
    return state.up


class Hearing(NamedTuple):
    """Tells what would hear a switch."""

    attempt: int | None = None  # the one that runs, if any
    guard: bool | None = None  # whether one reports in it; None: not known, or not yet
    stop_within: float | None = None  # seconds from the kill switch until it is ended
    age: float = 0.0  # seconds since the attempt began
    problem: str = ""  # why it cannot be seen whether one runs


class Raised(NamedTuple):
    """What a command has done to a switch of a run, for programs. ``raised``: False where it was up already."""

    run: str
    directory: Path
    raised: bool
    hearing: Hearing  # as it was before
    ended: tuple[str, ...] = ()  # jobs


def who_hears(rundir: RunDir) -> Hearing:
    """Return who would hear a switch of the run."""
    from datetime import datetime, timezone

    from ftsupervise.model import NOBODY, OUTPUT
    from ftsupervise.rundir.ledger import newest, stop_within

    try:
        last = newest(rundir)
        if last is None or last.ended is not None or last.cause is not None:
            return Hearing()
        age = (datetime.now(timezone.utc) - last.started).total_seconds()
        guard = None if last.source == NOBODY and age <= _SILENT else last.source not in (OUTPUT, NOBODY)
        return Hearing(last.number, guard, stop_within(rundir, last.number), max(0.0, age))
    except OSError as error:
        return Hearing(problem=f"its attempts cannot be read ({error.strerror or error})")


def not_seen(heard: Hearing) -> str:
    """Return why it is not known who hears the switch, as a clause; "" where it is."""
    if heard.problem:
        return heard.problem
    if heard.attempt is None or heard.guard is not None:
        return ""
    from ftsupervise.units import show_duration

    began = f"attempt {heard.attempt} began {show_duration(round(heard.age))} ago"
    return f"{began}, and it is not known yet whether a guard is in it"


def put_up(rundir: RunDir, switch: str, why: str) -> None:
    from datetime import datetime, timezone

    from ftsupervise.config.find_run import require_same
    from ftsupervise.errors import from_os_error
    from ftsupervise.rundir.switches import raise_switch

    try:
        raise_switch(
            rundir, switch, who=shown_user(), host=os.uname().nodename, why=why, now=datetime.now(timezone.utc)
        )
    except OSError as error:
        raise from_os_error(error, f"write {rundir.switches / switch}") from None
    require_same(rundir)  # else it is up in what somebody has put there since the run was found
