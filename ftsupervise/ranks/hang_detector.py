"""Is the run hung? Pure: from rank states and the clock to fine, suspect or hung, with the ranks and the reason.

    progress   any rank makes a step, changes its phase, or says ``guard.beat()``
    bound      max(floor, 3 x the largest gap between two signs of progress seen in this phase), over all attempts
               of the job. Twice that while fewer than 100 gaps are known (30 visits), a generous default below 10.
    confirmed  the same ranks were checked repeatedly before the bound. One that is
                 stopped (T) all that time: sure, at max(floor / 2, 3 x the largest gap), known or not
                 gone while the others live, or traced (t): sure, at the bound
                 asleep (S or D), without CPU for 0.4 of the bound: at the bound
                 using CPU, runnable, or not to be seen: at three times the bound, six floors at least. It may compile,
                 or evaluate without reporting; a collective that spins looks the same
    only read  what was read from the output, without a word from the loop, hangs only where the processes stand still too

Silence of a rank is no evidence: only time in which all ranks *reported* no progress counts, and only time in which we
ourselves ran on time. An alarm at the place of the last one waits three times longer each time, so a run that is only slow
at that place (an unannounced evaluation) gets past it in the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ftsupervise.config.supervisor import default
from ftsupervise.model import Standstill
from ftsupervise.truth import RankState

START = "start"
FINISHED = "finished"
_LEAVING, _SILENT = "leaving", "silent"  # in place of a phase
_UNTOLD = ""  # of a command that tells nothing: each sign of life is progress

_KNOWN_GAPS, _KNOWN_VISITS = 10, 3  # a phase is known after so many gaps, or so many ends
_FACTOR = 3.0  # times the longest gap of a phase is a hang; where steps differ more, a person raises ``at_least``
_SURE_GAPS, _SURE_VISITS = 100, 30  # the factor is used unchanged after so many gaps
_FIRST_GAPS = 3  # first gaps of a phase in each attempt, while caches are cold
_SLOWER = 6.0  # floors: the least for those, and for ranks that use CPU
_BUSY = 3.0  # times the bound for ranks that use CPU
_REPORTED_WITHIN = 10.0  # seconds without a report after which a rank counts as silent
_IDLE = 0.05  # share of a core below which a process counts as idle
JITTER = 0.05  # seconds of jitter in the times of another node
_AGAIN = 3.0  # times the bound at the place of the last alarm
_STOPPED = 0.5  # of the floor: a stopped rank continues only after a SIGCONT
_REST = 0.4  # of the bound without CPU: a rank that was busy until just now gets more time
CLOSER = 0.2  # seconds between two checks when it may be a hang
_LEAD, _MOST_LEAD = 0.1, 1.0  # of the bound, and seconds: for the evidence, so that it is acted on within the bound
_WORD = 1.5  # seconds between two reports of a reachable node
_TAKES = 0.35  # seconds from a state to its report, and for the evidence: more than the rest of a short bound


class HangState(Enum):
    FINE = "fine"
    SUSPECT = "suspect"
    HUNG = "hung"


@dataclass(frozen=True)
class HangLimits:
    """Seconds."""

    floor: float = default("hang.floor")
    start: float = default("hang.start")  # up to the first step
    unknown: float = default("hang.unknown")  # for a phase with too few known gaps

    @property
    def period(self) -> float:
        """Seconds between two checks."""
        return min(0.5, max(0.02, self.floor / 20))


class HangVerdict(NamedTuple):
    """The result of a check. ``waited`` and ``bound`` in seconds; ``since`` is the monotonic time of the last progress."""

    health: HangState
    phase: str = ""
    step: int | None = None
    since: float = 0.0
    waited: float = 0.0
    bound: float = 0.0
    outliers: tuple[RankState, ...] = ()  # the ranks that differ from those that wait; () when none does
    how: Standstill | None = None
    sure: bool = False
    left: float | None = None  # seconds until it is hung, where nothing moves; None: it never is, as it is
    moved: bool = False  # no hang: the group's lighthouse is at another address, where it has to begin again


@dataclass
class PhaseStats:
    """The known gaps of one phase."""

    largest: float = 0.0  # seconds
    count: int = 0
    visits: int = 0  # how often it has ended

    @property
    def known(self) -> bool:
        return self.count >= _KNOWN_GAPS or self.visits >= _KNOWN_VISITS

    @property
    def sure(self) -> bool:
        return self.count >= _SURE_GAPS or self.visits >= _SURE_VISITS


@dataclass
class GapHistory:
    """The gaps of all attempts of this job, and its alarms."""

    phases: dict[str, PhaseStats] = field(default_factory=dict)
    alarm: tuple[str, int | None] | None = None  # phase and step of the last alarm that was not sure
    alarms: int = 0  # at that place, in a row

    def remember(self, verdict: HangVerdict) -> None:
        """Note that an attempt was ended for this verdict."""
        place = (verdict.phase, verdict.step)
        if not verdict.sure:
            self.alarms = self.alarms + 1 if self._at(*place) else 1
            self.alarm = place

    def times(self, phase: str, step: int | None) -> float:
        return float(_AGAIN**self.alarms) if self._at(phase, step) else 1.0

    def _at(self, phase: str, step: int | None) -> bool:
        if self.alarm is None or self.alarm[0] != phase:
            return False
        return self.alarm[1] == step or (None not in (step, self.alarm[1]) and abs(step - self.alarm[1]) <= 1)  # type: ignore[operator]


class _Mark(NamedTuple):
    """The state of a rank at the start of a window."""

    at: float
    cpu: float | None
    looks: int
    runnable: int  # checks at which it was


class _RunPace:
    """How the ranks of one attempt get on, as they report it: the last progress of any of them, and the gaps between two."""

    def __init__(self, limits: HangLimits, past: GapHistory) -> None:
        self.limits, self.past = limits, past
        self.seen_here: dict[str, int] = {}  # phase -> gaps seen in this attempt
        self.phase = ""
        self.step: int | None = None
        self.since = 0.0  # when any rank last made progress
        self.known_to = 0.0  # up to when all reporting ranks are known
        self.age = 0.0  # seconds without progress, as far as they are known and we ran
        self.late = 0.0  # seconds since the last progress in which we did not run
        self.active: tuple[RankState, ...] = ()  # ranks that report and are meant to make steps
        self.silent = 0
        self._counted_from: float | None = None  # the progress that the age is counted from: the clocks of nodes jitter

    def follow(self, now: float, states: Sequence[RankState], late: float) -> bool:
        """Take the reports of all ranks, ``late`` seconds after they were due; return False when no rank reports."""
        self.late += late
        progress, known_to, top = float("-inf"), now, None
        phases: dict[str, int] = {}
        active, silent = [], 0
        for one in states:
            progress = max(progress, one.stepped, one.beaten)
            if one.step is not None and (top is None or one.step > top):
                top = one.step
            phase = one.phase
            if now - one.seen > _REPORTED_WITHIN:
                silent += 1
                continue
            known_to = min(known_to, one.seen)
            if one.leaving or phase == FINISHED:
                phase = _LEAVING
            else:
                active.append(one)
            phases[phase] = phases.get(phase, 0) + 1
        if not phases:
            return False
        self.since, self.known_to, self.active, self.silent = progress, known_to, tuple(active), silent
        self._move_to(max(sorted(phases), key=lambda name: (self.bound(name, top), -phases[name])), top)
        return True

    def _move_to(self, phase: str, step: int | None) -> None:
        """Note whether there was progress since the last check, and how long it took."""
        before = self._counted_from
        moved = before is None or self.since > before + JITTER or step != self.step
        if before is not None and moved:
            self._learn(self.since - before - self.late, _steps(self.step, step), phase != self.phase)
        if moved:
            self._counted_from, self.late = self.since, 0.0
        self.phase, self.step = phase, step
        self.age = max(0.0, self.known_to - (self._counted_from or 0.0) - self.late)

    def _learn(self, seconds: float, steps: int, left: bool) -> None:
        """Record the end of a gap. Several steps between two checks give two gaps: the age at the last check, and the mean."""
        gap = seconds if steps <= 1 else max(self.age, seconds / steps)
        gaps = self.past.phases.setdefault(self.phase, PhaseStats())
        gaps.largest = max(gaps.largest, gap)
        gaps.count += max(1, steps)
        gaps.visits += left
        self.seen_here[self.phase] = self.seen_here.get(self.phase, 0) + max(1, steps)

    def bound(self, phase: str, step: int | None) -> float:
        """Return the seconds without progress at which this place hangs."""
        limits = self.limits
        again = self.past.times(phase, step)
        if phase == START:
            return limits.start * again
        gaps = self.past.phases.get(phase)
        if gaps is None or not gaps.known or phase in (_LEAVING, _SILENT, _UNTOLD):
            return max(limits.unknown, _FACTOR * gaps.largest if gaps else 0.0) * again
        bound = max(limits.floor, _FACTOR * gaps.largest * (1 if gaps.sure else 2))
        if self.seen_here.get(phase, 0) < _FIRST_GAPS:
            bound = max(bound, _SLOWER * limits.floor)
        return bound * again


class Detector:
    """One attempt's. ``look`` is to be called once a ``limits.period``."""

    def __init__(self, limits: HangLimits, past: GapHistory) -> None:
        self.limits, self.past, self.pace = limits, past, _RunPace(limits, past)
        self._looked: float | None = None
        self._stopped: dict[int, float] = {}  # rank -> since when it is in state T, without a break
        self._before: Sequence[RankState] = ()  # all of them at the last check
        self._marks: dict[int, _Mark] = {}
        self._busy: dict[int, float] | None = None  # rank -> when it last used CPU; None before the first whole window

    def look(self, now: float, states: Sequence[RankState], due: float | None = None) -> HangVerdict:
        """Judge the run at monotonic ``now``; ``due``: when this check was planned (a period after the last)."""
        if due is None:
            due = now if self._looked is None else self._looked + self.limits.period
        self._looked = now
        pace = self.pace
        if not pace.follow(now, states, now - due if now - due > 2 * self.limits.period else 0.0):
            self._stopped, self._before = {}, ()
            return HangVerdict(HangState.FINE)
        self._note_stopped_ranks(pace.active)
        verdict = HangVerdict(HangState.FINE, pace.phase, pace.step, pace.since, pace.age)
        if self._stopped and not pace.silent:
            return self._judge_stopped(verdict)
        bound = pace.bound(pace.phase, pace.step)
        if pace.silent:
            bound = max(bound, self.limits.unknown)
        verdict = verdict._replace(bound=bound, left=bound - pace.age if pace.active else None)
        if pace.age < bound / 2 or not pace.active:
            self._marks, self._busy = {}, None
            return verdict
        self._watch(pace.active, min(5.0, bound / 4))
        return self._judge(verdict)

    # -------------------------------------------------------------------------------------------------- confirming

    def _note_stopped_ranks(self, active: Sequence[RankState]) -> None:
        """Remember since when each rank has been in state T. The start is the last report in which it was not stopped."""
        stopped = [one for one in active if one.state == "T"]
        if stopped:
            before = {one.rank: one.seen for one in self._before}
            since = {one.rank: max(before.get(one.rank, one.seen), one.seen - _WORD) for one in stopped}
            self._stopped = {rank: self._stopped.get(rank, at) for rank, at in since.items()}
        else:
            self._stopped = {}
        self._before = active

    def _watch(self, active: Iterable[RankState], window: float) -> None:
        """Note which ranks use CPU, over windows of some seconds."""
        whole = bool(self._marks)
        for one in active:
            mark = self._marks.get(one.rank)
            if mark is None:
                mark = _Mark(one.seen, one.cpu, 0, 0)
            elif one.seen > mark.at:
                mark = mark._replace(looks=mark.looks + 1, runnable=mark.runnable + (one.state == "R"))
            self._marks[one.rank] = mark
            whole = whole and mark.looks >= 2 and one.seen - mark.at >= window
        if whole:
            busy = {one.rank: one.seen for one in active if _does_something(one, self._marks[one.rank])}
            self._busy = {**(self._busy or {}), **busy}
            self._marks = {}
            self._watch(active, window)

    def _judge_stopped(self, so_far: HangVerdict) -> HangVerdict:
        """A stopped rank makes no progress in any phase, but it may be continued shortly."""
        pace = self.pace
        gaps = self.past.phases.get(pace.phase, PhaseStats())
        bound = max(_STOPPED * self.limits.floor, _FACTOR * gaps.largest)
        stood = min(pace.age, max(0.0, pace.known_to - min(self._stopped.values()) - pace.late))
        stopped = tuple(one for one in pace.active if one.rank in self._stopped)
        enough = min(_begin(bound), bound - _TAKES * min(1.0, bound))
        return so_far._replace(
            health=HangState.HUNG if stood >= enough else HangState.SUSPECT,
            bound=bound,
            outliers=stopped,
            how=Standstill.STOPPED,
            sure=True,
            left=bound - stood,
        )

    def _judge(self, so_far: HangVerdict) -> HangVerdict:
        verdict = so_far._replace(health=HangState.SUSPECT)
        active = self.pace.active
        behind = _behind(active)
        stopped = tuple(one for one in active if one.state in ("T", "t"))  # (T: when some do not report)
        gone = tuple(one for one in active if one.state in ("X", "Z"))
        if stopped or gone:
            how = Standstill.STOPPED if stopped else Standstill.GONE
            verdict = verdict._replace(outliers=stopped or gone, how=how, sure=True)
            return self._hung_after(verdict, so_far.bound)
        if self._busy is None:
            return verdict
        suspects = behind or active
        rested = {rank for rank, at in self._busy.items() if self.pace.known_to - at >= _REST * so_far.bound}
        at_work = tuple(one for one in suspects if one.rank in self._busy and one.rank not in rested)
        if at_work:
            few = at_work if 2 * len(at_work) <= len(active) else ()
            verdict = verdict._replace(outliers=behind or few, how=Standstill.BUSY)
            if any(one.read for one in active):
                return verdict._replace(left=None)
            least = _SLOWER * self.limits.floor
            return self._hung_after(verdict, max(least, _BUSY * so_far.bound))
        return self._hung_after(
            verdict._replace(outliers=behind or _different(active), how=Standstill.IDLE), so_far.bound
        )

    def _hung_after(self, verdict: HangVerdict, bound: float) -> HangVerdict:
        hung = verdict.waited >= _begin(bound)
        return verdict._replace(
            health=HangState.HUNG if hung else HangState.SUSPECT, bound=bound, left=bound - verdict.waited
        )


