"""``ftsupervise report``: a run as one HTML file, or as Markdown."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftsupervise.cli import time_limit
from ftsupervise.cli.output import say
from ftsupervise.errors import CannotWrite, UsageError, from_os_error
from ftsupervise.printable import printable

if TYPE_CHECKING:
    from ftsupervise.report.everything import RunReport

_READ = 30.0  # seconds that a run of very many attempts may take


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--output", "-o", metavar="FILE", help="The file to write; -: standard output.")
@click.option("--markdown", is_flag=True, help="Markdown for a pull request or a wiki, on standard output.")
def report(runs: tuple[str, ...], output: str | None, markdown: bool) -> None:
    """Write what there is to know about RUN into one HTML file, which needs no network: report-NAME.html.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.

    \b
    ftsupervise report train-10b                  report-train-10b.html
    ftsupervise report train-10b --markdown       for a pull request or a wiki
    """
    from ftsupervise.config.find_run import find_run

    if output is not None and output != "-" and len(runs) > 1:
        raise UsageError(
            "--output names one file, and there are several runs", hint="leave it out: each run has its own"
        )
    for run in runs or (None,):
        found = _read(find_run(run).root)
        _write(_text(found, markdown=markdown), output or ("-" if markdown else _name(found.detail.status.name)))


def _read(root: Path) -> RunReport:
    from ftsupervise.report.everything import report_of
    from ftsupervise.rundir.paths import RunDir

    time_limit.extend(_READ)
    return report_of(RunDir(root), datetime.now(timezone.utc), os.environ, time_limit.extend)


def _text(found: RunReport, *, markdown: bool) -> str:
    if markdown:
        from ftsupervise.report.markdown import as_markdown

        return as_markdown(found)
    from ftsupervise.report.html import page

    return page(found)


def _name(of: str) -> str:
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in of)
    return f"report-{plain[:100].lstrip('.') or 'run'}.html"


def _write(text: str, to: str) -> None:
    from ftsupervise.rundir.paths import write_whole

    if to == "-":
        click.echo(text, nl=False)
        return
    path = Path(to).absolute()
    try:
        write_whole(path, text, sync=False)
    except OSError as error:
        raise from_os_error(error, f"write {path}") from None
    except ValueError as error:  # a null byte in the name
        raise CannotWrite(f"cannot write {printable(str(path))}: {error}") from None
    say(f"{path}: {len(text.encode()) / 1024:.0f} kB")
