"""Run what is due at one slot: executables here, all at once; job scripts handed to the scheduler.

No entry runs beside itself: while its last run goes on, the new one is skipped, and written down as skipped.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from ftsupervise.crontab import execute, handover, history
from ftsupervise.crontab.entries import Entry
from ftsupervise.crontab.environment import ENV_DIR, ENV_ENTRY, ENV_SLOT
from ftsupervise.crontab.history import Ran
from ftsupervise.crontab.parts import Kind
from ftsupervise.crontab.place import CronDir, Installed, stamp
from ftsupervise.crontab.schedule import Due, due
from ftsupervise.crontab.successors import entry_comment
from ftsupervise.errors import Error, SchedulerUnavailable
from ftsupervise.model import Job, JobState
from ftsupervise.units import show_duration


@dataclass(frozen=True)
class Slot:
    """One slot at work. ``queue`` is what Slurm said about the owner's jobs; None when nobody could ask."""

    cron: CronDir
    installed: Installed
    at: datetime
    now: datetime
    job_id: str
    queue: tuple[Job, ...] | None
    jobs: Callable[[], handover.Jobs]
    started: float = field(default_factory=time.monotonic)

    def clock(self) -> datetime:
        return self.now + timedelta(seconds=time.monotonic() - self.started)

    def lost(self, ran: Ran) -> bool:
        return history.lost(ran, self.clock(), self.installed.limit, self.living, self.now)

    @property
    def living(self) -> frozenset[str] | None:
        """Ids of jobs that run or may yet run; None when nobody could ask."""
        if self.queue is None:
            return None
        return frozenset(job.raw_id or job.base_id for job in self.queue if job.state is not JobState.COMPLETING)


@dataclass(frozen=True)
class Worked:
    ran: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    missed: dict[str, int] = field(default_factory=dict)
    trouble: tuple[str, ...] = ()


def work(slot: Slot, entries: tuple[Entry, ...], *, bound: float) -> Worked:
    """Everything that is due, each for at most ``bound`` seconds. Never raises for one entry."""
    ran: list[str] = []
    skipped: list[str] = []
    missed: dict[str, int] = {}
    trouble: list[str] = []
    tasks: list[execute.Task] = []
    for entry in entries:
        try:
            owed, newest = _owed(slot, entry)
            if owed.missed:
                missed[entry.name] = len(owed.missed)
            if not owed.run:
                if owed.missed:
                    _write_missed(slot, entry, owed)
                continue
            why = busy(slot, newest)
            if why:
                skipped.append(entry.name)
                _write_skipped(slot, entry, why)
                continue
            task = _begin(slot, entry, len(owed.missed))
        except OSError as error:
            trouble.append(f"{entry.name}: {error.strerror or error}")
            continue
        ran.append(entry.name)
        if task is not None:
            tasks.append(task)
    if tasks:
        by_folder = {task.key: task for task in tasks}
        execute.run_all(
            tasks,
            bound=bound,
            output_limit=slot.installed.output,
            on_end=lambda ended: write_ended(slot, by_folder[ended.key], ended, trouble),
        )
    return Worked(tuple(ran), tuple(skipped), missed, tuple(trouble))


def _owed(slot: Slot, entry: Entry) -> tuple[Due, Ran | None]:
    """What the entry is owed now, and its newest run that was really begun."""
    newest = history.runs(slot.cron, entry.key, most=1)
    period = slot.installed.period
    seen = newest[0].at if newest else history.first_seen(slot.cron, entry.key, slot.at - period)
    owed = due(entry.schedule, slot.at, period, min(seen, slot.at), once=slot.installed.missed == "once")
    return owed, history.newest_begun(slot.cron, entry.key)


def busy(slot: Slot, newest: Ran | None) -> str:
    """Why an entry whose newest run is ``newest`` must not start now; "" if it may."""
    if newest is None or not newest.open:
        return ""
    if newest.job_comment:
        if slot.queue is None:
            return f"nobody could ask whether its job {newest.job_id} still runs"
        job = handover.living(newest, slot.queue)
        if job is not None:
            return f"its job {job.id} is {job.state.value}"
        return f"nobody could say whether its job {newest.job_id} has ended"  # whoever could has written it down
    if slot.lost(newest):
        return ""
    began = newest.started or newest.at
    return f"it still runs since {began:%H:%M:%S} UTC on {newest.host or 'another host'}"


