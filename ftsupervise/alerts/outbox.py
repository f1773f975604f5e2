"""Messages that wait, messages that were sent, and the state of the receivers: the other half of a journal's
generation. Pure.

A transition and its messages are saved in the same atomic write, before anything is sent; so a crash at any instruction
loses neither. A message is claimed (by a process, until a time) before it is sent; when that process dies, another may
claim it after that time and send it again under the same id: at least once, never not at all. While a receiver cannot
be reached, later notices join the newest message that has not been tried yet, so one that comes back after a night gets
two messages a run, not two hundred.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, NamedTuple

from ftsupervise.findings import Alert, Notice, Reason, Severity

ORDER = (Reason.ESCALATED, Reason.FIRED, Reason.REPEATED, Reason.RESOLVED, Reason.UNWATCHED, Reason.ANNOUNCED)
LISTED = 20  # notices a message spells out; the rest is "+137 more"
LISTED_FOR_MACHINES = 500  # they join triggers and resolves, and must be told of each end
STORM = 4  # messages about as many runs, to one receiver at once, go as one
_NAMED = 2400  # characters of the runs' names in it
KEPT = 30  # sent messages remembered besides those that firing alerts point to
LEASE = timedelta(minutes=2)
BACKOFF_FIRST = timedelta(seconds=20)
BACKOFF_MOST = timedelta(minutes=15)
RETRY_AFTER_MOST = timedelta(hours=1)  # 10**9 seconds has been seen
QUIET_MOST = timedelta(days=2)  # more than the longest quiet hours
GIVE_UP_AFTER = timedelta(days=2)  # only on a message that its receiver refuses for its contents
PUT_OFF_FOR = timedelta(days=5)  # one of several recipients, by 4xx: RFC 5321 4.5.4.1 asks senders for 4 to 5 days
BROKEN_FOR = timedelta(days=1)  # a receiver that refused for good is tried again after a change, or after this long
BROKEN_ALONE = timedelta(hours=1)  # … if no other receiver could notify people meanwhile
SKEW = timedelta(minutes=5)  # a later time was written by a clock that was ahead


class Unlisted(NamedTuple):
    """So many notices of one watchdog for one reason that a message does not spell out."""

    watchdog: str
    reason: Reason
    number: int


@dataclass(frozen=True)
class Message:
    """All that one receiver gets about one run at one moment."""

    id: str  # the dedup key; the same however often it is sent
    receiver: str
    run: str
    notices: tuple[Notice, ...]
    created: datetime
    due: datetime
    unlisted: tuple[Unlisted, ...] = ()  # notices that are not spelled out
    where: str = ""  # the argument that names this run in commands
    source: str = ""  # tells the alerts of this journal from those of another run of the same name
    note: str = ""  # one sentence about the delivery itself
    listed: int = LISTED
    tries: int = 0
    plain: bool = False  # the receiver choked on it once: send only short text
    left: tuple[str, ...] = ()  # recipients that must still get it, when others have it; () is everybody
    refused: str = ""  # recipients that will never take it, and why
    claimed_by: str = ""
    claimed_until: datetime | None = None
    error: str = ""  # the last failure, without secrets
    sent: datetime | None = None
    receipt: dict[str, str] = field(default_factory=dict)  # the receiver needs it to edit or thread the post later
    origins: tuple[tuple[str, str], ...] = ()  # of a joint one: ``where`` and ``source`` of each notice

    @property
    def worst(self) -> Severity:
        return max((n.finding.severity for n in self.notices), default=Severity.INFO)

    @property
    def written(self) -> datetime:
        """Return when the newest of it was: a mail with the time of what has waited would lie far down in a mailbox."""
        return max([self.created, *(one.at for one in self.notices)])

    @property
    def posts(self) -> tuple[str, ...]:
        """Ids of the earlier messages this one follows up, oldest first."""
        return tuple(dict.fromkeys(n.post for n in self.notices if n.post and n.post != self.id))


@dataclass(frozen=True)
class ReceiverState:
    """The recent state of a receiver, as far as this journal knows."""

    failures: int = 0  # in a row
    failing_since: datetime | None = None
    not_before: datetime | None = None
    broken: str = ""  # why it takes nothing until its settings are changed
    broken_since: datetime | None = None
    print: str = ""  # of its settings when it broke
    odd: str = ""  # it refused, perhaps by accident: it is tried again, and others are notified meanwhile
    error: str = ""
    refused: str = ""  # the last message was sent, but some recipients refused it: these
    last_sent: datetime | None = None

    @property
    def works(self) -> bool:
        """Return whether it takes messages, as far as its last answer shows."""
        return not self.broken and not self.odd


@dataclass(frozen=True)
class Silence:
    """A person knows of it: no messages about matching alerts are sent until it ends."""

    id: str
    pattern: str  # an alert's id, or a watchdog, or "watchdog: subject", with * and ?
    author: str
    reason: str
    start: datetime
    end: datetime
    run: str = ""  # "" means every run of this journal


@dataclass(frozen=True)
class JournalState:
    """One generation of the journal. Treat the dicts as frozen too: change by ``replace`` with a new one."""

    alerts: dict[str, Alert] = field(default_factory=dict)
    outbox: tuple[Message, ...] = ()
    posts: dict[str, Message] = field(default_factory=dict)  # sent; firing alerts point here
    receivers: dict[str, ReceiverState] = field(default_factory=dict)
    silences: tuple[Silence, ...] = ()
    announced: dict[str, datetime] = field(default_factory=dict)  # the newest events, by their dedup keys
    together: datetime | None = None  # when quick restarts were told last, or are told together next
    announced_through: int = 0  # events of attempts up to this number were announced, whatever is left of their keys

    def receiver(self, name: str) -> ReceiverState:
        return self.receivers.get(name) or ReceiverState()

    @property
    def idle(self) -> bool:
        """Return whether nothing waits to be sent, and no receiver for another chance."""
        return not self.outbox and all(receiver.works for receiver in self.receivers.values())


def message_id(home: str, receiver: str, run: str, notices: tuple[Notice, ...]) -> str:
    """Return a stable id: two watchers that see the same transitions make the same one."""
    parts = [home, receiver, run, *sorted(n.key for n in notices)]
    return sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:20]


def source_of(home: str) -> str:
    """Return a short word for the journal at ``home``: the runs of two people may have one name."""
    return sha256(home.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def in_order(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """Return them as a message has them: what wants somebody first, then what is over, then news; the worst of each first. The
    first gives the subject."""
    return tuple(sorted(notices, key=lambda one: (ORDER.index(one.reason), -one.finding.severity)))


def put(state: JournalState, message: Message) -> JournalState:
    """Put ``message`` into the outbox, joined to the newest one for that receiver and run that was not tried yet."""
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
    return _point_to(replace(state, outbox=(*state.outbox, cut(message))), message.id, message)


def _join(waiting: Message, message: Message) -> Message:
    merged = replace(
        waiting,
        notices=in_order((*waiting.notices, *message.notices)),
        unlisted=_summed(*waiting.unlisted, *message.unlisted),
        due=min(waiting.due, message.due),
        note=message.note or waiting.note,
    )
    return cut(merged)


def cut(message: Message) -> Message:
    """Return at most ``listed`` notices spelled out, the worst of them, in their order."""
    if len(message.notices) <= message.listed:
        return message
    ranked = sorted(range(len(message.notices)), key=lambda i: (-message.notices[i].finding.severity, i))
    keep = set(ranked[: message.listed])
    kept = tuple(n for i, n in enumerate(message.notices) if i in keep)
    dropped = (_unlisted(n) for i, n in enumerate(message.notices) if i not in keep)
    return replace(message, notices=kept, unlisted=_summed(*message.unlisted, *dropped))


def joint(messages: Sequence[Message]) -> Message:
    """Return one message in the place of several to one receiver, about as many runs: it names them all, and spells out the
    worst. It stands in no journal. Sent again for the same messages it has the same id.
    """
    first = max(messages, key=lambda one: (one.worst, one.listed))
    pairs = [(notice, (one.where, one.source)) for one in messages for notice in one.notices]
    pairs.sort(key=lambda pair: (ORDER.index(pair[0].reason), -pair[0].finding.severity))
    kept = pairs[: first.listed] if first.listed == LISTED else pairs
    dropped = (_unlisted(notice) for notice, _ in pairs[len(kept) :])
    notes = [one.note for one in messages if one.note]
    return replace(
        first,
        id=sha256("\0".join(["joint", *sorted(one.id for one in messages)]).encode()).hexdigest()[:20],
        run=f"{len(messages)} runs",
        notices=tuple(notice for notice, _ in kept),
        created=max(one.created for one in messages),
        due=max(one.due for one in messages),
        unlisted=_summed(*dropped, *(each for one in messages for each in one.unlisted)),
        where="",
        note=" ".join(dict.fromkeys([_named(sorted(one.run or "no single run" for one in messages)), *notes])),
        origins=tuple(origin for _, origin in kept),
    )


def _named(runs: Sequence[str]) -> str:
    words, room = [], _NAMED
    for name in runs:
        room -= len(name) + 2
        if room < 0:
            break
        words.append(name)
    rest = len(runs) - len(words)
    return f"Runs: {', '.join(words)}{f' and {rest} more' if rest else ''}"


def told(state: JournalState, alert: Alert) -> tuple[tuple[str, bool, str], ...]:
    """Return for each receiver that is to know of ``alert`` its name, whether it has accepted a message about it, and the words
    for that: "delivered", "not delivered, tried 3 times"."""
    out = []
    for name in alert.notified_to:
        post = state.posts.get(alert.posts.get(name, ""))
        waits = next((m for m in state.outbox if m.receiver == name and _is_about(m, alert)), None)
        if post is not None:
            words = f"delivered, but not to {post.refused}" if post.refused else "delivered"
        elif waits is not None and waits.tries:
            words = f"not delivered, tried {'once' if waits.tries == 1 else f'{waits.tries} times'}"
        else:
            words = "not delivered, waits" if waits is not None else "not delivered"
        out.append((name, post is not None, words))
    return tuple(out)


def _is_about(message: Message, alert: Alert) -> bool:
    return any(notice.alert_id == alert.id for notice in message.notices)


def _unlisted(notice: Notice) -> Unlisted:
    return Unlisted(notice.finding.watchdog, notice.reason, 1)


def _summed(*ones: Unlisted) -> tuple[Unlisted, ...]:
    counts: dict[tuple[str, Reason], int] = {}
    for watchdog, reason, count in ones:
        counts[watchdog, reason] = counts.get((watchdog, reason), 0) + count
    return tuple(Unlisted(*what, counts[what]) for what in sorted(counts, key=lambda what: (what[0], what[1].value)))


def _point_to(state: JournalState, post: str, message: Message) -> JournalState:
    """Remember with each alert which message (``post``) was the first of it to this receiver."""
    changed = {}
    for notice in message.notices:
        alert = state.alerts.get(notice.alert_id)
        first = notice.reason in (Reason.FIRED, Reason.ESCALATED, Reason.REPEATED)
        if alert is not None and first and message.receiver not in alert.posts:
            changed[alert.id] = replace(alert, posts={**alert.posts, message.receiver: post})
    return replace(state, alerts={**state.alerts, **changed}) if changed else state


def due(state: JournalState, now: datetime) -> tuple[Message, ...]:
    """Return the next message for each receiver and run that may be tried now: oldest first, one at a time, in order.

    A recipient to whom an earlier message is owed waits for that one; the others are not held up by it. A message that
    a fast clock has deferred into its own future is due.
    """
    heads: dict[tuple[str, str], Message] = {}
    owed: dict[tuple[str, str], set[str]] = {}
    for message in state.outbox:
        to = (message.receiver, message.run)
        waiting = owed.setdefault(to, set())
        behind = bool(message.left) and waiting.issuperset(message.left)
        waiting.update(message.left)
        if behind or ((message.plain or message.left) and now < _when(message, now)):
            continue  # deferred for its contents, or by some of its recipients: it must not hold up the others
        heads.setdefault(to, message)
    out = []
    for message in heads.values():
        health = state.receiver(message.receiver)
        held = message.claimed_until is not None and now < message.claimed_until <= now + LEASE + SKEW
        rests = health.not_before is not None and now < health.not_before <= now + RETRY_AFTER_MOST + SKEW
        if not (held or now < _when(message, now) or health.broken or rests):
            out.append(message)
    return tuple(out)


def _when(message: Message, now: datetime) -> datetime:
    """Return when it is due. No pause between two tries is longer than ``BACKOFF_MOST``; only quiet hours are. What would be
    due later than any of ours was written by another account: it would keep the dead-man from its pings as long."""
    ahead = message.created > now + SKEW or message.due > now + QUIET_MOST
    tried = message.plain or message.left
    return now if ahead or (tried and message.due > now + BACKOFF_MOST + SKEW) else message.due


def owed(state: JournalState, message: Message) -> frozenset[str]:
    """Return the recipients of ``message`` to whom an earlier one about the same run is still to be delivered."""
    earlier: set[str] = set()
    for one in state.outbox:
        if one.id == message.id:
            break
        if (one.receiver, one.run) == (message.receiver, message.run):
            earlier.update(one.left)
    return frozenset(earlier)


def claim(state: JournalState, ids: frozenset[str], who: str, now: datetime, lease: timedelta = LEASE) -> JournalState:
    """Mark messages as being sent by the process ``who``; no other touches them for ``lease``."""
    until = now + lease
    outbox = (
        replace(m, tries=m.tries + 1, claimed_by=who, claimed_until=until) if m.id in ids else m for m in state.outbox
    )
    return replace(state, outbox=tuple(outbox))


def mine(state: JournalState, message: Message, who: str) -> bool:
    """Return whether ``who`` still holds this message. Another may have taken it after the lease."""
    return any(m.id == message.id and m.claimed_by == who for m in state.outbox)


def sent(state: JournalState, message: Message, receipt: dict[str, str], now: datetime) -> JournalState:
    """Record that it arrived. Idempotent: a second report of the same message changes nothing but the receipt."""
    done = replace(message, sent=now, receipt=receipt, left=(), claimed_by="", claimed_until=None)
    health = ReceiverState(last_sent=now, refused=receipt.get("refused", "") or message.refused)
    posts = _kept(state, {**state.posts, message.id: done})
    return _with_receiver(replace(drop(state, message), posts=posts), message.receiver, health)


def sent_to_some(
    state: JournalState,
    message: Message,
    left: tuple[str, ...],
    refused: str,
    error: str,
    *,
    due: datetime,
    now: datetime,
) -> JournalState:
    """Record that it arrived, but not at ``left``: they get it later, the others do not get it again."""
    again = replace(message, left=left, refused=refused or message.refused, due=due)
    again = replace(again, error=error, claimed_by="", claimed_until=None)
    state = sent(state, replace(message, refused=again.refused), {}, now)
    return replace(state, outbox=_in_order(state.outbox, again))


def _in_order(outbox: tuple[Message, ...], message: Message) -> tuple[Message, ...]:
    """Return ``message`` back in its place: before all that were made later for the same receiver and run."""
    for index, one in enumerate(outbox):
        same = (one.receiver, one.run) == (message.receiver, message.run)
        if same and one.created >= message.created:
            return (*outbox[:index], message, *outbox[index:])
    return (*outbox, message)


def _kept(state: JournalState, posts: dict[str, Message]) -> dict[str, Message]:
    wanted = {post for alert in state.alerts.values() for post in alert.posts.values()}
    wanted |= {n.post for m in state.outbox for n in m.notices}
    others = [post for post in posts if post not in wanted]
    for post in others[: max(0, len(others) - KEPT)]:
        del posts[post]
    return posts


def put_back(
    state: JournalState,
    message: Message,
    error: str,
    *,
    not_before: datetime,
    now: datetime,
    odd: bool = False,
    fingerprint: str = "",
) -> JournalState:
    """Record that it did not arrive, for a reason that may pass: the receiver rests until ``not_before``.

    ``odd``: it was refused, so a change of its settings (their ``fingerprint``) ends the rest.
    """
    old = state.receiver(message.receiver)
    ahead = old.not_before is not None and old.not_before > now + RETRY_AFTER_MOST + SKEW
    rests = not_before if ahead else max(not_before, old.not_before or not_before)
    failed = _failed(old, error, min(old.failing_since or now, now), fingerprint)
    health = replace(failed, not_before=rests, odd=error if odd else "")
    return _with_receiver(_freed(state, message, error), message.receiver, health)


def put_back_plain(state: JournalState, message: Message, error: str) -> JournalState:
    """Record that the receiver cannot take this very message: send it once more, as short plain text."""
    return _freed(state, message, error, plain=True)


def refuse(state: JournalState, message: Message, error: str, *, due: datetime) -> JournalState:
    """Record that the receiver takes others, but not this one, not even as plain text: it is tried at ``due``, out of
    the others' way.
    """
    last_sent = state.receiver(message.receiver).last_sent
    health = ReceiverState(refused=f"it refuses a message: {error}", last_sent=last_sent)
    return _with_receiver(_freed(state, message, error, due=due), message.receiver, health)


def broke(state: JournalState, message: Message, error: str, fingerprint: str, now: datetime) -> JournalState:
    """Record that the receiver refused for good. Its messages wait until it is repaired."""
    old = state.receiver(message.receiver)
    failed = _failed(old, error, old.failing_since or now, fingerprint)
    health = replace(failed, broken=error, broken_since=now, odd="")
    return _with_receiver(_freed(state, message, error), message.receiver, health)


def try_again(state: JournalState, receiver: str) -> JournalState:
    """Try a broken receiver again."""
    health = replace(state.receiver(receiver), broken="", broken_since=None, not_before=None, odd="")
    return _with_receiver(state, receiver, health)


def _failed(old: ReceiverState, error: str, since: datetime, fingerprint: str) -> ReceiverState:
    return replace(old, failures=old.failures + 1, failing_since=since, print=fingerprint, error=error)


def _with_receiver(state: JournalState, receiver: str, health: ReceiverState) -> JournalState:
    return replace(state, receivers={**state.receivers, receiver: health})


def free(state: JournalState, receiver: str, now: datetime) -> JournalState:
    """Record that the receiver has just been seen to work: no earlier failure holds its messages; quiet hours still do.

    A message that another process is sending at this moment stays claimed. Returns the same state if nothing was held.
    """
    outbox = tuple(_free(m, now) if m.receiver == receiver else m for m in state.outbox)
    old = state.receiver(receiver)
    held = old.broken or old.odd or old.failures or old.not_before is not None
    if not held and outbox == state.outbox:
        return state
    state = replace(state, outbox=outbox)
    return _with_receiver(state, receiver, ReceiverState(last_sent=now, refused=old.refused)) if held else state


def _free(message: Message, now: datetime) -> Message:
    theirs = message.claimed_until is not None and now < message.claimed_until <= now + LEASE + SKEW
    tried = message.plain or message.left
    return replace(
        message,
        created=min(message.created, now),
        due=now if message.created > now + SKEW or (tried and message.due > now) else message.due,
        claimed_by=message.claimed_by if theirs else "",
        claimed_until=message.claimed_until if theirs else None,
    )


def gave_up(state: JournalState, message: Message, error: str) -> JournalState:
    """Record that the receiver has refused this very message for too long; the receiver's state reports it from now on."""
    refused = f"gave up on a message of {message.created:%Y-%m-%d %H:%M} UTC: {error}"
    health = replace(state.receiver(message.receiver), refused=refused)
    return _with_receiver(drop(state, message), message.receiver, health)


def drop(state: JournalState, message: Message) -> JournalState:
    return replace(state, outbox=tuple(m for m in state.outbox if m.id != message.id))


def _freed(state: JournalState, message: Message, error: str, **changes: Any) -> JournalState:
    """Return ``message``, not claimed any more, and changed by ``changes``."""
    changes |= {"claimed_by": "", "claimed_until": None, "error": error}
    return replace(state, outbox=tuple(replace(m, **changes) if m.id == message.id else m for m in state.outbox))


def backoff(failures: int, fraction: float) -> timedelta:
    """Return how long a receiver rests after ``failures`` in a row; ``fraction`` in 0–1 is the jitter (half to full)."""
    full: timedelta = min(BACKOFF_FIRST * 2 ** min(max(failures, 1) - 1, 20), BACKOFF_MOST)
    return full * (0.5 + 0.5 * fraction)
