"""Plays a strategy on a trace of faults, event by event: where does the time go?

Between two events nothing is stepped through: how many saves fit is a division. So a run costs by its faults, and not by its
length or its nodes. Every second belongs to exactly one kind (``TimeKind``), and they make up the whole time.

What it takes for granted: one job of all nodes; the loop saves every ``interval`` seconds of its own time, and not before the
last save is written; a fault ends the steps at once and is noticed later; a fault during a restart begins that anew; one that
comes before the first is noticed, or while no job of the run has nodes, is none.

Pure, and seeded: the same words give the same bits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from random import Random
from statistics import fmean, quantiles
from typing import NamedTuple

from ftsupervise.planning.certainty import half_width
from ftsupervise.planning.faults import Fault, Fleet, Lasting, faults
from ftsupervise.units import count

_NEVER = Fault(math.inf, 0)


class TimeKind(IntEnum):
    """Where a second goes; the names are those of the account of a run (``report.account.Spent``), and ``AWAY``."""

    TRAIN = 0
    SAVE = 1
    REDO = 2
    DETECT = 3
    RESTART = 4
    QUEUE = 5
    HELD = 6  # maintenance
    AWAY = 7  # the share of the replica groups that are away, while the others train


class Strategy(NamedTuple):
    """The means against faults. Seconds."""

    name: str
    interval: float  # of training between two saves
    save: float = 0.0  # the loop waits for a save so long
    flush: float = 0.0  # … and after that it lasts so long until the save counts (async)
    snapshot_every: float = 0.0  # of training between two snapshots in memory; 0: none
    snapshot: float = 0.0  # the loop waits for one so long
    copies: bool = True  # snapshots survive the loss of a node, by their copy on another one
    detect: float = 0.0  # until a fault is noticed
    hang: float = 600.0  # … and a silent one
    warm: Lasting | None = None  # from there to the first step, in the same job; None: each fault ends the job
    cold: Lasting = Lasting(300.0)  # from the begin of a job to its first step
    queue: Lasting = Lasting(0.0)  # between two jobs, where the first left in order
    requeue: Lasting | None = None  # … and where a fault ended it; None: as ``queue``
    spares: int = 0  # nodes of the job beyond those it needs
    repair: float = 86400.0  # until a lost node is back
    exclude_after: int = 0  # a lemon that failed so often is replaced by another node; 0: never
    limit: float = math.inf  # from the begin of a job to its last step before its time limit
    maintenance_every: float = 0.0  # 0: never
    maintenance: float = 0.0
    groups: int = 1  # replica groups: a fault stops one, and holds the others up for ``stall``
    least: int = 1  # groups with which it trains
    stall: float = 0.0
    away: float | None = None  # until the group is back; None: as long as a job would need for its restart


class SimulatedEvent(NamedTuple):
    """A line of a trace that a person can read."""

    at: float
    kind: TimeKind
    seconds: float
    why: str


class SimulatedRun(NamedTuple):
    """``spent``: seconds of each ``TimeKind``, in that order."""

    spent: tuple[float, ...]
    faults: int
    jobs: int

    @property
    def total(self) -> float:
        return math.fsum(self.spent)

    @property
    def ettr(self) -> float:
        return self.spent[TimeKind.TRAIN] / self.total


Note = Callable[[SimulatedEvent], None]


def play(
    strategy: Strategy, trace: Sequence[Fault], seconds: float, note: Note | None = None, luck: str = ""
) -> SimulatedRun:
    """Play one run. ``trace``: its faults, in the order of their times. ``note`` is told of each stretch. ``luck``: the seed of
    the waits and starts that no fault brings, those at a time limit or a maintenance."""
    kind = _ReplicasPlayed if strategy.groups > 1 else _WholePlayed
    job = kind(strategy, trace, seconds, note, luck)
    job.play()
    return SimulatedRun(tuple(job.clock.spent), job.faults, job.jobs)


class _Clock:
    """The time of a run, and what it was spent on. Nothing is spent beyond the end."""

    def __init__(self, end: float, note: Note | None) -> None:
        self.now, self.end = 0.0, end
        self.spent = [0.0] * len(TimeKind)
        self.note = note

    def spend(self, kind: TimeKind, seconds: float, why: str = "") -> None:
        seconds = min(seconds, self.end - self.now)
        if seconds <= 0:
            return
        if self.note is not None:
            self.note(SimulatedEvent(self.now, kind, seconds, why))
        self.spent[kind] += seconds
        self.now += seconds


class _Faults:
    """The faults of a trace that meet the job: those that a lemon would have had after it was excluded are left out."""

    def __init__(self, trace: Sequence[Fault], exclude_after: int) -> None:
        self._trace, self._at = trace, 0
        self._exclude_after = exclude_after
        self._seen: dict[int, int] = {}

    def after(self, now: float) -> Fault:
        """The next fault from ``now`` on; it stays the next one. The faults before it have met nobody."""
        trace = self._trace
        while self._at < len(trace):
            fault = trace[self._at]
            if fault.at >= now and not self._is_excluded(fault):
                return fault
            self._at += 1
        return _NEVER

    def skip(self) -> None:
        """The next one meets nobody."""
        self._at += 1

    def take(self, fault: Fault) -> None:
        """The next one has met the job."""
        self._at += 1
        if self._exclude_after and fault.width == 1:
            self._seen[fault.node] = self._seen.get(fault.node, 0) + 1

    def _is_excluded(self, fault: Fault) -> bool:
        return fault.lemon and 0 < self._exclude_after <= self._seen.get(fault.node, 0)


class _Played:
    """The jobs of a run, one after the other: time limits, waits, maintenance and spare nodes."""

    def __init__(
        self, strategy: Strategy, trace: Sequence[Fault], seconds: float, note: Note | None, luck: str
    ) -> None:
        self.how, self.clock = strategy, _Clock(seconds, note)
        self.coming = _Faults(trace, strategy.exclude_after)
        self.faults, self.jobs = 0, 1
        self.job_end = strategy.limit
        self.window = strategy.maintenance_every or math.inf
        self.free, self.back = strategy.spares, list[float]()  # spare nodes, and when others come back
        self._luck = luck
        self._chance: Random | None = None

    @property
    def stop(self) -> float:
        """The time at which the job has to leave; not before now."""
        return max(self.clock.now, min(self.job_end, self.window, self.clock.end))

    def takes_spares(self, width: int) -> bool:
        now = self.clock.now
        while self.back and self.back[0] <= now:
            heapq.heappop(self.back)
            self.free += 1
        if self.free < width:
            return False
        self.free -= width
        for _ in range(width):
            heapq.heappush(self.back, now + self.how.repair)
        return True

    def wait(self, seconds: float, why: str) -> None:
        """Wait for another job, which no maintenance lets start. Slurm gives it whole nodes, spare ones too."""
        clock, how = self.clock, self.how
        clock.spend(TimeKind.QUEUE, seconds, why)
        while self.window <= clock.now < clock.end:
            clock.spend(TimeKind.HELD, self.window + how.maintenance - clock.now, "maintenance")
            self.window += how.maintenance_every
        self.jobs += 1
        self.free, self.back = how.spares, []
        self.job_end = clock.now + how.limit

    def change_jobs(self) -> None:
        """Wait for the next job, after one that has left in order."""
        planned = self.window <= self.clock.now
        self.wait(0.0 if planned else self.how.queue.of(self._mark()), "the time limit of a job")

    def start(self) -> Fault | None:
        """Start in another job, until its first step or the fault that comes before."""
        clock, fault = self.clock, self.coming.after(self.clock.now)
        length = self.how.cold.of(self._mark())
        clock.spend(TimeKind.RESTART, min(length, fault.at - clock.now), "a new job starts")
        return fault if fault.at <= clock.now < clock.end else None

    def save_and_leave(self) -> Fault | None:
        """Save for the last time in a job, until that is written, or a fault comes before."""
        clock, fault = self.clock, self.coming.after(self.clock.now)
        length = self.how.save + self.how.flush
        clock.spend(TimeKind.SAVE, min(length, fault.at - clock.now), "the last save of a job")
        return fault if fault.at <= clock.now < clock.end else None

    def _mark(self) -> float:
        if self._chance is None:
            self._chance = Random(self._luck)
        return self._chance.random()


class _WholePlayed(_Played):
    """A job of all nodes: a fault stops all of it, and it goes on from what was saved."""

    def __init__(
        self, strategy: Strategy, trace: Sequence[Fault], seconds: float, note: Note | None, luck: str
    ) -> None:
        super().__init__(strategy, trace, seconds, note, luck)
        self.at = self.safe = self.top = 0.0  # seconds of training: reached, saved, and ever reached
        self.paid = strategy.snapshot / (strategy.snapshot_every + strategy.snapshot) if strategy.snapshot else 0.0
        self.interval = max(strategy.interval, strategy.flush)

    def play(self) -> None:
        clock = self.clock
        while clock.now < clock.end:
            fault, stop = self.coming.after(clock.now), self.stop
            if fault.at < stop:
                self._train(fault.at)
                self._recover(fault)
            else:
                self._train(stop)
                if stop < clock.end:
                    self._leave()

    def _train(self, until: float) -> None:
        """Train and save; afterwards ``at`` is what was reached, and ``safe`` what is on the disk."""
        how, clock = self.how, self.clock
        whole, cycle = until - clock.now, self.interval + how.save
        cycles, rest = divmod(whole, cycle)
        worked = (cycles * self.interval + min(rest, self.interval)) * (1 - self.paid)
        counted = max(0.0, (whole - how.flush) // cycle)
        again = min(worked, max(0.0, self.top - self.at))
        begin = self.at
        self.at += worked
        self.top = max(self.top, self.at)
        if counted:
            self.safe = begin + counted * self.interval * (1 - self.paid)
        clock.spend(TimeKind.REDO, again, "steps made again")
        clock.spend(TimeKind.TRAIN, worked - again, "steps")
        clock.spend(TimeKind.SAVE, until - clock.now, count(int(cycles), "save"))

    def _recover(self, fault: Fault) -> None:
        how, clock, begun = self.how, self.clock, self.at
        in_memory = how.snapshot_every > 0
        while clock.now < clock.end:
            self.coming.take(fault)
            self.faults += 1
            why = _words(fault)
            clock.spend(TimeKind.DETECT, how.hang if fault.silent else how.detect, why)
            in_memory = in_memory and (not fault.lost or (how.copies and fault.width == 1))
            if how.warm is not None and (not fault.lost or self.takes_spares(fault.width)):
                start, where = how.warm.of(fault.mark), "restart in place"
            else:
                self.wait((how.requeue or how.queue).of(fault.wait_mark), why)
                start, where, in_memory = how.cold.of(fault.mark), "a new job starts", False
            fault = self.coming.after(clock.now)
            clock.spend(TimeKind.RESTART, min(start, fault.at - clock.now), where)
            if fault.at > clock.now:
                break
        self.at = max(self.safe, self._snapped(begun)) if in_memory else self.safe

    def _snapped(self, reached: float) -> float:
        """The training that the newest snapshot has."""
        return reached - (reached - self.safe) % self.how.snapshot_every

    def _leave(self) -> None:
        """Save and leave in order, at the time limit or before a maintenance, and go on in another job."""
        met = self.save_and_leave()
        if met is None:
            self.safe = self.at
            self.change_jobs()
            met = self.start()
        if met is not None:
            self._recover(met)


class _ReplicasPlayed(_Played):
    """Replica groups in one job: a fault takes one away, the others wait for a moment and train on. No step is made again,
    because a group that comes back has the state of the others; only the loss of all of them would undo any, and that is not
    played. Nodes of a group that is away do not fail."""

    def __init__(
        self, strategy: Strategy, trace: Sequence[Fault], seconds: float, note: Note | None, luck: str
    ) -> None:
        super().__init__(strategy, trace, seconds, note, luck)
        self.gone: dict[int, float] = {}  # the groups that are away, and when they are back

    def play(self) -> None:
        clock = self.clock
        while clock.now < clock.end:
            self.gone = {group: at for group, at in self.gone.items() if at > clock.now}
            fault, stop = self.coming.after(clock.now), self.stop
            until = min(fault.at, *self.gone.values(), stop)
            self._train(until - clock.now)
            clock.now = until  # what rounding has left
            if until >= clock.end:
                return
            if fault.at <= until:
                self._meet(fault)
            elif stop <= until:
                self._leave()

    def _train(self, seconds: float) -> None:
        """Spend the time with the groups that are there."""
        how, clock = self.how, self.clock
        there = how.groups - len(self.gone)
        if there < how.least:
            clock.spend(TimeKind.RESTART, seconds, f"{there} of {how.groups} groups are there")
            return
        saving = seconds * how.save / (how.interval + how.save)
        work = seconds - saving
        clock.spend(TimeKind.SAVE, saving, "saves")
        clock.spend(TimeKind.AWAY, work * (how.groups - there) / how.groups, f"{there} of {how.groups} groups train")
        clock.spend(TimeKind.TRAIN, work * there / how.groups, "steps")

    def _meet(self, fault: Fault) -> None:
        """The others notice, and agree anew; a fault meanwhile begins that anew."""
        clock, how = self.clock, self.how
        if self._group(fault) in self.gone:
            self.coming.skip()
            return
        while clock.now < clock.end:
            self.coming.take(fault)
            self.faults += 1
            noticed = how.hang if fault.silent else how.detect
            ends = clock.now + noticed + how.stall
            self.gone[self._group(fault)] = ends + self._away(fault)
            later = self._next(ends)
            clock.spend(TimeKind.DETECT, min(noticed, later.at - clock.now), _words(fault))
            clock.spend(TimeKind.RESTART, min(ends, later.at) - clock.now, "the other groups go on")
            if later.at >= ends:
                return
            fault = later

    def _next(self, before: float) -> Fault:
        """The next fault of a group that is there, as far as one comes ``before`` that time."""
        while (fault := self.coming.after(self.clock.now)).at < before and self.gone.get(
            self._group(fault), 0
        ) > fault.at:
            self.coming.skip()
        return fault

    def _group(self, fault: Fault) -> int:
        """The nodes are dealt out to the groups; those that fail together belong to the same one."""
        return fault.node // fault.width % self.how.groups

    def _away(self, fault: Fault) -> float:
        how = self.how
        if how.away is not None:
            return how.away
        if how.warm is not None and (not fault.lost or self.takes_spares(fault.width)):
            return how.warm.of(fault.mark)
        return (how.requeue or how.queue).of(fault.wait_mark) + how.cold.of(fault.mark)

    def _leave(self) -> None:
        """Save, leave in order, and start all groups in another job; a fault meanwhile begins that start anew."""
        met = self.save_and_leave()
        if met is not None:
            self._meet(met)
            return
        self.change_jobs()
        self.gone = {}
        while (met := self.start()) is not None:
            self.coming.take(met)
            self.faults += 1


def _words(fault: Fault) -> str:
    what = f"{fault.width} nodes fail" if fault.width > 1 else f"node {fault.node} fails"
    return f"{what if fault.lost else f'a process on node {fault.node} fails'}{', silently' if fault.silent else ''}"


# ------------------------------------------------------------------------------------------------------------ many runs


class StrategyOutcome(NamedTuple):
    """The outcome of a strategy in ``runs`` runs. Shares are 0-1; ``certain`` is half the width of the 95 % confidence interval
    of ``ettr`` (Student's t; infinite of one run alone), ``low`` and ``high`` are those of single runs: nine of ten lie between
    them."""

    strategy: Strategy
    ettr: float
    certain: float
    low: float
    high: float
    shares: tuple[float, ...]  # of each ``TimeKind``, in that order
    faults: float  # of a run
    jobs: float
    runs: int
    better: float = 0.0  # by how much than the first strategy, on the same faults
    better_certain: float = 0.0


def simulate(
    fleet: Fleet,
    strategies: Sequence[Strategy],
    seconds: float,
    runs: int,
    seed: int,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[StrategyOutcome, ...]:
    """Play each strategy on the same ``runs`` traces. ``advance`` is told of each run that is done. Memory: one trace, and
    a few numbers of each run."""
    played: list[list[SimulatedRun]] = [[] for _ in strategies]
    for number in range(runs):
        trace = trace_of(fleet, seconds, seed, number)
        luck = luck_of(seed, number)
        for strategy, those in zip(strategies, played, strict=True):
            those.append(play(strategy, trace, seconds, luck=luck))
        advance(1)
    return _outcomes(strategies, played)


def trace_of(fleet: Fleet, seconds: float, seed: int, number: int) -> list[Fault]:
    """The faults of the run ``number``; the same for the same seed."""
    return list(faults(fleet, seconds, Random(f"{seed}/{number}")))


def luck_of(seed: int, number: int) -> str:
    """The seed of the waits of the run ``number`` that no fault brings."""
    return f"{seed}/{number}/waits"


def replay(strategies: Sequence[Strategy], trace: Sequence[Fault], seconds: float) -> tuple[StrategyOutcome, ...]:
    """Play each strategy once on faults that have happened."""
    return _outcomes(strategies, [[play(one, trace, seconds, luck=luck_of(0, 0))] for one in strategies])


def _outcomes(strategies: Sequence[Strategy], played: Sequence[Sequence[SimulatedRun]]) -> tuple[StrategyOutcome, ...]:
    first = [one.ettr for one in played[0]]
    return tuple(_outcome(strategy, those, first) for strategy, those in zip(strategies, played, strict=True))


def _outcome(strategy: Strategy, those: Sequence[SimulatedRun], first: Sequence[float]) -> StrategyOutcome:
    ratios = [one.ettr for one in those]
    gains = [mine - other for mine, other in zip(ratios, first, strict=True)]
    whole = math.fsum(one.total for one in those)
    ends = quantiles(ratios, n=20, method="inclusive") if len(ratios) > 1 else ratios
    return StrategyOutcome(
        strategy,
        fmean(ratios),
        half_width(ratios),
        ends[0],
        ends[-1],
        tuple(math.fsum(one.spent[kind] for one in those) / whole for kind in TimeKind),
        fmean(one.faults for one in those),
        fmean(one.jobs for one in those),
        len(those),
        fmean(gains),
        half_width(gains),
    )


def events_of(
    strategy: Strategy, trace: Sequence[Fault], seconds: float, luck: str = luck_of(0, 0)
) -> Iterator[SimulatedEvent]:
    """The course of a run, stretch by stretch."""
    seen: list[SimulatedEvent] = []
    play(strategy, trace, seconds, seen.append, luck)
    return iter(seen)
