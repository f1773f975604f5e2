"""``ftsupervise groups``: the replica groups of a run. The job script starts them; a person lets one leave, or join again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import click

from ftsupervise.cli.command_group import CommandGroup
from ftsupervise.cli.names import RUN, Named
from ftsupervise.cli.output import JSON, answer, say
from ftsupervise.cli.run import option_of, values_typed
from ftsupervise.config.grouping import GROUP_SETTINGS


@click.group(cls=CommandGroup)
def groups() -> None:
    """The replica groups of a run: copies that agree on each step, of which one may fail."""


def _run(command: tuple[str, ...], **values: Any) -> None:
    """Run COMMAND as replica groups, each under a supervisor of its own: the command of an `ftsupervise run`.

    \b
    ftsupervise run --run-dir R -- ftsupervise groups run --count 4
        -- --in-place 9 -- srun python train.py

    The words before a second -- are options of each group's `ftsupervise run`. Groups are started again by themselves, on
    other nodes of the job where theirs are lost. Ends when the run has finished, is asked to stop, or no group can go on.
    """
    from ftsupervise.guard.settings import warning_signal
    from ftsupervise.host.signals import SignalQueue
    from ftsupervise.replicas.apart import GroupsApart
    from ftsupervise.replicas.job import GroupsOfJob
    from ftsupervise.replicas.options import group_options
    from ftsupervise.run.lines import lines_aside

    settings, rest = _parted(command)
    asked = group_options(os.environ, values, values_typed(settings), rest)
    signals = SignalQueue(warning_signal(os.environ))
    try:
        with lines_aside():
            code = (GroupsApart if asked.apart else GroupsOfJob)(asked, os.environ, signals).go()
    finally:
        signals.close()
    sys.exit(code)


def _parted(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The options of each group's supervisor, and the command."""
    if words[:1] and words[0].startswith("-") and "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    return (), words


def _member(number: int, run_dir: str, name: str, command: tuple[str, ...], **values: Any) -> None:
    """Become the supervisor of one group that has a job of its own, once the run's lighthouse is there.

    The batch script of such a group calls it.
    """
    import time
    from pathlib import Path

    from ftsupervise.config.supervisor import default
    from ftsupervise.replicas.apart import member_command
    from ftsupervise.replicas.options import options_of_groups
    from ftsupervise.run.gate import wait_for_space
    from ftsupervise.rundir.paths import RunDir, tell
    from ftsupervise.rundir.switches import reason_not_to_start

    settings, rest = _parted(command)
    asked = options_of_groups(RunDir(Path(run_dir).absolute()), name, values, values_typed(settings), rest)

    found = list[tuple[list[str], dict[str, str]] | str]()

    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        why = reason_not_to_start(asked.rundir)
        if why:
            tell(None, why)
        return not why

    seconds = float(asked.settings.get("space_wait", default("space_wait")))
    if not wait_for_space(lambda: found.append(member_command(asked, number, os.environ)), seconds, wait):
        return
    if isinstance(found[0], str):
        tell(None, found[0])
        return
    words, env = found[0]
    os.execve(words[0], words, env)


def _add(callback: Callable[..., None], short: str, *params: click.Parameter) -> None:
    """Make it a command that takes the settings of the groups, and then the words of another command."""
    words = click.Argument(["command"], nargs=-1, required=True, type=click.UNPROCESSED)
    groups.add_command(
        click.Command(
            callback.__name__.strip("_"),
            callback=callback,
            help=callback.__doc__,
            short_help=short,
            context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
            params=[*params, *map(option_of, GROUP_SETTINGS), words],
        )
    )


_add(_run, "Run a command as replica groups; for the job script.")
_add(
    _member,
    "Supervise one group in a job of its own; for the job script.",
    click.Option(["--number"], type=click.IntRange(0, 998), required=True, help="Of the group, from 0."),
    click.Option(["--run-dir"], metavar="DIR", required=True, help="The directory of the whole run."),
    click.Option(["--name"], required=True, help="What the run is called."),
)


def _groups(_ctx: click.Context) -> Iterable[str]:
    from ftsupervise.config.find_run import find_run

    return find_run(None).group_names()


@groups.command(short_help="Let one group leave; the others train on.")
@click.argument("group", type=Named(_groups))
@click.argument("run", metavar="[RUN]", required=False, type=RUN)
@JSON
def leave(group: str, run: str | None, as_json: bool) -> None:
    """Let GROUP (g002) leave for good: it is asked to stop, and is not started again. The others train on.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.
    """
    _ask_to("leave", group, run, as_json=as_json)


@groups.command()
@click.argument("group", type=Named(_groups))
@click.argument("run", metavar="[RUN]", required=False, type=RUN)
@JSON
def join(group: str, run: str | None, as_json: bool) -> None:
    """Let GROUP join again, after `groups leave`.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.
    """
    _ask_to("join", group, run, as_json=as_json)


def _ask_to(do: str, group: str, run: str | None, *, as_json: bool) -> None:
    from ftsupervise.config.find_run import find_run
    from ftsupervise.replicas.options import let_join, let_leave

    rundir = find_run(run)
    said = {"leave": let_leave, "join": let_join}[do](rundir, group)
    if as_json:
        answer(run=rundir.root.name, directory=rundir.root, group=group, asked_to=do, words=said)
    else:
        say(said)
