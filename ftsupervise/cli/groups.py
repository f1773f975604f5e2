"""``ftsupervise groups``: the replica groups of a run. The job script starts them; a person lets one leave, or join again."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from ftsupervise.cli.lighthouse import lighthouse
from ftsupervise.cli.output import say
from ftsupervise.cli.run import option_of
from ftsupervise.config.grouping import GROUP_SETTINGS


@click.group()
def groups() -> None:
    """The replica groups of a run: copies that agree on each step, of which one may fail."""


def _run(command: tuple[str, ...], **values: Any) -> None:
    """Run COMMAND as replica groups, each under a supervisor of its own: the command of an `ftsupervise run`.

    \b
    ftsupervise run --run-dir R -- ftsupervise groups run --count 4 -- --in-place 9 -- srun python train.py

    The words before a second -- are options of each group's `ftsupervise run`. Groups are started again by themselves, on
    other nodes of the job where theirs are lost. Ends when the run has finished, is asked to stop, or no group can go on.
    """
    from ftsupervise.run.gate import SignalQueue
    from ftsupervise.run.group_options import group_options
    from ftsupervise.run.groups import GroupsOfJob

    settings, rest = _parted(command)
    asked = group_options(os.environ, values, settings, rest)
    signals = SignalQueue()
    try:
        code = GroupsOfJob(asked, os.environ, signals).go()
    finally:
        signals.close()
    sys.exit(code)


def _parted(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The options of each group's supervisor, and the command."""
    if words[:1] and words[0].startswith("-") and "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    return (), words


groups.add_command(
    click.Command(
        "run",
        callback=_run,
        help=_run.__doc__,
        context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
        params=[
            *map(option_of, GROUP_SETTINGS),
            click.Argument(["command"], nargs=-1, required=True, type=click.UNPROCESSED),
        ],
    )
)


groups.add_command(lighthouse)


@groups.command()
@click.argument("run")
@click.argument("group")
def leave(run: str, group: str) -> None:
    """Let GROUP (g002) of RUN leave for good: it is told to stop, and is not started again. The others train on."""
    from ftsupervise.config.find_run import find_run
    from ftsupervise.run.group_options import let_leave

    say(let_leave(find_run(run), group))


@groups.command()
@click.argument("run")
@click.argument("group")
def join(run: str, group: str) -> None:
    """Let GROUP of RUN join again, after `groups leave`."""
    from ftsupervise.config.find_run import find_run
    from ftsupervise.run.group_options import let_join

    say(let_join(find_run(run), group))
