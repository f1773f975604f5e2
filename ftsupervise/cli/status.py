"""``ftsupervise status``: all runs in a table, or one run with its evidence; ``--watch`` goes on showing it."""

from __future__ import annotations

import gc
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli.output import columns, plain, say, say_json
from ftsupervise.printable import printable

if TYPE_CHECKING:
    from ftsupervise.report.detail import RunDetail
    from ftsupervise.report.row import RunRow

_NEWEST = 5  # attempts whose output is looked for


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--watch", "-w", is_flag=True, help="Go on showing it. Keys: q, up, down, Enter: one run, l: its log, r.")
@click.option(
    "--every", "seconds", type=click.FloatRange(5, 3600), default=30, show_default=True, help="Seconds, with --watch."
)
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object (several runs: in its list runs).")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of what --json prints, and nothing else.")
def status(runs: tuple[str, ...], watch: bool, seconds: float, as_json: bool, schema: bool) -> None:
    """Show how all runs of this account are doing, a row each, or RUN in full.

    RUN is a directory, an ftsupervise.yaml, or a name; "." is the run of this directory. Without RUN that one, or in a job
    its run, stands first.
    """
    if schema:
        from ftsupervise.report.published import json_schema

        say_json(json_schema())
        return
    if watch:
        from ftsupervise.cli.status_live import show

        show(runs, seconds)
        return
    if not runs:
        _all(as_json)
        return
    gc.disable()  # nothing that one look makes is garbage, and to look for some takes time
    from ftsupervise.config.find_run import find_run
    from ftsupervise.report.detail import detail

    found = [detail(find_run(run), datetime.now(timezone.utc), os.environ) for run in runs]
    found = [_with_receivers(one) for one in found]
    if as_json:
        from ftsupervise.report.published import SCHEMA_VERSION

        records = [record(one) for one in found]
        say_json({"schema_version": SCHEMA_VERSION, **(records[0] if len(records) == 1 else {"runs": records})})
        return
    from ftsupervise.cli.status_one import lines_of
    from ftsupervise.rundir.records import as_count

    for index, one in enumerate(found):
        if index:
            say()
        for line in lines_of(one, columns() or as_count(os.environ.get("COLUMNS", "")) or 100, _advised(one)):
            say(line)
    _notes(words for one in found for words in one.status.warnings)


def _all(as_json: bool) -> None:
    from ftsupervise.config.find_run import find_run
    from ftsupervise.errors import Error
    from ftsupervise.report.rows import my_runs, overview

    here, missing, runs = None, None, my_runs()
    try:
        here = find_run(None)
    except Error as error:
        missing = error if names_a_run() else None
    if here is not None and not any(place == here.root or place == here.root.resolve() for place in runs.values()):
        runs = {here.root.name: here.root, **runs}
    seen = overview(runs, datetime.now(timezone.utc), os.environ, here=None if here is None else here.root)
    if missing is not None and not seen.rows:
        raise missing
    if as_json:
        from ftsupervise.report.published import SCHEMA_VERSION

        rows = [{**plain(row), "verdict": row.verdict.lower()} for row in seen.rows]
        say_json({"schema_version": SCHEMA_VERSION, "at": seen.at.isoformat(), "runs": rows})
    elif not seen.rows:
        say("This account has launched no run: ftsupervise launch submits the run of an ftsupervise.yaml")
    else:
        from ftsupervise.cli.status_rows import advice, table

        for line in table(seen.rows, seen.at, columns()):
            click.echo(line.rstrip())
        for line in advice(seen.rows, columns(), has_log=_has_log):  # looks into directories: after the table
            click.echo(line.rstrip())
    if missing is not None:
        say(f"note: {missing.message}{f'; {missing.hint}' if missing.hint else ''}", err=True)
    _notes(seen.warnings)


def _has_log(row: RunRow) -> bool:
    """Return whether the output of its newest attempts, which ``logs`` would show, goes to a file."""
    from itertools import islice

    from ftsupervise.report.output import output_files
    from ftsupervise.report.reading import run_name
    from ftsupervise.rundir.ledger import backwards
    from ftsupervise.rundir.paths import RunDir

    rundir = RunDir(Path(row.directory))
    try:
        return bool(output_files(rundir, run_name(rundir), tuple(islice(backwards(rundir), _NEWEST))))
    except OSError:
        return True  # ``logs`` says what is in the way


def names_a_run() -> bool:
    """Does this place name a run: a job of it, or its settings?"""
    from ftsupervise.config.find_run import CONFIG_NAME
    from ftsupervise.rundir.paths import ENV_RUN_DIR

    return bool(os.environ.get(ENV_RUN_DIR)) or Path(CONFIG_NAME).exists()


def _notes(warnings: Any) -> None:
    for words in dict.fromkeys(warnings):
        say(f"note: each command of Slurm warns: {printable(words)}", err=True)


def record(found: RunDetail) -> dict[str, Any]:
    """Return one run as the values that ``--json`` prints."""
    from ftsupervise.report.published import fields_of

    return {**plain(found.row), "verdict": found.status.verdict.lower(), **plain(fields_of(found))}


def _advised(found: RunDetail) -> dict[str, str]:
    """Return what is to be done about each alert that fires, by its name, as far as its journal says it."""
    journal = found.status.rundir.watch / "journal"
    if not found.row.alerts or not journal.is_dir():
        return {}
    from ftsupervise.alerts.journal import Journal
    from ftsupervise.findings import AlertState

    firing = [one.finding for one in Journal(journal).read().alerts.values() if one.state is AlertState.FIRING]
    firing.sort(key=lambda finding: finding.severity)  # the worst one's words stay
    return {finding.watchdog: finding.do for finding in firing if finding.do}


def _with_receivers(found: RunDetail) -> RunDetail:
    """Add the state of its receivers. What reads a journal is imported only where there is one."""
    journal = found.status.rundir.watch / "journal"
    try:
        if not os.listdir(journal):
            return found
    except OSError:
        return found
    from ftsupervise.alerts.self_monitor import telling

    return found._replace(status=found.status._replace(telling=telling(journal, found.status.at)))
