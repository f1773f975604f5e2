"""The pictures of a report as plain geometry: paths for inline SVG, ticks, and what a pointer over them reads. Pure.

All pictures of a run share one time axis, 0 to ``WIDE``; the page stretches them, so that nothing but lines and areas is drawn
here, and texts stand at shares of the width.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from typing import NamedTuple

from ftsupervise.report.account import Spent, Stretch, TimeAccount, kinds_over
from ftsupervise.report.placing import DrawnTime, TimeGap
from ftsupervise.rundir.progress import StepRecord
from ftsupervise.rundir.step_rates import StepRate

WIDE, HIGH = 1200, 100
KINDS = tuple(Spent)
_SAVE = KINDS.index(Spent.SAVE)
_POINTS = 500  # of a line
_GAP, _LEAST_GAP = 6, 90.0  # times the usual distance of two points, and seconds: a line breaks there
_MOST_STRETCHES = 9000  # that a pointer can read
_BUCKETS = 62  # bars, about
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86400.0
_STEPS = (
    *(1.0, 5.0, 10.0, 30.0, _MINUTE, 2 * _MINUTE, 5 * _MINUTE, 10 * _MINUTE, 15 * _MINUTE, 30 * _MINUTE),
    *(_HOUR, 2 * _HOUR, 3 * _HOUR, 6 * _HOUR, 12 * _HOUR),
    *(_DAY, 2 * _DAY, 7 * _DAY, 14 * _DAY, 28 * _DAY, 91 * _DAY, 182 * _DAY, 364 * _DAY, 3640 * _DAY),
)


class Tick(NamedTuple):
    at: float  # percent of the axis
    text: str
    minor: bool = False  # left out where there is little room


class KindPath(NamedTuple):
    """A path of one class."""

    kind: str
    path: str


class Bucket(NamedTuple):
    """The account of an hour, a day …"""

    begin: float
    end: float
    seconds: tuple[float, ...]  # in the order of KINDS

    @property
    def text(self) -> str:
        long = self.end - self.begin >= _DAY
        return _utc(self.begin, "%Y-%m-%d" if long else "%m-%d %H:%M")


class Line(NamedTuple):
    """A line over time. ``low`` and ``high``: the values at the lower and the upper edge."""

    path: str
    low: float
    high: float
    ticks: tuple[Tick, ...]
    points: tuple[tuple[float, float], ...]  # epoch seconds, value
    plan: str = ""  # the path of what was planned
    holes: tuple[tuple[float, float], ...] = ()  # epoch seconds, within an attempt: nothing is known between them


class Axis(NamedTuple):
    begin: float
    end: float

    def x(self, at: float) -> float:
        return round(WIDE * (min(max(at, self.begin), self.end) - self.begin) / max(1e-9, self.end - self.begin), 1)


def axis_of(account: TimeAccount) -> Axis:
    begin, end = account.since.timestamp(), account.until.timestamp()
    return Axis(begin, max(end, begin + 1.0))


# ------------------------------------------------------------------------------------------------------------ the time


def strip(stretches: Sequence[Stretch], axis: Axis) -> tuple[KindPath, ...]:
    """The run as a band: each column in the kind that matters most there; one path of each kind."""
    columns = kinds_over(stretches, axis.begin, axis.end, WIDE)
    paths: dict[Spent, list[str]] = {}
    begin = 0
    for index in range(1, len(columns) + 1):
        if index < len(columns) and columns[index] is columns[begin]:
            continue
        kind = columns[begin]
        if kind is not None:
            paths.setdefault(kind, []).append(f"M{begin} 0h{index - begin}v{HIGH}H{begin}z")
        begin = index
    return tuple(KindPath(kind.value, "".join(paths[kind])) for kind in KINDS if kind in paths)


def buckets(axis: Axis, drawn: DrawnTime) -> tuple[Bucket, ...]:
    """The account hour by hour, or day by day …; none for a run that is very young. Saves of which it is not known when they
    were made are shared out over the training of their attempt."""
    size = next(
        (step for step in _STEPS if step >= _MINUTE and (axis.end - axis.begin) / step <= _BUCKETS * 1.5), _STEPS[-1]
    )
    first = math.floor(axis.begin / size)
    count = math.ceil(axis.end / size) - first
    if count < 2:
        return ()
    sums = [[0.0] * len(KINDS) for _ in range(count)]
    shares = _loose_shares(drawn)
    for one in drawn.stretches:
        kind = KINDS.index(one.kind)
        saving = shares.get(one.attempt, 0.0) if one.kind is Spent.TRAIN else 0.0
        for number in range(math.floor(one.begin / size), math.ceil(one.end / size)):
            overlap = min(one.end, (number + 1) * size) - max(one.begin, number * size)
            if overlap > 0 and 0 <= number - first < count:
                sums[number - first][kind] += overlap * (1 - saving)
                sums[number - first][_SAVE] += overlap * saving
    return tuple(
        Bucket((first + index) * size, (first + index + 1) * size, tuple(round(one, 1) for one in of))
        for index, of in enumerate(sums)
    )


def _loose_shares(drawn: DrawnTime) -> dict[int | None, float]:
    """attempt -> share of what is drawn as its training that was spent in saves."""
    trained: dict[int | None, float] = {}
    for one in drawn.stretches:
        if one.kind is Spent.TRAIN and one.attempt in drawn.loose:
            trained[one.attempt] = trained.get(one.attempt, 0.0) + one.seconds
    return {
        number: min(1.0, drawn.loose[number] / seconds) for number, seconds in trained.items() if number is not None
    }


def bars(found: Sequence[Bucket]) -> tuple[KindPath, ...]:
    """A column for each, stacked: what was trained at the foot."""
    paths: dict[Spent, list[str]] = {}
    wide = WIDE / max(1, len(found))
    gap = min(3.0, wide / 5)
    for index, bucket in enumerate(found):
        foot, whole = float(HIGH), bucket.end - bucket.begin
        for kind, seconds in zip(KINDS, bucket.seconds, strict=True):
            high = HIGH * seconds / whole
            if high > 0.05:
                foot -= high
                box = f"M{index * wide + gap / 2:.1f} {foot:.1f}h{wide - gap:.1f}v{high:.1f}h{gap - wide:.1f}z"
                paths.setdefault(kind, []).append(box)
    return tuple(KindPath(kind.value, "".join(paths[kind])) for kind in KINDS if kind in paths)


def marks(times: Iterable[float], axis: Axis) -> str:
    """A stroke at each of these times; those at one place once."""
    return "".join(f"M{x:g} 0V{HIGH}" for x in sorted({axis.x(at) for at in times}))


def shaded(found: Iterable[TimeGap], axis: Axis) -> str:
    """A field of the whole height for each time without a step."""
    return "".join(f"M{axis.x(one.begin):g} 0H{axis.x(one.end):g}V{HIGH}H{axis.x(one.begin):g}z" for one in found)


def readable(stretches: Sequence[Stretch], axis: Axis) -> list[list[float]]:
    """The stretches as a pointer reads them: kind, begin, end (seconds since the begin), attempt; of very many the longest."""
    chosen = list(stretches)
    if len(chosen) > _MOST_STRETCHES:
        least = sorted((one.seconds for one in chosen), reverse=True)[_MOST_STRETCHES]
        chosen = [one for one in chosen if one.seconds > least]
    return [
        [KINDS.index(one.kind), round(one.begin - axis.begin), round(one.end - axis.begin), one.attempt or 0]
        for one in chosen
    ]


# ------------------------------------------------------------------------------------------------------------ the lines


def step_line(
    record: StepRecord, axis: Axis, starts: Sequence[float] = (), plan: Sequence[tuple[float, float]] = ()
) -> Line | None:
    """``plan``: where the steps would have been without any loss, (epoch seconds, step)."""
    points = [((one.number + 1) * record.every, float(one.step)) for one in record.spans if one.made]
    return _line(points, axis, starts, plan=plan)


def loss_line(record: StepRecord, axis: Axis, starts: Sequence[float] = ()) -> Line | None:
    points = [
        ((one.number + 1) * record.every, one.loss)
        for one in record.spans
        if one.made and one.loss is not None and math.isfinite(one.loss)
    ]
    return _line(points, axis, starts)


def rate_line(paces: Sequence[StepRate], axis: Axis, starts: Sequence[float] = ()) -> Line | None:
    points = [((one.begin + one.end) / 2, one.rate) for one in paces]
    return _line(points, axis, starts, zero=True)


def _line(
    points: Sequence[tuple[float, float]],
    axis: Axis,
    starts: Sequence[float],
    *,
    zero: bool = False,
    plan: Sequence[tuple[float, float]] = (),
) -> Line | None:
    """``zero``: the scale begins there; ``starts``: it breaks there. It leads through no time without points either. Return
    None where nothing is to be drawn."""
    if len(points) < 2:
        return None
    every = max(1, -(-len(points) // _POINTS))
    thinned = [points[index] for index in range(0, len(points), every)]
    if thinned[-1] != points[-1]:
        thinned.append(points[-1])
    values = [value for _, value in (*thinned, *plan)]
    low, high = (0.0 if zero else min(values)), max(values)
    ticks = nice(low, high, 4)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    high = high if high > low else low + 1
    distances = sorted(later[0] - earlier[0] for earlier, later in pairwise(thinned))
    gap = max(_LEAST_GAP, _GAP * distances[len(distances) // 2])
    begins = sorted(starts) if len(starts) < len(thinned) / 8 else []  # of more there would be no line left
    parts, holes, before = [], [], None
    for at, value in thinned:
        y = round(HIGH * (1 - (value - low) / (high - low)), 2)
        restarted = before is not None and bisect_left(begins, at) > bisect_left(begins, before)
        if before is not None and not restarted and at - before > gap:
            holes.append((before, at))
        breaks = before is None or restarted or at - before > gap
        parts.append(
            f"{'M' if breaks else 'L'}{axis.x(at):g} {y:g}{'h0' if breaks else ''}"
        )  # h0: a point alone is a dot
        before = at
    marked = tuple(Tick(round(100 * (1 - (one - low) / (high - low)), 2), _number(one)) for one in ticks)
    drawn = "".join(
        f"{'L' if index else 'M'}{axis.x(at):g} {HIGH * (1 - (value - low) / (high - low)):.2f}"
        for index, (at, value) in enumerate(plan)
    )
    return Line("".join(parts), low, high, marked, tuple(thinned), drawn, tuple(holes))


# ------------------------------------------------------------------------------------------------------------ the scales


def nice(low: float, high: float, most: int) -> list[float]:
    """Round numbers that lie around ``low`` to ``high``: two at least."""
    span = high - low
    if span <= 0:
        span = abs(high) or 1.0
    raw = span / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def time_ticks(axis: Axis, most: int = 9) -> tuple[Tick, ...]:
    """Round times in UTC."""
    span = axis.end - axis.begin
    size = next((step for step in _STEPS if span / step <= most), _STEPS[-1])
    form = "%H:%M:%S" if size < _MINUTE else "%H:%M" if size < _DAY else "%b %-d" if span < 330 * _DAY else "%Y-%m-%d"
    found = []
    number = math.ceil(axis.begin / size)
    while number * size <= axis.end:
        at = number * size
        text = _utc(at, form)
        if size < _DAY and text.startswith("00:00"):
            text = _utc(at, "%b %-d")
        found.append(Tick(round(100 * (at - axis.begin) / span, 2), text, minor=bool(number % 2)))
        number += 1
    return tuple(found)


def _number(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return f"{value:g}"


def _utc(at: float, form: str) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime(form)
