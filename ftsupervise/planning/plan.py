"""The plan of a run: which values lose least, what ratio to expect with them, and what would help most. Pure.

The ratio comes twice: from a formula, with its name, and from the simulator, which plays what the formula leaves out (time
limits, waits, spare nodes, snapshots). Where the two differ by more than a point, the plan says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
from ftsupervise.units import count, show_duration, show_percent, show_size

MONTH = 365.25 / 12 * DAY
_REPAIR = DAY  # until a lost node is back
_KEEP = 3  # checkpoints
_STALL = 3 * MINUTE  # of replica groups, at each failure (FT-HSDP)
_DRAWS = 400
_FAULTS = 10_000  # that are played for each strategy, about
_CHANGES = 2_500  # of jobs in a run that is played, at most
_MEMORY_RATE = 5e9  # bytes a second at which a node copies its state into its memory, at least
_DIFFERS = 0.01
_LEAST_GAIN = 5e-4
_GROUPS_GAIN = 0.01  # with which replica groups are worth what they ask of the loop


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
    """The effect of one change in a month of running. ``gain`` is of the ratio, ``certain`` half of its 95 % interval; from the
    hours those are taken off in which more spare nodes idle."""

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
    """The interval in which the simulated ratio lies with 95 %, for what is not known of the inputs."""

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
    planned_spares: int
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
    searched, spares = _searched(inputs), _spares(inputs, risk)
    as_planned = inputs._replace(interval=inputs.interval._replace(value=searched), spares=spares)
    base, planned = inputs.strategy(), as_planned.strategy("as planned")
    better = planned._replace(name="the planned interval", spares=inputs.spares)
    fleet, seconds = inputs.fleet, _horizon(inputs)
    runs = _runs(inputs, seconds)
    changes = tuple(_changes(inputs, better, spares))
    groups = _with_groups(inputs, planned)
    tried = [better, base, planned, *(one.strategy for one in changes)]
    outcomes = simulate(fleet, [*tried, *((groups,) if groups else ())], seconds, runs, seed)
    rarer = simulate(fleet._replace(rate=fleet.rate / 2), [better], seconds, runs, seed)[0]
    gain, sure = rarer.ettr - outcomes[0].ettr, math.hypot(rarer.certain, outcomes[0].certain)
    helps = [
        _help("the planned interval", -outcomes[1].better, outcomes[1].better_certain, inputs, price),
        *(
            _help(one.words, outcome.better, outcome.better_certain, inputs, price, one.spares)
            for one, outcome in zip(changes, outcomes[3:], strict=False)
        ),
        _help("half as many failures", gain, sure, inputs, price),
    ]
    if groups is not None:
        last = outcomes[-1]
        more = spares - inputs.spares
        helps.append(_help(_in_groups(groups), last.better, last.better_certain, inputs, price, more))
    helps = [one for one in helps if one.gain > max(_LEAST_GAIN, one.certain) and one.gpu_hours > 0]
    helps.sort(key=lambda one: -one.gpu_hours)
    now = daly_ettr(inputs.interval.value, save, mtbf, inputs.lost_each)
    ranges = _range(inputs, outcomes[1].ettr, seed), _range(as_planned, outcomes[2].ettr, seed)
    items = [
        *_items(inputs, searched, spares, risk),
        *_of_groups(groups, outcomes),
        *_of_jobs(inputs, outcomes[2].ettr, ranges[1], price),
        *_of_the_disk(inputs, searched),
        *_of_snapshots(inputs),
    ]
    return RunPlan(
        inputs,
        now,
        ranges[0],
        daly_ettr(searched, save, mtbf, as_planned.lost_each),
        ranges[1],
        outcomes[1],
        outcomes[2],
        young(save, mtbf),
        daly(save, mtbf),
        searched,
        spares,
        tuple(items),
        tuple(helps),
        _spend(inputs, outcomes[1], price),
        (*_doubts(inputs, outcomes[1], now), *_dear(inputs, changes, outcomes[3:], spares)),
    )


def _searched(inputs: PlanInputs) -> float:
    """Daly's whole formula has its maximum at the same interval whatever else a failure costs."""
    mtbf, save = inputs.mtbf.value, max(inputs.save.value, 1e-6)
    if math.isinf(mtbf):
        return inputs.interval.value
    longest = min(20 * mtbf, inputs.limit)
    shortest = min(max(inputs.step.value, 1e-3), longest)

    def logarithm(
        interval: float,
    ) -> float:  # of the ratio, but for what is the same for all; the ratio itself may round to 0
        whole = (interval + save) / mtbf
        return math.log(interval) - whole - math.log1p(-math.exp(-whole))

    return best_interval(logarithm, shortest, longest)


