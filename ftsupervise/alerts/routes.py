"""Which receivers are notified, and from when; and what is muted, because another alert explains it or a person has
silenced it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta, tzinfo
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ftsupervise.alerts.outbox import SKEW, Silence
from ftsupervise.alerts.step import Policy
from ftsupervise.findings import Finding, Severity

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts

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
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def plain_name(watchdog: str) -> str:
    """``is_running`` in a file of settings and ``is-running`` in a message are the same watchdog."""
    return watchdog.replace("_", "-").lower()


def policy(settings: Alerts, finding: Finding) -> Policy:
    """The patience that the settings ask for with this watchdog."""
    rules = {plain_name(name): rule for name, rule in settings.watchdogs.items()}
    rule = rules.get(plain_name(finding.watchdog))

    def of(name: str) -> timedelta | None:
        own: timedelta | None = getattr(rule, name) if rule is not None else None
        general: timedelta | None = getattr(settings, name)
        return own if own is not None else general

    bad, total = (int(n) for n in ((rule.checks if rule else None) or settings.checks).split(" of "))
    return Policy(
        hold=of("hold") or timedelta(0),
        clear=of("clear") or timedelta(0),
        repeat=of("repeat"),
        escalate_after=of("escalate_after"),
        bad_checks=min(bad, total),
        of_checks=total,
        forget_after=settings.forget_after,
    )


def receivers(settings: Alerts, finding: Finding, now: datetime, *, escalated: bool = False) -> tuple[str, ...]:
    """Names, by the first route that fits; everybody when none does."""
    local = now.astimezone(_zone(settings))
    for route in settings.routes:
        if (
            (route.severity is None or finding.severity >= Severity[route.severity.upper()])
            and (not route.watchdog or plain_name(finding.watchdog) in map(plain_name, route.watchdog))
            and (not route.run or any(fnmatchcase(finding.run, pattern) for pattern in route.run))
            and (route.hours is None or within(route.hours, local))
            and (not route.days or _DAYS[local.weekday()] in route.days)
            and (route.escalated is None or route.escalated == escalated)
        ):
            return route.to
    return tuple(settings.named)


def due(settings: Alerts, severity: Severity, now: datetime) -> datetime:
    """When this may be sent: now, or at the end of the quiet hours."""
    quiet = settings.quiet
    if quiet is None or severity >= Severity[quiet.below.upper()]:
        return now
    local = now.astimezone(_zone(settings))
    if not within(quiet.hours, local):
        return now
    hour, minute = (int(part) for part in quiet.hours[1].split(":"))
    end = local.replace(hour=hour, minute=minute, second=0, microsecond=0)
    if end <= local:
        end = (end + timedelta(days=1)).replace(hour=hour, minute=minute)
    return end.astimezone(now.tzinfo)


def within(hours: tuple[str, str], local: datetime) -> bool:
    """Is it between the two times of day? From 22:00 to 07:00 passes midnight; the same twice is the whole day."""
    start, end = hours
    clock = f"{local:%H:%M}"
    if start < end:
        return start <= clock < end
    return clock >= start or clock < end


def _zone(settings: Alerts) -> tzinfo | None:
    if settings.timezone is None:
        return None
    from zoneinfo import ZoneInfo

    return ZoneInfo(settings.timezone)


# ------------------------------------------------------------------------------------------------- -------- muted


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
    """The silence that holds it, with its author and end; "" if none. A silence from the future comes from a fast clock."""
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
