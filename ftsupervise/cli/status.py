"""``ftsupervise status``: all runs in a table, or one run with its evidence; ``--watch`` goes on showing it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli.output import columns, plain, say, say_json
from ftsupervise.printable import printable

if TYPE_CHECKING:
    from ftsupervise.report.detail import RunDetail

SCHEMA_VERSION = 3  # docs/status.md has its fields


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--all", "-a", "every", is_flag=True, help="All runs of this account.")
@click.option("--watch", "-w", is_flag=True, help="Go on showing it. Keys: q, up, down, Enter: one run, l: its log, r.")
@click.option(
    "--every", "seconds", type=click.FloatRange(5, 3600), default=30, show_default=True, help="Seconds, with --watch."
)
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object (several runs: in its list runs).")
def status(runs: tuple[str, ...], every: bool, watch: bool, seconds: float, as_json: bool) -> None:
    """Show how RUN is doing. RUN is a directory, an ftsupervise.yaml, or a name.

    Without RUN: the run of ./ftsupervise.yaml, or in a job its run; anywhere else, and with --all, all runs in a table.
    """
    if watch:
        from ftsupervise.cli.status_live import show

        show([*runs, *(["--all"] if every else [])], seconds)
        return
    if every or (not runs and not _one_is_meant()):
        _all(as_json)
        return
    from ftsupervise.config.find_run import find_run
    from ftsupervise.report.detail import detail

    found = [detail(find_run(run), datetime.now(timezone.utc), os.environ) for run in runs or (None,)]
    found = [_with_receivers(one) for one in found]
    if as_json:
        records = [record(one) for one in found]
        say_json({"schema_version": SCHEMA_VERSION, **(records[0] if len(records) == 1 else {"runs": records})})
        return
    from ftsupervise.cli.status_one import lines_of
    from ftsupervise.rundir.records import as_count

    for index, one in enumerate(found):
        if index:
            say()
        for line in lines_of(one, columns() or as_count(os.environ.get("COLUMNS", "")) or 100):
            say(line)
    _notes(words for one in found for words in one.status.warnings)


def _one_is_meant() -> bool:
    """Does this place name a run: a job of it, or its settings?"""
    from ftsupervise.config.find_run import CONFIG_NAME
    from ftsupervise.rundir.paths import ENV_RUN_DIR

    return bool(os.environ.get(ENV_RUN_DIR)) or Path(CONFIG_NAME).exists()


def _all(as_json: bool) -> None:
    from ftsupervise.report.rows import my_runs, overview

    seen = overview(my_runs(), datetime.now(timezone.utc), os.environ)
    if as_json:
        rows = [{**plain(row), "verdict": row.verdict.lower()} for row in seen.rows]
        say_json({"schema_version": SCHEMA_VERSION, "at": seen.at.isoformat(), "runs": rows})
        return
    if not seen.rows:
        say("This account has launched no run: ftsupervise launch submits the run of an ftsupervise.yaml")
    else:
        from ftsupervise.cli.status_rows import table

        for line in table(seen.rows, seen.at, columns()):
            click.echo(line.rstrip())
    _notes(seen.warnings)


def _notes(warnings: Any) -> None:
    for words in dict.fromkeys(warnings):
        say(f"note: each command of Slurm warns: {printable(words)}", err=True)


def record(found: RunDetail) -> dict[str, Any]:
    """One run for programs."""
    seen, run = found.status, found.status.run
    more: Mapping[str, Any] = {
        "jobs": None if seen.jobs is None else plain(seen.jobs),
        "blind": seen.blind,
        "ledger": plain(run.attempts),
        "not_read": run.not_read,
        "progress": plain(run.page),
        "beats": plain(run.beats),
        "switches": plain(run.switches),
        "finished": run.finished,
        "avoided_nodes": plain(found.avoided),
        "log": plain(found.log),
        "time": plain(found.time),
        "receivers": plain(seen.telling),
        "warnings": plain(seen.warnings),
        "at": seen.at.isoformat(),
    }
    return {**plain(found.row), "verdict": seen.verdict.lower(), **more}


def _with_receivers(found: RunDetail) -> RunDetail:
    """The state of its receivers. What reads a journal is imported where there is one: half of a start."""
    journal = found.status.rundir.watch / "journal"
    try:
        if not os.listdir(journal):
            return found
    except OSError:
        return found
    from ftsupervise.alerts.self_monitor import telling

    return found._replace(status=found.status._replace(telling=telling(journal, found.status.at)))
