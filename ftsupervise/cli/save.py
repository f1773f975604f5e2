"""``ftsupervise save``: raise the save switch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ftsupervise.cli.output import JSON, answer, for_programs, say
from ftsupervise.cli.switches import DELAY, RUNS, WHY, Raised, is_up, not_seen
from ftsupervise.launch.switching import put_up, runs_to_switch, who_hears

if TYPE_CHECKING:
    from ftsupervise.launch.switching import Hearing


@click.command()
@RUNS
@WHY
@JSON
def save(runs: tuple[str, ...], why: str, as_json: bool) -> None:
    """Raise the save switch: the run saves a checkpoint and goes on.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.
    """
    with for_programs(as_json):
        done = _save(runs, why)
    if as_json:
        answer(switch="save", runs=done)


def _save(runs: tuple[str, ...], why: str) -> list[Raised]:
    from ftsupervise.rundir.switches import SAVE

    done = []
    for rundir, name in runs_to_switch(runs):
        if is_up(rundir, SAVE, name):
            done.append(Raised(name, rundir.root, False, heard := who_hears(rundir)))
            if heard.guard is False:
                say(
                    "No guard reports in it: unless its command looks at the switch, nothing hears it, and it stays up."
                )
            continue
        heard = who_hears(rundir)
        put_up(rundir, SAVE, why)
        for line in _what_follows(heard):
            say(line.format(name))
        say(f"Undo:  ftsupervise clear {rundir.quoted()} --switch save")
        done.append(Raised(name, rundir.root, True, heard))
    return done


def _what_follows(heard: Hearing) -> tuple[str, ...]:
    """Return what the switch does, as lines. ``{}`` stands for the name of the run."""
    saves = f"saves {DELAY}, and takes the switch down."
    unheard = "unless its command looks at the switch, nothing hears a save, and the switch stays up."
    if unseen := not_seen(heard):
        return (f"The save switch of {{}} is up; {unseen}.", f"With a guard it {saves}", f"Without one, {unheard}")
    if heard.attempt is None:
        first = "The next one with a guard saves at its first step, and takes the switch down."
        return (f"The save switch of {{}} is up. No attempt of it runs now. {first}",)
    if heard.guard:
        return (f"The save switch of {{}} is up. It {saves}",)
    return (
        "The save switch of {} is up. No guard reports in it: unless its command looks at the switch, nothing",
        "hears a save, and the switch stays up.",
    )
