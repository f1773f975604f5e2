"""``ftsupervise nodes``: which nodes are excluded, why and until when; exclude, trust and clear by hand.

Reads and writes small files in RUN/nodes and in ``nodes.directory``; light, as it is typed in a hurry.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ftsupervise.cli.command_group import DefaultGroup
from ftsupervise.cli.names import RUN, Named
from ftsupervise.cli.output import JSON, answer, end_of, for_programs, plain, say, say_json
from ftsupervise.errors import UsageError
from ftsupervise.host.ownership import shown_user
from ftsupervise.units import count

if TYPE_CHECKING:
    from ftsupervise.nodes.exclude import ExclusionResult
    from ftsupervise.nodes.judging import JudgedNode, Judgement
    from ftsupervise.rundir.paths import RunDir

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(cls=DefaultGroup)
def nodes() -> None:
    """List nodes that failed the run: which are excluded, why, until when.

    \b
    ftsupervise nodes                      of the run of this directory
    ftsupervise nodes exclude "node-[3,7]" no job gets them any more
    ftsupervise nodes trust node-7         never exclude it by its incidents
    ftsupervise nodes clear node-7         it is repaired: drop its incidents

    RUN, where it is named, is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.

    Exit codes: 0 done; 64 not a node's name, 66 no such run, 69 Slurm could not be asked (apply), 73, 77 cannot be written.
    """


def _known_nodes(_ctx: click.Context) -> Iterator[str]:
    """Yield the nodes with a history, and those of the newest attempt."""
    from ftsupervise.rundir.ledger import newest

    rundir = _find(None)
    yield from (one.name for one in _judged(rundir, quiet=True).nodes)
    last = newest(rundir)
    yield from () if last is None else last.nodes


_EDIT = (
    click.argument("names", metavar="NODES", type=Named(_known_nodes)),
    click.argument("run", required=False, type=RUN),
    click.option("--reason", default="", metavar="TEXT", help="The reason, for the others."),
    click.option("--shared", is_flag=True, help="For all runs that share nodes.directory, not only this one."),
    click.option("--no-apply", is_flag=True, help="Do not update Slurm now."),
    JSON,
)


def _edit(command: Command) -> Command:
    """Add the arguments that exclude, trust and clear all take."""
    for wrap in reversed(_EDIT):
        command = wrap(command)
    return command


@nodes.command("list")
@click.argument("run", required=False, type=RUN)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def list_nodes(run: str | None, as_json: bool) -> None:
    """List each node with incidents or a mark by hand, the excluded ones first (the default)."""
    from ftsupervise.nodes.judging import of_run_dir

    rundir = _find(run)
    judged = _judged(rundir, quiet=as_json)
    if as_json:
        say_json(_record(rundir, of_run_dir(rundir)[0], judged))
        return
    if not judged.nodes:
        say(f"{rundir.root.name}: no node has incidents that count")
        return
    width = max(len(node.name) for node in judged.nodes)
    now = datetime.now(timezone.utc)
    for node in judged.nodes:
        say(f"{node.name:{width}}  {node.score:5.2f}  {_words(node, now)}")


@nodes.command()
@_edit
@click.option("--for", "duration", metavar="TIME", help='How long: "2h", "2d"; default: until it is cleared.')
def exclude(
    names: str, run: str | None, reason: str, duration: str | None, shared: bool, no_apply: bool, as_json: bool
) -> None:
    """Exclude NODES ("node-7", "node-[1-4,9]") from this run's jobs, the waiting ones, and the next launch."""
    from ftsupervise.nodes.incidents import EXCLUDE

    now = datetime.now(timezone.utc)
    until = None if duration is None else end_of(duration, now, 'such as "2h" or "2d"; without it: until it is cleared')
    rundir = _mark(EXCLUDE, names, run, reason, shared, now, until)
    end = f" until {until:%Y-%m-%d %H:%M} UTC" if until else ""
    with for_programs(as_json):
        say(f"{rundir.root.name} excludes {names}{end}. Undo:  {_undo(rundir, names, shared)}")
        done = _apply_after_an_edit(rundir, no_apply)
    if as_json:
        _answer(rundir, names, "excluded", shared, done, until)


