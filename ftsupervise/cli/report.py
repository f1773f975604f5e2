"""``ftsupervise report``: a run as one HTML file, or as Markdown; the last week of several, also by mail."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftsupervise.cli import time_limit
from ftsupervise.cli.output import say
from ftsupervise.errors import CannotWrite, Error, UsageError, from_os_error
from ftsupervise.printable import printable
from ftsupervise.units import count

if TYPE_CHECKING:
    from ftsupervise.host.ownership import Reach
    from ftsupervise.report.everything import ReportFacts
    from ftsupervise.report.week import WeekReport

_LOOK = 4.0  # seconds for a run directory to say who may read it


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--output", "-o", metavar="FILE", help="The file to write; -: standard output.")
@click.option("--markdown", is_flag=True, help="Markdown for a pull request or a wiki, on standard output.")
@click.option(
    "--week", is_flag=True, help="The last seven days of RUNs, or of all runs of this account, in one report."
)
@click.option("--mail", is_flag=True, help="With --week: mail it to the email receivers of the runs instead.")
def report(runs: tuple[str, ...], output: str | None, markdown: bool, week: bool, mail: bool) -> None:
    """Write what there is to know about RUN into one HTML file, which needs no network: report-NAME.html.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.

    \b
    ftsupervise report train-10b             report-train-10b.html
    ftsupervise report train-10b --markdown  for a pull request or a wiki
    ftsupervise report --week                all runs, the last seven days
    ftsupervise report --week --mail         the same, by mail (for the crontab)
    """
    from ftsupervise.config.find_run import find_run

    if mail and not week:
        raise UsageError("--mail sends the report of a week", hint="ftsupervise report --week --mail")
    if mail and (output is not None or markdown):
        raise UsageError("--mail writes no file", hint="leave out --output and --markdown")
    if week:
        _week(runs, output, markdown=markdown, mail=mail)
        return
    if output is not None and output != "-" and len(runs) > 1:
        raise UsageError(
            "--output names one file, and there are several runs", hint="leave it out: each run has its own file"
        )
    names: list[str] = []
    for run in runs or (None,):
        root = find_run(run).root
        found = _read(root)
        names.append(_name(found.detail.status.name, names))
        _write(_text(found, markdown=markdown), output or ("-" if markdown else names[-1]), (root,))


def _week(runs: tuple[str, ...], output: str | None, *, markdown: bool, mail: bool) -> None:
    from ftsupervise.config.find_run import find_run
    from ftsupervise.report.rows import my_runs

    where: dict[str, Path] = {} if runs else my_runs()
    for root in (find_run(run).root for run in runs):
        where[str(root) if where.get(root.name, root) != root else root.name] = root
    if mail:
        _mail(where)
        return
    from ftsupervise.report.mail import filename
    from ftsupervise.report.week_page import as_markdown, page

    found = _seven_days(where)
    text = as_markdown(found) if markdown else page(found)
    _write(text, output or ("-" if markdown else filename(found.end)), tuple(where.values()))


def _seven_days(where: Mapping[str, Path]) -> WeekReport:
    from ftsupervise.report.week import week_of

    return week_of(where, datetime.now(timezone.utc), os.environ, extend=time_limit.extend)


def _mail(where: Mapping[str, Path]) -> None:
    """Mail each receiver the report of its runs. What one of them does not take keeps no other from having it."""
    from ftsupervise.alerts.receivers import Broken, TryLater
    from ftsupervise.report.mail import addressees, send

    found, problems = addressees(where)
    for sentence in problems:
        say(f"left out: {sentence}", err=True)
    failed = []
    for one in found:
        seven = _seven_days(one.runs)
        to = ", ".join(one.settings.to)
        if not seven.rows:
            say(f"{one.name}: nothing to report: none of its runs was active in the last seven days")
            continue
        try:
            refused = send(seven, one.settings)
        except (TryLater, Broken) as error:
            failed.append(f"{one.name}: {error}")
            continue
        say(f"{one.name}: mailed to {to}: {count(len(seven.rows), 'run')}{f'; refused: {refused}' if refused else ''}")
    if not found:
        say(
            "no run names a receiver of kind email, so nothing was mailed: alerts.receivers in ftsupervise.yaml",
            err=True,
        )
    if failed:
        raise Error("; ".join(failed), hint="ftsupervise notify test tries the receivers")


def _read(root: Path) -> ReportFacts:
    from ftsupervise.report.everything import report_of
    from ftsupervise.rundir import pinned
    from ftsupervise.rundir.paths import RunDir, state_dir

    try:
        pinned.require(state_dir(), RunDir(root), copies=True)
    except OSError as error:
        raise from_os_error(error, f"look at the run directory {root}") from None
    return report_of(RunDir(root), datetime.now(timezone.utc), os.environ, time_limit.extend)


def _text(found: ReportFacts, *, markdown: bool) -> str:
    if markdown:
        from ftsupervise.report.markdown import as_markdown

        return as_markdown(found)
    from ftsupervise.report.html import page

    return page(found)


def _name(of: str, taken: list[str]) -> str:
    """Return the name of the file for a run. Two runs of one command may be called alike."""
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in of)
    stem = f"report-{plain[:100].lstrip('.') or 'run'}"
    every = (f"{stem}{f'-{number}' if number > 1 else ''}.html" for number in range(1, len(taken) + 2))
    return next(name for name in every if name not in taken)


def _write(text: str, to: str, about: Sequence[Path]) -> None:
    """Write a report, for those alone who may read all the run directories that it is ``about``."""
    from ftsupervise.host.ownership import PAGE, Reach
    from ftsupervise.rundir.paths import write_whole

    if to == "-":
        click.echo(text, nl=False)
        return
    path = Path(to).absolute()
    try:
        write_whole(path, text, mode=Reach(PAGE).within(*map(_readers, about)), sync=False)
    except OSError as error:
        raise from_os_error(error, f"write {path}") from None
    except ValueError as error:  # a null byte in the name
        raise CannotWrite(f"cannot write {printable(str(path))}: {error}") from None
    say(f"{path}: {len(text.encode()) / 1024:.0f} kB")


def _readers(root: Path) -> Reach:
    """Return who may read a run directory: its owner alone where that cannot be seen in time."""
    from ftsupervise.host.in_time import in_time
    from ftsupervise.host.ownership import OWN, Reach, reach, reach_on_the_way

    try:
        found = in_time(lambda: reach(root, follow=True).within(reach_on_the_way(root)), _LOOK)
    except OSError:
        found = None
    return Reach(OWN) if found is None else found
