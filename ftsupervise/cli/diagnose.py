"""``ftsupervise diagnose``: one verdict about an attempt, from all that it has left behind."""

from __future__ import annotations

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
    from ftsupervise.diagnosis.verdict import Diagnosis

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
    Default: the newest attempt that failed.

    It reads the ledger, the output of all ranks, the evidence of a hang, and dumps of PyTorch's flight recorder. It asks and
    ends nothing. RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml. It may be a folder from
    elsewhere, of logs and dumps whose names end in the number of a rank.
    """
    folder = Path(run) if run is not None else None
    if folder is not None and folder.is_dir() and not _is_run(folder):
        found, before, title = _of_folder(folder, whole=whole), tuple[int, ...](), str(folder)
    else:
        found, before, title = _of_run(run, attempt, whole=whole)
    if as_json:
        say_json({"schema_version": SCHEMA_VERSION, **_masked(plain(found)), "alike_before": list(before)})
        return
    for line in lines_of(found, before, title):
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


def _of_run(run: str | None, number: int | None, *, whole: bool) -> tuple[Diagnosis, tuple[int, ...], str]:
    from ftsupervise.config.find_run import find_run
    from ftsupervise.diagnosis.gather import alike_before, chosen, of_attempt
    from ftsupervise.diagnosis.verdict import judge_attempt
    from ftsupervise.report.reading import run_name
    from ftsupervise.rundir.ledger import ledger

    rundir = find_run(run)
    try:
        attempts = ledger(rundir)
        one = chosen(attempts, number)
    except OSError as error:
        raise from_os_error(error, f"read the attempts of {rundir.root}") from None
    if one is None:
        known = f"it has attempts up to {attempts[-1].number}" if attempts else "it has begun none"
        which = f"attempt {number}" if number is not None else "attempt"
        raise NotFound(f"{rundir.root.name} has no {which}", hint=f"{known}: ftsupervise status {rundir.quoted()}")
    found = judge_attempt(of_attempt(rundir, attempts, one, whole=whole, progress=_extend))
    return found, alike_before(attempts, one), run_name(rundir)


def lines_of(found: Diagnosis, before: tuple[int, ...], title: str) -> list[str]:
    """Return the verdict as lines for people."""
    from ftsupervise.units import count, rank_words

    which = f", attempt {found.attempt}" if found.attempt is not None else ""
    sure = "" if found.kind.value == "unknown" else f" (confidence: {found.confidence.value})"
    lines = [f"{title}{which}: {found.kind.value}{sure}", f"  {found.headline}", ""]

    def add(word: str, text: str) -> None:
        lines.append(f"{word:<10}{text}")

    where = " ".join(
        filter(
            None,
            (rank_words(found.culprits) if found.culprits else "", "on " * bool(found.nodes) + ", ".join(found.nodes)),
        )
    )
    if where:
        add("where", where)
    for at, one in enumerate(found.evidence):
        add("decides" if not at else "", f"{one.source}: {one.text}")
    for at, group in enumerate(found.stacks[:_GROUPS]):
        add("ranks" if not at else "", group.words())
    if len(found.stacks) > _GROUPS:
        add("", f"and {count(len(found.stacks) - _GROUPS, 'more group')}")
    if before:
        add(
            "before",
            f"attempt{'s' if len(before) > 1 else ''} {', '.join(map(str, before[-10:]))} failed in the same way",
        )
    if found.done:
        add("done", found.done)
    if found.remedy:
        add("to try", found.remedy)
    for at, why in enumerate(found.unseen[:5]):
        add("unseen" if not at else "", why)
    return lines
