"""The state of a cron, from its folder and one look at the queue: for ``cron status`` and ``cron list``, and as findings."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise.crontab import chain, history, keepalive
from ftsupervise.crontab.chain import drained_words, epoch
from ftsupervise.crontab.dispatch import CronSlot
from ftsupervise.crontab.entries import CronEntries, CronEntry, PassedOver, ceiling, find, floor
from ftsupervise.crontab.history import EntryRun, SlotRecord
from ftsupervise.crontab.installation import CronDir, Installed, default_directory
from ftsupervise.errors import Error
from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.host import files
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.printable import printable
from ftsupervise.truth import Health

if TYPE_CHECKING:
    from ftsupervise.crontab.chain import TickScheduler

_MOST = 100_000  # number of slots that are searched for


@dataclass(frozen=True)
class EntryStatus:
    """One entry with its next time and its last runs."""

    entry: CronEntry
    next: datetime | None
    runs: tuple[EntryRun, ...]  # newest first
    lost: frozenset[datetime]  # slots of open runs whose tick was killed

    @property
    def last(self) -> EntryRun | None:
        """Return the newest run that is over."""
        over = (run for run in self.runs if run.end.outcome in ("ok", "failed", "unknown") or run.at in self.lost)
        return next(over, None)

    @property
    def current(self) -> EntryRun | None:
        """Return the run that goes on."""
        return next((run for run in self.runs if run.open and run.at not in self.lost), None)

    @property
    def word(self) -> str:
        """Return the result of the last run in a word; if none has ended yet, the state of the first one."""
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
        """Return the slots that were claimed and never finished; the newest may still be at it."""
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
    lost_lines: str = ""  # a clause that says how our lines in the person's table were lost

    @property
    def verdict(self) -> str:
        """Return one of REMOVED, ALIVE, LATE (no slot for two periods, jobs wait), DEAD, UNSTARTED (its loop was never
        started), WAITING (lines in a table whose first time has not come) or UNKNOWN.

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


def gather(cron: CronDir, installed: Installed, scheduler: TickScheduler | None, now: datetime) -> CronStatus:
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
    """The slots on record and those without a tick, from the first on record to the newest that is over. Pure."""
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


# Findings about the runs of the entries and about the chain.
#
# Every entry gets a finding at every tick, from its last run that ended: a failure stays one until a run is good again.

_CUT_OFF = 3  # several ticks in a row that never ended are no accident: too little memory, or a broken installation

_ENTRY = Words("This entry does not do its work.", "cat {output}", "ftsupervise cron run {name}{dir}")
_PASSED = Words("These files and lines do not run.", "ftsupervise cron list{dir}", severity=Severity.INFO)
_MISSED = Words("Entries run late, or not at all.", "ftsupervise cron status{dir}")
_TROUBLE = _MISSED._replace(do="ftsupervise cron ensure{dir}")
_DRAINED = Words(
    "They stay drained until an administrator resumes them; a run that needs them waits.",
    "sinfo -R",
    "ask your administrator: scontrol update nodename={nodes} state=resume",
)


def findings(slot: CronSlot, found: CronEntries, trouble: str, nodes: Sequence[str] | None) -> list[Finding]:
    """Return one finding for every entry that has run, one for all files and lines passed over, one for the slots, one for
    drained nodes.

    ``trouble``: the error that kept this slot from extending the chain; ``nodes``: None when Slurm was not asked.
    """
    names = {entry.key: entry.name for entry in found.entries}
    keys = dict.fromkeys([*names, *history.keys(slot.cron)])
    out = [_entry_finding(slot, key, names.get(key)) for key in keys]
    passed = [f"{one.name}: {one.why}" for one in found.passed if one.wanted]
    shown, bad = "; ".join(passed[:5]) or "nothing", Health.BAD if passed else Health.OK
    out.append(_finding(slot, "passed over", bad, f"cron passes over {shown}", _PASSED))
    out.append(_slots(slot, (trouble if _again(slot) else "") or _cut_off(slot)))
    if nodes is not None:
        words = f"cron: {drained_words(nodes) or 'Slurm has drained no node by itself'}"
        names_of = compress_hostlist(tuple(nodes))
        bad = Health.BAD if nodes else Health.OK
        out.append(_finding(slot, "drained nodes", bad, words, _DRAINED, names={"nodes": names_of}, value=names_of))
    return [one for one in out if one is not None]


def _finding(slot: CronSlot, subject: str, health: Health, summary: str, words: Words, **more: Any) -> Finding:
    names = {"dir": slot.cron.option, **more.pop("names", {})}
    return words.finding((run_name(slot), "cron", subject), health, summary, slot.now, names=names, **more)


def run_name(slot: CronSlot) -> str:
    """The name of this cron in alerts."""
    root = slot.cron.root
    return "cron" if root == default_directory(slot.installed.environment) else f"cron {root}"


