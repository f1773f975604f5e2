"""Reads what a plan needs from a run's own past: its ledger, its account of time, its interruptions and its checkpoints. Pure.

What the run does not tell stays as it was assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from random import Random
from statistics import median
from typing import NamedTuple

from ftsupervise.model import Attempt
from ftsupervise.planning.faults import Fault
from ftsupervise.planning.inputs import (
    KnownBy,
    PlanInput,
    PlanInputs,
    mean_of,
    share_of,
    time_between,
    usual_inputs,
)
from ftsupervise.report.account import Spent, TimeAccount
from ftsupervise.report.everything import CheckpointRow, ReportFacts
from ftsupervise.report.incidents import RunIncident
from ftsupervise.report.summary import reached
from ftsupervise.units import count

_HANG = "hang"
_OF_NODES = frozenset(("node failure", "hardware fault"))


class TimeToGoOn(NamedTuple):
    """The seconds that it took to go on after an attempt."""

    fault: bool
    same_job: bool
    silent: bool
    detect: float
    restart: float
    queue: float


def inputs_of(report: ReportFacts) -> PlanInputs:
    """Return the measurements of this run, and an assumption where it has none."""
    detail, run = report.detail, report.run
    attempts, account = detail.status.attempts, detail.account
    nodes = next((len(one.nodes) for one in reversed(attempts) if one.nodes), run.launch.job_nodes if run else 1)
    usual = usual_inputs(nodes, gpus_of(report))
    spent = account.seconds()
    worked = spent[Spent.TRAIN] + spent[Spent.REDO] + spent[Spent.SAVE]
    faults = real_faults(report.incidents)
    recoveries = recoveries_of(attempts, report.incidents)
    step = step_time(attempts, account) or usual.step
    rows = [one for one in report.checkpoints.rows if isinstance(one, CheckpointRow)]
    save, interval = saves_of(attempts, account, rows, step.value)
    quick = [one for one in recoveries if one.fault]
    sizes = [float(one.size) for one in rows if one.size and not one.aside]
    limit = run.launch.time.total_seconds() if run and run.launch.time else math.inf
    return usual._replace(
        mtbf=time_between(len(faults), worked, usual.mtbf),
        lost=share_of(sum(one.kind in _OF_NODES for one in faults), len(faults), usual.lost),
        silent=share_of(sum(one.kind == _HANG for one in faults), len(faults), usual.silent),
        save=save or usual.save,
        interval=interval or usual.interval,
        detect=mean_of([one.detect for one in quick if not one.silent], "failure") or usual.detect,
        hang=mean_of([one.detect for one in quick if one.silent], _HANG) or usual.hang,
        warm=mean_of([one.restart for one in quick if one.same_job], "quick restart") or usual.warm,
        cold=mean_of([one.restart for one in recoveries if not one.same_job], "start")
        or first_start(attempts, usual.cold),
        queue=mean_of([one.queue for one in recoveries if not one.same_job], "wait") or usual.queue,
        step=step,
        size=mean_of(sizes, "checkpoint") or usual.size,
        spares=run.launch.spare_nodes if run else 0,
        limit=limit,
        in_place=run.launch.restart.in_place > 0 if run else True,
        snapshots=run.checkpoints.snapshot_every if run and any(one.begins for one in attempts) else None,
        left=left_of(report, step.value),
        without_guard=bool(account.blind),
    )


def real_faults(found: Sequence[RunIncident]) -> list[RunIncident]:
    """The failures that came while it trained: of a program that fails at its start again and again, none is a matter of
    chance."""
    return [one for one in found if not one.planned and not one.goes_on and one.step is not None]


def recoveries_of(attempts: Sequence[Attempt], found: Sequence[RunIncident]) -> list[TimeToGoOn]:
    """Return the seconds of each interruption after which there was a step again."""
    jobs = {earlier.number: earlier.job_id == later.job_id for earlier, later in pairwise(attempts)}
    stepped = {earlier.number for earlier, later in pairwise(attempts) if later.first_step is not None}
    recoveries = []
    for one in found:
        if one.attempt in stepped and not one.goes_on:
            spent = dict(one.spent)
            kinds = (spent.get(kind, 0.0) for kind in (Spent.DETECT, Spent.RESTART, Spent.QUEUE))
            recoveries.append(TimeToGoOn(not one.planned, jobs[one.attempt], one.kind == _HANG, *kinds))
    return recoveries


def step_time(attempts: Sequence[Attempt], account: TimeAccount) -> PlanInput | None:
    """Seconds of training that a step takes; None where no steps are known."""
    spent = account.seconds()
    each = [
        (one.last_step - one.first_step)
        for one in attempts
        if one.first_step is not None and one.last_step is not None and one.last_step > one.first_step
    ]
    made = sum(each)
    seconds = spent[Spent.TRAIN] + spent[Spent.REDO]
    if not made or seconds <= 0:
        return None
    value = seconds / made
    return PlanInput(value, value, value, KnownBy.MEASURED, f"of {count(made, 'step')}")


def saves_of(
    attempts: Sequence[Attempt], account: TimeAccount, rows: Sequence[CheckpointRow], step: float
) -> tuple[PlanInput | None, PlanInput | None]:
    """Return the seconds that the loop waits for a save, and those of training between two; None where that cannot be told."""
    every = steps_between(attempts, rows)
    if every is None:
        return None, None
    interval = PlanInput(every * step, every * step, every * step, KnownBy.MEASURED, f"every {count(every, 'step')}")
    saves, costs = 0, []
    for one in attempts:
        if one.saving is None or one.first_step is None or one.last_step is None:
            continue
        mine = one.last_step // every - (one.first_step - 1) // every
        saves += mine
        if mine > 0:
            costs.append(one.saving / mine)
    if not saves:
        return None, interval
    value = account.seconds()[Spent.SAVE] / saves
    low, high = (min(costs), max(costs)) if costs else (value, value)
    note = f"of about {count(saves, 'save')}"
    return PlanInput(value, min(low, value), max(high, value), KnownBy.MEASURED, note), interval


def steps_between(attempts: Sequence[Attempt], rows: Sequence[CheckpointRow]) -> int | None:
    """The steps from one save to the next: what is usual between two checkpoints, else what all saves have in common."""
    steps = sorted({one.step for one in rows if one.step is not None})
    distances = [later - earlier for earlier, later in pairwise(steps)]
    if len(distances) >= 2:
        return max(1, round(median(distances)))
    saved = {one.saved for one in attempts if one.saved} | set(steps)
    common = math.gcd(*saved) if len(saved) >= 2 else 0
    return common if common > 1 else None


def first_start(attempts: Sequence[Attempt], before: PlanInput) -> PlanInput:
    """The time from the first start of the command to its first step."""
    ready = [one.ready for one in attempts[:1] if one.ready]
    return mean_of(ready, "first start") or before


def gpus_of(report: ReportFacts) -> int:
    """The GPUs of a node, as its settings ask for them; 0: none, or not known."""
    launch = report.run.launch if report.run is not None else None
    if launch is None:
        return 0
    asked = str(launch.gpus_per_node or "")
    if not asked and launch.gres:
        asked = next((one for one in launch.gres.split(",") if one.split(":")[0] == "gpu"), "")
        asked = "1" if asked == "gpu" else asked
    last = asked.rpartition(":")[2]
    return int(last) if last.isdigit() else 0


def left_of(report: ReportFacts, step: float) -> float:
    """Seconds of training to the last step; 0 where that is not known."""
    last, now = report.detail.row.last_step, reached(report)
    return max(0.0, (last - (now or 0)) * step) if last else 0.0


def trace_of_run(report: ReportFacts, last: float = math.inf) -> tuple[list[Fault], float]:
    """The run's own failures of the ``last`` seconds as a trace, and how long that is: their times are those at which they
    came, under what was done about the earlier ones then. The marks of restarts and waits are drawn, seeded."""
    account = report.detail.account
    seconds = min(last, account.total)
    since = account.until - timedelta(seconds=seconds)
    names: dict[str, int] = {}
    trace, chance = list[Fault](), Random(0)
    for one in report.incidents:
        at = (one.at - since).total_seconds() - dict(one.spent).get(Spent.DETECT, 0.0)
        marks = chance.random(), chance.random()
        if one.planned or one.goes_on or at < 0:
            continue
        node = names.setdefault(one.nodes[0], len(names)) if one.nodes else -1
        lost = one.kind in _OF_NODES
        width = len(one.nodes) if lost and one.nodes else 1
        trace.append(Fault(at, node, width, lost, one.kind == _HANG, *marks, lemon=one.blames and node >= 0))
    trace.sort()
    return trace, seconds
