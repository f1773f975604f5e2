"""``ftsupervise save``: raise the save switch."""

from __future__ import annotations

import click

from ftsupervise.cli.output import say
from ftsupervise.cli.switches import DELAY, RUNS, WHY, find, is_up, put_up, who_hears


@click.command()
@RUNS
@WHY
def save(runs: tuple[str, ...], why: str) -> None:
    """Raise the save switch: the run saves a checkpoint and goes on.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.
    """
    from ftsupervise.rundir.switches import SAVE

    for rundir, name in find(runs):
        if is_up(rundir, SAVE, name):
            continue
        put_up(rundir, SAVE, why)
        if not who_hears(rundir).guard:
            say(
                f"The save switch of {name} is up. No guard reports in it: unless its command looks at the switch, nothing"
            )
            say("hears a save, and the switch stays up.")
        else:
            say(f"The save switch of {name} is up. It saves {DELAY}, and takes the switch down.")
        say(f"Undo:  ftsupervise clear {rundir.quoted()} --switch save")
