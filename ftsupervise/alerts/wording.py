"""The words people read: text made harmless once, for every receiver, and the templates that put it in order.

Names of jobs, paths and error texts come from strangers. Before they enter the journal they lose control characters,
line breaks and direction marks and are cut to a length one can read; each receiver then escapes what is special to it.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ftsupervise.alerts.last_day import LastDay
from ftsupervise.alerts.outbox import LISTED, LISTED_FOR_MACHINES, ORDER, Message, Unlisted, cut, message_id
from ftsupervise.alerts.step import alert_id
from ftsupervise.findings import EventKind, Finding, Notice, Reason, Severity, happened
from ftsupervise.host import ownership
from ftsupervise.truth import Health
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from jinja2 import Environment

# Control characters but for line feeds; direction overrides and isolates; zero-width marks; lone surrogates.
_UNSEEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]+"
)
_LIMITS = {
    "run": 100,
    "watchdog": 60,
    "subject": 160,
    "summary": 400,
    "value": 80,
    "limit": 80,
    "meaning": 300,
    "why": 400,
    "look": 400,
    "do": 400,
}
_OF_NOTICE = {"key": 300, "alert_id": 80, "note": 400, "post": 80}
_OF_MESSAGE = {"run": 100, "where": 4096, "source": 80, "note": 3000, "refused": 1000}
_KINDS = 100  # of watchdogs and reasons that a message counts and does not spell out
SUBJECT = 78  # characters of a mail's subject: state, run, what
LATE = timedelta(minutes=10)
STANDS = timedelta(
    days=7
)  # a service that ends alerts by itself is to keep one this long; each reminder begins it anew

WORDS = {
    Reason.FIRED: "FIRING",
    Reason.ESCALATED: "ESCALATED",
    Reason.REPEATED: "STILL FIRING",
    Reason.RESOLVED: "RESOLVED",
    Reason.UNWATCHED: "NO LONGER WATCHED",
    Reason.ANNOUNCED: "NEWS",
}
ENDS = (Reason.RESOLVED, Reason.UNWATCHED)


def one_line(text: str, limit: int = 400) -> str:
    """Return ``text`` as one harmless line of at most ``limit`` characters."""
    seen = text if text.isascii() and text.isprintable() else _UNSEEN.sub(" ", text)
    return _cut(" ".join(seen.split()), limit)


def lines(text: str, limit: int = 1500) -> str:
    """Return ``text`` with its line breaks kept and everything else that could do harm removed."""
    return _cut(_UNSEEN.sub(" ", text.replace("\r\n", "\n")).strip("\n"), limit)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def clean(finding: Finding) -> Finding:
    """Return the finding as it may be shown to people."""
    short = {name: one_line(getattr(finding, name), limit) for name, limit in _LIMITS.items()}
    short["detail"] = lines(finding.detail) if finding.detail else ""
    changed: dict[str, Any] = {name: text for name, text in short.items() if text != getattr(finding, name)}
    return replace(finding, **changed) if changed else finding


def as_ours(message: Message) -> Message:
    """Return the message within the bounds of those that are made here: another account may have written it, and messages of
    several runs go as one, which a mail server must take."""
    listed = LISTED if message.listed <= LISTED else LISTED_FOR_MACHINES
    found = cut(replace(message, listed=listed, unlisted=message.unlisted[:_KINDS]))
    kinds = tuple(one._replace(watchdog=one_line(one.watchdog, _LIMITS["watchdog"])) for one in found.unlisted[:_KINDS])
    texts: dict[str, Any] = {name: one_line(getattr(found, name), limit) for name, limit in _OF_MESSAGE.items()}
    return replace(found, notices=tuple(map(_told, found.notices)), unlisted=kinds, origins=(), **texts)


def _told(notice: Notice) -> Notice:
    texts: dict[str, Any] = {name: one_line(getattr(notice, name), limit) for name, limit in _OF_NOTICE.items()}
    return replace(notice, finding=clean(notice.finding), **texts)


@dataclass(frozen=True)
class Item:
    """One notice as the templates see it; every text is plain."""

    word: str
    reason: str  # "fired", "escalated", "repeated", "resolved", "unwatched", "announced"
    severity: str
    run: str
    name: str  # "disk /scratch"
    watchdog: str
    summary: str
    value: str
    limit: str
    since: str  # "2026-11-21 02:10 UTC", or ""
    age: str  # "for 12m"; how long it lasted, when it is over
    ended: str
    meaning: str
    why: str
    look: str
    do: str
    ack: str
    silence: str
    note: str
    detail: str
    key: str  # PagerDuty's dedup key: the same from trigger to resolve, and no other incident has it
    incident: str  # the part of it that is unique
    alert_id: str
    over: bool
    at: str  # ISO 8601
    since_iso: str
    until_iso: str  # when a service may end it by itself
    times: int  # that it came and went, until it was over for good

    @property
    def brief(self) -> bool:
        """Return whether it is news that one line says: nothing is to be done, and nothing more is known."""
        more = (self.meaning, self.why, self.do, self.note, self.detail, self.value)
        return self.reason == "announced" and not any(more)


@dataclass(frozen=True)
class Parcel:
    """A message as receivers and their templates get it, with what else they may need: the messages it follows up, the clock,
    the user's own templates."""

    message: Message
    now: datetime
    earlier: tuple[Message, ...] = ()  # sent ones it follows up (with their receipts), oldest first
    ended: dict[str, datetime] = field(default_factory=dict)  # alerts of those earlier messages that are over: since
    over_by_now: dict[str, datetime] = field(default_factory=dict)  # … and of this one: it is a post that is edited
    templates: Path | None = None
    owed: frozenset[str] = frozenset()  # recipients that must get an earlier message first
    day: LastDay | None = None  # the last day of the run as a picture
    tracker: str = ""  # address of its page in an experiment tracker
    facts: tuple[tuple[str, str], ...] = ()  # how the run is now: state, step, loss, ETA, job
    odd: str = ""  # what is wrong with the user's own templates

    @cached_property
    def items(self) -> tuple[Item, ...]:
        message = self.message
        origins = message.origins or ((message.where, message.source),) * len(message.notices)
        return tuple(
            _item(notice, replace(message, where=where, source=source), self.over_by_now.get(notice.alert_id))
            for notice, (where, source) in zip(message.notices, origins, strict=True)
        )

    @property
    def is_digest(self) -> bool:
        """Return whether it has so many items that news have a line each."""
        return len(self.items) > 3

    @cached_property
    def word(self) -> str:
        """Return "FIRING", or "FIRING:2, RESOLVED:1"."""
        return _word(self.message, self.items)

    @property
    def title(self) -> str:
        run = f"{self.run}: " if self.run else ""
        return _cut(f"[{self.word}] {run}{self._first}{self._others}", 250)

    @property
    def subject(self) -> str:
        """Return the same in 78 characters."""
        return _subject(self.word, self.run, self._first, self._others)

    @property
    def _first(self) -> str:
        return self.items[0].summary if self.items else ""

    @property
    def _others(self) -> str:
        others = len(self.items) + self.more - 1
        return f" (+{others} more)" if others > 0 else ""

    @property
    def run(self) -> str:
        return self.message.run

    @property
    def severity(self) -> str:
        return self.message.worst.word

    @property
    def more(self) -> int:
        return sum(one.number for one in self.message.unlisted)

    @property
    def more_of(self) -> str:
        """Return "137 disk fired, 4 hang fired"."""
        return ", ".join(f"{count} {watchdog} {reason.value}" for watchdog, reason, count in self.message.unlisted)

    @property
    def notes(self) -> tuple[str, ...]:
        message, late = self.message, ""
        if (message.sent or self.now) - max(message.created, message.due) >= LATE:
            why = f": {message.error}" if message.error else "."
            late = f"Written {stamp(message.created)}; it could not be delivered sooner{why}"
        return tuple(one_line(note, 2800) for note in (message.note, late, self.odd) if note)

    @property
    def over(self) -> bool:
        """Return whether nothing in it is wrong any more."""
        ends = ("resolved", "unwatched", "announced")
        return all(item.over or item.reason in ends for item in self.items) and not self.more

    @property
    def status(self) -> str:
        """Return the command to see for oneself."""
        return command("list" if self.message.origins else "status", self.message.where)

    @property
    def alone(self) -> Parcel:
        """Return it without other news of the run."""
        return replace(self, day=None, tracker="", facts=())

    @property
    def id(self) -> str:
        return self.message.id


