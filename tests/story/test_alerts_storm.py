"""Many findings at once, names made by strangers, and secrets that must stay where they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ftsupervise.alerts.deliver import deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.receivers import Broken, TryLater, Unsendable, email, slack, webhook
from ftsupervise.alerts.record import record
from ftsupervise.alerts.wording import Parcel, clean, incident, render
from ftsupervise.config.alerting import Email, Slack, Webhook
from ftsupervise.findings import Finding, Severity
from ftsupervise.truth import Health
from tests.neighbours.slack import SlackServer, blocks_of
from tests.neighbours.smtp import MailServer
from tests.story.alerting_scene import RUN, T0, bad, bot, journal_in, mailbox, minutes, secret, settings, tick

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def chat() -> Iterator[SlackServer]:
    with SlackServer() as server:
        yield server


def ranks(run: str, count: int, health: Health) -> list[Finding]:
    say = "rank {} is silent for 12m, longer than 10m"
    return [Finding(run, "hang", f"rank {n}", health, Severity.WARNING, say.format(n), T0) for n in range(count)]


def test_five_thousand_findings_make_one_message_for_each_receiver_and_run(
    mail: MailServer, chat: SlackServer, tmp_path: Path
) -> None:
    alerts = settings([mailbox(mail), bot(chat, tmp_path)])
    one, other = journal_in(tmp_path / "one"), journal_in(tmp_path / "other")
    for now, health in ((T0, Health.BAD), (minutes(5), Health.BAD), (minutes(10), Health.OK)):
        record(one, ranks(RUN, 5000, health), alerts, now, run_name=RUN)
        record(other, ranks("second", 3, health), alerts, now, run_name="second")
        deliver([one, other], alerts, now)
    mails = {str(m["Subject"]).strip().split(" rank")[0]: str(m.get_content()) for m in mail.mails}
    assert len(mail.mails) == 4 and len(chat.posts) == 4
    assert set(mails) == {
        f"[{what}:{n}] {run}:" for what in ("FIRING", "RESOLVED") for n, run in ((5000, RUN), (3, "second"))
    }
    assert "+4980 more: 4980 hang fired" in mails[f"[FIRING:5000] {RUN}:"]
    assert all(f"rank {n} " in mails["[FIRING:3] second:"] for n in range(3))


# ------------------------------------------------------------------------------------------------- hostile names

CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
HOSTILE = [
    "name\r\nBcc: victim@example.org\r\n\r\nbody",
    "<!channel> <!here> <@U123> <#C1> <https://evil.example|click me> & &amp;",
    "`code` ```fence``` \\`",
    "\x1b[31mred\x1b[0m \x07 \x00 \u202etxt.exe",
    "x" * 10_000,
    "=?utf-8?q?=0ABcc:_x?= 名前 🚀 \ud800",
    "{{ 7 * 7 }} {% raw %}",
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "]]> --\n.\nMAIL FROM:<x@y>",
]
NAMES = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=300))


def hostile_message(name: str) -> Any:
    finding = Finding(
        name, name, name, Health.BAD, Severity.CRITICAL, name, T0, name, name, name, name, name, None, name, name
    )
    first = list(incident("run", "/run dir", T0))[1]
    from dataclasses import replace

    notice = replace(first.notices[0], finding=clean(finding), note=name)
    return replace(first, run=clean(finding).run, notices=(notice,))


def mrkdwn(text: str) -> dict[str, list[str]]:
    """A reader of Slack's mrkdwn of our own: what of it would be a mention, a link, code; and the plain rest."""
    found: dict[str, list[str]] = {"special": [], "code": [], "plain": []}
    position = 0
    for match in re.finditer(r"```(.*?)```|`([^`\n]*)`|<([^<>]*)>", text, re.S):
        found["plain"].append(text[position : match.start()])
        position = match.end()
        if match[3] is not None:
            found["special"].append(match[3])
        else:
            found["code"].append(match[1] if match[1] is not None else match[2])
    found["plain"].append(text[position:])
    return found


