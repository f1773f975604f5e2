"""Compares a verdict with what was before: the same failure in earlier attempts, the same nodes in other failures and in other
runs; and says of the next start whether it is any use, and why. Pure.

The supervisor has decided already, by the ledger alone. What is said here gives its decision a reason and never takes it back:
where it has stopped, the advice is to stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import NamedTuple

from ftsupervise.diagnosis.verdict import Confidence, Diagnosis
from ftsupervise.diagnosis.vocabulary import FailureClass
from ftsupervise.model import Attempt
from ftsupervise.nodes.incidents import Incident
from ftsupervise.rundir.attempt_pages import VerdictPage
from ftsupervise.rundir.switches import Brake
from ftsupervise.units import count

_LAST = 5  # failures that are looked at for a node that is named again
_LATELY = timedelta(days=14)  # incidents of other runs
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_OF_THE_MACHINES = frozenset(
    {
        *(FailureClass.HARDWARE, FailureClass.NODE, FailureClass.NETWORK, FailureClass.STORAGE, FailureClass.SLURM),
        *(FailureClass.STUCK_IN_IO, FailureClass.STOPPED, FailureClass.STRAGGLER),
    }
)
# An error of the program blames no node, as in the list of the nodes (nodes/judging.py).
_OF_THE_PROGRAM = frozenset(
    {
        *(FailureClass.USER_CODE, FailureClass.MISMATCH, FailureClass.NUMBERS, FailureClass.START),
        *(FailureClass.GPU_MEMORY, FailureClass.DAMAGED),
    }
)
_OF_A_LIMIT = frozenset({FailureClass.DISK, FailureClass.HOST_MEMORY, FailureClass.GPU_MEMORY})


class NextMove(str, Enum):
    """The advice about the next start."""

    RESTART = "restart"  # the next start may well go on
    MEND = "mend it"  # it is started again all the same, and will end so again
    STOP = "stop"  # nothing is started until a person has mended it


class NodeNamed(NamedTuple):
    """A node that several of the last failures name."""

    node: str
    times: int
    of: int  # failures


class NodeElsewhere(NamedTuple):
    """A node that has incidents of other runs. ``newest``: of these."""

    node: str
    times: int
    newest: Incident


class Comparison(NamedTuple):
    """``before``: the earlier attempts that failed in the same way, oldest first. ``move`` None: nothing is to be started."""

    before: tuple[int, ...] = ()
    nodes: tuple[NodeNamed, ...] = ()
    elsewhere: tuple[NodeElsewhere, ...] = ()
    move: NextMove | None = None
    why: str = ""

    def sentences(self) -> tuple[str, ...]:
        """Return what was before, for people."""
        found = []
        if self.before:
            attempts = f"attempt{'s' if len(self.before) > 1 else ''} {', '.join(map(str, self.before[-10:]))}"
            found.append(f"the {ordinal(len(self.before) + 1)} of this kind in this run (before: {attempts})")
        found += [f"{one.node} is named in {one.times} of the last {one.of} failures" for one in self.nodes]
        for one in self.elsewhere:
            run = f" of {one.newest.run}" if one.newest.run else ""
            newest = f"the newest {one.newest.at:%Y-%m-%d}, {one.newest.kind}{run}"
            found.append(f"{one.node} has {count(one.times, 'incident')} of other runs in two weeks, {newest}")
        return tuple(found)

    def advice(self) -> str:
        """Return restart or stop, and why; "" where nothing is to be started."""
        return "" if self.move is None else f"{self.move.value}: {self.why}"


def ordinal(number: int) -> str:
    """Return "third", "21st"."""
    if 0 < number <= len(_ORDINALS):
        return _ORDINALS[number - 1]
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def compare(
    found: Diagnosis,
    one: Attempt,
    attempts: Sequence[Attempt],
    pages: Mapping[int, VerdictPage],
    incidents: Sequence[Incident] = (),
    run: str = "",
    brake: Brake | None = None,
) -> Comparison:
    """Compare ``found``, the verdict about ``one``, with the ``attempts`` before it, their ``pages`` as far as they are kept,
    and the ``incidents`` of the nodes, those of other runs than ``run`` alone. ``brake``: that of the run, where it is on."""
    if not one.has_failed:
        return Comparison()
    earlier = [other for other in attempts if other.number < one.number and other.has_failed]
    before = tuple(other.number for other in earlier if _is_same(found, one, other, pages.get(other.number)))
    nodes = () if found.kind in _OF_THE_PROGRAM else found.nodes
    return Comparison(
        before,
        tuple(_named_again(nodes, earlier[1 - _LAST :], pages)),
        tuple(_elsewhere(nodes, incidents, run, one.ended or one.started)),
        *_next_move(found, one, len(before), brake),
    )


def _is_same(found: Diagnosis, one: Attempt, other: Attempt, page: VerdictPage | None) -> bool:
    """Return whether both failed in the same way: at the same place in the program where both verdicts know it, else by the
    rule of the brake."""
    if page is not None and page.is_known and page.place and found.place:
        return page.kind == found.kind.value and page.place == found.place
    return one.failure is not None and other.failure is not None and one.failure.same(other.failure)


def _named_again(named: Sequence[str], earlier: Sequence[Attempt], pages: Mapping[int, VerdictPage]) -> list[NodeNamed]:
    of = [set(named), *(_nodes_of(one, pages.get(one.number)) for one in earlier)]
    times = ((node, sum(node in nodes for nodes in of)) for node in named)
    return [NodeNamed(node, number, len(of)) for node, number in times if number > 1 and _several_nodes(earlier)]


def _several_nodes(attempts: Sequence[Attempt]) -> bool:
    """Return whether there was a choice: of a run on one node each failure names it."""
    return any(len(one.nodes) > 1 for one in attempts)


def _nodes_of(one: Attempt, page: VerdictPage | None) -> set[str]:
    if page is not None and page.nodes:
        return set(page.nodes)
    return {place.node for place in one.cause.first.at if place.node} if one.cause is not None else set()


def _elsewhere(nodes: Sequence[str], incidents: Sequence[Incident], run: str, at: datetime) -> list[NodeElsewhere]:
    found = []
    for node in nodes:
        of = [
            one for one in incidents if one.node == node and one.run and one.run != run and abs(at - one.at) < _LATELY
        ]
        if of:
            found.append(NodeElsewhere(node, len(of), max(of, key=lambda one: one.at)))
    return found


def _next_move(found: Diagnosis, one: Attempt, before: int, brake: Brake | None) -> tuple[NextMove, str]:
    if (
        brake is not None and brake.attempt == one.number and not one.braked
    ):  # by a member that began no attempt of its own
        return NextMove.STOP, brake.words()
    kind, again = found.kind, f"it failed in this way for the {ordinal(before + 1)} time"
    if one.braked:
        why = f"{again}, and another start will too" if before else "its supervisor has stopped the run"
        first = f"{brake.first()}; " if brake is not None and brake.attempt == one.number and brake.loads else ""
        return NextMove.STOP, f"{why}; {first}once that is mended: ftsupervise clear --brake"
    if kind in _OF_THE_MACHINES:
        return NextMove.RESTART, "the program did nothing wrong, and another start may have better nodes"
    if kind is FailureClass.UNKNOWN or found.confidence is Confidence.LOW:
        return NextMove.RESTART, "nothing that was read speaks against another start"
    if kind in _OF_A_LIMIT:
        meets = "the next start meets the same limit"
        return NextMove.MEND, f"{again}, and {meets}" if before else meets
    if before:
        return NextMove.MEND, f"{again}, and another start will too"
    return NextMove.RESTART, "once may be chance; a second time in the same way is not"
