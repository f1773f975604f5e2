"""Findings of the watchdogs, the alerts that they become, and the notices of these.

They stand apart from ``model``: a rank that starts, and a ``kill`` typed in a hurry, need none of them. Times are aware
UTC ``datetime``; durations ``timedelta``; sizes bytes (``int``); shares 0–1 (``float``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ftsupervise.truth import Health


class Severity(IntEnum):
    INFO = 0
    WARNING = 1
    CRITICAL = 2

    @property
    def word(self) -> str:
        return self.name.lower()


# ------------------------------------------------------------------------------------------------------ findings

# What is found beside the watchdogs, by the names that its alerts have: by the tick itself, by the cron; and events ("run").
BESIDES = ("chain", "switches", "storage", "slurm", "scheduler", "watch", "receiver", "alert-journal", "cron", "run")


class OfDisk(NamedTuple):
    """The file system that a finding is about, by a path on it, and what of it."""

    path: Path
    part: str  # "there", "mount", "space", "inodes", "forecast", "quota", "quota files"

    def __str__(self) -> str:
        return f"{self.path} {self.part}"


@dataclass(frozen=True)
class Finding:
    """The answer of one watchdog, at one check, about one subject at one moment.

    ``watchdog`` and ``subject`` name the thing looked at ("disk", "/scratch bytes"); together with the run they are
    the identity of the alert this may become. ``summary`` is one sentence with the number and the limit in it.
    """

    run: str
    watchdog: str
    subject: str
    health: Health
    severity: Severity
    summary: str
    at: datetime
    value: str = ""  # the number, with its unit: "3.2 TB free"
    limit: str = ""  # what it is held against: "5 TB"
    meaning: str = ""  # what it means for the run, one sentence
    look: str = ""  # the command to type to see for oneself
    do: str = ""  # what to do about it, one sentence or command
    since: datetime | None = None  # when the trouble began, where the probe can tell; else the first sight counts
    detail: str = ""  # more lines, evidence; not needed to understand the message
    why: str = (
        ""  # what ``diagnose`` says of the failure behind it: class, place, confidence, and the line that decides
    )
    disk: OfDisk | None = None  # where it is about a file system: the subject as a value
    final: bool = False  # good, and it stays so: the run has finished
    attempt: int = 0  # the one that trains, where it is good for that

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.run, self.watchdog, self.subject)


class Words(NamedTuple):
    """The words about one kind of subject, whatever was found: a line in a watchdog's table.

    ``finding`` puts its ``names`` in the place of the words in braces.
    """

    meaning: str = ""
    look: str = ""
    do: str = ""
    severity: Severity = Severity.WARNING
    watchdog: str = ""  # the alert's name, where it is not the watchdog's own

    def finding(
        self,
        key: tuple[str, str, str],
        health: Health,
        summary: str,
        at: datetime,
        *,
        severity: Severity | None = None,
        names: Mapping[str, object] = MappingProxyType({}),
        **more: Any,
    ) -> Finding:
        """Return a finding about ``key`` (run, watchdog, subject). ``more``: its value, limit, since, detail, disk and why."""
        run, watchdog, subject = key
        return Finding(
            run,
            self.watchdog or watchdog,
            subject,
            health,
            self.severity if severity is None else severity,
            summary,
            at,
            meaning=self.meaning.format_map(names),
            look=self.look.format_map(names),
            do=self.do.format_map(names),
            **more,
        )


# -------------------------------------------------------------------------------------------------------- alerts


class AlertState(Enum):
    QUIET = "quiet"  # nothing known to be wrong
    PENDING = "pending"  # wrong, but not yet for as long as ``hold`` asks
    FIRING = "firing"
    RESOLVED = "resolved"  # people were notified that it is over; falls back to QUIET


class Reason(Enum):
    """The reason why a message is sent, or why not (the pure answer of ``alerts.step``)."""

    NOTHING = "nothing"
    HELD = "held"  # pending, waiting for ``hold``
    FIRED = "fired"
    ESCALATED = "escalated"
    REPEATED = "repeated"
    RESOLVED = "resolved"
    UNWATCHED = (
        "unwatched"  # it fired, and nobody has looked at its subject for so long that it ends without an all-clear
    )
    ANNOUNCED = "announced"  # an event that is sent once and has no end: started, finished, handed over


class EventKind(Enum):
    """Things that happen once and are announced (not alerts: nothing to resolve)."""

    STARTED = "started"
    RESUMED = "resumed"
    STOPPED = "stopped"
    FINISHED = "finished"
    DAMAGED = "damaged"  # a checkpoint was not loaded
    OBSERVED = "observed"  # a decision was not carried out, because it is only told


@dataclass(frozen=True)
class Alert:
    """The life of one trouble: a (run, watchdog, subject), its observations and its notices so far."""

    id: str  # six hexadecimal digits or more, what people type: ``ftsupervise alerts ack 3f9a1c``
    finding: Finding  # the newest that was BAD
    seen: datetime  # the last time anybody looked, whatever was seen
    state: AlertState = AlertState.QUIET
    checks: str = ""  # what was seen, newest last: "-" bad, "+" good; UNKNOWN is not a look; at most 21
    since: datetime | None = None  # when the trouble began
    fired: datetime | None = None
    came: tuple[datetime, ...] = ()  # within the last day, oldest first: it fired, or was bad again after a good look
    times: int = 1  # the same, of this incident
    good_since: datetime | None = None  # it fires, but the last looks were good
    good: str = ""  # what they found
    ended: datetime | None = None
    incident: int = 0  # its number, which no other incident of this alert ever has; part of every key
    notified: datetime | None = None  # the last message of this incident
    notified_severity: Severity | None = None  # the worst of them
    notified_to: tuple[str, ...] = ()  # receivers
    notifications: int = 0
    posts: dict[str, str] = field(
        default_factory=dict
    )  # receiver -> id of the message that was the first of the incident
    escalated: bool = False  # sent again because nobody acknowledged it
    flapping: bool = False
    acked_by: str = ""
    acked_at: datetime | None = None
    ack_note: str = ""
    muted: str = ""  # why nobody is notified at present: a silence, or what inhibits it
    muted_until: datetime | None = None  # the last check at which it fired and was muted
    blind_since: datetime | None = None  # nobody could see it since

    @property
    def is_bad(self) -> bool:
        """Return whether it fires and is so now: not one that is kept open for a while, since it comes and goes."""
        return self.state is AlertState.FIRING and self.good_since is None

    @property
    def word(self) -> str:
        """Return its state in a word: "firing", "pending"; "calm" of one that is over for now."""
        return "calm" if self.state is AlertState.FIRING and not self.is_bad else self.state.value

    @property
    def summary(self) -> str:
        return f"over for now: {self.good}" if self.good_since is not None and self.good else self.finding.summary


@dataclass(frozen=True)
class Notice:
    """One item of a message: a step in the life of an alert, or an event (which has no alert)."""

    key: str  # stable: the same transition has the same key, whoever computes it and however often
    reason: Reason
    finding: Finding
    at: datetime
    alert_id: str = ""
    since: datetime | None = None
    count: int = 1  # the how-manieth telling of this incident
    incident: int = 0
    event: EventKind | None = None
    note: str = ""  # one sentence more: "flapping", "no longer checked", "nobody has acknowledged it for 1h"
    post: str = ""  # id of the message (to the same receiver) that was the first of this incident
    attempt: int = 0  # the number of the attempt that an event is about, or that ends an alert; 0: of none
    quick: bool = False  # a restart that cost little: several of them are told together
    times: int = 1  # that the alert came, in the incident that ends


def happened(
    kind: EventKind,
    key: str,
    at: datetime,
    summary: str,
    meaning: str = "",
    attempt: int = 0,
    quick: bool = False,
    *,
    run: str = "",
) -> Notice:
    """Return an event, in the form of a finding, so that routes and templates need to know only one form. ``key`` names it for
    ever, so that it is sent once, however many watches there are."""
    finding = Finding(run, "run", kind.value, Health.OK, Severity.INFO, summary, at, meaning=meaning)
    return Notice(key, Reason.ANNOUNCED, finding, at, since=at, event=kind, attempt=attempt, quick=quick)
