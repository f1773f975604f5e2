"""One slot: claim it, keep the chain, run what is due, tell what failed.

The order is what keeps the chain alive: nothing that may fail, hang or be slow comes before its successors are in the
queue. Whatever starts a tick (Slurm, cron, a loop, the same job twice), the claim lets one of them work.
"""

from __future__ import annotations

import errno
import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.crontab import chain, claims, findings, handover, history
from ftsupervise.crontab.entries import Found, find
from ftsupervise.crontab.place import CronDir, Installed, need_installed, user_name
from ftsupervise.crontab.schedule import floor
from ftsupervise.crontab.successors import epoch, slot_of
from ftsupervise.crontab.work import Slot, Worked, work
from ftsupervise.errors import Error
from ftsupervise.model import Job, JobState
from ftsupervise.rundir.records import as_count

if TYPE_CHECKING:
    from ftsupervise.findings import Finding
    from ftsupervise.scheduler.slurm import Slurm

_PATIENCE = timedelta(seconds=10)  # how long a job that came second waits to see the first keep the chain
_CUT_OFF = 3  # ticks in a row that never ended are no accident: too little memory, a broken installation
_LAST_WORDS = 60.0  # seconds of the job that are kept for telling people
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class Ticked:
    """What one tick did."""

    slot: datetime
    claimed: bool
    extended: chain.Extended | None = None
    worked: Worked = field(default_factory=Worked)
    told: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()


def tick(
    cron: CronDir,
    *,
    slot: datetime | None,
    now: datetime,
    job_id: str = "",
    slurm: Callable[[Mapping[str, str]], Slurm],
    jobs: Callable[[Mapping[str, str]], handover.Jobs],
) -> Ticked | None:
    """Do what is to be done at ``now``; None when the cron was removed or is somebody else's.

    ``slot`` is the one this job was made for. A job that comes late does the work of the slot that is now, if nobody
    has: so a queue that is always late costs lateness, not slots. Raises NotFound if nothing is installed, Error if
    what install wrote is damaged.
    """
    installed = need_installed(cron)
    if installed.removed or (installed.backend == "slurm" and installed.owner != user_name()):
        return None  # of two people who installed here at the same moment, one has it
    started = time.monotonic()
    at = floor(now, installed.period)
    at = max(slot, at) if slot is not None and slot - now < installed.period else at  # this node's clock may be behind
    first, full = _claim(cron, at, now, job_id, installed.backend)
    extended = None
    if installed.backend == "slurm":
        if not first and not full and claims.is_ensured(cron, at, _patience(installed)):
            return Ticked(at, False)
        controller = slurm(installed.environment)
        extended = _keep(cron, installed, controller, now, at)
    queue = extended.jobs if extended is not None else None
    if full:
        first = full.errno in _FULL and _first_in_queue(installed, at, slot, job_id, queue)
    if not first:
        return Ticked(at, False, extended, trouble=(str(full),) if full else ())
    found = find(cron, installed)
    one = Slot(cron, installed, at, now, job_id, queue, lambda: jobs(installed.environment))
    one, worked = _work(one, found, started)
    if extended is not None and extended.trouble:
        extended = _keep(cron, installed, controller, one.clock(), at)
    trouble = [*worked.trouble, *([extended.trouble] if extended is not None and extended.trouble else [])]
    nodes = _drained(one, extended, controller) if extended is not None else None
    told = _tell(one, found, extended, trouble, nodes)
    _close(one, worked, extended, trouble, nodes)
    return Ticked(at, True, extended, worked, told, tuple(trouble))


def _drained(slot: Slot, extended: chain.Extended, controller: Slurm) -> tuple[str, ...] | None:
    """Nodes that Slurm has drained by itself. Asked only when its controller was away, slots did not come, or some were
    drained when it was asked last: a slot that comes as it should costs no further question. None: not asked."""
    before = [claims.read_slot(slot.cron, at) for at in _earlier(slot)[-1:]]
    waits = extended.chain is not None and extended.chain.overdue >= slot.installed.spares
    odd = bool(extended.trouble) or waits or len(_missed(slot)) >= slot.installed.spares
    if not (odd or any(one.trouble or one.drained for one in before)) or extended.blind:
        return None
    return chain.drained(controller)


