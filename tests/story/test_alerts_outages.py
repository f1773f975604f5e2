"""Servers that are down, slow, rude or gone: nothing is lost, nothing waits in a tick, and somebody is told."""

from __future__ import annotations

import time
from datetime import timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

from ftsupervise.alerts import outbox
from ftsupervise.alerts.deliver import deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.record import record
from ftsupervise.findings import Reason
from tests.neighbours.proxy import Proxy
from tests.neighbours.slack import SlackServer
from tests.neighbours.smtp import MailServer
from tests.story.alerting_scene import (
    RUN,
    T0,
    bad,
    bot,
    email,
    good,
    mailbox,
    minutes,
    secret,
    settings,
    tick,
)

VERBS = ("EHLO", "MAIL", "RCPT", "DATA", ".")


@pytest.mark.fault("The mail server puts a message off", "it arrives once, later")
@pytest.mark.parametrize("mood", [f"{verb} 451" for verb in VERBS] + [f"hang {verb}" for verb in VERBS])
def test_mail_that_is_put_off_arrives_once_later(mail: MailServer, journal: Journal, mood: str) -> None:
    alerts = settings([mailbox(mail, timeout="2s" if "hang" in mood else "15s")])
    mail.mood = mood
    _, delivered = tick(journal, alerts, T0, bad())
    assert not delivered.sent and delivered.critical_waiting == 1
    mail.mood = "ok"
    assert not tick(journal, alerts, minutes(0.05), bad())[1].sent, "it must rest first"
    assert len(tick(journal, alerts, minutes(5), bad())[1].sent) == 1
    assert len(mail.mails) == 1


@pytest.mark.fault("The mail server's answer is lost", "the message comes again under the same id")
def test_mail_whose_answer_was_lost_comes_again_under_the_same_id(mail: MailServer, journal: Journal) -> None:
    alerts = settings([mailbox(mail)])
    mail.mood = "reset ."
    tick(journal, alerts, T0, bad())
    mail.mood = "ok"
    tick(journal, alerts, minutes(5), bad())
    assert len(mail.mails) == 2 and len({m["Message-ID"] for m in mail.mails}) == 1


def test_a_reset_after_the_mail_was_taken_is_no_failure(mail: MailServer, journal: Journal) -> None:
    alerts = settings([mailbox(mail)])
    mail.mood = "reset QUIT"
    assert len(tick(journal, alerts, T0, bad())[1].sent) == 1
    tick(journal, alerts, minutes(5), bad())
    assert len(mail.mails) == 1


@pytest.mark.fault("A receiver refuses for good", "another receiver is notified at once")
@pytest.mark.parametrize("mood", [f"{verb} 550" for verb in ("MAIL", "RCPT")])
def test_a_refusal_for_good_is_told_through_another_receiver_at_once(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path, mood: str
) -> None:
    alerts = settings([mailbox(mail), bot(slack, tmp_path)])
    mail.mood = mood
    tick(journal, alerts, T0, bad())
    assert any("email takes no messages any more" in post.text for post in slack.posts)
    connections = len(mail.recipients)
    for minute in range(5, 60, 5):
        tick(journal, alerts, minutes(minute), bad())
    assert len(mail.recipients) == connections, "a broken receiver is left alone"
    mail.mood = "ok"
    tick(journal, alerts, T0 + timedelta(days=1, minutes=1), bad())
    tick(journal, alerts, T0 + timedelta(days=1, minutes=6), good())
    subjects = [str(m["Subject"]).split("]")[0] for m in mail.mails]
    assert "FIRING" in subjects[0] and subjects[-1] == "[RESOLVED"
    assert any("RESOLVED" in post.text and "email takes" in post.text for post in slack.posts)


