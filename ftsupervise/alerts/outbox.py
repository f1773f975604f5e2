"""Messages that wait, what was sent, and how the receivers are: the other half of a journal's generation. Pure.

A transition and its messages are saved in the same atomic write, before anything is sent; so a crash at any
instruction loses neither. A message is claimed (who, until when) before it is sent; when the one who claimed it dies,
another may claim it after that time and send it again under the same id: at least once, never not at all.

While a receiver cannot be reached, what comes later joins the newest message nobody has tried to send yet, so one that
comes back after a night gets two messages a run, not two hundred.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from hashlib import sha256

from ftsupervise.model import Alert, Notice, Reason, Severity

LISTED = 20  # notices a message spells out; the rest is "+137 more"
LISTED_FOR_MACHINES = 500  # they keep count of what began and must hear of each that it ended
KEPT = 30  # sent messages remembered besides those that firing alerts point to
LEASE = timedelta(minutes=2)
BACKOFF_FIRST = timedelta(seconds=20)
BACKOFF_MOST = timedelta(minutes=15)
RETRY_AFTER_MOST = timedelta(hours=1)  # 10**9 seconds has been seen
GIVE_UP_AFTER = timedelta(days=2)  # only on a message that its receiver refuses for what it says
BROKEN_FOR = timedelta(days=1)  # a receiver that refused for good is tried again after a change, or after so long


@dataclass(frozen=True)
class Message:
    """What one receiver is told about one run at one moment."""

    id: str  # the dedup key; the same however often it is sent
    receiver: str
    run: str
    notices: tuple[Notice, ...]
    created: datetime
    due: datetime
    more: dict[str, int] = field(default_factory=dict)  # what is not spelled out: "disk fired" -> 137
    where: str = ""  # the argument that names this run in commands
    note: str = ""  # one sentence about the telling itself
    listed: int = LISTED
    tries: int = 0
    plain: bool = False  # the receiver choked on it once: send only short text
    claimed_by: str = ""
    claimed_until: datetime | None = None
    error: str = ""  # the last failure, without secrets
    sent: datetime | None = None
    receipt: dict[str, str] = field(default_factory=dict)  # what the receiver needs to edit or thread it later

    @property
    def worst(self) -> Severity:
        return max((n.finding.severity for n in self.notices), default=Severity.INFO)

    @property
    def posts(self) -> tuple[str, ...]:
        """Ids of the earlier messages this one follows up, oldest first."""
        return tuple(dict.fromkeys(n.post for n in self.notices if n.post and n.post != self.id))


@dataclass(frozen=True)
class ReceiverState:
    """How a receiver has been lately, as far as this journal knows."""

    failures: int = 0  # in a row
    failing_since: datetime | None = None
    not_before: datetime | None = None
    broken: str = ""  # why it will not take anything until somebody changes something
    broken_since: datetime | None = None
    print: str = ""  # of its settings when it broke
    error: str = ""
    refused: str = ""  # the last message went, but not to everybody: whom it refused
    last_sent: datetime | None = None


@dataclass(frozen=True)
class Silence:
    """A person's word that they know: matching alerts are not told until it ends."""

    id: str
    pattern: str  # an alert's id, or a watchdog, or "watchdog: subject", with * and ?
    author: str
    reason: str
    start: datetime
    end: datetime
    run: str = ""  # "" means every run of this journal


@dataclass(frozen=True)
class State:
    """One generation. Treat the dicts as frozen too: change by ``replace`` with a new one."""

    alerts: dict[str, Alert] = field(default_factory=dict)
    outbox: tuple[Message, ...] = ()
    posts: dict[str, Message] = field(default_factory=dict)  # sent; firing alerts point here
    receivers: dict[str, ReceiverState] = field(default_factory=dict)
    silences: tuple[Silence, ...] = ()
    announced: dict[str, datetime] = field(default_factory=dict)