@pytest.mark.threat(
    "The name of a job is made to reach a mail header, or to mention everybody in Slack.",
    "ftsupervise cleans and escapes the name.",
)
@given(NAMES)
@example(HOSTILE[0])
@example(HOSTILE[1])
@example(HOSTILE[2])
@example(HOSTILE[3])
@example(HOSTILE[4])
@example(HOSTILE[5])
@hypothesis_settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_no_name_reaches_a_mail_header_or_a_mention(name: str) -> None:
    import email as parsing
    from email import policy

    message = hostile_message(name)
    parcel = Parcel(message, T0)
    about = {"host": "h", "from": "ft@example.org", "to": ["me@example.org"], "html": True}
    mail = email.compose(parcel, Email.model_validate_json(__import__("json").dumps(about)))
    parsed = parsing.message_from_bytes(mail.as_bytes(policy=policy.SMTP), policy=policy.default)
    assert sorted(parsed.keys()) == sorted(mail.keys()) and "Bcc" not in parsed and parsed["To"] == "me@example.org"
    assert not parsed.defects and len(str(parsed["Subject"])) <= 78
    body = parsed.get_body(("plain",))
    text = body.get_content().replace("\r\n", "\n") if body is not None else ""
    assert "silence  ftsupervise" in text and not CONTROL.search(text) and len(text) < 8000

    posted = slack.compose(parcel, Slack(token_env="T", channel="C1"))
    texts = [one for block in blocks_of(posted) for one in (block.get("text"), *block.get("fields", ())) if one]
    assert len(blocks_of(posted)) <= 50
    for one in texts:
        shown = one["text"]
        assert 0 < len(shown) <= (150 if one["type"] == "plain_text" else 3000) and not CONTROL.search(shown)
        if one["type"] == "mrkdwn":
            read = mrkdwn(shown)
            assert not read["special"] and not any("`" in part for part in read["plain"])
    assert not mrkdwn(posted["text"])["special"]
    codes = [code for one in texts[1:] for code in mrkdwn(one["text"])["code"]]
    assert any("alerts silence" in code for code in codes)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        assert tag == "meta" or all(name in ("style", "cellpadding") for name, _ in attrs)


@pytest.mark.threat(
    "The name of a job is made to become HTML or Slack markup, or to break JSON.",
    "ftsupervise escapes the name for each receiver.",
)
@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_becomes_markup_or_breaks_json(name: str) -> None:
    message = hostile_message(name)
    seen = Parcel(message, T0)
    tags = _Tags()
    tags.feed(render("alert.html.j2", seen, kind="html"))
    assert tags.seen <= {"html", "head", "meta", "body", "p", "div", "strong", "em", "table", "tr", "td", "code", "pre"}
    for shape in ("json", "pagerduty", "alertmanager"):
        about = Webhook(url="https://example.org/x", shape=shape, key_env="K")
        assert webhook.compose(seen, about)


@pytest.mark.threat(
    "A line of a log, or the name of a host, mentions everybody (`@everyone`, `@here`) in a chat that takes mentions "
    "out of plain text: Discord by way of Apprise, or Mattermost, which takes what is sent to Slack.",
    "Text of others calls nobody: a character that no eye sees stands behind the `@`. A template of your own may.",
)
@pytest.mark.parametrize("kind", ["chat", "slack"])
def test_no_name_calls_everybody_where_a_chat_takes_mentions_out_of_plain_text(kind: str, tmp_path: Path) -> None:
    """Discord, Matrix, and what speaks Slack's protocol (Mattermost) do; who writes a template may call whom they like."""
    seen = Parcel(hostile_message("@everyone @Channel @here @all <@&42> <#7> ada@example.org"), T0)
    text = render("alert.text.j2", seen, kind=kind)
    assert "everyone" in text and not re.search(
        r"@(everyone|here|channel|all|room)\b|<[@#](?!\u200b)", text, re.IGNORECASE
    )
    assert "ada@example.org" in text, "an address stays one"
    (tmp_path / "alert.text.j2").write_text("@here: {{ m.title }}")
    assert render("alert.text.j2", replace(seen, templates=tmp_path), kind=kind).startswith("@here: ")


def test_hostile_names_arrive_through_real_servers(mail: MailServer, chat: SlackServer, tmp_path: Path) -> None:
    alerts = settings([mailbox(mail), bot(chat, tmp_path)])
    for number, name in enumerate(HOSTILE):
        journal = journal_in(tmp_path / str(number))
        finding = Finding(name, name, name, Health.BAD, Severity.CRITICAL, name, T0, look=name, detail=name)
        record(journal, [finding], alerts, T0, run_name=name)
        assert len(deliver([journal], alerts, T0).sent) == 2, name
    assert len(mail.mails) == len(HOSTILE) == len({m["Message-ID"] for m in mail.mails})
    assert all(recipients == ["me@example.org"] for recipients in mail.recipients)


# -------------------------------------------------------------------------------------------------------- secrets

