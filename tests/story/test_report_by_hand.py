"""The figures of a report beside a count by hand of the raw pages: the night with nine faults."""

from __future__ import annotations

import json
import re
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.report.account import Spent
from ftsupervise.report.html import page
from ftsupervise.report.markdown import as_markdown
from ftsupervise.report.plan import plan_rows
from ftsupervise.report.summary import headline, tiles
from ftsupervise.report.week import week_of
from ftsupervise.report.week_page import page as page_of_week
from ftsupervise.report.week_page import tiles as tiles_of_week
from tests.neighbours.prepared_account import NOW
from tests.neighbours.prepared_account import PreparedAccount as Account

Pages = list[tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Account:
    return Account(tmp_path_factory.mktemp("account"), ("night",))


@pytest.fixture(scope="module")
def raw(account: Account) -> Pages:
    """start.json and end.json of each attempt; the progress page stands for the end of the one that runs."""
    found = []
    for folder in sorted((account.folder / "night/attempts").iterdir()):
        end = folder / "end.json"
        found.append((read(folder / "start.json"), read(end if end.exists() else folder / "progress.json")))
    return found


def read(path: Path) -> dict[str, Any]:
    page: dict[str, Any] = json.loads(path.read_text())
    return page


def clock(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def steps_of(raw: Pages) -> list[set[int]]:
    """The steps that each attempt made."""
    now = raw[-1][1]
    ended = [(end["first_step"], end["last_step"]) for _, end in raw[:-1]]
    return [set(range(first, last + 1)) if first else set() for first, last in (*ended, (now["first"], now["ahead"]))]


def test_the_steps_made_again_are_those_that_a_count_finds(account: Account, raw: Pages) -> None:
    made, again = set[int](), 0
    for steps in steps_of(raw):
        again += len(steps & made)
        made |= steps
    (row,) = [one for one in plan_rows(account.report("night")) if one.what == "Steps made again"]
    assert row.actual.startswith(f"{again:,} after 4 interruptions, at most "), row.actual


def test_the_time_agrees_with_the_raw_pages_within_a_hundredth(account: Account, raw: Pages) -> None:
    found = account.report("night")
    spent, made = found.detail.account.seconds(), set[int]()
    hand = dict.fromkeys((Spent.RESTART, Spent.DETECT, Spent.REDO, Spent.TRAIN, Spent.SAVE), 0.0)
    for (_, end), steps in zip(raw[:-1], steps_of(raw), strict=False):
        if not steps:
            hand[Spent.RESTART] += end["worked"]
            hand[Spent.DETECT] += end["seconds"] - end["worked"]
            continue
        hand[Spent.RESTART] += end["ready"]
        hand[Spent.DETECT] += end["seconds"] - end["worked"]
        hand[Spent.SAVE] += end["saving"]
        worked = end["worked"] - end["ready"] - end["saving"]
        hand[Spent.REDO] += worked * len(steps & made) / len(steps)
        hand[Spent.TRAIN] += worked * len(steps - made) / len(steps)
        made |= steps
    (start, now), steps = raw[-1], steps_of(raw)[-1]
    begin, first, active = clock(start["at"]), now["first_at"], now["active_at"]
    worked = active - first - now["saving"]
    hand[Spent.RESTART] += first - begin
    hand[Spent.SAVE] += now["saving"]
    hand[Spent.REDO] += worked * len(steps & made) / len(steps)
    hand[Spent.TRAIN] += worked * len(steps - made) / len(steps)
    ends = [clock(one["at"]) + end.get("seconds", 0.0) for one, end in raw]
    hand[Spent.RESTART] += sum(clock(two[0]["at"]) - end for end, (_, two) in zip(ends, pairwise(raw), strict=False))
    whole = found.detail.account.total
    for kind, seconds in hand.items():
        assert spent[kind] == pytest.approx(seconds, abs=0.01 * whole, rel=0.01), kind


def test_each_interruption_has_the_cost_of_its_own_and_no_other(account: Account) -> None:
    """The steps after 5,100 were undone by the loss that was no number; the node that was lost while they were made again
    undid those since its last checkpoint only."""
    ends = account.report("night").incidents
    assert [one.kind for one in ends] == ["bad numbers", *["program error"] * 5, "node failure", *["program error"] * 2]
    redo = [dict(one.spent).get(Spent.REDO, 0.0) for one in ends]
    assert redo[0] > 2400 and sum(redo[1:6]) == 0, "its 1,380 steps take 2 s each"
    lost = [one.steps_lost for one in ends]
    assert lost[0] == 1380 and lost[6] == 80
    assert redo[6] == pytest.approx(2 * 80, rel=0.1)


def test_a_night_with_nine_faults_is_not_headed_by_its_usual_speed(account: Account) -> None:
    found = account.report("night")
    head = headline(found)
    assert (head.verdict, head.tone) == ("RUNNING", "watch")
    assert head.sentence.startswith("It trains at its usual speed, after 9 faults in the last day that cost 1h ")
    assert head.command.startswith("ftsupervise logs --errors ")


def test_equal_rows_are_one_and_tiles_hold_figures(account: Account) -> None:
    found = account.report("night")
    text = page(found)
    rows = re.findall(r'<tr id="attempt-(\d+)"', text)
    assert rows == ["9", "8", "7", "6", "1"]
    assert ">2 to 6 " in text and re.search(r"5 times since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", text)
    assert "7 checkpoints: step-00005600 to step-00008600" in text and "set aside: loss is not a number" in text
    assert re.search(r"<summary>\d+ older ones</summary>", text), "sixty checkpoints are no page of a phone"
    anchors = set(re.findall(r'href="#(attempt-\d+)"', text))
    assert anchors and anchors <= set(re.findall(r'id="(attempt-\d+)"', text)), "links lead somewhere"
    assert all(len(one.more) < 60 and "effective" not in one.more for one in tiles(found))
    assert "| 2 to 6 |" in as_markdown(found)


def test_status_says_which_checkpoints_were_set_aside_and_why(account: Account, tmp_path: Path) -> None:
    said = account.type("status", str(account.folder / "night"), cwd=tmp_path).stdout
    assert "  aside     7 checkpoints set aside: loss is not a number\n" in said


def test_a_loss_that_was_no_number_is_drawn_with_its_steps_and_times(account: Account) -> None:
    text = page(account.report("night"))
    assert re.search(
        r"The loss was not a number in 1,\d{3} steps of attempt 1 from \S+ \d\d:\d\d:\d\d UTC to \S+ \d\d:\d\d:\d\d UTC",
        text,
    )
    assert len(re.findall(r'<path class="no-number" d="M[^"]+z"/>', text)) == 1


def test_the_week_says_of_a_run_what_its_own_page_says(account: Account) -> None:
    week = week_of({"night": account.folder / "night"}, NOW, account.env)
    (row,) = week.rows
    head = headline(account.report("night"))
    assert (row.head.sentence, row.head.tone) == (head.sentence, head.tone)
    runs = tiles_of_week(week)[1]
    assert (runs.value, runs.more) == ("1", "none needs a look"), "all well is said of runs that are all well"
    assert "5 times since " in page_of_week(week)