def message_id(home: str, receiver: str, run: str, notices: tuple[Notice, ...]) -> str:
    """Stable: two watchers that see the same transitions make the same id."""
    parts = [home, receiver, run, *sorted(n.key for n in notices)]
    return sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:20]


def put(state: State, message: Message) -> State:
    """``message`` into the outbox, joined to the newest one for that receiver and run that nobody has tried yet."""
    said = {n.key for m in state.outbox if m.receiver == message.receiver for n in m.notices}
    message = replace(message, notices=tuple(n for n in message.notices if n.key not in said))
    if not message.notices:
        return state
    for index in range(len(state.outbox) - 1, -1, -1):
        waiting = state.outbox[index]
        if (waiting.receiver, waiting.run) == (message.receiver, message.run):
            if waiting.tries or waiting.claimed_by:
                break
            joined = _join(waiting, message)
            outbox = (*state.outbox[:index], joined, *state.outbox[index + 1 :])
            return _point_to(replace(state, outbox=outbox), joined.id, message)
    return _point_to(replace(state, outbox=(*state.outbox, _cut(message))), message.id, message)


def _join(waiting: Message, message: Message) -> Message:
    merged = replace(
        waiting,
        notices=(*waiting.notices, *message.notices),
        more=_sum(waiting.more, message.more),
        due=min(waiting.due, message.due),
        note=message.note or waiting.note,
    )
    return _cut(merged)


def _cut(message: Message) -> Message:
    """At most ``listed`` notices spelled out, the worst first, in the order they happened."""
    if len(message.notices) <= message.listed:
        return message
    ranked = sorted(range(len(message.notices)), key=lambda i: (-message.notices[i].finding.severity, i))
    keep = set(ranked[: message.listed])
    dropped: dict[str, int] = {}
    for index, notice in enumerate(message.notices):
        if index not in keep:
            word = f"{notice.finding.watchdog} {notice.reason.value}"
            dropped[word] = dropped.get(word, 0) + 1
    kept = tuple(n for i, n in enumerate(message.notices) if i in keep)
    return replace(message, notices=kept, more=_sum(message.more, dropped))


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}


def _point_to(state: State, post: str, message: Message) -> State:
    """Remember with each alert which message (``post``) first told of it to this receiver."""
    changed = {}
    for notice in message.notices:
        alert = state.alerts.get(notice.alert_id)
        first = notice.reason in (Reason.FIRED, Reason.ESCALATED, Reason.REPEATED)
        if alert is not None and first and message.receiver not in alert.posts:
            changed[alert.id] = replace(alert, posts={**alert.posts, message.receiver: post})
    return replace(state, alerts={**state.alerts, **changed}) if changed else state


def due(state: State, now: datetime) -> tuple[Message, ...]:
    """The next message for each receiver and run that may be tried now: oldest first, one at a time, in order."""
    heads: dict[tuple[str, str], Message] = {}
    for message in state.outbox:
        if message.plain and now < message.due:
            continue  # refused for what it says: it must not hold up the others
        heads.setdefault((message.receiver, message.run), message)
    out = []
    for message in heads.values():
        health = state.receivers.get(message.receiver, ReceiverState())
        held = message.claimed_until is not None and now < message.claimed_until
        if held or now < message.due or health.broken or (health.not_before and now < health.not_before):
            continue
        out.append(message)
    return tuple(out)


def claim(state: State, ids: frozenset[str], who: str, now: datetime, lease: timedelta = LEASE) -> State:
    """Mark messages as being sent by ``who``; nobody else touches them for ``lease``."""
    outbox = tuple(
        replace(m, tries=m.tries + 1, claimed_by=who, claimed_until=now + lease) if m.id in ids else m
        for m in state.outbox
    )
    return replace(state, outbox=outbox)


def mine(state: State, message: Message, who: str) -> bool:
    """Does ``who`` still hold this message? Another may have taken it after the lease."""
    return any(m.id == message.id and m.claimed_by == who for m in state.outbox)


