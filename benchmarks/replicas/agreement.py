"""Do two samples of final losses agree within the noise of seeds? Pure.

Two questions are asked, for a yes to one of them may be chance: a permutation test of the difference of the means says whether
the seeds explain it, and its size beside the spread of the undisturbed seeds says whether it would matter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb
from statistics import fmean, stdev
from typing import NamedTuple

LEVEL = 0.01  # a smaller p is no chance
LIKELY = 0.05  # nor is one below this, where the difference is large
SPREADS = 1.0  # standard deviations of the undisturbed seeds, beyond which a difference is large
_EXACT = 200_000  # ways to share the values out, beyond which some are drawn


class Agreement(NamedTuple):
    undisturbed: float  # means
    disturbed: float
    spread: float  # standard deviation over the undisturbed seeds
    p: float  # of the permutation test, two-sided
    seeds: int

    @property
    def difference(self) -> float:
        return self.disturbed - self.undisturbed

    @property
    def outside(self) -> str:
        """Say why the two do not agree; "" where they do."""
        if self.p < LEVEL:
            return f"chance alone gives such a difference with p = {self.p:.4f}, less than {LEVEL}"
        if self.p < LIKELY and abs(self.difference) > SPREADS * self.spread:
            return (
                f"the means differ by {abs(self.difference):.4f}, more than the spread of the seeds ({self.spread:.4f})"
            )
        return ""


def agreement(undisturbed: Sequence[float], disturbed: Sequence[float]) -> Agreement:
    """Raises ValueError for fewer than two values each."""
    if min(len(undisturbed), len(disturbed)) < 2:
        raise ValueError("two seeds at least, each with and without faults")
    p = permutation_test(undisturbed, disturbed)
    return Agreement(fmean(undisturbed), fmean(disturbed), stdev(undisturbed), p, len(undisturbed))


def permutation_test(one: Sequence[float], other: Sequence[float]) -> float:
    """Return how often the means would differ so much if all values were shared out by chance: all ways, or 200,000 of them."""
    both, size = [*one, *other], len(one)
    wanted, total = abs(fmean(one) - fmean(other)) - 1e-12, sum(both)
    as_far = tried = 0
    for sum_of_one in _sums(both, size):
        tried += 1
        as_far += abs(sum_of_one / size - (total - sum_of_one) / (len(both) - size)) >= wanted
    return as_far / tried


def _sums(both: Sequence[float], size: int) -> Iterator[float]:
    if comb(len(both), size) <= _EXACT:
        yield from (sum(values) for values in combinations(both, size))
        return
    draw = random.Random(1)
    yield sum(both[:size])
    for _ in range(_EXACT):
        yield sum(draw.sample(list(both), size))
