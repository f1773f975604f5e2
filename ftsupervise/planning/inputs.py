"""The inputs of a plan: values with their intervals, each measured, given or only assumed. Pure.

An assumed value comes from the literature, and its note names where from. Times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from statistics import fmean
from typing import NamedTuple

from ftsupervise.planning.certainty import SURE, half_width, poisson_bounds
from ftsupervise.planning.faults import Fleet, Lasting
from ftsupervise.planning.formulas import HOUR, MINUTE, job_mtbf
from ftsupervise.planning.simulator import Strategy
from ftsupervise.units import count

ASSUMED_RATE = 6.50e-3  # failures of a node in a day: Meta's RSC-1 (Kokolis et al., HPCA 2025)
WORDS = {
    "mtbf": "time between failures",
    "lost": "failures that take a node",
    "silent": "failures that are a hang",
    "save": "wait for a checkpoint",
    "interval": "checkpoint interval now",
    "detect": "failure until noticed",
    "hang": "hang until ended",
    "warm": "restart in the same job",
    "cold": "start of another job",
    "queue": "wait between two jobs",
    "step": "step",
    "size": "size of a checkpoint",
}


class KnownBy(str, Enum):
    MEASURED = "measured"
    GIVEN = "given"
    ASSUMED = "assumed"


class PlanInput(NamedTuple):
    """A value, and the interval in which it lies with 95 %."""

    value: float
    low: float
    high: float
    origin: KnownBy
    note: str = ""  # what it was measured from: "of 12 saves"; where an assumption comes from


class PlanInputs(NamedTuple):
    """All that a plan needs to know. Shares are 0-1, times seconds, sizes bytes."""

    mtbf: PlanInput  # of the job, over the time in which it trains
    lost: PlanInput  # share of the failures that take a node away
    silent: PlanInput  # share that is a hang
    save: PlanInput  # the loop waits for a save so long
    interval: PlanInput  # of training between two saves, as it is now
    detect: PlanInput
    hang: PlanInput
    warm: PlanInput  # a restart in the same job
    cold: PlanInput  # from the begin of another job to its first step
    queue: PlanInput
    step: PlanInput
    size: PlanInput  # of a checkpoint; 0: not known
    nodes: int = 1
    gpus: int = 0  # of a node
    spares: int = 0
    limit: float = math.inf  # of a job
    in_place: bool = True  # a failure that leaves the nodes is restarted in the same job
    snapshots: int | None = None  # steps from one snapshot in memory to the next; None: none are taken
    left: float = 0.0  # seconds of training to the last step; 0: not known
    without_guard: bool = False  # some of its time says nothing of steps

    @property
    def all_gpus(self) -> int:
        """The GPUs of the job, or its nodes where it has none."""
        return self.nodes * (self.gpus or 1)

    @property
    def hours(self) -> str:
        """The unit of what it costs."""
        return "GPU hours" if self.gpus else "node hours"

    @property
    def lost_each(self) -> float:
        """Seconds that a failure costs on average besides the steps that are made again."""
        noticed = self.silent.value * self.hang.value + (1 - self.silent.value) * self.detect.value
        stays = (1 - self.lost.value) + (self.lost.value if self.spares else 0.0)
        stays = stays if self.in_place else 0.0
        return noticed + stays * self.warm.value + (1 - stays) * (self.queue.value + self.cold.value)

    @property
    def fleet(self) -> Fleet:
        rate = 0.0 if math.isinf(self.mtbf.value) else 1 / (self.mtbf.value * self.nodes)
        return Fleet(self.nodes, rate, lost=self.lost.value, silent=self.silent.value)

    def strategy(self, name: str = "as it is") -> Strategy:
        return Strategy(
            name,
            self.interval.value,
            self.save.value,
            snapshot_every=(self.snapshots or 0) * self.step.value,
            detect=self.detect.value,
            hang=self.hang.value,
            warm=Lasting(self.warm.value) if self.in_place else None,
            cold=Lasting(self.cold.value),
            queue=Lasting(self.queue.value),
            spares=self.spares,
            limit=self.limit,
        )


def given(value: float, note: str = "") -> PlanInput:
    return PlanInput(value, value, value, KnownBy.GIVEN, note)


def assumed(value: float, low: float, high: float, note: str) -> PlanInput:
    return PlanInput(value, low, high, KnownBy.ASSUMED, note)


def usual_inputs(nodes: int = 1, gpus: int = 0) -> PlanInputs:
    """Return the assumptions about a run of which nothing is known."""
    mtbf = job_mtbf(nodes, ASSUMED_RATE)
    return PlanInputs(
        mtbf=assumed(mtbf, mtbf / 2, mtbf * 3, "6.5 failures in 1,000 node-days (Meta's RSC-1)"),
        lost=assumed(0.5, 0.2, 0.8, "between Llama 3 (78 % hardware) and clusters where programs fail most"),
        silent=assumed(0.1, 0.05, 0.15, "hangs, ByteRobust (SOSP 2025)"),
        save=assumed(MINUTE, 10, 5 * MINUTE, "a guess"),
        interval=assumed(HOUR, 20 * MINUTE, 3 * HOUR, "typical of Meta's RSC-1"),
        detect=assumed(10, 2, MINUTE, "a guess"),
        hang=assumed(10 * MINUTE, MINUTE, 30 * MINUTE, "the usual time limit of a collective"),
        warm=assumed(MINUTE, 30, 5 * MINUTE, "ByteRobust restarts in place in 46 to 65 s"),
        cold=assumed(5 * MINUTE, 2 * MINUTE, 20 * MINUTE, "Meta's RSC-1: 5 to 20 minutes"),
        queue=assumed(10 * MINUTE, 0, 6 * HOUR, "a guess: it depends on the cluster most"),
        step=assumed(10, 1, 30, "a guess"),
        size=assumed(0, 0, 0, "not known"),
        nodes=nodes,
        gpus=gpus,
    )


# ------------------------------------------------------------------------------------------------------------ intervals


def mean_of(found: Sequence[float], what: str) -> PlanInput | None:
    """The mean of what was measured, with Student's interval; a value that is alone bounds nothing, and may be wrong by half or
    twice as much. None: nothing was measured."""
    if not found:
        return None
    value = fmean(found)
    words = f"of {count(len(found), what)}"
    if len(found) == 1:
        return PlanInput(value, value / 2, value * 2, KnownBy.MEASURED, f"{words} alone: half to twice that is taken")
    half = half_width(found)
    return PlanInput(value, max(0.0, value - half), value + half, KnownBy.MEASURED, words)


def time_between(times: int, seconds: float, before: PlanInput) -> PlanInput:
    """The mean time between two failures, where ``times`` came in ``seconds``. Where none came, ``before`` is what is assumed,
    and no less than what is seen makes likely; so it is where nothing was measured, as of a run that has not trained yet."""
    if seconds <= 0:
        return before
    low, high = (bound / seconds for bound in poisson_bounds(times))
    if not times:
        least = 1 / high
        value = max(before.value, least)
        note = f"{before.note}; none came in the time measured, so it is hardly less than the low end"
        return PlanInput(value, least, max(before.high, value), KnownBy.ASSUMED, note)
    return PlanInput(seconds / times, 1 / high, 1 / low, KnownBy.MEASURED, f"of {count(times, 'failure')}")


def share_of(times: int, whole: int, before: PlanInput) -> PlanInput:
    """A share, with Wilson's interval; ``before`` where there is nothing to count."""
    if not whole:
        return before
    share, square = times / whole, SURE**2
    middle = (share + square / (2 * whole)) / (1 + square / whole)
    half = SURE * math.sqrt(share * (1 - share) / whole + square / (4 * whole**2)) / (1 + square / whole)
    low, high = max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))
    return PlanInput(share, low, high, KnownBy.MEASURED, f"{times} of {count(whole, 'failure')}")
