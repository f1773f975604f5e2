"""``ftsupervise alerts``: what fires, since when, and who was notified; acknowledge and silence.

Reads and changes the run's journal and this account's own (for what belongs to no single run). Light: no pydantic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli.command_group import DefaultGroup
from ftsupervise.cli.names import RUN, Named
from ftsupervise.cli.output import JSON, answer, end_of, plain, say, say_json
from ftsupervise.errors import Error, NotFound, UsageError, did_you_mean
from ftsupervise.host.ownership import shown_user
from ftsupervise.printable import printable
from ftsupervise.report.alert_list import alerts_in, journals_of

if TYPE_CHECKING:
    from ftsupervise.alerts.journal import Journal
    from ftsupervise.alerts.outbox import JournalState
    from ftsupervise.findings import Alert


@click.group(cls=DefaultGroup)
def alerts() -> None:
    """Show what fires, since when, and who was notified.

    \b
    ftsupervise alerts                     what fires in the run of this directory
    ftsupervise alerts ack 3f9a1c20        seen: no repeats, no escalation
    ftsupervise alerts silence disk        no message for 4h (--for 4h)

    RUN, where it is named, is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.
    """


def _firing(_ctx: click.Context) -> Iterator[str]:
    from ftsupervise.findings import AlertState

    for journal in journals_of(()):
        yield from (one.id for one in journal.read().alerts.values() if one.state is AlertState.FIRING)


def _to_silence(ctx: click.Context) -> Iterator[str]:
    from ftsupervise.watch.watchdogs import installed

    yield from installed()
    with suppress(Error):  # no run here
        yield from _firing(ctx)


def _silences(_ctx: click.Context) -> Iterator[str]:
    now = datetime.now(timezone.utc)
    for journal in journals_of(()):
        yield from (one.id for one in journal.read().silences if one.end > now)


_FIRING, _TO_SILENCE, _SILENCES = Named(_firing), Named(_to_silence), Named(_silences)
_RUNS = click.argument("runs", nargs=-1, metavar="[RUN]...", type=RUN)


@alerts.command("list")
@_RUNS
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def list_alerts(runs: tuple[str, ...], as_json: bool) -> None:
    """Show what fires, since when, and who was notified (the default)."""
    now = datetime.now(timezone.utc)
    journals = journals_of(runs)
    if as_json:
        say_json(_as_json(journals))
        return
    for journal in journals:
        for line in _lines(journal, now):
            say(printable(line))


@alerts.command()
@click.argument("key", type=_FIRING)
@_RUNS
@click.option("--reason", default="", help="What you know about it, or do about it.")
@JSON
def ack(key: str, runs: tuple[str, ...], reason: str, as_json: bool) -> None:
    """Acknowledge what fires: no repeats and no escalation until it is over (or gets worse).

    KEY is the id in the message or its beginning, a watchdog ("disk"), or "watchdog: subject".
    """
    from ftsupervise.alerts.step import matches
    from ftsupervise.alerts.wording import one_line
    from ftsupervise.findings import AlertState

    now, who = datetime.now(timezone.utc), shown_user()
    acked: list[Alert] = []
    journals = journals_of(runs)
    firing = [a for journal in journals for a in journal.read().alerts.values() if a.state is AlertState.FIRING]
    key = _whole_id(key, [a.id for a in firing])

    def make(state: JournalState) -> JournalState:
        acked[:] = [
            replace(a, acked_by=who, acked_at=now, ack_note=one_line(reason))
            for a in state.alerts.values()
            if a.state is AlertState.FIRING and matches(key, a.id, a.finding)
        ]
        return replace(state, alerts={**state.alerts, **{a.id: a for a in acked}}) if acked else state

    done = [alert for journal in journals for alert in _change(journal, make, acked)]
    if not done:
        raise NotFound(f"no firing alert is called {key!r}", hint=f"{_typed('alerts', runs)} lists them")
    if as_json:
        answer(acknowledged=done)
        return
    for alert in done:
        say(f"acknowledged by {who}: {alert.id}  {alert.finding.watchdog} {alert.finding.subject}")


@alerts.command()
@click.argument("pattern", type=_TO_SILENCE)
@_RUNS
@click.option("--for", "duration", default="4h", show_default=True, help='How long: "30m", "4h", "2d".')
@click.option("--reason", default="", help="The reason, for the others.")
@JSON
def silence(pattern: str, runs: tuple[str, ...], duration: str, reason: str, as_json: bool) -> None:
    """Send no message about alerts that match PATTERN for a while; they still show in `ftsupervise alerts`.

    PATTERN is the id in the message or its beginning, a watchdog ("disk"), or "watchdog: subject"; * and ? as in the
    shell. An alert that still fires when the silence ends is sent then; people who were notified before are
    notified of its end too.
    """
    import os

    from ftsupervise.alerts.outbox import Silence
    from ftsupervise.alerts.wording import one_line, stamp

    now, who = datetime.now(timezone.utc), shown_user()
    end = end_of(duration, now, 'such as "30m", "4h" or "2d"')
    journals = journals_of(runs)
    pattern = _known(pattern, [a for journal in journals for a in journal.read().alerts.values()])
    new = Silence(os.urandom(3).hex(), one_line(pattern, 200), who, one_line(reason), now, end)
    for journal in journals:
        journal.change(lambda state: replace(state, silences=(*(s for s in state.silences if s.end > now), new)))
        _must_be_saved(journal)
    if as_json:
        answer(silence=new)
        return
    say(f"silenced until {stamp(end)}: {pattern}\n  to end it sooner: {_typed(f'alerts unsilence {new.id}', runs)}")


@alerts.command()
@click.argument("silence_id", metavar="ID", type=_SILENCES)
@_RUNS
@JSON
def unsilence(silence_id: str, runs: tuple[str, ...], as_json: bool) -> None:
    """End a silence. People are notified of what fires at the next tick.

    ID is the silence's own, its beginning, or the pattern that was silenced.
    """
    ended: list[Any] = []
    journals, now = journals_of(runs), datetime.now(timezone.utc)
    live = [s for journal in journals for s in journal.read().silences if s.end > now]
    if not any(s.pattern == silence_id for s in live):
        silence_id = _whole_id(silence_id, [s.id for s in live])

    def make(state: JournalState) -> JournalState:
        ended[:] = [s for s in state.silences if s.id == silence_id or s.pattern == silence_id]
        left = tuple(s for s in state.silences if s not in ended)
        return replace(state, silences=left) if ended else state

    done = [silence for journal in journals for silence in _change(journal, make, ended)]
    if not done:
        raise NotFound(f"no silence is called {silence_id!r}", hint=f"{_typed('alerts', runs)} lists them")
    if as_json:
        answer(ended=done)
        return
    say(f"no longer silenced: {done[0].pattern}")


# ------------------------------------------------------------------------------------------------------------ parts


def _whole_id(text: str, ids: list[str]) -> str:
    """Return the one id that begins with ``text``; ``text`` itself where none does. Raises UsageError where several do."""
    found = sorted({one for one in ids if len(text) > 1 and one.startswith(text.lower())})
    if len(found) > 1 and text.lower() not in found:
        raise UsageError(
            f"{text!r} is the beginning of several: {', '.join(found[:8])}", hint="give one more character"
        )
    return found[0] if len(found) == 1 else text


def _known(pattern: str, alerts: list[Alert]) -> str:
    """The pattern of a silence: an id, or a pattern that fits a watchdog's name. Raises UsageError for another."""
    from ftsupervise.alerts.step import matches, plain_name
    from ftsupervise.findings import BESIDES
    from ftsupervise.watch.watchdogs import installed

    names = dict.fromkeys((*installed(), *BESIDES, *(plain_name(a.finding.watchdog) for a in alerts)))
    wanted = plain_name(pattern.partition(":")[0].strip())
    if any(fnmatchcase(name, wanted) for name in names):
        return pattern
    whole = _whole_id(pattern, [a.id for a in alerts])
    if whole != pattern or any(matches(pattern, a.id, a.finding) for a in alerts):
        return whole
    raise UsageError(
        f"no watchdog and no alert is called {pattern!r}{did_you_mean(wanted, names)}",
        hint=f"there are: {', '.join(names)}",
    )


