"""The plan of a run: which values lose least, what ratio to expect with them, and what would help most. Pure.

The ratio comes twice: from a formula, with its name, and from the simulator, which plays what the formula leaves out (time
limits, waits, spare nodes, snapshots). Where the two differ by more than a point, the plan says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from enum import Enum
from random import Random
from typing import Any, NamedTuple

from ftsupervise.planning.faults import Lasting
from ftsupervise.planning.formulas import (
    ASSUMES,
    DAY,
    HOUR,
    MINUTE,
    PRESSURE,
    Estimate,
    best_interval,
    bytes_a_day,
    cost,
    daly,
    daly_ettr,
    gpu_hours,
    spares_for,
    young,
)
from ftsupervise.planning.inputs import WORDS, KnownBy, PlanInput, PlanInputs
from ftsupervise.planning.simulator import Strategy, StrategyOutcome, simulate

MONTH = 365.25 / 12 * DAY
_REPAIR = DAY  # until a lost node is back
_KEEP = 3  # checkpoints
_STALL = 3 * MINUTE  # of replica groups, at each failure (FT-HSDP)
_DRAWS = 400
_FAULTS = 10_000  # that are played for each strategy, about
_MEMORY_RATE = 5e9  # bytes a second at which a node copies its state into its memory, at least
_DIFFERS = 0.01
_LEAST_GAIN = 5e-4


class Unit(str, Enum):
    SECONDS = "seconds"
    BYTES = "bytes"
    COUNT = "count"
    SHARE = "share"
    RATE = "bytes a day"


class PlanItem(NamedTuple):
    """A value that is planned. ``key``: the setting that it belongs to; ``setting``: its value there, None where it is none."""

    name: str
    value: float
    unit: Unit
    why: str
    key: str = ""
    now: float | None = None
    setting: str | int | None = None


class Help(NamedTuple):
    """The effect of one change in a month of running. ``gain`` is of the ratio, ``certain`` half of its 95 % interval."""

    change: str
    gain: float
    certain: float
    gpu_hours: float
    money: float | None


class Spend(NamedTuple):
    """The cost of a month of running, and the part of it that trains nothing."""

    gpu_hours: float
    lost: float
    money: float | None = None
    lost_money: float | None = None


class Range(NamedTuple):
    """The interval in which a ratio lies with 95 %, for what is not known of the inputs."""

    low: float
    high: float


class RunPlan(NamedTuple):
    inputs: PlanInputs
    now: Estimate
    now_range: Range
    planned: Estimate
    planned_range: Range
    simulated_now: StrategyOutcome
    simulated: StrategyOutcome
    young: float
    daly: float
    searched: float
    items: tuple[PlanItem, ...]
    helps: tuple[Help, ...]  # the most helpful first
    spend: Spend
    doubts: tuple[str, ...] = ()

    @property
    def assumption(self) -> str:
        return ASSUMES[self.now.formula]


def plan_of(inputs: PlanInputs, *, risk: float = 0.01, price: float | None = None, seed: int = 1) -> RunPlan:
    """``risk``: with which the spare nodes may be too few; ``price``: of one GPU for one hour."""
    mtbf, save = inputs.mtbf.value, inputs.save.value
    lost = inputs.lost_each
    searched = _searched(inputs)
    base, better = inputs.strategy(), inputs.strategy("as planned")._replace(interval=searched)
    fleet, seconds = inputs.fleet, _horizon(inputs)
    runs = _runs(inputs, seconds)
    changes = tuple(_changes(inputs, better))
    outcomes = simulate(fleet, [better, base, *(one for _, one in changes)], seconds, runs, seed)
    rarer = simulate(fleet._replace(rate=fleet.rate / 2), [better], seconds, runs, seed)[0]
    planned = daly_ettr(searched, save, mtbf, lost)
    now = daly_ettr(inputs.interval.value, save, mtbf, lost)
    helps = [_help("the planned interval", -outcomes[1].better, outcomes[1].better_certain, inputs, price)]
    helps += [
        _help(words, outcome.better, outcome.better_certain, inputs, price)
        for (words, _), outcome in zip(changes, outcomes[2:], strict=True)
    ]
    if (
        groups := _with_groups(inputs, better)
    ) is not None:  # both without a time limit, which is not played for groups
        _, together = simulate(fleet, [better._replace(limit=math.inf), groups], seconds, runs, seed)
        helps.append(
            _help(f"{groups.name}, each stall 3 minutes", together.better, together.better_certain, inputs, price)
        )
    gain, sure = rarer.ettr - outcomes[0].ettr, math.hypot(rarer.certain, outcomes[0].certain)
    helps.append(_help("half as many failures", gain, sure, inputs, price))
    helps = [one for one in helps if one.gain > _LEAST_GAIN]
    helps.sort(key=lambda one: -one.gain)
    return RunPlan(
        inputs,
        now,
        _range(inputs, lambda drawn: inputs.interval.value, seed),
        planned,
        _range(inputs, lambda drawn: searched, seed),
        outcomes[1],
        outcomes[0],
        young(save, mtbf),
        daly(save, mtbf),
        searched,
        tuple(_items(inputs, searched, risk, outcomes[0].ettr)),
        tuple(helps),
        _spend(inputs, outcomes[1], price),
        tuple(_doubts(inputs, outcomes[1], now)),
    )


def _searched(inputs: PlanInputs) -> float:
    mtbf, save, lost = inputs.mtbf.value, inputs.save.value, inputs.lost_each
    if math.isinf(mtbf):
        return inputs.interval.value
    longest = min(20 * mtbf, inputs.limit)
    shortest = min(max(inputs.step.value, 1e-3), longest)
    return best_interval(lambda interval: daly_ettr(interval, max(save, 1e-6), mtbf, lost).value, shortest, longest)


def _horizon(inputs: PlanInputs) -> float:
    """Long enough for a hundred failures, and a month where that has no more than a thousand."""
    longest = 100 * 365.25 * DAY
    return min(longest, max(100 * inputs.mtbf.value, min(MONTH, 1000 * inputs.mtbf.value)))


def _runs(inputs: PlanInputs, seconds: float) -> int:
    return max(4, min(100, round(_FAULTS * inputs.mtbf.value / seconds))) if not math.isinf(inputs.mtbf.value) else 4


# ------------------------------------------------------------------------------------------------------------ the values


def _items(inputs: PlanInputs, interval: float, risk: float, ratio: float) -> Iterator[PlanItem]:
    steps = max(1, round(interval / inputs.step.value))
    yield PlanItem(
        "checkpoint interval",
        interval,
        Unit.SECONDS,
        f"it loses least by Daly's formula: {steps:,} steps",
        "checkpoints.every",
        inputs.interval.value,
        _whole(interval),
    )
    warn = warning_lead(inputs)
    why = "the save at its longest, twice, two steps, and room; Slurm may deliver it up to 60 s early"
    yield PlanItem("warning before the time limit", warn, Unit.SECONDS, why, "launch.warn", None, _whole(warn))
    window = min(_REPAIR, inputs.limit)
    failures = inputs.lost.value * window / inputs.mtbf.value
    spares = spares_for(failures, risk)
    why = (
        f"{failures:.2g} nodes are lost on average until one is back, or the job is over; more with at most {risk:.1%}"
    )
    yield PlanItem("spare nodes", spares, Unit.COUNT, why, "launch.spare_nodes", inputs.spares, spares)
    yield from _of_jobs(inputs, ratio)
    yield from _of_the_disk(inputs, interval)
    yield from _of_snapshots(inputs)


def warning_lead(inputs: PlanInputs) -> float:
    """Seconds before the time limit at which the signal should come, in whole minutes."""
    return math.ceil((2 * inputs.save.high + 2 * inputs.step.high + 10) / MINUTE) * MINUTE


def _of_jobs(inputs: PlanInputs, ratio: float) -> Iterator[PlanItem]:
    if not math.isinf(inputs.limit) and inputs.left:
        jobs = math.ceil(inputs.left / max(ratio, 0.01) / inputs.limit)
        why = f"{inputs.left / DAY:.1f} days of training are left, at {ratio:.0%} of the time"
        yield PlanItem("jobs in the chain", jobs, Unit.COUNT, why, "launch.jobs", None, min(1000, max(1, jobs)))
    if inputs.queue.value > 0:
        starts = inputs.queue.value + inputs.cold.value
        least = starts / 0.01
        why = "a change of jobs then costs 1 % of the time, with its wait"
        yield PlanItem("time limit of a job", least, Unit.SECONDS, why, "launch.time", _finite(inputs.limit))


def _of_the_disk(inputs: PlanInputs, interval: float) -> Iterator[PlanItem]:
    if inputs.size.value:
        cycle = interval + inputs.save.value
        yield PlanItem(
            "written to the disk",
            bytes_a_day(inputs.size.value, cycle),
            Unit.RATE,
            f"{DAY / cycle:.0f} checkpoints a day",
        )
        kept = _KEEP * inputs.size.value
        yield PlanItem("room for the newest 3", kept, Unit.BYTES, "with checkpoints.retain: {last: 3}")


def _of_snapshots(inputs: PlanInputs) -> Iterator[PlanItem]:
    if not inputs.size.value:
        return
    each = snapshot_cost(inputs)
    steps = max(1, round(young(each, inputs.mtbf.value) / inputs.step.value))
    why = f"a copy of {inputs.size.value / inputs.nodes / 1e9:.3g} GB in each node's memory takes about {each:.2g} s"
    now = inputs.snapshots
    setting = steps if now is not None else None
    yield PlanItem("steps between two snapshots", steps, Unit.COUNT, why, "checkpoints.snapshot_every", now, setting)


def snapshot_cost(inputs: PlanInputs) -> float:
    """Seconds for a copy of a node's part of the state into its memory."""
    return max(0.01, inputs.size.value / inputs.nodes / _MEMORY_RATE)


