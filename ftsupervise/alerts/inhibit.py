"""What need not be told now: troubles that another trouble explains, and what a person has silenced. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from fnmatch import fnmatchcase

from ftsupervise.alerts.outbox import SKEW, Silence
from ftsupervise.findings import Finding

# The cause (a watchdog, or "watchdog: subject" with * and ?) -> what it mutes, in the same run, or in any run when the
# cause is nobody's in particular. A late watch mutes nothing: what it finds is true, only old.
INHIBITS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("storage", ("hang", "log-stale", "checkpoints", "throughput", "loss")),
    ("disk: * there", ("hang", "log-stale", "checkpoints", "throughput", "loss")),  # hung, or not mounted
    ("slurm", ("is-running",)),
    ("slurm-unreachable", ("is-running",)),
    ("is-running", ("recovery", "hang", "log-stale", "throughput", "checkpoints")),
    ("brake", ("recovery", "hang", "log-stale", "is-running", "throughput", "checkpoints")),
    ("kill-switch", ("hang", "log-stale", "is-running", "throughput", "checkpoints")),
)


def plain_name(watchdog: str) -> str:
    """``is_running`` in a file of settings and ``is-running`` in a message are the same watchdog."""
    return watchdog.replace("_", "-").lower()


def explained_by(cause: Finding) -> tuple[str, ...]:
    """The watchdogs that need not speak while ``cause`` is so."""
    return tuple(name for pattern, names in INHIBITS if _fits(pattern, cause) for name in names)


def inhibitor(finding: Finding, causes: Iterable[Finding]) -> str:
    """The cause among what is wrong now that explains ``finding``, as a reason to hold it back; "" if there is none."""
    name = plain_name(finding.watchdog)
    for cause in causes:
        if cause.run in ("", finding.run) and cause.key != finding.key and name in explained_by(cause):
            return "explained by " + f"{cause.watchdog} {cause.subject}".strip()
    return ""


def silenced(ident: str, finding: Finding, silences: Sequence[Silence], now: datetime) -> str:
    """Who silenced it and until when; "" if nobody has. One that begins in the future comes from a clock that was ahead."""
    for silence in silences:
        if (
            silence.start <= now + SKEW
            and now < silence.end
            and silence.run in ("", finding.run)
            and matches(silence.pattern, ident, finding)
        ):
            return f"silenced by {silence.author} until {silence.end:%Y-%m-%d %H:%M} UTC"
    return ""


def matches(pattern: str, ident: str, finding: Finding) -> bool:
    """Does what a person typed mean this? An id (six digits are enough), a watchdog, or "watchdog: subject" with * ?"""
    if len(pattern) >= 6 and ident.startswith(pattern.lower()):
        return True
    return _fits(pattern, finding)


def _fits(pattern: str, finding: Finding) -> bool:
    name, wanted = plain_name(finding.watchdog), plain_name(pattern)
    return fnmatchcase(name, wanted) or fnmatchcase(f"{name}: {plain_name(finding.subject)}", wanted)
