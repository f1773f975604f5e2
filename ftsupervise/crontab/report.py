"""What ``cron status`` and ``cron list`` show: gathered from the folder and one look at the queue, judged for a person."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from ftsupervise.crontab import backends, chain, claims, history, successors
from ftsupervise.crontab.chain import Queue
from ftsupervise.crontab.claims import Slot
from ftsupervise.crontab.entries import Entry, Passed, find
from ftsupervise.crontab.history import Ran
from ftsupervise.crontab.place import CronDir, Installed, user_name
from ftsupervise.crontab.schedule import ceiling, floor
from ftsupervise.errors import Error
from ftsupervise.printable import printable

_MOST = 100_000  # slots that are looked for


@dataclass(frozen=True)
class EntryStatus:
    """One entry: what it is, when it comes, how it went."""

    entry: Entry
    next: datetime | None
    runs: tuple[Ran, ...]  # newest first
    lost: frozenset[datetime]

    @property
    def last(self) -> Ran | None:
        """The newest run that is over."""
        return next(
            (ran for ran in self.runs if ran.outcome in ("ok", "failed", "unknown") or ran.at in self.lost), None
        )

    @property
    def current(self) -> Ran | None:
        """The run that goes on."""
        return next((ran for ran in self.runs if ran.open and ran.at not in self.lost), None)

    @property
    def word(self) -> str:
        """How the last run went, in a word; if none is over yet, what the first one does."""
        if self.last is not None:
            return "cut off" if self.last.at in self.lost else self.last.outcome
        if self.current is not None:
            return "submitted" if self.current.job_comment else "running"
        return "not yet"


@dataclass(frozen=True)
class Slots:
    """The slots that are on record."""

    known: tuple[Slot, ...] = ()
    expected: int = 0  # slots from the first on record (or the install) to the last that is due
    missed: tuple[datetime, ...] = ()

    @property
    def last(self) -> Slot | None:
        return self.known[-1] if self.known else None

    @property
    def lates(self) -> tuple[float, ...]:
        return tuple(slot.late for slot in self.known if slot.late is not None)

    @property
    def died(self) -> tuple[Slot, ...]:
        """Claimed, and never finished; the newest may still be at it."""
        return tuple(slot for slot in self.known[:-1] if not slot.ended)


@dataclass(frozen=True)
class Status:
    at: datetime
    cron: CronDir
    installed: Installed
    chain: successors.Chain | None  # None: another back end, or nobody could ask
    blind: str
    slots: Slots
    entries: tuple[EntryStatus, ...]
    passed: tuple[Passed, ...]
    next_slot: datetime | None
    newest: Slot | None = None  # the last that this back end has ticked at
    warnings: tuple[str, ...] = ()  # what Slurm's commands complained of beside their answers
    drained: tuple[str, ...] = ()  # nodes that Slurm has drained by itself
    lost_lines: str = ""  # what has become of our lines in the person's table, if they are not as they should be

    @property
    def verdict(self) -> str:
        """REMOVED, ALIVE, LATE (no slot for two periods, jobs wait), DEAD, UNSTARTED (a loop that nobody has started),
        WAITING (lines in a table, and their first time has not come) or UNKNOWN.

        ALIVE rests on what was seen: a tick of this very back end, or jobs of the chain in the queue.
        """
        if self.installed.removed:
            return "REMOVED"
        lives = self.newest is not None and self.at - self.newest.at < 2 * self.installed.period
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


def gather(cron: CronDir, installed: Installed, scheduler: Queue | None, now: datetime) -> Status:
    """Everything about one installed cron. Raises OSError where the folder cannot be read."""
    found = find(cron, installed)
    jobs, blind = None, ""
    if scheduler is not None:
        try:
            jobs = scheduler.queue(users=(installed.owner,))
        except Error as error:
            blind = error.message
    seen = successors.chain(jobs, installed.id, now, installed.period, installed.spares) if jobs is not None else None
    living = frozenset(job.raw_id or job.base_id for job in jobs) if jobs is not None else None
    lost, told = _lost_lines(installed)
    blind = blind or told
    entries = []
    for entry in found.entries:
        try:
            runs = history.runs(cron, entry.key, most=installed.keep)
        except OSError:
            runs = ()
        cut = frozenset(r.at for r in runs if history.lost(r, now, installed.limit, living, now))
        due = entry.schedule.next_after(now, installed.period)
        at_slot = ceiling(due, installed.period) if due is not None else None
        entries.append(EntryStatus(entry, None if installed.removed else at_slot, runs, cut))
    ahead = seen.ahead[0] if seen is not None and seen.ahead else None
    usual = floor(now, installed.period) + installed.period if installed.backend != "slurm" else None
    return Status(
        at=now,
        cron=cron,
        installed=installed,
        chain=seen,
        blind=blind,
        slots=slots_until(claims.slots(cron, now), installed, now),
        newest=claims.newest(cron, installed, now),
        drained=(chain.drained(scheduler) or ()) if scheduler is not None and jobs is not None else (),
        warnings=tuple(sorted(map(printable, scheduler.warnings))) if scheduler is not None else (),
        lost_lines=lost,
        entries=tuple(entries),
        passed=found.passed,
        next_slot=None if installed.removed else (ahead or usual),
    )


def _lost_lines(installed: Installed) -> tuple[str, str]:
    """(what is wrong with our lines in the person's table, why it could not be read)."""
    if installed.removed or installed.owner != user_name():
        return "", ""
    try:
        return backends.lost(installed), ""
    except Error as error:
        return "", error.message


def slots_until(known: Iterable[Slot], installed: Installed, now: datetime) -> Slots:
    """Which slots had no tick, from the first on record to the newest that is over. Pure."""
    known = tuple(known)
    if not known:
        return Slots()
    period = installed.period
    first = max(known[0].at, floor(installed.since, period))
    last = max(known[-1].at, floor(now, period) - period) if not installed.removed else known[-1].at
    have = {slot.at for slot in known}
    first = max(first, floor(last - period * _MOST, period))
    count = max(0, (last - first) // period + 1)
    missed = tuple(at for at in (first + period * n for n in range(count)) if at not in have)
    return Slots(known, count, missed[-1000:])