def _subject(word: str, run: str, what: str, more: str) -> str:
    """Return "[FIRING] run: what (+3 more)" in at most 78 characters: a telephone shows no more. The end of ``what`` goes."""
    state = f"[{_short(word, 26)}] "
    name = _short(run, min(32, SUBJECT - len(state) - len(more) - 16))
    head = f"{state}{name}: " if name else state
    return head + _short(what, SUBJECT - len(head) - len(more)) + more


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(0, limit - 3)].rstrip(" ,;:(") + "..."


def _word(message: Message, items: tuple[Item, ...]) -> str:
    if len(items) == 1 and not message.unlisted:
        return items[0].word
    counts: dict[str, int] = {}
    for reason in ORDER:
        of_reason = [item.word for item in items if item.reason == reason.value]
        for one in of_reason:
            counts[one] = counts.get(one, 0) + 1
        hidden = sum(one.number for one in message.unlisted if one.reason is reason)
        if hidden:
            counts[WORDS[reason]] = counts.get(WORDS[reason], 0) + hidden
    return ", ".join(f"{word}:{count}" if count > 1 else word for word, count in counts.items())


def _item(notice: Notice, message: Message, ended: datetime | None) -> Item:
    event = notice.event is not None
    ended = None if event else ended  # what has happened has no end
    found, over, at = notice.finding, ended is not None, ended or notice.at
    word = notice.event.name if notice.event else "RESOLVED" if over else WORDS[notice.reason]
    ends = notice.reason in ENDS
    lasted = show_duration((at - notice.since).total_seconds()) if notice.since and at > notice.since else ""
    acting = bool(notice.alert_id) and not ends and not over
    return Item(
        word=word,
        reason=notice.reason.value,
        severity=found.severity.word,
        run=found.run,
        name=" ".join(part for part in (found.watchdog, found.subject) if part) if not event else "",
        watchdog=found.watchdog,
        summary=found.summary,
        value=found.value,
        limit=found.limit,
        since=stamp(notice.since) if notice.since and not event else "",
        age=lasted if not event and notice.times == 1 else "",
        ended=stamp(at) if ends or over else "",
        meaning="" if ends else found.meaning,
        why="" if ends else found.why,
        look=found.look,
        do="" if ends else found.do,
        ack=command(f"alerts ack {notice.alert_id}", message.where) if acting else "",
        silence=command(f"alerts silence {notice.alert_id} --for 4h", message.where) if acting else "",
        note="" if _is_said(notice, message) else one_line(notice.note, 500),
        detail="" if ends else found.detail,
        key=_dedup_key(notice, message),
        incident=f"{message.source}-{notice.alert_id}-{notice.incident}",
        alert_id=notice.alert_id,
        over=over,
        at=at.isoformat(),
        since_iso=(notice.since or at).isoformat(),
        until_iso=(at + STANDS).isoformat(),
        times=notice.times,
    )


