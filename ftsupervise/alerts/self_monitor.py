"""Findings about notifying itself: a receiver that is broken, a journal that cannot be written.

These become findings like any other, with a firing and a resolved message, sent through the receivers that work.
``alerts``, ``status`` and ``notify test`` also show the state of the receivers.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.outbox import (
    RETRY_AFTER_MOST,
    SKEW,
    JournalState,
    Message,
    drop,
    message_id,
    put,
)
from ftsupervise.alerts.wording import one_line, stamp
from ftsupervise.findings import Finding, Notice, Severity, Words
from ftsupervise.truth import Health
from ftsupervise.units import count

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts

RECEIVER = "receiver"
JOURNAL = "alert-journal"
OFTEN = 3  # refusals in a row that are hardly an accident any more
SLOW = timedelta(minutes=15)  # a receiver that could not be reached for this long is reported elsewhere


WORDS = {
    "broken": Words(
        "No message goes out through {name} until its settings are fixed.",
        "ftsupervise alerts",
        "fix its settings, then: ftsupervise notify test --receiver {name}",
        Severity.CRITICAL,
    ),
    "odd": Words(
        "It may be an accident on the way: they are tried again and again, and sent through another receiver.",
        "ftsupervise alerts",
        "check whether it still does: ftsupervise notify test --receiver {name}",
    ),
    "unreached": Words("Its messages wait and are tried again and again.", "ftsupervise alerts"),
    "partly": Words("The others were notified.", "ftsupervise alerts"),
    "works": Words(),
    "unsaved": Words(
        "Alerts are still sent; you may get the same message twice.",
        "df -h; df -i; ls -l {place}",
        severity=Severity.CRITICAL,
    ),
    "passed over": Words("It was passed over; nothing else is lost."),
}


def journal_finding(run: str, problems: list[str], unsaved: str, now: datetime) -> Finding:
    """Return the finding about the journal of ``run``.

    ``problems``: files that were passed over; ``unsaved``: why it is not written.
    """
    words, text = WORDS["passed over"], "the alerts' journal is written as it should be"
    if unsaved:
        words, text = WORDS["unsaved"], f"the alerts' journal cannot be written: {unsaved}"
    elif problems:
        text = f"a file in the alerts' journal was not trusted: {problems[0]}"
    names = {"place": unsaved.partition(": ")[0]}
    return words.finding((run, JOURNAL, ""), Health.of(bool(unsaved or problems)), one_line(text), now, names=names)


def receiver_finding(state: JournalState, name: str, now: datetime, run: str) -> Finding:
    """The finding about the receiver ``name``."""
    health = state.receiver(name)
    bad: bool | None = True
    severity = None
    waiting = sum(1 for m in state.outbox if m.receiver == name)
    refused = health.refused or put_off(state, name, now)
    if health.broken:
        words, text = "broken", f"{name} takes no messages any more and is given up: {health.broken}"
    elif health.odd:
        words, text = "odd", f"{name} refuses its messages: {health.odd}"
        severity = Severity.CRITICAL if health.failures >= OFTEN else None
    elif health.failing_since is not None and now - health.failing_since >= SLOW:
        words, text = "unreached", f"{name} could not be reached since {stamp(health.failing_since)}: {health.error}"
    elif refused:
        words, text = "partly", f"{name} does not reach everybody: {refused}"
    else:
        failing = health.failing_since is not None
        bad = None if failing else False
        words, text = "works", f"{name}: {health.error}" if failing else f"{name} takes messages"
    return WORDS[words].finding(
        (run, RECEIVER, name),
        Health.of(bad),
        text,
        now,
        severity=severity,
        names={"name": name},
        value=f"{count(waiting, 'message')} waiting" if bad else "",
        since=health.failing_since if bad and words != "partly" else None,
    )


def reroute(state: JournalState, settings: Alerts, now: datetime, home: str) -> JournalState:
    """Give the messages of a receiver that refuses or is no longer configured to another one, unless another has them
    already.
    """
    known = settings.named
    working = [name for name in known if state.receiver(name).works]
    for message in state.outbox:
        gone = message.receiver not in known
        if not gone and message.receiver in working:
            continue
        state, orphans = hand_over(state, message, working, now, home)
        if gone and (working or not orphans):
            state = drop(state, message)
    return state


def hand_over(
    state: JournalState, message: Message, others: list[str], now: datetime, home: str
) -> tuple[JournalState, tuple[Notice, ...]]:
    """Hand the parts of ``message`` that none of the ``others`` has to the first of them; also return those parts."""
    orphans = tuple(n for n in message.notices if not _notified_elsewhere(state, n, message.receiver, others))
    receiver = others[0] if others else ""
    if any(about_itself(n.finding, receiver) for n in orphans):  # it cannot report about itself that it is silent
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
        unlisted=message.unlisted,
        where=message.where,
        source=message.source,
        note=f"This was for {message.receiver}, which does not take it.",
    )
    alerts = dict(state.alerts)
    for notice in items:
        alert = alerts.get(notice.alert_id)
        if alert is not None and receiver not in alert.notified_to:
            alerts[alert.id] = replace(alert, notified_to=(*alert.notified_to, receiver))
    return put(replace(state, alerts=alerts), copy), orphans


def about_itself(finding: Finding, receiver: str) -> bool:
    """Return whether it is about this very receiver."""
    return finding.watchdog == RECEIVER and finding.subject == receiver


def _notified_elsewhere(state: JournalState, notice: Notice, receiver: str, working: list[str]) -> bool:
    """Return whether another receiver that works has been given this very notice, or it is waiting there."""
    others = [m for m in (*state.outbox, *state.posts.values()) if m.receiver in working and m.receiver != receiver]
    return any(n.key == notice.key for m in others for n in m.notices)


# ------------------------------------------------------------------------------------------------------- for people


def telling(directory: Path, now: datetime) -> tuple[str, ...]:
    """Return a sentence for each receiver in the journal ``directory`` that is given up, refuses, fails, or does not
    reach everybody.

    () when all is well, and when there is no journal. Never raises for a damaged journal: the watch reports that.
    """
    if not directory.is_dir():
        return ()
    state = Journal(directory).read()
    names = dict.fromkeys((*state.receivers, *(message.receiver for message in state.outbox)))
    return tuple(f"{name}: {words}" for name in names if (words := standing(state, name, now)))


def standing(state: JournalState, name: str, now: datetime) -> str:
    """Return the state of the receiver ``name``, for lists of receivers: "given up since …"; "" if all is well."""
    health = state.receiver(name)
    waiting = sum(1 for m in state.outbox if m.receiver == name)
    wait = f"; {count(waiting, 'message')} waiting" if waiting else ""
    if health.broken:
        return f"given up since {stamp(health.broken_since or now)}: {health.broken}{wait}"
    if health.failures:
        pause = health.not_before
        after = (
            f", next try {stamp(pause)}" if pause is not None and now < pause <= now + RETRY_AFTER_MOST + SKEW else ""
        )
        times = "once" if health.failures == 1 else f"{health.failures} times in a row"
        return f"{'refused' if health.odd else 'failed'} {times}{after}: {health.error}{wait}"
    refused = health.refused or put_off(state, name, now)
    return f"does not reach everybody: {refused}{wait}" if refused else ""


def put_off(state: JournalState, name: str, now: datetime) -> str:
    """Return the recipients that have been deferred for too long to be greylisting alone, and why."""
    late = next((m for m in state.outbox if m.receiver == name and m.left and now - m.created >= SLOW), None)
    return f"{', '.join(late.left)} put off since {stamp(late.created)}, tried again: {late.error}" if late else ""
