"""Decides which alerts people are notified of, why, and through which receivers. Pure, so that a whole night fits in a table.

``step`` takes an alert as it was, what one check found, the policy and the time, and gives the alert as it is now and
one reason. Nothing here writes or sends; ``record.py`` and ``deliver.py`` do.

Rules worth knowing at 3 a.m.:

- A check that could not see (UNKNOWN) moves nothing: it neither fires, resolves, repeats nor escalates.
- A trouble becomes an alert after ``hold``, when at least N of the last M checks were bad; it is over when a check is
  good, fewer than N of the last M are bad, and it has been good for ``clear``.
- While it flaps (Nagios's formula: more than 30 % weighted change over the last 21 checks, until it falls below 20 %)
  a firing alert stays firing; the one resolved message comes when it has calmed.
- That formula does not see one bad check in ten, which was 404 messages a week. So an alert that comes for the third time
  within a day flaps too: it is over when it has been good for 30 minutes, and with each further time for twice as long, up to
  4 hours; while it comes and goes, its reminders are a day apart. While it is good it is not shown as wrong; once the run
  has finished it does not come back, and ends at once.
- People who were notified of an alert are also notified of its end, even if it has been silenced meanwhile. An alert that
  was never sent ends silently.
- A firing alert that is not checked any more (a watchdog switched off, a checkpoint directory renamed) ends after
  ``forget_after`` with UNWATCHED: not an all-clear, and not a lie that lingers for ever. (``advance`` waits for three
  days when the whole watchdog was silent: it may have an interval of its own, or be switched off.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, tzinfo
from fnmatch import fnmatchcase
from hashlib import sha256
from itertools import pairwise
from typing import TYPE_CHECKING

from ftsupervise.alerts.outbox import SKEW, Silence
from ftsupervise.findings import Alert, AlertState, Finding, Reason, Severity
from ftsupervise.truth import Health

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts

CHECKS = 21  # Nagios keeps 21 states, that is 20 possible changes
DAY = timedelta(days=1)
FORGET_AFTER = timedelta(hours=1)  # a firing alert that nobody looks at any more ends, and says so
_OFTEN = 3  # times within a day
_CALM, _CALM_MOST = timedelta(minutes=30), timedelta(hours=4)
_CAME = 10  # times that are remembered
_WEIGHTS = tuple(0.75 + 0.5 * change / 19 for change in range(CHECKS - 1))  # oldest change first


@dataclass(frozen=True)
class Policy:
    """The patience with one alert."""

    hold: timedelta = timedelta(0)  # bad for this long before people are notified
    clear: timedelta = timedelta(0)  # good for this long before it counts as over
    repeat: timedelta | None = timedelta(hours=4)  # None: sent once
    escalate_after: timedelta | None = None  # sent again, louder, unless it is acknowledged
    bad_checks: int = 1  # N of …
    of_checks: int = 1  # … M
    flap_high: float = 0.30
    flap_low: float = 0.20
    forget_after: timedelta = FORGET_AFTER


def alert_id(finding: Finding) -> str:
    """Return the name that people type. Stable over ticks, hosts and versions; 32 bits keep thousands of alerts apart."""
    return sha256("\0".join(finding.key).encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _number_of_new_incident(alert: Alert, now: datetime) -> int:
    """Return the number of the incident that begins now: the hour since 1970, or one more than the one before.

    It is part of every key by which mailboxes, pagers and journals drop what they have had. So no number comes twice,
    not even when the alert has been forgotten or the journal was lost; and watches that could not see each other's
    journal count alike.
    """
    return max(alert.incident + 1, _hour(now))


def _hour(now: datetime) -> int:
    return int(now.timestamp() // 3600)


def _forgettable(alert: Alert, now: datetime) -> bool:
    """Return whether its next incident has a number of its own also when nothing is remembered of this one, and nobody needs to
    know that it came back."""
    return alert.incident < _hour(now) and not _recent(alert, now)


def _recent(alert: Alert, now: datetime) -> tuple[datetime, ...]:
    """Return when it came within the last day: it fired, or was bad again before its end was told."""
    return tuple(at for at in alert.came if now - DAY < at <= now + SKEW)


def _come(alert: Alert, now: datetime) -> tuple[datetime, ...]:
    return (*_recent(alert, now), now)[-_CAME:]


def calm_needed(alert: Alert, now: datetime) -> timedelta:
    """Return how long it must be good, besides ``clear``, since it comes back again and again."""
    more = len(_recent(alert, now)) - _OFTEN
    return timedelta(0) if more < 0 else min(_CALM * 2 ** min(more, 9), _CALM_MOST)


def flap_share(checks: str) -> float:
    """Return Nagios's percent state change as a share 0–1: 21 alternating checks are 1.0, one newest change 0.0625."""
    recent = checks[-CHECKS:]
    changes = [a != b for a, b in pairwise(recent)]
    weights = _WEIGHTS[len(_WEIGHTS) - len(changes) :]
    return sum(w for w, changed in zip(weights, changes, strict=True) if changed) / (CHECKS - 1)


