"""The watch ring: each tick checks every run from outside its job and tells people what changed.

This module holds what a watchdog gets and gives; ``tick.py`` drives them, ``watchdogs/`` has one file for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.model import Attempt, Job
from ftsupervise.probe import Entry, Missing, NotSeen, Probe
from ftsupervise.rundir.attempt_pages import VerdictPage, read_page
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import Brake, read_brake, read_switch
from ftsupervise.truth import Health, SwitchState

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Look:
    """A tick gives this to one watchdog of one run.

    ``jobs`` are the run's live jobs, the watch's own job taken out; None when the scheduler could not be asked.
    ``memory`` is what this watchdog remembers from its last check (JSON values); it may change it in place. ``probe``
    has the bounded reads of this tick, shared by all runs: use nothing else to reach a user's path.
    """

    run: Run
    rundir: RunDir
    now: datetime
    jobs: tuple[Job, ...] | None
    memory: dict[str, Any] = field(default_factory=dict)
    blind: str = ""  # why the scheduler could not be asked, in its own words
    probe: Probe = field(default_factory=Probe)
    watchdog: str = ""  # its name
    recorded: tuple[Attempt, ...] | None = None  # the run's ledger, where this tick has read it
    seen: dict[str, Any] = field(
        default_factory=dict
    )  # what a watchdog of this tick has read for the others too (``once``)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Return the attempts of the run, oldest first. Raises OSError."""
        return ledger(self.rundir) if self.recorded is None else self.recorded

    def once(self, what: str, read: Callable[[], _Read]) -> _Read:
        """Return what ``read`` gives, which is called by the first of the run's watchdogs in this tick that asks for it."""
        if what not in self.seen:
            self.seen[what] = read()
        found: _Read = self.seen[what]
        return found

    def entry(self, path: Path) -> Entry | Missing | NotSeen:
        """Return the facts of a file or a folder, asked for once for all the run's watchdogs."""
        return self.once(f"entry {path}", lambda: self.probe.look(path))

    def switch(self, name: str) -> SwitchState:
        """Return the state of a switch of the run (KILL or SAVE), read once for all its watchdogs."""
        return self.once(name, lambda: read_switch(self.rundir, name))

    def brake(self) -> Brake | None:
        """Return the brake when it is on, read once for all the run's watchdogs. Raises OSError."""
        return self.once("brake", lambda: read_brake(self.rundir))

    def why(self, attempt: Attempt | None) -> str:
        """Return what ``diagnose`` says of this attempt: class, place, confidence and the line that decides; "" where that is
        not known."""
        said = None if attempt is None else read_page(VerdictPage, self.rundir.attempt(attempt.number))
        return "" if said is None else said.told()

    def finding(
        self,
        subject: str,
        health: Health,
        summary: str,
        words: Words,
        *,
        severity: Severity | None = None,
        names: Mapping[str, object] = MappingProxyType({}),
        **more: Any,
    ) -> Finding:
        """Build a finding of this watchdog about ``subject``: ``summary`` is one sentence with the number and the limit
        in it.

        ``words`` says the rest; ``{run_dir}`` in them is the run directory, quoted for a shell, others stand in
        ``names``. ``more``: the finding's value, limit, since, detail and why.
        """
        filled = {"run_dir": self.rundir.quoted(), **names}
        key = (self.run.name, self.watchdog, subject)
        return words.finding(key, health, summary, self.now, severity=severity, names=filled, **more)


# ``check(look, settings)`` of a watchdog: its findings now, one for each subject; ``settings`` is its section of the
# configuration. It is bounded in time whatever the file system does, and never raises for a bad subject: where it could
# not see, it returns a Finding with Health.UNKNOWN.
Check = Callable[[Look, Any], Iterable[Finding]]


def due(memory: dict[str, Any], every: timedelta | None, now: datetime) -> bool:
    """Return whether a check is due that is made ``every`` so often (None: at each tick).

    ``memory`` keeps when it last was made. It may come a tenth early, for ticks that do.
    """
    last = memory.get("_at")
    if every is None or not isinstance(last, (int, float)):
        waits = False
    else:
        waits = 0 <= now.timestamp() - last < every.total_seconds() * 0.9
    if not waits:
        memory["_at"] = now.timestamp()
    return not waits
