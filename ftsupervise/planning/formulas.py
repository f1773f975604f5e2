"""The formulas by which people reckon the time that faults cost a training. Each answer names the formula that gave it.

They do not agree, because they assume different things, so none is ever mixed with another in silence: with a failure every 18
minutes and 10 minutes to recover, three of them say 44 %, 57 % and 64 %. Where a formula is asked beyond what it assumes, the
answer says so (``Estimate.doubt``). docs/planning.md has the assumptions and the published points. Pure; times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

DAY, HOUR, MINUTE = 86400.0, 3600.0, 60.0
PRESSURE = 0.25  # recovery time by MTBF: beyond it, failures during the recovery are no small correction
_GOLDEN = (math.sqrt(5) - 1) / 2


class Formula(str, Enum):
    """``value``: how it is written, with τ: interval, C: what a save costs, M: MTBF, L: time lost besides the steps (detection,
    restart, queue), R: restart."""

    FIRST_ORDER = "1 / (1 + C/τ + (τ/2 + L)/M)"
    DALY = "τ / (M·e^(L/M)·(e^((τ+C)/M) - 1))"
    META = "(1 - (R + τ/2)/M) / (1 + C/τ)"
    STALL = "1 - S/M"
    STALL_ALONE = "M/(M + S)"
    STALL_AGAIN = "e^(-S/M)"
    REPLICAS = "(1 - S/M)·(1 - a/(M·K))"


ASSUMES = {
    Formula.FIRST_ORDER: "at most one failure in an interval and its recovery",
    Formula.DALY: "failures without memory, also during saves and restarts (Daly 2006)",
    Formula.META: "at most one failure in an interval and its recovery; a restart is never begun anew (Kokolis et al. 2025)",
    Formula.STALL: "stalls never meet, and no step is made again (FT-HSDP)",
    Formula.STALL_ALONE: "no failure during a stall, and no step is made again",
    Formula.STALL_AGAIN: "a failure during a stall begins it anew, and no step is made again",
    Formula.REPLICAS: "stalls never meet; a lost group is away for a, and the others train on",
}


class Estimate(NamedTuple):
    """A share of useful time, 0-1, and the formula that gave it. ``doubt``: why it is not to be trusted here; "": it may be."""

    value: float
    formula: Formula
    doubt: str = ""


# ------------------------------------------------------------------------------------------------------------ failures


def all_survive(alone: float, count: int) -> float:
    """The probability that none of ``count`` fails, where each one survives with ``alone``."""
    return float(alone**count)


def job_mtbf(nodes: int, per_node_day: float) -> float:
    """Seconds between two failures of a job. ``per_node_day``: failures of a node in a day (6.5 in a thousand days: 0.0065)."""
    return DAY / (nodes * per_node_day) if nodes and per_node_day else math.inf


def node_rate(nodes: int, mtbf: float) -> float:
    """Failures of a node in a day, from the MTBF of a job on ``nodes``: the inverse of ``job_mtbf``."""
    return DAY / (nodes * mtbf)


def spares_for(failures: float, risk: float) -> int:
    """The fewest spare nodes such that more fail, before one is back, at most with a probability of ``risk``. ``failures``: the
    mean number that fail in that time, each by itself (Poisson)."""
    if failures <= 0:
        return 0
    covered, count = 0.0, -1
    while covered < 1 - risk and count < 10 * failures + 1000:
        count += 1
        covered += math.exp(count * math.log(failures) - failures - math.lgamma(count + 1))
    return count


# ------------------------------------------------------------------------------------------------------------ the interval


def young(cost: float, mtbf: float) -> float:
    """Young 1974: the time between two saves that loses least, to the first order."""
    return math.sqrt(2 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Daly 2006: the same to a higher order. Where a save takes 2·M or longer it is M."""
    if cost >= 2 * mtbf:
        return mtbf
    half = cost / (2 * mtbf)
    return young(cost, mtbf) * (1 + math.sqrt(half) / 3 + half / 9) - cost


def best_interval(ettr: Callable[[float], float], shortest: float, longest: float) -> float:
    """The interval with the highest ``ettr``, searched on a scale of ratios. ``ettr`` has one maximum between the two."""
    low, high = math.log(shortest), math.log(max(longest, shortest * (1 + 1e-9)))
    while high - low > 1e-7:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if ettr(math.exp(left)) < ettr(math.exp(right)):
            low = left
        else:
            high = right
    return math.exp((low + high) / 2)


