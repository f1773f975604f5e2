"""An outage that many runs have in common: one message for each receiver, which names the runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from ftsupervise.alerts.deliver import Delivered, deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.record import announce, record
from ftsupervise.alerts.wording import Parcel, render
from ftsupervise.config.alerting import Alerts
from ftsupervise.findings import EventKind, Finding, Severity, happened
from ftsupervise.truth import Health
from tests.neighbours.slack import SlackServer
from tests.neighbours.smtp import MailServer
from tests.story.alerting_scene import T0, bot, journal_in, mailbox, minutes, secret, settings

MANY = 24
RUNS = [f"train-{number:02d}" for number in range(MANY)]


@pytest.fixture
def chat() -> Iterator[SlackServer]:
    with SlackServer() as server:
        yield server


def tick(folder: Path, alerts: Alerts, now: datetime, health: Health, runs: list[str] = RUNS) -> Delivered:
    journals: list[Journal] = []
    for run in runs:
        words = f"the storage of /scratch/{run} has not answered for 20s"
        found = Finding(run, "storage", "run directory", health, Severity.CRITICAL, words, now)
        journals.append(journal_in(folder / run))
        record(journals[-1], [found], alerts, now, run_name=run)
    return deliver(journals, alerts, now, jitter=lambda: 0.0)


def test_one_disk_that_is_full_under_two_runs_is_one_mail_and_so_is_its_end(mail: MailServer, tmp_path: Path) -> None:
    alerts = settings([mailbox(mail)])
    for minute, health in ((0, Health.BAD), (5, Health.OK)):
        journals = [journal_in(tmp_path / run) for run in RUNS[:2]]
        for run, journal in zip(RUNS[:2], journals, strict=True):
            found = Finding(
                run, "disk", f"/scratch/{run} space", health, Severity.CRITICAL, "0 B left", minutes(minute)
            )
            record(journal, [found], alerts, minutes(minute), run_name=run)
        deliver(journals, alerts, minutes(minute), jitter=lambda: 0.0)
    assert [str(one["Subject"]) for one in mail.mails] == [
        "[FIRING:2] 2 runs: 0 B left (+1 more)",
        "[RESOLVED:2] 2 runs: 0 B left (+1 more)",
    ]
    assert all(run in str(mail.mails[0].get_content()) for run in RUNS[:2])


def waiting(folder: Path) -> int:
    return sum(len(journal_in(folder / run).read().outbox) for run in RUNS)


def test_an_outage_of_storage_under_many_runs_is_one_message_for_each_receiver(
    mail: MailServer, chat: SlackServer, tmp_path: Path
) -> None:
    hook = {"name": "hook", "slack": {"webhook_file": secret(tmp_path, "hook", chat.webhook_url)}}
    machine = {"name": "machine", "webhook": {"url": chat.machine_url}}
    alerts = settings([mailbox(mail), bot(chat, tmp_path), hook, machine])
    assert len(tick(tmp_path, alerts, T0, Health.BAD).sent) == 4 * MANY
    assert len(mail.mails) == 1 and waiting(tmp_path) == 0
    subject, text = str(mail.mails[0]["Subject"]), str(mail.mails[0].get_content())
    assert subject.startswith("[FIRING:24] 24 runs: the storage of") and all(run in text for run in RUNS)
    assert "+4 more: 4 storage fired" in text and text.count("ftsupervise alerts ack ") == 20
    assert "ftsupervise status" not in text.partition("see all")[2], "there is no one run to look at"
    assert len(chat.posts) == 3, "by the bot, by the hook, and our own JSON"
    assert all(all(run in post.readable() for run in RUNS) for post in chat.posts if post.blocks)

    assert len(tick(tmp_path, alerts, minutes(5), Health.OK).sent) == 4 * MANY
    assert len(mail.mails) == 2 and str(mail.mails[1]["Subject"]).startswith("[RESOLVED:24] 24 runs: ")
    assert len(chat.posts) == 6 and waiting(tmp_path) == 0
    assert [post.edits for post in chat.posts] == [0] * 6, "no post of many is written over by that of one"


def test_a_program_hears_of_each_alert_of_each_run_with_its_own_key(chat: SlackServer, tmp_path: Path) -> None:
    alerts = settings([{"webhook": {"url": chat.machine_url}}])
    tick(tmp_path, alerts, T0, Health.BAD)
    ((_, _, body),) = chat.requests
    assert [one["run"] for one in body["items"]] == RUNS and body["more"] == 0
    assert len({one["dedup_key"] for one in body["items"]}) == MANY
    assert all(one["acknowledge"].endswith(f"{tmp_path}/{one['run']}/run") for one in body["items"])


def test_a_joint_message_that_was_refused_is_tried_again_as_the_same(mail: MailServer, tmp_path: Path) -> None:
    alerts = settings([mailbox(mail)])
    mail.mood = "DATA 451"
    assert len(tick(tmp_path, alerts, T0, Health.BAD).failed) == MANY
    assert not mail.mails and waiting(tmp_path) == MANY
    mail.mood = "reset ."
    tick(tmp_path, alerts, minutes(5), Health.BAD)
    mail.mood = "ok"
    tick(tmp_path, alerts, minutes(10), Health.BAD)
    assert waiting(tmp_path) == 0 and len(mail.mails) == 2 and len({m["Message-ID"] for m in mail.mails}) == 1


def test_one_recipient_who_is_deferred_gets_the_joint_mail_later_and_the_other_not_twice(
    mail: MailServer, tmp_path: Path
) -> None:
    alerts = settings([mailbox(mail, to=["me@example.org", "you@example.org"])])
    mail.mood = "later you"
    tick(tmp_path, alerts, T0, Health.BAD)
    mail.mood = "ok"
    tick(tmp_path, alerts, minutes(5), Health.BAD)
    assert mail.recipients == [["me@example.org"], ["you@example.org"]] and waiting(tmp_path) == 0


def test_the_messages_of_three_runs_go_apart(mail: MailServer, tmp_path: Path) -> None:
    tick(tmp_path, settings([mailbox(mail)]), T0, Health.BAD, RUNS[:3])
    assert sorted(str(m["Subject"]).split()[1] for m in mail.mails) == [f"{run}:" for run in RUNS[:3]]


def test_behind_the_alert_that_matters_the_starts_of_many_runs_have_a_line_each(
    mail: MailServer, tmp_path: Path
) -> None:
    journals, alerts = [], settings([mailbox(mail)])
    for run in RUNS[:14]:
        journals.append(journal_in(tmp_path / run))
        began = happened(EventKind.STARTED, "started", T0, "job 7_1", run=run)
        bad = Finding(run, "brake", "chain", Health.BAD, Severity.CRITICAL, "stopped by the brake: exit 1", T0)
        announce(journals[-1], alerts, began, T0)
        record(journals[-1], [bad] if run == RUNS[0] else [], alerts, T0, run_name=run)
    written = [message for journal in journals for message in journal.read().outbox]
    deliver(journals, alerts, T0, jitter=lambda: 0.0)
    (one,) = mail.mails
    lines = str(one.get_content()).splitlines()
    assert lines.index(f"FIRING (critical)  {RUNS[0]}: brake chain") < lines.index(f"STARTED  {RUNS[0]}: job 7_1")
    at = lines.index(f"STARTED  {RUNS[0]}: job 7_1")
    assert lines[at : at + 10] == [f"STARTED  {run}: job 7_1" for run in RUNS[:10]]
    together = replace(written[0], notices=tuple(notice for message in written for notice in message.notices))
    html = render("alert.html.j2", Parcel(together, T0), kind="html")
    assert html.count("<table") == 1 and "STARTED</strong>&ensp;train-03: job 7_1" in html