def _spares(inputs: PlanInputs, risk: float) -> int:
    """No more than the job has nodes."""
    return min(spares_for(_failing(inputs), risk), inputs.nodes) if inputs.in_place else 0


def _failing(inputs: PlanInputs) -> float:
    """The nodes that are lost on average until one is back, or the job is over."""
    return inputs.lost.value * min(_REPAIR, inputs.limit) / inputs.mtbf.value


def _horizon(inputs: PlanInputs) -> float:
    """Long enough for a hundred failures, and a month where that has no more than a thousand; shorter where the time limit
    changes jobs so often that this would take minutes to play."""
    longest = min(100 * 365.25 * DAY, _CHANGES * (inputs.limit + inputs.queue.value + inputs.cold.value))
    return min(longest, max(100 * inputs.mtbf.value, min(MONTH, 1000 * inputs.mtbf.value)))


def _runs(inputs: PlanInputs, seconds: float) -> int:
    """As many as meet ``_FAULTS`` failures and changes of jobs."""
    events = seconds / inputs.mtbf.value + seconds / (inputs.limit + inputs.queue.value + inputs.cold.value)
    return max(4, min(100, round(_FAULTS / max(events, 1.0))))


# ------------------------------------------------------------------------------------------------------------ the values


def _items(inputs: PlanInputs, interval: float, spares: int, risk: float) -> Iterator[PlanItem]:
    failing = not math.isinf(inputs.mtbf.value)
    why = f"it loses least by Daly's formula: {count(max(1, round(interval / inputs.step.value)), 'step')}"
    if inputs.snapshots is not None:
        why += "; the formula counts on no snapshot, so longer would do"
    yield PlanItem(
        "checkpoint interval",
        interval,
        Unit.SECONDS,
        why if failing else "nothing fails, so it stays",
        "checkpoints.every",
        inputs.interval.value,
        _whole(interval) if failing else None,
    )
    warn = warning_lead(inputs)
    why = "the save at its longest, twice, two steps, and room; Slurm may deliver it up to 60 s early"
    if warn > inputs.limit / 2:
        why = "more than half of the time limit, so that is too short for these saves"
    setting = None if warn > inputs.limit / 2 else _whole(warn)
    yield PlanItem("warning before the time limit", warn, Unit.SECONDS, why, "launch.warn", None, setting)
    why = f"{_failing(inputs):.2g}" if _failing(inputs) < 10 else f"{_failing(inputs):,.0f}"
    why += f" nodes are lost on average until one is back, or the job is over; more with at most {show_percent(risk)}"
    if not _failing(inputs):
        why = "no failure takes a node"
    if not inputs.in_place:
        why = "without launch.restart.in_place a spare node would only idle"
    yield PlanItem("spare nodes", spares, Unit.COUNT, why, "launch.spare_nodes", inputs.spares, spares)


def _of_groups(groups: Strategy | None, outcomes: Sequence[StrategyOutcome]) -> Iterator[PlanItem]:
    """Replica groups or not. ``outcomes``: the third is as planned, the last one the groups."""
    if groups is None:
        return
    alone, together = outcomes[2], outcomes[-1]
    helpful = together.ettr - alone.ettr > _GROUPS_GAIN
    why = (
        f"they would train {show_percent(together.ettr)} of the time in place of {show_percent(alone.ettr)}, where the others "
        f"stall for {show_duration(groups.stall)} (assumed)"
    )
    why += "; the loop has to take part in them" if helpful else ", and that is not worth it"
    yield PlanItem("replica groups", groups.groups if helpful else 0, Unit.COUNT, why)


