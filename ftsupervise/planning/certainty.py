"""Intervals of a mean and of a count, by quantiles that the standard library does not have. Pure.

It stands alone because both what was measured and what was simulated is judged by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, stdev

SURE = NormalDist().inv_cdf(0.975)  # standard errors on either side: 95 %
_COUNTED = 60  # from here on the approximation is as good as the sum
# Cornish and Fisher's series of Student's t, in powers of the deviate and of 1/degrees
_SERIES = (
    (4, (1, 1)),
    (96, (3, 16, 5)),
    (384, (-15, 17, 19, 3)),
    (92_160, (-945, -1920, 1482, 776, 79)),
)


def student(degrees: int) -> float:
    """The half width of a 95 % interval of a mean, in standard errors, where ``degrees`` + 1 values were seen."""
    if degrees == 1:
        return math.tan(0.475 * math.pi)
    if degrees == 2:
        return math.sqrt(2 / (0.05 * 1.95) - 2)
    found = SURE
    for power, (divisor, factors) in enumerate(_SERIES, 1):
        found += (
            sum(factor * SURE ** (2 * place + 1) for place, factor in enumerate(factors)) / divisor / degrees**power
        )
    return found


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the mean. One value alone bounds nothing: infinite."""
    if len(values) < 2:
        return math.inf
    return student(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def poisson_bounds(times: int) -> tuple[float, float]:
    """The 95 % interval of a mean of which ``times`` were counted (Garwood)."""
    if times >= _COUNTED:
        return _chi_square(times, -SURE), _chi_square(times + 1, SURE)
    low = _where(lambda mean: 1 - _at_most(times - 1, mean) - 0.025) if times else 0.0
    return low, _where(lambda mean: 0.025 - _at_most(times, mean))


def _at_most(times: int, mean: float) -> float:
    """The probability that no more than ``times`` come."""
    return math.fsum(math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) for count in range(times + 1))


def _where(of: Callable[[float], float]) -> float:
    """The mean at which ``of`` rises through 0."""
    low, high = 1e-9, 3.0 * _COUNTED
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle) < 0 else (low, middle)
    return high


def _chi_square(degrees: float, deviate: float) -> float:
    """Half of the quantile with twice the ``degrees``, by Wilson and Hilferty."""
    return degrees * (1 - 1 / (9 * degrees) + deviate * math.sqrt(1 / (9 * degrees))) ** 3
