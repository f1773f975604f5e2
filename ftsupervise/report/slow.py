"""Times in which a run trained slower than it can: from its record of steps, without its restarts and waits. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from ftsupervise.model import Attempt
from ftsupervise.rundir.step_rates import FEWEST_STEPS, StepRate, usual_rate

SLOW = 0.8  # of the usual rate
_RECENT = 1800.0  # seconds: the record of steps is not newer than its last whole part


class SlowPeriod(NamedTuple):
    begin: float
    end: float
    rate: float  # mean
    usual: float
    lost: float  # seconds that it would not have taken at the usual rate
    goes_on: bool = False


def paces_of(attempts: Sequence[Attempt], known: Sequence[StepRate]) -> tuple[StepRate, ...]:
    """``known`` and, for attempts too short to have any, their mean rate by the ledger."""
    begins = [one.begin for one in known]
    found = list(known)
    for one in attempts:
        if one.first_step is None or one.last_step is None or one.ready is None or one.worked is None:
            continue
        begin, end = (one.started.timestamp() + seconds for seconds in (one.ready, one.worked))
        steps, seconds = one.last_step - one.first_step, end - begin - (one.saving or 0.0)
        if steps >= FEWEST_STEPS and seconds > 0 and bisect_left(begins, begin) == bisect_left(begins, end):
            found.append(StepRate(begin, end, steps / seconds))
    return tuple(sorted(found))


def slow_periods(found: Sequence[StepRate]) -> tuple[SlowPeriod, ...]:
    """Return the periods in which it ran below ``SLOW`` of its usual rate; neighbouring ones are joined."""
    usual = usual_rate(found)
    if usual is None:
        return ()
    periods: list[SlowPeriod] = []
    for one in found:
        if one.rate >= SLOW * usual:
            continue
        seconds = one.end - one.begin
        lost = seconds * (1 - one.rate / usual)
        last = periods[-1] if periods else None
        if last is not None and one.begin - last.end <= seconds:
            whole = last.end - last.begin + seconds
            rate = (last.rate * (last.end - last.begin) + one.rate * seconds) / whole
            periods[-1] = SlowPeriod(last.begin, one.end, rate, usual, last.lost + lost)
        else:
            periods.append(SlowPeriod(one.begin, one.end, one.rate, usual, lost))
    return tuple(periods)


def with_the_last_going_on(
    periods: Sequence[SlowPeriod], attempts: Sequence[Attempt], now: float
) -> tuple[SlowPeriod, ...]:
    """Return them; the last one goes on where its attempt has not ended and the record of steps ends with it."""
    if not periods or not attempts or attempts[-1].ended is not None or now - periods[-1].end > _RECENT:
        return tuple(periods)
    return (*periods[:-1], periods[-1]._replace(goes_on=True))
