"""Compares the promise of the settings, or of the run's own past, with what came: steps, speed, jobs, nodes. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from ftsupervise.report.account import Spent
from ftsupervise.report.everything import PlanRow, ReportFacts
from ftsupervise.report.incidents import steps_again
from ftsupervise.report.slow import SLOW
from ftsupervise.report.summary import reached
from ftsupervise.units import count, show_duration, show_percent, show_rate


class HelpRow(NamedTuple):
    """Return the effect of one change."""

    change: str
    gain: str
    worth: str


class PlanForecast(NamedTuple):
    """The result of ``ftsupervise plan`` for the page; the room that plans stands above this one, and so it is handed in.
    ``picture``: an SVG, whose texts are escaped."""

    sentence: str
    picture: str
    helps: tuple[HelpRow, ...]


def plan_line(report: ReportFacts) -> tuple[tuple[float, float], ...]:
    """The steps that the usual speed would have made since the launch without any loss: two or three points, epoch seconds and
    step. Empty where no usual speed is known."""
    of, first = report.detail.account, _first(report)
    if not report.usual or first is None or of.total < 1:
        return ()
    since, until, goal = of.since.timestamp(), of.until.timestamp(), report.detail.row.last_step
    ideal = first + report.usual * of.total
    if goal is None or ideal <= goal:
        return ((since, float(first)), (until, ideal))
    done = since + (goal - first) / report.usual
    return ((since, float(first)), (done, float(goal)), (until, float(goal)))


def plan_rows(report: ReportFacts) -> Iterator[PlanRow]:
    row, of, run = report.detail.row, report.detail.account, report.run
    step = reached(report)
    if row.last_step:
        came = f"step {step:,} ({show_percent(step / row.last_step)})" if step is not None else "no step yet"
        yield PlanRow("Last step", f"step {row.last_step:,}", came)
    line, trained, whole = plan_line(report), of.seconds()[Spent.TRAIN], of.total
    if line and step is not None:
        ideal = line[-1][1]
        yield PlanRow(
            "Step by now",
            f"step {ideal:,.0f}, at the usual speed without any loss",
            f"step {step:,} ({show_percent(step / max(ideal, 1.0))})",
            step < 0.8 * ideal,
        )
    if report.usual and row.rate is not None:
        yield PlanRow(
            "Speed", f"{show_rate(report.usual, row.rate)} (usual)", show_rate(row.rate), row.rate < SLOW * report.usual
        )
    if trained > 0 and report.slow:
        lost = sum(one.lost for one in report.slow)
        yield PlanRow("Time below 80 % of the usual speed", "none", f"{show_duration(lost)} lost", lost > 0.02 * whole)
    if run is not None:
        yield from _of_jobs(report, step)
        yield from _of_nodes(report)
    yield from _again(report)


def _of_jobs(report: ReportFacts, step: int | None) -> Iterator[PlanRow]:
    run, row = report.run, report.detail.row
    assert run is not None
    launch = run.launch
    limit = launch.time.total_seconds() if launch.time else None
    each = f" of at most {show_duration(limit)} each" if limit else ""
    ran = len(dict.fromkeys(one.job_id for one in report.detail.status.attempts if one.job_id))
    waits = "" if row.members_left is None else f", {row.members_left:,} more in the queue"
    over = row.members_left == 0 and report.detail.status.verdict in ("RUNNING", "SLOW", "STALLED", "SILENT", "HUNG")
    yield PlanRow("Jobs", f"{count(launch.jobs, 'job')}{each}", f"{count(ran, 'job')} started{waits}", over)
    if not limit or not row.last_step or step is None or step >= row.last_step or not report.usual:
        return
    # what a job trains of its time, by what the jobs have trained so far
    ran_for = sum(one.seconds for one in report.detail.account.stretches if one.attempt is not None)
    share = report.detail.account.seconds()[Spent.TRAIN] / ran_for if ran_for > 0 else 0.0
    if share > 0.05:
        need = ran - 1 + math.ceil((row.last_step - step) / report.usual / share / limit)
        words = f"about {count(max(need, ran), 'job')} in all, if it goes on like this"
        yield PlanRow("Jobs for all steps", count(launch.jobs, "job"), words, need > launch.jobs)


def _of_nodes(report: ReportFacts) -> Iterator[PlanRow]:
    run = report.run
    assert run is not None
    nodes = next((len(one.nodes) for one in reversed(report.detail.status.attempts) if one.nodes), None)
    if nodes is not None:
        spares = f" and {run.launch.spare_nodes} spare" if run.launch.spare_nodes else ""
        yield PlanRow("Nodes", f"{run.launch.nodes}{spares}", str(nodes), nodes < run.launch.nodes)


def _again(report: ReportFacts) -> Iterator[PlanRow]:
    again: Counter[int] = Counter()
    for owners in steps_again(report.detail.status.attempts).values():
        again.update(owners)
    if again:
        words = (
            f"{sum(again.values()):,} after {count(len(again), 'interruption')}, at most {max(again.values()):,} of one"
        )
        yield PlanRow("Steps made again", "0", words, True)


def _first(report: ReportFacts) -> int | None:
    return next((one.first_step for one in report.detail.status.attempts if one.first_step is not None), None)
