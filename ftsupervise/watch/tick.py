"""One tick over many runs: look, write down what changed, tell people, say that the watch lives.

This process reads no user's disk, so no dead mount can hold it: all of that is done by children (``tour.py``, ``general.py``)
that are watched while they do it. One child does all healthy runs. Where it hangs on a run, it is given up; that run is told
not to answer, and new children go on with the others: those on the same device each in its own, for they may hang as well.

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
from ftsupervise.probe.abandoned import Note, Notes
from ftsupervise.probe.errand import At, Errand
from ftsupervise.probe.server import Mounts, read_mounts
from ftsupervise.units import show_duration
from ftsupervise.watch import general, run_dir_check
from ftsupervise.watch import roster as rosters
from ftsupervise.watch.account import Account, Told
from ftsupervise.watch.checks import Queue, Unanswered
from ftsupervise.watch.general import KEEPS
from ftsupervise.watch.roster import Roster
from ftsupervise.watch.tour import FINDS, READS, RELIEVES, SENDS, Orders, Tour
from ftsupervise.watch.watchdogs import WATCHDOGS, load_watchdog

__all__ = ["Orders", "Roster", "Ticked", "Told", "tick"]

_AT_ONCE = 8  # children


@dataclass(frozen=True)
class Ticked:
    """The whole tick, for the person who ran it by hand."""

    at: datetime
    runs: tuple[Told, ...]
    blind: str
    account: Account
    delivered: Delivered = field(default_factory=Delivered)
    trouble: tuple[str, ...] = ()  # what the watch itself could not do
    relief: tuple[tuple[str, str], ...] = ()  # (run, what was done for it while all its jobs wait)

    @property
    def saw_all(self) -> bool:
        """Was every run that was named looked at?"""
        return not (self.account.trouble or self.account.hung)


def tick(roster: Roster, orders: Orders) -> Ticked:
    """Look at every run once and tell what changed. Bounded in time whatever any run's storage does.

    ``roster`` keeps the settings that were read, for the next tick.
    """
    _import_all(orders)
    account = Account(roster)
    party = _Party(orders, account)
    party.go()
    party.tell_in_general()
    return _ticked(orders, account)


def _ticked(orders: Orders, account: Account) -> Ticked:
    first, last = account.in_general or ((), ())
    told = (*first, *(account.told[index] for index in sorted(account.told)), *last)
    why = general.blind(account)
    return Ticked(
        orders.now, told, why, account, account.all_delivered(), tuple(account.complaints()), tuple(account.relief)
    )


def _import_all(orders: Orders) -> None:
    """What a child imports is gone with it: the next one would pay for it again."""
    for name in orders.only or WATCHDOGS:
        load_watchdog(name)


class _Party:
    """The children of one tick."""

    def __init__(self, orders: Orders, account: Account) -> None:
        self.orders, self.account, self.notes = orders, account, Notes()
        self.mounts = Mounts(read_mounts())
        self.running: dict[Errand, list[int]] = {}

    # -------------------------------------------------------------------------------------------------------- the runs

    def go(self) -> None:
        roster = self.account.roster
        stuck = {note.key: note for note in self.notes.stuck()}
        note = stuck.get(self._state_key)
        if roster.away or note is not None:
            self._state_is_away(roster.away or _silence(self.orders.state, note.seconds if note else 0.0))
        for index in range(len(roster.names)):
            note = stuck.get(roster.key(index))
            if note is not None:
                self._dark(index, note.seconds, _what(note), f"process {note.pid} hangs on it and cannot be killed")
        left = [index for index in range(len(roster.names)) if index not in self.account.hung]
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
        """The scheduler is asked once: until it has answered there is one child, which asks it."""
        return not self.running or (self.account.queues is not None and len(self.running) < _AT_ONCE)

    def _start(self, group: list[int]) -> None:
        if group:
            errand = Errand(lambda say: Tour(self.orders, self.account, group, say).go(), notes=self.notes)
            self.running[errand] = group

    def _look_after(self, errand: Errand, group: list[int]) -> list[list[int]]:
        """Hear one child; the groups that are to be started because it cannot go on."""
        for event in errand.heard():
            self.account.hear(event)
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
        key = self._state_key if at.words == FINDS else self.account.roster.key(at.item) if at.item >= 0 else at.words
        gone = errand.finish(key, at.words)
        why = errand.died or f"no answer within {silent:.0f} s" + (f"; process {errand.pid} hangs on it" * (not gone))
        self._give_up(at, silent, why, group)
        return self._divided(at.item, [index for index in group if not self._done(index)])

    def _give_up(self, at: At, seconds: float, why: str, group: Sequence[int]) -> None:
        """The child did not come back from ``at``: say so, and see to it that the next one does not go there."""
        account = self.account
        if at.item < 0:
            self._give_up_for_all(at, why, group)
        elif at.words == FINDS:
            self._state_is_away(_silence(self.orders.state, seconds))
        elif at.words == SENDS:
            account.sent.add(at.item)
            account.notes.append(f"{account.roster.label(at.item)}: could not {SENDS}: {why}")
            self._dark(at.item, seconds, at.words, why)
        elif at.words == RELIEVES:
            account.waiting.discard(at.item)
            account.notes.append(f"{account.roster.label(at.item)}: could not {RELIEVES}: {why}")
        else:
            self._dark(at.item, seconds, at.words, why)
        if at.item >= 0:
            account.roster.slow.add(at.item)

    def _give_up_for_all(self, at: At, why: str, group: Sequence[int]) -> None:
        if self.account.queues is None:
            words = {run.scheduler for run in self.account.roster.runs}
            self.account.queues = {word: Queue(None, f"could not {at.words}: {why}", word) for word in words}
            self.account.asked = None
        else:
            self.account.sent.update(group)
            self.account.notes.append(f"could not {at.words or 'begin'}: {why}")

    def _dark(self, index: int, seconds: float, doing: str, why: str) -> None:
        """Nobody goes near this run again in this tick; only where its settings hang and are known it is looked at."""
        account, known = self.account, self.account.roster.known.get(index)
        if doing in (FINDS, READS) and index not in account.settled:
            account.settled.add(index)
            account.trouble[index] = Unanswered(f"its storage does not answer: could not {doing}: {why}")
            if known is None:
                account.hung.add(index)
            return
        account.hung.add(index)
        account.told.pop(index, None)
        if known is not None:
            account.stored[index] = run_dir_check.silent(known.run, seconds, doing, why, self.orders.now)

    def _done(self, index: int) -> bool:
        account = self.account
        if index in account.hung or (index in account.settled and index not in account.roster.known):
            return True
        return index in account.sent and index not in account.waiting

    def _divided(self, hung: int, left: list[int]) -> list[list[int]]:
        """Those that share their device with the one that hung may hang as well: each goes alone."""
        if hung < 0:
            return [left]
        device = self.mounts.of(self.account.roster.place(hung))
        alone = [index for index in left if self.mounts.of(self.account.roster.place(index)) == device]
        return [[index for index in left if index not in alone], *([index] for index in alone)]

    # --------------------------------------------------------------------------------------------- the state directory

    @property
    def _state_key(self) -> str:
        return rosters.state_key(self.orders.state)

    def _state_is_away(self, why: str) -> None:
        """It is not touched again: what names mean is remembered on this host."""
        account, before = self.account, rosters.directories()
        account.away = why
        for index, name in enumerate(account.roster.names):
            if index in account.roster.known or index in account.found or name is None or not rosters.is_name(name):
                continue
            if name in before:
                account.found[index] = before[name]
            else:
                account.settled.add(index)
                account.hung.add(index)
                account.trouble[index] = Unanswered(f"its directory cannot be looked up: {why}")

    def tell_in_general(self) -> None:
        """What is nobody's in particular. A state directory that hangs costs one bound."""
        account, names = self.account, self.account.roster.names
        if account.found and not account.away:
            rosters.remember({str(names[i]): where for i, where in account.found.items()})
        for _ in range(3):
            errand = Errand(lambda say: general.work(self.orders, account, say), notes=self.notes)
            try:
                while not errand.ended and not errand.late:
                    for event in errand.wait(0.2):
                        account.hear(event)
                for event in errand.heard():
                    account.hear(event)
            finally:
                at, silent = errand.at, errand.silent
                errand.finish(self._state_key if at.words == KEEPS and not errand.ended else "messages", at.words)
            if errand.error is not None:
                raise errand.error
            if errand.ended and not errand.died:
                break
            if at.words == KEEPS and not account.away:
                self._state_is_away(_silence(self.orders.state, silent))
                continue
            account.notes.append(f"could not {at.words}: {errand.died or f'no answer within {silent:.0f} s'}")
            account.pinged = account.pinged or at.words == general.PINGS
            account.in_general = account.in_general or ((), ())
        if account.away:
            account.notes.append(account.away)


def _silence(state: Path, seconds: float) -> str:
    return f"{state} has not answered for {show_duration(seconds)}"


def _what(note: Note) -> str:
    return note.what or "look at it"
