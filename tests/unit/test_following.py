"""What is remembered of a report that is renewed, and what its page says of that: values in, values out."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from ftsupervise.errors import NoAnswer
from ftsupervise.report.following import Followed, FollowedPage, PageLife, sentence_of

NOON = datetime(2026, 11, 27, 12, 0, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)


def test_it_is_over_when_two_looks_in_a_row_have_found_it_so() -> None:
    known = Followed[str]()
    known = known.seen("a", NOON, over=True)
    assert not known.is_over, "a queue may lose sight of a job for a moment"
    known = known.seen("b", NOON + MINUTE, over=False)
    known = known.seen("c", NOON + 2 * MINUTE, over=True)
    assert not known.is_over
    assert known.seen("d", NOON + 3 * MINUTE, over=True).is_over
    assert not known.unseen("no answer", NOON + 3 * MINUTE).seen("d", NOON, over=True).is_over
    assert not known.seen("d", NOON + 3 * MINUTE, over=True, blind="squeue does not answer").is_over


def test_what_is_launched_anew_is_no_longer_over() -> None:
    over = Followed[str]().seen("a", NOON, over=True).seen("b", NOON, over=True)
    assert [over.again(word).is_over for word in ("FINISHED", "GONE", "STOPPED", "UNKNOWN", "")] == [True] * 5
    assert not over.again("WAITING").is_over and over.again("RUNNING").facts == "b"


def test_the_last_facts_stay_while_nothing_can_be_seen_and_the_first_failure_says_since_when() -> None:
    known = Followed[str]().seen("a", NOON, over=False)
    for late in (1, 2, 3):
        known = known.unseen(f"failure {late}", NOON + late * MINUTE)
    assert (known.facts, known.blind_since, known.why) == ("a", NOON + MINUTE, "failure 3")
    known = known.seen("b", NOON + 4 * MINUTE, over=False)
    assert (known.facts, known.blind_since, known.why) == ("b", None, "")


def test_a_part_that_cannot_be_seen_keeps_its_begin_through_new_facts() -> None:
    known = Followed[str]().seen("a", NOON, over=False, blind="squeue does not answer")
    known = known.seen("b", NOON + MINUTE, over=False, blind="squeue does not answer")
    assert (known.facts, known.blind_since) == ("b", NOON)


def test_a_page_says_what_becomes_of_it() -> None:
    def said(life: PageLife, since: datetime | None = None, why: str = "") -> dict[str, object]:
        return FollowedPage(life, NOON, 60.0, since, why).shown(NOON - MINUTE)

    renewed = said(PageLife.RENEWED)
    assert renewed["words"] == "Renewed every 1m while ftsupervise report --follow runs." and renewed["every"] == 60
    for life in (PageLife.OVER, PageLife.LEFT):
        assert said(life)["every"] == 0 and "renews" in str(said(life)["words"])
        assert FollowedPage(life, NOON, 60.0).data() == {}
    assert FollowedPage(PageLife.RENEWED, NOON, 60.4).data() == {"follow": {"made": NOON.timestamp(), "every": 60}}
    blind = said(PageLife.RENEWED, NOON, "no answer within 12 s.")
    assert blind["blind"] == (
        "Since 2026-11-27 12:00:00 UTC it cannot be seen in full: no answer within 12 s. "
        "What stands below was seen at 2026-11-27 11:59:00 UTC."
    )
    fresh = FollowedPage(PageLife.RENEWED, NOON, 60.0, NOON - MINUTE, "squeue does not answer").shown(NOON)
    assert "What stands below" not in fresh["blind"], "only a part of it is missing"


def test_the_reason_on_a_page_is_one_line_without_a_secret() -> None:
    error = NoAnswer("nothing has moved for 12 s\x1b[31m; token=ghp_" + "a" * 36, hint="sinfo shows it")
    said = sentence_of(error)
    assert "\n" not in said and "\x1b" not in said and "a" * 36 not in said and said.startswith("nothing has moved")
    assert sentence_of(ValueError()) == "ValueError"
