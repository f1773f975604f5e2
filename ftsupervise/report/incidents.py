"""The interruptions of a run: why each attempt ended, where, what proves it, what was done about it, and the time that it cost.

Made of the ledger and the account of time, so they add up: every second that is neither trained, saved nor the first wait and
start belongs to one of them.

    detect            of the attempt that ended
    restart, queue,
    held, unknown     until the next attempt begins
    restart, redo     of the next attempt, until it makes steps that no earlier one made; of one that never made a step, all
                      of its time is its own

Pure: values in, values out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from typing import NamedTuple

from ftsupervise.model import Attempt, Cause, CauseKind, FailureKind
from ftsupervise.report.account import Spent, TimeAccount

_UNRECORDED = frozenset((CauseKind.LOST, CauseKind.UNKNOWN))
_TAKEN = frozenset((CauseKind.CANCELLED, CauseKind.PREEMPTED, CauseKind.TOLD, CauseKind.SUPERSEDED))
_LOST = frozenset((Spent.DETECT, Spent.RESTART, Spent.QUEUE, Spent.REDO))
_OF_A_FAILURE = {
    FailureKind.CODE: "program error",
    FailureKind.SIGNAL: "killed process",
    FailureKind.MEMORY: "out of memory",
    FailureKind.NODE: "node failure",
    FailureKind.DISK: "full disk",
    FailureKind.START: "failed start",
    FailureKind.HANG: "hang",
    FailureKind.NUMBERS: "bad numbers",
    FailureKind.GIVEN_UP: "given up",
    FailureKind.LOST: "end without a record",
}


class RunIncident(NamedTuple):
    """The end of an attempt that was not the end of the run."""

    attempt: int
    at: datetime  # the end; of one without an end on record, when it was last heard of
    kind: str  # a class: "node failure", "hang", "time limit" …
    planned: bool  # it left in order, or a person or Slurm asked for it: no fault
    job_id: str = ""
    cause: str = ""  # in words
    ranks: str = ""  # as Slurm writes them: "5", "0-2,7"
    nodes: tuple[str, ...] = ()  # where it happened; () if that is not known
    step: int | None = None  # the last one before it
    evidence: str = ""  # the line of the output that says most, or what the hardware said
    done: str = ""  # what was done about it: "restarted in place"
    steps_lost: int | None = None  # made, and made again later; None: not known
    spent: tuple[tuple[Spent, float], ...] = ()  # seconds by kind

    @property
    def lost(self) -> float:
        """Seconds that it cost; without those in which the run was held by a person or the brake, or that are unknown."""
        return sum(seconds for kind, seconds in self.spent if kind in _LOST)

    @property
    def whole(self) -> float:
        """Seconds from the last progress until there was progress again, whatever they were."""
        return sum(seconds for _, seconds in self.spent)


class CauseCost(NamedTuple):
    """All incidents of one kind."""

    kind: str
    planned: bool
    times: int
    seconds: float  # lost
    nodes: tuple[str, ...]  # the most frequent first


def incidents(attempts: Sequence[Attempt], account: TimeAccount, *, running: bool = False) -> tuple[RunIncident, ...]:
    """The interruptions of a run, oldest first: each attempt that has ended, but for the one that finished it. ``running``: the
    last attempt still runs, whatever can be read of it (``detail.runs_now``)."""
    costs = spent_by_attempt(attempts, account)
    found = []
    for index, one in enumerate(attempts):
        runs = running and index == len(attempts) - 1 and one.ended is None
        if runs or one.cause is None or one.cause.kind is CauseKind.FINISHED:
            continue
        after = attempts[index + 1] if index + 1 < len(attempts) else None
        found.append(_incident(one, after, costs.get(one.number, {})))
    return tuple(found)


def costs_of(found: Iterable[RunIncident]) -> tuple[CauseCost, ...]:
    """The kinds of incidents, the dearest first."""
    groups: dict[tuple[str, bool], list[RunIncident]] = {}
    for one in found:
        groups.setdefault((one.kind, one.planned), []).append(one)
    made = [
        CauseCost(kind, planned, len(those), sum(one.lost for one in those), _by_count(those))
        for (kind, planned), those in groups.items()
    ]
    return tuple(sorted(made, key=lambda cost: (-cost.seconds, -cost.times, cost.kind)))


def kind_of(one: Attempt) -> str:
    """The class of an attempt's end, for people; "" while it runs."""
    if one.failure is not None and one.hardware:
        return "hardware fault"
    if one.failure is not None:
        return _OF_A_FAILURE[one.failure.kind]
    if one.cause is None:
        return ""
    if one.cause.kind in _UNRECORDED:
        return _OF_A_FAILURE[FailureKind.LOST]
    return "left in order" if one.cause.kind is CauseKind.EXIT and not one.cause.code else one.cause.kind.value


