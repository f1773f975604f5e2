"""The values that ``plan`` and ``simulate`` are given, and the run from which they take the others."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ftsupervise.errors import NotFound, UsageError, from_os_error
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.planning.inputs import PlanInputs
    from ftsupervise.report.everything import ReportFacts


class Number(click.FloatRange):
    """A number, which "nan" and "inf" are not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is no number", param, ctx)
        return found


_Command = TypeVar("_Command", bound=Callable[..., Any])
_TIMES = {
    "mtbf": "Time between two failures of the job.",
    "save": "How long the loop waits for a checkpoint.",
    "interval": "Training between two checkpoints, as it is now.",
    "detect": "From a failure until it is noticed.",
    "hang": "From the last step of a hang until it is ended.",
    "warm": "A restart in the same job, until its first step.",
    "cold": "From the begin of another job to its first step.",
    "queue": "Wait between two jobs.",
    "step": "A step of the training.",
    "limit": "Time limit of a job.",
}
_LEAST = 60.0  # seconds that a job lasts
FAULTS = 2_000_000  # of a simulated run: half a gigabyte
_SHARES = {
    "lost": "Share of the failures that take the node away: 50%.",
    "silent": "Share of the failures that are a hang: 10%.",
}


def value_options(command: _Command) -> _Command:
    """The options of the values, each with its unit."""
    options = [
        click.option("--gpus", type=click.IntRange(1, 10_000_000), help="GPUs of the job, in all."),
        click.option("--gpus-per-node", type=click.IntRange(0, 1024), help="Default: of the run, else 8."),
        click.option("--nodes", type=click.IntRange(1, 10_000_000), help="Nodes of the job, in place of --gpus."),
        click.option("--failures", type=Number(0, 1e6), metavar="N", help="Failures in 1,000 node-days, such as 6.5."),
        *(click.option(f"--{name}", metavar="TIME", help=words) for name, words in _TIMES.items()),
        *(click.option(f"--{name}", metavar="SHARE", help=words) for name, words in _SHARES.items()),
        click.option("--size", metavar="SIZE", help="Size of a checkpoint: 2.3TB."),
        click.option("--spares", type=click.IntRange(0, 10_000), help="Spare nodes of the job."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def inputs_from(report: ReportFacts | None, words: Mapping[str, Any]) -> PlanInputs:
    """Return the measurements of the run, with the values that were given in their place."""
    from ftsupervise.planning.formulas import job_mtbf
    from ftsupervise.planning.inputs import given, usual_inputs
    from ftsupervise.planning.measured import inputs_of

    if words.get("mtbf") is not None and words.get("failures") is not None:
        raise UsageError("--mtbf and --failures say the same in two ways", hint="give one of them")
    if words.get("gpus") and words.get("nodes"):
        raise UsageError("--gpus and --nodes say the same in two ways", hint="give --gpus-per-node with one of them")
    if report is None:
        each = 8 if words.get("gpus_per_node") is None else int(words["gpus_per_node"])
        found = usual_inputs(_nodes(words, each) or 1, each)
    else:
        found = inputs_of(report)
        each = found.gpus if words.get("gpus_per_node") is None else int(words["gpus_per_node"])
        other = _nodes(words, each)
        if other and other != found.nodes:
            # a node fails as often as before
            mtbf, by = found.mtbf, found.nodes / other
            scaled = mtbf._replace(value=mtbf.value * by, low=mtbf.low * by, high=mtbf.high * by)
            found = found._replace(nodes=other, mtbf=scaled)
        found = found._replace(gpus=each)
    changed: dict[str, Any] = {}
    if words.get("failures") is not None:
        rate = float(words["failures"]) / 1000
        changed["mtbf"] = given(job_mtbf(found.nodes, rate), f"{words['failures']:g} failures in 1,000 node-days")
    for name in _TIMES:
        if words.get(name) is not None:
            seconds = a_time(f"--{name}", words[name])
            changed[name] = seconds if name == "limit" else given(seconds)
    for name in _SHARES:
        if words.get(name) is not None:
            changed[name] = given(_share(f"--{name}", words[name]))
    if words.get("size") is not None:
        changed["size"] = given(_size(words["size"]))
    if words.get("training") is not None:
        changed["left"] = a_time("--training", words["training"])
    if words.get("spares") is not None:
        changed["spares"] = words["spares"]
    found = found._replace(**changed)
    if found.interval.value <= 0 or found.step.value <= 0 or found.mtbf.value <= 0:
        raise UsageError("--interval, --step and --mtbf are longer than nothing")
    if found.limit < _LEAST:
        raise UsageError(f"a job of {show_duration(found.limit)} trains nothing", hint="--limit 24h")
    return found


def _nodes(words: Mapping[str, Any], each: int) -> int:
    """Return the nodes that were asked for; 0: none were."""
    return math.ceil(int(words["gpus"]) / max(1, each)) if words.get("gpus") else int(words.get("nodes") or 0)


def a_time(name: str, text: str) -> float:
    """Seconds. Raises UsageError."""
    from ftsupervise.units import parse_duration

    try:
        return parse_duration(text).total_seconds()
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None


def _share(name: str, text: str) -> float:
    from ftsupervise.units import parse_share

    try:
        return parse_share(text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None


def _size(text: str) -> float:
    from ftsupervise.units import parse_size

    try:
        return float(parse_size(text))
    except ValueError as error:
        raise UsageError(f"--size: {error}") from None


def price_of(report: ReportFacts | None, given: float | None) -> float | None:
    """Return the price that was given, else that in the run's settings."""
    return given if given is not None or report is None or report.run is None else report.run.price


def read_run(run: str | None, extend: Callable[[float], None] = lambda _: None) -> ReportFacts:
    """Read all that is known of a run. Raises NotFound, NotPermitted, NotTrusted."""
    from ftsupervise.config.find_run import find_run
    from ftsupervise.report.everything import report_of
    from ftsupervise.rundir import pinned
    from ftsupervise.rundir.paths import state_dir

    try:
        rundir = find_run(run)
    except NotFound as error:
        if run is None:
            raise NotFound(error.message, hint=f"{error.hint}; or give --gpus, and none is read") from None
        raise
    try:
        pinned.require(state_dir(), rundir, copies=True)
    except OSError as error:
        raise from_os_error(error, f"look at the run directory {rundir.root}") from None
    return report_of(rundir, datetime.now(timezone.utc), os.environ, extend)