def _typed(verb: str, runs: tuple[str, ...]) -> str:
    """Return a command about the same runs, to be typed anywhere."""
    import shlex

    from ftsupervise.config.find_run import find_run
    from ftsupervise.errors import Error

    try:
        places = [str(find_run(run).root) for run in runs or (None,)]
    except Error:  # a cron folder, or nothing at all
        places = list(runs)
    return " ".join(["ftsupervise", verb, *map(shlex.quote, places)])


def _change(journal: Journal, make: Callable[[JournalState], JournalState], changed: list[Any]) -> list[Any]:
    journal.change(make)
    _must_be_saved(journal)
    return list(changed)


def _must_be_saved(journal: Journal) -> None:
    from ftsupervise.errors import CannotWrite

    if journal.unsaved:
        raise CannotWrite(f"not saved: {journal.unsaved}", hint="free some space (df -h, df -i), then try again")


def _as_json(journals: list[Journal]) -> dict[str, Any]:
    return {"schema_version": 2, **plain(alerts_in(journals))}


def _lines(journal: Journal, now: datetime) -> list[str]:
    from ftsupervise.alerts.self_monitor import standing
    from ftsupervise.alerts.wording import stamp
    from ftsupervise.findings import AlertState

    state = journal.read()
    shown = [a for a in state.alerts.values() if a.state in (AlertState.FIRING, AlertState.PENDING)]
    shown.sort(key=lambda a: (not a.is_bad, a.state is not AlertState.FIRING, -a.finding.severity, a.since or now))
    out = [line for alert in shown for line in _alert_lines(state, alert, now)]
    if not out:
        out.append(
            f"nothing fires in {journal.directory}"
            if state.alerts or state.posts
            else f"no alerts so far in {journal.directory}"
        )
    for name in dict.fromkeys((*state.receivers, *(m.receiver for m in state.outbox))):
        words = standing(state, name, now)
        if words:
            out.append(f"receiver {name}: {words}")
        if name in state.receivers and not state.receivers[name].works:
            out.append(f"    once it works again, type: ftsupervise notify test --receiver {name}")
    for silence in state.silences:
        if silence.end > now:
            why = f": {silence.reason}" if silence.reason else ""
            out.append(f"silence {silence.id}: {silence.pattern} until {stamp(silence.end)} by {silence.author}{why}")
    return out + [f"journal: {problem}" for problem in journal.problems]


