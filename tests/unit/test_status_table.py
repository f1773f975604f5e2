"""The table of all runs: aligned, as wide as the terminal, and what a person has to know is in it at any width."""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.cli.output import plain
from ftsupervise.cli.status import timeline
from ftsupervise.cli.status_live import read_rows
from ftsupervise.cli.status_rows import advice, layout, pace, table
from ftsupervise.report.account import Spent, Stretch
from ftsupervise.report.row import RunRow, need_of, pace_of
from ftsupervise.rundir.watched import FiringAlert

NOW = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)
FINE = RunRow(
    "pretrain-10b",
    "/scratch/ada/pretrain-10b",
    "RUNNING",
    "job 88_3",
    step=12_345,
    last_step=100_000,
    rate=0.95,
    usual=1.0,
    done_at=NOW + timedelta(days=1),
    loss=2.3141,
    phase="train",
    seen_at=NOW,
    saved=12_300,
    saved_at=NOW - timedelta(minutes=4),
    restarts=2,
    members_left=8,
    watched_at=NOW - timedelta(seconds=50),
    watched_next=NOW + timedelta(seconds=10),
)
ROWS = (
    FINE,
    FINE._replace(name="a-run-with-a-name-that-is-much-too-long", rate=0.01, firing=2, disk="full in 3d 4h"),
    RunRow("gone", verdict="UNKNOWN", why="/dead has not answered for 4 s", seen_at=NOW - timedelta(hours=2)),
    FINE._replace(
        name="alarmed",
        firing=1,
        alerts=(FiringAlert("3f9a1c", "critical", "disk", "/scratch: full in 3h"),),
        watch_late=True,
    ),
)


def text(width: int) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in table(ROWS, NOW, width)]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160, 240])
def test_no_line_is_wider_than_the_terminal_and_the_columns_stand_below_each_other(width: int) -> None:
    lines = text(width)
    assert all(len(line) <= width for line in lines)
    at = lines[0].index("STATUS")
    for row, words in zip(ROWS, ("RUNNING", "RUNNING", "UNKNOWN", "RUNNING"), strict=True):
        (line,) = [one for one in lines if one.startswith(row.name[:20])]
        assert line[at : at + len(words)] == words


@pytest.mark.parametrize("width", [80, 200])
def test_what_a_person_has_to_know_is_there_at_any_width(width: int) -> None:
    shown = "\n".join(text(width))
    assert "/dead has not answered for 4 s; last seen 2h ago" in shown
    assert "disk: /scratch: full in 3h" in shown
    assert "12,345 12 %" in shown


def test_piped_nothing_is_cut_and_every_column_is_there() -> None:
    lines = text(0)
    assert len(lines) == 1 + len(ROWS)
    assert "a-run-with-a-name-that-is-much-too-long" in lines[2]
    for title in (
        "STEPS/H",
        "% OF USUAL",
        "DONE IN",
        "LOSS",
        "LAST SAVE",
        "RESTARTS",
        "ALERTS",
        "JOBS LEFT",
        "WATCHED",
        "NOTE",
    ):
        assert title in lines[0]
    assert "50s ago, next 10s" in lines[1]
    assert "LATE" in lines[4]


def test_a_name_with_control_characters_moves_no_cursor() -> None:
    odd = FINE._replace(name="a\x1b[2Jb\nc", why="\x1b]0;x\x07", verdict="GONE")
    assert all(
        "\x1b" not in part and "\n" not in part
        for lines in layout([odd], NOW, 80)
        for line in lines
        for part, _ in line
    )


def test_the_rows_can_be_read_back_from_the_json() -> None:
    import json

    page = {"schema_version": 4, "runs": [{**plain(row), "verdict": row.verdict.lower()} for row in ROWS]}
    assert read_rows(json.dumps(page)) == ROWS


@pytest.mark.parametrize(
    ("rate", "words"), [(None, ""), (0.0, "0"), (18.44, "66,384"), (0.0095, "34.2"), (0.5, "1,800")]
)
def test_each_rate_is_told_in_steps_an_hour(rate: float | None, words: str) -> None:
    assert pace(rate) == words


def test_a_short_fault_is_to_be_seen_in_a_long_run() -> None:
    day = 86400.0
    parts = [
        Stretch(Spent.QUEUE, 0, day),
        Stretch(Spent.TRAIN, day, 40 * day, 1),
        Stretch(Spent.DETECT, 40 * day, 40.5 * day, 1),
        Stretch(Spent.TRAIN, 40.5 * day, 90 * day, 2),
    ]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", timeline(parts, 0, 90 * day, 66))
    assert len(shown) == 66
    assert shown[0] == "."
    assert shown.count("d") == 1
    assert set(shown) == {".", "=", "d"}


def test_every_field_of_the_json_is_in_the_manual() -> None:
    from ftsupervise.report.detail import TimeSpent

    said = (Path(__file__).parents[2] / "docs" / "status.md").read_text("utf-8")
    known = {"since", "until", *RunRow._fields, *TimeSpent._fields, *FiringAlert._fields}
    assert not {name for name in known if f"`{name}`" not in said}


