"""The words that ``kill``, ``save`` and ``clear`` share: they work like ``touch`` and ``rm``, with a name and a reason.

These are typed in a hurry on a loaded login node: nothing is imported that they do not need.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import say

if TYPE_CHECKING:
    from ftsupervise.launch.switching import Hearing
    from ftsupervise.rundir.paths import RunDir

RUNS = click.argument("runs", nargs=-1, metavar="[RUN]...", type=RUN)
WHY = click.option("--why", default="", metavar="TEXT", help="The reason, shown to everybody who sees the switch.")
DELAY = "at the next step after its guard looks: within a second or so, 60 s at worst on a shared file system"


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


class Raised(NamedTuple):
    """The switch of a run after a command, for programs. ``raised``: False where it was up already."""

    run: str
    directory: Path
    raised: bool
    hearing: Hearing  # as it was before
    ended: tuple[str, ...] = ()  # jobs


def not_seen(heard: Hearing) -> str:
    """Return why it is not known who hears the switch, as a clause; "" where it is."""
    if heard.problem:
        return heard.problem
    if heard.attempt is None or heard.guard is not None:
        return ""
    from ftsupervise.units import show_duration

    began = f"attempt {heard.attempt} began {show_duration(round(heard.age))} ago"
    return f"{began}, and it is not known yet whether a guard is in it"