def sent(state: State, message: Message, receipt: dict[str, str], now: datetime) -> State:
    """It arrived. Idempotent: a second report of the same message changes nothing but the receipt."""
    done = replace(message, sent=now, receipt=receipt, claimed_by="", claimed_until=None)
    health = ReceiverState(last_sent=now, refused=receipt.get("refused", ""))
    return replace(
        state,
        outbox=tuple(m for m in state.outbox if m.id != message.id),
        posts=_kept(state, {**state.posts, message.id: done}),
        receivers={**state.receivers, message.receiver: health},
    )


def _kept(state: State, posts: dict[str, Message]) -> dict[str, Message]:
    wanted = {post for alert in state.alerts.values() for post in alert.posts.values()}
    wanted |= {n.post for m in state.outbox for n in m.notices}
    others = [post for post in posts if post not in wanted]
    for post in others[: max(0, len(others) - KEPT)]:
        del posts[post]
    return posts


def put_back(state: State, message: Message, error: str, *, not_before: datetime, now: datetime) -> State:
    """It did not arrive, for a reason that may pass: the receiver rests until ``not_before``."""
    old = state.receivers.get(message.receiver, ReceiverState())
    health = replace(
        old,
        failures=old.failures + 1,
        failing_since=old.failing_since or now,
        not_before=max(not_before, old.not_before or not_before),
        error=error,
    )
    return replace(_freed(state, message, error), receivers={**state.receivers, message.receiver: health})


def put_back_plain(state: State, message: Message, error: str) -> State:
    """The receiver took offence at this very message: once more, as short plain text."""
    freed = _freed(state, message, error)
    return replace(freed, outbox=tuple(replace(m, plain=True) if m.id == message.id else m for m in freed.outbox))


def refuse(state: State, message: Message, error: str, *, due: datetime) -> State:
    """The receiver takes others, but not this one, not even as plain text: again at ``due``, out of the others' way."""
    freed = _freed(state, message, error)
    old = state.receivers.get(message.receiver, ReceiverState())
    health = ReceiverState(refused=f"it refuses a message: {error}", last_sent=old.last_sent)
    outbox = tuple(replace(m, due=due) if m.id == message.id else m for m in freed.outbox)
    return replace(freed, outbox=outbox, receivers={**state.receivers, message.receiver: health})


def broke(state: State, message: Message, error: str, fingerprint: str, now: datetime) -> State:
    """The receiver said no for good. Its messages wait for the day somebody mends it."""
    old = state.receivers.get(message.receiver, ReceiverState())
    health = replace(
        old,
        failures=old.failures + 1,
        failing_since=old.failing_since or now,
        broken=error,
        broken_since=now,
        print=fingerprint,
        error=error,
    )
    return replace(_freed(state, message, error), receivers={**state.receivers, message.receiver: health})


def mend(state: State, receiver: str) -> State:
    """Try a broken receiver again."""
    health = replace(state.receivers.get(receiver, ReceiverState()), broken="", broken_since=None, not_before=None)
    return replace(state, receivers={**state.receivers, receiver: health})


def drop(state: State, message: Message) -> State:
    return replace(state, outbox=tuple(m for m in state.outbox if m.id != message.id))


def _freed(state: State, message: Message, error: str) -> State:
    outbox = tuple(
        replace(m, claimed_by="", claimed_until=None, error=error) if m.id == message.id else m for m in state.outbox
    )
    return replace(state, outbox=outbox)


def backoff(failures: int, fraction: float) -> timedelta:
    """How long a receiver rests after ``failures`` in a row; ``fraction`` in 0–1 is the jitter (half to full)."""
    full: timedelta = min(BACKOFF_FIRST * 2 ** min(max(failures, 1) - 1, 20), BACKOFF_MOST)
    return full * (0.5 + 0.5 * fraction)
