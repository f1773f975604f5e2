"""What ``cron status`` and ``cron list`` show: gathered from the folder and one look at the queue, judged for a person."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from ftsupervise.crontab import chain, history, keepalive
from ftsupervise.crontab.entries import CronEntry, PassedOver, ceiling, find, floor
from ftsupervise.crontab.history import EntryRun, SlotRecord
from ftsupervise.crontab.installation import CronDir, Installed
from ftsupervise.errors import Error
from ftsupervise.printable import printable

if TYPE_CHECKING:
    from ftsupervise.scheduler.slurm import Slurm

_MOST = 100_000  # slots that are looked for


@dataclass(frozen=True)
class EntryStatus:
    """One entry: what it is, when it comes, how it went."""

    entry: CronEntry
    next: datetime | None
    runs: tuple[EntryRun, ...]  # newest first
    lost: frozenset[datetime]  # slots of open runs whose tick was killed

    @property
    def last(self) -> EntryRun | None:
        """The newest run that is over."""
        over = (run for run in self.runs if run.end.outcome in ("ok", "failed", "unknown") or run.at in self.lost)
        return next(over, None)

    @property
    def current(self) -> EntryRun | None:
        """The run that goes on."""
        return next((run for run in self.runs if run.open and run.at not in self.lost), None)

    @property
    def word(self) -> str:
        """How the last run went, in a word; if none is over yet, what the first one does."""
        if self.last is not None:
            return "cut off" if self.last.at in self.lost else self.last.end.outcome
        if self.current is not None:
            return "submitted" if self.current.start.job_comment else "running"
        return "not yet"


@dataclass(frozen=True)
class SlotsSeen:
    """The slots that are on record."""

    known: tuple[SlotRecord, ...] = ()
    expected: int = 0  # slots from the first on record (or the install) to the last that is due
    missed: tuple[datetime, ...] = ()

    @property
    def last(self) -> SlotRecord | None:
        return self.known[-1] if self.known else None

    @property
    def lates(self) -> tuple[float, ...]:
        return tuple(slot.claim.late for slot in self.known if slot.claim.late is not None)

    @property
    def died(self) -> tuple[SlotRecord, ...]:
        """Claimed, and never finished; the newest may still be at it."""
        return tuple(slot for slot in self.known[:-1] if slot.end is None)


@dataclass(frozen=True)
class CronStatus:
    at: datetime
    cron: CronDir
    installed: Installed
    chain: chain.CronChain | None  # None: another back end, or the queue could not be read
    blind: str
    slots: SlotsSeen
    entries: tuple[EntryStatus, ...]
    passed: tuple[PassedOver, ...]
    next_slot: datetime | None
    newest: datetime | None = None  # the last slot that this back end has ticked at
    warnings: tuple[str, ...] = ()  # warnings of Slurm's commands beside their answers
    drained: tuple[str, ...] = ()  # nodes that Slurm has drained by itself
    lost_lines: str = ""  # what has become of our lines in the person's table, if they are not as they should be

    @property
    def verdict(self) -> str:
        """REMOVED, ALIVE, LATE (no slot for two periods, jobs wait), DEAD, UNSTARTED (its loop was never started),
        WAITING (lines in a table, and their first time has not come) or UNKNOWN.

        ALIVE rests on what was seen: a tick of this very back end, or jobs of the chain in the queue.
        """
        if self.installed.removed:
            return "REMOVED"
        lives = self.newest is not None and self.at - self.newest < 2 * self.installed.period
        fresh = self.at - self.installed.at < 2 * self.installed.period
        if self.lost_lines:
            return "DEAD"
        if self.installed.backend == "slurm":
            if self.chain is None:
                return "ALIVE" if lives else "UNKNOWN"
            if not self.chain.alive:
                return "DEAD"
            return "ALIVE" if lives or fresh else "LATE"
        if lives:
            return "ALIVE"
        if self.installed.backend == "loop":
            return "UNSTARTED" if self.newest is None else "DEAD"
        return "WAITING" if fresh else "DEAD"


def gather(cron: CronDir, installed: Installed, scheduler: Slurm | None, now: datetime) -> CronStatus:
    """Everything about one installed cron. Raises OSError where the folder cannot be read."""
    jobs, seen, living, blind = None, None, None, ""
    if scheduler is not None:
        try:
            jobs = scheduler.queue(users=(installed.owner,))
            seen = chain.chain_in(jobs, installed.id, now, installed.period, installed.spares)
            living = frozenset(job.raw_id or job.base_id for job in jobs)
        except Error as error:
            blind = error.message
    lost = ""
    try:
        lost = keepalive.lost_lines(installed)
    except Error as error:
        blind = blind or error.message
    found = find(cron, installed)
    ahead = seen.ahead[0] if seen is not None and seen.ahead else None
    usual = floor(now, installed.period) + installed.period if installed.backend != "slurm" else None
    return CronStatus(
        at=now,
        cron=cron,
        installed=installed,
        chain=seen,
        blind=blind,
        slots=slots_until((history.read_slot(cron, at) for at in history.slots(cron, now)), installed, now),
        newest=history.newest_slot(cron, installed, now),
        drained=(chain.drained(scheduler) or ()) if scheduler is not None and jobs is not None else (),
        warnings=tuple(sorted(map(printable, scheduler.warnings))) if scheduler is not None else (),
        lost_lines=lost,
        entries=tuple(_entry(cron, installed, entry, now, living) for entry in found.entries),
        passed=found.passed,
        next_slot=None if installed.removed else (ahead or usual),
    )


def _entry(
    cron: CronDir, installed: Installed, entry: CronEntry, now: datetime, living: frozenset[str] | None
) -> EntryStatus:
    try:
        runs = history.runs(cron, entry.key, most=installed.keep)
    except OSError:
        runs = ()
    lost = frozenset(run.at for run in runs if history.lost(run, now, installed.limit, living, now))
    return EntryStatus(entry, None if installed.removed else next_slot(entry, installed, now), runs, lost)


def next_slot(entry: CronEntry, installed: Installed, now: datetime) -> datetime | None:
    """The slot at which ``entry`` runs next; None if it never does."""
    due = entry.schedule.next_after(now, installed.period)
    return ceiling(due, installed.period) if due is not None else None


def slots_until(known: Iterable[SlotRecord], installed: Installed, now: datetime) -> SlotsSeen:
    """Which slots had no tick, from the first on record to the newest that is over. Pure."""
    known = tuple(known)
    if not known:
        return SlotsSeen()
    period = installed.period
    first = max(known[0].at, floor(installed.since, period))
    last = max(known[-1].at, floor(now, period) - period) if not installed.removed else known[-1].at
    have = {slot.at for slot in known}
    first = max(first, floor(last - period * _MOST, period))
    count = max(0, (last - first) // period + 1)
    missed = tuple(at for at in (first + period * n for n in range(count)) if at not in have)
    return SlotsSeen(known, count, missed[-1000:])
