"""Slots and schedules against a fake clock: no drift, summer time as cron has it, missed slots counted."""

from __future__ import annotations

import random
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from ftsupervise.crontab.chain import chain_in, slot_comment, slot_of
from ftsupervise.crontab.entries import Schedule, ceiling, check, due, floor, slots_after
from ftsupervise.model import Job, JobState

UTC = timezone.utc
BERLIN = ZoneInfo("Europe/Berlin")
MINUTES5 = timedelta(minutes=5)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def every_slot(schedule: Schedule, first: datetime, last: datetime, period: timedelta) -> list[datetime]:
    """The slots at which an entry runs if every slot has its tick."""
    ran: list[datetime] = []
    at, seen = floor(first, period), floor(first, period) - period
    while at <= last:
        if due(schedule, at, period, ran[-1] if ran else seen).run:
            ran.append(at)
        at += period
    return ran


def test_a_thousand_slots_with_ticks_that_come_late_drift_by_nothing() -> None:
    """Each tick starts up to nearly a period late, submits what the chain lacks, and is gone."""
    period, spares = timedelta(seconds=300), 3
    luck = random.Random(5)
    start = utc("2026-03-28T23:00:07")
    pending = list(slots_after(start, period, spares))
    claimed: list[datetime] = []
    while len(claimed) < 1000:
        slot = pending.pop(0)
        now = slot + timedelta(seconds=luck.random() * 299)
        claimed.append(max(slot, floor(now, period)))
        jobs = [
            Job(str(n), str(n), "ftsupervise-cron", "me", JobState.PENDING, comment=slot_comment("ab", at))
            for n, at in enumerate(pending)
        ]
        plan = chain_in(jobs, "ab", now, period, spares)
        assert len(plan.submit) == 1  # one sbatch a slot
        pending = sorted([*pending, *plan.submit])
    assert claimed == [floor(start, period) + period * (n + 1) for n in range(1000)]


def test_a_thousand_hourly_runs_stay_on_the_hour() -> None:
    schedule = Schedule("0 * * * *", BERLIN)
    ran = every_slot(schedule, utc("2026-03-01T00:00:00"), utc("2026-03-01T00:00:00") + timedelta(hours=999), MINUTES5)
    assert len(ran) == 1000
    assert {at.minute for at in ran} == {0}
    assert {b - a for a, b in pairwise(ran)} == {timedelta(hours=1)}


def test_the_hour_that_summer_time_skips_runs_right_after_it() -> None:
    ran = every_slot(Schedule("30 2 * * *", BERLIN), utc("2026-03-28T00:00:00"), utc("2026-03-30T12:00:00"), MINUTES5)
    assert [at.astimezone(BERLIN).strftime("%d %H:%M") for at in ran] == ["28 02:30", "29 03:00", "30 02:30"]


def test_the_hour_that_comes_twice_runs_once() -> None:
    ran = every_slot(Schedule("30 2 * * *", BERLIN), utc("2026-10-24T00:00:00"), utc("2026-10-26T12:00:00"), MINUTES5)
    assert [at.astimezone(BERLIN).strftime("%d %H:%M %Z") for at in ran] == [
        "24 02:30 CEST",
        "25 02:30 CEST",
        "26 02:30 CET",
    ]


def test_a_quarter_hourly_entry_runs_by_elapsed_time_through_both_changes() -> None:
    for day in ("2026-03-29", "2026-10-25"):
        ran = every_slot(Schedule("*/15 * * * *", BERLIN), utc(f"{day}T00:00:00"), utc(f"{day}T06:00:00"), MINUTES5)
        assert len(ran) == 25


def test_an_entry_that_is_due_more_often_than_slots_come_runs_once_a_slot() -> None:
    ran = every_slot(Schedule("* * * * *", UTC), utc("2026-01-01T00:00:00"), utc("2026-01-01T01:00:00"), MINUTES5)
    assert len(ran) == 13
    last = due(Schedule("* * * * *", UTC), ran[-1], MINUTES5, ran[-2])
    assert not last.missed


def test_tick_is_every_slot_whatever_the_period() -> None:
    for period in (timedelta(seconds=10), timedelta(hours=1)):
        ran = every_slot(Schedule("@tick", UTC), utc("2026-01-01T00:00:00"), utc("2026-01-01T05:00:00"), period)
        assert len(ran) == timedelta(hours=5) // period + 1


def test_missed_slots_are_made_good_by_one_run_and_counted() -> None:
    hourly = Schedule("0 * * * *", UTC)
    now = utc("2026-01-01T05:10:00")
    owed = due(hourly, now, MINUTES5, utc("2026-01-01T01:00:00"))
    assert owed.run
    assert [at.hour for at in owed.missed] == [2, 3, 4, 5]


def test_an_entry_on_time_runs_on_time_even_if_it_missed_some() -> None:
    owed = due(Schedule("0 * * * *", UTC), utc("2026-01-01T05:00:00"), MINUTES5, utc("2026-01-01T02:00:00"))
    assert owed.run
    assert len(owed.missed) == 2


def test_what_somebody_ran_by_hand_after_the_hour_is_not_run_again_for_that_hour() -> None:
    owed = due(Schedule("0 * * * *", UTC), utc("2026-01-01T05:00:00"), MINUTES5, utc("2026-01-01T05:00:20"))
    assert owed == due(Schedule("0 * * * *", UTC), utc("2026-01-01T05:05:00"), MINUTES5, utc("2026-01-01T05:00:20"))
    assert not owed.run


def test_a_year_without_ticks_is_counted_in_bounded_time() -> None:
    owed = due(Schedule("* * * * *", UTC), utc("2026-12-31T00:00:00"), MINUTES5, utc("2026-01-01T00:00:00"))
    assert owed.run
    assert len(owed.missed) == 1000


def test_a_day_that_never_comes_is_no_schedule() -> None:
    with pytest.raises(ValueError, match="day"):
        check("0 0 30 2 *")


@pytest.mark.parametrize("text", ["* * * *", "60 * * * *", "* * * * * *", "@often", "a b c d e", ""])
def test_what_is_no_schedule_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        check(text)


@pytest.mark.parametrize("text", ["*/5 * * * *", "@daily", "@tick", "0 9-17 * * MON-FRI", "0 0 L * *"])
def test_what_cron_knows_is_taken(text: str) -> None:
    check(text)


def test_floor_and_ceiling_meet_at_a_slot() -> None:
    slot = utc("2026-01-01T05:05:00")
    assert floor(slot, MINUTES5) == ceiling(slot, MINUTES5) == slot
    assert floor(slot + timedelta(seconds=1), MINUTES5) == slot
    assert ceiling(slot + timedelta(seconds=1), MINUTES5) == slot + MINUTES5


def test_a_comment_names_the_chain_and_its_slot_and_nothing_else_does() -> None:
    slot = utc("2026-01-01T05:05:00")
    assert slot_of(slot_comment("ab12", slot), "ab12") == slot
    for comment in (
        "",
        "ftsupervise-cron",
        "ftsupervise:x:1",
        slot_comment("ab12", slot) + "x",
        "ftsupervise-cron:ab12:slot:",
    ):
        assert slot_of(comment, "ab12") is None
    assert slot_of(slot_comment("ab13", slot), "ab12") is None