def _entry_finding(slot: CronSlot, key: str, known: str | None) -> Finding | None:
    """Return the finding about an entry; None if it has not run yet. ``known``: its name, None when its file is no
    longer there.
    """
    try:
        runs = history.runs(slot.cron, key, most=10)
    except OSError:
        return None
    name = known or key.replace(".", "/", 1)
    health, run, words = _judge(runs, [run.at for run in runs if slot.lost(run)])
    if run is None:
        return None
    summary = f"{name} {words}"
    if known is None and health is Health.BAD:
        health, words, summary = Health.OK, "its file was removed", f"{name}: its file was removed"
    failed = next((run for run in runs if run.end.outcome == "failed"), None)
    return _finding(
        slot,
        name,
        health,
        summary,
        _ENTRY,
        names={"output": shlex.quote(str(run.output)), "name": name},
        value=words,
        since=run.began,
        detail=history.tail(failed.output) if health is Health.BAD and failed is not None else "",
    )


def _judge(runs: Sequence[EntryRun], lost: Sequence[datetime]) -> tuple[Health, EntryRun | None, str]:
    """The verdict on the newest runs (newest first), the run it rests on, and how that one ended.

    ``lost``: slots of open runs whose tick was killed.
    """
    ended = [run for run in runs if run.end.outcome in ("ok", "failed") or run.at in lost]
    if not ended:
        return Health.UNKNOWN, runs[0] if runs else None, "has not ended yet"
    newest = ended[0]
    if newest.at in lost:
        again = len(ended) > 1 and ended[1].at in lost
        words = f"was cut off{' twice in a row' if again else ''}: its tick was killed"
        return (Health.BAD if again else Health.UNKNOWN), newest, words
    if newest.end.outcome == "ok":
        return Health.OK, newest, "works"
    times = next((n for n, run in enumerate(ended) if run.end.outcome != "failed"), len(ended))
    often = f" ({times} times in a row)" if times > 1 else ""
    return Health.BAD, newest, f"failed: {newest.end.words}{often}"


def _slots(slot: CronSlot, trouble: str) -> Finding:
    """Report on the chain itself: successors that could not be submitted, and slots missed before this one."""
    missed, period = missed_slots(slot), slot.installed.period.total_seconds()
    many = len(missed) if len(missed) >= slot.installed.spares else 0
    late = (slot.now - slot.at).total_seconds()
    words = trouble
    if not trouble and many:
        words = f"{many} slots in a row had no tick before this one"
        words += f", which came {late:.0f} s late" if late >= 1 else ""
    return _finding(
        slot,
        "slots",
        Health.BAD if words else Health.OK,
        f"cron: {words or 'its slots come'}",
        _TROUBLE if trouble else _MISSED,
        value=f"{many} missed",
        since=datetime.fromtimestamp(missed[0], timezone.utc) if many else None,
        limit=f"a slot every {period:.0f} s",
    )


def _again(slot: CronSlot) -> bool:
    """Return whether it is time to tell of trouble: the slot before had it too, or no later slot has a job in the queue yet.
    Where those jobs wait, one slot without Slurm loses nothing, and nobody need act."""
    before = [history.read_slot(slot.cron, at).end for at in earlier(slot)[-1:]]
    return slot.installed.spares < 2 or not before or any(end is not None and end.trouble for end in before)


def _cut_off(slot: CronSlot) -> str:
    before = [history.read_slot(slot.cron, at) for at in earlier(slot)[-_CUT_OFF:]]
    may_live = {one.claim.job_id for one in before if slot.living is None or one.claim.job_id in slot.living} - {""}
    cut = [one for one in before if one.end is None and one.claim.job_id not in may_live]
    if len(cut) == _CUT_OFF and _is_full(slot.cron.slots):
        return f"the last {_CUT_OFF} ticks could not write down that they ended: the disk of {slot.cron.root} is full"
    if len(cut) == _CUT_OFF and all(
        one.claim.at is not None for one in cut
    ):  # else the disk was full, and is not any more
        return f"the last {_CUT_OFF} ticks were cut off before their end: see {slot.cron.log}"
    return ""


def _is_full(folder: Path) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < files.NO_ROOM


def earlier(slot: CronSlot) -> list[datetime]:
    return [at for at in history.slots(slot.cron, slot.now) if at < slot.at]


def missed_slots(slot: CronSlot) -> range:
    """Slots without a tick between this one and the one before it, or the install, as seconds since the epoch.

    Typing ``cron install`` again does not reset the count; removing the cron and installing it anew does.
    """
    period = slot.installed.period
    begun = floor(slot.installed.since, period)
    last = floor(max([begun, *earlier(slot)[-1:]]), period)
    seconds = int(period.total_seconds())
    return range(epoch(last) + seconds, epoch(slot.at), seconds)
