"""The protocol of agents and supervisor: numbered, authenticated datagrams.

    magic, kind, part, parts, generation, attempt, number | node name | body | seal

The seal is BLAKE2b keyed with a secret of this one ``ftsupervise run``: without it a datagram is dropped. The
number grows with every datagram of its sender, and the generation with every start of the agents, so that nothing is taken
twice. Times are ages in milliseconds: the clocks of two hosts need not agree.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ftsupervise.truth import RankState

if TYPE_CHECKING:
    from ftsupervise.model import Cause

try:  # hashlib and hmac load OpenSSL: 5 ms and 3 MB on every node
    from _blake2 import blake2b
    from _operator import _compare_digest as same
except ImportError:  # another Python
    from hashlib import blake2b
    from hmac import compare_digest as same  # type: ignore[no-redef]

ENV_KEY = "FTSUPERVISE_NODE_KEY"  # hexadecimal; in the environment of the agents' step only
KEY = 32  # bytes
LARGEST = 1400  # bytes of a datagram: passes every Ethernet unsplit

# 8 and 9: snapshots/ring.py; 10: tally.py; 11: life.py
HELLO, STATES, EXIT, REPLY, ACK, ASK, BYE, COPIES, COPY, TALLY, LIFE = range(1, 12)
TO_SUPERVISOR, TO_AGENT = frozenset((HELLO, STATES, EXIT, REPLY, COPIES, TALLY, LIFE)), frozenset((ACK, ASK, BYE, COPY))
KEEP = b"keep"  # in a BYE: other agents will follow in this job

_HEAD = struct.Struct("<4sBBBBIIQ")
_MAGIC = b"FTS1"
_SEAL = 16
_RANK = struct.Struct("<IIqIIIBBBx")  # rank, pid, step, ages of step and beat, CPU in 1/100 s, state, flags, phase
_EXIT = struct.Struct("<IIIiIq")  # rank, pid, age, exit code, flags, step
_CHUNK = struct.Struct("<HH")
_NO_STEP, _LEAVING, _NO_CPU, _READ = 1, 2, 4, 8
_LIMIT = (1 << 32) - 1
_LETTERS = ("", *(chr(code) for code in range(1, 256)))


class Datagram(NamedTuple):
    kind: int
    part: int
    parts: int
    generation: int
    attempt: int
    number: int
    node: bytes
    body: bytes


class RankExit(NamedTuple):
    """A rank's process that has ended, or whose interpreter ends for a failure."""

    rank: int
    node: str
    pid: int
    at: float  # monotonic, when its node noticed
    code: int | None  # negative for a signal, None when it could not be seen
    leaving: bool  # it reported that it stops or has finished, or its interpreter exited normally
    failed: bool  # an exception was being raised through
    final: bool  # no parent will restart it: the process that Slurm started for it on this node has ended
    told: bool = False  # SIGTERM had come to it before
    oom: bool = False  # the kernel killed it for its memory
    step: int | None = None  # the last one on its page: its node may not have reported it before

    @property
    def in_order(self) -> bool:
        """Return whether it ended as it meant to: a process that exits with 0 has handled its exception."""
        return self.code == 0 or (self.leaving and not self.failed)

    @property
    def crash(self) -> bool:
        """Return whether it exited abnormally, with no parent on its node to restart it. Unknown is no crash."""
        return self.final and not self.in_order

    def cause(self) -> Cause:
        from ftsupervise.model import CauseKind, ended  # the agents need none of it

        how = ended(self.code, self.node, str(self.rank))
        return how._replace(kind=CauseKind.MEMORY, signal=0) if self.oom else how


class Seal:
    """Makes and checks datagrams of one key."""

    def __init__(self, key: bytes) -> None:
        self._fresh = blake2b(key=key, digest_size=_SEAL)

    def _of(self, data: bytes | memoryview) -> bytes:
        made = self._fresh.copy()  # the key is hashed once
        made.update(data)
        return made.digest()

    def pack(self, message: Datagram) -> bytes:
        kind, part, parts, generation, attempt, number, node, body = message
        head = _HEAD.pack(_MAGIC, kind, part, parts, len(node), generation, attempt, number)
        data = head + node + body
        return data + self._of(data)

    def open(self, data: bytes) -> Datagram | None:
        """Return the datagram; None when it is not whole, or not sealed with our key."""
        end = len(data) - _SEAL
        if end < _HEAD.size or data[:4] != _MAGIC or not same(self._of(data[:end]), data[end:]):
            return None
        _, kind, part, parts, size, generation, attempt, number = _HEAD.unpack_from(data)
        begin = _HEAD.size + size
        if begin > end:
            return None
        return Datagram(kind, part, parts, generation, attempt, number, data[_HEAD.size : begin], data[begin:end])


