"""Judges whether the loss diverges, by medians of blocks of losses, because single losses jump.

A loss that rises is nothing by itself: the warm-up, a bad batch, a spike that recovers and a learning rate that is
raised again all do it. It diverges when it has stood high for ``patience`` losses, does not come back, and "high" is
beyond all three of ten times the noise of the blocks before, a quarter of what the training had gained since its first
loss, a quarter of where the loss stood. Pure, and cheap: a loss costs one append, the statistics are made once in a
block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_BLOCKS = 16  # the patience in blocks; the same number has to be known before anything is judged
_PAST = 64  # blocks that say where the loss stood
_NOISE = 10.0
_GAIN = _LEVEL = 0.25
_COMES_BACK = 0.8  # the second half of a rise stands this much lower than the first: it recovers
_AGAIN = 8  # blocks after which level and noise are computed again: they cost more than all else
_MAD = 1.4826  # of a normal distribution: from the median of the deviations to one standard deviation


class LossRise(NamedTuple):
    """A loss that went up and stays up."""

    since: Any  # the step of the first block that stood high, as it was given
    now: float
    before: float


class LossTrend:
    """Takes finite losses in their order. ``first_ever`` is asked when a loss looks like diverging: the first loss of the run,
    where an earlier process has seen it; None: none has, or it is not known."""

    def __init__(self, patience: int, first_ever: Callable[[], float | None] = lambda: None) -> None:
        self._size = max(1, patience // _BLOCKS)
        self._first_ever = first_ever
        self._asked = False
        self._block: list[float] = []
        self._begins: Any = None  # step of the first loss in the block
        self._past: deque[float] = deque(maxlen=_PAST)
        self._high: deque[float] = deque(maxlen=_BLOCKS)  # the newest blocks that stand high, one after the other
        self._since: Any = None
        self._before = self._noise = 0.0
        self._fresh = 0  # more blocks for which these two hold
        self._highest: float | None = None  # of the blocks of this process: where the training came from

    def add(self, value: float, step: Any) -> LossRise | None:
        """Return the rise, when this loss makes it certain; None otherwise, and again None while it goes on in the same way."""
        block = self._block
        if not block:
            self._begins = step
        block.append(value)
        if len(block) < self._size:
            return None
        middle = median(block)
        block.clear()
        return self._judge(middle)

    def begin_anew(self) -> None:
        """Forget the earlier rise: the loss is no number any more, or it was reported."""
        self._block.clear()
        self._high.clear()

    def _judge(self, middle: float) -> LossRise | None:
        past = self._past
        if len(past) < _BLOCKS:
            self._highest = middle if self._highest is None else max(middle, self._highest)
            past.append(middle)
            return None
        if self._fresh == 0:
            self._fresh = _AGAIN
            self._before = median(past)
            self._noise = _MAD * median([abs(one - self._before) for one in past])
        before = self._before
        if not self._is_high(middle - before, before):
            self._fresh -= 1
            self._high.clear()
            past.append(middle)
            return None
        if not self._high:
            self._since = self._begins
        self._high.append(middle)
        if len(self._high) < _BLOCKS or self._comes_back(before) or self._is_little(middle - before, before):
            return None
        self.begin_anew()
        past.clear()  # what comes now is judged against itself
        self._fresh = 0
        return LossRise(self._since, middle, before)

    def _is_high(self, rise: float, before: float) -> bool:
        gained = max(0.0, (self._highest or 0.0) - before)
        return rise > max(_NOISE * self._noise, _GAIN * gained, _LEVEL * abs(before))

    def _comes_back(self, before: float) -> bool:
        rises = [one - before for one in self._high]
        half = len(rises) // 2
        return median(rises[half:]) < _COMES_BACK * median(rises[:half])

    def _is_little(self, rise: float, before: float) -> bool:
        """Return whether it is not high at all, by the run's first loss."""
        if not self._asked:
            self._asked = True
            first = self._first_ever()
            if first is not None and first - first == 0.0:
                self._highest = max(first, self._highest if self._highest is not None else first)
        return not self._is_high(rise, before)


def median(values: Iterable[float]) -> float:
    """Return the upper one of two medians; ``statistics`` takes longer to import than the guard."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