@pytest.mark.fault("A mail is refused for what it says", "others get it, and no other mail is held up")
@pytest.mark.parametrize("mood", ["DATA 550", ". 550", ". 552", ". 554"])
def test_a_refusal_of_what_one_mail_says_is_told_through_another_receiver_and_stops_no_other_mail(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path, mood: str
) -> None:
    alerts = settings([mailbox(mail), bot(slack, tmp_path)])
    mail.mood = mood
    tick(journal, alerts, T0, bad())
    assert any("it refuses a message" in post.text for post in slack.posts)
    mail.mood = "ok"
    tick(journal, alerts, minutes(5), good())
    assert {str(m["Subject"]).split("]")[0] for m in mail.mails} == {"[FIRING", "[RESOLVED"}


@pytest.mark.fault("One of several recipients is refused", "the others get their mail")
def test_one_refused_recipient_does_not_cost_the_others_their_mail(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    alerts = settings([mailbox(mail, to=["gone@example.org", "me@example.org"]), bot(slack, tmp_path)])
    mail.mood = "refuse gone"
    tick(journal, alerts, T0, bad())
    assert mail.recipients[0] == ["me@example.org"]
    assert any("does not reach everybody" in post.text and "gone@example.org" in post.text for post in slack.posts)


@pytest.mark.parametrize(
    ("value", "first", "last"),
    [
        ("1", 0.1, 5),
        ("600", 9.9, 10.1),
        (format_datetime(T0 + timedelta(minutes=20)), 19.9, 21),
        (format_datetime(T0 - timedelta(minutes=20)), 0.1, 5),
        ("1000000000", 59.9, 61),
        ("soon", 0.1, 5),
        ("", 0.1, 5),
    ],
)
def test_retry_after_is_obeyed_and_absurd_values_are_capped(
    slack: SlackServer, journal: Journal, tmp_path: Path, value: str, first: float, last: float
) -> None:
    alerts = settings([bot(slack, tmp_path)])
    slack.mood = f"429 {value}"
    start = time.monotonic()
    tick(journal, alerts, T0, bad())
    assert time.monotonic() - start < 5, "nothing sleeps in a tick"
    slack.mood = "ok"
    tick(journal, alerts, minutes(first), bad())
    assert not slack.posts
    tick(journal, alerts, minutes(last), bad())
    assert len(slack.posts) == 1


@pytest.mark.parametrize("mood", ["500", "503", "reset", "slow 3", "error internal_error"])
def test_slack_in_trouble_gets_the_message_later(
    slack: SlackServer, journal: Journal, tmp_path: Path, mood: str
) -> None:
    alerts = settings([bot(slack, tmp_path, timeout="2s" if "slow" in mood else "15s")])
    slack.mood = mood
    tick(journal, alerts, T0, bad())
    slack.mood = "ok"
    tick(journal, alerts, minutes(5), bad())
    assert slack.posts and len({post.key for post in slack.posts}) == 1


@pytest.mark.parametrize("mood", ["error invalid_auth", "error channel_not_found", "410"])
def test_slack_that_says_no_for_good_is_broken_until_the_token_changes(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path, mood: str
) -> None:
    alerts = settings([bot(slack, tmp_path), mailbox(mail)])
    slack.mood = mood
    tick(journal, alerts, T0, bad())
    assert any("slack takes no messages any more" in str(m["Subject"]) + str(m.get_content()) for m in mail.mails)
    asked = len(slack.requests)
    tick(journal, alerts, minutes(60), bad())
    assert len(slack.requests) == asked
    slack.mood = "ok"
    bot(slack, tmp_path)  # somebody writes the token file anew
    tick(journal, alerts, minutes(65), bad())
    assert "FIRING" in slack.posts[0].text


@pytest.mark.threat(
    "A receiver's server redirects a request that carries a token.",
    "ftsupervise does not follow the redirect.",
)
def test_a_redirect_is_not_followed_because_the_token_would_go_with_it(
    slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    with SlackServer() as thief:
        slack.mood = f"redirect {thief.api_url}chat.postMessage"
        tick(journal, settings([bot(slack, tmp_path)]), T0, bad())
        hook = {"slack": {"webhook_file": secret(tmp_path, "hook", slack.webhook_url)}}
        tick(journal, settings([hook]), T0, bad())
        assert len(slack.requests) >= 2 and not thief.requests


def test_a_message_slack_chokes_on_is_sent_again_as_plain_text(
    slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    slack.mood = "choke"
    tick(journal, settings([bot(slack, tmp_path)]), T0, bad())
    assert slack.posts and not slack.posts[0].blocks and "3.2 TB free" in slack.posts[0].text


def test_a_message_nobody_can_render_goes_to_another_receiver(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    slack.mood = "error msg_too_long"
    only_slack = [{"to": ["slack"]}]
    tick(journal, settings([bot(slack, tmp_path), mailbox(mail)], routes=only_slack), T0, bad())
    assert not slack.posts and any("This was for slack" in str(m.get_content()) for m in mail.mails)


@pytest.mark.parametrize("mood", ["refuse", "half-open", "reset", "reset 200", "delay 0.05"])
def test_a_bad_network_loses_no_mail(mail: MailServer, journal: Journal, mood: str) -> None:
    with Proxy(mail.port) as proxy:
        alerts = settings([email(proxy.port, timeout="2s" if mood in ("half-open", "reset") else "15s")])
        proxy.mood = mood
        tick(journal, alerts, T0, bad())
        proxy.mood = "ok"
        tick(journal, alerts, minutes(5), bad())
        assert mail.mails and len({m["Message-ID"] for m in mail.mails}) == 1


@pytest.mark.fault("A receiver hangs", "the others are not held up")
def test_a_receiver_that_hangs_does_not_hold_up_the_others(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    mail.mood = "hang DATA"
    alerts = settings([mailbox(mail, timeout="60s"), bot(slack, tmp_path)])
    record(journal, [bad()], alerts, T0, run_name=RUN)
    start = time.monotonic()
    deliver([journal], alerts, T0, budget=timedelta(seconds=3))
    assert time.monotonic() - start < 40
    assert len(slack.posts) == 1


@pytest.mark.fault("The network is down all night", "two messages come, not two hundred")
def test_after_a_night_without_network_two_messages_come_not_two_hundred(
    slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    alerts = settings([bot(slack, tmp_path)])
    slack.mood = "503"
    fired = 0
    for minute in range(0, 600, 5):
        notices, _ = tick(journal, alerts, minutes(minute), bad() if minute // 60 % 2 == 0 else good())
        fired += sum(1 for n in notices if n.reason is Reason.FIRED and n.finding.watchdog == "disk")
    slack.mood = "ok"
    tick(journal, alerts, minutes(660), good())
    assert fired == 4 and 1 <= len(slack.posts) <= 3, "from the third time on it has to stay good for longer"
    said = "\n".join(post.readable() for post in slack.posts)
    assert sum(post.readable().count("*RESOLVED*") for post in slack.posts if not post.edits) == fired
    assert "could not be delivered sooner: HTTP 503" in said


def test_the_dead_man_counts_what_reached_nobody_not_what_one_of_two_missed(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    slack.mood = "503"
    _, delivered = tick(journal, settings([bot(slack, tmp_path), mailbox(mail)]), T0, bad())
    assert (delivered.waiting, delivered.critical_waiting) == (1, 0)
    mail.mood = "DATA 451"
    _, delivered = tick(journal, settings([bot(slack, tmp_path), mailbox(mail)]), minutes(5), good())
    assert delivered.critical_waiting == 2


def test_backoff_grows_has_a_limit_and_spreads() -> None:
    waits = [outbox.backoff(n, 1.0) for n in range(1, 12)]
    assert waits[0] == timedelta(seconds=20) and waits == sorted(waits) and waits[-1] == outbox.BACKOFF_MOST
    assert outbox.backoff(3, 0.0) == outbox.backoff(3, 1.0) / 2
