"""One slot: claim it, keep the chain, run the entries that are due, notify people of failures.

The order keeps the chain alive: its successors are in the queue before anything starts that may fail, hang or be slow.
A tick may be started by Slurm, by cron, by a loop or by the same job twice: the claim lets one of them work.
"""

from __future__ import annotations

import errno
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.crontab import chain, history
from ftsupervise.crontab.dispatch import CronSlot, work
from ftsupervise.crontab.entries import CronEntries, find, floor
from ftsupervise.crontab.history import SlotEnd
from ftsupervise.crontab.installation import CronDir, Installed, need_installed
from ftsupervise.crontab.status import earlier, findings, missed_slots, run_name
from ftsupervise.errors import Error
from ftsupervise.host.ownership import user_name
from ftsupervise.model import Job, JobState
from ftsupervise.rundir.records import as_count
from ftsupervise.truth import Health

if TYPE_CHECKING:
    from ftsupervise.findings import Finding
    from ftsupervise.scheduler import Scheduler

_PATIENCE = timedelta(seconds=10)  # a job that came second waits this long for the first one to keep the chain
_NOTIFY = 60.0  # seconds of the job that are kept for notifying people
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class CronTicked:
    """The work of one tick."""

    slot: datetime
    claimed: bool
    extended: chain.Extended | None = None
    worked: SlotEnd = field(default_factory=SlotEnd)
    notified: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()


def tick(
    cron: CronDir,
    *,
    slot: datetime | None,
    now: datetime,
    job_id: str = "",
    slurm: Callable[[Mapping[str, str]], chain.TickScheduler],
    jobs: Callable[[Mapping[str, str]], Scheduler],
    answers: Callable[[Path], bool] = Path.is_dir,
) -> CronTicked | None:
    """Do the work of the slot at ``now``; None when the cron was removed or belongs to another account.

    ``slot`` is the one this job was made for. A job that starts late does the work of the current slot, if no other has:
    a queue that is always late delays slots and loses none. Raises NotFound if nothing is installed, Error if the record
    of the install is damaged.
    """
    installed = need_installed(cron)
    if installed.removed or (installed.backend == "slurm" and installed.owner != user_name()):
        return None  # two people installed here at the same moment, and the other install won
    started = time.monotonic()
    at = floor(now, installed.period)
    at = max(slot, at) if slot is not None and slot - now < installed.period else at  # this node's clock may be behind
    full: OSError | None = None  # the file system did not say whether the slot is ours
    first = False
    try:
        first = history.claim_slot(cron, at, now, job_id, installed.backend)
    except OSError as error:
        full = error
    extended, controller = None, None
    if installed.backend == "slurm":
        patience = min(_PATIENCE, installed.period / 4).total_seconds()
        if not first and not full and history.is_ensured(cron, at, patience):
            return CronTicked(at, False)
        controller = slurm(installed.environment)
        extended = _keep(cron, installed, controller, now, at)
    queue = extended.jobs if extended is not None else None
    if full:
        first = full.errno in _FULL and _first_in_queue(installed, at, slot, job_id, queue)
    if not first:
        return CronTicked(at, False, extended, trouble=(str(full),) if full else ())
    one = CronSlot(cron, installed, at, now, job_id, queue, lambda: jobs(installed.environment), answers=answers)
    return _run_slot(one, extended, controller, started)


def _run_slot(
    slot: CronSlot, extended: chain.Extended | None, controller: chain.TickScheduler | None, started: float
) -> CronTicked:
    """Do the work of a slot that this tick has claimed and whose successors are in the queue."""
    cron, at = slot.cron, slot.at
    found = find(cron, slot.installed)
    slot, worked, failed = _work(slot, found, started)
    nodes, unkept = None, ""
    if extended is not None and controller is not None:
        if extended.trouble:
            extended = _keep(cron, slot.installed, controller, slot.clock(), at)
        nodes, unkept = _drained(slot, extended, controller), extended.trouble
        slots = tuple(f"{one:%H:%M:%S}" for one in extended.submitted)
        worked = replace(worked, drained=nodes or (), submitted=slots, cancelled=extended.cancelled)
    trouble = [*worked.trouble, *filter(None, [unkept])]
    notified = _notify(slot, found, failed or unkept, trouble, nodes)
    history.end_slot(cron, at, replace(worked, at=slot.clock(), trouble=tuple(trouble)))
    history.prune_slots(cron)
    _prune_logs(cron)
    return CronTicked(at, True, extended, worked, notified, tuple(trouble))


def _keep(
    cron: CronDir, installed: Installed, controller: chain.TickScheduler, now: datetime, at: datetime
) -> chain.Extended:
    extended = chain.extend(cron, installed, controller, now)
    if not extended.trouble:
        history.mark_ensured(cron, at)
    return extended


