"""``ftsupervise version``: which version this is, and which Python it runs in."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ftsupervise.cli.output import say_json
from ftsupervise.version import VERSION


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, with the Python that it runs in.")
def version(as_json: bool) -> None:
    """Print the version, as --version does."""
    if as_json:
        python = ".".join(map(str, sys.version_info[:3]))
        lies = str(Path(__file__).parents[1])
        say_json(
            {"schema_version": 1, "version": VERSION, "python": python, "program": sys.executable, "package": lies}
        )
        return
    click.echo(f"ftsupervise {VERSION}")
