"""How every rank is, as the job ring knows it: from datagrams of the nodes' agents, from its own eyes, or from beat files.

``newest()`` is asked by who looks for hangs, ``deaths()`` by who waits for the command. A rank that nobody has told of is not
there: unknown, never dead. A datagram that is lost makes what we know older, nothing else.

At 12,500 nodes a datagram comes every 80 us, so that taking one is: check the seal, compare three numbers, keep the bytes.
They are read when somebody asks.
"""

from __future__ import annotations

import gc
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import NamedTuple

from ftsupervise.model import Cause, ended
from ftsupervise.ranks import protocol
from ftsupervise.ranks.protocol import Datagram, ExitRecord, Seal
from ftsupervise.ranks.udp import Address
from ftsupervise.truth import RankState

_SLICE = 32  # nodes that are read between two looks at whether datagrams wait
_LAST_WORD = 1 << 62  # above the number of any question
_ACKS = 10  # beats between two words to an agent


class RankExit(NamedTuple):
    """A rank's process that has ended, or whose interpreter ends for a failure, and what is known of why. ``at``: monotonic,
    when its node noticed."""

    rank: int
    node: str
    pid: int
    at: float
    code: int | None
    leaving: bool
    failed: bool
    final: bool

    @property
    def crash(self) -> bool:
        """It did not leave in order, and nobody on its node starts it again. What cannot be told is no crash."""
        in_order = self.code == 0 or (self.leaving and not self.failed)  # what ends with 0 has caught what it raised
        return self.final and not in_order

    def cause(self) -> Cause:
        return ended(self.code, self.node, str(self.rank))


def death_of(gone: ExitRecord, node: str, at: float | None = None) -> RankExit:
    """As the ring knows it: ``at`` is when its node noticed, now if that is not known."""
    when = monotonic() if at is None else at
    return RankExit(gone.rank, node, gone.pid, when, gone.code, gone.leaving, gone.failed, gone.final)


class Node:
    """What one node said last."""

    __slots__ = ("acked", "address", "name", "numbers", "parts", "pulses", "raw", "seen")

    def __init__(self, name: str) -> None:
        self.name = name
        self.numbers: dict[int, int] = {}  # part -> the newest number of it
        self.raw: dict[int, tuple[bytes, float]] = {}  # part -> body, when it came
        self.parts = 1
        self.pulses: list[RankState] | None = None  # of ``raw``, when it has been read
        self.address: Address | None = None
        self.seen = 0.0
        self.acked = float("-inf")


_TOGETHER = 0.3  # seconds


def who_began(crashes: Sequence[RankExit]) -> RankExit | None:
    """Of the ranks that have crashed so far the one that the others followed, in ``crashes`` as they were told of. Pure.

    The first of them, but who has raised may have done so for another's end that is heard of a moment later, and who was told
    to leave (SIGTERM) has begun nothing. Who dies long after them is a victim: of srun's SIGKILL, or of NCCL's watchdog.
    """
    first = min((one.at for one in crashes), default=0.0)
    together = [one for one in crashes if one.at <= first + _TOGETHER]
    return min(together, key=lambda one: (one.code == -signal.SIGTERM, one.failed), default=None)


