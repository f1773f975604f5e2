"""The status page of torchft's lighthouse, read into types: who is in the quorum, and who is heard of.

The page proves little. A heartbeat comes from a thread that goes on while training hangs, the step of a member is the one it
sent with its last quorum, and a member says about itself what it likes: the lighthouse asks nobody for a name or a password.
So nothing here says that a group makes progress, and the ids, addresses and texts are a stranger's: they are cut short and made
printable, and nothing on the page is connected to.

The port may be another program's by now, so one look has a bound for all of it, however slowly that program answers, reads so
many bytes at most, follows no redirect and resolves no name. ``PageNotSeen`` is neither "no group" nor "dead".

Written against torchft 0.2.0. Standard library only: ``status`` reads it.
"""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from html import unescape
from ipaddress import ip_address
from math import isfinite
from typing import NamedTuple

from ftsupervise.host.addresses import resolve
from ftsupervise.host.in_time import Every
from ftsupervise.printable import printable

LIMIT = 4_000_000  # bytes: a page of 500 groups is 220 kB, and each start of a group adds 120 bytes for good
_MOST = 20_000  # members, and heartbeats
_TEXT = 200  # characters of an id or an address

_PART = 10_000  # characters of one member

# "<" and ">" in what a member says of itself are escaped on the page, so that no text can pretend to be a tag.
_MEMBER, _HEARTBEAT = '<div class="member', '<li class="heartbeat'  # what each begins with
_NAMED = re.compile(r'[^"<>]*">\s*<b>([^<>]*)</b>')
_FIELD = re.compile(r"<br/>\s*([A-Za-z ]{1,20}):\s([^<>]*)(?=<br/>)")
_LISTED = re.compile(r'[^"<>]*">([^<>]*)</li>')
_QUORUM_ID = re.compile(r"\s*Current quorum_id:\s*(-?[0-9]{1,20})\s*<br>\s*Next quorum status:[^<>]*<h3>")
_SEEN = re.compile(r"(.*): seen ([^\s]{1,40}) ago", re.S)  # of text without space around it, which would make it slow
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(ns|µs|us|ms|s)")
_UNITS = {"ns": 1e-9, "µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class QuorumMember(NamedTuple):
    """A start of a group in the last quorum, as it described itself."""

    replica: str  # "g002:3f0c…", the group and a word that is new at each start
    step: int | None  # that it sent with its last quorum
    store: str

    @property
    def group(self) -> str:
        return group_of(self.replica)


class GroupHeartbeat(NamedTuple):
    """A start of a group that was heard of ``age`` seconds ago."""

    replica: str
    age: float

    @property
    def group(self) -> str:
        return group_of(self.replica)


class LighthousePage(NamedTuple):
    """This is what the lighthouse knew at one moment."""

    quorum: int  # its id: counted from 1 by each lighthouse
    members: tuple[QuorumMember, ...]
    heartbeats: tuple[GroupHeartbeat, ...]

    def heard(self, within: float) -> tuple[str, ...]:
        """The starts of groups that were heard of within so many seconds."""
        return tuple(one.replica for one in self.heartbeats if one.age <= within)


class Unseen(Enum):
    """These are the reasons why there is no page."""

    REFUSED = "nothing listens there"
    SILENT = "no answer in time"
    STRANGE = "an answer that is no such page"
    FULL = "a page that is too large to be read"  # a lighthouse forgets no name that was ever told to it
    CUT = "it could not be asked"  # the network of this host


class PageNotSeen(NamedTuple):
    """The page could not be read, and nothing is known of what would stand on it."""

    kind: Unseen
    why: str


def group_of(replica: str) -> str:
    """ "g002" of "g002:3f0c…"."""
    return replica.partition(":")[0]


# -------------------------------------------------------------------------------------------------------------- asking


def look(host: str, port: int, within: float, *, own: bool = False) -> LighthousePage | PageNotSeen:
    """The page of the lighthouse at that address, at most ``within`` seconds from now. ``host``: in numbers. ``own``: it is an
    address of this host; where it is not any more, that is all that is said."""
    until = time.monotonic() + within
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.inet_pton(family, host)  # a name would have to be asked of a server that may not answer
        with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as one:
            if own:
                one.bind((host, 0))
            body = _ask(one, host, port, until)
    except ConnectionRefusedError:
        return PageNotSeen(Unseen.REFUSED, f"nothing listens at port {port} of {host}")
    except TimeoutError:
        return PageNotSeen(Unseen.SILENT, f"no answer within {within:g} s")
    except OSError as error:
        kind = Unseen.STRANGE if isinstance(error, ConnectionError) else Unseen.CUT
        return PageNotSeen(kind, error.strerror or str(error))
    except ValueError as error:
        return PageNotSeen(Unseen.FULL if isinstance(error, _Full) else Unseen.STRANGE, str(error))
    return parse(body)


class _Full(ValueError):
    """An answer that is not read to its end."""


def _ask(one: socket.socket, host: str, port: int, until: float) -> str:
    one.settimeout(_left(until))
    one.connect((host, port))
    shown = f"[{host}]" if ":" in host else host
    one.sendall(f"GET /status HTTP/1.1\r\nHost: {shown}:{port}\r\nConnection: close\r\n\r\n".encode())
    raw = bytearray()
    while True:
        one.settimeout(_left(until))
        part = one.recv(1 << 16)
        raw += part
        if not part or _complete(raw):
            break
        if len(raw) > LIMIT:
            begin = bytes(raw[:65_536]).partition(b"\r\n\r\n")[2].decode("utf-8", "replace")
            kind = _Full if _QUORUM_ID.match(begin) else ValueError
            raise kind(f"its answer is larger than {LIMIT // 1_000_000} MB")
    return _body(bytes(raw))


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _complete(raw: bytearray) -> bool:
    at = raw.find(b"\r\n\r\n", 0, 65_536)
    if at < 0:
        return False
    found = re.search(rb"(?im)^content-length:[ \t]*([0-9]{1,9})[ \t]*\r$", raw[: at + 2])
    return found is not None and len(raw) - at - 4 >= int(found[1])


def _body(raw: bytes) -> str:
    head, _, body = raw.partition(b"\r\n\r\n")
    first = head.partition(b"\r\n")[0].decode("ascii", "replace")
    found = re.fullmatch(r"HTTP/1\.[01] ([0-9]{3})(?: .*)?", first)
    if found is None:
        raise ValueError("its answer is not HTTP: another program listens there")
    if found[1] != "200":
        raise ValueError(f"its answer is {printable(first, 60)}: another program may listen there")
    return body.decode("utf-8", "replace")


# ------------------------------------------------------------------------------------------------------------- reading


def parse(text: str) -> LighthousePage | PageNotSeen:
    """The page as the lighthouse of torchft 0.2 writes it."""
    first = _QUORUM_ID.match(text)
    if first is None or "<h2>Heartbeats</h2>" not in text:
        return PageNotSeen(
            Unseen.STRANGE, "its answer is no status page of torchft's lighthouse: another program or version"
        )
    above, _, below = text.partition("<h2>Heartbeats</h2>")
    if above.count(_MEMBER) > _MOST or below.count(_HEARTBEAT) > _MOST:  # who is not read would count as silent
        return PageNotSeen(Unseen.FULL, f"its page has more than {_MOST} names")
    members = [_member(part[:_PART]) for part in above[first.end() :].split(_MEMBER)[1:]]
    heard = [_heartbeat(part[:_PART]) for part in below.split(_HEARTBEAT)[1:]]
    return LighthousePage(
        quorum=_whole(first[1]) or 0,
        members=tuple(one for one in members if one is not None),
        heartbeats=tuple(one for one in heard if one is not None),
    )


def _member(part: str) -> QuorumMember | None:
    named = _NAMED.match(part)
    if named is None:
        return None
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(part):
        fields.setdefault(name.strip(), value)
    return QuorumMember(
        replica=_clean(named[1]),
        step=_whole(fields.get("Step", "")),
        store=_clean(fields.get("TCPStore", "")),
    )


def _heartbeat(part: str) -> GroupHeartbeat | None:
    listed = _LISTED.match(part)
    found = _SEEN.fullmatch(listed[1].strip()) if listed else None
    age = _seconds(found[2]) if found else None
    return None if found is None or age is None else GroupHeartbeat(_clean(found[1]), age)


def _clean(text: str, limit: int = _TEXT) -> str:
    return printable(" ".join(unescape(text[: 8 * limit]).split()), limit)


def _whole(text: str) -> int | None:
    found = re.fullmatch(r"-?[0-9]{1,19}", text.strip())
    return int(found[0]) if found else None


def _seconds(text: str) -> float | None:
    """A duration as Rust prints it: "0.3s", "812.5µs", "1.2ms"."""
    found = _DURATION.fullmatch(text)
    value = float(found[1]) * _UNITS[found[2]] if found else float("nan")
    return value if isfinite(value) else None


# ------------------------------------------------------------------------------------------

# Members of a quorum that should not be in it: the lighthouse believes them, and we know better.
#
# The lighthouse takes every manager at its word. One that calls itself like another group is counted twice, one of another
# training is counted too, and of all steps that are told the highest counts: all others throw their weights away and copy those
# of the group that told it. The supervisor knows the groups that it has started, and their steps from their own ranks.
#
# Pure. What is not known makes nobody a suspect.

_AHEAD = 2  # steps: a group reports the one that it is about to make
_AHEAD_FOR = 10.0  # seconds: a page of ours is never that old while its ranks are heard of
_FAR = 100  # steps ahead of all others, beside those that they can have made since they were last asked
_FAR_FOR = 4.0  # seconds that a member reports such a step, on three pages at least


class MemberTrouble(Enum):
    """This is wrong with a member of the quorum."""

    UNKNOWN = "no group of this run"
    TWICE = "two starts of one group"
    AHEAD = "reports a step that it has not made"
    STORE = "its store does not answer"
    FAR = "reports a step that no group can have made"


class SuspectMember(NamedTuple):
    """``words``: a sentence for people."""

    group: str
    replica: str
    trouble: MemberTrouble
    words: str


def suspects(
    page: LighthousePage, steps: Mapping[str, int | None], heartbeat: float, silent_stores: Collection[str] = ()
) -> list[SuspectMember]:
    """``steps``: each group of this run, and the newest step that its ranks have told us (None: not known). ``heartbeat``:
    seconds after which a start counts as dead. ``silent_stores``: addresses of stores that do not answer (``stores.py``)."""
    heard = page.heard(heartbeat)
    found = [
        SuspectMember(
            group_of(one), one, MemberTrouble.UNKNOWN, f"{one} reports to the lighthouse and is no group of this run"
        )
        for one in heard
        if group_of(one) not in steps
    ]
    for group in steps:
        starts = [one for one in heard if group_of(one) == group]
        if len(starts) > 1:
            words = f"{len(starts)} starts of group {group} report to the lighthouse: {', '.join(starts)}"
            found += [SuspectMember(group, one, MemberTrouble.TWICE, words) for one in starts]
    alive = [one for one in page.members if one.replica in heard and one.group in steps]
    return found + [suspect for one in alive for suspect in _judged(one, steps[one.group], silent_stores)]


def _judged(one: QuorumMember, known: int | None, silent_stores: Collection[str]) -> list[SuspectMember]:
    found = []
    if one.step is not None and known is not None and one.step > known + _AHEAD:
        words = f"group {one.group} told the lighthouse step {one.step}, and its ranks are at step {known}"
        found.append(SuspectMember(one.group, one.replica, MemberTrouble.AHEAD, words))
    if one.store in silent_stores:
        words = f"the store of group {one.group} at {one.store} does not answer: no group can meet there"
        found.append(SuspectMember(one.group, one.replica, MemberTrouble.STORE, words))
    return found


class SuspectWatch:
    """It tells what is new on a page: each trouble of a start of a group once, when two pages in a row show it. For a moment
    after a restart, both starts of a group are heard of. And our own page about a group's steps may be seconds old: one is
    said to be ahead when its ranks have not made, ten seconds later, the step that it told then."""

    def __init__(self) -> None:
        self._page: LighthousePage | None = None
        self._before: set[tuple[str, MemberTrouble]] = set()
        self._told: set[tuple[str, MemberTrouble]] = set()
        self._claims: dict[str, tuple[int, float]] = {}  # by start: a step that it told, and when

    def news(
        self,
        now: float,
        page: LighthousePage,
        steps: Mapping[str, int | None],
        heartbeat: float,
        silent_stores: Collection[str] = (),
    ) -> list[SuspectMember]:
        """Return what is new of ``suspects``. The same page twice is one look. ``now``: monotonic seconds."""
        if page is self._page:
            return []
        found = {(one.replica, one.trouble): one for one in suspects(page, steps, heartbeat, silent_stores)}
        ahead = {one for one, trouble in found if trouble is MemberTrouble.AHEAD}
        told = {one.replica: one.step for one in page.members if one.replica in ahead and one.step is not None}
        self._claims = {one: self._claims.get(one, (step, now)) for one, step in told.items()}
        for one, (step, _) in list(self._claims.items()):
            known = steps.get(group_of(one))
            if known is not None and known + _AHEAD >= step:  # it was only our page that was old
                self._claims[one] = (told[one], now)
            if now - self._claims[one][1] < _AHEAD_FOR:
                found.pop((one, MemberTrouble.AHEAD))
        sure = self._before | {key for key in found if key[1] is MemberTrouble.AHEAD}
        new = [one for key, one in found.items() if key in sure and key not in self._told]
        self._page, self._before = page, set(found)
        self._told = (self._told & self._before) | {(one.replica, one.trouble) for one in new}
        return new


def far_ahead(
    page: LighthousePage, steps: Mapping[str, int | None], heartbeat: float, least: int
) -> list[SuspectMember]:
    """The members that tell a step which no group can have made: fewer than ``least`` groups tell it, without which nothing is
    committed, and it is far beyond what the others have made. ``steps`` as in ``suspects``; None also for a group that has made
    no step since its start. Nobody is accused unless the steps of enough others to train on are known."""
    heard = page.heard(heartbeat)
    alive = [one for one in page.members if one.step is not None and one.replica in heard and one.group in steps]
    found = []
    for one in alive:
        others = [made for group, made in steps.items() if group != one.group and made is not None]
        if one.step is None or len(others) < max(2, least - 1) or one.step <= max(others) + _FAR:
            continue
        if len({other.group for other in alive if (other.step or 0) > max(others) + _FAR}) >= least:
            continue
        words = (
            f"group {one.group} told the lighthouse step {one.step}, and the others are at step {max(others)} at most"
        )
        found.append(SuspectMember(one.group, one.replica, MemberTrouble.FAR, words))
    return found


class LiarWatch:
    """The groups that are to be ended and started again, because their managers report steps that no group can have made: the
    others refuse such weights (integrations/torchft_group.py), and so wait until the group is gone. What is seen once may be
    an old page of ours; only a claim that lasts counts."""

    def __init__(self) -> None:
        self._page: LighthousePage | None = None
        self._since: dict[
            str, tuple[float, int]
        ] = {}  # by start of a group: when it was first seen so, and on how many pages

    def after(
        self, now: float, page: LighthousePage, steps: Mapping[str, int | None], heartbeat: float, least: int
    ) -> dict[str, SuspectMember]:
        """Return, by group, those that are sure with this page. ``now``: monotonic seconds."""
        found, new = {one.replica: one for one in far_ahead(page, steps, heartbeat, least)}, page is not self._page
        before, self._page = {replica: self._since.get(replica, (now, 0)) for replica in found}, page
        self._since = {replica: (since, looks + new) for replica, (since, looks) in before.items()}
        sure = [replica for replica, (since, looks) in self._since.items() if now - since >= _FAR_FOR and looks > 2]
        return {found[replica].group: found[replica] for replica in sure}


# ------------------------------------------------------------------------------------------

# The stores of the groups: does each still answer?
#
# All groups of a quorum meet at the store of one of them. Where another process holds it than the manager's, as under torchrun,
# it can be gone while the manager reports that all is well, and then no step succeeds. So each is connected to now and then, by
# a thread and with a bound. Nothing is sent.
#
# A stranger may have written the address of a store: only those are connected to that are on the run's own nodes.

_EVERY = 5.0  # seconds between two rounds
_WITHIN = 1.0  # seconds for one store
_MOST_STORES = 1000  # stores in a round


class StoreWatch:
    """``names``: the run's own nodes, by each name or address that a group may give its own."""

    def __init__(
        self, page: Callable[[], LighthousePage | PageNotSeen], names: Collection[str], every: float = _EVERY
    ) -> None:
        self.silent: frozenset[str] = frozenset()  # stores that refused twice in a row
        self._page, self._names = page, frozenset(names)
        self._hosts: dict[str, str] | None = None
        self._refused: set[str] = set()
        self._looking = Every(every, self._look, "stores")

    def close(self) -> None:
        self._looking.close()

    def _look(self) -> None:
        hosts = self._hosts = self._hosts if self._hosts is not None else hosts_of(self._names)
        page = self._page()
        stores = {one.store for one in page.members} if isinstance(page, LighthousePage) else set()
        now = {one for one in sorted(stores)[:_MOST_STORES] if store_answers(one, hosts, _WITHIN) is False}
        self.silent, self._refused = frozenset(now & self._refused), now


def store_answers(store: str, hosts: Mapping[str, str], within: float) -> bool | None:
    """Return whether something listens at the store of a member ("HOST:PORT/prefix"). None where that cannot be said."""
    host, _, rest = store.rpartition(":")
    port = rest.partition("/")[0]
    address = hosts.get(host.strip("[]"))
    if address is None or not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 65536):
        return None
    family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as one:
        one.settimeout(within)
        try:
            one.connect((address, int(port)))
        except OSError as error:
            return False if error.errno == errno.ECONNREFUSED else None
    return True


def hosts_of(names: Collection[str]) -> dict[str, str]:
    """Return each of ``names`` with its address in numbers; those that have none are left out."""
    found = {name: resolve(name) for name in names}
    return {name: address for name, address in found.items() if address}
