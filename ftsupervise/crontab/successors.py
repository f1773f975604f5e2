"""Which jobs the chain lacks and which it has twice: pure, from one look at the queue.

ftsupervise-cron:3f9a1c20:slot:1795252200                      a tick of the chain 3f9a1c20
ftsupervise-cron:3f9a1c20:entry:hourly.disk:20261121T090000Z   a job script it submitted
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from ftsupervise.crontab.schedule import EPOCH, floor, slots_after
from ftsupervise.model import Job, JobState
from ftsupervise.rundir.records import as_count
from ftsupervise.scheduler.parse import is_held

MARK = "ftsupervise-cron"
_OVERDUE = 4  # times the spares: so many jobs that wait beyond their slot are enough


def slot_comment(chain: str, slot: datetime) -> str:
    return f"{MARK}:{chain}:slot:{epoch(slot)}"


def entry_comment(chain: str, entry: str, stamp: str) -> str:
    return f"{MARK}:{chain}:entry:{entry}:{stamp}"


def epoch(slot: datetime) -> int:
    return (slot - EPOCH) // timedelta(seconds=1)


def slot_of(comment: str, chain: str) -> datetime | None:
    """The slot a job of ``chain`` is for; None if it is none of its ticks."""
    text = comment.removeprefix(f"{MARK}:{chain}:slot:")
    seconds = as_count(text) if text != comment and len(text) <= 11 else None
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)


@dataclass(frozen=True)
class Chain:
    """What the queue says about the chain, and what it needs."""

    submit: tuple[datetime, ...] = ()  # slots without a job
    cancel: tuple[str, ...] = ()  # jobs that are too many
    ahead: tuple[datetime, ...] = ()  # slots to come that have a job
    overdue: int = 0  # jobs that wait although their slot has come
    running: int = 0
    held: tuple[str, ...] = ()  # jobs somebody holds: they do not count

    @property
    def alive(self) -> bool:
        """Something in the queue will still tick."""
        return bool(self.ahead or self.overdue or self.running)


def chain(jobs: Iterable[Job], name: str, now: datetime, period: timedelta, spares: int) -> Chain:
    """The chain ``name`` at ``now``. Of several pending jobs for one slot the one with the lowest id stays."""
    pending: dict[datetime, list[int]] = {}
    held: list[str] = []
    running = overdue = 0
    for job in jobs:
        slot = slot_of(job.comment, name)
        if slot is None:
            continue
        if not job.state.waiting:
            running += job.state in (JobState.RUNNING, JobState.CONFIGURING)
        elif job.state is not JobState.PENDING or is_held(job.reason):
            held.append(job.base_id)
        elif (number := as_count(job.base_id)) is not None:
            pending.setdefault(slot, []).append(number)
    cancel: list[int] = []
    ahead: list[datetime] = []
    for slot, ids in sorted(pending.items()):
        lowest, *more = sorted(ids)
        cancel += more
        if slot <= now:
            overdue += 1
        elif floor(slot, period) != slot:
            cancel.append(lowest)  # left from another period
        else:
            ahead.append(slot)
    wanted = slots_after(now, period, spares) if overdue < spares * _OVERDUE else ()
    return Chain(
        submit=tuple(slot for slot in wanted if slot not in ahead),
        cancel=tuple(str(number) for number in sorted(cancel)),
        ahead=tuple(ahead),
        overdue=overdue,
        running=running,
        held=tuple(held),
    )