class RankTable:
    """All ranks of the current attempt. ``take`` and ``put`` belong to the listening thread, the rest to anybody."""

    def __init__(self, key: bytes, every: float = 1.0, nudge: Callable[[], None] = lambda: None) -> None:
        self.attempt = 0
        self.generation = 0
        self.every = every
        self.dropped: Counter[str] = Counter()  # why -> how many datagrams
        self.taken = 0
        self.draining = False  # the listener takes what has come in
        self.nodes: dict[bytes, Node] = {}
        self.replies: dict[int, dict[int, bytes]] = {}  # number of the question -> pieces; only what is waited for
        self._seal = Seal(key)
        self._nudge = nudge
        self.local: Sequence[RankState] = ()  # of our own node, when we look ourselves
        self._slow: Sequence[RankState] = ()
        self._dead: dict[tuple[int, int], RankExit] = {}
        self._news: deque[RankExit] = deque()
        self.on_reply: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------------------------------------------- asking

    def newest(self) -> list[RankState]:
        """Every rank that we have heard of in this attempt, in no order. What each node said last, however old (``seen``)."""
        found: list[RankState] = []
        collects = gc.isenabled()
        gc.disable()  # 100,000 new tuples that hold no cycle: looking for one would cost a third more
        try:
            for count, node in enumerate(list(self.nodes.values())):
                pulses = node.pulses
                found.extend(self._read(node) if pulses is None else pulses)
                while (
                    not count % _SLICE and self.draining
                ):  # each datagram lets go of the interpreter: leave it alone then
                    time.sleep(0.0005)
        finally:
            if collects:
                gc.enable()
        found.extend(self.local)
        if self._slow:
            known = {one.rank for one in found}
            found.extend(one for one in self._slow if one.rank not in known)
        if self._dead:
            dead = self._dead
            found = [one._replace(state="X") if (one.rank, one.pid) in dead else one for one in found]
        return found

    def deaths(self) -> list[RankExit]:
        """Processes of ranks that have ended since the last call."""
        news = []
        while self._news:
            news.append(self._news.popleft())
        return news

    @property
    def failed(self) -> frozenset[int]:
        """The ranks that have told of a failure of their own."""
        return frozenset(one.rank for one in list(self._dead.values()) if one.failed)

    def silent(self, nodes: Iterable[str], seconds: float) -> list[str]:
        """Those of ``nodes`` whose agent has not been heard for ``seconds``, or never."""
        since = monotonic() - seconds
        return [name for name in nodes if (one := self.nodes.get(name.encode())) is None or one.seen < since]

    def without_ranks(self) -> bool:
        """Is there a node that tells of none?"""
        return any(all(len(body) <= 1 for body, _ in node.raw.values()) for node in list(self.nodes.values()))

    def begin(self, attempt: int) -> None:
        """From here on only this attempt counts."""
        self.attempt = attempt
        self.local = self._slow = ()
        self._dead.clear()
        self._news.clear()
        for node in self.nodes.values():
            node.raw, node.pulses = {}, None

    def restart(self, generation: int) -> None:
        """From here on only agents of this start count."""
        self.generation = generation
        self.nodes = {}

    # ------------------------------------------------------------------------------------------------------- taking

    def take(self, data: bytes, sender: Address, now: float) -> bytes | None:
        """A datagram that came in at monotonic ``now``; the answer to send back, if there is one."""
        message = self._seal.open(data)
        if message is None:
            self.dropped["forged or damaged"] += 1
            return None
        if message.kind not in protocol.TO_RING or message.generation > self.generation:
            self.dropped["not for us"] += 1
            return None
        if message.generation < self.generation:  # their srun died, and they were started again
            self.dropped["of an earlier start"] += 1
            return self._seal.pack(message._replace(kind=protocol.BYE, number=_LAST_WORD, body=b""))
        node = self.nodes.get(message.node)
        if node is None:
            node = self.nodes[message.node] = Node(message.node.decode("utf-8", "replace"))
        if message.kind == protocol.REPLY:
            self._take_reply(message)
            return None
        if message.number <= node.numbers.get(message.part, 0):
            if message.kind != protocol.DEATH:  # two deaths may pass each other; each counts once anyway
                self.dropped["old"] += 1
                return None
        else:
            node.numbers[message.part] = message.number
            node.address, node.seen = sender, now
        self.taken += 1
        if message.kind == protocol.DEATH:
            return self._take_deaths(message, node, now)
        if message.kind == protocol.PULSE:
            if message.attempt == self.attempt:
                node.raw[message.part] = (message.body, now)
                node.parts = message.parts
                node.pulses = None
            elif message.attempt:
                self.dropped["of another attempt"] += 1
        if now < node.acked + _ACKS * self.every:
            return None
        node.acked = now
        return self.pack(protocol.ACK, message.number, message.node, b"")

    def put(self, pulses: Sequence[RankState], deaths: Iterable[ExitRecord], node: str) -> None:
        """What our own eyes saw."""
        self.local = pulses
        now = monotonic()
        for one in deaths:
            self._tell(death_of(one, node, now - one.age))

    def put_slow(self, pulses: Sequence[RankState]) -> None:
        """What the run directory says, for ranks that nobody else tells of."""
        self._slow = pulses

    def pack(self, kind: int, number: int, node: bytes, body: bytes) -> bytes:
        return self._seal.pack(Datagram(kind, 0, 1, self.generation, self.attempt, number, node, body))

    def _take_deaths(self, message: Datagram, node: Node, now: float) -> bytes | None:
        try:
            told = list(protocol.read_gone(message.body))
        except ValueError:
            self.dropped["nonsense"] += 1
            return None
        if message.attempt == self.attempt:
            for one in told:
                self._tell(death_of(one, node.name, now - one.age))
        node.acked = now
        return self.pack(protocol.ACK, message.number, message.node, message.body)

    def _tell(self, death: RankExit) -> None:
        key = (death.rank, death.pid)
        known = self._dead.get(key)
        if known is not None and known.final >= death.final:
            return
        self._dead[key] = death
        self._news.append(death)
        self._nudge()

    def _take_reply(self, message: Datagram) -> None:
        pieces = self.replies.get(message.number)
        if pieces is None:
            self.dropped["not for us"] += 1
            return
        try:
            index, count, piece = protocol.read_chunk(message.body)
        except ValueError:
            self.dropped["nonsense"] += 1
            return
        pieces[index] = piece
        pieces[-1] = str(count).encode()
        if len(pieces) > count:
            self.on_reply()

    def _read(self, node: Node) -> list[RankState]:
        number = node.numbers.copy()
        pulses: list[RankState] = []
        for part, (body, at) in sorted(node.raw.items()):
            if part >= node.parts:
                continue
            try:
                pulses.extend(protocol.read_pulses(body, node.name, at))
            except ValueError:
                self.dropped["nonsense"] += 1
        if node.numbers == number:  # nothing came meanwhile
            node.pulses = pulses
        return pulses