_TICK = """
import sys, os
from datetime import datetime, timezone
from pathlib import Path
from tests.story.alerting_scene import *
journal = journal_in(Path(sys.argv[1])); alerts = Alerts.model_validate_json(Path(sys.argv[2]).read_text())
notices, delivered = tick(journal, alerts, datetime.now(timezone.utc), bad())
print(delivered); print(alerts); print(sorted(open("/proc/self/cmdline").read().split(chr(0))))
"""


@pytest.mark.threat(
    "A secret could stand in a file, an output or the list of processes.",
    "ftsupervise reads secrets only when it sends a message, and writes them to none of these.",
)
@pytest.mark.parametrize("mood", ["well", "refusing", "down", "gone"])
def test_a_secret_is_in_no_file_no_output_and_no_process_list(tmp_path: Path, mood: str) -> None:
    canaries = [f"canary{n}secret{os.urandom(4).hex()}" for n in range(6)]
    vault, work = tmp_path / "vault", tmp_path / "work"
    vault.mkdir()
    work.mkdir()
    with MailServer(login=("me", "something else")) as mail, SlackServer() as chat:
        if mood != "well":
            mail.mood, chat.mood = ("EHLO 451", "503") if mood == "down" else ("EHLO 550", "error invalid_auth")
        base = "http://127.0.0.1:9" if mood == "gone" else f"http://127.0.0.1:{chat.port}"
        wanted = [
            mailbox(mail, user="me", password_file=secret(vault, "a", canaries[0]), security="starttls"),
            {"slack": {"token_file": secret(vault, "b", canaries[1]), "channel": "C", "api_url": f"{base}/api/"}},
            {"slack": {"webhook_file": secret(vault, "c", f"{base}/services/{canaries[2]}")}},
            {
                "webhook": {
                    "url_file": secret(vault, "d", f"{base}/{canaries[3]}"),
                    "key_file": secret(vault, "e", canaries[4]),
                }
            },
            {"webhook": {"shape": "pagerduty", "url": f"{base}/x", "key_env": "PD_KEY"}},
            {"file": {"path": str(work / "file")}},
        ]
        config = work / "config.json"
        config.write_text(settings(wanted).model_dump_json(by_alias=True))
        ended = subprocess.run(
            [sys.executable, "-c", _TICK, str(work / "run"), str(config)],
            cwd=ROOT,
            env={**os.environ, "PD_KEY": canaries[5]},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 0, ended.stderr
    assert "password" not in ended.stderr
    said = ended.stdout + ended.stderr
    files = [path for path in work.rglob("*") if path.is_file()]
    assert len(files) >= 4
    for text in [said, *(path.read_text("utf-8", "replace") for path in files)]:
        assert not [canary for canary in canaries if canary in text]


@pytest.mark.threat(
    "Other accounts can read a file that holds a secret.",
    "ftsupervise does not use the secret and sends an alert.",
)
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_secret_others_can_read_is_not_used_and_somebody_is_told(
    mail: MailServer, chat: SlackServer, tmp_path: Path, mode: int
) -> None:
    wanted = bot(chat, tmp_path)
    (tmp_path / "token").chmod(mode)
    tick(journal_in(tmp_path), settings([wanted, mailbox(mail)]), T0, bad())
    assert not chat.requests
    said = "\n".join(str(m.get_content()) for m in mail.mails)
    assert "can be read by others" in said and "chmod 600" in said


@pytest.mark.threat(
    "The traceback of a receiver's error holds a secret.",
    "ftsupervise removes the secret from the error.",
)
def test_an_error_of_a_receiver_has_no_secret_in_its_traceback(chat: SlackServer, tmp_path: Path) -> None:
    canary = "xoxb-canary-1234567"
    chat.mood = "error invalid_auth"
    about = Slack(token_file=Path(secret(tmp_path, "token", canary)), channel="C", api_url=chat.api_url)
    try:
        slack.send(Parcel(next(incident("run", "", T0)), T0), about)
    except (Broken, TryLater, Unsendable):
        assert canary not in traceback.format_exc()
    else:
        raise AssertionError("it should have been refused")


def test_time_is_told_in_utc_whatever_the_zone(tmp_path: Path, mail: MailServer) -> None:
    now = datetime.fromisoformat("2026-11-21T04:10:00+02:00")
    tick(journal_in(tmp_path), settings([mailbox(mail)]), now, bad(now))
    assert "since    2026-11-21 02:10 UTC" in mail.mails[0].get_content()


def test_the_journal_is_reached_by_nothing_but_its_own_names(tmp_path: Path) -> None:
    journal: Journal = journal_in(tmp_path)
    assert journal.home.endswith("/run/watch/journal")
