"""``ftsupervise drill``: what a copy of the run does when faults are injected into it, as one table."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli.names import RUN, Named
from ftsupervise.cli.output import plain, say, say_json
from ftsupervise.scheduler import LOCAL

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.drill.verdict import RowResult

SCHEMA_VERSION = 1
_COLOURS = {"pass": "green", "fail": "red", "could not be tried": "cyan"}
_COUNTED = {"pass": "passed", "fail": "failed", "could not be tried": "could not be tried"}
_ENDS = 30.0  # seconds to take everything away again
_SANDBOX = "sandbox"


def _rows(_ctx: click.Context) -> Iterable[str]:
    from ftsupervise.drill.rows import ROWS

    return [row.name for row in ROWS]


@click.command()
@click.argument("run", required=False, type=RUN)
@click.option("--row", "rows", multiple=True, metavar="NAME", type=Named(_rows), help="Only this one; may be repeated.")
@click.option("--list", "list_them", is_flag=True, help="List the rows: what is done, and what must be seen.")
@click.option(
    "--on",
    type=click.Choice([_SANDBOX, LOCAL]),
    help="A Slurm made for it, or this machine without one. Default: as the settings say; auto: Slurm where it is installed.",
)
@click.option(
    "--start", default="2m", show_default=True, metavar="TIME", help="How long a copy may take to its first step."
)
@click.option("--within", default="1h", show_default=True, metavar="TIME", help="How long all of it may take.")
@click.option("--yes-really", "really", is_flag=True, help="Also for a run that has attempts, checkpoints or a job.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Put there what each copy leaves, without checkpoints.",
)
@click.option("--trust", is_flag=True, help="Use settings that another account may write; commands included.")
@click.option("--json", "as_json", is_flag=True, help="As a JSON object.")
def drill(run: str | None, rows: tuple[str, ...], list_them: bool, as_json: bool, **how: Any) -> None:
    """Break a copy of the run on purpose, and see what becomes of it.

    Each row starts the command of the run as a copy, in a run directory of its own, on this machine. The copy makes steps, and
    is hit by one fault; its ledger, its checkpoints and the messages about it say what became of it. A mailbox takes the place
    of the receivers: nobody gets a message. All of it ends with this command, however that ends.

    A run that has attempts or a job is refused, and so is a folder with checkpoints in it. Of a sweep the first run is drilled.

    Ends with 0 where no row failed; 1 where one did; 3 where none failed, and one that --row names, or every one, could not be
    tried. RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.

    \b
    ftsupervise drill --list
    ftsupervise drill --row kill-rank --row stop-rank
    ftsupervise drill --json --keep drilled
    """
    if list_them:
        _list(as_json)
        return
    from ftsupervise.cli.config import settings_to_act_on
    from ftsupervise.cli.output import for_programs
    from ftsupervise.cli.time_limit import extend
    from ftsupervise.config.find_run import names_in, settings_of
    from ftsupervise.drill.play import DrillOrder, chosen, code_of
    from ftsupervise.drill.play import drill as play

    first, within = _duration("--start", how["start"], 3600), _duration("--within", how["within"], 86_400)
    chosen(rows)
    path = settings_of(run)
    name = (names_in(path) or ("",))[0]
    hint = "look at it: ftsupervise launch --dry-run"
    settings = settings_to_act_on(path, "drill", run=name, dry_run=False, trust=how["trust"], hint=hint)
    where = how["on"] or _where(settings)
    if where == _SANDBOX:
        _require_slurm()
    for number in (signal.SIGTERM, signal.SIGHUP):  # all of it is taken away
        signal.signal(number, _leave)
    order = DrillOrder(rows, where, first, within, how["really"], how["keep"] and how["keep"].absolute())
    found: list[RowResult] = []
    with for_programs(as_json):
        say(f"{settings.name}: a copy of it is drilled on {_WORDS[where]}; the run itself is not touched", err=True)
        played = play(settings, path.absolute().parent, order, lambda words: say(words, err=True), extend)
        with closing(played):  # a signal comes here too
            for result in played:
                extend(_ENDS)
                found.append(result)
    code = code_of(found, rows)
    notes = _notes(settings)
    if as_json:
        values = {"run": settings.name, "on": where, "code": code, "rows": plain(found), "notes": notes}
        say_json({"schema_version": SCHEMA_VERSION, **values})
    else:
        for line in table_lines(found, notes):
            say(line)
    raise SystemExit(code)


_WORDS = {_SANDBOX: "a Slurm that is made for it", LOCAL: "this machine, without Slurm"}


def _where(settings: Run) -> str:
    """Return where the copy runs: in a sandbox where Slurm is installed, unless the settings say local."""
    from ftsupervise.sandbox import missing

    if settings.scheduler == LOCAL or (settings.scheduler == "auto" and missing()):
        return LOCAL
    return _SANDBOX


def _require_slurm() -> None:
    from ftsupervise.errors import NotFound
    from ftsupervise.sandbox import missing

    if lacking := missing():
        packages = " ".join(dict.fromkeys(lacking.values()))
        hint = f"--on local drills it without one; apt-get install {packages}"
        raise NotFound("this machine has no Slurm to make a sandbox of", hint=hint)


def _duration(option: str, text: str, most: float) -> float:
    from ftsupervise.errors import UsageError
    from ftsupervise.units import parse_duration, show_duration

    try:
        found = parse_duration(text).total_seconds()
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{option}: {error}") from None
    if not 0 < found <= most:
        limit = show_duration(most)
        raise UsageError(f"{option}: {text} is not between a second and {limit}", hint=f"such as {option} 5m")
    return found


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _notes(settings: Run) -> list[str]:
    if settings.alerts.receivers:
        return []
    return ["alerts.receivers is empty: a mailbox of the drill stood in, and nobody would hear of the real run"]


def _list(as_json: bool) -> None:
    from ftsupervise.drill.rows import ROWS

    if as_json:
        rows = [{"row": row.name, "fault": row.fault, "must": row.must} for row in ROWS]
        say_json({"schema_version": SCHEMA_VERSION, "rows": rows})
        return
    for line in list_lines():
        say(line)


def list_lines() -> list[str]:
    """Return what --list prints."""
    from ftsupervise.drill.rows import ROWS

    width = max(len(row.name) for row in ROWS)
    return [f"{row.name:{width}}  {row.fault}: {row.must}" for row in ROWS]


def table_lines(found: Sequence[RowResult], notes: Sequence[str]) -> list[str]:
    """Return a line for each row, and below it, what was wrong, and what to change."""
    head = ("row", "detected", "recovered", "steps lost", "told", "result")
    cells = [
        (one.row, _time(one.detected), _time(one.recovered), _count(one), ", ".join(one.told) or "-") for one in found
    ]
    widths = [max(len(row[index]) for row in (head, *cells)) for index in range(5)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(head, [*widths, 0], strict=True)).rstrip()]
    for one, cell in zip(found, cells, strict=True):
        word = click.style(one.outcome.value, fg=_COLOURS[one.outcome.value])
        lines.append("  ".join([*(text.ljust(width) for text, width in zip(cell, widths, strict=True)), word]))
        lines += [f"    {one.why_not}"] if one.why_not else []
        for problem in one.problems:
            lines += [f"    {problem.why}", f"      do: {problem.do}"]
    words = [one.outcome.value for one in found]
    counts = {said: words.count(word) for word, said in _COUNTED.items()}
    lines.append(", ".join(f"{number} {said}" for said, number in counts.items() if number))
    return [*lines, *(f"note: {note}" for note in notes)]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _count(one: RowResult) -> str:
    return "-" if one.steps_lost is None else f"{one.steps_lost:,}"