@nodes.command()
@_edit
def trust(names: str, run: str | None, reason: str, shared: bool, no_apply: bool, as_json: bool) -> None:
    """Never exclude NODES because of their incidents. A health command that fails there still counts."""
    from ftsupervise.nodes.incidents import TRUST

    rundir = _mark(TRUST, names, run, reason, shared, datetime.now(timezone.utc), None)
    with for_programs(as_json):
        say(f"{rundir.root.name} trusts {names}. Undo:  {_undo(rundir, names, shared)}")
        done = _apply_after_an_edit(rundir, no_apply)
    if as_json:
        _answer(rundir, names, "trusted", shared, done)


@nodes.command()
@_edit
def clear(names: str, run: str | None, reason: str, shared: bool, no_apply: bool, as_json: bool) -> None:
    """Drop the incidents of NODES, and their marks by hand."""
    from ftsupervise.nodes.incidents import CLEARED

    rundir = _mark(CLEARED, names, run, reason, shared, datetime.now(timezone.utc), None)
    with for_programs(as_json):
        say(f"The incidents of {names} no longer count for {rundir.root.name}.")
        judged = _judged(rundir)
        _say_what_is_left(rundir, judged.nodes, names)
        done = _apply_after_an_edit(rundir, no_apply, judged)
    if as_json:
        _answer(rundir, names, "cleared", shared, done)


@nodes.command()
@click.argument("run", required=False, type=RUN)
@JSON
def apply(run: str | None, as_json: bool) -> None:
    """Update the excluded nodes of the waiting jobs in Slurm now (each failure does so anyway)."""
    from ftsupervise.errors import SchedulerUnavailable

    rundir = _find(run)
    with for_programs(as_json):
        done = _apply(rundir, _judged(rundir))
    if done.problem:
        raise SchedulerUnavailable(done.problem, hint="the next failure tries again, or type it again")
    if as_json:
        answer(run=rundir.root.name, directory=rundir.root, slurm=done)
    elif not done.changed:
        say(f"{count(len(done.jobs), 'waiting job')}: nothing to change" if done.jobs else "no job of this run waits")


# --------------------------------------------------------------------------------------------------------------- parts


def _find(run: str | None) -> RunDir:
    from ftsupervise.config.find_run import find_run
    from ftsupervise.host.ownership import refuse_link

    found = find_run(run)
    refuse_link(found.nodes)
    return found


def _find_after(run: str | None) -> RunDir:
    """The run named after the nodes; the error explains how to write several nodes."""
    from ftsupervise.errors import NotFound

    try:
        return _find(run)
    except NotFound as error:
        if run is None:
            raise
        raise NotFound(error.message, hint=f"{error.hint}; several nodes are one word: node-7,node-8") from None


def _names(text: str) -> tuple[str, ...]:
    """The nodes of a host list, each fit to be a file's name."""
    from ftsupervise.hostlist import expand_hostlist
    from ftsupervise.nodes.incidents import is_name

    try:
        names = expand_hostlist(text)
    except ValueError as error:
        raise UsageError(f"{error}", hint="write node-7, or node-[1-4,9]") from None
    wrong = [name for name in names if not is_name(name)]
    if wrong or not names:
        raise UsageError(
            f"{(wrong or [text])[0][:80]!r} is not the name of a node", hint="write node-7, or node-[1-4,9]"
        )
    if len(names) > 10_000:
        raise UsageError(f"{len(names)} nodes at once; at most 10000")
    return names


def _undo(rundir: RunDir, names: str, shared: bool) -> str:
    """Return the command that undoes it, to be typed anywhere."""
    import shlex

    return shlex.join(["ftsupervise", "nodes", "clear", *(["--shared"] if shared else []), names, str(rundir.root)])


