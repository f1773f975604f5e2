"""Slots on the wall clock, and which entries are due at one. Pure: time comes in, nothing is looked up.

A slot is a multiple of the period since the epoch, so it has a name that every node agrees on, and waiting in a queue
moves nothing. Five-field lines follow Debian's cron in one time zone: a time that the change to summer time skips runs
right after it, a time that comes twice runs the first time; ``*`` in hours or minutes runs by elapsed time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
TICK = "@tick"  # every slot, whatever the period is
_MOST = 1000  # missed slots that are counted; more are "more"


def floor(now: datetime, period: timedelta) -> datetime:
    """The newest slot that is not after ``now``."""
    return EPOCH + (now - EPOCH) // period * period


def ceiling(at: datetime, period: timedelta) -> datetime:
    """The first slot that is not before ``at``."""
    return EPOCH - (EPOCH - at) // period * period


def slots_after(now: datetime, period: timedelta, count: int) -> tuple[datetime, ...]:
    """The next ``count`` slots after ``now``."""
    first = floor(now, period)
    return tuple(first + period * (n + 1) for n in range(count))


@dataclass(frozen=True)
class Schedule:
    """When something is due: five fields (or a nickname) in a time zone; ``@tick`` is every slot."""

    text: str
    zone: tzinfo

    def next_after(self, after: datetime, period: timedelta) -> datetime | None:
        """The first time after ``after``, in UTC; None if there is none within 50 years. ``period`` is for @tick."""
        if self.text == TICK:
            return slots_after(after, period, 1)[0]
        from cronsim import CronSim

        simulated = CronSim(five_fields(self.text), after.astimezone(self.zone))
        for _ in range(1000):  # in a repeated hour it may name a time that has passed
            try:
                found = next(simulated).astimezone(timezone.utc)
            except StopIteration:
                return None
            if found > after:
                return found
        return None


def five_fields(text: str) -> str:
    """ "@daily" and "0 0 * * *" alike as five fields. Raises ValueError for what is neither."""
    text = NICKNAMES.get(text, text)
    if text.startswith("@"):
        raise ValueError(f"unknown nickname {text!r}; there are {', '.join([*NICKNAMES, TICK])}")
    if len(text.split()) != 5:
        raise ValueError('expected five fields (minute hour day-of-month month day-of-week), such as "*/15 * * * *"')
    return text


def check(text: str) -> None:
    """Raises ValueError with a sentence unless ``text`` is a schedule."""
    if text == TICK:
        return
    from cronsim import CronSim, CronSimError

    try:
        CronSim(five_fields(text), EPOCH)
    except CronSimError as error:
        raise ValueError(f"{str(error).lower()} in {text!r}") from None


@dataclass(frozen=True)
class Due:
    """What one entry is owed at one slot."""

    run: bool = False
    missed: tuple[datetime, ...] = ()  # earlier slots at which it should have run and did not


def due(schedule: Schedule, slot: datetime, period: timedelta, last: datetime, *, once: bool) -> Due:
    """Is the entry due at ``slot``, and what did it miss since ``last`` (when it last ran, or was first seen)?

    An entry has one run a slot, however many of its times lie between this slot and the one before. ``once``: what was
    missed is made good by one run.
    """
    window = slot - period
    on_time = schedule.next_after(max(last, window), period)
    now = on_time is not None and on_time <= slot
    missed: list[datetime] = []
    at = last
    while len(missed) < _MOST:
        found = schedule.next_after(at, period)
        if found is None or found > window:
            break
        missed.append(ceiling(found, period))
        at = missed[-1]  # the other times of the same slot are the same run
    return Due(run=now or (once and bool(missed)), missed=tuple(missed))
