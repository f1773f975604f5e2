"""Random nights: servers with moods, watchers that are killed at any instant, two of them at a time.

What is promised: every trouble that a watcher lived to write down is told, and told to be over, to every receiver and to
every recipient of a mail, whatever the servers answer; what arrives twice carries the same key. How often it does is printed.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.alerts.journal import parse
from ftsupervise.findings import Reason
from tests.neighbours.proxy import Proxy
from tests.neighbours.slack import TOKEN, SlackServer
from tests.neighbours.smtp import MailServer
from tests.story.alerting_forks import Watchers
from tests.story.alerting_scene import T0, secret

TICKS = 10
MAIL_MOODS = ["MAIL 451", "RCPT 451", "DATA 451", ". 451", "EHLO 421", "MAIL 550", ". 554", "hang MAIL", "hang ."]
MAIL_TWICE = ["reset .", "reset QUIT"]  # the mail was taken, and the sender cannot know
SLACK_MOODS = [
    "429 1",
    "429 400",
    "429",
    "500",
    "503",
    "error invalid_auth",
    "404",
    "error ratelimited",
    "redirect http://x/",
]
SLACK_TWICE = ["reset"]
PAGE = "<!DOCTYPE html><html><title>Sign in</title></html>"
ODD_MAIL = [
    "greet 554",
    "greet 521",
    "greet 200",
    "greet hello",
    "EHLO 554",
    "later you",
    "later you",
    "later",
    "MAIL 554",
]
ODD_MAIL += ["RCPT 554", "RCPT 552", "DATA 550", ". 550", ". 571"]
ODD_HTTP = [f"answer {status} {PAGE}" for status in (200, 401, 403, 404, 405, 407, 503)]
ODD_HTTP += ["answer 302", "answer 403", "answer 404", "answer 418", "answer 400 what", "error oh_no"]
ODD_SLACK = [
    *ODD_HTTP,
    "answer 200",
    "answer 204",
    "answer 200 []",
    "answer 200 null",
    "answer 200 {}",
    "answer 200 maybe",
]
NET_MOODS = ["refuse", "refuse", "half-open", "reset 60", "delay 0.01", "delay 0.03"]


@dataclass
class Night:
    """What happened, for the judgement in the morning."""

    phases: list[tuple[str, datetime, datetime]] = field(default_factory=list)  # name, first and last bad look
    seen: set[tuple[str, datetime]] = field(default_factory=set)  # looks that a watcher lived to the end of
    killed: int = 0


@dataclass
class Neighbourhood:
    """The servers all nights share."""

    mail: MailServer
    slack: SlackServer
    mail_net: Proxy
    slack_net: Proxy
    machine: SlackServer | None = None  # takes our own JSON, where the servers answer anything

    def moods(self, chance: random.Random, trouble: float) -> None:
        odd = self.machine is not None
        servers: list[tuple[MailServer | SlackServer, list[str], list[str]]] = [
            (self.mail, MAIL_MOODS + ODD_MAIL * odd, MAIL_TWICE),
            (self.slack, SLACK_MOODS + ODD_SLACK * odd, SLACK_TWICE),
        ]
        servers += [(self.machine, SLACK_MOODS + ODD_HTTP, SLACK_TWICE)] if self.machine is not None else []
        for server, passing, twice in servers:
            roll = chance.random()
            server.mood = chance.choice(twice) if roll < 0.004 else chance.choice(passing) if roll < trouble else "ok"
        for net in (self.mail_net, self.slack_net):
            net.mood = chance.choice(NET_MOODS) if chance.random() < trouble / 2 else "ok"

    def calm(self) -> None:
        self.mail.mood = self.slack.mood = self.mail_net.mood = self.slack_net.mood = "ok"
        if self.machine is not None:
            self.machine.mood = "ok"


def configure(directory: Path, place: Neighbourhood) -> Path:
    email = {
        "host": "127.0.0.1",
        "port": place.mail_net.port,
        "from": "ft@example.org",
        "to": ["me@example.org"] + ["you@example.org"] * (place.machine is not None),
        "timeout": "400ms",
    }
    token = secret(directory, "token", TOKEN)
    api = f"http://127.0.0.1:{place.slack_net.port}/api/"
    slack = {"token_file": token, "channel": "C1", "api_url": api, "timeout": "400ms"}
    receivers: list[dict[str, Any]] = [{"email": email}, {"slack": slack}]
    if place.machine is not None:
        receivers.append({"webhook": {"url": place.machine.machine_url, "timeout": "400ms"}})
    path = directory / "alerts.json"
    path.write_text(json.dumps({"receivers": receivers, "repeat": "3h"}))
    return path


def one_night(seed: int, directory: Path, place: Neighbourhood, watchers: Watchers) -> Night:
    chance, night = random.Random(seed), Night()
    home = directory / f"run-{seed}"
    home.mkdir()
    config = configure(home, place)
    looks = {name: _looks(chance) for name in ("a", "b")}
    for name, line in looks.items():
        night.phases += [(name, T0 + timedelta(minutes=5 * a), T0 + timedelta(minutes=5 * b)) for a, b in _phases(line)]
    for index in range(TICKS):
        now = T0 + timedelta(minutes=5 * index)
        place.moods(chance, trouble=0.35)
        seen = {name: line[index] for name, line in looks.items()}
        children = [_watcher(chance, home, config, seen, kills=0.1) for _ in range(2)]
        lived = watchers.tick(now, children)
        night.killed += lived.count(False)
        if any(lived):
            night.seen |= {(name, now) for name, look in seen.items() if look is not None}
    place.calm()
    for after in (2, 4, 27, 28, 29, 30, 31):  # hours
        calm = _watcher(chance, home, config, {"a": False, "b": False}, kills=0)
        assert watchers.tick(T0 + timedelta(hours=after), [calm]) == [True]
        newest, _ = parse(max((home / "journal").glob("*.json")).read_bytes())
        if after >= 28 and not newest.outbox:  # else a receiver had no turn for as long as it is waited for
            break
    return night


def _looks(chance: random.Random) -> list[bool | None]:
    """At most two troubles, so that it does not count as flapping; now and then nobody can see."""
    line: list[bool | None] = [False] * TICKS
    starts = sorted(chance.sample(range(TICKS - 1), 2))
    for start in starts:
        for index in range(start, min(start + chance.randint(1, 4), TICKS)):
            line[index] = True
    return [None if chance.random() < 0.08 else look for look in line]


def _phases(line: list[bool | None]) -> list[tuple[int, int]]:
    """Runs of bad looks with no good one between: what is one trouble to somebody who cannot always see."""
    out: list[tuple[int, int]] = []
    open_ = False
    for index, look in enumerate(line):
        if look:
            out = [*out[:-1], (out[-1][0], index)] if open_ else [*out, (index, index)]
            open_ = True
        elif look is False:
            open_ = False
    return out


def _watcher(
    chance: random.Random, home: Path, config: Path, looks: dict[str, bool | None], *, kills: float
) -> dict[str, Any]:
    about: dict[str, Any] = {"dir": str(home), "config": str(config), "looks": looks, "seed": chance.random()}
    if chance.random() < kills:
        if chance.random() < 0.6:
            about["kill_at"] = chance.randint(0, 16)
        else:
            about["kill_after"] = chance.uniform(0.0, 0.06)
    return about


# -------------------------------------------------------------------------------------------------- the morning after


def mails_of(place: Neighbourhood, run: str) -> list[Any]:
    return [m for m in place.mail.mails if f" {run}: " in " ".join(str(m["Subject"]).split())]


def recipients_of(place: Neighbourhood, run: str) -> list[list[str]]:
    """To whom each of those mails was given."""
    pairs = zip(place.mail.mails, place.mail.recipients, strict=True)
    return [to for m, to in pairs if f" {run}: " in " ".join(str(m["Subject"]).split())]


def mailboxes(place: Neighbourhood, run: str) -> dict[str, set[str]]:
    """The keys that each recipient got."""
    out: dict[str, set[str]] = {"me@example.org": set()}
    if place.machine is not None:
        out["you@example.org"] = set()
    for mail, recipients in zip(mails_of(place, run), recipients_of(place, run), strict=True):
        for to in recipients:
            out[to].add(mail["X-Ftsupervise-Key"])
    return out


def told_by_mail(mails: list[Any]) -> Counter[tuple[str, str, str]]:
    """(word, name, since) as a person reads them, from the text alone."""
    out: Counter[tuple[str, str, str]] = Counter()
    for mail in mails:
        for part in str(mail.get_content()).replace("\r", "").split("\n----\n"):
            head = re.search(r"^(FIRING|STILL FIRING|RESOLVED|ESCALATED)(?: \(\w+\))?  \S+: disk (\w)$", part, re.M)
            since = re.search(r"^since    (\S+ \S+ UTC)", part, re.M)
            if head and since:
                out[(head[1], head[2], since[1])] += 1
    return out


def promised(home: Path) -> dict[str, set[tuple[str, str]]]:
    """Per receiver all (message, notice) that any generation of the journal ever promised as fired or resolved."""
    out: dict[str, set[tuple[str, str]]] = {}
    for path in sorted((home / "journal").glob("*.json")):
        state, _ = parse(path.read_bytes())
        for message in state.outbox:
            for notice in message.notices:
                if notice.reason in (Reason.FIRED, Reason.RESOLVED) and notice.finding.watchdog == "disk":
                    out.setdefault(message.receiver, set()).add((message.id, notice.key))
    return out


def judge(seed: int, directory: Path, place: Neighbourhood, night: Night) -> Counter[str]:
    """Raises AssertionError for anything lost; gives the counts of what arrived."""
    home = directory / f"run-{seed}"
    mails = mails_of(place, home.name)
    told = told_by_mail(mails)
    before: dict[str, set[str]] = {}
    for name, first, last in night.phases:
        looks = [at for at in (first + timedelta(minutes=5 * n) for n in range(TICKS)) if at <= last]
        sinces = {f"{at:%Y-%m-%d %H:%M} UTC" for at in looks}
        certain = any((name, at) in night.seen for at in looks)  # somebody lived to write it down
        # … and that it had been good before; else it may count as the same trouble as the one before
        parted = name not in before or (name, first - timedelta(minutes=5)) in night.seen
        allowed = sinces if parted else sinces | before[name]
        before[name] = allowed
        if not certain:
            continue
        for word in ("FIRING", "RESOLVED"):
            hits = [key for key in told if key[:2] == (word, name) and key[2] in allowed]
            right = len(hits) == 1 if parted else hits
            assert right, f"seed {seed}: {word} {name} {first:%H:%M}-{last:%H:%M} told {len(hits)} times: {told}"
    posts = [p for p in place.slack.posts if f" {home.name}: " in p.text]
    calls = [p for p in place.machine.posts if f" {home.name}: " in p.text] if place.machine is not None else []
    arrived = {f"email {to}": keys for to, keys in mailboxes(place, home.name).items()}
    arrived |= {"slack": {p.key for p in posts}, "webhook": {p.key for p in calls}}
    for receiver, pairs in promised(home).items():
        for who in [name for name in arrived if name.split()[0] == receiver]:
            missing = {key for ident, key in pairs} - {key for ident, key in pairs if ident in arrived[who]}
            assert not missing, f"seed {seed}: {who} never heard of {missing}"
    state, _ = parse(max((home / "journal").glob("*.json")).read_bytes())
    assert not state.outbox, f"seed {seed}: still waiting: {[m.error for m in state.outbox]}"
    assert all(m["Message-ID"].startswith(f"<{m['X-Ftsupervise-Key']}@") for m in mails)
    came = sum(len(to) for to in recipients_of(place, home.name)) + len(posts) + len(calls)
    return Counter(
        arrived=came,
        twice=came - sum(len(keys) for keys in arrived.values()),
        killed=night.killed,
        nights=1,
    )


def nights(seeds: range, directory: Path, *, odd: bool = False) -> Counter[str]:
    """``odd``: the servers answer anything, a mail has two recipients, and there is a third receiver."""
    total: Counter[str] = Counter()
    start = time.monotonic()
    with (
        MailServer() as mail,
        SlackServer() as slack,
        SlackServer() as machine,
        Proxy(mail.port) as one,
        Proxy(slack.port) as other,
    ):
        place = Neighbourhood(mail, slack, one, other, machine if odd else None)
        with Watchers() as watchers:
            for seed in seeds:
                night = one_night(seed, directory, place, watchers)
                total += judge(seed, directory, place, night)
                mail.forget()
                slack.forget()
                machine.forget()
    share = total["twice"] / max(1, total["arrived"])
    print(
        f"\n{total['nights']} nights, {total['killed']} watchers killed, {total['arrived']} messages arrived, none lost; "
        f"{total['twice']} twice ({share:.2%}), {time.monotonic() - start:.0f} s"
    )
    return total


def test_a_few_random_nights_lose_nothing(tmp_path: Path) -> None:
    assert nights(range(5), tmp_path)["arrived"] > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_thousand_random_nights_lose_nothing_and_say_less_than_one_percent_twice(tmp_path: Path) -> None:
    total = nights(range(int(os.environ.get("NIGHTS", "1000"))), tmp_path)
    assert total["twice"] < 0.01 * total["arrived"]


@pytest.mark.fault("Random nights: servers that answer anything, watchers killed at any instant", "no message is lost")
def test_a_few_random_nights_with_servers_that_answer_anything_lose_nothing(tmp_path: Path) -> None:
    assert nights(range(4), tmp_path, odd=True)["arrived"] > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_five_hundred_random_nights_with_servers_that_answer_anything_lose_nothing(tmp_path: Path) -> None:
    first = int(os.environ.get("FIRST_NIGHT", "0"))
    total = nights(range(first, first + int(os.environ.get("NIGHTS", "500"))), tmp_path, odd=True)
    assert total["twice"] < 0.01 * total["arrived"]
