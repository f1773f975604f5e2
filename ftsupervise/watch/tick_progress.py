"""What is known of a tick so far. Each child reports what it has done as events; the parent applies them to the same record, so
that another child can go on where one hung.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftsupervise.alerts.deliver import Delivered
from ftsupervise.errors import Error, about
from ftsupervise.findings import Alert, Finding, Notice
from ftsupervise.truth import Health
from ftsupervise.watch.checks import QueueAnswer
from ftsupervise.watch.roster import KnownRun, Roster


@dataclass(frozen=True)
class RunReport:
    """What one tick found and sent about one run (or, with no run, about Slurm itself)."""

    name: str
    findings: tuple[Finding, ...]  # those that are not fine
    firing: tuple[Alert, ...] = ()
    notices: tuple[Notice, ...] = ()
    events: tuple[str, ...] = ()
    checks: int = 0  # all findings


@dataclass
class TickProgress:
    """What is known of this tick so far. Runs are meant by their index in the roster."""

    roster: Roster
    found: dict[int, str] = field(default_factory=dict)  # the directories that names mean
    settled: set[int] = field(default_factory=set)  # their settings have been read, or cannot be
    away: str = ""  # why the state directory must not be touched
    trouble: dict[int, str] = field(default_factory=dict)  # why the settings of a run cannot be read
    errors: dict[int, Error] = field(default_factory=dict)
    stored: dict[int, Finding] = field(default_factory=dict)  # how a run's storage is; OK: it can be used
    missing: set[int] = field(default_factory=set)  # their directory is not there
    hung: set[int] = field(default_factory=set)  # a child hung on them: they are not touched again in this tick
    users: set[str] = field(default_factory=set)
    queues: dict[str, QueueAnswer] | None = None  # by the scheduler's word in the settings
    asked: frozenset[str] | None = frozenset()  # about these accounts; None: it is not asked again
    reports: dict[int, RunReport] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)  # all their jobs wait
    sent: set[int] = field(default_factory=set)  # their messages have been sent, or cannot be in this tick
    delivered: list[Delivered] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what the watch itself could not do
    relief: list[tuple[str, str]] = field(default_factory=list)  # (run, sentence)
    general: tuple[RunReport, ...] | None = None  # of no single run
    storage: tuple[RunReport, ...] = ()  # of run directories
    pinged: bool = False

    def apply(self, event: Any) -> None:
        """Note what a child has reported."""
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
        """Can this run be checked, as far as is known?"""
        finding = self.stored.get(index)
        return index in self.roster.known and finding is not None and finding.health is Health.OK


class DirectoryFound(NamedTuple):
    which: int
    directory: str

    def into(self, progress: TickProgress) -> None:
        progress.found[self.which] = self.directory


class SettingsRead(NamedTuple):
    which: int
    known: KnownRun | None  # None: as before
    error: Error | None = None

    def into(self, progress: TickProgress) -> None:
        progress.settled.add(self.which)
        if self.known is not None:
            progress.roster.known[self.which] = self.known
        if self.error is not None:
            progress.trouble[self.which], progress.errors[self.which] = self.error.message, self.error


class RunDirChecked(NamedTuple):
    which: int
    finding: Finding
    users: tuple[str, ...] = ()
    missing: bool = False

    def into(self, progress: TickProgress) -> None:
        progress.stored[self.which] = self.finding
        progress.users.update(self.users)
        if self.missing:
            progress.missing.add(self.which)


class QueuesRead(NamedTuple):
    queues: dict[str, QueueAnswer]
    users: frozenset[str]

    def into(self, progress: TickProgress) -> None:
        progress.queues, progress.asked = self.queues, self.users


class RunChecked(NamedTuple):
    which: int
    report: RunReport
    trouble: tuple[str, ...]
    waits: bool

    def into(self, progress: TickProgress) -> None:
        progress.reports[self.which] = self.report
        progress.notes += self.trouble
        if self.waits:
            progress.waiting.add(self.which)


class MessagesSent(NamedTuple):
    indexes: tuple[int, ...]
    delivered: Delivered

    def into(self, progress: TickProgress) -> None:
        progress.sent.update(self.indexes)
        progress.delivered.append(self.delivered)


class NodesReleased(NamedTuple):
    which: int
    sentences: tuple[tuple[str, str], ...]

    def into(self, progress: TickProgress) -> None:
        progress.waiting.discard(self.which)
        progress.relief += self.sentences
