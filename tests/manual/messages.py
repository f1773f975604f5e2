"""The messages of one night as they really arrive, for docs/alerts.md.

The real tick looks, with the real is-running watchdog, journal, outbox and receivers; a mail server and a Slack-like server
(tests/neighbours) take what is sent. Only the clock and the queue's answers are made up: nobody wants to wait six hours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from email.message import EmailMessage
from pathlib import Path

from ftsupervise.config.load import load
from ftsupervise.host.ownership import user_name
from ftsupervise.model import Job, JobState
from ftsupervise.watch.roster import Roster
from ftsupervise.watch.tick import tick
from ftsupervise.watch.tour import TickOrders
from tests.neighbours.slack import TOKEN, Post, SlackServer, texts_of
from tests.neighbours.smtp import MailServer

RUN, SHOWN = "train-10b", "/scratch/ada/train-10b"
NIGHT = datetime(2026, 11, 21, 2, 10, tzinfo=timezone.utc)
TOLD = ("firing", "repeat", "escalated", "resolved")


class Answers:
    """A queue that answers what it is told to: gone for a night, then launched again."""

    kind = "slurm"

    def __init__(self) -> None:
        self.jobs: tuple[Job, ...] = ()

    def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]:
        return self.jobs


def members(first: str) -> tuple[Job, ...]:
    mark = f"ftsupervise:{RUN}:0"
    running = Job(f"{first}_1", first, RUN, user_name(), JobState.RUNNING, comment=mark)
    rest = Job(f"{first}_[2-10%1]", first, RUN, user_name(), JobState.PENDING, "JobArrayTaskLimit", comment=mark)
    return running, rest


def incident(folder: Path) -> dict[str, str]:
    """name of a block -> its text: "mail-firing" … "slack-resolved", and "slack-edited"."""
    with MailServer() as mail, SlackServer() as slack:
        played = _play(folder, mail, slack)
    return {name: text.replace(str(folder / RUN), SHOWN) for name, text in played.items()}


def _play(folder: Path, mail: MailServer, slack: SlackServer) -> dict[str, str]:
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    config = folder / "ftsupervise.yaml"
    config.write_text(
        json.dumps(
            {
                "name": RUN,
                "run_dir": RUN,
                "scheduler": "slurm",
                "launch": {"command": "python train.py"},
                "watch": {"hang": None, "disk": None},
                "alerts": {
                    "repeat": "4h",
                    "escalate_after": "6h",
                    "receivers": [
                        {
                            "email": {
                                "host": "127.0.0.1",
                                "port": mail.port,
                                "from": "ft@lab.org",
                                "to": ["ada@lab.org"],
                            }
                        },
                        {"slack": {"token_file": str(token), "channel": "C0TRAINING", "api_url": slack.api_url}},
                    ],
                },
            }
        )
    )
    for inside in ("switches", "watch", "attempts", "state", "launches"):
        (folder / RUN / inside).mkdir(parents=True)
    queue = Answers()
    night = [(0.0, "88"), (0.25, ""), (4.25, ""), (6.25, ""), (6.75, "131")]  # hours, and the array in the queue
    out: dict[str, str] = {}
    for hours, job in night:
        queue.jobs = members(job) if job else ()
        now = NIGHT - timedelta(minutes=15) + timedelta(hours=hours)
        orders = TickOrders(now=now, state=folder / "state", env={}, scheduler=lambda _: queue)  # type: ignore[arg-type,return-value]
        tick(Roster.of([load(config)]), orders)
        if not mail.mails:
            continue
        told = TOLD[len(mail.mails) - 1]
        out[f"mail-{told}"] = letter(mail.mails[-1])
        out[f"slack-{told}"] = post(slack.posts[-1])
    out["slack-edited"] = post(slack.posts[0])
    return out


def letter(mail: EmailMessage) -> str:
    body = mail.get_body(("plain",))
    head = [f"{name}: {mail[name]}" for name in ("From", "To", "Subject") if mail[name]]
    lines = str(body.get_content() if body else "").rstrip().splitlines()  # mail ends its lines with CR LF
    return "\n".join([*head, "", *lines]) + "\n"


def post(one: Post) -> str:
    return "\n".join(texts_of(one.blocks)) + "\n"