def _whole(seconds: float) -> str:
    """Return a duration as the settings have it, in steps that a person would write."""
    size = 1 if seconds < 2 * MINUTE else 10 if seconds < 10 * MINUTE else 60 if seconds < 2 * HOUR else 300
    total = max(1, round(seconds / size)) * size
    hours, rest = divmod(total, 3600)
    minutes, left = divmod(rest, 60)
    parts = ((hours, "h"), (minutes, "m"), (left, "s"))
    return "".join(f"{number}{unit}" for number, unit in parts if number)


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


# ------------------------------------------------------------------------------------------------------------ what helps


def _changes(inputs: PlanInputs, better: Strategy) -> Iterator[tuple[str, Strategy]]:
    """Each with the planned interval, and one thing besides."""
    half = better.save / 2
    yield (
        "saves that hold the loop up half as long",
        better._replace(name="save", save=half, interval=max(inputs.step.value, better.interval / math.sqrt(2))),
    )
    yield "hangs found in half the time", better._replace(name="hang", hang=better.hang / 2)
    if better.warm is None:
        warm = Lasting(min(inputs.warm.value, inputs.cold.value))
        yield "restarts in the same job", better._replace(name="in place", warm=warm)
    else:
        halves = better._replace(warm=_half(better.warm), cold=_half(better.cold))
        yield "restarts in half the time", halves
    yield "waits in the queue half as long", better._replace(name="queue", queue=_half(better.queue))
    for spares in (1, 2):
        more = better.spares + spares
        words = f"{spares} more spare node{'s' if spares > 1 else ''} (their cost is not counted)"
        yield words, better._replace(spares=more, warm=better.warm or Lasting(inputs.warm.value))
    if not better.snapshot_every:
        every = 2 * inputs.step.value
        yield (
            "snapshots in the nodes' memory every 2 steps",
            better._replace(snapshot_every=every, snapshot=min(snapshot_cost(inputs), inputs.step.value)),
        )
    if not math.isinf(better.limit):
        yield "jobs of twice the time limit", better._replace(limit=2 * better.limit)


