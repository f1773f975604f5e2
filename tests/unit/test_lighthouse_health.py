"""When a lighthouse is ended: nights told as tables of looks, one every two seconds."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ftsupervise.replicas.lighthouse import LighthouseHealth, LighthouseVerdict
from ftsupervise.replicas.members import LighthousePage, PageNotSeen, Unseen

SILENT = PageNotSeen(Unseen.SILENT, "no answer within 2 s")
REFUSED = PageNotSeen(Unseen.REFUSED, "nothing listens there")
CUT = PageNotSeen(Unseen.CUT, "Network is unreachable")
STRANGE = PageNotSeen(Unseen.STRANGE, "its answer is not HTTP")
FULL = PageNotSeen(Unseen.FULL, "its answer is larger than 4 MB")
Look = tuple[LighthousePage | PageNotSeen, str]


FINE: Look = (LighthousePage(1, (), ()), "S")


def played(looks: Iterable[Look]) -> list[tuple[float, LighthouseVerdict, str]]:
    """What is done, and after how many seconds; LEAVE is left out."""
    health = LighthouseHealth(0.0)
    done: list[tuple[float, LighthouseVerdict, str]] = []
    for number, (seen, state) in enumerate(looks, 1):
        health, verdict, words = health.after(2.0 * number, seen, state, 60.0)
        if verdict is not LighthouseVerdict.LEAVE:
            done.append((2.0 * number, verdict, words))
    return done


def test_one_that_answers_is_left_alone_for_ever() -> None:
    assert played([FINE] * 1000) == []


def test_a_minute_without_an_answer_ends_one_that_has_answered() -> None:
    (end, *_) = played([FINE, *[(SILENT, "S")] * 40])
    assert end[:2] == (62.0, LighthouseVerdict.END) and "has not answered for 1m" in end[2]


def test_pauses_of_less_than_a_minute_end_nothing() -> None:
    assert played([FINE, *[(SILENT, "R")] * 29] * 20) == []


def test_one_that_was_never_seen_to_answer_is_waited_for_five_times_as_long() -> None:
    assert played([(SILENT, "S")] * 400)[0][:2] == (300.0, LighthouseVerdict.END)


def test_a_stopped_one_is_continued_at_each_look_and_never_ended() -> None:
    done = played([FINE, *[(SILENT, "T")] * 100])
    assert {verdict for _, verdict, _ in done} == {LighthouseVerdict.CONTINUE}
    assert [words for _, _, words in done if words] == ["it is stopped (SIGSTOP): it is continued"]


def test_one_in_a_debugger_is_not_continued() -> None:
    assert played([FINE, *[(SILENT, "t")] * 20]) == []


def test_a_port_that_refuses_is_given_ten_seconds() -> None:
    assert played([FINE, *[(REFUSED, "S")] * 10])[0][:2] == (14.0, LighthouseVerdict.END)
    assert played([*[(REFUSED, "S")] * 4, FINE] * 50) == []


@pytest.mark.parametrize("unseen", [CUT, STRANGE])
def test_what_our_own_network_hides_ends_nothing(unseen: PageNotSeen) -> None:
    assert played([FINE, *[(unseen, "S")] * 1000]) == []
    assert played([FINE, *[(SILENT, "S")] * 20, (unseen, "S"), *[(SILENT, "S")] * 20]) == []


@pytest.mark.threat(
    "Somebody who reaches the lighthouse tells it tens of thousands of names, which it never forgets: its page is too large to "
    "be read, and a group with jobs of its own never starts again.",
    "Such a lighthouse is ended, at most every ten minutes, and the one in its place has heard of none of them.",
)
def test_one_whose_page_is_too_large_is_ended_when_it_is_ten_minutes_old() -> None:
    assert played([(FULL, "S")] * 299) == [], "who told it the names may tell them again: not all the time"
    (at, verdict, words), *_ = played([(FULL, "S")] * 301)
    assert (at, verdict) == (600.0, LighthouseVerdict.END)
    assert "larger than 4 MB" in words
    assert played([FINE] * 400 + [(FULL, "S"), FINE] * 50) == [], "one look proves nothing"
