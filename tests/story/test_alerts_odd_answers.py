"""One odd answer silences nobody: a proxy's page, a 404, a 554 as greeting are tried again, and told elsewhere meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.alerts import outbox
from ftsupervise.alerts.journal import Journal
from tests.neighbours.slack import SlackServer
from tests.neighbours.smtp import MailServer
from tests.story.alerting_scene import T0, bad, bot, good, mailbox, minutes, secret, settings, tick

ROOT = Path(__file__).resolve().parents[2]
PAGE = "<!DOCTYPE html><html><body>Please log in to the network</body></html>"
GREETINGS = ["greet 554", "greet 521", "greet 550", "greet 200", "greet hello", "EHLO 554", "EHLO 502"]
ANSWERS = [f"answer {status} {PAGE}" for status in (200, 401, 403, 404, 405, 407, 451, 503)]
ANSWERS += [
    "answer 200",
    "answer 204",
    "answer 200 []",
    "answer 200 null",
    "answer 200 7",
    "answer 200 {}",
    "answer 404",
]
ANSWERS += ["redirect http://127.0.0.1:9/elsewhere", "answer 302", "answer 301", "answer 200 <HTML> ok </HTML>"]
MACHINE = [one for one in ANSWERS if "<" in one or not one.startswith("answer 2")]  # an empty 200 is a machine's yes


def hook(server: SlackServer, directory: Path, **more: Any) -> dict[str, Any]:
    return {"slack": {"webhook_file": secret(directory, "hook", server.webhook_url), **more}}


def machine(server: SlackServer) -> dict[str, Any]:
    return {"webhook": {"url": server.machine_url}}


@pytest.mark.fault(
    "The mail server greets with 554, 521, or with something that is no SMTP",
    "the mail arrives minutes later, also with no other receiver",
)
@pytest.mark.parametrize("mood", GREETINGS)
def test_an_odd_greeting_of_the_only_mail_server_costs_minutes(mail: MailServer, journal: Journal, mood: str) -> None:
    alerts = settings([mailbox(mail, timeout="3s")])
    mail.mood = mood
    assert tick(journal, alerts, T0, bad())[1].critical_waiting == 1
    mail.mood = "ok"
    tick(journal, alerts, minutes(5), bad())
    assert len(mail.mails) == 1 and "FIRING" in str(mail.mails[0]["Subject"])


@pytest.mark.fault(
    "Slack, or a proxy in front of it, answers with a web page, nothing, a redirect, 403 or 404",
    "it counts as not delivered and is tried again within minutes",
)
@pytest.mark.parametrize("mood", ANSWERS)
@pytest.mark.parametrize("way", ["token", "webhook"])
def test_an_odd_answer_of_the_only_slack_costs_minutes(
    slack: SlackServer, journal: Journal, tmp_path: Path, mood: str, way: str
) -> None:
    alerts = settings([bot(slack, tmp_path) if way == "token" else hook(slack, tmp_path)])
    slack.mood = mood
    assert tick(journal, alerts, T0, bad())[1].critical_waiting == 1, "an answer that is not Slack's yes is none"
    slack.mood = "ok"
    tick(journal, alerts, minutes(5), bad())
    assert [post.text.partition("]")[0] for post in slack.posts] == ["[FIRING"]


@pytest.mark.fault("A webhook answers 200 with a login page, or 404", "the same")
@pytest.mark.parametrize("mood", MACHINE)
def test_an_odd_answer_of_the_only_webhook_costs_minutes(slack: SlackServer, journal: Journal, mood: str) -> None:
    alerts = settings([machine(slack)])
    slack.mood = mood
    assert tick(journal, alerts, T0, bad())[1].critical_waiting == 1
    slack.mood = "ok"
    tick(journal, alerts, minutes(5), bad())
    assert len(slack.posts) == 1


@pytest.mark.fault(
    "The program of a command receiver is on a file system that is away for a moment",
    "it is called again",
)
def test_a_program_that_is_away_for_a_moment_is_called_again(journal: Journal, tmp_path: Path) -> None:
    script = tmp_path / "script"
    alerts = settings([{"command": {"argv": [str(script)]}}])
    assert tick(journal, alerts, T0, bad())[1].critical_waiting == 1
    script.write_text(f"#!/bin/sh\ncat > {tmp_path}/out\n")
    script.chmod(0o755)
    tick(journal, alerts, minutes(5), bad())
    assert "3.2 TB free" in (tmp_path / "out").read_text()


@pytest.mark.fault(
    "A receiver refuses, perhaps for good",
    "the message and the refusal are told through another receiver, and its end too",
)
def test_an_odd_answer_is_told_through_another_receiver_and_so_is_its_message(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    alerts = settings([bot(slack, tmp_path), mailbox(mail)], routes=[{"to": ["slack"]}])
    slack.mood = f"answer 403 {PAGE}"
    tick(journal, alerts, T0, bad())
    said = "\n".join(str(m.get_content()) for m in mail.mails)
    assert "This was for slack" in said and "3.2 TB free" in said
    assert "slack refuses its messages: HTTP 403" in said and "notify test --receiver slack" in said
    slack.mood = "ok"
    tick(journal, alerts, minutes(5), bad())
    tick(journal, alerts, minutes(10), good())
    assert [post.text.partition("]")[0] for post in slack.posts][-1] == "[RESOLVED"
    said = "\n".join(" ".join(str(m["Subject"]).split()) for m in mail.mails)
    assert said.count("[RESOLVED") >= 1, "that it was told to refuse is told to be over"


@pytest.mark.fault(
    "A receiver refuses for hours",
    "it is tried with growing pauses, at most a quarter of an hour, and never given up for that",
)
def test_a_receiver_that_keeps_refusing_is_tried_with_growing_pauses_and_never_given_up(
    slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    alerts = settings([bot(slack, tmp_path)])
    slack.mood = "answer 404"
    for minute in range(360):
        tick(journal, alerts, minutes(minute), bad())
    tries = len(slack.requests)
    assert 24 <= tries <= 60, "it grows to a quarter of an hour, and not beyond"
    slack.mood = "ok"
    tick(journal, alerts, minutes(376), bad())
    assert slack.posts


@pytest.mark.fault("The only receiver was given up for certain", "it is tried each hour")
def test_the_only_receiver_is_tried_each_hour_even_when_it_was_given_up(
    slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    alerts = settings([bot(slack, tmp_path)])
    slack.mood = "error invalid_auth"
    tick(journal, alerts, T0, bad())
    asked = len(slack.requests)
    for minute in range(1, 55):
        tick(journal, alerts, minutes(minute), bad())
    assert len(slack.requests) == asked, "what is certain is left alone"
    slack.mood = "ok"
    tick(journal, alerts, minutes(61), bad())
    assert slack.posts


_TICK = """
import json, sys; from datetime import datetime, timezone; from pathlib import Path
from ftsupervise.alerts.deliver import deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.record import record
from ftsupervise.alerts.wording import disk
from ftsupervise.config.alerting import Alerts
alerts, now = Alerts.model_validate_json(sys.argv[2]), datetime.now(timezone.utc)
journal = Journal(sys.argv[1])
record(journal, [disk("run", now)], alerts, now, run_name="run")
done = deliver([journal], alerts, now)
print(json.dumps({"sent": len(done.sent), "failed": [why for _, why in done.failed]}))
"""


@pytest.mark.fault(
    "Two receivers import the same library for the first time in two threads",
    "what a receiver needs is imported before the threads start",
)
@pytest.mark.parametrize("kind", ["slack", "webhook", "mixed"])
def test_two_receivers_of_a_fresh_process_import_their_libraries_before_their_threads(
    slack: SlackServer, mail: MailServer, tmp_path: Path, kind: str
) -> None:
    two = {
        "slack": [bot(slack, tmp_path), {"name": "second", **hook(slack, tmp_path)}],
        "webhook": [machine(slack), {"name": "second", **machine(slack)}],
        "mixed": [bot(slack, tmp_path), hook(slack, tmp_path), machine(slack), mailbox(mail)],
    }[kind]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    for number in range(4 if kind == "slack" else 1):
        journal = str(tmp_path / f"journal-{number}")
        command = [sys.executable, "-c", _TICK, journal, json.dumps({"receivers": two})]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"sent": len(two), "failed": []}


@pytest.mark.fault("The library of one receiver cannot be loaded", "the others send, and the error is told")
def test_a_library_that_cannot_be_loaded_costs_the_other_receivers_nothing(
    mail: MailServer, slack: SlackServer, tmp_path: Path
) -> None:
    broken = tmp_path / "broken" / "slack_sdk"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('half installed')\n")
    receivers = json.dumps({"receivers": [bot(slack, tmp_path), mailbox(mail)]})
    environment = {**os.environ, "PYTHONPATH": f"{broken.parent}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", _TICK, str(tmp_path / "journal"), receivers],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = json.loads(done.stdout)
    assert said["sent"] == 1 and "slack cannot be loaded: RuntimeError: half installed" in said["failed"][0]
    assert len(mail.mails) == 1


# ------------------------------------------------------------------------------------------ recipients of one mail


def addressed(server: MailServer, to: str) -> list[str]:
    """What stands in the brackets of the subjects that ``to`` was sent, in the order they came."""
    pairs = zip(server.mails, server.recipients, strict=True)
    return [" ".join(str(m["Subject"]).split())[1:].partition("]")[0] for m, who in pairs if to in who]


@pytest.mark.fault(
    "One of two recipients is greylisted",
    "that one gets the mail later, the other does not get it twice",
)
def test_who_was_greylisted_gets_the_mail_later_and_the_other_does_not_get_it_twice(
    mail: MailServer, journal: Journal
) -> None:
    alerts = settings([mailbox(mail, to=["me@example.org", "you@example.org"])], repeat=None)
    mail.mood = "later you"
    tick(journal, alerts, T0, bad())
    assert mail.recipients == [["me@example.org"]]
    mail.mood = "ok"
    tick(journal, alerts, minutes(5), bad())
    assert mail.recipients == [["me@example.org"], ["you@example.org"]]
    assert len({m["Message-ID"] for m in mail.mails}) == 1
    tick(journal, alerts, minutes(10), bad())
    assert len(mail.mails) == 2 and not journal.read().outbox


@pytest.mark.fault(
    "One recipient is put off for hours",
    "everything arrives later, in order, and nobody else is held up",
)
def test_who_is_put_off_hears_everything_in_order_and_holds_up_nobody(mail: MailServer, journal: Journal) -> None:
    alerts = settings([mailbox(mail, to=["me@example.org", "you@example.org"])], repeat="1h")
    mail.mood = "later you"
    for minute in range(0, 130, 5):
        tick(journal, alerts, minutes(minute), bad())
    tick(journal, alerts, minutes(130), good())
    fired = ["FIRING", "STILL FIRING", "STILL FIRING", "RESOLVED"]
    assert [word for word in addressed(mail, "me@example.org") if "email" not in word] == fired
    mail.mood = "ok"
    tick(journal, alerts, minutes(150), good())
    assert [word for word in addressed(mail, "you@example.org") if "email" not in word] == fired
    assert not journal.read().outbox


@pytest.mark.fault(
    "One recipient is put off for days",
    "others hear of it after 15 minutes; the mail is given up after five days, and that is said",
)
def test_who_is_put_off_for_long_is_told_to_others_and_given_up_after_five_days(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    to = ["me@example.org", "you@example.org"]
    alerts = settings([mailbox(mail, to=to), bot(slack, tmp_path)], repeat=None)
    mail.mood = "later you"
    tick(journal, alerts, T0, bad())
    tick(journal, alerts, minutes(5), bad())
    assert not any("does not reach everybody" in post.text for post in slack.posts), "greylisting takes minutes"
    tick(journal, alerts, minutes(20), bad())
    assert any("you@example.org put off since" in post.text for post in slack.posts)
    tick(journal, alerts, T0 + outbox.PUT_OFF_FOR + timedelta(hours=1), bad())
    tick(journal, alerts, T0 + outbox.PUT_OFF_FOR + timedelta(hours=2), bad())
    assert not journal.read().outbox and "gave up after 5 days" in journal.read().receivers["email"].refused
    assert addressed(mail, "you@example.org") == []


def test_of_three_recipients_one_is_refused_one_put_off_and_one_has_it(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    alerts = settings([mailbox(mail, to=["me@example.org", "you@example.org"]), bot(slack, tmp_path)])
    mail.mood = "later you"
    tick(journal, alerts, T0, bad())
    mail.mood = "refuse you"
    tick(journal, alerts, minutes(5), bad())
    assert not journal.read().outbox, "what is certain is not tried again"
    assert any("you@example.org: 550" in post.text for post in slack.posts)
    assert addressed(mail, "me@example.org").count("FIRING") == 1
