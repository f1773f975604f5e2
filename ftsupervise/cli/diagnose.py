"""``ftsupervise diagnose``: one verdict about an attempt, from all that it has left behind, or from its ranks while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli import time_limit
from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import plain, say, say_json
from ftsupervise.errors import NotFound, from_os_error
from ftsupervise.printable import printable
from ftsupervise.secrecy import masked

if TYPE_CHECKING:
    from ftsupervise.diagnosis.compared import Comparison
    from ftsupervise.diagnosis.live import LiveDiagnosis
    from ftsupervise.diagnosis.verdict import Diagnosis
    from ftsupervise.model import Attempt
    from ftsupervise.rundir.paths import RunDir

_AT_A_TIME = 12.0  # seconds that a part of the output may take
_GROUPS = 8  # of ranks that do the same
SCHEMA_VERSION = 1


@click.command()
@click.argument("run", required=False, metavar="[RUN]", type=RUN)
@click.argument("attempt", required=False, type=click.IntRange(1), metavar="[ATTEMPT]")
@click.option("--whole", is_flag=True, help="Read all of the output; else the last part of each file, 1 GiB in all.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def diagnose(run: str | None, attempt: int | None, whole: bool, as_json: bool) -> None:
    """Say what happened in an ATTEMPT of RUN: of which class its end was, whose it was, how sure that is, and by which lines.
    Default: how the run is now, if it runs, else the newest attempt that failed.

    Of an attempt that is over it reads the ledger, the output of all ranks, the evidence of a hang, and dumps of PyTorch's
    flight recorder. While a run goes on or hangs, its supervisor asks the ranks where they are; nothing is ended. RUN is a
    directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml. It may be a folder from elsewhere, of logs and
    dumps whose names end in the number of a rank.
    """
    from ftsupervise.config.find_run import refuse_namesake

    refuse_namesake(run)
    folder = Path(run) if run is not None else None
    if folder is not None and folder.is_dir() and not _is_run(folder):
        _show(_of_folder(folder, whole=whole), None, str(folder), as_json=as_json)
        return
    rundir, attempts, title = _found(run)
    live, why = _now(rundir, attempts, attempt)
    if live is not None:
        failed = [one for one in attempts if one.has_failed]
        _show_now(live, failed[-1] if failed else None, title, rundir, as_json=as_json)
        return
    found, beside = _of_run(rundir, attempts, attempt, whole=whole)
    _show(found._replace(unseen=(*found.unseen, *filter(None, (why,)))), beside, title, as_json=as_json)


def _show(found: Diagnosis, beside: Comparison | None, title: str, *, as_json: bool) -> None:
    if as_json:
        from ftsupervise.diagnosis.compared import Comparison

        known = beside or Comparison()
        more = {"alike_before": known.before, "history": known.sentences(), "advice": known.advice()}
        say_json({"schema_version": SCHEMA_VERSION, **_masked(plain({**plain(found), **more}))})
        return
    for line in lines_of(found, beside, title):
        say(masked(printable(line)))


def _masked(value: Any) -> Any:
    """Return the record without secrets that stood in the output."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, list):
        return [_masked(one) for one in value]
    return {key: _masked(one) for key, one in value.items()} if isinstance(value, dict) else value


def _is_run(folder: Path) -> bool:
    return (folder / "switches").is_dir() or (folder / "ftsupervise.yaml").is_file() or (folder / "attempts").is_dir()


def _extend() -> None:
    time_limit.extend(_AT_A_TIME)


def _of_folder(folder: Path, *, whole: bool) -> Diagnosis:
    from ftsupervise.diagnosis.gather import of_folder
    from ftsupervise.diagnosis.verdict import judge_attempt

    try:
        material = of_folder(folder, whole=whole, progress=_extend)
    except OSError as error:
        raise from_os_error(error, f"read {folder}") from None
    if not (material.output.read or material.stacks or material.flight):
        raise NotFound(
            f"{folder} is no run, and holds no log (.log, .out, .err, .txt) and no dump of a flight recorder",
            hint="name a run, or a folder of dumps whose names end in the number of a rank: rank_0, rank_1",
        )
    return judge_attempt(material)


def _found(run: str | None) -> tuple[RunDir, tuple[Attempt, ...], str]:
    from ftsupervise.config.find_run import find_run
    from ftsupervise.report.reading import run_name
    from ftsupervise.rundir.ledger import ledger

    rundir = find_run(run)
    try:
        return rundir, ledger(rundir), run_name(rundir)
    except OSError as error:
        raise from_os_error(error, f"read the attempts of {rundir.root}") from None


