"""``ftsupervise list``: the names of all runs, for scripts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import click

from ftsupervise.cli.output import say_json
from ftsupervise.printable import printable


@click.command("list")
@click.option(
    "--status", "with_status", is_flag=True, help="Also the state of each in one word: RUNNING, HUNG, WAITING …"
)
@click.option("--json", "as_json", is_flag=True, help="Name and directory of each, for programs.")
def list_runs(with_status: bool, as_json: bool) -> None:
    """List the runs that this account has launched: name, a tab, directory. For scripts; it asks no scheduler.

    With --status it asks the scheduler, and a third column has the word with which "ftsupervise status" begins.
    """
    from ftsupervise.report.rows import my_runs

    found = my_runs()
    words = _words(found) if with_status else {}
    if as_json:
        runs = [{"name": name, "directory": str(at)} for name, at in found.items()]
        if with_status:
            runs = [{**run, "verdict": words[run["name"]].lower()} for run in runs]
        say_json({"schema_version": 1, "runs": runs})
        return
    for name, directory in found.items():
        word = f"\t{words[name]}" if with_status else ""
        click.echo(f"{printable(name)}\t{printable(str(directory))}{word}")


def _words(runs: Mapping[str, Path]) -> dict[str, str]:
    """The verdict on each run, by its name. A run that does not answer is UNKNOWN."""
    from ftsupervise.report.rows import overview

    seen = overview(runs, datetime.now(timezone.utc), os.environ)
    return {row.name: row.verdict for row in seen.rows if not row.elsewhere}
