"""The status page of torchft's lighthouse, read into types: who is in the quorum, who is heard of, and what it waits for.

The page proves little. A heartbeat comes from a thread that goes on while training hangs, the step of a member is the one it
sent with its last quorum, and a member says about itself what it likes: the lighthouse asks nobody for a name or a password.
So nothing here says that a group makes progress, and the ids, addresses and texts are a stranger's: they are cut short and made
printable, and nothing on the page is connected to.

The port may be another program's by now, so one look has a bound for all of it, however slowly that program answers, reads so
many bytes at most, follows no redirect and resolves no name. ``PageNotSeen`` is neither "no group" nor "dead".

Written against torchft 0.2.0. Standard library only: ``status`` reads it.
"""

from __future__ import annotations

import re
import socket
import time
from enum import Enum
from html import unescape
from math import isfinite
from typing import NamedTuple

from ftsupervise.printable import printable

LIMIT = 4_000_000  # bytes: a page of 500 groups is 220 kB, and each start of a group adds 120 bytes for good
_MOST = 20_000  # members, and heartbeats
_TEXT = 200  # characters of an id or an address
_SENTENCE = 500

_PART = 10_000  # characters of one member

# "<" and ">" in what a member says of itself are escaped on the page, so that no text can pretend to be a tag.
_MEMBER, _HEARTBEAT = '<div class="member', '<li class="heartbeat'  # what each begins with
_NAMED = re.compile(r'([^"<>]*)">\s*<b>([^<>]*)</b>')
_FIELD = re.compile(r"<br/>\s*([A-Za-z ]{1,20}):\s([^<>]*)(?=<br/>)")
_LISTED = re.compile(r'[^"<>]*">([^<>]*)</li>')
_QUORUM_ID = re.compile(r"\s*Current quorum_id:\s*(-?[0-9]{1,20})\s*<br>\s*Next quorum status:([^<>]*)<h3>")
_SEEN = re.compile(r"(.*): seen ([^\s]{1,40}) ago", re.S)  # of text without space around it, which would make it slow
_AGE = re.compile(r"Quorum age:\s*([^\s<>]{1,40})\s*<")
_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)(ns|µs|us|ms|s)")
_UNITS = {"ns": 1e-9, "µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0}


class QuorumMember(NamedTuple):
    """A start of a group in the last quorum, as it described itself."""

    replica: str  # "g002:3f0c…", the group and a word that is new at each start
    step: int | None  # that it sent with its last quorum
    manager: str
    store: str
    ranks: int | None
    recovering: bool  # it is behind, and copies the weights of another one

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
    waits_for: str  # its own sentence about the next quorum
    age: float | None  # seconds since the last quorum; None: there was none
    members: tuple[QuorumMember, ...]
    heartbeats: tuple[GroupHeartbeat, ...]

    def heard(self, within: float) -> tuple[str, ...]:
        """The starts of groups that were heard of within so many seconds."""
        return tuple(one.replica for one in self.heartbeats if one.age <= within)

    def silent(self, within: float) -> tuple[QuorumMember, ...]:
        """The members of the last quorum that are not heard of any more."""
        heard = set(self.heard(within))
        return tuple(one for one in self.members if one.replica not in heard)

    @property
    def has_stragglers(self) -> bool:
        """Return whether the next quorum waits for groups that are heard of and do not ask. One of them may hang."""
        return "stragglers" in self.waits_for or "need at least half of" in self.waits_for


class Unseen(Enum):
    """These are the reasons why there is no page."""

    REFUSED = "nothing listens there"
    SILENT = "no answer in time"
    STRANGE = "an answer that is no such page"
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
        return PageNotSeen(Unseen.STRANGE, str(error))
    return parse(body)


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
            raise ValueError(f"its answer is larger than {LIMIT // 1_000_000} MB")
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
    quorum, *parts = above[first.end() :].split(_MEMBER, _MOST)
    members = [_member(part[:_PART]) for part in parts]
    heard = [_heartbeat(part[:_PART]) for part in below.split(_HEARTBEAT, _MOST)[1:]]
    age = _AGE.search(quorum[:_PART])
    return LighthousePage(
        quorum=_whole(first[1]) or 0,
        waits_for=_clean(first[2], _SENTENCE),
        age=_seconds(age[1]) if age else None,
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
        replica=_clean(named[2]),
        step=_whole(fields.get("Step", "")),
        manager=_clean(fields.get("Manager", "")),
        store=_clean(fields.get("TCPStore", "")),
        ranks=_whole(fields.get("World size", "")),
        recovering="recovering" in named[1].split(),
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