def _alert_lines(state: JournalState, alert: Alert, now: datetime) -> list[str]:
    from ftsupervise.alerts.outbox import told
    from ftsupervise.alerts.wording import stamp
    from ftsupervise.units import count, show_duration

    found = alert.finding
    run = f"{found.run}: " if found.run else ""
    since = f"since {stamp(alert.since)}, {show_duration((now - alert.since).total_seconds())}" if alert.since else ""
    if alert.since and alert.good_since:
        times = f"came {count(alert.times, 'time')} since {stamp(alert.since)}"
        since = f"good since {stamp(alert.good_since)}; {times}"
    heard = told(state, alert)
    each = "; ".join(f"{name}: {words}" for name, _, words in heard)
    if alert.notified and any(accepted for _, accepted, _ in heard):
        notified = f"notified {stamp(alert.notified)} ({each})"
    else:
        notified = f"nobody notified yet{f' ({each})' if each else ''}"
    more = [notified]
    if alert.muted:
        more.append(alert.muted)
    if alert.acked_by:
        more.append(f"acknowledged by {alert.acked_by}{': ' + alert.ack_note if alert.ack_note else ''}")
    if alert.flapping:
        more.append("flapping")
    if alert.blind_since:
        more.append(f"not seen since {stamp(alert.blind_since)}")
    return [
        f"{alert.word:8} {found.severity.word:8} {alert.id}  {run}{found.watchdog} {found.subject}".rstrip(),
        f"    {alert.summary}",
        f"    {since}; {'; '.join(more)}",
    ]
