"""``ftsupervise list``: the names of all runs, for scripts."""

from __future__ import annotations

import click

from ftsupervise.cli.output import say_json
from ftsupervise.printable import printable


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Name and directory of each, for programs.")
def list_runs(as_json: bool) -> None:
    """List the runs that this account has launched: name, a tab, directory. For scripts; asks nobody."""
    from ftsupervise.report.rows import my_runs

    found = my_runs()
    if as_json:
        say_json({"schema_version": 1, "runs": [{"name": name, "directory": str(at)} for name, at in found.items()]})
        return
    for name, directory in found.items():
        click.echo(f"{printable(name)}\t{printable(str(directory))}")