def step(
    alert: Alert | None, finding: Finding | None, policy: Policy, now: datetime, *, muted: str = ""
) -> tuple[Alert | None, Reason]:
    """Return the alert after this check, and why people must be notified. None: there is nothing worth remembering.

    ``finding`` None means that the subject was not checked. ``muted`` says why people are not to be notified now (a
    silence, an inhibition); a muted notice is sent when that ends, if the alert still fires then.
    """
    if finding is None:
        return _unwatched(alert, policy, now) if alert else (None, Reason.NOTHING)
    if alert is None:
        alert = Alert(id=alert_id(finding), finding=finding, seen=now)
    if now < alert.seen <= now + SKEW and alert.state is AlertState.FIRING:  # this look began before the newest one
        return alert, Reason.NOTHING
    if finding.health is Health.UNKNOWN:
        return replace(alert, seen=now, blind_since=alert.blind_since or now), Reason.NOTHING
    bad = finding.health is Health.BAD
    if bad and alert.state is AlertState.FIRING and alert.good_since is not None:
        alert = replace(alert, came=_come(alert, now), times=alert.times + 1)
    alert = replace(
        alert,
        seen=now,
        blind_since=None,
        finding=finding if bad else alert.finding,
        checks=(alert.checks + ("-" if bad else "+"))[-max(CHECKS, policy.of_checks) :],
    )
    alert = _flapping(alert, policy, now)
    enough = alert.checks[-policy.of_checks :].count("-") >= policy.bad_checks
    if alert.state is AlertState.FIRING:
        return _still(alert, policy, now, muted) if bad or enough else _over(alert, finding, policy, now, muted)
    if not bad:
        if "-" not in alert.checks and _forgettable(alert, now):
            return None, Reason.NOTHING
        waiting = enough and alert.state is AlertState.PENDING
        quiet = alert if waiting else replace(alert, state=AlertState.QUIET, since=None, muted="")
        return quiet, Reason.NOTHING
    return _bad(alert, finding, policy, now, muted, enough)


def _bad(
    alert: Alert, finding: Finding, policy: Policy, now: datetime, muted: str, enough: bool
) -> tuple[Alert, Reason]:
    begun = alert.since if alert.state is AlertState.PENDING and alert.since else now
    since = min(begun, finding.since or now, now)
    alert = replace(alert, state=AlertState.PENDING, since=since, muted=muted)
    if not enough or now - since < policy.hold:
        return alert, Reason.HELD
    fresh = replace(
        alert,
        state=AlertState.FIRING,
        fired=now,
        came=_come(alert, now),
        times=1,
        muted_until=None,
        good_since=None,
        good="",
        ended=None,
        incident=_number_of_new_incident(alert, now),
        notified=None,
        notified_severity=None,
        notified_to=(),
        notifications=0,
        posts={},
        escalated=False,
        acked_by="",
        acked_at=None,
        ack_note="",
    )
    return _still(_flapping(fresh, policy, now), policy, now, muted)


def _still(alert: Alert, policy: Policy, now: datetime, muted: str) -> tuple[Alert, Reason]:
    """Return the notice about an alert that still fires, if there is news that people have not been sent."""
    alert = replace(_by_this_clock(alert, now), good_since=None, good="", muted=muted)
    if muted:
        return replace(alert, muted_until=now), Reason.HELD if alert.notified is None else Reason.NOTHING
    severity = alert.finding.severity
    if alert.notified is None or alert.notified_severity is None:
        return _notify(alert, now), Reason.FIRED
    if severity > alert.notified_severity:
        return replace(_notify(alert, now), acked_by="", acked_at=None, ack_note=""), Reason.ESCALATED
    if alert.acked_by:
        return alert, Reason.NOTHING
    waited = now - max(alert.fired or now, alert.muted_until or alert.fired or now)  # a silence gives people time
    if policy.escalate_after is not None and not alert.escalated and waited >= policy.escalate_after:
        return replace(_notify(alert, now), escalated=True), Reason.ESCALATED
    comes_and_goes = alert.flapping and "+" in alert.checks[-CHECKS:]
    if policy.repeat is not None and now - alert.notified >= (
        max(policy.repeat, DAY) if comes_and_goes else policy.repeat
    ):
        return _notify(alert, now), Reason.REPEATED
    return alert, Reason.NOTHING


def _by_this_clock(alert: Alert, now: datetime) -> Alert:
    """Return the alert without times from the future: a clock that was days ahead must not stop reminders for days."""
    ahead = now + SKEW
    if all(at is None or at <= ahead for at in (alert.fired, alert.notified, alert.muted_until)):
        return alert
    fired, notified, muted = (at and min(at, now) for at in (alert.fired, alert.notified, alert.muted_until))
    return replace(alert, fired=fired, notified=notified, muted_until=muted)


def _notify(alert: Alert, now: datetime) -> Alert:
    severity = alert.finding.severity
    worst = severity if alert.notified_severity is None else max(severity, alert.notified_severity)
    return replace(alert, notified=now, notified_severity=worst, notifications=alert.notifications + 1)


