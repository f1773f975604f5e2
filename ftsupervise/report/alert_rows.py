"""The alerts of a run for its report: one row for each, from its begin to its end, with all that was sent about it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from ftsupervise.alerts.outbox import JournalState, told
from ftsupervise.findings import Alert, AlertState, Finding, Notice, Reason

_RANKS = {"critical": -2, "warning": -1}
_NOW = ("firing", "pending", "calm")  # the words of ``Alert`` for what is not over for good
_OVER = (Reason.RESOLVED, Reason.UNWATCHED)
Key = tuple[str, datetime | None]  # an alert and when it began, or an event and when it was


class AlertRow(NamedTuple):
    """An alert from its begin to its end, or an event about which people were told."""

    at: datetime | None  # when the trouble began, or the event was
    word: str  # "firing", "pending", "calm", "resolved", "started" …
    severity: str
    name: str  # watchdog and subject
    summary: str
    told: tuple[str, ...] = ()  # receivers
    note: str = ""  # acknowledged by, silenced
    steps: tuple[tuple[str, datetime], ...] = ()  # what was sent about it, and when: "fired", "repeated", "resolved"
    do: str = ""  # what is to be done about it
    watchdog: str = ""
    ended: datetime | None = None


def alert_rows(state: JournalState) -> list[AlertRow]:
    """Sort the rows: firing alerts, the worst first; then those that are over or announced, newest first."""
    rows: dict[Key, AlertRow] = {}
    for alert in state.alerts.values():
        if alert.state in (AlertState.FIRING, AlertState.PENDING):
            rows[alert.id, alert.since] = _of_alert(alert, state)
    for notice, who in _told(state):
        key = (notice.alert_id, notice.since) if notice.alert_id else (notice.key, notice.at)
        rows[key] = _with(rows.get(key) or _of_notice(notice), notice, who)
    now = [row for row in rows.values() if row.word in _NOW]
    over = [row for row in rows.values() if row not in now]
    now.sort(key=lambda row: (_NOW.index(row.word), _RANKS.get(row.severity, 0)))
    return [*now, *sorted(over, key=lambda row: -_seconds(row.ended or row.at))]


def _told(state: JournalState) -> Iterable[tuple[Notice, tuple[str, ...]]]:
    """Each notice that was sent, or waits to be, with its receivers, in the order of time."""
    found: dict[str, tuple[Notice, tuple[str, ...]]] = {}
    for message in (*state.posts.values(), *state.outbox):
        who = message.receiver if message.sent is not None else f"{message.receiver} (not sent yet)"
        for notice in message.notices:
            _, names = found.get(notice.key, (notice, ()))
            found[notice.key] = notice, tuple(dict.fromkeys((*names, who)))
    return sorted(found.values(), key=lambda pair: pair[0].at)


def _of_alert(alert: Alert, state: JournalState) -> AlertRow:
    acknowledged = f"acknowledged by {alert.acked_by}" if alert.acked_by else ""
    return AlertRow(
        at=alert.since,
        word=alert.word,
        severity=alert.finding.severity.word,
        name=_name(alert.finding),
        summary=alert.summary,
        told=tuple(name for name, accepted, _ in told(state, alert) if accepted),
        note="; ".join(filter(None, (acknowledged, alert.muted))),
        do=alert.finding.do if alert.good_since is None else "",
        watchdog=alert.finding.watchdog,
    )


def _of_notice(notice: Notice) -> AlertRow:
    finding = notice.finding
    word = notice.event.value if notice.event is not None else notice.reason.value
    at = notice.since if notice.alert_id else notice.at
    return AlertRow(
        at, word, finding.severity.word, _name(finding), finding.summary, do=finding.do, watchdog=finding.watchdog,
        ended=None if notice.alert_id else notice.at,
    )  # fmt: skip


def _with(row: AlertRow, notice: Notice, who: tuple[str, ...]) -> AlertRow:
    """``row`` with one more message about it."""
    over = notice.reason in _OVER
    return row._replace(
        word=notice.reason.value if over else row.word,
        note=notice.note if over and notice.note else row.note or notice.note,
        told=tuple(dict.fromkeys((*row.told, *who))),
        steps=(*row.steps, (notice.reason.value, notice.at)) if notice.alert_id else row.steps,
        ended=notice.at if over else row.ended,
    )


def _name(finding: Finding) -> str:
    return f"{finding.watchdog} {finding.subject}".strip()


def _seconds(at: datetime | None) -> float:
    return at.timestamp() if at is not None else 0.0