@pytest.mark.parametrize(
    ("rate", "usual", "pace"),
    [
        (None, None, None),
        (None, 2.0, 2.0),
        (2.0, None, 2.0),
        (1.7, 2.0, 2.0),
        (1.0, 2.0, 1.0),
        (0.0, 2.0, 0.0),
        (3.0, 2.0, 3.0),
    ],
)
def test_the_last_step_is_reckoned_with_the_usual_rate_unless_the_run_is_much_slower_or_faster_now(
    rate: float | None, usual: float | None, pace: float | None
) -> None:
    assert pace_of(rate, usual) == pace


def test_those_that_need_a_look_stand_first_and_the_lines_below_say_what_to_type() -> None:
    hung = FINE._replace(name="hangs", verdict="HUNG", why="no progress for 50m, at step 12,345", rate=0.0)
    waits = RunRow("waits", verdict="WAITING", why="Priority", waits_since=NOW - timedelta(hours=8), queue_share=0.73)
    new = RunRow("just-waits", verdict="WAITING", why="Priority", waits_since=NOW - timedelta(hours=1), queue_share=0.1)
    braked = RunRow("my run", verdict="STOPPED", why="by the brake: exit 1, the same failure 5 times", braked=True)
    slow = FINE._replace(name="slow", verdict="SLOW", why="221 steps an hour, usually 357")
    done = RunRow("done", verdict="FINISHED")
    order = [one.name for one in sorted((done, FINE, new, slow, waits, braked, hung), key=need_of)]
    assert order == ["hangs", "my run", "slow", "waits", "pretrain-10b", "just-waits", "done"]
    shown = "\n".join(table((hung, waits, new), NOW, 0))
    assert "HUNG" in shown and "no progress for 50m" in shown
    assert "in the queue for 8h (Priority); 73 % of its time so far" in shown
    assert "in the queue for 1h (Priority)\n" in shown + "\n"
    told = advice((done, FINE, slow, waits, braked, hung), 80)
    assert told[1:] == [
        "4 runs need a look:",
        "  ftsupervise status hangs             HUNG: where, and how to end it",
        "  ftsupervise diagnose 'my run'        STOPPED: what failed",
        "  ftsupervise clear --brake 'my run'   to go on, once that is mended",
        "  ftsupervise status slow              SLOW: since when, and on which nodes",
        "  ftsupervise status waits             WAITING: where its time went",
    ]
    silent = advice((braked,), 80, has_log=lambda row: False)
    assert silent[2] == "  ftsupervise status 'my run'          STOPPED: why"
    left = advice((braked._replace(why="by the brake: it left with 0", asks=True),), 80)
    assert left[2] == "  ftsupervise logs 'my run'               STOPPED: what its last job wrote", "nothing failed"
    many = advice([hung._replace(name=f"run-{n}") for n in range(7)], 80)
    assert many[1] == "7 runs need a look, these first:"
    assert many[-2:] == [
        "  ftsupervise status run-4   HUNG: where, and how to end it",
        "  and 2 more: ftsupervise status NAME",
    ]
    assert advice((done, FINE, new), 80) == []
    away = RunRow("away", "/scratch/away", "UNKNOWN", "no answer", elsewhere=True)
    assert "  ftsupervise status /scratch/away   UNKNOWN: why it cannot be seen" in advice((away,), 80)


def test_the_note_of_a_slow_run_has_the_figure_of_its_columns() -> None:
    alert = FiringAlert(
        "1", "warning", "throughput", "221 steps an hour, 62% of the usual 357", NOW - timedelta(hours=8)
    )
    slow = FINE._replace(verdict="SLOW", why=alert.summary, rate=0.06, usual=0.1, firing=1, alerts=(alert,))
    (_, line) = table((slow,), NOW, 0)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", line)
    assert shown.endswith("  at 60 % of its usual speed, slow for 8h")
    assert re.search(r" 216 +60 ", shown), "steps an hour, and % of what is usual"
    (_, line) = table((slow._replace(rate=0.097),), NOW, 0)
    assert alert.summary in line, "its last minute was better"


@pytest.mark.parametrize("width", [80, 160])
def test_the_note_of_a_run_that_the_brake_stopped_is_not_cut_and_the_line_below_the_table_has_the_command(
    width: int,
) -> None:
    cause = "by the brake: exit 1 (ImportError), the same failure 5 times"
    why = f"{cause}; fix the cause, then: ftsupervise clear --brake x"
    braked = RunRow("sft", "/scratch/ada/sft", "STOPPED", why, braked=True, reason=cause)
    shown = table((FINE, braked), NOW, width)
    assert any(line.endswith((f"{cause}\x1b[0m", cause)) for line in shown)
    assert not any("clear --brake" in line for line in shown)
    assert any("  ftsupervise clear --brake sft " in line for line in advice((FINE, braked), width))
