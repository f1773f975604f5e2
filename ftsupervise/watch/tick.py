"""One tick over many runs: check them, write down what changed, notify people, say that the watch lives.

This process reads no user's disk, so no dead mount can hold it: all of that is done by children (``tour.py``, ``general.py``)
that are watched while they do it. One child does all healthy runs. Where it hangs on a run, it is given up; that run is
reported as not answering, and new children go on with the others: those on the same device each in its own, for they may
hang as well.

Order matters. Everything that was found is saved with its messages before the first is sent, so a tick that is killed half-way
is finished by the next one. The dead-man is pinged last, and only if this tick could see.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from ftsupervise.alerts.deliver import Delivered
from ftsupervise.probe.errand import At, Errand, Note, Notes
from ftsupervise.probe.server import Mounts, read_mounts
from ftsupervise.units import show_duration
from ftsupervise.watch import checks, general
from ftsupervise.watch import roster as rosters
from ftsupervise.watch.checks import QueueAnswer, Unanswered
from ftsupervise.watch.general import KEEPS
from ftsupervise.watch.roster import Roster, RunReport, TickProgress
from ftsupervise.watch.tour import EXPORTS, FINDS, READS, RELIEVES, SENDS, TickOrders, Tour
from ftsupervise.watch.watchdogs import WATCHDOGS, load_watchdog

_AT_ONCE = 8  # children


@dataclass(frozen=True)
class TickResult:
    """The whole tick, for the person who ran it by hand."""

    at: datetime
    runs: tuple[RunReport, ...]
    blind: str
    progress: TickProgress
    delivered: Delivered = field(default_factory=Delivered)
    trouble: tuple[str, ...] = ()  # failures of the watch itself
    relief: tuple[tuple[str, str], ...] = ()  # (run, what was done for it while all its jobs wait)

    @property
    def saw_all(self) -> bool:
        """Return whether every run that was named was checked."""
        return not any(run.trouble or run.hung for run in self.progress.runs)


def tick(roster: Roster, orders: TickOrders) -> TickResult:
    """Check every run once and notify people of what changed. Bounded in time whatever any run's storage does.

    ``roster`` keeps the settings that were read, for the next tick.
    """
    _import_all(orders)
    progress = TickProgress(roster)
    party = _Children(orders, progress)
    party.go()
    party.do_general()
    return _ticked(orders, progress)


def _ticked(orders: TickOrders, progress: TickProgress) -> TickResult:
    runs = (run.report for run in progress.runs if run.report is not None)
    reports = (*(progress.general or ()), *runs, *progress.storage)
    why = general.blind(progress)
    return TickResult(
        orders.now,
        reports,
        why,
        progress,
        progress.all_delivered(),
        tuple(progress.complaints()),
        tuple(progress.relief),
    )


def _import_all(orders: TickOrders) -> None:
    """Import our watchdogs here: a child that imports them cannot hand them to the next one. Those of other packages run in
    children alone."""
    for name in orders.only or WATCHDOGS:
        load_watchdog(name)


class _Children:
    """The children of one tick."""

    def __init__(self, orders: TickOrders, progress: TickProgress) -> None:
        self.orders, self.progress, self.notes = orders, progress, Notes()
        self.mounts = Mounts(read_mounts())
        self.running: dict[Errand, list[int]] = {}

    # -------------------------------------------------------------------------------------------------------- the runs

    def go(self) -> None:
        roster = self.progress.roster
        stuck = {note.key: note for note in self.notes.stuck()}
        note = stuck.get(self._state_key)
        if roster.away or note is not None:
            self._state_is_away(roster.away or _silence(self.orders.state, note.seconds if note else 0.0))
        for index in range(len(roster.names)):
            note = stuck.get(roster.key(index))
            if note is not None:
                self._no_answer(
                    index, note.seconds, _what(note), f"process {note.pid} hangs on it and cannot be killed"
                )
        left = [index for index, run in enumerate(self.progress.runs) if not run.hung]
        slow, roster.slow = roster.slow, set()
        waiting = deque([[i for i in left if i not in slow], *([i] for i in left if i in slow)])
        try:
            while waiting or self.running:
                while waiting and self._may_start():
                    self._start(waiting.popleft())
                if self.running:
                    select.select(list(self.running), [], [], 0.2)
                for errand, group in list(self.running.items()):
                    waiting.extend(self._look_after(errand, group))
        finally:
            for errand in self.running:
                errand.finish("errand", "a tick that was stopped")

    def _may_start(self) -> bool:
        """Return whether a further child may start: until the scheduler has answered there is one child, which asks it."""
        return not self.running or (self.progress.queues is not None and len(self.running) < _AT_ONCE)

    def _start(self, group: list[int]) -> None:
        if group:
            errand = Errand(lambda say: Tour(self.orders, self.progress, group, say).go(), notes=self.notes)
            self.running[errand] = group

    def _look_after(self, errand: Errand, group: list[int]) -> list[list[int]]:
        """Apply what one child reports. Returns the groups that are to be started because it cannot go on."""
        for event in errand.heard():
            self.progress.apply(event)
        if errand.ended and not errand.died:
            del self.running[errand]
            errand.finish("messages", "a receiver")  # a sender may still hang, in a thread of it
            if errand.error is not None:
                raise errand.error
            return []
        if not errand.died and not errand.late:
            return []
        del self.running[errand]
        at, silent = errand.at, errand.silent
        key = self._state_key if at.words == FINDS else self.progress.roster.key(at.item) if at.item >= 0 else at.words
        gone = errand.finish(key, at.words)
        why = errand.died or f"no answer within {silent:.0f} s" + (f"; process {errand.pid} hangs on it" * (not gone))
        self._give_up(at, silent, why, group)
        return self._divided(at.item, [index for index in group if not self._done(index)])

    def _give_up(self, at: At, seconds: float, why: str, group: Sequence[int]) -> None:
        """Report that the child did not come back from ``at``, and see to it that the next one does not go there."""
        progress = self.progress
        if at.item < 0:
            self._give_up_for_all(at, why, group)
        elif at.words == FINDS:
            self._state_is_away(_silence(self.orders.state, seconds))
        elif at.words == SENDS:
            progress.runs[at.item].sent = True
            progress.notes.append(f"{progress.roster.label(at.item)}: could not {SENDS}: {why}")
            self._no_answer(at.item, seconds, at.words, why)
        elif at.words == EXPORTS:
            for run in progress.runs:  # all that are left: most write to one place
                run.exported = True
            progress.notes.append(f"{progress.roster.label(at.item)}: could not {EXPORTS}: {why}")
            return
        elif at.words == RELIEVES:
            progress.runs[at.item].waits = False
            progress.notes.append(f"{progress.roster.label(at.item)}: could not {RELIEVES}: {why}")
        else:
            self._no_answer(at.item, seconds, at.words, why)
        if at.item >= 0:
            progress.roster.slow.add(at.item)

    def _give_up_for_all(self, at: At, why: str, group: Sequence[int]) -> None:
        if self.progress.queues is None:
            words = {run.scheduler for run in self.progress.roster.runs}
            self.progress.queues = {word: QueueAnswer(None, f"could not {at.words}: {why}", word) for word in words}
            self.progress.asked = None
        else:
            for index in group:
                self.progress.runs[index].sent = True
            self.progress.notes.append(f"could not {at.words or 'begin'}: {why}")

    def _no_answer(self, index: int, seconds: float, doing: str, why: str) -> None:
        """Leave this run alone for the rest of the tick. It is still checked only where its settings hang and are known."""
        run, known = self.progress.runs[index], self.progress.roster.known.get(index)
        if doing in (FINDS, READS) and not run.settled:
            run.settled, run.hung = True, known is None
            run.trouble = Unanswered(f"its storage does not answer: could not {doing}: {why}")
            return
        run.hung, run.report = True, None
        if known is not None:
            run.storage = checks.silent(known.run, seconds, doing, why, self.orders.now)

    def _done(self, index: int) -> bool:
        run = self.progress.runs[index]
        if run.hung or (run.settled and index not in self.progress.roster.known):
            return True
        return run.sent and not run.waits

    def _divided(self, hung: int, left: list[int]) -> list[list[int]]:
        """Split up the rest: a run on the device of the one that hung may hang as well, so each of those gets a child
        of its own.
        """
        if hung < 0:
            return [left]
        device = self.mounts.of(self.progress.roster.place(hung))
        alone = [index for index in left if self.mounts.of(self.progress.roster.place(index)) == device]
        return [[index for index in left if index not in alone], *([index] for index in alone)]

    # --------------------------------------------------------------------------------------------- the state directory

    @property
    def _state_key(self) -> str:
        return rosters.state_key(self.orders.state)

    def _state_is_away(self, why: str) -> None:
        """Leave the state directory alone for the rest of the tick: the meaning of names is remembered on this host."""
        progress, before = self.progress, rosters.directories()
        progress.away = why
        for index, (name, run) in enumerate(zip(progress.roster.names, progress.runs, strict=True)):
            if index in progress.roster.known or run.directory or name is None or not rosters.is_name(name):
                continue
            if name in before:
                run.directory = before[name]
            else:
                run.settled = run.hung = True
                run.trouble = Unanswered(f"its directory cannot be looked up: {why}")

    def do_general(self) -> None:
        """Do what belongs to no single run. A state directory that hangs costs one bound."""
        progress, names = self.progress, self.progress.roster.names
        found = {str(name): run.directory for name, run in zip(names, progress.runs, strict=True) if run.directory}
        if found and not progress.away:
            rosters.remember(found)
        for _ in range(3):
            errand = Errand(lambda say: general.work(self.orders, progress, say), notes=self.notes)
            try:
                while not errand.ended and not errand.late:
                    for event in errand.wait(0.2):
                        progress.apply(event)
                for event in errand.heard():
                    progress.apply(event)
            finally:
                at, silent = errand.at, errand.silent
                errand.finish(self._state_key if at.words == KEEPS and not errand.ended else "messages", at.words)
            if errand.error is not None:
                raise errand.error
            if errand.ended and not errand.died:
                break
            if at.words == KEEPS and not progress.away:
                self._state_is_away(_silence(self.orders.state, silent))
                continue
            progress.notes.append(f"could not {at.words}: {errand.died or f'no answer within {silent:.0f} s'}")
            progress.pinged = progress.pinged or at.words == general.PINGS
            progress.general = progress.general or ()
        if progress.away:
            progress.notes.append(progress.away)


def _silence(state: Path, seconds: float) -> str:
    return f"{state} has not answered for {show_duration(seconds)}"


def _what(note: Note) -> str:
    return note.what or "check it"