def _begin(bound: float) -> float:
    """Return when to gather the evidence, in seconds after the last progress."""
    return bound - min(_LEAD * bound, _MOST_LEAD)


def _steps(before: int | None, after: int | None) -> int:
    return max(0, after - before) if before is not None and after is not None else 0


def _does_something(one: RankState, mark: _Mark) -> bool:
    """Return whether a process is busy. One that could not be checked counts as busy: it is no reason to kill."""
    if one.cpu is None or mark.cpu is None or not one.state:
        return True
    return one.cpu - mark.cpu >= _IDLE * (one.seen - mark.at) or 2 * mark.runnable > mark.looks


def _behind(active: Sequence[RankState]) -> tuple[RankState, ...]:
    """Return the ranks that made fewer steps than the others; () when none did."""
    least = min(-1 if one.step is None else one.step for one in active)
    found = tuple(one for one in active if (-1 if one.step is None else one.step) == least)
    return found if len(found) < len(active) else ()


def _different(active: Sequence[RankState]) -> tuple[RankState, ...]:
    """Return the few ranks that are in another state (D) or phase than most; () when none is."""
    for traits in ([one.state == "D" for one in active], [one.phase for one in active]):
        common, count = Counter(traits).most_common(1)[0]
        if len(active) > count > len(active) / 2:
            return tuple(one for one, trait in zip(active, traits, strict=True) if trait != common)
    return ()
