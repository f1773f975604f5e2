"""Sends the messages that wait: each is claimed before it is sent, its outcome is written after, and all ends within
``budget``.

Each round claims the next message of every receiver in one commit and sends all of them at the same time, each in a
thread that is left behind when it does not end. Four messages or more to one receiver, about as many runs, go as one that
names them, and two already where a disk is full under both: an outage of a file system is one message and one connection, not
two hundred in a second. A receiver's imports
are made before there are threads. Outcomes are written as they come, for a message whose outcome a crash leaves unwritten is
sent twice. A receiver that failed rests until its back-off (or ``Retry-After``) is over, which may be many ticks away:
nothing sleeps here.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING

from ftsupervise.alerts import outbox
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.last_day import AboutRun
from ftsupervise.alerts.outbox import JournalState, Message
from ftsupervise.alerts.receivers import NOTHING, PATIENCE, Broken, Doubtful, Partly, Send, TryLater, Unsendable, sender
from ftsupervise.alerts.record import About, advance
from ftsupervise.alerts.self_monitor import hand_over, receiver_finding, reroute
from ftsupervise.alerts.wording import Parcel, as_ours
from ftsupervise.findings import AlertState, EventKind, Notice, Severity

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts, Receiver

TOGETHER = 0.01  # seconds: outcomes this close are written in one commit
ROUNDS = 50
_MOST = 20  # messages to one receiver about one journal in a tick: ours wait as one or two, another account may have laid more
_RECEIPT = 2000  # characters of a word of another side that the journal keeps


@dataclass(frozen=True)
class Delivered:
    """The outcome for the messages that were due."""

    sent: tuple[Message, ...] = ()
    failed: tuple[tuple[Message, str], ...] = ()
    waiting: int = 0  # left in the outbox, for whatever reason
    critical_waiting: int = (
        0  # … with a critical notice that has reached no receiver: no dead-man ping while there are any
    )


@dataclass
class _Attempt:
    journal: Journal
    settings: Alerts
    receiver: Receiver
    parcel: Parcel
    send: Send | None = None
    receipt: dict[str, str] | None = None
    error: Exception | None = field(default=None)
    parts: tuple[_Attempt, ...] = ()  # of a joint one: those in whose place it is sent

    @property
    def message(self) -> Message:
        return self.parcel.message

    @property
    def each(self) -> tuple[_Attempt, ...]:
        """Return the attempts that its outcome is that of."""
        for part in self.parts:
            part.error = self.error
            if self.receipt is not None:  # of no use to edit the post of one run: it is the post of many
                told = {name: self.receipt[name] for name in ("refused", NOTHING) if name in self.receipt}
                part.receipt = {"joint": self.message.id, **told}
        return self.parts or (self,)


def deliver(
    journals: Sequence[Journal],
    settings: Alerts | Sequence[Alerts],
    now: datetime,
    *,
    budget: timedelta = timedelta(seconds=45),
    about_runs: Mapping[str, AboutRun] = MappingProxyType({}),
    jitter: Callable[[], float] = random.random,
) -> Delivered:
    """Send the due messages of ``journals``; ``settings`` is for all of them, or one for each. Bounded by about
    ``budget``.

    ``about_runs``: other news of the run that a journal is about, by the journal's home. Never raises for a receiver: its
    error is in the answer and in the journal.
    """
    each = list(settings) if isinstance(settings, Sequence) else [settings] * len(journals)
    who = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(3).hex()}"
    start = time.monotonic()
    sent: list[Message] = []
    failed: list[tuple[Message, str]] = []
    tried: Counter[tuple[str, str]] = Counter()  # by the journal's home and the receiver
    for _ in range(ROUNDS):
        passed = timedelta(seconds=time.monotonic() - start)
        if passed >= budget:
            break
        attempts: list[_Attempt] = []
        for journal, own in zip(journals, each, strict=True):
            attempts += _claim(journal, own, who, now + passed, about_runs.get(journal.home, AboutRun()), tried)
        if not attempts:
            break
        for ended in _send_all(_joined(attempts), min(PATIENCE, budget - passed + timedelta(seconds=1))):
            at = now + timedelta(seconds=time.monotonic() - start)
            ended = [part for one in ended for part in one.each]
            for journal in {id(a.journal): a.journal for a in ended}.values():
                _write_down([a for a in ended if a.journal is journal], who, at, jitter)
        sent += [a.message for a in attempts if a.error is None]
        failed += [(a.message, str(a.error)) for a in attempts if a.error is not None]
    states = [journal.read() for journal in journals]
    critical = sum(1 for state in states for message in state.outbox if _nobody_knows(state, message))
    return Delivered(tuple(sent), tuple(failed), sum(len(state.outbox) for state in states), critical)


def _joined(attempts: Sequence[_Attempt]) -> list[_Attempt]:
    """Return the attempts, with one in the place of each four or more to one receiver about as many runs, or two where all tell
    of a disk."""
    groups: dict[object, dict[str, _Attempt]] = {}
    alone: list[_Attempt] = []
    for one in attempts:
        message = one.message
        key = (one.receiver.model_dump_json(), one.settings.templates, message.left, message.plain)
        runs = groups.setdefault(key, {})
        apart = one.parcel.owed or message.run in runs or _of_pager(one.receiver)
        if apart:
            alone.append(one)
        else:
            runs[message.run] = one
    for runs in groups.values():
        for parts in _batches(list(runs.values())):
            enough = 2 if all(_is_of_a_disk(one.message) for one in parts) else outbox.STORM
            alone += [_joint(parts)] if len(parts) >= enough else parts
    return alone


def _is_of_a_disk(message: Message) -> bool:
    return any(notice.finding.watchdog == "disk" for notice in message.notices)


def _of_pager(receiver: Receiver) -> bool:
    """Return whether it takes one event for each alert anyhow."""
    return receiver.kind == "webhook" and receiver.settings.shape == "pagerduty"


def _batches(attempts: list[_Attempt]) -> Iterator[list[_Attempt]]:
    """Yield them so that no joint message to a program, which must hear of each alert, is larger than one of a single run."""
    batch: list[_Attempt] = []
    size = 0
    for one in attempts:
        count = len(one.message.notices) if one.message.listed > outbox.LISTED else 0
        if batch and size + count > one.message.listed:
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += count
    if batch:
        yield batch


def _joint(parts: list[_Attempt]) -> _Attempt:
    first, message = parts[0], outbox.joint([one.message for one in parts])
    earlier = tuple(post for one in parts for post in one.parcel.earlier)
    ended = {ident: at for one in parts for ident, at in one.parcel.ended.items()}
    parcel = replace(first.parcel.alone, message=message, earlier=earlier, ended=ended)
    return _Attempt(first.journal, first.settings, first.receiver, parcel, parts=tuple(parts))


def _nobody_knows(state: JournalState, message: Message) -> bool:
    """Return whether a critical notice in it has reached no receiver at all."""
    notified = {notice.key for post in state.posts.values() for notice in post.notices}
    return any(n.finding.severity is Severity.CRITICAL and n.key not in notified for n in message.notices)


def _claim(
    journal: Journal, settings: Alerts, who: str, now: datetime, about_run: AboutRun, tried: Counter[tuple[str, str]]
) -> list[_Attempt]:
    named = settings.named
    out: list[_Attempt] = []

    def make(state: JournalState) -> JournalState:
        out.clear()
        state = _second_chance(state, settings, now)
        chosen, more = [], Counter(tried)
        for message in outbox.due(state, now):
            if message.receiver in named and more[journal.home, message.receiver] < _MOST:
                more[journal.home, message.receiver] += 1
                chosen.append(message)
        if not chosen:
            return state
        state = outbox.claim(state, frozenset(m.id for m in chosen), who, now)
        for message in state.outbox:
            if message.claimed_by == who and any(m.id == message.id for m in chosen):
                news = about_run if _helps(message) else about_run._replace(day=None)
                parcel = _parcel(state, message, settings, now, news)
                out.append(_Attempt(journal, settings, named[message.receiver], parcel))
        return state

    journal.change(make)
    tried.update((journal.home, one.message.receiver) for one in out)
    return out


def _second_chance(state: JournalState, settings: Alerts, now: datetime) -> JournalState:
    """Give a receiver that was given up another chance after a change of its settings, or after a while: a day, an hour
    when there is no other.
    """
    for name, receiver in settings.named.items():
        health = state.receivers.get(name)
        if health is None or health.works:
            continue
        others = [n for n in settings.named if n != name and state.receiver(n).works]
        rest = outbox.BROKEN_FOR if others else outbox.BROKEN_ALONE
        since = health.broken_since
        rested = bool(health.broken) and (since is None or since > now + outbox.SKEW or now - since >= rest)
        if rested or health.print != fingerprint(receiver):
            state = outbox.try_again(state, name)
    return state


def fingerprint(receiver: Receiver) -> str:
    """Return a text that changes when the settings change, or a file or variable they name.

    Made of names and times, not of secrets.
    """
    parts = [receiver.model_dump_json()]
    for name, value in receiver.settings:
        if name.endswith("_file") and value is not None:
            try:
                found = Path(value).stat()
                parts.append(f"{found.st_mtime_ns} {found.st_size} {found.st_ino} {found.st_mode}")
            except OSError as error:
                parts.append(str(error.errno))
        elif name.endswith("_env") and value is not None:
            parts.append("set" if os.environ.get(value, "").strip() else "not set")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _parcel(state: JournalState, message: Message, settings: Alerts, now: datetime, news: AboutRun) -> Parcel:
    message = as_ours(message)
    earlier = tuple(as_ours(state.posts[post]) for post in message.posts if post in state.posts)
    ended = {n.alert_id: _ended(state, n, now) for post in earlier for n in post.notices if _is_over(state, n, post)}
    owed, own = outbox.owed(state, message), settings.templates
    return Parcel(message, now, earlier=earlier, ended=ended, templates=own, owed=owed, **news._asdict())


def _helps(message: Message) -> bool:
    """Return whether the last day of the run helps a reader of it; not where the run has only just begun."""
    return any(notice.event is not EventKind.STARTED for notice in message.notices)


def _ended(state: JournalState, notice: Notice, now: datetime) -> datetime:
    alert = state.alerts.get(notice.alert_id)
    return alert.ended if alert is not None and alert.ended is not None else now


def _is_over(state: JournalState, notice: Notice, post: Message) -> bool:
    alert = state.alerts.get(notice.alert_id)
    return alert is None or alert.state is not AlertState.FIRING or alert.posts.get(post.receiver) != post.id


def _send_all(attempts: list[_Attempt], patience: timedelta) -> Iterator[list[_Attempt]]:
    """Yield the attempts as they end, those that end together at once; at the latest after ``patience``."""
    done: SimpleQueue[_Attempt] = SimpleQueue()
    for attempt in attempts:
        try:
            attempt.send = sender(attempt.receiver.kind)
        except Broken as error:
            attempt.error = error
        except Exception as error:  # any failure of an import: it must not cost the others their messages
            attempt.error = TryLater(
                f"the receiver {attempt.receiver.kind} cannot be loaded: {type(error).__name__}: {error}"
            )
    for attempt in attempts:
        Thread(target=_send, args=(attempt, done), daemon=True).start()
    end, left = time.monotonic() + patience.total_seconds(), {id(attempt): attempt for attempt in attempts}
    while left:
        batch: list[_Attempt] = []
        try:
            batch.append(done.get(timeout=max(0.0, end - time.monotonic())))
            while len(batch) < len(left):
                batch.append(done.get(timeout=TOGETHER))
        except Empty:
            pass
        if not batch:
            break
        for attempt in batch:
            del left[id(attempt)]
        yield batch
    for attempt in left.values():
        if attempt.receipt is None and attempt.error is None:
            attempt.error = TryLater(f"no answer within {patience.total_seconds():.0f}s")
    if left:
        yield list(left.values())


def _send(attempt: _Attempt, done: SimpleQueue[_Attempt]) -> None:
    try:
        receipt = attempt.send(attempt.parcel, attempt.receiver.settings) if attempt.send is not None else None
    except (TryLater, Broken, Unsendable) as error:
        attempt.error = attempt.error or error
    except Exception as error:  # law 7 in spirit: one receiver's bug must not cost the others their messages
        attempt.error = attempt.error or TryLater(f"{type(error).__name__} in the receiver {attempt.receiver.kind}")
    else:
        if attempt.error is None:
            attempt.receipt = {name[:_RECEIPT]: text[:_RECEIPT] for name, text in (receipt or {}).items()}
    done.put(attempt)


def _write_down(attempts: list[_Attempt], who: str, now: datetime, jitter: Callable[[], float]) -> None:
    journal = attempts[0].journal
    jitters = [jitter() for _ in attempts]

    def make(state: JournalState) -> JournalState:
        for attempt, fraction in zip(attempts, jitters, strict=True):
            state = _outcome(state, attempt, who, now, fraction)
        return state

    journal.change(make)


def _outcome(state: JournalState, attempt: _Attempt, who: str, now: datetime, fraction: float) -> JournalState:
    message, error, home = attempt.message, attempt.error, attempt.journal.home
    if error is None:
        receipt = attempt.receipt or {}
        if NOTHING in receipt:  # nothing was sent: that says nothing about the receiver
            return outbox.drop(state, message)
        state = outbox.sent(state, message, receipt, now)
        return _say(state, attempt, now) if "refused" in receipt else state
    if not outbox.mine(state, message, who):
        return state  # the lease ran out and another process took it over: its outcome counts
    if isinstance(error, Broken):
        state = outbox.broke(state, message, str(error), fingerprint(attempt.receiver), now)
        return _say(reroute(state, attempt.settings, now, home), attempt, now)
    if isinstance(error, Unsendable):
        return _refused(state, attempt, str(error), now, fraction)
    if isinstance(error, Partly):
        return _to_some(state, attempt, error, now, fraction)
    failures = state.receiver(message.receiver).failures + 1
    asked = error.after if isinstance(error, TryLater) else None
    wait = max(outbox.backoff(failures, fraction), asked or timedelta(0))
    odd = isinstance(error, Doubtful)
    mark = fingerprint(attempt.receiver) if odd else ""
    state = outbox.put_back(state, message, str(error), not_before=now + wait, now=now, odd=odd, fingerprint=mark)
    return _say(reroute(state, attempt.settings, now, home), attempt, now) if odd else state


def _to_some(state: JournalState, attempt: _Attempt, error: Partly, now: datetime, fraction: float) -> JournalState:
    """Record that some recipients have it. The others are tried again for as long as mail servers try."""
    message = attempt.message
    if now - message.created > outbox.PUT_OFF_FOR:
        gave_up = "; ".join(one for one in (error.refused or message.refused, f"gave up after 5 days: {error}") if one)
        return _say(outbox.sent(state, replace(message, refused=gave_up), {}, now), attempt, now)
    due = now if error.waits else now + outbox.backoff(message.tries, fraction)
    state = outbox.sent_to_some(state, message, error.left, error.refused, str(error), due=due, now=now)
    return _say(state, attempt, now) if error.refused else state


def _refused(state: JournalState, attempt: _Attempt, error: str, now: datetime, fraction: float) -> JournalState:
    message, home = attempt.message, attempt.journal.home
    if not message.plain:
        return outbox.put_back_plain(state, message, error)
    others = [n for n in attempt.settings.named if n != message.receiver and state.receiver(n).works]
    state, _ = hand_over(state, message, others, now, home)
    if now - message.created > outbox.GIVE_UP_AFTER:
        return _say(outbox.gave_up(state, message, error), attempt, now)
    state = outbox.refuse(state, message, error, due=now + outbox.backoff(message.tries, fraction))
    return _say(state, attempt, now)


def _say(state: JournalState, attempt: _Attempt, now: datetime) -> JournalState:
    """Return the state with a report to the other receivers, now and not at the next tick."""
    message = attempt.message
    finding = receiver_finding(state, message.receiver, now, message.run)
    about = About(attempt.settings, now, message.run, attempt.journal.home, message.where)
    return advance(state, (finding,), about, [], partial=True)
