"""The rates at which a run makes its steps: over its record of steps, without its restarts and waits, and what is usual. Pure.

The supervisor tells the usual rate by this, ``status`` says SLOW by it, and the report finds slow times with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from ftsupervise.rundir.progress import Span, StepRecord

SLOW = 0.7  # of the usual rate, over ``SLOW_FOR``: what the *throughput* watchdog and ``status`` call slow
SLOW_FOR = 3600.0  # seconds
FEWEST_STEPS = 8  # at least, of a piece
_PIECES = 240  # at most: of a record
_SPANS = 8  # at least, of a piece
_GAP = 12  # times the usual distance of two spans: a restart, or a wait
_USUAL = 0.8  # the rate that this share of all pieces does not exceed: a run may be slow for most of its time


def is_slow(rate: float, usual: float, least: float = SLOW) -> bool:
    """Return whether ``rate``, over a time as long as ``SLOW_FOR``, is below the share ``least`` of the usual one."""
    return rate < least * usual


class StepRate(NamedTuple):
    """The rate over a time in which it trained without a break, its saves left out where they are on record. Epoch seconds;
    steps a second."""

    begin: float
    end: float
    rate: float


def paces(record: StepRecord, starts: Sequence[float] = ()) -> tuple[StepRate, ...]:
    """The rates over the run, at most some hundreds, none across a restart. ``starts``: when its attempts began, in epoch
    seconds."""
    size = max(_SPANS, -(-len(record.spans) // _PIECES))
    found = []
    for part in _unbroken(record, starts):
        for piece in _pieces(part[:-1], size):  # the last span may have ended before its time was over
            seconds = (piece[-1].number - piece[0].number) * record.every
            trained = seconds - sum(one.saving for one in piece[1:])
            made = sum(one.made for one in piece[1:])  # those of the first were made before it
            if trained > 0.1 * seconds and made > 0:
                begin = (piece[0].number + 1) * record.every
                found.append(StepRate(float(begin), float(begin + seconds), made / trained))
    return tuple(found)


def usual_rate(found: Sequence[StepRate]) -> float | None:
    """None where there is too little to tell."""
    rates = sorted(one.rate for one in found)
    return rates[min(len(rates) - 1, int(_USUAL * len(rates)))] if len(rates) >= 3 else None


def _unbroken(record: StepRecord, starts: Sequence[float]) -> Iterator[list[Span]]:
    spans, begins = record.spans, sorted(int(at // record.every) for at in starts)
    distances = sorted(later.number - earlier.number for earlier, later in pairwise(spans))
    usual = distances[len(distances) // 2] if distances else 1
    part: list[Span] = []
    for one in spans:
        before = part[-1] if part else one
        restarted = bisect_left(begins, one.number) > bisect_left(begins, before.number)
        if restarted or one.number - before.number > _GAP * usual or one.step < before.step:
            yield _to_the_last_step(part)
            part = []
        part.append(one)
    yield _to_the_last_step(part)


def _to_the_last_step(part: list[Span]) -> list[Span]:
    """Return it without the spans at its end in which no step was made: a standstill is no slow training."""
    end = next((index for index in reversed(range(len(part))) if part[index].made), -1) + 1
    return part[:end]


def _pieces(part: list[Span], size: int) -> Iterator[list[Span]]:
    """Pieces of ``size`` spans and some steps at least; each begins with the last span of the one before."""
    begin = 0
    while begin + size < len(part):
        end = begin + size
        while end < len(part) - 1 and sum(one.made for one in part[begin + 1 : end + 1]) < FEWEST_STEPS:
            end += 1
        yield part[begin : end + 1]
        begin = end
