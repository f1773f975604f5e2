"""The words about a file system: those that *disk*, *mounted* and *quota* have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.truth import Health
from ftsupervise.watch.watchdogs.disk_forecast import Level

if TYPE_CHECKING:
    from ftsupervise.watch import Look

_FREE = "free some space, move old checkpoints away, or ask for more quota"
_MOUNT = "findmnt -T {path}"
WORDS = {
    "there": Words("", "df -h {path}", _FREE),
    "missing": Words("", "df -h {path}", "is it mounted? mkdir it otherwise"),
    "hung": Words(
        "Whatever reads or writes there waits, the training too. Nothing else is known about it.",
        "df -h {path}",
        "tell your storage people; ls of it may hang your shell",
    ),
    "space": Words(
        "A checkpoint that does not fit ends the run, and the half of it that was written is worth nothing.",
        "df -h {path}",
        _FREE,
    ),
    "inodes": Words(
        "No new file can be made when they run out, however much space is left.",
        "df -i {path}",
        "remove what has many small files: caches, old environments, unpacked archives",
    ),
    "forecast": Words("The run ends when a checkpoint does not fit any more.", "df -h {path}", _FREE),
    "quota": Words("", "{command}", _FREE),
    "mount": Words("", _MOUNT, _FREE),
    "not mounted": Words(
        "What is written there lands on another disk and is hidden when the mount is back. Nothing is known "
        "about the file system that belongs there.",
        _MOUNT,
        "mount {point}; if it is gone for good, name another path under watch.disk",
    ),
    "other mount": Words(
        "Nothing is known about the file system that was watched there. "
        "The new one is watched instead when it has been there for {patience}.",
        _MOUNT,
        "mount the right one, or wait if this is meant to be so",
    ),
}


def finding(
    look: Look, path: Path, subject: str, found: Level | None, summary: str, words: str = "", **more: str
) -> Finding:
    """``found`` None: could not see. The severity of what is fine is the one it would have at its worst.

    ``words``: the line of the table, if it is not ``subject``; ``more``: names in it, and parts of the finding.
    """
    parts = {name: more.pop(name) for name in ("value", "limit", "detail") if name in more}
    return look.finding(
        f"{path} {subject}",
        Health.of(None if found is None else found > Level.FINE),
        summary,
        WORDS[words or subject],
        severity=Severity.WARNING if found is Level.WARNING else Severity.CRITICAL,
        names={"path": path, **more},
        **parts,
    )
