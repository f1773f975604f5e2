"""Judges whether a run makes no progress, by its signs and by what is usual for it. Pure: seconds in, a verdict out.

The *hang* watchdog and ``status`` ask this. A signal is one thing that moves when the run makes progress. A run is hung only if
every signal it has stands still for longer than its bound; if one of them could not be seen, the answer is unknown. The bounds
come from the run's own past:

    training, phases told      10 of its own step times, at least 10 min, or twice the longest pause that ended well
    another phase              1 h (or as set for it), or twice the longest of that phase that ended well and 10 min more
    only a log, or no phases   1 h, for a save and an evaluation in a row look like this; or 10 step times, or twice the longest
                               pause that ended well
    started, nothing moved yet as a phase, "start"

After a day of watching, what is usual is known, and the hours shrink to twice the longest pause and 10 min more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ftsupervise.truth import START, TRAIN, UNTOLD

_DAY = 86_400.0
_OFTEN = 3  # times that a phase must be seen before its length is known
_MORE = 600.0  # seconds: checks are minutes apart, so a pause was longer than it was seen to be


@dataclass(frozen=True)
class Signal:
    """One sign of progress. ``age``: seconds since it last moved, by the file server's clock; None: it never has."""

    name: str  # "step", "beat", "log", "checkpoint", "gpu"
    age: float | None
    words: str = ""
    blind: str = ""  # why it could not be seen


@dataclass(frozen=True)
class ProgressHistory:
    """The usual times of this run: step times (s), pauses that ended well (s) by phase, and for how long it has been
    watched (s)."""

    step_times: Sequence[float] = ()
    pauses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    watched: float = 0.0
    tells_phases: bool = False  # the loop has reported another phase than start and train

    def longest(self, phase: str) -> float:
        return max(self.pauses.get(phase, ()), default=0.0)

    @property
    def step_time(self) -> float | None:
        if not self.step_times:
            return None
        from statistics import median  # it loads much, and ``status`` judges rarely

        return median(self.step_times)


@dataclass(frozen=True)
class StallLimits:
    """The limits of the judge, seconds."""

    at_least: float = 600.0
    quiet: float = 3600.0
    slow: float = 3600.0
    at_most: float = 14_400.0
    times: float = 10.0  # of the run's own step times without a step
    phases: Mapping[str, float] = field(default_factory=dict)


class Progress(Enum):
    MOVING = "moving"
    HUNG = "hung"
    UNSEEN = "unseen"  # some signal could not be seen, and none moves
    NOTHING = "nothing"  # there is no signal to judge by


@dataclass(frozen=True)
class StallVerdict:
    state: Progress
    age: float  # seconds since anything moved
    bound: float  # the limit of that age
    phase: str
    words: str  # the newest sign of progress


def bound(phase: str, past: ProgressHistory, limits: StallLimits) -> float:
    """Return for how many seconds a run may usually stand still in ``phase``."""
    pause = past.longest(phase)
    if phase not in (TRAIN, UNTOLD):
        if phase in limits.phases:
            return limits.phases[phase]
        if past.watched >= _DAY and len(past.pauses.get(phase, ())) >= _OFTEN:
            return max(limits.at_least, min(2 * pause + _MORE, limits.at_most))
        return max(limits.slow, min(2 * pause + _MORE, limits.at_most))
    if phase == TRAIN and past.tells_phases:
        floor = limits.at_least
    elif past.watched >= _DAY:
        floor = min(limits.quiet, max(limits.at_least, 2 * pause + _MORE))
    else:
        floor = limits.quiet
    steps = limits.times * (past.step_time or 0.0)
    return max(floor, steps, min(2 * pause, limits.at_most))


def judge(
    signals: Iterable[Signal], started: float, phases: Iterable[str], past: ProgressHistory, limits: StallLimits
) -> StallVerdict:
    """``started``: seconds since the command (or its job) was started; what moved before that does not count.

    ``phases``: what the ranks are doing, as far as the guard tells; the most patient of them counts.
    """
    signals = tuple(signals)
    moved = [signal for signal in signals if signal.age is not None and signal.age < started]
    blind = [signal for signal in signals if signal.blind]
    newest = min(moved, key=lambda signal: signal.age or 0.0, default=None)
    doing = (tuple(phases) or (UNTOLD,)) if newest is not None else (START,)
    phase = max(doing, key=lambda one: bound(one, past, limits))
    limit = bound(phase, past, limits)
    age = started if newest is None or newest.age is None else newest.age
    if age < limit:
        state = Progress.MOVING
    elif blind:
        state = Progress.UNSEEN
    else:
        state = Progress.HUNG if signals else Progress.NOTHING
    return StallVerdict(state, age, limit, phase, newest.words if newest is not None else "")