def _with_groups(inputs: PlanInputs, better: Strategy) -> Strategy | None:
    """Replica groups, as they are assumed: a stall of three minutes, and a lost group is away until another job has started.
    None: the nodes cannot be shared out."""
    groups = next((count for count in (4, 2) if inputs.nodes >= 2 * count and inputs.nodes % count == 0), None)
    if groups is None:
        return None
    away = inputs.cold.value + (0.0 if better.spares else inputs.queue.value * inputs.lost.value)
    return better._replace(
        name=f"{groups} replica groups",
        groups=groups,
        least=groups // 2 + 1,
        stall=_STALL,
        away=away,
        hang=better.detect,
        limit=math.inf,
    )


def _half(of: Lasting) -> Lasting:
    return of._replace(mean=of.mean / 2)


def _help(words: str, gain: float, certain: float, inputs: PlanInputs, price: float | None) -> Help:
    seconds = gain * MONTH
    money = None if price is None else cost(inputs.all_gpus, seconds, price)
    return Help(words, gain, certain, gpu_hours(inputs.all_gpus, seconds), money)


def _spend(inputs: PlanInputs, outcome: StrategyOutcome, price: float | None) -> Spend:
    hours = gpu_hours(inputs.all_gpus, MONTH)
    lost = hours * (1 - outcome.ettr)
    return Spend(hours, lost, None if price is None else hours * price, None if price is None else lost * price)


