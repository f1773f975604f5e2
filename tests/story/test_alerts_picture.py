"""The picture of the last day in messages: what a mail server and a Slack were really sent by a tick of the watch."""

from __future__ import annotations

import html
import json
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.last_day import KINDS, PARTS, LastDay, sample
from ftsupervise.cli import status
from ftsupervise.report.account import Spent, Stretch, kinds_over
from ftsupervise.report.day import last_day, rates_over
from ftsupervise.rundir.progress import Span, StepRecord, write_steps
from ftsupervise.watch import tour
from tests.neighbours.slack import SlackServer
from tests.neighbours.smtp import MailServer
from tests.neighbours.supervised import outside_a_job
from tests.story.alerting_scene import T0, bot, mailbox, secret, settings, tick
from tests.story.alerting_scene import bad as bad_disk
from tests.story.measured_run import NOW, make_run


def test_a_tick_sends_the_last_day_as_cells_in_a_mail_and_as_characters_to_slack(
    tmp_path: Path, mail: MailServer, slack: SlackServer
) -> None:
    rundir = make_run(tmp_path, failed=3)
    every = 15
    begin = int((NOW - timedelta(hours=4)).timestamp()) // every
    write_steps(
        rundir, StepRecord(every, tuple(Span(begin + n, n, 5 if n % 240 < 200 else 1) for n in range(960))), None
    )
    receivers = [mailbox(mail), bot(slack, tmp_path)]
    text = "name: train\nscheduler: local\nlaunch: {command: 'true'}\nwatch: {disk: null}\n"
    (tmp_path / "ftsupervise.yaml").write_text(text + f"alerts: {json.dumps({'receivers': receivers})}\n")
    env = outside_a_job(FTSUPERVISE_STATE_DIR=str(tmp_path / "state"))
    for _ in range(2):  # the alert fires when it has been seen twice
        argv = [sys.executable, "-m", "ftsupervise", "watch", "--quiet"]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90, check=False)
    assert mail.mails and slack.posts, done.stdout + done.stderr
    one = next(
        found for found in reversed(mail.mails) if "is-running" in str(found) or "queue" in str(found["Subject"])
    )
    plain, page = (part.get_content() for part in one.iter_parts())
    assert one.get_content_type() == "multipart/alternative"
    lines = plain.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("the last 4h"))
    drawn, bars = lines[at + 1], lines[at + 2]
    assert len(drawn) == len(bars) == PARTS and {"=", "d"} <= set(drawn) <= {sign for sign, _ in KINDS.values()}
    assert len(set(bars)) > 1
    assert "ftsupervise status" in plain and "look" in plain, "the text is whole without the picture"
    assert page.count("bgcolor=") > 3 and KINDS["train"][1] in page and 'aria-label="the last 4h' in page
    assert not any(word in page for word in ("<img", "<script", "<svg", "http", "src="))
    post = next(found for found in slack.posts if len(found.blocks) > 2)
    code = html.unescape(post.blocks[-1]["text"]["text"])
    assert code.startswith("```the last 4h") and code.endswith("```")
    assert len(code.splitlines()[1]) == PARTS // 2 <= 40, "a telephone shows it in one line"


def test_a_message_without_a_day_or_about_a_start_has_no_picture(tmp_path: Path, mail: MailServer) -> None:
    (tmp_path / "run" / "switches").mkdir(parents=True)
    journal = Journal(tmp_path / "run" / "watch" / "journal", spare=tmp_path / "private" / "spare")
    for index in range(3):
        tick(journal, settings([mailbox(mail)]), T0 + timedelta(minutes=5 * index), bad_disk())
    assert mail.mails[0].get_content_type() == "text/plain"
    assert secret(tmp_path, "unused", "x")
    young = make_run(tmp_path, "young", failed=0)
    assert last_day(young, (), datetime.now(timezone.utc) - timedelta(minutes=59)) is None


def test_each_kind_of_time_has_one_sign_and_one_colour_everywhere() -> None:
    assert [*KINDS] == [kind.value for kind in Spent]
    assert {kind: sign for kind, (sign, _) in KINDS.items()} == {kind: sign for kind, (sign, _) in status.KINDS.items()}
    assert len({colour for _, colour in KINDS.values()}) == len({sign for sign, _ in KINDS.values()}) == len(KINDS)


def test_a_short_fault_is_seen_and_the_rates_add_up_to_the_steps() -> None:
    found = kinds_over(
        [Stretch(Spent.TRAIN, 0, 80), Stretch(Spent.DETECT, 80, 100), Stretch(Spent.TRAIN, 100, 200)], 0, 200, 2
    )
    assert found == [Spent.TRAIN, Spent.TRAIN]
    found = kinds_over(
        [Stretch(Spent.TRAIN, 0, 75), Stretch(Spent.DETECT, 75, 100), Stretch(Spent.TRAIN, 100, 200)], 0, 200, 2
    )
    assert found == [Spent.DETECT, Spent.TRAIN]
    record = StepRecord(60, (Span(10, 30, 30), Span(11, 90, 60), Span(13, 100, 10)))
    rates = rates_over(record, 600.0, 840.0, 8)
    assert sum(rate * 30 for rate in rates if rate is not None) == pytest.approx(100)
    assert list(rates) == pytest.approx([0.5, 0.5, 1.0, 1.0, 0.0, 0.0, 1 / 6, 1 / 6])
    assert rates_over(record, 480.0, 600.0, 2) == (None, None) and rates_over(StepRecord(), 0.0, 60.0, 2) == (
        None,
        None,
    )


def test_a_day_without_steps_and_one_half_as_wide_are_drawn_too() -> None:
    day = sample(T0)
    assert len(day.line) == len(day.spark) == PARTS == 2 * len(day.narrow.line)
    assert set(day.narrow.line) == set(day.line), "no fault is lost"
    empty = LastDay(T0 - timedelta(hours=2), T0, ("unknown",) * PARTS, (None,) * PARTS, (("unknown", 1.0),))
    assert empty.spark == "" and empty.highest == "" and set(empty.bars) == {0}
    assert empty.text.splitlines() == ["the last 2h, to 2026-11-21 02:10 UTC", "?" * PARTS, "? unknown 100.0 %"]


def test_a_picture_that_takes_too_long_to_draw_keeps_no_message_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tour, "DRAWING", 0.1)
    gate = threading.Event()
    known: Any = {0: SimpleNamespace(run=SimpleNamespace(run_dir=tmp_path))}
    progress: Any = SimpleNamespace(roster=SimpleNamespace(known=known))
    slow: Any = lambda *_: gate.wait()  # noqa: E731
    nobody: Any = None
    orders = tour.TickOrders(now=T0, state=tmp_path, env={}, scheduler=nobody, draw=slow)
    child = tour.Tour(orders, progress, [0], nobody)
    child.jobs[0] = ()
    began = time.monotonic()
    assert child.about_run(0) is None
    assert time.monotonic() - began < 5
    gate.set()
