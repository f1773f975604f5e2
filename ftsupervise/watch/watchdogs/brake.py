"""Has the job ring stopped the chain, because the same failure came again and again without progress? One alert says so."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from ftsupervise.findings import Finding, Severity
from ftsupervise.model import Health
from ftsupervise.rundir.brake import read_brake
from ftsupervise.rundir.records import as_time
from ftsupervise.watch import Look


@dataclass(frozen=True)
class Brake:
    """The watchdog of ``marks/brake``."""

    name: str = "brake"

    def check(self, look: Look, settings: object) -> Iterator[Finding]:
        try:
            on = read_brake(look.rundir)
        except OSError as error:
            yield _finding(look, Health.UNKNOWN, f"the brake cannot be looked at: {error.strerror}")
            return
        if on is None:
            yield _finding(look, Health.OK, "the brake is off")
            return
        held = f"; held: {', '.join(on.held)}" if on.held else ""
        yield _finding(
            look, Health.BAD, f"stopped by the brake: {on.words()}{held}", since=as_time(on.at), value=on.failure
        )


def _finding(look: Look, health: Health, summary: str, *, since: datetime | None = None, value: str = "") -> Finding:
    return Finding(
        run=look.run.name,
        watchdog="brake",
        subject="chain",
        health=health,
        severity=Severity.CRITICAL,
        summary=summary,
        at=look.now,
        value=value,
        meaning="Nothing trains. The members of the chain are kept, on hold, until somebody has looked.",
        look=f"ftsupervise status {shlex.quote(str(look.rundir.root))}",
        do=f"mend what failed, then: ftsupervise clear --brake {shlex.quote(str(look.rundir.root))}",
        since=since,
    )
