"""What a group sees of the others' losses, and how the sights of several groups become one record of each. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from ftsupervise.integrations.torchft_group import StallRecorder
from ftsupervise.replicas.stalls import MOST, MOST_SEEN, GroupStall, StallPage, with_seen

T0 = datetime(2026, 11, 23, 12, 0, tzinfo=timezone.utc)
FOUR = ("g000:a", "g001:b", "g002:c", "g003:d")
THREE = ("g000:a", "g002:c", "g003:d")


def trained(steps: int, seconds: float = 0.1) -> tuple[StallRecorder, float]:
    """A recorder that has seen so many even steps, and the time of the last one."""
    recorder, at = StallRecorder(), T0.timestamp()
    for step in range(1, steps + 1):
        at = T0.timestamp() + step * seconds
        recorder.committed(step, FOUR, 0.0, at)
    return recorder, at


def at_second(seconds: float, length: float = 1.0, *gone: str, lost: int = 1) -> GroupStall:
    return GroupStall(T0 + timedelta(seconds=seconds), length, 10, lost, gone)


def test_even_steps_are_no_stall() -> None:
    assert trained(200)[0].stalls == []


def test_a_group_that_dies_is_a_stall_with_its_name_the_step_that_was_lost_and_its_way_back() -> None:
    recorder, at = trained(20)
    recorder.failed()
    assert recorder.committed(21, THREE, 0.5, at + 1.1)
    for step in range(22, 50):
        assert not recorder.committed(step, THREE, 0.0, at + 1.1 + (step - 21) * 0.1)
    assert recorder.committed(50, (*THREE, "g001:new"), 0.0, at + 4.0)
    (stall,) = recorder.stalls
    assert (stall.seconds, stall.step, stall.lost, stall.gone) == (1.1, 21, 1, ("g001",))
    assert (stall.away, stall.missed) == (4.0, 29)


def test_a_group_that_is_back_before_the_others_meet_has_missed_nothing() -> None:
    recorder, at = trained(20)
    recorder.failed()
    recorder.committed(21, (*THREE, "g001:new"), 0.5, at + 1.2)
    (stall,) = recorder.stalls
    assert (stall.gone, stall.away, stall.missed) == (("g001",), 1.2, 0)


def test_the_lighthouses_death_is_a_stall_that_lost_nobody() -> None:
    recorder, at = trained(20)
    assert recorder.committed(21, FOUR, 1.5, at + 2.0)
    assert [(one.gone, one.lost, one.away) for one in recorder.stalls] == [((), 0, None)]


def test_a_group_that_is_slower_each_time_is_no_stall() -> None:
    recorder, at = trained(20, seconds=60.0)
    assert not recorder.committed(21, FOUR, 5.0, at + 65.0)


def test_a_group_that_was_away_itself_says_nothing_about_the_others() -> None:
    recorder, at = trained(20)
    recorder.failed()
    assert not recorder.committed(90, FOUR, 3.0, at + 30.0)
    assert recorder.stalls == []


def test_a_start_of_a_group_keeps_its_newest_stalls() -> None:
    recorder, at = trained(1)
    for step in range(2, 3 * MOST_SEEN):
        recorder.failed()
        recorder.committed(step, FOUR, 0.0, at + step)
    assert len(recorder.stalls) == MOST_SEEN and recorder.stalls[-1].step == 3 * MOST_SEEN - 1


def test_what_three_groups_saw_of_one_loss_is_one_stall_and_the_worst_of_it_counts() -> None:
    back = T0 + timedelta(seconds=9)
    seen = [
        at_second(0.00, 1.08, "g001"),
        at_second(0.02, 1.10, "g001")._replace(back=back + timedelta(seconds=0.1), missed=80),
        at_second(0.01, 1.02, "g001", lost=0)._replace(back=back, missed=79),
    ]
    page = with_seen(StallPage(), seen)
    assert page.stalls == (GroupStall(T0, 1.10, 10, 1, ("g001",), back, 79),)
    assert (page.times, page.seconds, page.lost) == (1, 1.10, 1)


def test_two_stalls_of_two_steps_that_follow_each_other_at_once_are_two() -> None:
    first = [at_second(0.0, 30.0, "g001"), at_second(0.02, 29.98, "g001")]
    second = [at_second(30.0, 5.0)._replace(step=11), at_second(30.0, 5.002)._replace(step=11)]
    page = with_seen(StallPage(), [first[0], second[0], first[1], second[1]])
    assert [one.step for one in page.stalls] == [10, 11]
    assert (page.times, page.seconds, page.lost) == (2, 35.002, 2)
    assert with_seen(page, [*second, *first]) == page


def test_what_is_read_again_is_not_counted_again() -> None:
    seen = [at_second(0, 1.0, "g001"), at_second(60, 5.0, "g002")]
    once = with_seen(StallPage(), seen)
    assert with_seen(once, reversed(seen)) == once and once.times == 2


def test_the_page_of_the_run_is_bounded_and_its_sums_forget_nothing() -> None:
    page = StallPage()
    for number in range(MOST + 50):
        page = with_seen(page, [at_second(10.0 * number)])
    assert (len(page.stalls), page.times, page.lost, round(page.seconds)) == (MOST, MOST + 50, MOST + 50, MOST + 50)
    assert with_seen(page, [at_second(0)]) == page, "one that has left the page is not counted twice"


def test_a_stall_of_a_day_does_not_swallow_all_others() -> None:
    assert with_seen(StallPage(), [at_second(0, 86400.0)]).stalls == ()
