"""How a finding about a file system is worded: what *disk* and *quota* have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.findings import Finding, Severity
from ftsupervise.model import Health
from ftsupervise.watch.watchdogs.disk_forecast import Level

if TYPE_CHECKING:
    from ftsupervise.watch import Look


def finding(
    look: Look, path: Path, subject: str, found: Level | None, summary: str, *, look_at: str = "", **more: str
) -> Finding:
    """``found`` None: could not see. The severity of what is fine is the one it would have at its worst."""
    health = Health.UNKNOWN if found is None else Health.BAD if found else Health.OK
    severity = Severity.WARNING if found is Level.WARNING else Severity.CRITICAL
    more.setdefault("do", "free some space, move old checkpoints away, or ask for more quota")
    return Finding(
        run=look.run.name,
        watchdog="disk",
        subject=f"{path} {subject}",
        health=health,
        severity=severity,
        summary=summary,
        at=look.now,
        look=look_at or f"df -h {path}",
        **more,  # type: ignore[arg-type]
    )