def _of_run(
    rundir: RunDir, attempts: tuple[Attempt, ...], number: int | None, *, whole: bool
) -> tuple[Diagnosis, Comparison]:
    from ftsupervise.diagnosis.gather import chosen, of_attempt
    from ftsupervise.diagnosis.kept import compared
    from ftsupervise.diagnosis.verdict import judge_attempt

    one = chosen(attempts, number)
    if one is None:
        known = f"it has attempts up to {attempts[-1].number}" if attempts else "it has begun none"
        which = f"attempt {number}" if number is not None else "attempt"
        raise NotFound(f"{rundir.root.name} has no {which}", hint=f"{known}: ftsupervise status {rundir.quoted()}")
    found = judge_attempt(of_attempt(rundir, attempts, one, whole=whole, progress=_extend))
    return found, compared(rundir, found, one, attempts)


def _now(rundir: RunDir, attempts: Sequence[Attempt], number: int | None) -> tuple[LiveDiagnosis | None, str]:
    """Return how the run is now; None where it does not run, or nobody answers and nothing was heard for long: then why, as a
    clause."""
    from ftsupervise.diagnosis.live import look

    try:
        return look(rundir, attempts, number, datetime.now(timezone.utc), time_limit.extend)
    except OSError as error:
        raise from_os_error(error, f"ask the ranks of {rundir.root}") from None


def _show_now(live: LiveDiagnosis, failed: Attempt | None, title: str, rundir: RunDir, *, as_json: bool) -> None:
    if as_json:
        now = {key: value for key, value in plain(live).items() if key != "found"}
        found = _masked({**plain(live.found), "now": now})
        say_json({"schema_version": SCHEMA_VERSION, **found, "alike_before": [], "history": [], "advice": ""})
        return
    for line in lines_now(live, failed, title, rundir.quoted()):
        say(masked(printable(line)))


def lines_now(live: LiveDiagnosis, failed: Attempt | None, title: str, run: str) -> list[str]:
    """Return how a run is as lines for people. ``failed``: its newest attempt that failed; ``run``: as a shell takes it."""
    from ftsupervise.units import count

    found, stands = live.found, live.found.culprits
    sure = f": {found.kind.value} (confidence: {found.confidence.value})" if stands else ""
    lines = [f"{title}, attempt {found.attempt}, now: {live.state.value}{sure}", f"  {found.headline}", ""]
    if live.why != found.headline:
        lines.append(_row("state", live.why))
    lines += _verdict_rows(found)
    for at, group in enumerate(live.steps[:_GROUPS]):
        lines.append(_row("steps" if not at else "", group.words()))
    if len(live.steps) > _GROUPS:
        lines.append(_row("", f"and {count(len(live.steps) - _GROUPS, 'more group')}"))
    if stands and found.remedy:
        lines.append(_row("to try", found.remedy))
    if failed is not None:
        words = f"attempt {failed.number} failed: ftsupervise diagnose {run} {failed.number}"
        lines.append(_row("before", words))
    return [*lines, *_unseen_rows(found)]


def lines_of(found: Diagnosis, beside: Comparison | None, title: str) -> list[str]:
    """Return the verdict as lines for people. ``beside``: what was before it."""
    which = f", attempt {found.attempt}" if found.attempt is not None else ""
    sure = "" if found.kind.value == "unknown" else f" (confidence: {found.confidence.value})"
    lines = [f"{title}{which}: {found.kind.value}{sure}", f"  {found.headline}", "", *_verdict_rows(found)]
    for at, sentence in enumerate(beside.sentences() if beside is not None else ()):
        lines.append(_row("before" if not at else "", sentence))
    if found.done:
        lines.append(_row("done", found.done))
    if beside is not None and (advice := beside.advice()):
        lines.append(_row("next", advice))
    if found.remedy:
        lines.append(_row("to try", found.remedy))
    return [*lines, *_unseen_rows(found)]


def _row(word: str, text: str) -> str:
    return f"{word:<10}{text}"


def _verdict_rows(found: Diagnosis) -> list[str]:
    """Return whose it is, by which lines, and the groups of ranks that do the same."""
    from ftsupervise.diagnosis.kept import where_of
    from ftsupervise.units import count

    where = where_of(found)
    rows = [_row("where", where)] if where else []
    rows += [_row("decides" if not at else "", f"{one.source}: {one.text}") for at, one in enumerate(found.evidence)]
    rows += [_row("ranks" if not at else "", group.words()) for at, group in enumerate(found.stacks[:_GROUPS])]
    if len(found.stacks) > _GROUPS:
        rows.append(_row("", f"and {count(len(found.stacks) - _GROUPS, 'more group')}"))
    return rows


def _unseen_rows(found: Diagnosis) -> list[str]:
    return [_row("unseen" if not at else "", why) for at, why in enumerate(found.unseen[:5])]
