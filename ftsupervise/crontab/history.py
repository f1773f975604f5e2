"""The records of every slot and of every run of every entry. A job may be submitted twice, but no slot runs twice.

slots/20261121T090000Z/                 one slot, claimed by mkdir: claim.json, ensured (its successors are queued), end.json
runs/hourly.disk/since                  when the entry was first seen
runs/hourly.disk/20261121T090000Z/      one run, claimed by mkdir: start.json, output, end.json
runs/hourly.disk/last                   a link to the newest run

mkdir is the one operation that every shared file system gets right: exactly one caller makes the directory. A slot that was
claimed is never run again, even when its tick died at once; an entry that lost its run by that is still due (see
``entries.due``). end.json is missing while a tick or a run goes on, and for ever when the tick was killed.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from ftsupervise.crontab.entries import floor
from ftsupervise.crontab.installation import CronDir, Installed, read_stamp, stamp
from ftsupervise.host import processes
from ftsupervise.host.files import read_bounded
from ftsupervise.host.ownership import PAGE, claim_folder, make_folder
from ftsupervise.printable import printable_lines
from ftsupervise.rundir.paths import write_whole
from ftsupervise.rundir.records import Exact, as_time, read_record, write_json

KEEP = 600  # slots whose records are kept
_AHEAD = timedelta(hours=1)
_ENSURED = "ensured"
T = TypeVar("T")


def _read(kind: type[T], path: Path) -> T | None:
    """The record in ``path``; None when there is none or it is damaged as a whole."""
    try:
        return read_record(kind, path, limit=1_000_000)
    except (OSError, ValueError):
        return None


# ------------------------------------------------------------------------------------------------------------ slots


@dataclass(frozen=True)
class SlotClaim:
    """claim.json. ``late``: seconds from the slot to its tick; None where the tick died before it could say."""

    at: datetime | None = None
    late: float | None = None
    job_id: str = ""
    backend: str = ""  # of the cron that ticked
    host: str = ""
    pid: int = 0


@dataclass(frozen=True)
class SlotEnd:
    """end.json of a slot: the work that its tick has done."""

    at: datetime | None = None
    ran: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    missed: dict[str, int] = field(default_factory=dict)
    trouble: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()
    submitted: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()


@dataclass(frozen=True)
class SlotRecord:
    """A slot as its records have it. ``end``: None while its tick goes on, or when the tick was killed."""

    at: datetime
    claim: SlotClaim
    end: SlotEnd | None


def claim_slot(cron: CronDir, slot: datetime, now: datetime, job_id: str, backend: str = "") -> bool:
    """Return True for exactly one caller per slot, ever. Raises OSError when the file system cannot say."""
    folder = cron.slots / stamp(slot)
    try:
        make_folder(cron.slots, parents=True)
        claim_folder(folder)
    except FileExistsError:
        return False
    late = round((now - slot).total_seconds(), 3)
    _write_slot(folder / "claim.json", SlotClaim(now, late, job_id, backend, os.uname().nodename, os.getpid()))
    return True


def mark_ensured(cron: CronDir, slot: datetime) -> None:
    """Record for the other jobs of this slot that its successors are in the queue."""
    try:
        (cron.slots / stamp(slot) / _ENSURED).touch(mode=PAGE)
    except OSError:
        return


def is_ensured(cron: CronDir, slot: datetime, patience: float) -> bool:
    """Return whether the tick that has the slot has kept the chain; waits up to ``patience`` seconds for it."""
    until = time.monotonic() + patience
    while True:
        try:
            if _ENSURED in os.listdir(cron.slots / stamp(slot)):
                return True
        except OSError:
            return False
        if time.monotonic() >= until:
            return False
        time.sleep(min(0.25, patience))


def end_slot(cron: CronDir, slot: datetime, end: SlotEnd) -> None:
    _write_slot(cron.slots / stamp(slot) / "end.json", end)


def _write_slot(path: Path, record: SlotClaim | SlotEnd) -> None:
    try:
        write_json(path, record)
    except OSError:  # the directory is the claim; its files are only for people
        return


def read_slot(cron: CronDir, at: datetime) -> SlotRecord:
    folder = cron.slots / stamp(at)
    return SlotRecord(at, _read(SlotClaim, folder / "claim.json") or SlotClaim(), _read(SlotEnd, folder / "end.json"))


def slots(cron: CronDir, now: datetime | None = None) -> tuple[datetime, ...]:
    """The claimed slots that are kept, oldest first. With ``now``, slots more than an hour ahead are left out: a clock that
    was wrong once made them, and they would count as the newest for years. Raises OSError."""
    try:
        names = os.listdir(cron.slots)
    except FileNotFoundError:
        return ()
    found = sorted(at for at in map(read_stamp, names) if at is not None)
    return tuple(at for at in found if now is None or at <= now + _AHEAD)


def newest_slot(cron: CronDir, installed: Installed, now: datetime) -> datetime | None:
    """The last slot that the back end of ``installed`` has ticked at; None if it never did since it was installed."""
    for at in reversed(slots(cron, now)):
        if at < floor(installed.since, installed.period):
            return None
        if read_slot(cron, at).claim.backend in ("", installed.backend):
            return at
    return None


def prune_slots(cron: CronDir) -> None:
    """Remove the oldest records. An error is ignored: too many records do no harm."""
    try:
        old = slots(cron)[:-KEEP]
    except OSError:
        return
    for at in old:
        shutil.rmtree(cron.slots / stamp(at), ignore_errors=True)


# ------------------------------------------------------------------------------------------------- runs of an entry


@dataclass(frozen=True)
class RunStart:
    """start.json: when a run began, how late, and which tick or job it belongs to."""

    at: datetime | None = None
    late: float = 0.0  # seconds from the slot to the start
    host: str = ""
    pid: int = 0
    tick_job: str = ""
    missed: int = 0  # slots before this one at which it should have run
    job_comment: Exact = ""  # of the job a job script became
    output: Exact = ""  # where its output is, if not in the folder of the run
    job_id: str = ""


@dataclass(frozen=True)
class RunEnd:
    """end.json. ``outcome``: "ok", "failed", "unknown", "skipped" or "missed"; "" while no end is known."""

    at: datetime | None = None
    outcome: str = ""
    words: str = ""  # for people: "exit code 3", "ended at its bound of 10m"
    code: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class EntryRun:
    """One run of an entry as its records have it."""

    at: datetime  # its slot, or when a person started it by hand
    folder: Path
    start: RunStart
    end: RunEnd

    @property
    def began(self) -> datetime:
        return self.start.at or self.at

    @property
    def output(self) -> Path:
        return Path(self.start.output) if self.start.output else self.folder / "output"

    @property
    def open(self) -> bool:
        return not self.end.outcome


def first_seen(cron: CronDir, key: str, now: datetime) -> datetime:
    """The time at which a tick saw the entry first. If this is the first time, ``now`` is recorded."""
    path = cron.runs / key / "since"
    try:
        seen = as_time(read_bounded(path, 100).decode("ascii").strip())
    except (OSError, ValueError):
        seen = None
    if seen is not None:
        return seen
    try:
        make_folder(path.parent, parents=True)
        write_whole(path, now.isoformat() + "\n")
    except OSError:
        pass
    return now


def claim_run(cron: CronDir, key: str, at: datetime, start: RunStart) -> Path | None:
    """The directory of a new run, with its start.json in it; None if this run exists. Raises OSError.

    Both appear at once: a tick that is killed here must not leave a run without the name of its tick.
    """
    folder = cron.runs / key / stamp(at)
    fresh = folder.parent / f".claim-{os.uname().nodename}-{os.getpid()}-{stamp(at)}"
    if folder.exists():
        return None
    make_folder(fresh, parents=True)
    try:
        write_start(fresh, start)
        os.rename(fresh, folder)  # does not replace a directory that has something in it
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return None
        raise
    _point_to(folder)
    return folder


def _point_to(folder: Path) -> None:
    temp = folder.parent / f".last-{os.uname().nodename}-{os.getpid()}"
    try:
        temp.unlink(missing_ok=True)
        temp.symlink_to(folder.name)
        temp.replace(folder.parent / "last")
    except OSError:  # a convenience for people
        return


def write_start(folder: Path, start: RunStart) -> None:
    """Write start.json. Raises OSError."""
    write_json(folder / "start.json", start)


def write_end(folder: Path, end: RunEnd) -> None:
    """Write end.json. Raises OSError."""
    write_json(folder / "end.json", end)


def runs(cron: CronDir, key: str, *, most: int = 1000) -> tuple[EntryRun, ...]:
    """The newest ``most`` runs of an entry, newest first. Raises OSError; () when it never ran."""
    return tuple(_run(cron, key, at) for at in _stamps(cron.runs / key)[:most])


def newest_begun(cron: CronDir, key: str) -> EntryRun | None:
    """Return the newest run that was started (not skipped or missed): it may still go on."""
    found = (_run(cron, key, at) for at in _stamps(cron.runs / key))
    return next((run for run in found if run.end.outcome not in ("skipped", "missed")), None)


def _run(cron: CronDir, key: str, at: datetime) -> EntryRun:
    folder = cron.runs / key / stamp(at)
    start, end = _read(RunStart, folder / "start.json"), _read(RunEnd, folder / "end.json")
    return EntryRun(at, folder, start or RunStart(), end or RunEnd())


def keys(cron: CronDir) -> tuple[str, ...]:
    """Every entry that has runs, including entries whose file was removed."""
    try:
        return tuple(sorted(name for name in os.listdir(cron.runs) if not name.startswith(".")))
    except OSError:
        return ()


def prune_runs(cron: CronDir, key: str, keep: int) -> None:
    """Remove all but the newest ``keep`` runs. A run without an end is kept a while longer. Errors are ignored."""
    try:
        old = _stamps(cron.runs / key)[keep:]
    except OSError:
        return
    for left in (cron.runs / key).glob(".claim-*"):
        if old and left.name[-len(stamp(old[0])) :] <= stamp(old[0]):
            shutil.rmtree(left, ignore_errors=True)
    for index, at in enumerate(old):
        folder = cron.runs / key / stamp(at)
        if index >= keep or (folder / "end.json").exists():
            shutil.rmtree(folder, ignore_errors=True)


def tail(path: Path, *, lines: int = 15, most: int = 4000) -> str:
    """Return the end of an output file, harmless to print; "" if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - most))
            text = file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(printable_lines(text).splitlines()[-lines:])


def lost(run: EntryRun, now: datetime, limit: timedelta, ticks: frozenset[str] | None, asked: datetime) -> bool:
    """Return whether it is an open run of an executable whose tick was killed.

    ``ticks``: ids of the jobs that lived when ``asked``, None when Slurm could not be asked.
    """
    start = run.start
    if not run.open or start.job_comment or run.began >= asked:
        return False
    if now - run.began > limit + timedelta(minutes=2):
        return True
    if start.tick_job:
        return ticks is not None and start.tick_job not in ticks
    if start.host == os.uname().nodename and start.pid:
        return processes.identity(start.pid) is None
    return False


def _stamps(folder: Path) -> list[datetime]:
    """Return the time stamps among the names, newest first."""
    try:
        with os.scandir(folder) as found:
            names = [one.name for one in found if one.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted((at for at in map(read_stamp, names) if at is not None), reverse=True)
