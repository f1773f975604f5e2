"""``ftsupervise kill``: raise the kill switch, once a person has said which run."""

from __future__ import annotations

import sys

import click

from ftsupervise.cli import time_limit
from ftsupervise.cli.output import say
from ftsupervise.cli.switches import DELAY, RUNS, WHY, find, is_up, put_up


@click.command()
@RUNS
@WHY
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--confirm", metavar="NAME", help="Do not ask, but check that this is the run's name.")
def kill(runs: tuple[str, ...], why: str, yes: bool, confirm: str | None) -> None:
    """Raise the kill switch: the run saves and stops at its next step, and no further member trains.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.
    """
    from ftsupervise.rundir.switches import KILL

    found = [one for one in find(runs) if not is_up(one[0], KILL, one[1])]
    if not found:
        return
    _make_sure([name for _, name in found], yes, confirm)
    for rundir, name in found:
        put_up(rundir, KILL, why)
        say(f"The kill switch of {name} is up. It saves and stops {DELAY}.")
        say("Members of its chain that start later leave within seconds.")
        say(f"Undo:  ftsupervise clear {rundir.quoted()}")


def _make_sure(names: list[str], yes: bool, confirm: str | None) -> None:
    from ftsupervise.errors import Cancelled, UsageError

    name = " and ".join(names)
    if confirm is not None and [confirm] != names:
        called = f"this run is called {name!r}" if len(names) == 1 else f"these runs are called {name}"
        raise UsageError(f"{called}, not {confirm!r}: nothing was done")
    if yes or confirm is not None:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            f"no terminal to ask whether to stop {name}",
            hint=f"say --yes, or --confirm {name}" if len(names) == 1 else "say --yes",
        )
    it = "It saves, and its whole chain leaves" if len(names) == 1 else "They save, and their whole chains leave"
    time_limit.person_is_asked()
    sure = click.confirm(f"Stop {name}? {it}", default=False)
    time_limit.person_has_answered()
    if not sure:
        raise Cancelled("cancelled, nothing was changed")