def _first_in_queue(
    installed: Installed, at: datetime, slot: datetime | None, job_id: str, queue: tuple[Job, ...] | None
) -> bool:
    """Return whether this job is first in the queue, which decides on a disk that takes no claim: the job made for this
    very slot, and of several the lowest.
    """
    if queue is None or slot != at or as_count(job_id) is None:
        return False
    rivals = [
        number
        for job in queue
        if job.state is JobState.RUNNING and chain.slot_of(job.comment, installed.id) == at
        if (number := as_count(job.base_id)) is not None
    ]
    return min(rivals, default=-1) == int(job_id)


def _work(slot: CronSlot, found: CronEntries, started: float) -> tuple[CronSlot, SlotEnd, str]:
    """Return the slot, its results, and the error of ours that ended the work ("" if none did)."""
    try:
        slot = _follow(slot, found)
        # an entry may run to its bound, but never into the last minute of this job, which is kept for notifying
        limit = slot.installed.limit
        left = chain.job_limit(limit).total_seconds() - (time.monotonic() - started) - _NOTIFY
        return slot, work(slot, found.entries, bound=max(1.0, min(limit.total_seconds(), left))), ""
    except Exception as error:  # an error of ours must be reported, and the chain must be extended once more
        failed = f"the tick itself failed: {type(error).__name__}: {error}"
        return slot, SlotEnd(trouble=(failed, traceback.format_exc())), failed


def _follow(slot: CronSlot, found: CronEntries) -> CronSlot:
    """Record the ends of the jobs of dropped scripts."""
    for entry in found.entries:
        try:
            newest = history.newest_begun(slot.cron, entry.key)
            if newest is None or not newest.open or not newest.start.job_comment or newest.began >= slot.now:
                continue
            scheduler = slot.jobs()
            if slot.queue is None and slot.installed.backend != "slurm":
                try:
                    slot = replace(slot, queue=scheduler.queue())
                except Error:
                    pass
            chain.follow(newest, slot.queue, scheduler, slot.clock())
        except OSError:
            continue
    return slot


def _drained(slot: CronSlot, extended: chain.Extended, controller: chain.TickScheduler) -> tuple[str, ...] | None:
    """Return the nodes that Slurm has drained by itself; None if Slurm was not asked.

    It is asked only when its controller did not answer, slots were missed, or nodes were drained at the last slot: a
    normal slot costs no further question.
    """
    if extended.chain is None:
        return None
    spares = slot.installed.spares
    before = [history.read_slot(slot.cron, at).end for at in earlier(slot)[-1:]]
    suspect = (
        extended.trouble
        or extended.chain.overdue >= spares
        or len(missed_slots(slot)) >= spares
        or any(end is not None and (end.trouble or end.drained) for end in before)
    )
    return chain.drained(controller) if suspect else None


# ---------------------------------------------------------------------------------------------------------- notify


def _notify(
    slot: CronSlot, found: CronEntries, unkept: str, trouble: list[str], nodes: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Record the findings and deliver the messages that wait. Errors of delivery are added to ``trouble``."""
    try:
        seen = findings(slot, found, unkept, nodes)
        if not any(finding.health is Health.BAD for finding in seen) and not slot.cron.alerts.is_dir():
            return ()
        return _record(slot, seen, trouble)
    except Exception as error:  # the slot is recorded to its end, whatever fails here
        trouble += [f"alerts could not be recorded: {type(error).__name__}: {error}", traceback.format_exc()]
        return ()


def _record(slot: CronSlot, seen: list[Finding], trouble: list[str]) -> tuple[str, ...]:
    from pydantic import ValidationError

    from ftsupervise.alerts.deliver import deliver
    from ftsupervise.alerts.journal import Journal
    from ftsupervise.alerts.record import record
    from ftsupervise.config.alerting import Alerts

    try:
        settings = Alerts.model_validate_json(json.dumps(slot.installed.alerts))
    except ValidationError as error:
        trouble.append(f"no alert is sent: the alerts settings have {error.error_count()} mistakes")
        return ()
    journal = Journal(slot.cron.alerts)
    recorded = record(journal, seen, settings, slot.now, run_name=run_name(slot), where=str(slot.cron.root))
    delivered = deliver([journal], settings, slot.clock(), budget=timedelta(seconds=_NOTIFY - 20))
    trouble += [f"not delivered to {message.receiver}: {why}" for message, why in delivered.failed]
    return tuple(f"{notice.reason.value}: {notice.finding.summary}" for notice in recorded.notices)


def _prune_logs(cron: CronDir) -> None:
    """Keep the logs of the last jobs that wrote any."""
    try:
        with os.scandir(cron.log) as found:
            logs = [(one.stat(follow_symlinks=False), Path(one.path)) for one in found if not one.is_dir()]
    except OSError:
        return
    logs.sort(key=lambda log: log[0].st_mtime)
    empty = [log for log in logs[:-5] if log[0].st_size == 0]
    kept = [log for log in logs if log not in empty]
    for _, path in (*empty, *kept[:-50]):
        try:
            path.unlink()
        except OSError:
            continue
