"""Whom the lighthouse believes and we do not: each said once, when two looks agree, and nobody for what we do not know."""

from __future__ import annotations

from ftsupervise.replicas.lighthouse_page import GroupHeartbeat, LighthousePage, QuorumMember
from ftsupervise.replicas.stores import hosts_of, store_answers
from ftsupervise.replicas.suspects import MemberTrouble, SuspectWatch, suspects

STEPS: dict[str, int | None] = {"g000": 100, "g001": 100, "g002": 100}


def page(*starts: tuple[str, int], old: tuple[str, ...] = ()) -> LighthousePage:
    members = tuple(QuorumMember(name, step, "", "10.0.0.1:7", 1, False) for name, step in starts)
    heard = tuple(GroupHeartbeat(name, 9.0 if name in old else 0.1) for name, _ in starts)
    return LighthousePage(1, "", 0.1, members, heard)


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
