"""Whom the lighthouse believes and we do not: each said once, when two looks agree, and nobody for what we do not know."""

from __future__ import annotations

import pytest

from ftsupervise.replicas.members import (
    GroupHeartbeat,
    LiarWatch,
    LighthousePage,
    MemberTrouble,
    QuorumMember,
    SuspectWatch,
    far_ahead,
    hosts_of,
    store_answers,
    suspects,
)

STEPS: dict[str, int | None] = {"g000": 100, "g001": 100, "g002": 100}


def page(*starts: tuple[str, int], old: tuple[str, ...] = ()) -> LighthousePage:
    members = tuple(QuorumMember(name, step, "10.0.0.1:7") for name, step in starts)
    heard = tuple(GroupHeartbeat(name, 9.0 if name in old else 0.1) for name, _ in starts)
    return LighthousePage(1, members, heard)


FINE = (("g000:a", 100), ("g001:b", 101), ("g002:c", 102))


def troubles(looked: LighthousePage, steps: dict[str, int | None] = STEPS) -> list[tuple[str, MemberTrouble]]:
    return [(one.replica, one.trouble) for one in suspects(looked, steps, 2.0)]


def test_groups_that_are_about_to_make_their_next_step_are_no_suspects() -> None:
    assert troubles(page(*FINE)) == []


def test_what_is_not_known_makes_nobody_a_suspect() -> None:
    assert troubles(page(("g000:a", 10**9)), {"g000": None}) == []


def test_an_earlier_start_that_is_silent_is_no_second_one() -> None:
    assert troubles(page(*FINE, ("g000:before", 90), old=("g000:before",))) == []


def test_a_stranger_and_a_double_are_said_at_the_second_look_and_once() -> None:
    watch, looks = SuspectWatch(), [page(*FINE, ("x:y", 1), ("g002:d", 100)) for _ in range(5)]
    said = [[(one.group, one.trouble) for one in watch.news(2.0 * n, one, STEPS, 2.0)] for n, one in enumerate(looks)]
    twice = MemberTrouble.TWICE
    assert said == [[], [("x", MemberTrouble.UNKNOWN), ("g002", twice), ("g002", twice)], [], [], []]


def test_the_same_page_is_one_look_however_often_it_is_asked_for() -> None:
    watch, one = SuspectWatch(), page(("x:y", 1))
    assert not any(watch.news(at, one, STEPS, 2.0) for at in range(100))


def test_fast_groups_are_not_ahead_of_a_page_of_ours_that_is_seconds_old() -> None:
    """Ten steps a second, and our own page about them is five seconds old."""
    watch = SuspectWatch()
    for second in range(0, 120, 2):
        told, known = second * 10, max(0, (second // 5 * 5 - 5) * 10)
        assert not watch.news(second, page(("g000:a", told)), {"g000": known}, 2.0)


def test_a_group_that_never_made_the_step_that_it_told_is_said_to_be_ahead_once() -> None:
    watch, said = SuspectWatch(), []
    for second in range(0, 60, 2):
        looked = page(("g000:a", 10**9 + second), ("g001:b", second))
        said += [(second, one) for one in watch.news(second, looked, {"g000": second, "g001": second}, 2.0)]
    ((second, one),) = said
    assert (second, one.group, one.trouble) == (10, "g000", MemberTrouble.AHEAD)
    assert one.words == "group g000 told the lighthouse step 1000000010, and its ranks are at step 10"


@pytest.mark.threat(
    "The address of a group's store on the page leads to a host of a stranger's choice.",
    "It is connected to only where it is one of the run's own nodes.",
)
def test_a_store_is_asked_for_on_the_runs_own_nodes_alone() -> None:
    for store in (
        "evil.example:80",
        "10.0.0.1:0",
        "10.0.0.1:99999",
        "10.0.0.1",
        "",
        "10.0.0.1:²",
        "169.254.169.254:80/x",
    ):
        assert store_answers(store, {"10.0.0.1": "10.0.0.1", "n1": "10.0.0.1"}, 0.1) is None


def test_a_name_without_an_address_is_left_out() -> None:
    assert hosts_of(["10.0.0.1", "no such host", ""]) == {"10.0.0.1": "10.0.0.1"}


# ------------------------------------------------------------------------------------------- those that are to be ended

LIAR = ("g003:z", 10**9)
MADE: dict[str, int | None] = {**STEPS, "g003": 100}


def judged(looked: LighthousePage, made: dict[str, int | None] = MADE, least: int = 3) -> list[str]:
    return [one.group for one in far_ahead(looked, made, 2.0, least)]


def test_a_group_that_tells_a_step_no_other_can_have_made_is_the_liar() -> None:
    assert judged(page(*FINE, LIAR)) == ["g003"]
    assert judged(page(*FINE, LIAR), {**MADE, "g003": 10**9}) == ["g003"], "its own ranks may believe it too"
    assert judged(page(*FINE, LIAR), {**MADE, "g003": None}) == ["g003"], "or have made no step"


def test_nobody_is_a_liar_while_too_little_is_known_of_the_others() -> None:
    assert judged(page(*FINE, LIAR), dict.fromkeys(MADE)) == [], "a cold start, with different checkpoints"
    assert judged(page(*FINE, LIAR), {**dict.fromkeys(MADE), "g000": 100}) == []


def test_a_step_that_enough_groups_tell_is_true() -> None:
    ahead = (("g001:b", 900), ("g002:c", 901), ("g003:d", 900))
    assert judged(page(("g000:a", 100), *ahead), {"g000": 100, "g001": None, "g002": 100, "g003": 100}) == []


def test_a_group_that_is_behind_or_silent_or_a_strangers_is_not_ended() -> None:
    assert judged(page(*FINE, ("g003:z", 0))) == []
    assert judged(page(*FINE, LIAR, old=("g003:z",))) == []
    assert judged(page(*FINE, ("x:y", 10**9))) == []


def test_a_liar_is_sure_when_three_pages_over_four_seconds_say_so_and_the_same_page_is_one() -> None:
    watch = LiarWatch()
    sure = [sorted(watch.after(2.0 * n, page(*FINE, LIAR), MADE, 2.0, 3)) for n in range(4)]
    assert sure == [[], [], ["g003"], ["g003"]]
    watch, one = LiarWatch(), page(*FINE, LIAR)
    assert not any(watch.after(float(n), one, MADE, 2.0, 3) for n in range(20)), "a lighthouse that stands says it once"


def test_the_next_start_of_a_liar_begins_without_a_stain() -> None:
    watch = LiarWatch()
    for n in range(4):
        watch.after(2.0 * n, page(*FINE, LIAR), MADE, 2.0, 3)
    assert not watch.after(8.0, page(*FINE, ("g003:again", 100)), MADE, 2.0, 3)
