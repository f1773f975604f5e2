"""The losses of a run's time as a few named items, the costliest first: they answer "what cost most?". Pure.

The items are disjoint: with the training at its usual speed they make up all of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ftsupervise.model import Attempt
from ftsupervise.report.account import Spent, TimeAccount
from ftsupervise.report.incidents import RunIncident, spent_by_attempt
from ftsupervise.report.slow import SlowPeriod

QUEUE, HELD, UNKNOWN, SAVES, SLOW_STEPS = "waiting in the queue", "held", "unknown", "saving checkpoints", "slow steps"
BRAKED = "held by the brake"
PLANNED, FIRST, STANDS, BLIND = "planned restarts", "the first start", "no progress now", "training without the guard"
_LEAST = 1.0  # seconds


class CostItem(NamedTuple):
    name: str
    seconds: float
    times: int = 0  # interruptions; 0 where it is none
    fault: bool = False  # something went wrong
    example: RunIncident | None = None  # the costliest of them; of HELD, after which it was held longest
    slowest: SlowPeriod | None = None  # the costliest of the slow times
    run: str = ""  # whose example it is, where there are several runs


def cost_items(
    attempts: Sequence[Attempt],
    account: TimeAccount,
    found: Sequence[RunIncident],
    slow: Sequence[SlowPeriod],
) -> tuple[CostItem, ...]:
    """The costliest first. What may have been training, without the guard, comes last."""
    items: dict[str, CostItem] = {}

    def add(name: str, seconds: float, one: RunIncident | None = None, *, fault: bool = False) -> None:
        old = items.get(name) or CostItem(name, 0.0, fault=fault)
        dearer = one if one is not None and (old.example is None or one.lost > old.example.lost) else old.example
        items[name] = old._replace(seconds=old.seconds + seconds, times=old.times + (one is not None), example=dearer)

    spent, longest = spent_by_attempt(attempts, account), 0.0
    for one in found:
        costs = dict(one.spent)
        held = costs.get(Spent.HELD, 0.0)
        add(HELD, held)
        add(BRAKED, costs.get(Spent.BRAKED, 0.0))
        if held > longest:
            longest, items[HELD] = held, items[HELD]._replace(example=one)
        add(UNKNOWN, costs.get(Spent.UNKNOWN, 0.0))
        if one.planned:
            add(QUEUE, costs.get(Spent.QUEUE, 0.0))
            add(PLANNED, one.lost - costs.get(Spent.QUEUE, 0.0), one)
        else:
            add(one.kind, one.lost, one, fault=True)
        spent.pop(one.attempt, None)
    for number, costs in spent.items():
        add(QUEUE, costs.get(Spent.QUEUE, 0.0))
        add(HELD, costs.get(Spent.HELD, 0.0))
        add(BRAKED, costs.get(Spent.BRAKED, 0.0))
        add(UNKNOWN, costs.get(Spent.UNKNOWN, 0.0))
        add(FIRST if not number else PLANNED, costs.get(Spent.RESTART, 0.0) + costs.get(Spent.REDO, 0.0))
        add(STANDS, costs.get(Spent.DETECT, 0.0), fault=True)
    seconds = account.seconds()
    add(SAVES, seconds[Spent.SAVE])
    add(SLOW_STEPS, min(sum(one.lost for one in slow), seconds[Spent.TRAIN]), fault=True)
    blind = sum(one.seconds for one in account.stretches if one.kind is Spent.UNKNOWN and one.attempt is not None)
    if slow:
        items[SLOW_STEPS] = items[SLOW_STEPS]._replace(slowest=max(slow, key=lambda one: one.lost))
    known = [one for one in items.values() if one.seconds >= _LEAST]
    known.sort(key=lambda one: (-one.seconds, one.name))
    return (*known, CostItem(BLIND, blind)) if blind >= _LEAST else tuple(known)
