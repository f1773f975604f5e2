"""The losses of a run's time as a few named items, the costliest first: they answer "what cost most?". Pure.

The items are disjoint: with the training at its usual speed they make up all of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ftsupervise.model import Attempt
from ftsupervise.report.account import KEPT_OUT, Spent, TimeAccount
from ftsupervise.report.incidents import RunIncident, costs_of, spent_by_attempt
from ftsupervise.report.slow import SlowPeriod, with_the_last_going_on

QUEUE, UNKNOWN, SAVES, SLOW_STEPS = "waiting in the queue", "unknown", "saving checkpoints", "slow steps"
BRAKED, HELD = "stopped by the brake", "stopped by a person, or not launched"
PLANNED, FIRST, STANDS, BLIND = (
    "planned restarts",
    "the first start",
    "no progress now",
    "attempts that reported nothing",
)
_LEAST = 1.0  # seconds
_APART = {
    Spent.QUEUE: QUEUE,
    Spent.BRAKED: BRAKED,
    Spent.HELD: HELD,
    Spent.UNKNOWN: UNKNOWN,
}  # kinds that are costs of their own


class CostItem(NamedTuple):
    name: str
    seconds: float
    times: int = 0  # interruptions; 0 where it is none
    fault: bool = False  # something went wrong
    example: RunIncident | None = None  # the costliest of them; of HELD, after which it was held longest
    slowest: SlowPeriod | None = None  # the costliest of the slow times
    run: str = ""  # of several runs that which it cost most; the example is its own
    of_run: float = 0.0  # seconds that it cost that one
    nodes: tuple[str, ...] = ()  # where the interruptions were, the most frequent first
    goes_on: bool = False  # one of them is not over


def at_usual_speed(account: TimeAccount, items: Sequence[CostItem]) -> float:
    """Seconds of training without what slow steps took beyond the usual speed: with the items, all of the time."""
    return account.seconds()[Spent.TRAIN] - sum(one.seconds for one in items if one.name == SLOW_STEPS)


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
        goes_on = old.goes_on or (one is not None and one.goes_on)
        times = old.times + (one is not None)
        items[name] = old._replace(seconds=old.seconds + seconds, times=times, example=dearer, goes_on=goes_on)

    spent, longest = spent_by_attempt(attempts, account), dict[Spent, float]()
    for one in found:
        for kind, seconds in one.apart:
            add(_APART[kind], seconds)
            if kind in KEPT_OUT and seconds > longest.get(kind, 0.0):
                longest[kind], name = seconds, _APART[kind]
                items[name] = items[name]._replace(example=one)
        add(PLANNED if one.planned else one.kind, one.lost, one, fault=not one.planned)
        spent.pop(one.attempt, None)
    for number, rest in spent.items():
        for kind, name in _APART.items():
            add(name, rest.get(kind, 0.0))
        add(FIRST if not number else PLANNED, rest.get(Spent.RESTART, 0.0) + rest.get(Spent.REDO, 0.0))
        add(STANDS, rest.get(Spent.DETECT, 0.0), fault=True)
    of_kind = account.seconds()
    add(SAVES, of_kind[Spent.SAVE])
    add(SLOW_STEPS, min(sum(one.lost for one in slow), of_kind[Spent.TRAIN]), fault=True)
    blind = sum(one.seconds for one in account.stretches if one.kind is Spent.UNKNOWN and one.attempt is not None)
    if slow:
        periods = with_the_last_going_on(slow, attempts, account.until.timestamp())
        items[SLOW_STEPS] = items[SLOW_STEPS]._replace(slowest=max(periods, key=lambda one: one.lost))
    for cost in costs_of(found):
        if not cost.planned:
            items[cost.kind] = items[cost.kind]._replace(nodes=cost.nodes)
    known = [one for one in items.values() if one.seconds >= _LEAST]
    known.sort(key=lambda one: (-one.seconds, one.name))
    return (*known, CostItem(BLIND, blind)) if blind >= _LEAST else tuple(known)