def _is_said(notice: Notice, message: Message) -> bool:
    """Return whether a restart in the same message says what its note says: that this attempt trains."""
    return (
        notice.event is None
        and notice.attempt > 0
        and any(
            (one.event, one.finding.run, one.attempt) == (EventKind.RESUMED, notice.finding.run, notice.attempt)
            for one in message.notices
        )
    )


def _dedup_key(notice: Notice, message: Message) -> str:
    end = f"/{message.source}-{notice.alert_id}-{notice.incident}"
    return _cut(f"{notice.finding.run}/{notice.finding.watchdog}", 255 - len(end)) + end


def in_short(parcel: Parcel, limit: int = 2900) -> str:
    """Return the whole message as short plain text, for a receiver that will not take it otherwise: every notice has
    its line.
    """
    if len(parcel.items) == 1 and not parcel.more:
        return _cut("\n".join([parcel.title, *parcel.notes]), limit)
    room = max(40, (limit - len(parcel.title) - 200) // max(1, len(parcel.items)) - 1)
    rest = [f"+{parcel.more} more: {parcel.more_of}"] if parcel.more else []
    each = (
        f"{item.word}  {item.name}: {item.summary}" if item.name else f"{item.word}  {item.summary}"
        for item in parcel.items
    )
    return _cut("\n".join([parcel.title, *(f"- {_cut(line, room)}" for line in each), *rest, *parcel.notes]), limit)


def command(verb: str, where: str) -> str:
    return f"ftsupervise {verb} {shlex.quote(where)}" if where else f"ftsupervise {verb}"


def stamp(at: datetime) -> str:
    return f"{at.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"


def render(template: str, parcel: Parcel, *, kind: str = "text", **more: Any) -> str:
    """One of ``templates/alert.*.j2``, or the user's own file of that name. ``kind``: text, html, slack or chat (escaping).

    A mistake in a user's own template must not cost a message at night: then the built-in one is used and says so.
    ``ftsupervise notify preview`` shows such mistakes by day.
    """
    if parcel.templates is not None:
        try:
            return render_strictly(template, parcel, kind, **more)
        except Exception as error:  # any mistake of a template: TemplateError, TypeError, OSError …
            odd = f"your own {template} cannot be used: {type(error).__name__}: {one_line(str(error), 200)}"
            parcel = replace(parcel, templates=None, odd=odd)
    return render_strictly(template, parcel, kind, **more)


def render_strictly(template: str, parcel: Parcel, kind: str, **more: Any) -> str:
    """Do the same as ``render``, but raise the errors (jinja2.TemplateError and others)."""
    return _environment(parcel.templates, kind).get_template(template).render(m=parcel, **more)


@lru_cache(maxsize=16)
def _environment(own: Path | None, kind: str) -> Environment:
    from importlib import resources

    from jinja2 import ChoiceLoader, FunctionLoader, StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    built_in = resources.files("ftsupervise.templates")
    loaders = [FunctionLoader(lambda name: own_template(own, name))] if own else []
    return ImmutableSandboxedEnvironment(
        loader=ChoiceLoader([*loaders, FunctionLoader(lambda name: (built_in / name).read_text("utf-8"))]),
        undefined=StrictUndefined,
        autoescape=kind == "html",
        finalize={"slack": _slack, "chat": _chat}.get(kind),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def own_template(folder: Path, name: str) -> tuple[str, str, Callable[[], bool]] | None:
    """Return the template ``name`` in ``folder`` and a check that it is still the same; None if there is none.

    Raises NotTrusted when another account may write it: its words go out in this account's name; OSError where its file
    system does not answer.
    """
    path = folder / name
    if ".." in path.parts or name.startswith("/"):
        return None

    def read() -> tuple[str, int]:
        return ownership.read_trusted(path, limit=1_000_000, follow=True).decode("utf-8"), path.stat().st_mtime_ns

    try:
        text, stamp = _answer_of(folder, read)
    except FileNotFoundError:
        return None
    return text, str(path), lambda: _is_still(folder, path, stamp)


_WITHIN = 5.0  # seconds for a folder of templates to answer
_AGAIN = 60.0  # … after which one that did not is asked again
_silent: dict[Path, float] = {}  # folder -> monotonic seconds until which it is not asked
_T = TypeVar("_T")


def _answer_of(folder: Path, read: Callable[[], _T]) -> _T:
    """Return what ``read`` returns. Raises OSError where the folder does not answer: a message goes out all the same."""
    from ftsupervise.host.in_time import in_time

    if time.monotonic() >= _silent.get(folder, 0.0):
        found = in_time(read, _WITHIN)
        if found is not None:
            return found
        _silent[folder] = time.monotonic() + _AGAIN
    raise TimeoutError(f"{folder} does not answer within {_WITHIN:.0f} s: its file system hangs")


def _is_still(folder: Path, path: Path, stamp: int) -> bool:
    try:
        return _answer_of(folder, lambda: path.stat().st_mtime_ns) == stamp
    except OSError:
        return False


def _slack(value: object) -> object:
    return slack_escape(value) if isinstance(value, str) else value


def _chat(value: object) -> object:
    return without_mentions(value) if isinstance(value, str) else value


_MENTION = re.compile(r"(?<=<)[@#]|@(?=(?:everyone|here|channel|all|room)\b)", re.IGNORECASE)


def without_mentions(text: str) -> str:
    """Return text that calls nobody in a chat which takes mentions out of plain text, as Discord and Mattermost do: behind the
    sign stands what no eye sees."""
    return _MENTION.sub("\\g<0>\u200b", text)


def slack_escape(text: str) -> str:
    """Return text that Slack shows as it stands: no mention, no link, no way out of a code span."""
    escaped = without_mentions(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return escaped.replace("`", "\u02cb")  # a look-alike


# One incident from beginning to end, for ``notify preview`` and the tests. Pure.


def incident(run: str, where: str, now: datetime) -> Iterator[Message]:
    """Yield the messages of: started, firing, escalated, repeated, resolved, no longer watched, several at once, finished."""
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
    yield _one(run, where, begin, happened(EventKind.STARTED, "started", begin, started, run=run))
    yield _one(run, where, begin, _notice(free, Reason.FIRED, begin, begin))
    late = begin + timedelta(hours=1)
    note = "It has not been acknowledged so far."
    yield _one(run, where, late, _notice(free, Reason.ESCALATED, late, begin, note))
    again = begin + timedelta(hours=4)
    yield _one(run, where, again, _notice(free, Reason.REPEATED, again, begin))
    end = begin + timedelta(hours=4, minutes=15)
    yield _one(run, where, end, _notice(free, Reason.RESOLVED, end, begin, "Now: 8.1 TB free on /scratch"))
    yield _one(run, where, end, _notice(free, Reason.UNWATCHED, end, begin, "Last checked 02:10 UTC."))
    both = (_notice(free, Reason.FIRED, begin, begin), _notice(log, Reason.FIRED, begin, begin))
    yield _one(run, where, begin, *both, unlisted=[Unlisted("disk", Reason.FIRED, 137)])
    done = "the run has finished after 3d 4h, at step 120,000"
    yield _one(run, where, now, happened(EventKind.FINISHED, "finished", now, done, run=run))


def disk(run: str, at: datetime, *, health: Health = Health.BAD) -> Finding:
    """Return the finding that everybody knows."""
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


def _notice(finding: Finding, reason: Reason, at: datetime, since: datetime, note: str = "") -> Notice:
    ident = alert_id(finding)
    key = f"{ident}.1.{reason.value}.1"
    return Notice(key=key, reason=reason, finding=finding, at=at, alert_id=ident, since=since, note=note)


def _one(run: str, where: str, at: datetime, *notices: Notice, unlisted: Sequence[Unlisted] = ()) -> Message:
    ident = message_id("sample", "sample", run, notices)
    return Message(ident, "sample", run, notices, created=at, due=at, unlisted=tuple(unlisted), where=where)