def pack_states(states: Sequence[RankState], now: float, room: int = LARGEST - 128) -> list[bytes]:
    """Return the bodies that carry ``states`` at monotonic ``now``: as few datagrams as possible, at least one."""
    bodies: list[bytes] = []
    names: dict[bytes, int] = {}
    records: list[bytes] = []
    size = 1

    def close() -> None:
        nonlocal names, records, size
        table = b"".join(bytes((len(name),)) + name for name in names)
        bodies.append(bytes((len(names),)) + table + b"".join(records))
        names, records, size = {}, [], 1

    for one in states:
        name = one.phase.encode("utf-8", "replace")[:63]
        more = _RANK.size + (0 if name in names else 1 + len(name))
        if size + more > room or len(names) > 250:
            close()
            more = _RANK.size + 1 + len(name)
        size += more
        flags = (_NO_STEP if one.step is None else 0) | (_LEAVING if one.leaving else 0)
        flags |= (_NO_CPU if one.cpu is None else 0) | (_READ if one.read else 0)
        records.append(
            _RANK.pack(
                one.rank,
                one.pid,
                one.step or 0,
                _ms(now - one.stepped),
                _ms(now - one.beaten),
                min(_LIMIT, int((one.cpu or 0.0) * 100)),
                ord(one.state[0]) if one.state else 0,
                flags,
                names.setdefault(name, len(names)),
            )
        )
    close()
    return bodies


def read_states(body: bytes, node: str, seen: float) -> list[RankState]:
    """Unpack a body of ``pack_states`` received at monotonic ``seen``. Raises ValueError for any other body."""
    try:
        phases, at = [], 1
        for _ in range(body[0]):
            end = at + 1 + body[at]
            phases.append(body[at + 1 : end].decode("utf-8", "replace"))
            at = end
        new = tuple.__new__  # half the price of RankState(…), and there may be 100,000
        return [
            new(
                RankState,
                (
                    rank,
                    node,
                    None if flags & _NO_STEP else step,
                    phases[phase],
                    seen - stepped * 0.001,
                    seen - beaten * 0.001,
                    seen,
                    pid,
                    _LETTERS[state],
                    None if flags & _NO_CPU else cpu * 0.01,
                    flags & _LEAVING != 0,
                    flags & _READ != 0,
                ),
            )
            for rank, pid, step, stepped, beaten, cpu, state, flags, phase in _RANK.iter_unpack(body[at:])
        ]
    except (IndexError, struct.error) as error:
        raise ValueError(f"no rank states: {error}") from None


def pack_exits(exits: Iterable[RankExit], now: float) -> bytes:
    """Return the body that carries ``exits`` at monotonic ``now``; their node is named beside it."""
    return b"".join(
        _EXIT.pack(
            one.rank,
            one.pid,
            _ms(now - one.at),
            one.code or 0,
            (one.code is not None) | one.leaving << 1 | one.failed << 2 | one.final << 3 | one.told << 4 | one.oom << 5,
            -1 if one.step is None else one.step,
        )
        for one in exits
    )


def read_exits(body: bytes, node: str, now: float) -> list[RankExit]:
    """Unpack a body of ``pack_exits`` received at monotonic ``now``. Raises ValueError for any other body."""
    if len(body) % _EXIT.size:
        raise ValueError("no exits")
    return [
        RankExit(
            *(rank, node, pid, now - age * 0.001, code if flags & 1 else None),
            *(bool(flags & 2), bool(flags & 4), bool(flags & 8), bool(flags & 16), bool(flags & 32)),
            None if step < 0 else step,
        )
        for rank, pid, age, code, flags, step in _EXIT.iter_unpack(body)
    ]


def chunks(text: bytes, room: int = LARGEST - 128, most: int = 200) -> list[bytes]:
    """Cut a text into pieces, each with its place; at most ``most`` of them."""
    pieces = [text[at : at + room] for at in range(0, len(text), room)][:most] or [b""]
    return [_CHUNK.pack(index, len(pieces)) + piece for index, piece in enumerate(pieces)]


def read_chunk(body: bytes) -> tuple[int, int, bytes]:
    """Return the piece, its place, and how many there are. Raises ValueError when it is no piece."""
    if len(body) < _CHUNK.size:
        raise ValueError("no piece of a text")
    index, count = _CHUNK.unpack_from(body)
    if index >= count:
        raise ValueError("no piece of a text")
    return index, count, body[_CHUNK.size :]


def _ms(seconds: float) -> int:
    return max(0, min(_LIMIT, int(seconds * 1000)))


# UDP sockets for IPv4 and IPv6 where the host has both, and the addresses of a name.

Address = tuple[Any, ...]  # as sockets take it

_BUFFER = 8 << 20  # bytes wanted for what comes in while we are busy; the kernel gives what it allows


def udp(port: int = 0) -> socket.socket:
    """Return a socket on all addresses of this host that never blocks. Raises OSError."""
    try:
        one = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        one.bind(("::", port))
    except OSError:  # no IPv6 here
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        one.bind(("0.0.0.0", port))
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    except OSError:
        pass
    return one


def resolve(sock: socket.socket, hosts: Iterable[str], port: int) -> list[Address]:
    """Return all addresses of ``hosts`` for ``sock``, each once, in order. Unknown names are left out."""
    found: dict[Address, None] = {}
    flags = socket.AI_V4MAPPED | socket.AI_ALL if sock.family == socket.AF_INET6 else 0
    for host in hosts:
        try:
            told = socket.getaddrinfo(host, port, sock.family, socket.SOCK_DGRAM, 0, flags)
        except (OSError, UnicodeError):
            continue
        for *_, address in told:
            found[address] = None
    return list(found)


def send_datagram(sock: socket.socket, data: bytes, to: Address) -> bool:
    """Hand a datagram to the kernel; one that it does not accept is lost, as any datagram may be."""
    try:
        sock.sendto(data, to)
    except OSError:
        return False
    return True
