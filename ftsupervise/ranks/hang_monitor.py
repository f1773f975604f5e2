"""Monitor a running attempt, and when it hangs record the evidence before its processes are ended.

    attempts/NNNN/evidence/hang.txt      the hung ranks, since when, and the state of every rank
    attempts/NNNN/evidence/rank-N.txt    the ranks from outside and from inside (ranks/evidence.py)

The evidence has a bound. It may find the outlier where the rank states could not: all sleep at the same step, and one of
them not where the others wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host.in_time import OneAtATime
from ftsupervise.host.ownership import make_folder
from ftsupervise.model import Cause, CauseKind, NodeRanks, Standstill
from ftsupervise.ranks.evidence import EvidenceHeader
from ftsupervise.ranks.hang_detector import CLOSER, JITTER, Detector, HangLimits, HangState, HangVerdict
from ftsupervise.ranks.taking import Ask, take_evidence, with_processes
from ftsupervise.rundir.paths import write_whole
from ftsupervise.truth import RankState

_WRITE = 2.0  # seconds for one page of it
_RANKS = 64  # ranks whose evidence is recorded: the outliers first
_COST, _CLOSER_COST = 10.0, 4.0  # share of time that checks may take; and when it may be a hang
_NAMED = 4  # ranks
_OLD = 6.0  # seconds: the others know the state of this attempt from a page that may be that old
_FAR = 30.0  # most seconds between two checks, in case we were suspended within one

RankStates = Callable[[], Sequence[RankState]]


class SeenFromOutside(NamedTuple):
    """The knowledge that others have of this attempt, who see more than its own ranks: the other replica groups of the run."""

    waits: bool = False  # for other groups: its standstill is no hang
    hangs: bool = False  # the others wait for it, or go on without it
    moved: bool = False  # the lighthouse is at another address than its ranks were started with: they find it no more


class HangMonitor:
    """The hang monitor of one attempt. ``due`` is the time of its next check."""

    def __init__(
        self,
        detector: Detector,
        states: RankStates,
        ask: Ask,
        folder: Path,
        outside: Callable[[], SeenFromOutside] = SeenFromOutside,
        nodes: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """``nodes``: those that can be asked for the ranks of a command without the guard."""
        self.due = time.monotonic()
        self.hangs_at: float | None = None  # monotonic: the standstill is a hang then; None: not known, or never
        self._last = HangVerdict(HangState.FINE)  # while a rank reported
        self._accused: tuple[float, int | None] | None = (
            None  # since when the others say that it hangs, and its step then
        )
        self._planned: float | None = None  # when the first of the checks was due that were left out
        self._detector, self._states, self._ask, self._outside = detector, states, ask, outside
        self._nodes, self._attempt, self._folder = nodes, folder, folder / "evidence"
        self._turn = OneAtATime[None]()

    def alarm(self) -> HangVerdict | None:
        """Return the hang, if there is one, after its evidence was written. Costs nothing before the check is due."""
        now = time.monotonic()
        if now < self.due:
            return None
        self.hangs_at = None
        outside = self._outside()
        if outside.moved:
            return HangVerdict(HangState.HUNG, moved=True)
        if outside.waits:  # that time counts as time in which we did not look
            self._planned = self.due if self._planned is None else self._planned
            self.due = now + self._detector.limits.period
            return None
        planned, self._planned = self.due if self._planned is None else self._planned, None
        verdict = self._detector.look(now, self._states(), planned)
        if verdict.phase:
            self._last = verdict
        self.hangs_at = None if verdict.left is None else now + verdict.left
        if self._is_hung_for_others(outside, verdict, now):  # where no rank reports any more, the last reports count
            last = verdict if verdict.phase else self._last
            waited = max(last.waited, now - last.since) if last.since else 0.0
            verdict = last._replace(health=HangState.HUNG, how=last.how or Standstill.IDLE, waited=waited)
        took = time.monotonic() - now
        fine = verdict.health is HangState.FINE
        period = self._detector.limits.period
        period = period if fine else min(period, CLOSER)
        self.due = now + min(_FAR, max(period, (_COST if fine else _CLOSER_COST) * took))
        return self._capture_evidence(verdict) if verdict.health is HangState.HUNG else None

    def is_over(self, verdict: HangVerdict) -> bool:
        """Return whether the run has gone on since ``verdict``, which was left alone. Costs nothing before the check is due."""
        now = time.monotonic()
        if now < self.due:
            return False
        over = self._progressed(verdict)
        self.due = now + self._detector.limits.period
        return over

    def has_moved(self) -> bool:
        """Return whether its ranks can find the lighthouse no more, as ``alarm`` will say. Never before the check is due."""
        return time.monotonic() >= self.due and self._outside().moved

    def _is_hung_for_others(self, outside: SeenFromOutside, verdict: HangVerdict, now: float) -> bool:
        """Believe the others at once of ranks that report nothing. Ranks that report have made a step since, or are hung if the
        others still say so when they have seen a newer page."""
        if not outside.hangs:
            self._accused = None
            return False
        if self._accused is None or self._accused[1] != verdict.step:
            self._accused = now, verdict.step
        return not verdict.phase or verdict.waited >= _OLD or now - self._accused[0] >= _OLD

    def _capture_evidence(self, verdict: HangVerdict) -> HangVerdict | None:
        """Write the evidence and find the outliers. None when the run went on meanwhile. Bounded; raises nothing."""
        before = with_processes(self._ask, self._states(), self._attempt, self._nodes())
        outlying = {one.rank for one in verdict.outliers}
        headers = self._collect(sorted(before, key=lambda one: one.rank not in outlying)[:_RANKS])
        if self._progressed(verdict):
            return None
        if not verdict.outliers:
            ranks = outliers(headers)
            verdict = verdict._replace(outliers=tuple(one for one in before if one.rank in ranks))
        self._write("hang.txt", describe(verdict, before, headers))
        self._detector.past.remember(verdict)
        return verdict

    def _collect(self, ranks: Sequence[RankState]) -> tuple[EvidenceHeader, ...]:
        """Have the pages of these ranks written, all at once, and write those that their nodes could not."""
        taken = take_evidence(self._ask, ranks, self._folder)
        for name, text in taken.unwritten.items():
            self._write(name, text)
        return taken.headers

    def _write(self, name: str, text: str) -> None:
        def write() -> None:
            make_folder(self._folder)
            write_whole(self._folder / name, text)

        try:
            self._turn(write, _WRITE)  # the ranks may hang because this place does
        except OSError:  # the disk is full, or cannot be reached: the ranks wait for us
            pass

    def _progressed(self, verdict: HangVerdict) -> bool:
        states, now = self._states(), time.monotonic()
        again = self._detector.look(now, states, now)
        if not again.phase and again.step is None:  # no rank reports; a step that was read from an output has no phase
            return False
        if verdict.how is Standstill.STOPPED:
            still = {one.rank for one in states if one.state in ("T", "t")}
            if not still & {one.rank for one in verdict.outliers}:  # the rank was continued
                return True
        return again.since > verdict.since + JITTER or again.step != verdict.step


def report_interval(limits: HangLimits | None) -> float:
    """Return the seconds between two reports of a node: one, and less where hangs are to be found sooner."""
    return 1.0 if limits is None else min(1.0, limits.floor / 10)


def outliers(headers: Sequence[EvidenceHeader]) -> frozenset[int]:
    """Return ranks in another place than the others: those not waiting among some that wait, else the smaller group."""
    waiting = [one for one in headers if one.waits]
    free = [one for one in headers if not one.waits]
    if waiting and free and len(free) <= len(waiting):
        return frozenset(one.rank for one in free)
    groups: dict[object, list[int]] = {}
    for one in headers:
        groups.setdefault((one.state, one.syscall, one.at), []).append(one.rank)
    most = max(groups.values(), key=len, default=[])
    return (
        frozenset(one.rank for one in headers if one.rank not in most) if 2 * len(most) > len(headers) else frozenset()
    )


def cause_of(verdict: HangVerdict) -> Cause:
    """Return the cause for the ledger: rank 2 on node-1 is stopped; no progress for 9.1 s at step 30 (train)."""
    if verdict.moved:
        return Cause(CauseKind.MOVED)
    return Cause(
        CauseKind.HANG,
        at=tuple(NodeRanks(one.node, str(one.rank)) for one in verdict.outliers[:_NAMED]),
        more=max(0, len(verdict.outliers) - _NAMED),
        how=verdict.how,
        phase=verdict.phase,
        step=verdict.step,
        waited=verdict.waited,
    )


def describe(verdict: HangVerdict, states: Sequence[RankState], headers: Sequence[EvidenceHeader]) -> str:
    """Return the page for people."""
    now, outlying = time.monotonic(), {one.rank for one in verdict.outliers}
    since = datetime.fromtimestamp(time.time() - (now - verdict.since), timezone.utc)
    at = {one.rank: one for one in headers}
    sure, how = " (sure)" if verdict.sure else "", verdict.how.value if verdict.how is not None else ""
    lines = [
        cause_of(verdict).words(),
        f"since {since:%Y-%m-%d %H:%M:%S} UTC; bound {verdict.bound:.1f} s; how we know: {how}{sure}",
        "",
        "   rank  node  step  phase  last step  last sign  state  CPU s  where",
    ]
    for one in states[:10_000]:
        seen = at.get(one.rank)
        place = f"{seen.at or '?'}{', waits for others' if seen.waits else ''}" if seen else ""
        lines.append(
            f"{'->' if one.rank in outlying else '  '} {one.rank}  {one.node}  {one.step}  {one.phase}  "
            f"{now - one.stepped:.1f} s ago  {now - one.beaten:.1f} s ago  {one.state or '?'}  "
            f"{'?' if one.cpu is None else f'{one.cpu:.1f}'}  {place}".rstrip()
        )
    return "\n".join(lines) + "\n"
