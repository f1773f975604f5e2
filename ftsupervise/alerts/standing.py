"""How the receivers stand, in the words of those who list it: ``alerts``, ``status`` and ``notify test``."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.outbox import RETRY_AFTER_MOST, SKEW, ReceiverState, State
from ftsupervise.alerts.wording import stamp

SLOW = timedelta(minutes=15)  # a receiver that could not be reached for so long is worth a word elsewhere


def telling(directory: Path, now: datetime) -> tuple[str, ...]:
    """A sentence for each receiver in the journal ``directory`` that is given up, refuses, fails, or does not reach everybody.

    () when all is well, and when there is no journal. Never raises for what lies there: that is for the watch to tell.
    """
    if not directory.is_dir():
        return ()
    state = Journal(directory).read()
    names = dict.fromkeys((*state.receivers, *(message.receiver for message in state.outbox)))
    return tuple(f"{name}: {words}" for name in names if (words := standing(state, name, now)))


def standing(state: State, name: str, now: datetime) -> str:
    """How the receiver ``name`` stands, for those who list it: "given up since …"; "" if all is well."""
    health = state.receivers.get(name, ReceiverState())
    waiting = sum(1 for m in state.outbox if m.receiver == name)
    wait = f"; {waiting} message{'s' if waiting != 1 else ''} waiting" if waiting else ""
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


def put_off(state: State, name: str, now: datetime) -> str:
    """The recipients that have been put off for too long to be greylisting alone, and why."""
    late = next((m for m in state.outbox if m.receiver == name and m.left and now - m.created >= SLOW), None)
    return f"{', '.join(late.left)} put off since {stamp(late.created)}, tried again: {late.error}" if late else ""
