"""The story of a tick: findings become notices to people, and are saved before anything is sent.

    recorded = record(journal, findings, settings, now, run_name=run.name)
    announce(journal, settings, happened(EventKind.FINISHED, "finished", now, "…", run=run.name), now)
    delivered = deliver([journal], settings, now)

``record`` and ``announce`` each commit one generation in which the alerts' new states and the messages that follow
from them stand together; ``deliver`` sends what waits, from this tick or from one that was killed. ``advance`` is the pure
half: a state in, a state out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.outbox import (
    LISTED,
    LISTED_FOR_MACHINES,
    JournalState,
    Message,
    in_order,
    message_id,
    put,
    source_of,
)
from ftsupervise.alerts.self_monitor import about_itself, journal_finding, receiver_finding, reroute
from ftsupervise.alerts.step import (
    FORGET_AFTER,
    Policy,
    alert_id,
    due_at,
    explained_by,
    inhibitor,
    policy_of,
    receivers_of,
    silenced,
    step,
)
from ftsupervise.alerts.wording import ENDS, clean, one_line
from ftsupervise.findings import Alert, EventKind, Finding, Notice, Reason
from ftsupervise.truth import Health

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts

NOT_ASKED = timedelta(days=3)
_ANNOUNCED_KEPT = 1000  # dedup keys of events
TOGETHER = timedelta(hours=6)  # quick restarts after the first are told together, so long after it
_BEHIND = 400  # attempts: an event may come this late and is announced still
_NOTIFYING = (Reason.FIRED, Reason.ESCALATED, Reason.REPEATED, Reason.RESOLVED, Reason.UNWATCHED)


@dataclass(frozen=True)
class Recorded:
    """The outcome of one ``record``: its changes, and the alerts as they are now."""

    notices: tuple[Notice, ...]  # the changes that people are notified of
    firing: tuple[Alert, ...]  # the alerts that fire and are bad now, the worst first
    unsaved: str = ""  # why it could not be written where it belongs; "" when it was
    problems: tuple[str, ...] = ()  # damaged or foreign files of the journal


class About(NamedTuple):
    """The run that messages are about, its settings, and the time."""

    settings: Alerts
    now: datetime
    run: str
    home: str  # of the journal: for dedup keys
    where: str  # the argument that names the run in commands


def record(
    journal: Journal,
    findings: Iterable[Finding],
    settings: Alerts,
    now: datetime,
    *,
    run_name: str,
    where: str | None = None,
    context: Sequence[Finding] = (),
    partial: bool = False,
) -> Recorded:
    """Step every alert of ``run_name`` by what was found and save the transitions with their messages, atomically.

    ``findings`` is all that this tick found about the run: a subject that is not among them has not been checked;
    unless ``partial``: then this caller checks these subjects only, and other callers check the others.
    ``context`` are findings of another journal that may explain some of these (slurm unreachable). ``where`` is
    the argument that names the run in the commands people are to type; default: the run directory the journal
    lies in. Never raises for a full disk: see ``Recorded.unsaved``.
    """
    seen = tuple(findings)
    about = About(settings, now, run_name, journal.home, place_of(journal) if where is None else where)
    notified: list[Notice] = []
    first: list[Notice] = []

    def make(state: JournalState) -> JournalState:
        notified.clear()
        own = [receiver_finding(state, name, now, run_name) for name in settings.named]
        state = reroute(state, settings, now, journal.home)
        new = advance(state, (*seen, *own), about, notified, context=context, partial=partial)
        # without a change nothing is written, unless it may be impossible: that is told before it is needed
        return new if new is not state or journal.has_room() else replace(new)

    def say(state: JournalState) -> JournalState:
        notified[:] = first
        return advance(state, (saved,), about, notified, context=context, partial=True)

    state = journal.change(make)
    problems, unsaved = tuple(journal.problems), journal.unsaved
    saved = journal_finding(run_name, journal.problems, unsaved, now)  # known only now that it has been written
    if saved.health is Health.BAD or alert_id(saved) in state.alerts:
        first[:] = notified
        state = journal.change(say)
    name = one_line(run_name, 100)
    firing = [a for a in state.alerts.values() if a.is_bad and a.finding.run == name]
    firing.sort(key=lambda a: (-a.finding.severity, a.fired or now))
    return Recorded(tuple(notified), tuple(firing), journal.unsaved, problems)


def announce(journal: Journal, settings: Alerts, event: Notice, now: datetime, where: str | None = None) -> bool:
    """Announce an event (of ``happened``) once; returns False if one of its key has been announced before.

    The first restart that is ``quick`` is told at once, those after it together, every six hours at most, or with the next
    message about the run. A run may have many thousands of attempts: the keys of the newest are kept, and of those before it is
    known that they were announced.
    """
    about = About(settings, now, event.finding.run, journal.home, place_of(journal) if where is None else where)
    notice = replace(event, finding=clean(event.finding), at=now, since=now)
    fresh = False

    def make(state: JournalState) -> JournalState:
        nonlocal fresh
        fresh = not was_announced(state, event.key, event.attempt)
        if not fresh:
            return state
        recent = dict(list(state.announced.items())[-_ANNOUNCED_KEPT:])
        through = max(state.announced_through, event.attempt - _BEHIND)
        state = replace(state, announced={**recent, event.key: now}, announced_through=through)
        due = _told_at(state, now) if event.quick else now
        if event.event is EventKind.RESUMED:
            state = replace(state, together=due)
        for name in receivers_of(settings, notice.finding, now):
            state = enqueue(state, name, [notice], about, not_before=due)
        return state

    journal.change(make)
    return fresh


def _told_at(state: JournalState, at: datetime) -> datetime:
    """Return when a quick restart at ``at`` is told: at once, or with the others."""
    last = state.together
    if last is None or not at - TOGETHER < last <= at + TOGETHER:
        return at
    return last if last > at else last + TOGETHER


def was_announced(state: JournalState, key: str, attempt: int) -> bool:
    """Return whether the event ``key``, of the attempt of this number (0: of none), has been announced."""
    return key in state.announced or 0 < attempt <= state.announced_through


def place_of(journal: Journal) -> str:
    """Return the run directory a journal lies in (RUN/watch/journal); "" for a journal that belongs to no run."""
    root = Path(journal.home).parent.parent
    return str(root) if (root / "switches").is_dir() else ""


# ----------------------------------------------------------------------------------------------------------- one step


def advance(
    state: JournalState,
    findings: Sequence[Finding],
    about: About,
    notified: list[Notice],
    *,
    context: Sequence[Finding] = (),
    partial: bool = False,
) -> JournalState:
    """Return the state after these findings, messages included; their notices are added to ``notified``. Pure. It is ``state``
    itself where nothing changes: a run without an alert costs no write.

    ``partial``: other subjects were not due in this call, so their absence says nothing.
    """
    settings, now = about.settings, about.now
    by_id, run = _worst(findings, state), one_line(about.run, 100)
    known = [] if partial else [i for i, a in state.alerts.items() if a.finding.run == run and i not in by_id]
    causes = _causes(state, by_id, context, about)
    spoke = {finding.watchdog for finding in by_id.values()}
    alerts = dict(state.alerts)
    parcels: dict[str, list[Notice]] = {}
    policies: dict[str, Policy] = {}  # by the watchdog
    for ident in (*by_id, *known):
        finding = by_id.get(ident)
        if ident not in alerts and by_id[ident].health is Health.OK:  # ``step`` would remember nothing: most are so
            continue
        old = alerts.get(ident) or Alert(id=ident, finding=by_id[ident], seen=now)
        newest = finding or old.finding
        muted = silenced(ident, newest, state.silences, now) or inhibitor(newest, causes)
        policy = policies.get(newest.watchdog) or policies.setdefault(newest.watchdog, policy_of(settings, newest))
        if newest.watchdog not in spoke:  # it was not due, or it is switched off: we wait, but not for ever
            policy = replace(policy, forget_after=max(policy.forget_after, NOT_ASKED))
        new, reason = step(old, finding, policy, now, muted=muted)
        if new is None:
            alerts.pop(ident, None)
            continue
        if reason in _NOTIFYING:
            notified.append(_notice(new, reason, now, finding))
            receivers = _whom(new, reason, settings, now)
            for name in receivers:
                post = "" if reason is Reason.FIRED else old.posts.get(name, "")
                parcels.setdefault(name, []).append(replace(notified[-1], post=post))
            new = _notified(new, reason, receivers)
        alerts[ident] = new
    if alerts != state.alerts:
        state = replace(state, alerts=alerts)
    for name, notices in parcels.items():
        state = enqueue(state, name, notices, about)
    return state


def _notified(alert: Alert, reason: Reason, receivers: tuple[str, ...]) -> Alert:
    if reason in ENDS:
        return replace(alert, posts={})
    return replace(alert, notified_to=tuple(dict.fromkeys((*alert.notified_to, *receivers))))


def _worst(findings: Sequence[Finding], state: JournalState) -> dict[str, Finding]:
    """Return alert id (of the name as it came) -> its finding, cleaned where somebody may read it; of several about one subject
    the worst counts."""
    rank = {Health.OK: 0, Health.UNKNOWN: 1, Health.BAD: 2}
    out: dict[str, Finding] = {}
    for raw in findings:
        ident = alert_id(raw)
        old = out.get(ident)
        if old is None or (rank[raw.health], raw.severity) > (rank[old.health], old.severity):
            out[ident] = raw
    return {i: one if one.health is Health.OK and i not in state.alerts else clean(one) for i, one in out.items()}


def _causes(state: JournalState, by_id: dict[str, Finding], context: Sequence[Finding], about: About) -> list[Finding]:
    """Return the findings that are wrong now (bad in this tick, or firing and not seen to be good) and can explain others.

    What nobody has looked at for ``FORGET_AFTER`` explains nothing any more: its watchdog may be switched off.
    """
    now_bad = [f for f in (*by_id.values(), *context) if f.health is Health.BAD]
    still = [
        a.finding
        for i, a in state.alerts.items()
        if a.is_bad and (i not in by_id or by_id[i].health is Health.UNKNOWN) and about.now - a.seen < FORGET_AFTER
    ]
    return [f for f in (*now_bad, *still) if explained_by(f)]


def _whom(alert: Alert, reason: Reason, settings: Alerts, now: datetime) -> tuple[str, ...]:
    others = tuple(name for name in settings.named if not about_itself(alert.finding, name))
    if reason in ENDS:
        return tuple(name for name in alert.notified_to if name in others)
    wanted = receivers_of(settings, alert.finding, now, escalated=alert.escalated)
    if reason is Reason.ESCALATED:
        wanted = (*alert.notified_to, *wanted)
    notified = tuple(name for name in dict.fromkeys(wanted) if name in others)
    return notified if notified or not wanted else others  # the route has no receiver but the one that is in trouble


def _notice(alert: Alert, reason: Reason, now: datetime, newest: Finding | None) -> Notice:
    note = ""
    if reason is Reason.RESOLVED and newest is not None and newest.summary:
        note = f"Now: {newest.summary}"
    elif reason is Reason.UNWATCHED:
        note = f"Last checked {alert.seen:%Y-%m-%d %H:%M} UTC."
    elif reason is Reason.ESCALATED and alert.escalated and not alert.acked_by:
        note = "It has not been acknowledged so far."
    elif alert.flapping:
        note = "It is flapping: you will be notified of its end once it has been calm for a while."
    end = alert.ended if reason is Reason.RESOLVED and alert.ended else now
    finding = alert.finding
    if reason in ENDS and alert.notified_severity is not None:  # whoever was woken is told the end at the same hour
        finding = replace(finding, severity=max(finding.severity, alert.notified_severity))
    return Notice(
        key=f"{alert.id}.{alert.incident}.{reason.value}.{alert.notifications}",
        reason=reason,
        finding=finding,
        at=end,
        alert_id=alert.id,
        since=alert.since,
        count=alert.notifications,
        incident=alert.incident,
        note=one_line(note, 500),
        times=alert.times if reason in ENDS else 1,
        attempt=newest.attempt if reason is Reason.RESOLVED and newest is not None else 0,
    )


def enqueue(
    state: JournalState,
    receiver: str,
    notices: Sequence[Notice],
    about: About,
    *,
    not_before: datetime | None = None,
) -> JournalState:
    """Put ``notices`` as a message to ``receiver`` into the outbox."""
    items = in_order(notices)
    due = min((due_at(about.settings, one.finding.severity, about.now) for one in items), default=about.now)
    message = Message(
        id=message_id(about.home, receiver, about.run, items),
        receiver=receiver,
        run=one_line(about.run, 100),
        notices=items,
        created=about.now,
        due=max(due, not_before or due),
        where=about.where,
        source=source_of(about.home),
        listed=LISTED_FOR_MACHINES if about.settings.named[receiver].kind == "webhook" else LISTED,
    )
    return put(state, message)