def warning_lead(inputs: PlanInputs) -> float:
    """Seconds before the time limit at which the signal should come, in whole minutes."""
    return math.ceil((2 * inputs.save.high + 2 * inputs.step.high + 10) / MINUTE) * MINUTE


def _of_jobs(inputs: PlanInputs, ratio: float, likely: Range, price: float | None) -> Iterator[PlanItem]:
    starts = inputs.queue.value + inputs.cold.value
    least = starts / 0.01
    if starts > 0:
        why = "below it, the change of jobs costs more than 1 % of the time, with its wait"
        yield PlanItem("time limit, at least", least, Unit.SECONDS, why, "launch.time", _finite(inputs.limit))
    if not inputs.left or ratio < 0.01:
        return
    limit, whole = inputs.limit if not math.isinf(inputs.limit) else least, inputs.left / ratio
    if limit > 0:
        jobs = max(1, math.ceil(whole / limit))
        why = f"{inputs.left / DAY:.1f} days of training are left, at {show_percent(ratio)} of the time"
        why += f", in jobs of {show_duration(limit)}" if math.isinf(inputs.limit) else ""
        yield PlanItem("jobs in the chain", jobs, Unit.COUNT, why, "launch.jobs", None, min(1000, jobs))
    ends = (show_duration(inputs.left / max(share, 0.01)) for share in (likely.high, likely.low))
    why = f"{gpu_hours(inputs.all_gpus, whole):,.0f} {inputs.hours}"
    why += "" if price is None else f", {cost(inputs.all_gpus, whole, price):,.0f} at the price given"
    why += "; {} to {} for all that is not sure".format(*ends)
    yield PlanItem("time to the last step", whole, Unit.SECONDS, why)


def _of_the_disk(inputs: PlanInputs, interval: float) -> Iterator[PlanItem]:
    if inputs.size.value:
        cycle = interval + inputs.save.value
        yield PlanItem(
            "written to the disk",
            bytes_a_day(inputs.size.value, cycle),
            Unit.RATE,
            f"{count(round(DAY / cycle), 'checkpoint')} a day",
        )
        kept = _KEEP * inputs.size.value
        why = "with checkpoints.retain: {last: 3}"
        yield PlanItem("room for the newest 3", kept, Unit.BYTES, why, "checkpoints.retain")


def _of_snapshots(inputs: PlanInputs) -> Iterator[PlanItem]:
    if not inputs.size.value or math.isinf(inputs.mtbf.value):
        return
    each = snapshot_cost(inputs)
    steps = max(1, round(young(each, inputs.mtbf.value) / inputs.step.value))
    why = f"a copy of {show_size(inputs.size.value / inputs.nodes)} in each node's memory takes about {each:.2g} s"
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


class _Change(NamedTuple):
    words: str
    strategy: Strategy
    spares: int = 0  # more spare nodes


def _changes(inputs: PlanInputs, better: Strategy, planned_spares: int) -> Iterator[_Change]:
    """Each with the planned interval, and one thing besides."""
    half = better.save / 2
    yield _Change(
        "saves that hold the loop up half as long",
        better._replace(name="save", save=half, interval=max(inputs.step.value, better.interval / math.sqrt(2))),
    )
    yield _Change("hangs found in half the time", better._replace(name="hang", hang=better.hang / 2))
    if better.warm is None:
        warm = Lasting(min(inputs.warm.value, inputs.cold.value))
        yield _Change("restarts in the same job", better._replace(name="in place", warm=warm))
    else:
        halves = better._replace(warm=_half(better.warm), cold=_half(better.cold))
        yield _Change("restarts in half the time", halves)
    yield _Change("waits in the queue half as long", better._replace(name="queue", queue=_half(better.queue)))
    for more in sorted({1, planned_spares - better.spares}) if inputs.in_place else ():
        if more > 0:
            spared = better._replace(spares=better.spares + more)
            yield _Change(f"{count(more, 'more spare node')}, whose own hours are taken off", spared, more)
    if not better.snapshot_every:
        every = 2 * inputs.step.value
        yield _Change(
            "snapshots in the nodes' memory every 2 steps",
            better._replace(snapshot_every=every, snapshot=min(snapshot_cost(inputs), inputs.step.value)),
        )
    if not math.isinf(better.limit):
        yield _Change("jobs of twice the time limit", better._replace(limit=2 * better.limit))


