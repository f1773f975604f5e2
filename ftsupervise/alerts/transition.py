"""All alerts of a run one look further, and the messages that follow. Pure: a state in, a state out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from ftsupervise.alerts import inhibit, routes
from ftsupervise.alerts.outbox import LISTED, LISTED_FOR_MACHINES, Message, State, message_id, put
from ftsupervise.alerts.self_monitor import about_itself
from ftsupervise.alerts.step import alert_id, step
from ftsupervise.alerts.wording import clean, one_line
from ftsupervise.findings import Alert, AlertState, Finding, Notice, Reason
from ftsupervise.truth import Health

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts

NOT_ASKED = timedelta(days=3)
_TELLING = (Reason.FIRED, Reason.ESCALATED, Reason.REPEATED, Reason.RESOLVED, Reason.UNWATCHED)


def advance(
    state: State,
    findings: Sequence[Finding],
    settings: Alerts,
    now: datetime,
    run_name: str,
    names: tuple[str, str],
    told: list[Notice],
    *,
    beside: Sequence[Finding] = (),
    partial: bool = False,
) -> State:
    """Pure: the state after these findings, messages included. ``names``: (home for dedup keys, where for commands).

    ``partial``: other subjects were not due in this call, so their absence says nothing.
    """
    by_id, run = _worst(findings), one_line(run_name, 100)
    known = [] if partial else [i for i, a in state.alerts.items() if a.finding.run == run and i not in by_id]
    causes = _causes(state, by_id, beside)
    spoke = {finding.watchdog for finding in by_id.values()}
    alerts = dict(state.alerts)
    parcels: dict[str, list[Notice]] = {}
    for ident in (*by_id, *known):
        finding = by_id.get(ident)
        old = alerts.get(ident) or Alert(id=ident, finding=by_id[ident], seen=now)
        about = finding or old.finding
        muted = inhibit.silenced(ident, about, state.silences, now) or inhibit.inhibitor(about, causes)
        policy = routes.policy(settings, about)
        if about.watchdog not in spoke:  # it was not its turn, or it is switched off: patience, but not for ever
            policy = replace(policy, forget_after=max(policy.forget_after, NOT_ASKED))
        new, reason = step(old, finding, policy, now, muted=muted)
        if new is None:
            alerts.pop(ident, None)
            continue
        if reason in _TELLING:
            told.append(_notice(new, reason, now, finding))
            receivers = _whom(new, reason, settings, now)
            for name in receivers:
                post = "" if reason is Reason.FIRED else old.posts.get(name, "")
                parcels.setdefault(name, []).append(replace(told[-1], post=post))
            new = _told(new, reason, receivers)
        alerts[ident] = new
    state = replace(state, alerts=alerts)
    for name, notices in parcels.items():
        state = enqueue(state, name, run_name, notices, settings, now, names)
    return state


def _told(alert: Alert, reason: Reason, receivers: tuple[str, ...]) -> Alert:
    if reason in (Reason.RESOLVED, Reason.UNWATCHED):
        return replace(alert, posts={})
    return replace(alert, told_to=tuple(dict.fromkeys((*alert.told_to, *receivers))))


def _worst(findings: Sequence[Finding]) -> dict[str, Finding]:
    """By alert (the id is that of the name as it came), cleaned; of several about one subject the worst counts."""
    rank = {Health.OK: 0, Health.UNKNOWN: 1, Health.BAD: 2}
    out: dict[str, Finding] = {}
    for raw in findings:
        ident, finding = alert_id(raw), clean(raw)
        old = out.get(ident)
        if old is None or (rank[finding.health], finding.severity) > (rank[old.health], old.severity):
            out[ident] = finding
    return out


def _causes(state: State, by_id: dict[str, Finding], beside: Sequence[Finding]) -> list[Finding]:
    """What is wrong now: bad in this tick, or firing and not seen to be good in it. Only what can explain anything."""
    now_bad = [f for f in (*by_id.values(), *beside) if f.health is Health.BAD]
    still = [
        a.finding
        for i, a in state.alerts.items()
        if a.state is AlertState.FIRING and (i not in by_id or by_id[i].health is Health.UNKNOWN)
    ]
    return [f for f in (*now_bad, *still) if inhibit.explained_by(f)]


def _whom(alert: Alert, reason: Reason, settings: Alerts, now: datetime) -> tuple[str, ...]:
    others = tuple(name for name in settings.named if not about_itself(alert.finding, name))
    if reason in (Reason.RESOLVED, Reason.UNWATCHED):
        return tuple(name for name in alert.told_to if name in others)
    wanted = routes.receivers(settings, alert.finding, now, escalated=alert.escalated)
    if reason is Reason.ESCALATED:
        wanted = (*alert.told_to, *wanted)
    told = tuple(name for name in dict.fromkeys(wanted) if name in others)
    return told if told or not wanted else others  # the route leads to none but the receiver that is in trouble


def _notice(alert: Alert, reason: Reason, now: datetime, newest: Finding | None) -> Notice:
    note = ""
    if reason is Reason.RESOLVED and newest is not None and newest.summary:
        note = f"Now: {newest.summary}"
    elif reason is Reason.UNWATCHED:
        note = f"Last looked at {alert.seen:%Y-%m-%d %H:%M} UTC."
    elif reason is Reason.ESCALATED and alert.escalated and not alert.acked_by:
        note = "Nobody has acknowledged it so far."
    elif alert.flapping:
        note = "It is flapping: it will be told to be over when it has been calm for a while."
    end = alert.ended if reason is Reason.RESOLVED and alert.ended else now
    return Notice(
        key=f"{alert.id}.{alert.incident}.{reason.value}.{alert.tellings}",
        reason=reason,
        finding=alert.finding,
        at=end,
        alert_id=alert.id,
        since=alert.since,
        count=alert.tellings,
        note=one_line(note, 500),
    )


def enqueue(
    state: State,
    receiver: str,
    run: str,
    notices: Sequence[Notice],
    settings: Alerts,
    now: datetime,
    names: tuple[str, str],
) -> State:
    home, where = names
    items = tuple(sorted(notices, key=lambda notice: -notice.finding.severity))  # the worst gives the subject
    due = min((routes.due(settings, notice.finding.severity, now) for notice in items), default=now)
    message = Message(
        id=message_id(home, receiver, run, items),
        receiver=receiver,
        run=one_line(run, 100),
        notices=items,
        created=now,
        due=due,
        where=where,
        listed=LISTED_FOR_MACHINES if settings.named[receiver].kind == "webhook" else LISTED,
    )
    return put(state, message)