# ------------------------------------------------------------------------------------------------------------ the ratio


def first_order(interval: float, cost: float, mtbf: float, lost: float) -> Estimate:
    """``lost``: seconds of a failure besides the steps that are made again: detection, restart, queue."""
    value = 1 / (1 + cost / interval + (interval / 2 + lost) / mtbf)
    return Estimate(value, Formula.FIRST_ORDER, _pressed(interval / 2 + lost, mtbf))


def daly_ettr(interval: float, cost: float, mtbf: float, lost: float) -> Estimate:
    """The share of useful time by Daly's whole formula. A failure during the recovery begins that anew. Without failures (an
    infinite ``mtbf``) it is exactly 1/(1 + C/τ)."""
    if math.isinf(mtbf):
        return Estimate(1 / (1 + cost / interval), Formula.DALY)
    whole = (interval + cost) / mtbf
    if whole + lost / mtbf > 700:  # it never gets through an interval
        return Estimate(0.0, Formula.DALY)
    return Estimate(interval / (mtbf * math.exp(lost / mtbf) * math.expm1(whole)), Formula.DALY)


def meta_ettr(interval: float, write: float, mtbf: float, restart: float) -> Estimate:
    """Meta's expected ETTR. ``write``: seconds that a save blocks; ``restart``: until the first step of the next start."""
    value = (1 - (restart + interval / 2) / mtbf) / (1 + write / interval)
    return Estimate(max(0.0, value), Formula.META, _pressed(restart + interval / 2, mtbf))


def stall_ettr(stall: float, mtbf: float, formula: Formula = Formula.STALL) -> Estimate:
    """Where a failure costs a stall and no step. ``formula``: STALL, STALL_ALONE or STALL_AGAIN."""
    values = {
        Formula.STALL: max(0.0, 1 - stall / mtbf),
        Formula.STALL_ALONE: mtbf / (mtbf + stall),
        Formula.STALL_AGAIN: math.exp(-stall / mtbf),
    }
    return Estimate(values[formula], formula, _pressed(stall, mtbf) if formula is Formula.STALL else "")


def replica_ettr(stall: float, mtbf: float, groups: int, away: float) -> Estimate:
    """The share of the whole capacity that ``groups`` replica groups use: a failure stalls all for ``stall`` and takes one of
    them away for ``away``."""
    gone = away / (mtbf * groups)
    value = (1 - stall / mtbf) * (1 - gone)
    doubt = _pressed(stall, mtbf) or (f"{gone:.0%} of the groups would be away on average" if gone > PRESSURE else "")
    return Estimate(max(0.0, value), Formula.REPLICAS, doubt)


def away_for(target: float, stall: float, mtbf: float, groups: int) -> float:
    """How long a failed replica group may be away, at most, for ``replica_ettr`` to be ``target``; negative: it cannot be."""
    return (1 - target / (1 - stall / mtbf)) * mtbf * groups


def loss_allowed(ettr: float, between: float) -> float:
    """Seconds that an interruption may cost on average, steps made again included, where one begins every ``between`` seconds
    of all time: what is left for it by that ratio."""
    return (1 - ettr) * between


def _pressed(lost: float, mtbf: float) -> str:
    share = lost / mtbf
    if share <= PRESSURE:
        return ""
    return (
        f"a failure costs {share:.0%} of the time to the next one, and this formula takes it that failures do not meet "
        f"(below {PRESSURE:.0%}): simulate"
    )


# ------------------------------------------------------------------------------------------------------------ money and disk


def bytes_a_day(size: float, interval: float) -> float:
    """Bytes written in a day by checkpoints of ``size`` bytes, one every ``interval`` seconds."""
    return size * DAY / interval


def gpu_hours(gpus: int, seconds: float) -> float:
    return gpus * seconds / HOUR


def cost(gpus: int, seconds: float, price: float) -> float:
    """Money for ``gpus`` over a time. ``price``: of one GPU for one hour."""
    return gpu_hours(gpus, seconds) * price