def _with_groups(inputs: PlanInputs, planned: Strategy) -> Strategy | None:
    """Replica groups, as they are assumed: a stall of three minutes, and a group is away until it has restarted. None: the
    nodes cannot be dealt out; of two groups, none trains on while the other one hangs."""
    groups = next((many for many in (4, 3) if inputs.nodes >= 2 * many and inputs.nodes % many == 0), None)
    if groups is None:
        return None
    return planned._replace(
        name=f"{groups} replica groups", groups=groups, least=groups // 2 + 1, stall=_STALL, hang=planned.detect
    )


def _in_groups(groups: Strategy) -> str:
    return f"{groups.name} and the planned spare nodes, each stall {show_duration(groups.stall)}"


def _half(of: Lasting) -> Lasting:
    return of._replace(mean=of.mean / 2)


def _help(words: str, gain: float, certain: float, inputs: PlanInputs, price: float | None, spares: int = 0) -> Help:
    """``spares``: nodes that idle for it all the month."""
    hours = gpu_hours(inputs.all_gpus, gain * MONTH) - gpu_hours(spares * _gpus(inputs), MONTH)
    return Help(words, gain, certain, hours, None if price is None else hours * price)


def _spend(inputs: PlanInputs, outcome: StrategyOutcome, price: float | None) -> Spend:
    hours = gpu_hours(inputs.all_gpus, MONTH)
    lost = hours * (1 - outcome.ettr)
    return Spend(hours, lost, None if price is None else hours * price, None if price is None else lost * price)


# ------------------------------------------------------------------------------------------------------------ how sure


def _range(inputs: PlanInputs, simulated: float, seed: int) -> Range:
    """Draw each input from its interval, and see how far the simulated ratio goes: as far as the formula's does, with a
    change of jobs at each time limit."""
    chance, found = Random(seed), []
    names = ("mtbf", "lost", "silent", "save", "detect", "hang", "warm", "cold", "queue")
    for _ in range(_DRAWS):
        changed: dict[str, Any] = {name: _drawn(getattr(inputs, name), chance) for name in names}
        found.append(_in_jobs(inputs._replace(**changed)))
    found.sort()
    middle = _in_jobs(inputs)
    by = simulated / middle if middle > 0 else 1.0
    return Range(*(min(1.0, by * one) for one in (found[int(0.025 * _DRAWS)], found[int(0.975 * _DRAWS) - 1])))


def _in_jobs(of: PlanInputs) -> float:
    """The ratio by Daly's formula, less the changes of jobs at the time limit."""
    between = of.save.value + of.queue.value + of.cold.value
    in_job = 1.0 if math.isinf(of.limit) else of.limit / (of.limit + between)
    return in_job * daly_ettr(of.interval.value, of.save.value, of.mtbf.value, of.lost_each).value


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
        share = f"{pressure:.0%} of" if pressure < 10 else f"{pressure:,.0f} times"
        yield (
            f"a failure costs {share} the time to the next one, and formulas are rough beyond {PRESSURE:.0%}: "
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


def _dear(
    inputs: PlanInputs, changes: Sequence[_Change], outcomes: Sequence[StrategyOutcome], spares: int
) -> Iterator[str]:
    """Say it where the planned spare nodes idle for more hours than they bring."""
    for one, outcome in zip(changes, outcomes, strict=False):
        if one.spares and one.spares == spares - inputs.spares:
            brought, idle = (
                gpu_hours(1, MONTH) * of for of in (inputs.all_gpus * outcome.better, one.spares * _gpus(inputs))
            )
            if brought < idle:
                yield (
                    f"the planned spare nodes idle for more than they bring: {idle:,.0f} {inputs.hours} a month, and they "
                    f"bring {brought:,.0f}"
                )


def _gpus(inputs: PlanInputs) -> int:
    """The GPUs of a node, or the node itself where it has none."""
    return inputs.gpus or 1


def _is_guess(name: str, one: PlanInput) -> bool:
    return one.origin is KnownBy.ASSUMED and name != "size"