def _claim(cron: CronDir, at: datetime, now: datetime, job_id: str, backend: str) -> tuple[bool, OSError | None]:
    """Whether the slot is ours; or why the file system could not say."""
    try:
        return claims.claim(cron, at, now, job_id, backend), None
    except OSError as error:
        return False, error


def _patience(installed: Installed) -> float:
    return min(_PATIENCE, installed.period / 4).total_seconds()


def _keep(cron: CronDir, installed: Installed, controller: Slurm, now: datetime, at: datetime) -> chain.Extended:
    extended = chain.extend(cron, installed, controller, now)
    if not extended.trouble:
        claims.mark_ensured(cron, at)
    return extended


def _close(
    slot: Slot, worked: Worked, extended: chain.Extended | None, trouble: list[str], nodes: tuple[str, ...] | None
) -> None:
    """Write down what the tick did, and forget the oldest of what is written down."""
    record = {
        "at": slot.clock().isoformat(),
        "ran": worked.ran,
        "skipped": worked.skipped,
        "missed": worked.missed,
        "trouble": trouble,
        "drained": nodes or (),
        "submitted": [f"{s:%H:%M:%S}" for s in (extended.submitted if extended else ())],
        "cancelled": extended.cancelled if extended else (),
    }
    claims.close(slot.cron, slot.at, record)
    claims.prune(slot.cron)
    _prune_logs(slot.cron)


def _work(slot: Slot, found: Found, started: float) -> tuple[Slot, Worked]:
    try:
        slot = _follow(slot, found)
        return slot, work(slot, found.entries, bound=_bound(slot.installed, time.monotonic() - started))
    except Exception as error:  # a mistake of ours must be told, and the chain be looked after once more
        return slot, Worked(
            trouble=(f"the tick itself failed: {type(error).__name__}: {error}", traceback.format_exc())
        )


def _first_in_queue(
    installed: Installed, at: datetime, slot: datetime | None, job_id: str, queue: tuple[Job, ...] | None
) -> bool:
    """On a disk that takes no claim the queue decides: the job made for this very slot, and of several the lowest."""
    if queue is None or slot != at or as_count(job_id) is None:
        return False
    rivals = [
        number
        for job in queue
        if job.state is JobState.RUNNING and slot_of(job.comment, installed.id) == at
        if (number := as_count(job.base_id)) is not None
    ]
    return min(rivals, default=-1) == int(job_id)


def _bound(installed: Installed, spent: float) -> float:
    """Seconds an entry may run: its bound, but never into the end of this job, whose last minute is for telling."""
    left = chain.job_limit(installed.limit).total_seconds() - spent - _LAST_WORDS
    return max(1.0, min(installed.limit.total_seconds(), left))


def _follow(slot: Slot, found: Found) -> Slot:
    """Write down the ends of jobs that dropped scripts became."""
    for entry in found.entries:
        try:
            newest = history.newest_begun(slot.cron, entry.key)
            if newest is None or not newest.open or not newest.job_comment or (newest.started or newest.at) >= slot.now:
                continue
            scheduler = slot.jobs()
            if slot.queue is None and slot.installed.backend != "slurm":
                slot = Slot(slot.cron, slot.installed, slot.at, slot.now, slot.job_id, _ask(scheduler), slot.jobs)
            handover.follow(newest, slot.queue, scheduler, slot.clock())
        except OSError:
            continue
    return slot


def _ask(scheduler: handover.Jobs) -> tuple[Job, ...] | None:
    try:
        return scheduler.queue()
    except Error:
        return None


# ---------------------------------------------------------------------------------------------------------- telling


def run_name(cron: CronDir, installed: Installed) -> str:
    """What alerts call this cron."""
    from ftsupervise.crontab.place import default_directory

    return "cron" if cron.root == default_directory(installed.environment) else f"cron {cron.root}"


