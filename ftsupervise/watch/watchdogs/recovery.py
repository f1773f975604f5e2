"""Has the run come on again after its last failure? Bad from the moment an attempt dies until a later one trains."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from ftsupervise.config.job_output import outputs
from ftsupervise.findings import Finding, Severity
from ftsupervise.model import Attempt, Health
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.ledger import UNKNOWN, ledger
from ftsupervise.watch import Look
from ftsupervise.watch.events import orderly

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Recovery as Settings


@dataclass(frozen=True)
class Recovery:
    """The watchdog of the ledger."""

    name: str = "recovery"

    def check(self, look: Look, settings: Settings) -> Iterator[Finding]:
        attempts = ledger(look.rundir)
        failed = [a for a in attempts if a.cause and a.cause != UNKNOWN and not orderly(a.cause)]
        if not failed or look.rundir.finished.exists():
            yield _finding(look, Health.OK, "no failure to recover from")
            return
        last = failed[-1]
        since = next((a for a in attempts if a.number > last.number and a.first_step is not None), None)
        if since is not None:
            yield _finding(look, Health.OK, f"attempt {since.number} trains, from step {since.first_step}")
        elif starting := _starting(look, attempts, last, settings.start):
            yield _finding(look, Health.UNKNOWN, f"{starting}: too early to say whether it comes on again")
        else:
            step = f" at step {last.last_step}" if last.last_step is not None else ""
            text = f"attempt {last.number} failed{step} ({last.why()}) and none has trained since"
            yield _finding(look, Health.BAD, text, value=last.cause, since=last.ended)


def _starting(look: Look, attempts: tuple[Attempt, ...], failed: Attempt, patience: timedelta) -> str:
    """What has been begun since the failure and is still given time; "" if nothing is."""
    newest = attempts[-1]
    open_end = newest.ended is None and newest.cause in ("", UNKNOWN)  # UNKNOWN: it runs on another host than this
    if newest.number > failed.number and open_end and look.now - newest.started < patience:
        return f"attempt {newest.number} is starting"
    records = launches(look.rundir)
    if records and failed.ended is not None and records[-1].at > failed.ended and look.now - records[-1].at < patience:
        return "it has been launched again"
    return ""


def _finding(look: Look, health: Health, summary: str, *, value: str = "", since: datetime | None = None) -> Finding:
    return Finding(
        run=look.run.name,
        watchdog="recovery",
        subject="attempt",
        health=health,
        severity=Severity.WARNING,
        summary=summary,
        at=look.now,
        value=value,
        meaning="The run stands still until the next member of the chain has started and resumed.",
        look=f"ftsupervise status {shlex.quote(str(look.rundir.root))}",
        do=f"read {' '.join(outputs(look.run))} if the next attempt fails too",
        since=since,
    )
