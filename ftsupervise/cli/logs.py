"""``ftsupervise logs``: the output of a run, wherever it goes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from ftsupervise.cli import time_limit
from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import JSON, answer, columns, say
from ftsupervise.errors import Error, NotFound, UsageError
from ftsupervise.printable import printable, to_type

if TYPE_CHECKING:
    from ftsupervise.model import Attempt
    from ftsupervise.report.output import Follower, Part
    from ftsupervise.rundir.paths import RunDir

_PARTS = 20  # attempts that are read from the end, until there are lines enough
_PAUSE, _NEWS = 0.3, 2.0  # seconds between two looks at the file, and two at the ledger
_AT_A_TIME = 12.0  # seconds that one look may take
_OVER = 3.0  # seconds of silence after which a run that has finished is not followed any longer


@click.command()
@click.argument("run", required=False, metavar="[RUN]", type=RUN)
@click.option("--follow", "-f", is_flag=True, help="Follow the output, across restarts and jobs, until Ctrl-C.")
@click.option(
    "--lines", "-n", type=click.IntRange(0), default=50, show_default=True, help="Number of last lines; 0: all."
)
@click.option("--attempt", type=click.IntRange(1), help="This attempt only.")
@click.option("--rank", type=click.IntRange(0), help="This rank only: its own file, else lines labelled with it.")
@click.option("--group", help="This replica group only (g002); without it, all groups.")
@click.option("--errors", is_flag=True, help="Only lines that report an error, with whole tracebacks, of all attempts.")
@click.option("--path", "only_path", is_flag=True, help="Print the path of the file instead.")
@JSON
def logs(
    run: str | None,
    follow: bool,
    lines: int,
    attempt: int | None,
    rank: int | None,
    group: str | None,
    errors: bool,
    **shown: bool,
) -> None:
    """Show the output of RUN's jobs: of the newest attempt, with a line where another attempt or file begins.

    The output of a run of replica groups is that of all groups, each with its share of the lines.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.
    """
    from ftsupervise.config.find_run import find_run
    from ftsupervise.replicas.table import find_group

    only_path, as_json = shown["only_path"], shown["as_json"]
    if as_json and follow:
        raise UsageError("--json is for the lines that there are, and --follow goes on", hint="leave one of them out")
    whole = find_run(run)
    names = whole.group_names() if group is None and attempt is None else []
    first = whole if group is None else find_group(whole, group)
    places = [first, *(whole.group(name) for name in names)]
    try:
        found = [[_of_rank(part, rank) for part in parts] for parts in _of_all(places, attempt)]
    except NotFound:
        if group is None and (known := whole.group_names()):
            whose = known[0] if len(known) == 1 else f"{known[0]} to {known[-1]}"
            again = f"ftsupervise logs --group {known[0]} {whole.quoted()}"
            say(f"(the ranks write into the logs of their groups, {whose}: {again})", err=True)
        raise
    if only_path and as_json:
        answer(path=found[0][-1].path)
        return
    if only_path:
        click.echo(printable(str(found[0][-1].path)))
        return
    newest = [[part for part in parts if part.attempt == parts[-1].attempt] for parts in found]
    share = -(-lines // len(found))  # of the lines that are shown, for each group
    named = len(found) > 1
    chosen = [_chosen(parts, share, rank, errors=errors) for parts in (found if errors else newest)]
    if as_json:
        answer(parts=[{**part._asdict(), "lines": lines} for parts in chosen for part, lines in parts])
        return
    count = sum(_print(parts, named=named) for parts in chosen)
    if rank is not None and not count and not follow and not errors:
        raise NotFound(
            f"no line of {found[-1][-1].path} says that it is rank {rank}'s",
            hint="srun --label numbers the lines; or let each rank write a file with its number in the name (out-%t.log)",
        )
    if names:
        say(f"(one group alone: ftsupervise logs --group {names[0]} {whole.quoted()})", err=True)
    if follow:
        _follow(places, [part for parts in newest for part in parts], rank, errors=errors, stay=attempt is not None)


def _of_all(places: Sequence[RunDir], attempt: int | None) -> list[list[Part]]:
    """Return the parts of each of these directories that has some. Raises NotFound where none has."""
    found, missing = list[list["Part"]](), list[Error]()
    for place in places:
        try:
            found.append(_parts(place, attempt))
        except NotFound as error:
            missing.append(error)
        time_limit.extend(_AT_A_TIME)
    if not found:
        raise missing[0]
    return found


def _parts(rundir: RunDir, attempt: int | None) -> list[Part]:
    """Return the parts of the output. Raises NotFound."""
    from ftsupervise.report.output import output_files
    from ftsupervise.report.reading import run_name
    from ftsupervise.report.verdict import logs_pattern
    from ftsupervise.rundir.ledger import ledger

    name = run_name(rundir)
    attempts = ledger(rundir)
    found = [part._replace(group=_group_of(rundir)) for part in output_files(rundir, name, attempts)]
    if attempt is not None:
        found = [part for part in found if part.attempt == attempt]
    if found:
        _refuse_ours(rundir, found)
        return found
    if attempt is not None and any(one.number == attempt for one in attempts):
        raise NotFound(f"attempt {attempt} of {name} wrote to no file", hint="its output went to a terminal or a pipe")
    if attempt is not None:
        raise NotFound(f"{name} has no attempt {attempt}", hint=f"ls {rundir.attempts}")
    if attempts:
        raise NotFound(f"the output of {name} goes to no file", hint=_instead(rundir, attempts))
    raise NotFound(f"{name} has written nothing yet: there is no {logs_pattern(rundir, name)}")


def _refuse_ours(rundir: RunDir, parts: Sequence[Part]) -> None:
    """Raise NotTrusted where the run of another account names a file of this one, which nobody else may read, as its output."""
    from ftsupervise.host.ownership import NotTrusted
    from ftsupervise.report.output import not_theirs

    for part in parts:
        if why := not_theirs(rundir, part.path):
            raise NotTrusted(why, hint=f"ls -l {to_type(part.path)}")


def _instead(rundir: RunDir, attempts: Sequence[Attempt]) -> str:
    """Say what the ledger knows of the last failure of a run whose output cannot be shown."""
    failed = next((one for one in reversed(attempts) if one.failure is not None), None)
    known = "" if failed is None else f"its last failure, of attempt {failed.number}: {failed.why()}; "
    return f"it goes to a terminal or a pipe; {known}more: ftsupervise status {rundir.quoted()}"


def _group_of(rundir: RunDir) -> str:
    return "" if rundir.whole is None else rundir.root.name


def _of_rank(part: Part, rank: int | None) -> Part:
    from ftsupervise.report.output import rank_files

    return part if rank is None else rank_files(part, rank) or part


def _chosen(parts: list[Part], most: int, rank: int | None, *, errors: bool) -> list[tuple[Part, list[str]]]:
    """Return the last ``most`` lines of these parts, each with its own."""
    left, chosen = most, list[tuple["Part", list[str]]]()
    for part in list(reversed(parts))[:_PARTS]:
        lines = list(_last(_wanted(part, rank, errors=errors), left))
        if lines:
            chosen.append((part, lines))
            left -= len(lines)
        if most and left <= 0:
            break
        time_limit.extend(_AT_A_TIME)
    return chosen[::-1]


def _print(chosen: list[tuple[Part, list[str]]], *, named: bool) -> int:
    """Print these lines; return how many there were. ``named``: name also a single part."""
    for part, lines in chosen:
        if named or columns() or len(chosen) > 1:
            click.echo(part.words())
        for line in lines:
            click.echo(line)
    return sum(len(lines) for _, lines in chosen)


def _wanted(part: Part, rank: int | None, *, errors: bool) -> Iterator[str]:
    from ftsupervise.report.output import lines_in

    try:
        yield from _filtered(lines_in(part), part, rank, errors=errors)
    except FileNotFoundError:
        yield f"({part.path} is gone)"
    except OSError as error:
        yield f"({part.path} cannot be read: {error.strerror})"


def _filtered(lines: Iterable[str], part: Part, rank: int | None, *, errors: bool) -> Iterator[str]:
    from ftsupervise.report.output import of_rank, telling

    found = lines if rank is None or part.rank is not None else of_rank(lines, rank)
    yield from telling(found) if errors else found


def _last(lines: Iterable[str], most: int) -> Iterable[str]:
    from collections import deque

    return deque(lines, maxlen=most) if most else lines


def _follow(places: Sequence[RunDir], parts: list[Part], rank: int | None, *, errors: bool, stay: bool) -> None:
    """Print new output of the newest attempts' files, until Ctrl-C, or until the run has finished and is silent."""
    from ftsupervise.report.output import Follower

    following = [Follower(part) for part in parts]
    for one in following:
        one.skip()
    heard = time.monotonic()
    news_at = heard + _NEWS
    while True:
        time_limit.extend(_AT_A_TIME)
        now = time.monotonic()
        heard = now if _pass_on(following, rank, errors=errors) else heard
        if now >= news_at:
            news_at = now + _NEWS
            newest = parts if stay else [part for place in places for part in _newest(place, parts, rank)]
            if newest != parts:
                _pass_on(following, rank, errors=errors)
                known = {one.part.path: one for one in following}
                following = [known.get(part.path) or Follower(part) for part in newest]
                for part in newest:
                    if part not in parts:
                        click.echo(part.words())
                parts = newest
            elif now - heard > _OVER and places[0].has_finished():
                say("(the run has finished)", err=True)
                return
        time.sleep(_PAUSE)


def _pass_on(following: Iterable[Follower], rank: int | None, *, errors: bool) -> bool:
    """Print the new output; return whether there was any. With several files, a line names the file before its lines."""
    came, several = False, len({one.part.group for one in following}) > 1
    for one in following:
        lines = one.more()
        came = came or bool(lines)
        wanted = list(_filtered(lines, one.part, rank, errors=errors))
        for line in [one.part.words(), *wanted] if several and wanted else wanted:
            click.echo(line)
    sys.stdout.flush()
    return came


def _newest(rundir: RunDir, known: list[Part], rank: int | None) -> list[Part]:
    """Return the parts of the newest attempt in ``rundir``, once it has some. ``known``: those that are followed."""
    from ftsupervise.report.output import parts_of
    from ftsupervise.rundir.ledger import newest

    group = _group_of(rundir)
    parts = [part for part in known if part.group == group]
    try:
        attempt = newest(rundir)
    except OSError:
        return parts
    if attempt is None or (parts and parts[-1].attempt is not None and attempt.number <= parts[-1].attempt):
        return parts
    return [_of_rank(part._replace(group=group), rank) for part in parts_of([attempt])] or parts
