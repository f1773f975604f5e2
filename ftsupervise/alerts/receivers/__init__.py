"""One file for each way to reach people, one line here for each file.

A receiver is ``send(parcel, settings) -> receipt``: it returns when the other side has said that it took the message,
else raises one of the three errors below. It keeps no state, never sleeps, retries nothing: when to try again is the
outbox's affair. Its errors never carry a secret.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from ftsupervise.alerts.outbox import Message

MODULES = {
    "email": "ftsupervise.alerts.receivers.email",
    "slack": "ftsupervise.alerts.receivers.slack",
    "webhook": "ftsupervise.alerts.receivers.webhook",
    "apprise": "ftsupervise.alerts.receivers.apprise",
    "command": "ftsupervise.alerts.receivers.command",
    "file": "ftsupervise.alerts.receivers.file",
}


@dataclass(frozen=True)
class Parcel:
    """A message and what a receiver may need besides: what it follows up, the clock, somebody's own templates."""

    message: Message
    now: datetime
    earlier: tuple[Message, ...] = ()  # sent ones it follows up (with their receipts), oldest first
    over: dict[str, datetime] = field(default_factory=dict)  # alerts of those earlier messages that are over: since
    templates: Path | None = None


class TryLater(Exception):
    """It did not arrive, and may another time. ``after``: how long the other side asked us to wait."""

    def __init__(self, why: str, *, after: timedelta | None = None) -> None:
        super().__init__(why)
        self.after = after


class Broken(Exception):
    """This receiver takes nothing until a person changes something: a wrong token, an address that is gone."""


class Unsendable(Exception):
    """The receiver is fine, but will never take this very message (too long, a block it does not know)."""


Send = Callable[[Parcel, Any], dict[str, str]]


def sender(kind: str) -> Send:
    """The ``send`` of a kind of receiver; its module and libraries are imported now, not before."""
    send: Send = import_module(MODULES[kind]).send
    return send