def _mark(
    word: str, names: str, run: str | None, reason: str, shared: bool, now: datetime, until: datetime | None
) -> RunDir:
    from contextlib import nullcontext

    from ftsupervise.errors import from_os_error
    from ftsupervise.nodes.incidents import held_shared, set_override
    from ftsupervise.nodes.judging import of_run_dir

    wanted = _names(names)
    rundir = _find_after(run)
    places = of_run_dir(rundir)[1]
    if shared and len(places) < 2:
        raise UsageError(
            f"{rundir.root.name} shares nothing", hint="set nodes.directory in ftsupervise.yaml, and launch"
        )
    place = places[-1] if shared else places[0]
    try:
        with held_shared(place, make=True) if shared else nullcontext(place) as here:
            for node in wanted:
                set_override(here, word, node, who=shown_user(), why=reason, now=now, until=until)
    except OSError as error:
        raise from_os_error(error, f"write {place / word / node}") from None
    return rundir


def _say_what_is_left(rundir: RunDir, judged: tuple[JudgedNode, ...], names: str) -> None:
    """Name marks for all runs, which a command for one run does not remove."""
    for node in judged:
        if node.name in _names(names) and node.state == "by hand":
            say(f"{node.name} is still excluded {node.why}, for all runs:  {_undo(rundir, node.name, shared=True)}")


def _judged(rundir: RunDir, *, quiet: bool = False) -> Judgement:
    """Return the nodes with their history; what could not be read is reported, unless ``quiet``."""
    from ftsupervise.nodes.judging import of_run_dir, read_and_judge

    judged = read_and_judge(*of_run_dir(rundir), datetime.now(timezone.utc))
    for problem in () if quiet else judged.known.problems:
        say(f"ftsupervise: {problem}", err=True)
    return judged


def _apply(rundir: RunDir, judged: Judgement) -> ExclusionResult:
    """Update Slurm, and print the changes."""
    from ftsupervise.nodes import exclude

    done = exclude.apply(rundir, os.environ, judged.nodes, whole=judged.whole)
    for sentence in (*done.changed, *done.not_excluded):
        say(sentence)
    return done


def _answer(
    rundir: RunDir,
    names: str,
    mark: str,
    shared: bool,
    slurm: ExclusionResult | None,
    until: datetime | None = None,
) -> None:
    """Tell a program what was marked, and what became of the waiting jobs; null where Slurm was left alone."""
    of = {"run": rundir.root.name, "directory": rundir.root}
    answer(**of, nodes=_names(names), mark=mark, until=until, shared=shared, slurm=slurm)


def _apply_after_an_edit(rundir: RunDir, not_now: bool, judged: Judgement | None = None) -> ExclusionResult | None:
    """Update Slurm; the mark stays even if that fails."""
    if not_now:
        return None
    done = _apply(rundir, judged or _judged(rundir))
    if done.problem:
        say(
            f"note: the waiting jobs are not updated yet: {done.problem}; later: ftsupervise nodes apply {rundir.quoted()}",
            err=True,
        )
    return done


def _words(node: JudgedNode, now: datetime) -> str:
    if not node.state:
        return f"used; {_past(node, now)}"
    since = f" since {node.since:%Y-%m-%d %H:%M} UTC" if node.since else ""
    until = f" until {node.until:%Y-%m-%d %H:%M} UTC" if node.until else ""
    state = "excluded" if node.state == "by hand" else node.state
    return f"{state}{since}{until}; {node.why}"


def _past(node: JudgedNode, now: datetime) -> str:
    from ftsupervise.units import show_duration

    if node.last is None:
        return ""
    ago = show_duration(max(0.0, (now - node.last.at).total_seconds()))
    more = f"{node.incidents} incidents, the last {ago} ago" if node.incidents > 1 else f"one incident, {ago} ago"
    return f"{more}: {node.last.evidence or node.last.kind}"


def _record(rundir: RunDir, at_most: int, judged: Judgement) -> dict[str, object]:
    from ftsupervise.nodes.judging import EXCLUDE_AT, HALF_LIFE

    return {
        "schema_version": 1,
        "run": rundir.root.name,
        "settings": {
            "half_life": HALF_LIFE.total_seconds(),
            "exclude_at": EXCLUDE_AT,
            "at_most": at_most,
        },
        "nodes": [{**plain(node), "excluded": node.excluded} for node in judged.nodes],
        "problems": list(judged.known.problems),
    }
