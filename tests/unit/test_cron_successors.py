"""What the chain lacks and has twice, from one look at the queue."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.crontab.chain import CronChain, chain_in, slot_comment, slot_of
from ftsupervise.crontab.entries import slots_after
from ftsupervise.model import Job, JobState

NOW = datetime(2026, 11, 21, 9, 2, 30, tzinfo=timezone.utc)
PERIOD = timedelta(minutes=5)
NEXT = slots_after(NOW, PERIOD, 3)


def job(number: int, slot: datetime, state: JobState = JobState.PENDING, *, reason: str = "BeginTime") -> Job:
    return Job(
        str(number), str(number), "ftsupervise-cron", "ada", state, reason=reason, comment=slot_comment("c0de", slot)
    )


def look(*jobs: Job) -> CronChain:
    return chain_in(jobs, "c0de", NOW, PERIOD, 3)


def test_an_empty_queue_lacks_all_successors() -> None:
    assert look().submit == NEXT
    assert not look().alive


def test_a_whole_chain_lacks_nothing() -> None:
    found = look(*(job(n, slot) for n, slot in enumerate(NEXT, 1)))
    assert (found.submit, found.cancel, found.ahead) == ((), (), NEXT)


def test_after_a_tick_one_is_missing() -> None:
    assert look(job(1, NEXT[0]), job(2, NEXT[1]), job(9, NEXT[0] - PERIOD, JobState.RUNNING)).submit == NEXT[2:]


def test_of_two_jobs_for_one_slot_the_lower_id_stays_by_number_not_by_text() -> None:
    found = look(job(9, NEXT[0]), job(10, NEXT[0]), job(11, NEXT[1]), job(12, NEXT[2]))
    assert found.cancel == ("10",)
    assert not found.submit


def test_a_job_that_somebody_holds_is_no_successor_and_is_left_alone() -> None:
    found = look(job(1, NEXT[0], reason="JobHeldUser"), job(2, NEXT[1]), job(3, NEXT[2]))
    assert found.submit == NEXT[:1]
    assert found.held == ("1",)
    assert not found.cancel


def test_jobs_of_another_period_are_taken_away() -> None:
    off = NEXT[0] + timedelta(seconds=30)
    assert look(job(1, off), *(job(n, slot) for n, slot in enumerate(NEXT, 2))).cancel == ("1",)


def test_overdue_jobs_are_no_successors_but_enough_of_them_are_enough() -> None:
    late = [job(n, NOW - PERIOD * n) for n in range(1, 4)]
    assert look(*late).submit == NEXT
    assert look(*late).overdue == 3
    many = [job(n, NOW - PERIOD * n) for n in range(1, 13)]
    assert look(*many).submit == ()


def test_other_chains_and_other_jobs_are_not_ours() -> None:
    other = Job("5", "5", "x", "ada", JobState.PENDING, comment=slot_comment("beef", NEXT[0]))
    plain = Job("6", "6", "ftsupervise-cron", "ada", JobState.RUNNING, comment="ftsupervise-cron:c0de:entry:hourly.x:1")
    assert look(other, plain) == look()


JOBS = st.lists(
    st.builds(
        job,
        st.integers(1, 40),
        st.integers(-4, 6).map(lambda n: NEXT[0] + PERIOD * n),
        st.sampled_from([JobState.PENDING, JobState.RUNNING, JobState.COMPLETING]),
    ),
    max_size=14,
    unique_by=lambda one: one.id,
)


@given(JOBS)
def test_doing_what_it_says_leaves_one_job_for_each_of_the_next_slots(jobs: list[Job]) -> None:
    found = look(*jobs)
    left = [one for one in jobs if one.id not in found.cancel]
    fresh = [job(100 + n, slot) for n, slot in enumerate(found.submit)]
    again = look(*left, *fresh)
    assert (again.submit, again.cancel) == ((), ())
    if again.overdue < 12:
        assert set(NEXT) <= set(again.ahead)


@given(JOBS)
def test_two_that_look_at_once_and_both_submit_agree_on_which_to_cancel(jobs: list[Job]) -> None:
    found = look(*jobs)
    both = [job(100 + n, slot) for n, slot in enumerate((*found.submit, *found.submit))]
    queue = [one for one in jobs if one.id not in found.cancel] + both
    cancel = look(*queue).cancel
    assert len(cancel) == len(found.submit)
    assert look(*(one for one in queue if one.id not in cancel)).submit == ()


@pytest.mark.parametrize("digits", ["²", "17952522²0", "\uff19", "9" * 12, "9" * 5000])
def test_a_comment_that_only_looks_like_a_slot_is_none(digits: str) -> None:
    """``str.isdigit`` is true of each, ``int`` fails for some, and the calendar ends before others."""
    assert slot_of(f"ftsupervise-cron:3f9a1c20:slot:{digits}", "3f9a1c20") is None
