"""What is known of a tick so far. Each child tells what it has done in events; its parent hears them into the same account, so
that another child can go on where one hung.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftsupervise.alerts.deliver import Delivered
from ftsupervise.errors import Error, about
from ftsupervise.findings import Alert, Finding, Notice
from ftsupervise.truth import Health
from ftsupervise.watch.checks import Queue
from ftsupervise.watch.roster import Known, Roster


@dataclass(frozen=True)
class Told:
    """What one tick found and said about one run (or, with no run, about Slurm itself). Of ``findings`` those that are not
    fine; ``looks`` counts all."""

    name: str
    findings: tuple[Finding, ...]
    firing: tuple[Alert, ...] = ()
    notices: tuple[Notice, ...] = ()
    events: tuple[str, ...] = ()
    looks: int = 0


@dataclass
class Account:
    """What is known of this tick so far. ``settled`` are runs whose settings have been read, or cannot be."""

    roster: Roster
    found: dict[int, str] = field(default_factory=dict)  # directories that names mean
    settled: set[int] = field(default_factory=set)
    away: str = ""  # why the state directory must not be touched
    trouble: dict[int, str] = field(default_factory=dict)  # why the settings of a run cannot be read
    errors: dict[int, Error] = field(default_factory=dict)
    stored: dict[int, Finding] = field(
        default_factory=dict
    )  # what is to be said of a run's storage; OK: it can be used
    missing: set[int] = field(default_factory=set)  # runs whose directory is not there
    hung: set[int] = field(default_factory=set)  # runs that a child hung on: nobody touches them again in this tick
    users: set[str] = field(default_factory=set)
    queues: dict[str, Queue] | None = None  # by the word in the settings
    asked: frozenset[str] | None = frozenset()  # about these accounts; None: it is not asked again
    told: dict[int, Told] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    sent: set[int] = field(default_factory=set)  # runs whose messages have been looked after
    delivered: list[Delivered] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what the watch itself could not do
    relief: list[tuple[str, str]] = field(default_factory=list)  # (run, sentence)
    in_general: tuple[tuple[Told, ...], tuple[Told, ...]] | None = None  # of nobody in particular, and of storage
    pinged: bool = False

    def hear(self, event: Any) -> None:
        """Take down what a child has told."""
        event.into(self)

    def complaints(self) -> list[str]:
        """What the watch itself could not do."""
        return [*(about(self.roster.label(i), why) for i, why in sorted(self.trouble.items())), *self.notes]

    def all_delivered(self) -> Delivered:
        return Delivered(
            tuple(message for one in self.delivered for message in one.sent),
            tuple(failed for one in self.delivered for failed in one.failed),
            sum(one.waiting for one in self.delivered),
            sum(one.critical_waiting for one in self.delivered),
        )

    def stands(self, index: int) -> bool:
        """Can this run be looked at, as far as is known?"""
        finding = self.stored.get(index)
        return index in self.roster.known and finding is not None and finding.health is Health.OK


class Found(NamedTuple):
    which: int
    directory: str

    def into(self, account: Account) -> None:
        account.found[self.which] = self.directory


class Settled(NamedTuple):
    which: int
    known: Known | None  # None: as before
    error: Error | None = None

    def into(self, account: Account) -> None:
        account.settled.add(self.which)
        if self.known is not None:
            account.roster.known[self.which] = self.known
        if self.error is not None:
            account.trouble[self.which], account.errors[self.which] = self.error.message, self.error


class Stands(NamedTuple):
    which: int
    finding: Finding
    users: tuple[str, ...] = ()
    missing: bool = False

    def into(self, account: Account) -> None:
        account.stored[self.which] = self.finding
        account.users.update(self.users)
        if self.missing:
            account.missing.add(self.which)


class Queues(NamedTuple):
    queues: dict[str, Queue]
    users: frozenset[str]

    def into(self, account: Account) -> None:
        account.queues, account.asked = self.queues, self.users


class Looked(NamedTuple):
    which: int
    told: Told
    trouble: tuple[str, ...]
    waits: bool

    def into(self, account: Account) -> None:
        account.told[self.which] = self.told
        account.notes += self.trouble
        if self.waits:
            account.waiting.add(self.which)


class Sent(NamedTuple):
    indexes: tuple[int, ...]
    delivered: Delivered

    def into(self, account: Account) -> None:
        account.sent.update(self.indexes)
        account.delivered.append(self.delivered)


class Relieved(NamedTuple):
    which: int
    sentences: tuple[tuple[str, str], ...]

    def into(self, account: Account) -> None:
        account.waiting.discard(self.which)
        account.relief += self.sentences
