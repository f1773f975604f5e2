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
    owed: frozenset[str] = frozenset()  # recipients that must have an earlier message first


class TryLater(Exception):
    """It did not arrive, and may another time. ``after``: how long the other side asked us to wait."""

    def __init__(self, why: str, *, after: timedelta | None = None) -> None:
        super().__init__(why)
        self.after = after


class Doubtful(TryLater):
    """It was refused, perhaps for good and perhaps by an accident on the way: a proxy's page, a 404, a 554 as greeting.

    It is tried again like ``TryLater``, and told through another receiver in the meantime.
    """


class Partly(TryLater):
    """Some recipients have it. ``left``: those to try again, ``waits`` if only because an earlier message is owed to them;
    ``refused``: who will never take it, and why."""

    def __init__(self, why: str, *, left: tuple[str, ...], refused: str = "", waits: bool = False) -> None:
        super().__init__(why)
        self.left, self.refused, self.waits = left, refused, waits


class Broken(Exception):
    """This receiver certainly takes nothing until a person changes something: the service itself names the token or the
    channel as wrong, or our own settings cannot be used."""


class Unsendable(Exception):
    """The receiver is fine, but will never take this very message (too long, a block it does not know)."""


Send = Callable[[Parcel, Any], dict[str, str]]


def sender(kind: str) -> Send:
    """The ``send`` of a kind of receiver; its module and libraries are imported now, not before.

    Call it before there are threads: two that import one package for the first time wait for each other, and one of them is
    given a half-made module.
    """
    import_module("jinja2.sandbox")  # wording.py renders with it
    send: Send = import_module(MODULES[kind]).send
    return send