def is_planned(one: Attempt) -> bool:
    """Did it end because somebody or something asked for it, and not of a fault?"""
    if one.failure is not None or one.cause is None:
        return False
    return one.cause.orderly or one.cause.kind in _TAKEN or one.cause.kind is CauseKind.INTERRUPTED


def _incident(one: Attempt, after: Attempt | None, costs: dict[Spent, float]) -> RunIncident:
    cause = one.cause or Cause(CauseKind.UNKNOWN)
    where = cause.first
    nodes = dict.fromkeys(place.node for place in where.at if place.node)
    ranks = ",".join(place.ranks for place in where.at if place.ranks)
    return RunIncident(
        attempt=one.number,
        at=one.ended or one.heard or one.started,
        kind=kind_of(one),
        planned=is_planned(one),
        job_id=one.job_id,
        cause=cause.words(),
        ranks=f"{ranks} and {where.more} more" if ranks and where.more else ranks,
        nodes=tuple(nodes) or (one.nodes if len(one.nodes) == 1 else ()),
        step=one.last_step,
        evidence=one.hardware or one.line or one.note,
        done=_done(one, after),
        steps_lost=_steps_lost(one, after),
        spent=tuple((kind, costs[kind]) for kind in Spent if costs.get(kind)),
    )


def _done(one: Attempt, after: Attempt | None) -> str:
    stopped = "the brake came on" if one.braked else ""
    went_on = ""
    if not one.then and after is not None:
        same = bool(one.job_id) and one.job_id == after.job_id
        where = "the same job" if same else f"job {after.job_id or '-'}"
        went_on = f"attempt {after.number} began in {where}"
    return "; ".join(filter(None, (one.then or went_on, stopped)))


def _steps_lost(one: Attempt, after: Attempt | None) -> int | None:
    if after is None or one.last_step is None or after.first_step is None:
        return None
    return max(0, one.last_step - after.first_step + 1)


def spent_by_attempt(attempts: Sequence[Attempt], account: TimeAccount) -> dict[int, dict[Spent, float]]:
    """Attempt number -> seconds that its end cost, by kind; 0: the first wait and the first start. What was trained or saved,
    or may have been, is left out."""
    moved = {one.number for one in attempts if one.first_step is not None}
    before = {later.number: earlier.number for earlier, later in pairwise(attempts)}
    found: dict[int, dict[Spent, float]] = {}
    newest: int | None = None  # the attempt that runs, or has ended last, at this stretch
    for one in account.stretches:
        begins = one.attempt is not None and one.attempt != newest
        newest = newest if one.attempt is None else one.attempt
        without_guard = one.attempt is not None and one.kind is Spent.UNKNOWN  # it may have been training
        if one.kind in (Spent.TRAIN, Spent.SAVE) or without_guard:
            continue
        to_go_on = one.kind is Spent.REDO or (one.kind is Spent.RESTART and begins)
        whose = (before.get(newest, 0) if to_go_on and newest in moved else newest) if newest is not None else 0
        of = found.setdefault(whose, {})
        of[one.kind] = of.get(one.kind, 0.0) + one.seconds
    return found


def _by_count(those: Iterable[RunIncident]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for one in those:
        for node in one.nodes:
            counts[node] = counts.get(node, 0) + 1
    return tuple(sorted(counts, key=lambda node: (-counts[node], node)))