def look(
    slot: Slot,
    found: Found,
    extended: chain.Extended | None,
    trouble: list[str],
    nodes: tuple[str, ...] | None = None,
) -> list[Finding]:
    """What is to be said about every entry and about the chain, from what is written down."""
    run = run_name(slot.cron, slot.installed)
    names = {entry.key: entry.name for entry in found.entries}
    out = []
    for key in dict.fromkeys([*names, *history.keys(slot.cron)]):
        try:
            newest = history.runs(slot.cron, key, most=10)
        except OSError:
            continue
        lost = frozenset(ran.at for ran in newest if slot.lost(ran))
        failed = next((ran for ran in newest if ran.outcome == "failed"), None)
        tail = history.tail(failed.output) if failed is not None else ""
        name = names.get(key, key.replace(".", "/", 1))
        looked = findings.Looked(name, newest, lost, tail, gone=key not in names)
        finding = findings.entry_finding(looked, run, slot.cron.root, slot.now)
        out += [finding] if finding is not None else []
    out.append(
        findings.passed_finding([(p.name, p.why) for p in found.passed if p.wanted], run, slot.cron.root, slot.now)
    )
    missed = _missed(slot)
    out.append(
        findings.chain_finding(
            run,
            slot.cron.root,
            slot.now,
            trouble=_trouble(slot, extended, trouble),
            missed=missed if len(missed) >= slot.installed.spares else (),
            late=(slot.now - slot.at).total_seconds(),
            period=slot.installed.period.total_seconds(),
        )
    )
    if nodes is not None:
        out.append(findings.drained_finding(nodes, chain.drained_words(nodes), run, slot.now))
    return out


def _trouble(slot: Slot, extended: chain.Extended | None, trouble: list[str]) -> str:
    """What is wrong with the keeping of time itself, the worst first; "" when nothing is."""
    for words in trouble:
        if words.startswith("the tick itself failed") or (extended is not None and words == extended.trouble):
            return words
    before = [claims.read_slot(slot.cron, at) for at in _earlier(slot)[-_CUT_OFF:]]
    living = slot.living
    cut = [one for one in before if not one.ended and not (one.job_id and (living is None or one.job_id in living))]
    if len(cut) == _CUT_OFF:
        return f"the last {_CUT_OFF} ticks were cut off before their end: see {slot.cron.log}"
    return ""


def _earlier(slot: Slot) -> list[datetime]:
    return [at for at in claims.claimed(slot.cron, slot.now) if at < slot.at]


def _missed(slot: Slot) -> range:
    """Slots without a tick between this one and the one before it, or the install, as seconds since the epoch.

    Typing ``cron install`` again makes none of them good: only taking the cron away, and installing it anew, begins afresh.
    """
    period = slot.installed.period
    begun = floor(slot.installed.since, period)
    last = floor(max([begun, *_earlier(slot)[-1:]]), period)
    seconds = int(period.total_seconds())
    return range(epoch(last) + seconds, epoch(slot.at), seconds)


def _tell(
    slot: Slot, found: Found, extended: chain.Extended | None, trouble: list[str], nodes: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Record what was found and deliver what waits. Why it could not be told is added to ``trouble``."""
    try:
        seen = look(slot, found, extended, trouble, nodes)
        if not findings.worth_telling(seen) and not slot.cron.alerts.is_dir():
            return ()
        return _record(slot, seen, trouble)
    except Exception as error:  # whatever it is, the slot is written down to its end
        trouble += [f"nobody could be told: {type(error).__name__}: {error}", traceback.format_exc()]
        return ()


def _record(slot: Slot, seen: list[Finding], trouble: list[str]) -> tuple[str, ...]:
    from pydantic import ValidationError

    from ftsupervise.alerts.deliver import deliver
    from ftsupervise.alerts.journal import Journal
    from ftsupervise.alerts.record import record
    from ftsupervise.config.alerting import Alerts

    try:
        settings = Alerts.model_validate_json(json.dumps(slot.installed.alerts))
    except ValidationError as error:
        trouble.append(f"nobody can be told: the alerts settings cannot be read ({error.error_count()} mistakes)")
        return ()
    journal = Journal(slot.cron.alerts)
    name = run_name(slot.cron, slot.installed)
    recorded = record(journal, seen, settings, slot.now, run_name=name, where=str(slot.cron.root))
    delivered = deliver([journal], settings, slot.clock(), budget=timedelta(seconds=_LAST_WORDS - 20))
    trouble += [f"not delivered to {message.receiver}: {why}" for message, why in delivered.failed]
    return tuple(f"{notice.reason.value}: {notice.finding.summary}" for notice in recorded.notices)


def _prune_logs(cron: CronDir) -> None:
    """Keep the words of the last jobs that had any."""
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


def own_job(env: Mapping[str, str]) -> str:
    """The id of the job this tick runs in; "" outside Slurm."""
    return env.get("SLURM_JOB_ID", "")