# ------------------------------------------------------------------------------------------------------- beginning


def _begin(slot: Slot, entry: Entry, missed: int) -> execute.Task | None:
    """Claim the run and start it: a task to be executed, or None for a job script, which is submitted here."""
    comment = entry_comment(slot.installed.id, entry.key, stamp(slot.at)) if entry.kind is Kind.JOB else ""
    try:
        folder = history.claim(slot.cron, entry.key, slot.at, start_record(slot, missed, job_comment=comment))
    except OSError:  # a full disk, which the disk watchdog among the entries is there to tell of
        folder = Path(tempfile.mkdtemp(prefix="ftsupervise-cron-"))
    if folder is None:
        return None
    if entry.kind is Kind.JOB:
        hand_over(slot, entry, folder, missed)
        return None
    return task_of(entry, slot.cron, slot.installed, folder, slot.at)


def task_of(entry: Entry, cron: CronDir, installed: Installed, folder: Path, at: datetime) -> execute.Task:
    """What executes an entry, with the environment that was recorded at install."""
    env = {
        **installed.whole_environment,
        **entry.env,
        ENV_SLOT: at.isoformat(),
        ENV_ENTRY: entry.name,
        ENV_DIR: str(cron.root),
    }
    home = env.get("HOME", "/")
    return execute.Task(entry.key, entry.argv, env, folder, home if Path(home).is_dir() else "/", entry.stdin)


def hand_over(slot: Slot, entry: Entry, folder: Path, missed: int) -> None:
    """Submit a dropped job script; what went wrong is the end of its run."""
    assert entry.path is not None
    comment = entry_comment(slot.installed.id, entry.key, stamp(slot.at))
    env = {**slot.installed.environment, ENV_SLOT: slot.at.isoformat(), ENV_ENTRY: entry.name}
    try:
        prepared = handover.prepare(
            handover.read_script(entry.path, slot.installed),
            name=entry.path.name,
            folder=folder,
            home=env.get("HOME", "/"),
            comment=comment,
            options=slot.installed.job_options,
            secrets=slot.cron.secrets if slot.installed.secret else None,
        )
        job_id = handover.submit(prepared, folder, comment, env, slot.jobs())
        more = start_record(slot, missed, job_comment=comment, output=prepared.output, job_id=job_id)
        history.write_start(folder, more)
    except SchedulerUnavailable:
        return  # it may be in the queue all the same: its comment is looked for at the next tick
    except Error as error:
        history.write_end(folder, slot.clock(), "failed", error.message)
    except (ValueError, OSError) as error:
        history.write_end(folder, slot.clock(), "failed", getattr(error, "strerror", None) or str(error))


def start_record(slot: Slot, missed: int, **more: str) -> dict[str, object]:
    """What start.json says: when, how late, and whose run it is."""
    now = slot.clock()
    return {
        "at": now.isoformat(),
        "late": round((now - slot.at).total_seconds(), 3),
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "tick_job": slot.job_id,
        "missed": missed,
        **more,
    }


# ---------------------------------------------------------------------------------------------------------- ending


def write_ended(slot: Slot, task: execute.Task, ended: execute.Ended, trouble: list[str]) -> None:
    outcome = "ok" if ended.good else "failed"
    try:
        history.write_end(task.folder, slot.clock(), outcome, ended.words, code=ended.code, seconds=ended.seconds)
    except OSError as error:
        trouble.append(f"{task.key}: {ended.words}; its record cannot be written: {error.strerror}")
    history.prune(slot.cron, task.key, slot.installed.keep)


def _write_skipped(slot: Slot, entry: Entry, why: str) -> None:
    folder = history.claim(slot.cron, entry.key, slot.at, start_record(slot, 0))
    if folder is not None:
        history.write_end(folder, slot.clock(), "skipped", f"skipped: {why}")


def _write_missed(slot: Slot, entry: Entry, owed: Due) -> None:
    folder = history.claim(slot.cron, entry.key, owed.missed[-1], start_record(slot, 0))
    if folder is not None:
        times = f"{len(owed.missed)} slots" if len(owed.missed) > 1 else "the slot"
        span = show_duration((slot.at - owed.missed[0]).total_seconds())
        history.write_end(folder, slot.clock(), "missed", f"{times} of the last {span} missed, and not made good")
