"""One incident from beginning to end, for ``notify preview`` and the tests. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from ftsupervise.alerts.outbox import Message, message_id
from ftsupervise.alerts.step import alert_id
from ftsupervise.alerts.wording import event_finding
from ftsupervise.findings import EventKind, Finding, Notice, Reason, Severity
from ftsupervise.truth import Health


def incident(run: str, where: str, now: datetime) -> Iterator[Message]:
    """started, firing, escalated, repeated, resolved, no longer watched, several at once, finished."""
    begin = now - timedelta(hours=6)
    free = disk(run, begin)
    log = Finding(
        run,
        "hang",
        "step",
        Health.BAD,
        Severity.CRITICAL,
        "no new step for 24m, longer than 10m; the last was 48,210",
        begin,
        value="24m",
        limit="10m",
        meaning="The job holds its nodes and does not train.",
        look=f"ftsupervise status {where}".strip(),
    )
    started = "the run started as job 88_1 on 4 nodes (n[01-04])"
    yield _one(run, where, begin, _event(run, EventKind.STARTED, started, begin))
    yield _one(run, where, begin, _notice(free, Reason.FIRED, begin, begin))
    late = begin + timedelta(hours=1)
    note = "Nobody has acknowledged it so far."
    yield _one(run, where, late, _notice(free, Reason.ESCALATED, late, begin, note))
    again = begin + timedelta(hours=4)
    yield _one(run, where, again, _notice(free, Reason.REPEATED, again, begin))
    end = begin + timedelta(hours=4, minutes=15)
    yield _one(run, where, end, _notice(free, Reason.RESOLVED, end, begin, "Now: 8.1 TB free on /scratch"))
    yield _one(run, where, end, _notice(free, Reason.UNWATCHED, end, begin, "Last checked 02:10 UTC."))
    both = (_notice(free, Reason.FIRED, begin, begin), _notice(log, Reason.FIRED, begin, begin))
    yield _one(run, where, begin, *both, more={"disk fired": 137})
    yield _one(
        run, where, now, _event(run, EventKind.FINISHED, "the run has finished after 3d 4h, at step 120,000", now)
    )


def disk(run: str, at: datetime, *, health: Health = Health.BAD) -> Finding:
    """The finding everybody knows."""
    return Finding(
        run,
        "disk",
        "/scratch",
        health,
        Severity.CRITICAL,
        "3.2 TB free on /scratch, less than 5 TB" if health is Health.BAD else "8.1 TB free on /scratch",
        at,
        value="3.2 TB free" if health is Health.BAD else "8.1 TB free",
        limit="5 TB",
        meaning="A checkpoint is 2.3 TB: after one more the run stops with a torn one.",
        look="df -h /scratch",
        do="move old checkpoints away",
    )


def _event(run: str, event: EventKind, summary: str, at: datetime) -> Notice:
    finding = event_finding(run, event, summary, at)
    return Notice(key=f"event {event.value}", reason=Reason.ANNOUNCED, finding=finding, at=at, since=at, event=event)


def _notice(finding: Finding, reason: Reason, at: datetime, since: datetime, note: str = "") -> Notice:
    ident = alert_id(finding)
    key = f"{ident}.1.{reason.value}.1"
    return Notice(key=key, reason=reason, finding=finding, at=at, alert_id=ident, since=since, note=note)


def _one(run: str, where: str, at: datetime, *notices: Notice, more: dict[str, int] | None = None) -> Message:
    ident = message_id("sample", "sample", run, notices)
    return Message(ident, "sample", run, notices, created=at, due=at, more=more or {}, where=where)
