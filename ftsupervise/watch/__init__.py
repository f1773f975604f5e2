"""The watch ring: one tick looks at every run from outside its job and tells people what changed.

This module holds what a watchdog gets and gives; ``tick.py`` drives them, ``watchdogs/`` has one file for each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from ftsupervise.findings import Finding
from ftsupervise.model import Job
from ftsupervise.probe import Probe
from ftsupervise.rundir.paths import RunDir

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run


@dataclass(frozen=True)
class Look:
    """What one tick hands to one watchdog of one run.

    ``jobs`` are the run's live jobs, the watch's own job taken out; None when the scheduler could not be asked.
    ``memory`` is what this watchdog returned as its memory last time (JSON values); it may change it in place.
    ``probe`` are the bounded eyes of this tick, shared by all runs: whatever lies on a user's path is seen through them.
    """

    run: Run
    rundir: RunDir
    now: datetime
    jobs: tuple[Job, ...] | None
    memory: dict[str, Any] = field(default_factory=dict)
    blind: str = ""  # why the scheduler could not be asked, in its own words
    probe: Probe = field(default_factory=Probe)


class Watchdog(Protocol):
    """One kind of look. ``settings`` is its own section of the configuration."""

    name: str

    def check(self, look: Look, settings: Any) -> Iterable[Finding]:
        """What is to be said now. Bounded in time whatever the file system does; never raises for a bad subject:
        what could not be seen is a Finding with Health.UNKNOWN."""