# ------------------------------------------------------------------------------------------------------------ how sure


def _range(inputs: PlanInputs, interval: Callable[[PlanInputs], float], seed: int) -> Range:
    """Draw each input from its interval, and see how far the ratio goes."""
    chance, found = Random(seed), []
    names = ("mtbf", "lost", "silent", "save", "detect", "hang", "warm", "cold", "queue")
    for _ in range(_DRAWS):
        changed: dict[str, Any] = {name: _drawn(getattr(inputs, name), chance) for name in names}
        drawn = inputs._replace(**changed)
        found.append(daly_ettr(interval(drawn), drawn.save.value, drawn.mtbf.value, drawn.lost_each).value)
    found.sort()
    return Range(found[int(0.025 * _DRAWS)], found[int(0.975 * _DRAWS) - 1])


def _drawn(one: PlanInput, chance: Random) -> PlanInput:
    """A value between the ends of its interval and around its middle, on a scale of ratios where it can be."""
    share = min(1.0, max(-1.0, chance.gauss(0, 0.5)))
    end = one.high if share > 0 else one.low
    if math.isinf(one.value) or math.isinf(end):
        return one
    if one.value > 0 and end > 0:
        return one._replace(value=one.value * (end / one.value) ** abs(share))
    return one._replace(value=one.value + (end - one.value) * abs(share))


def _doubts(inputs: PlanInputs, simulated: StrategyOutcome, now: Estimate) -> Iterator[str]:
    if now.doubt:
        yield now.doubt
    pressure = inputs.lost_each / inputs.mtbf.value
    if pressure > PRESSURE:
        yield (
            f"a failure costs {pressure:.0%} of the time to the next one, and formulas are rough beyond {PRESSURE:.0%}: "
            "go by the simulated ratio"
        )
    if abs(simulated.ettr - now.value) > _DIFFERS:
        yield (
            f"simulated it is {simulated.ettr:.1%}: time limits, waits, spare nodes and snapshots count there and are none of "
            "the formula's"
        )
    if inputs.without_guard:
        yield "a part of the run's time tells no steps (no guard in the loop), and is not counted"
    guesses = [words for name, words in WORDS.items() if _is_guess(name, getattr(inputs, name))]
    if guesses:
        yield f"not measured, but assumed: {', '.join(guesses)}"


def _is_guess(name: str, one: PlanInput) -> bool:
    return one.origin is KnownBy.ASSUMED and name != "size"
