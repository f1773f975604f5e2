"""What a person reads at 3 a.m.: a short subject, how the run is, who has it, and the commands to copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

from ftsupervise.alerts.deliver import deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.last_day import AboutRun, sample_facts
from ftsupervise.alerts.outbox import Unlisted
from ftsupervise.alerts.record import announce, record
from ftsupervise.alerts.wording import Parcel, incident, render
from ftsupervise.config.alerting import Alerts
from ftsupervise.findings import EventKind, Reason, happened
from ftsupervise.model import Job, JobState
from ftsupervise.report.day import facts_of
from ftsupervise.report.row import RunRow
from tests.neighbours.slack import SlackServer
from tests.neighbours.smtp import MailServer
from tests.story.alerting_scene import RUN, T0, alerts_cli, bad, bot, good, journal_in, mailbox, minutes, settings, tick


@pytest.fixture
def chat() -> Iterator[SlackServer]:
    with SlackServer() as server:
        yield server


@pytest.mark.parametrize("run", ["r", "train-70b", "a-very-long-name-of-a-run-that-nobody-can-read-on-a-telephone"])
def test_a_subject_has_state_run_and_what_in_78_characters(run: str) -> None:
    for message in incident(run, "/scratch/run", T0):
        for more in ((), (Unlisted("disk", Reason.FIRED, 12_345),)):
            seen = Parcel(replace(message, unlisted=more), T0)
            assert len(seen.subject) <= 78, seen.subject
            assert seen.subject.startswith(f"[{seen.word[:20]}") and f"] {run[:9]}" in seen.subject
            assert "more)" in seen.subject or not more
            assert len(seen.subject) > 30 and "\n" not in seen.subject


def test_the_body_says_how_the_run_is_now(mail: MailServer, chat: SlackServer, tmp_path: Path) -> None:
    alerts, journal = settings([mailbox(mail, html=True), bot(chat, tmp_path)]), journal_in(tmp_path)
    record(journal, [bad()], alerts, T0, run_name=RUN)
    deliver([journal], alerts, T0, about_runs={journal.home: AboutRun(facts=sample_facts(T0))})
    plain, page = (part.get_content().replace("\r", "") for part in mail.mails[0].iter_parts())
    for name, words in (("step", "48,210 of 120,000 (40 %)"), ("loss", "2.31"), ("job", "88_1 is RUNNING, 9h left")):
        assert f"{name:8} {words}\n" in plain and f">{words}</td>" in page
        assert f"*{name.capitalize()}*\n{words}" in [
            one["text"] for block in chat.posts[0].blocks for one in block.get("fields", ())
        ]
    assert "ETA      2026-11-21 23:10 UTC" in plain and "since    2026-11-21 02:10 UTC" in plain
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page


def test_the_facts_of_a_run_are_those_of_status_and_what_is_not_known_is_left_out() -> None:
    job = Job("88_1", "88", "r", "ada", JobState.RUNNING)
    row = RunRow("r", verdict="RUNNING", step=50, last_step=200, loss=2.345678)
    row = row._replace(done_at=T0 + timedelta(hours=5), ends_at=T0 + timedelta(hours=3))
    assert facts_of(row, (job,), T0) == (
        ("now", "RUNNING"),
        ("step", "50 of 200 (25.0 %)"),
        ("loss", "2.346"),
        ("ETA", "2026-11-21 07:10 UTC, in 5h"),
        ("job", "88_1 is RUNNING, 3h left"),
    )
    assert facts_of(RunRow("r", verdict="GONE", why="no job"), (), T0) == (("now", "GONE (no job)"),)
    full = RunRow("r", verdict="RUNNING", why="job 88_1", watch_late=True, full="no space is left in /scratch")
    said = "RUNNING, loss is not a number, its watch is LATE, its disk is full (job 88_1)"
    assert facts_of(full, (), T0, "loss is not a number") == (("now", said),)
    gone = full._replace(verdict="GONE", why="no job")
    assert facts_of(gone, (), T0) == (("now", "GONE (no job)"),), "what stands beside RUNNING is in no other word"


def test_only_what_was_accepted_counts_as_notified(mail: MailServer, tmp_path: Path) -> None:
    file = {"file": {"path": str(tmp_path / "told")}}
    alerts, journal = settings([mailbox(mail), file]), journal_in(tmp_path)
    mail.mood = "DATA 451"
    for minute in (0, 5, 20):
        tick(journal, alerts, minutes(minute), bad())
    said = alerts_cli(journal)
    assert "notified 2026-11-21 02:10 UTC (email: not delivered, tried 3 times; file: delivered)" in said
    mail.mood = "ok"
    tick(journal, alerts, minutes(60), bad())
    assert "(email: delivered; file: delivered)" in alerts_cli(journal)


def test_where_nobody_has_accepted_it_nobody_is_notified(mail: MailServer, tmp_path: Path) -> None:
    alerts, journal = settings([mailbox(mail)]), journal_in(tmp_path)
    mail.mood = "DATA 451"
    tick(journal, alerts, T0, bad())
    assert "nobody notified yet (email: not delivered, tried once)" in alerts_cli(journal)


def test_slack_has_a_colour_fields_and_the_commands_to_copy(chat: SlackServer, tmp_path: Path) -> None:
    alerts, journal = settings([bot(chat, tmp_path)]), journal_in(tmp_path)
    tick(journal, alerts, T0, bad())
    (post,) = chat.posts
    fields = [one["text"] for block in post.blocks for one in block.get("fields", ())]
    assert post.colour == "#c62828" and "*Limit*\n5 TB" in fields and "*Value*\n3.2 TB free" in fields
    text = post.readable().replace("│ ", "")
    assert "```ftsupervise alerts ack " in text and "```ftsupervise alerts silence " in text
    tick(journal, alerts, minutes(5), good())
    assert [post.colour for post in chat.posts] == ["#2e7d32", "#2e7d32"]


def test_what_is_no_longer_watched_is_no_all_clear(chat: SlackServer, tmp_path: Path) -> None:
    alerts, journal = settings([bot(chat, tmp_path)]), journal_in(tmp_path)
    tick(journal, alerts, T0, bad())
    tick(journal, alerts, T0 + timedelta(days=4))
    last = chat.posts[-1]
    assert "NO LONGER WATCHED" in last.text and last.colour == "#757575" and ":white_check_mark:" not in last.readable()
    message = next(one for one in incident(RUN, "/run", T0) if one.notices[0].reason.value == "unwatched")
    assert "#2e7d32" not in render("alert.html.j2", Parcel(message, T0), kind="html")


def restart(journal: Journal, alerts: Alerts, number: int, minute: float, *, quick: bool = True) -> None:
    now = minutes(minute)
    name, words = f"resumed-{number}", f"attempt {number} goes on, 1s after attempt {number - 1} ended"
    event = happened(EventKind.RESUMED, name, now, words, attempt=number, quick=quick, run=RUN)
    assert announce(journal, alerts, event, now)


def test_thirteen_restarts_of_a_second_are_three_mails_and_the_first_comes_at_once(
    mail: MailServer, tmp_path: Path
) -> None:
    alerts, journal = settings([mailbox(mail)]), journal_in(tmp_path)
    at = []
    for minute in range(0, 13 * 60, 30):  # a restart each hour
        if minute % 60 == 0:
            restart(journal, alerts, 2 + minute // 60, minute)
        at += [minute] * len(deliver([journal], alerts, minutes(minute)).sent)
    assert at == [0, 360, 720]
    texts = [str(one.get_content()) for one in mail.mails]
    assert [text.count("goes on, 1s after") for text in texts] == [1, 6, 6], "none is lost"
    assert [str(one["Subject"]).strip().split("]")[0] for one in mail.mails] == ["[RESUMED", "[RESUMED:6", "[RESUMED:6"]


def test_an_alert_that_restarts_have_waited_for_stands_before_them_with_its_own_time(
    mail: MailServer, tmp_path: Path
) -> None:
    alerts, journal = settings([mailbox(mail)]), journal_in(tmp_path)
    for number, minute in ((2, 0), (3, 20), (4, 40)):
        restart(journal, alerts, number, minute)
        deliver([journal], alerts, minutes(minute))
    tick(journal, alerts, minutes(180), bad())
    told = mail.mails[-1]
    assert str(told["Subject"]).startswith(f"[FIRING, RESUMED:2] {RUN}: {bad().summary[:12]}"), told["Subject"]
    assert parsedate_to_datetime(told["Date"]) == minutes(180)
    tick(journal, alerts, minutes(190), good())
    assert str(mail.mails[-1]["Subject"]).startswith(f"[RESOLVED] {RUN}")


def test_a_restart_that_costs_much_comes_at_once_and_brings_the_others_along(mail: MailServer, tmp_path: Path) -> None:
    alerts, journal = settings([mailbox(mail)]), journal_in(tmp_path)
    for number, minute in ((2, 0), (3, 20), (4, 40)):
        restart(journal, alerts, number, minute)
        deliver([journal], alerts, minutes(minute))
    restart(journal, alerts, 5, 60, quick=False)
    deliver([journal], alerts, minutes(60))
    assert [str(one.get_content()).count("goes on") for one in mail.mails] == [1, 3]
    restart(journal, alerts, 6, 70)
    tick(journal, alerts, minutes(75), bad())
    assert "FIRING" in str(mail.mails[2]["Subject"]) and "attempt 6 goes on" in str(mail.mails[2].get_content())