def _over(alert: Alert, finding: Finding, policy: Policy, now: datetime, muted: str) -> tuple[Alert, Reason]:
    good_since = min(alert.good_since or now, now)
    alert = replace(alert, good_since=good_since, good=finding.summary, muted=muted)
    changes = alert.flapping and flap_share(alert.checks) >= policy.flap_low
    calm = max(policy.clear, calm_needed(alert, now))
    if not finding.final and (changes or now - good_since < calm):
        return alert, Reason.NOTHING
    return _end(alert, good_since), Reason.NOTHING if alert.notified is None else Reason.RESOLVED


def _end(alert: Alert, at: datetime) -> Alert:
    return replace(
        alert,
        state=AlertState.RESOLVED,
        ended=at,
        good_since=None,
        good="",
        muted="",
        notifications=alert.notifications + 1,
    )


def _unwatched(alert: Alert, policy: Policy, now: datetime) -> tuple[Alert | None, Reason]:
    if now - alert.seen < policy.forget_after:
        return alert, Reason.NOTHING
    if alert.state is AlertState.FIRING:
        return replace(_end(alert, alert.seen), seen=now), (
            Reason.NOTHING if alert.notified is None else Reason.UNWATCHED
        )
    return (None if _forgettable(alert, now) else alert), Reason.NOTHING


def _flapping(alert: Alert, policy: Policy, now: datetime) -> Alert:
    share = flap_share(alert.checks)
    changes = share > policy.flap_high or (alert.flapping and share >= policy.flap_low)
    returns = alert.state is AlertState.FIRING and calm_needed(alert, now) > timedelta(0)
    return replace(alert, flapping=changes or returns)


# ----------------------------------------------------------------------------------- which receivers, and from when

# The cause -> what it mutes, in the same run, or in any run when the cause belongs to no run; of disks, only what is about the
# same one. A late watch mutes nothing: its findings are true, only old.
INHIBITS: dict[str, tuple[str, ...]] = {
    "storage": ("hang", "log-stale", "checkpoints", "throughput", "loss"),
    "disk there": ("hang", "log-stale", "checkpoints", "throughput", "loss"),  # hung, or not mounted
    "disk space": ("disk forecast", "alert-journal"),  # one message for a full disk; only while it is critical
    "slurm": ("is-running",),
    "slurm-unreachable": ("is-running",),
    "is-running": ("recovery", "hang", "log-stale", "throughput", "checkpoints"),
    "brake": ("recovery", "hang", "log-stale", "is-running", "throughput", "checkpoints"),
    "kill-switch": ("hang", "log-stale", "is-running", "throughput", "checkpoints"),
}
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


def plain_name(watchdog: str) -> str:
    """Return one spelling: ``is_running`` in a file of settings and ``is-running`` in a message are the same watchdog."""
    return watchdog.replace("_", "-").lower()


def policy_of(settings: Alerts, finding: Finding) -> Policy:
    """Return the patience that the settings ask for with this watchdog."""
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
    )


def receivers_of(settings: Alerts, finding: Finding, now: datetime, *, escalated: bool = False) -> tuple[str, ...]:
    """Return names of receivers, by the first route that fits; all of them when none does."""
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


def due_at(settings: Alerts, severity: Severity, now: datetime) -> datetime:
    """Return when this may be sent: now, or at the end of the quiet hours."""
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
    """Return whether it is between the two times of day. 22:00 to 07:00 passes midnight; the same time twice is the
    whole day.
    """
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
    """Return what need not be told while ``cause`` is so."""
    if cause.disk is not None and cause.severity < Severity.CRITICAL:
        return ()
    return INHIBITS.get(_kind(cause), ())


def _kind(finding: Finding) -> str:
    """Return the name that it has in ``INHIBITS``."""
    name = plain_name(finding.watchdog)
    return name if finding.disk is None else f"{name} {finding.disk.part}"


def inhibitor(finding: Finding, causes: Iterable[Finding]) -> str:
    """Return the cause, among the bad findings now, that explains ``finding``, as a reason to hold it back; "" if there
    is none.
    """
    for cause in causes:
        elsewhere = cause.disk and finding.disk and cause.disk.path != finding.disk.path
        if cause.run in ("", finding.run) and not elsewhere and _kind(finding) in explained_by(cause):
            return "explained by " + f"{cause.watchdog} {cause.subject}".strip()
    return ""


def silenced(ident: str, finding: Finding, silences: Sequence[Silence], now: datetime) -> str:
    """Return the silence that holds it, with its author and end; "" if none.

    A silence from the future comes from a fast clock.
    """
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
    """Return whether ``pattern`` is this alert: an id (six digits are enough), a watchdog, or "watchdog: subject" with * ?"""
    if len(pattern) >= 6 and ident.startswith(pattern.lower()):
        return True
    return _fits(pattern, finding)


def _fits(pattern: str, finding: Finding) -> bool:
    name, wanted = plain_name(finding.watchdog), plain_name(pattern)
    return fnmatchcase(name, wanted) or fnmatchcase(f"{name}: {plain_name(finding.subject)}", wanted)
