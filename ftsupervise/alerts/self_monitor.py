"""When telling itself is in trouble: a receiver that is broken, a journal that cannot be written. Pure.

These become findings like any other, with a firing and a resolved message, told through the receivers that work.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ftsupervise.alerts.outbox import Message, ReceiverState, State, drop, message_id, put
from ftsupervise.alerts.standing import SLOW, put_off
from ftsupervise.alerts.wording import one_line, stamp
from ftsupervise.findings import Finding, Notice, Severity
from ftsupervise.truth import Health

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts

RECEIVER = "receiver"
JOURNAL = "alert-journal"
OFTEN = 3  # refusals in a row that are hardly an accident any more


def own_findings(
    state: State, settings: Alerts, now: datetime, run: str, problems: list[str], unsaved: str
) -> tuple[Finding, ...]:
    """How the receivers and the journal are."""
    out = [receiver_finding(state, name, now, run) for name in settings.named]
    summary = f"the alerts' journal cannot be written: {unsaved}" if unsaved else ""
    if problems and not unsaved:
        summary = f"a file in the alerts' journal was not believed: {problems[0]}"
    out.append(
        Finding(
            run,
            JOURNAL,
            "",
            Health.BAD if summary else Health.OK,
            Severity.CRITICAL if unsaved else Severity.WARNING,
            one_line(summary) or "the alerts' journal is written as it should be",
            now,
            meaning="Alerts are still told; you may hear the same thing twice."
            if unsaved
            else "It was passed over; nothing else is lost.",
            look=f"df -h; df -i; ls -l {unsaved.partition(': ')[0]}" if unsaved else "",
        )
    )
    return tuple(out)


def receiver_finding(state: State, name: str, now: datetime, run: str) -> Finding:
    health = state.receivers.get(name, ReceiverState())
    waiting = sum(1 for m in state.outbox if m.receiver == name)
    number = f"{waiting} message{'s' if waiting != 1 else ''}"
    common: dict[str, Any] = {"value": f"{number} waiting", "look": "ftsupervise alerts"}
    if health.broken:
        return Finding(
            run,
            RECEIVER,
            name,
            Health.BAD,
            Severity.CRITICAL,
            f"{name} takes no messages any more, it is given up: {health.broken}",
            now,
            meaning=f"Nobody hears of anything through {name} until somebody mends it.",
            do=f"mend its settings, then: ftsupervise notify test --receiver {name}",
            since=health.failing_since,
            **common,
        )
    if health.odd:
        return Finding(
            run,
            RECEIVER,
            name,
            Health.BAD,
            Severity.CRITICAL if health.failures >= OFTEN else Severity.WARNING,
            f"{name} refuses its messages: {health.odd}",
            now,
            meaning="It may be an accident on the way: they are tried again and again, and told through another receiver.",
            do=f"see whether it still does: ftsupervise notify test --receiver {name}",
            since=health.failing_since,
            **common,
        )
    if health.failing_since is not None and now - health.failing_since >= SLOW:
        return Finding(
            run,
            RECEIVER,
            name,
            Health.BAD,
            Severity.WARNING,
            f"{name} could not be reached since {stamp(health.failing_since)}: {health.error}",
            now,
            meaning="Its messages wait and are tried again and again.",
            since=health.failing_since,
            **common,
        )
    refused = health.refused or put_off(state, name, now)
    if refused:
        return Finding(
            run,
            RECEIVER,
            name,
            Health.BAD,
            Severity.WARNING,
            f"{name} does not reach everybody: {refused}",
            now,
            meaning="The others were told.",
            **common,
        )
    if health.failing_since is not None:
        return Finding(run, RECEIVER, name, Health.UNKNOWN, Severity.WARNING, f"{name}: {health.error}", now)
    return Finding(run, RECEIVER, name, Health.OK, Severity.WARNING, f"{name} takes messages", now)


def reroute(state: State, settings: Alerts, now: datetime, home: str) -> State:
    """What waits at a receiver that refuses or is no longer configured and nobody else was told: tell somebody else."""
    known = settings.named
    working = [name for name in known if state.receivers.get(name, ReceiverState()).works]
    for message in state.outbox:
        gone = message.receiver not in known
        if not gone and message.receiver in working:
            continue
        state, orphans = hand_over(state, message, working, now, home)
        if gone and (working or not orphans):
            state = drop(state, message)
    return state


def hand_over(
    state: State, message: Message, others: list[str], now: datetime, home: str
) -> tuple[State, tuple[Notice, ...]]:
    """What of ``message`` none of the ``others`` has been given, to the first of them; and what that is."""
    orphans = tuple(n for n in message.notices if not _told_elsewhere(state, n, message.receiver, others))
    receiver = others[0] if others else ""
    if any(about_itself(n.finding, receiver) for n in orphans):  # it cannot say of itself that it says nothing
        receiver = next((o for o in others if not any(about_itself(n.finding, o) for n in orphans)), receiver)
    items = tuple(replace(n, post="") for n in orphans if not about_itself(n.finding, receiver))
    if not receiver or not items:
        return state, orphans
    copy = Message(
        id=message_id(home, receiver, message.run, items),
        receiver=receiver,
        run=message.run,
        notices=items,
        created=message.created,
        due=now,
        more=message.more,
        where=message.where,
        note=f"This was for {message.receiver}, which does not take it.",
    )
    alerts = dict(state.alerts)
    for notice in items:
        alert = alerts.get(notice.alert_id)
        if alert is not None and receiver not in alert.told_to:
            alerts[alert.id] = replace(alert, told_to=(*alert.told_to, receiver))
    return put(replace(state, alerts=alerts), copy), orphans


def about_itself(finding: Finding, receiver: str) -> bool:
    """Is it about this very receiver?"""
    return finding.watchdog == RECEIVER and finding.subject == receiver


def _told_elsewhere(state: State, notice: Notice, receiver: str, working: list[str]) -> bool:
    """Has another receiver that works been given this very notice, or is it waiting there?"""
    others = [m for m in (*state.outbox, *state.posts.values()) if m.receiver in working and m.receiver != receiver]
    return any(n.key == notice.key for m in others for n in m.notices)
