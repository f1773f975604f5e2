"""The story of a tick: what was found becomes what people must hear, saved before anything is sent.

    recorded = record(journal, findings, settings, now, run_name=run.name)
    announce(journal, settings, EventKind.FINISHED, run=run.name, summary="…", at=now, dedup="finished")
    delivered = deliver([journal], settings, now)

``record`` and ``announce`` each commit one generation in which the alerts' new states and the messages that follow
from them stand together; ``deliver`` sends what waits, from this tick or from one that was killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.alerts import routes
from ftsupervise.alerts.deliver import Delivered, deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.outbox import State
from ftsupervise.alerts.self_monitor import JOURNAL, own_findings, reroute
from ftsupervise.alerts.transition import advance, enqueue
from ftsupervise.alerts.wording import clean, event_finding, one_line
from ftsupervise.findings import Alert, AlertState, EventKind, Finding, Notice, Reason
from ftsupervise.truth import Health

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts

__all__ = ["Delivered", "Recorded", "announce", "deliver", "record"]

_ANNOUNCED_KEPT = 500


@dataclass(frozen=True)
class Recorded:
    """What one ``record`` changed and how things stand."""

    notices: tuple[Notice, ...]  # what people are told because of it
    firing: tuple[Alert, ...]  # what fires now, the worst first
    unsaved: str = ""  # why it could not be written where it belongs; "" when it was
    problems: tuple[str, ...] = ()  # files of the journal that were passed over


def record(
    journal: Journal,
    findings: Iterable[Finding],
    settings: Alerts,
    now: datetime,
    *,
    run_name: str,
    where: str | None = None,
    beside: Sequence[Finding] = (),
    partial: bool = False,
) -> Recorded:
    """Step every alert of ``run_name`` by what was found and save the transitions with their messages, atomically.

    ``findings`` is all that this tick found about the run: a subject that is not among them has not been looked at;
    unless ``partial``: then this caller looks after these subjects only, and others are somebody else's.
    ``beside`` are findings told in another journal that may explain some of these (slurm unreachable). ``where`` is
    the argument that names the run in the commands people are told to type; default: the run directory the journal
    lies in. Never raises for a full disk: see ``Recorded.unsaved``.
    """
    seen = tuple(findings)
    place = where if where is not None else place_of(journal)
    told: list[Notice] = []

    def make(state: State) -> State:
        told.clear()
        own = own_findings(state, settings, now, run_name, journal.problems, journal.unsaved)
        if _journal_fires(state, run_name):  # whether it is over is known when this has been written
            own = tuple(f for f in own if f.watchdog != JOURNAL or f.health is not Health.OK)
        state = reroute(state, settings, now, journal.home)
        names = (journal.home, place)
        return advance(state, (*seen, *own), settings, now, run_name, names, told, beside=beside, partial=partial)

    state = journal.change(make)
    problems = tuple(journal.problems)
    if journal.unsaved or _journal_fires(state, run_name):
        first = tuple(told)
        trouble = own_findings(state, settings, now, run_name, journal.problems, journal.unsaved)

        def say(state: State) -> State:
            told.clear()
            return advance(state, trouble, settings, now, run_name, (journal.home, place), told, partial=True)

        state = journal.change(say)
        told[:0] = first
    firing = [
        a for a in state.alerts.values() if a.state is AlertState.FIRING and a.finding.run == one_line(run_name, 100)
    ]
    firing.sort(key=lambda a: (-a.finding.severity, a.fired or now))
    return Recorded(tuple(told), tuple(firing), journal.unsaved, problems)


def _journal_fires(state: State, run_name: str) -> bool:
    alerts = (a for a in state.alerts.values() if a.finding.watchdog == JOURNAL and a.finding.run == run_name)
    return any(a.state is AlertState.FIRING for a in alerts)


def announce(
    journal: Journal,
    settings: Alerts,
    event: EventKind,
    *,
    run: str,
    summary: str,
    at: datetime,
    dedup: str,
    where: str | None = None,
    look: str = "",
    meaning: str = "",
    do: str = "",
    detail: str = "",
) -> bool:
    """Tell an event once: False if ``dedup`` has been announced before. ``at`` is now, as the caller's clock has it."""
    finding = clean(event_finding(run, event, summary, at, look=look, meaning=meaning, do=do, detail=detail))
    place = where if where is not None else place_of(journal)
    fresh = False

    def make(state: State) -> State:
        nonlocal fresh
        fresh = dedup not in state.announced
        if not fresh:
            return state
        recent = dict(list(state.announced.items())[-_ANNOUNCED_KEPT:])
        state = replace(state, announced={**recent, dedup: at})
        notice = Notice(key=f"event {dedup}", reason=Reason.ANNOUNCED, finding=finding, at=at, since=at, event=event)
        for name in routes.receivers(settings, finding, at):
            state = enqueue(state, name, run, [notice], settings, at, (journal.home, place))
        return state

    journal.change(make)
    return fresh


def place_of(journal: Journal) -> str:
    """The run directory a journal lies in (RUN/watch/journal); "" for a journal that belongs to no run."""
    root = Path(journal.home).parent.parent
    return str(root) if (root / "switches").is_dir() else ""
