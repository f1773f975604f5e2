"""``ftsupervise metrics``: runs as metrics for Prometheus, printed or written for node_exporter's textfile collector."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import JSON, answer, say

if TYPE_CHECKING:
    from ftsupervise.report.reading import RunReading
    from ftsupervise.report.textfile import RunMetrics
    from ftsupervise.rundir.paths import RunDir


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=RUN)
@click.option(
    "--to",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write a file for each run into this directory, as the watch does with watch.metrics.",
)
@JSON
def metrics(runs: tuple[str, ...], folder: Path | None, as_json: bool) -> None:
    """Print RUN as metrics in Prometheus's text format. RUN is a directory, an ftsupervise.yaml, or a name; default: all runs
    of this account.

    The watch writes them by itself where watch.metrics names the directory of node_exporter's textfile collector.
    """
    from ftsupervise.config.find_run import each_run, find_run
    from ftsupervise.errors import CannotWrite, Error
    from ftsupervise.report.metrics import text_of
    from ftsupervise.report.queues import ask_queues
    from ftsupervise.report.rows import my_runs
    from ftsupervise.report.textfile import measure, sweep, write
    from ftsupervise.rundir.paths import RunDir

    now, troubles = datetime.now(timezone.utc), list[str]()
    places = [find_run(run) for run in each_run(runs)] if runs else [RunDir(place) for place in my_runs().values()]
    read = _read(places, now, troubles)
    made: dict[tuple[str, str], RunMetrics] = {}
    for one, queue in zip(read, ask_queues(read, os.environ).of, strict=True):
        try:
            found = measure(one.rundir, queue.jobs, queue.blind, now)
        except Error as error:
            if len(places) == 1:
                raise
            troubles.append(error.message)
            continue
        if other := made.get((found.name, found.user)):
            troubles.append(f"{found.root} is left out: {other.root} is called {found.name} too")
        else:
            made[found.name, found.user] = found
    if folder is None and as_json:
        answer(runs=[_record(one) for one in made.values()])
    elif folder is None:
        say(text_of(sample for one in made.values() for sample in one.samples).rstrip("\n"))
    else:
        troubles += [trouble for one in made.values() if (trouble := write(folder, one))]
        sweep(folder)
        if as_json:
            answer(folder=folder, runs=[one.name for one in made.values()], troubles=troubles)
    for trouble in troubles:
        say(f"note: {trouble}", err=True)
    if folder is not None and troubles:
        raise CannotWrite(f"{len(troubles)} of {len(places)} runs could not be written to {folder}")


def _record(one: RunMetrics) -> dict[str, object]:
    from math import isfinite

    samples = [
        {"name": each.name, "labels": dict(each.labels), "value": each.value if isfinite(each.value) else None}
        for each in one.samples
    ]
    return {"run": one.name, "user": one.user, "directory": one.root, "samples": samples}


def _read(places: list[RunDir], now: datetime, troubles: list[str]) -> list[RunReading]:
    """Read all of them side by side, so that one on a dead mount costs no other its metrics.

    The trouble of a single run is the error of the command.
    """
    from ftsupervise.report.reading import read_own
    from ftsupervise.report.rows import read_side_by_side

    if len(places) == 1:
        return [read_own(places[0], now, row=True)]
    found = read_side_by_side({str(place.root): place.root for place in places}, now).values()
    troubles += [one for one in found if isinstance(one, str)]
    return [one for one in found if not isinstance(one, str)]
