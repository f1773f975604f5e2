"""Telling that telling is in trouble: never through the receiver it is about, and never an end without a beginning."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftsupervise.alerts.journal import Journal
from ftsupervise.findings import Finding, Severity
from ftsupervise.truth import Health
from tests.neighbours.slack import SlackServer
from tests.neighbours.smtp import MailServer
from tests.story.alerting_scene import RUN, T0, bad, bot, good, mailbox, minutes, settings, tick


def about(receiver: str, texts: list[str]) -> list[str]:
    return [text for text in texts if f"receiver {receiver}" in text or f"{receiver} takes" in text]


@pytest.mark.fault(
    "Two receivers fail at once",
    "what is wrong with one is not sent through that one, and no end is told without a beginning",
)
def test_what_is_wrong_with_a_receiver_is_not_sent_through_it_when_the_other_fails_too(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    alerts = settings([bot(slack, tmp_path), mailbox(mail)])
    slack.mood, mail.mood = "error invalid_auth", "MAIL 550"
    tick(journal, alerts, T0, bad())
    slack.mood = "ok"
    bot(slack, tmp_path)  # somebody writes the token file anew
    for minute in (5, 10, 15):
        tick(journal, alerts, minutes(minute), bad())
    mail.mood = "ok"
    for minute in (80, 24 * 60 + 30, 24 * 60 + 35):
        tick(journal, alerts, minutes(minute), good())
    said = [post.readable() for post in slack.posts]
    assert said and not about("slack", said)
    heard = [str(m.get_content()) for m in mail.mails]
    began = sum("FIRING" in one for one in about("slack", heard))
    ended = sum("RESOLVED" in one for one in about("slack", heard))
    assert ended <= began


@pytest.mark.fault("The only route leads to the receiver that fails", "the others are told")
def test_a_route_that_leads_only_to_the_receiver_in_trouble_does_not_keep_it_quiet(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    alerts = settings([bot(slack, tmp_path), mailbox(mail)], routes=[{"to": ["slack"]}])
    slack.mood = "error invalid_auth"
    tick(journal, alerts, T0, bad())
    assert about("slack", [str(m.get_content()) for m in mail.mails]), "slack cannot say it"
    slack.mood = "ok"
    bot(slack, tmp_path)
    tick(journal, alerts, minutes(5), good())
    tick(journal, alerts, minutes(10), good())
    assert not about("slack", [post.readable() for post in slack.posts])
    assert any("RESOLVED" in str(m["Subject"]) for m in mail.mails)


@pytest.mark.fault("Slack takes no blocks", "the plain message names every notice")
@pytest.mark.parametrize("count", [3, 30])
def test_the_plain_fallback_names_each_of_several(
    slack: SlackServer, journal: Journal, tmp_path: Path, count: int
) -> None:
    slack.mood = "choke"
    many = [
        Finding(RUN, "hang", f"rank {n:02d}", Health.BAD, Severity.WARNING, f"rank {n:02d} is silent", T0)
        for n in range(count)
    ]
    tick(journal, settings([bot(slack, tmp_path)]), T0, *many)
    said = "\n".join(post.text for post in slack.posts)
    listed = min(count, 20)
    assert all(f"hang rank {n:02d}: rank {n:02d} is silent" in said for n in range(listed))
    assert ("+10 more" in said) == (count > 20)
    assert not slack.posts[0].blocks
