"""The interruptions of a run: why each attempt ended, where, what proves it, what was done about it, and the time that it cost.

They are made of the ledger and the account of time, so they add up: every second that is neither trained, saved nor the first
wait and start belongs to one of them.

    detect            of the attempt that ended
    restart, queue,
    braked, held,
    unknown           until the next attempt begins
    restart           of the next attempt, until its first step; of one that never made a step, all of its time is its own
    redo              of any later attempt: the steps that this end has undone (``steps_again``), however many attempts it
                      takes to make them again

One rule says what an interruption costs (``RunIncident.lost``): its detection, its restarts, the steps made again, and after a
fault the queue too. All other time stands apart (``RunIncident.apart``): the queue after a planned end, which would have come
anyway, and time in which the run was held, or of which nothing is known.

A hang that is not over yet is an incident too (``goes_on``).

Pure: values in, values out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import NamedTuple

from ftsupervise.model import Attempt, Cause, CauseKind, FailureKind
from ftsupervise.report.account import Spent, TimeAccount

_UNRECORDED = frozenset((CauseKind.LOST, CauseKind.UNKNOWN))
_LOST = frozenset((Spent.DETECT, Spent.RESTART, Spent.REDO))
_AT = re.compile(r"rank \S+ on (\S+)")  # the rank that is furthest behind, as ``progress.json`` names it
STALL = 300.0  # seconds without progress in a running attempt that are worth a word
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
    """The end of an attempt that was not the end of the run, or a hang that goes on."""

    attempt: int
    at: datetime  # the end; of one without an end on record, when it was last heard of; of one that goes on, its last progress
    kind: str  # a class: "node failure", "hang", "time limit" …
    planned: bool  # it left in order, or a person or Slurm asked for it: no fault
    job_id: str = ""
    cause: str = ""  # in words
    ranks: str = ""  # as Slurm writes them: "5", "0-2,7"
    nodes: tuple[str, ...] = ()  # where it happened; () if that is not known
    blames: bool = False  # it speaks against them: a program's own error or a full disk does not
    step: int | None = None  # the last one before it
    evidence: str = ""  # the line of the output that says most, or what the hardware said
    done: str = ""  # what was done about it: "restarted in place"
    steps_lost: int | None = None  # made, and made again later; None: not known
    spent: tuple[tuple[Spent, float], ...] = ()  # seconds by kind
    goes_on: bool = False  # its job runs, and no rank has made a step since

    @property
    def costs(self) -> tuple[tuple[Spent, float], ...]:
        """The seconds that count as its cost, by kind."""
        return tuple(pair for pair in self.spent if self._is_cost(pair[0]))

    @property
    def apart(self) -> tuple[tuple[Spent, float], ...]:
        """The other seconds until there was progress again, by kind; they are costs of their own."""
        return tuple(pair for pair in self.spent if not self._is_cost(pair[0]))

    @property
    def lost(self) -> float:
        """Seconds that it cost."""
        return sum(seconds for _, seconds in self.costs)

    @property
    def whole(self) -> float:
        """Seconds from the last progress until there was progress again, whatever they were."""
        return sum(seconds for _, seconds in self.spent)

    def _is_cost(self, kind: Spent) -> bool:
        return kind in _LOST or (kind is Spent.QUEUE and not self.planned)


class AlikeIncidents(NamedTuple):
    """Neighbours that ended in the same way at the same step: a report shows them as one, the newest with the sums of all."""

    first: RunIncident
    newest: RunIncident
    times: int


class CauseCost(NamedTuple):
    """All incidents of one kind."""

    kind: str
    planned: bool
    times: int
    seconds: float  # lost
    nodes: tuple[str, ...]  # the most frequent first


def incidents(
    attempts: Sequence[Attempt],
    account: TimeAccount,
    *,
    running: bool = False,
    hung: bool = False,
    behind: str = "",
    then: str = "",
) -> tuple[RunIncident, ...]:
    """The interruptions of a run, oldest first: each attempt that has ended, but for the one that finished it. ``running``: the
    last attempt still runs, whatever can be read of it (``detail.runs_now``). ``hung``: it hangs now, by the verdict of
    ``status``; that is the last incident. ``behind``: the rank that is furthest behind, in words. ``then``: what is to be said
    of the last one besides (``no_job_waits``)."""
    costs = spent_by_attempt(attempts, account)
    found = []
    for index, one in enumerate(attempts):
        runs = running and index == len(attempts) - 1 and one.ended is None
        if runs and hung and (stood := standing(attempts, account)) > 0:
            found.append(_hang(one, account, stood, behind))
        if runs or one.cause is None or one.cause.kind is CauseKind.FINISHED:
            continue
        after = attempts[index + 1 : index + 2]
        stepped = next((two for two in attempts[index + 1 :] if two.first_step is not None), None)
        made = _incident(one, after[0] if after else None, stepped, costs.get(one.number, {}))
        found.append(made if after or not then else made._replace(done="; ".join(filter(None, (made.done, then)))))
    return tuple(found)


def no_job_waits(verdict: str, run: str) -> str:
    """Return what is to be said of the last end of a run that is gone, by the verdict of ``status``: its supervisor did not
    know whether a job waits. ``run``: the directory, as a shell takes it."""
    return f"no job waits to go on: ftsupervise launch {run}" if verdict == "GONE" else ""


def steps_again(attempts: Sequence[Attempt]) -> dict[int, dict[int, int]]:
    """Attempt -> the steps that it made again, by the attempt whose end had undone them: the last one before the run went
    back, which may be several attempts ago."""
    undone: list[tuple[int, int, int]] = []  # first and last step, and whose end undid them; the highest first
    found: dict[int, dict[int, int]] = {}
    top, whose = 0, 0  # the last step that stands, and who made it
    for one in attempts:
        if one.first_step is None or one.last_step is None:
            continue
        if whose and one.first_step <= top:
            undone.append((one.first_step, top, whose))
        top, whose = one.last_step, one.number
        while undone and undone[-1][0] <= top:
            low, high, owner = undone.pop()
            again = min(high, top) - max(low, one.first_step) + 1
            if again > 0:
                of = found.setdefault(one.number, {})
                of[owner] = of.get(owner, 0) + again
            if high > top:
                undone.append((top + 1, high, owner))
    return found


def standing(attempts: Sequence[Attempt], account: TimeAccount) -> float:
    """Seconds for which the attempt that runs has made no progress; 0 where none runs."""
    last = attempts[-1] if attempts else None
    if last is None or last.ended is not None:
        return 0.0
    return sum(one.seconds for one in account.stretches if one.attempt == last.number and one.kind is Spent.DETECT)


def _hang(one: Attempt, account: TimeAccount, stood: float, behind: str) -> RunIncident:
    return RunIncident(
        attempt=one.number,
        at=account.until - timedelta(seconds=stood),
        kind=_OF_A_FAILURE[FailureKind.HANG],
        planned=False,
        job_id=one.job_id,
        nodes=tuple(found[1] for found in (_AT.fullmatch(behind),) if found is not None),
        blames=True,
        cause=f"no rank has made a step since{f'; furthest behind: {behind}' if behind else ''}",
        step=one.last_step,
        done="it still goes on",
        spent=((Spent.DETECT, stood),),
        goes_on=True,
    )


def alike(found: Iterable[RunIncident]) -> tuple[AlikeIncidents, ...]:
    """Return them with neighbours that are alike as one, oldest first."""
    groups: list[AlikeIncidents] = []
    for one in found:
        last = groups[-1] if groups else None
        if last is None or one.goes_on or _way(one) != _way(last.newest):
            groups.append(AlikeIncidents(one, one, 1))
            continue
        spent: dict[Spent, float] = {}
        for kind, seconds in (*last.newest.spent, *one.spent):
            spent[kind] = spent.get(kind, 0.0) + seconds
        lost = [steps for steps in (last.newest.steps_lost, one.steps_lost) if steps is not None]
        together = one._replace(spent=tuple(spent.items()), steps_lost=sum(lost) if lost else None)
        groups[-1] = AlikeIncidents(last.first, together, last.times + 1)
    return tuple(groups)


def _way(one: RunIncident) -> tuple[object, ...]:
    return one.kind, one.planned, one.job_id, one.cause, one.ranks, one.nodes, one.step, one.evidence


def costs_of(found: Iterable[RunIncident]) -> tuple[CauseCost, ...]:
    """The kinds of incidents, the costliest first."""
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
    if one.cause.kind is CauseKind.CANCELLED and one.cause.text:  # who did it is known
        return "cancelled"
    return "left in order" if one.cause.kind is CauseKind.EXIT and not one.cause.code else one.cause.kind.value


def _incident(one: Attempt, after: Attempt | None, stepped: Attempt | None, costs: dict[Spent, float]) -> RunIncident:
    """``stepped``: the next attempt that made a step."""
    cause = one.cause or Cause(CauseKind.UNKNOWN)
    where = cause.first
    nodes = dict.fromkeys(place.node for place in where.at if place.node)
    ranks = ",".join(place.ranks for place in where.at if place.ranks)
    return RunIncident(
        attempt=one.number,
        at=one.ended or one.heard or one.started,
        kind=kind_of(one),
        planned=one.was_asked,
        job_id=one.job_id,
        cause=_with_its_loss(one, cause.words()),
        ranks=f"{ranks} and {where.more} more" if ranks and where.more else ranks,
        nodes=tuple(nodes) or (one.nodes if len(one.nodes) == 1 else ()),
        blames=_blames(one, cause),
        step=one.last_step,
        evidence=one.hardware or one.line or one.note,
        done=_done(one, after),
        steps_lost=_steps_lost(one, stepped),
        spent=tuple((kind, costs[kind]) for kind in Spent if costs.get(kind)),
    )


def _with_its_loss(one: Attempt, words: str) -> str:
    """Return the words of a cause with what was wrong with the loss, where that is not the cause by itself."""
    if one.trouble is None or one.trouble.kind in words:
        return words
    return f"{words}; {one.trouble.kind}: {one.trouble.words}"


def _blames(one: Attempt, cause: Cause) -> bool:
    if one.failure is None:
        return False
    from ftsupervise.nodes.selector import speaks_of  # where there was a failure

    return bool(one.hardware) or one.failure.kind is FailureKind.NODE or bool(speaks_of(one.failure, cause.first))


def _done(one: Attempt, after: Attempt | None) -> str:
    stopped = "stopped by the brake" if one.braked and not one.then else ""  # else ``then`` says it, with the reason
    went_on = ""
    if not one.then and after is not None:
        same = bool(one.job_id) and one.job_id == after.job_id
        where = "the same job" if same else f"job {after.job_id or '-'}"
        went_on = f"attempt {after.number} began in {where}"
    return "; ".join(dict.fromkeys(filter(None, (one.then or went_on, stopped))))


def _steps_lost(one: Attempt, after: Attempt | None) -> int | None:
    if after is None or one.last_step is None or after.first_step is None:
        return None
    return max(0, one.last_step - after.first_step + 1)


def spent_by_attempt(attempts: Sequence[Attempt], account: TimeAccount) -> dict[int, dict[Spent, float]]:
    """Attempt number -> seconds that its end cost, by kind; 0: the first wait and the first start. What was trained or saved,
    or may have been, is left out."""
    moved = {one.number for one in attempts if one.first_step is not None}
    again = steps_again(attempts)
    before = {later.number: earlier.number for earlier, later in pairwise(attempts)}
    found: dict[int, dict[Spent, float]] = {}
    newest: int | None = None  # the attempt that runs, or has ended last, at this stretch
    for one in account.stretches:
        begins = one.attempt is not None and one.attempt != newest
        newest = newest if one.attempt is None else one.attempt
        without_guard = one.attempt is not None and one.kind is Spent.UNKNOWN  # it may have been training
        if one.kind in (Spent.TRAIN, Spent.SAVE) or without_guard:
            continue
        if one.kind is Spent.REDO and (owners := again.get(newest or 0)):
            shares = {owner: steps / sum(owners.values()) for owner, steps in owners.items()}
        else:
            to_go_on = one.kind is Spent.REDO or (one.kind is Spent.RESTART and begins)
            whose = (before.get(newest, 0) if to_go_on and newest in moved else newest) if newest is not None else 0
            shares = {whose: 1.0}
        for whose, share in shares.items():
            of = found.setdefault(whose, {})
            of[one.kind] = of.get(one.kind, 0.0) + share * one.seconds
    return found


def _by_count(those: Iterable[RunIncident]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for one in those:
        for node in one.nodes:
            counts[node] = counts.get(node, 0) + 1
    return tuple(sorted(counts, key=lambda node: (-counts[node], node)))
