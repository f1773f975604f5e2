"""The state of every rank as the supervisor knows it: from the node agents, its own observation, or beat files.

The hang monitor calls ``newest()``, the wait for the command ``deaths()``. A rank without any report is missing here: unknown,
never dead. A lost datagram makes our knowledge older, nothing else.

At 12,500 nodes a datagram comes every 80 us, so that taking one is: check the seal, compare three numbers, keep the bytes.
They are unpacked when they are needed.
"""

from __future__ import annotations

import gc
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import NamedTuple

from ftsupervise.ranks import protocol
from ftsupervise.ranks.life import ProcessesSeen, together
from ftsupervise.ranks.life import read as read_life
from ftsupervise.ranks.protocol import Address, Datagram, RankExit, Seal
from ftsupervise.ranks.tally import merged
from ftsupervise.ranks.tally import read as read_tally
from ftsupervise.truth import RankState, Tally

_SLICE = 32  # nodes unpacked between two checks for waiting datagrams
_LAST_WORD = 1 << 62  # above the number of any question
_FRESH = 15  # beats within which a node has told what its processes do
_ACKS = 10  # beats between two messages to an agent


class RanksSeen(NamedTuple):
    """Ranks that no agent reports, and the counts of their guards."""

    states: Sequence[RankState] = ()
    tally: Tally = Tally()


_NONE = RanksSeen()


class Node:
    """The last report of one node."""

    __slots__ = ("acked", "address", "life", "name", "numbers", "parts", "raw", "seen", "states", "tally")

    def __init__(self, name: str) -> None:
        self.name = name
        self.numbers: dict[int, int] = {}  # part -> the newest number of it
        self.raw: dict[int, tuple[bytes, float]] = {}  # part -> body, when it came
        self.parts = 1
        self.states: list[RankState] | None = None  # of ``raw``, when it has been read
        self.tally = _NONE.tally
        self.life: tuple[ProcessesSeen, float] | None = None  # of processes without a page, and when it came
        self.address: Address | None = None
        self.seen = 0.0
        self.acked = float("-inf")


class Reply:
    """The pieces of an answer that have arrived, in any order."""

    def __init__(self) -> None:
        self._pieces: dict[int, bytes] = {}
        self._count = -1

    def add(self, index: int, count: int, piece: bytes) -> None:
        self._pieces[index], self._count = piece, count

    @property
    def whole(self) -> bool:
        return len(self._pieces) == self._count

    @property
    def text(self) -> str:
        return b"".join(self._pieces[index] for index in sorted(self._pieces)).decode("utf-8", "replace")


_TOGETHER = 0.3  # seconds


def first_failure(crashes: Sequence[RankExit]) -> RankExit | None:
    """Return the rank whose crash caused the others, from ``crashes`` in the order of their reports. Pure.

    It is the first of them, with two exceptions: a rank may raise because of another's end that is reported a moment
    later, and a rank that got SIGTERM is no cause. A rank that dies long after is a victim of srun's SIGKILL or NCCL's
    watchdog.
    """
    first = min((one.at for one in crashes), default=0.0)
    together = [one for one in crashes if one.at <= first + _TOGETHER]
    return min(together, key=lambda one: (one.code == -signal.SIGTERM, one.failed), default=None)


_SILENT = 10.0  # seconds without a report


def in_the_group(states: Sequence[RankState], dead: Sequence[RankExit]) -> list[RankState]:
    """Return ``states`` without the ranks that the others have gone on without. Pure.

    torchrun starts all ranks anew and may do so with fewer. Left out are those that died, or were last heard of, before
    other ranks that died had successors.
    """
    living = {one.rank for one in states if one.state not in ("X", "Z")}
    again = max((one.at for one in dead if one.rank in living), default=None)
    if again is None:
        return list(states)
    newest = max(one.seen for one in states)
    ended = {(one.rank, one.pid): one.at for one in dead}

    def left(one: RankState) -> bool:
        if one.state == "X":
            return ended.get((one.rank, one.pid), again) <= again
        return one.seen <= again and newest - one.seen > _SILENT

    return [one for one in states if not left(one)]


class RankTable:
    """All ranks of the current attempt. Only the listening thread calls ``take`` and ``put``; any thread may call the rest."""

    def __init__(self, key: bytes, every: float = 1.0, wake: Callable[[], None] = lambda: None) -> None:
        self.attempt = 0
        self.generation = 0
        self.every = every
        self.dropped: Counter[str] = Counter()  # why -> how many datagrams
        self.taken = 0
        self.draining = False  # the listener receives waiting datagrams
        self.nodes: dict[bytes, Node] = {}
        self.replies: dict[int, Reply] = {}  # number of the question -> its answer, while it is waited for
        self._seal = Seal(key)
        self._wake = wake
        self._own = self._slow = _NONE  # of our own node, when we observe it ourselves; of the run directory
        self._dead: dict[tuple[int, int], RankExit] = {}
        self._news: deque[RankExit] = deque()
        # kind of a datagram -> its handler
        self.on: dict[int, Callable[[Node, bytes], None]] = {}

    # ------------------------------------------------------------------------------------------------------- asking

    def newest(self) -> list[RankState]:
        """Return the last reported state of every rank of this attempt, however old (``seen``), in no order."""
        found: list[RankState] = []
        collects = gc.isenabled()
        gc.disable()  # 100,000 new tuples that hold no cycle: looking for one would cost a third more
        try:
            for count, node in enumerate(list(self.nodes.values())):
                states = node.states
                found.extend(self._read(node) if states is None else states)
                while (
                    not count % _SLICE and self.draining
                ):  # each datagram lets go of the interpreter: leave it alone then
                    time.sleep(0.0005)
        finally:
            if collects:
                gc.enable()
        found.extend(self.local)
        if self._slow.states:
            known = {one.rank for one in found}
            found.extend(one for one in self._slow.states if one.rank not in known)
        if self._dead:
            dead = self._dead
            found = [one._replace(state="X") if (one.rank, one.pid) in dead else one for one in found]
            found = in_the_group(found, list(dead.values()))
        return found

    def tally(self) -> Tally:
        """Return the counts of the guards of all ranks of this attempt, as last reported."""
        nodes = [node.tally for node in list(self.nodes.values())]
        return merged([*nodes, self._own.tally, self._slow.tally])

    @property
    def local(self) -> Sequence[RankState]:
        """Return the states of our own node's ranks, when we observe it ourselves."""
        return self._own.states

    def life(self, nodes: Sequence[str]) -> tuple[str, ProcessesSeen] | None:
        """Return what the processes without a page do on all of ``nodes``, and the node of the one that tells; None where that
        is not known of one of them."""
        since = monotonic() - _FRESH * max(self.every, 1.0)
        found = [(name, one.life) for name in nodes if (one := self.nodes.get(name.encode())) is not None]
        known = [(name, seen[0]) for name, seen in found if seen is not None and seen[1] >= since]
        return together(known) if len(known) == len(nodes) else None

    def deaths(self) -> list[RankExit]:
        """Return processes of ranks that have ended since the last call."""
        news = []
        while self._news:
            news.append(self._news.popleft())
        return news

    @property
    def exits(self) -> list[RankExit]:
        """Return the processes of ranks that have ended in this attempt."""
        return list(self._dead.values())

    @property
    def failed(self) -> frozenset[int]:
        """Return the ranks that reported a failure of their own."""
        return frozenset(one.rank for one in list(self._dead.values()) if one.failed)

    def silent(self, nodes: Iterable[str], seconds: float) -> list[str]:
        """Return those of ``nodes`` whose agent has not reported for ``seconds``, or never."""
        since = monotonic() - seconds
        return [name for name in nodes if (one := self.nodes.get(name.encode())) is None or one.seen < since]

    def without_ranks(self) -> bool:
        """Return whether there is a node that reports no rank."""
        return any(all(len(body) <= 1 for body, _ in node.raw.values()) for node in list(self.nodes.values()))

    def begin(self, attempt: int) -> None:
        """Count only this attempt from here on."""
        self.attempt = attempt
        self._own = self._slow = _NONE
        self._dead.clear()
        self._news.clear()
        for node in self.nodes.values():
            node.raw, node.states, node.tally, node.life = {}, None, _NONE.tally, None

    def restart(self, generation: int) -> None:
        """Count only agents of this start from here on."""
        self.generation = generation
        self.nodes = {}

    # ------------------------------------------------------------------------------------------------------- taking

    def take(self, data: bytes, sender: Address, now: float) -> bytes | None:
        """Receive a datagram at monotonic ``now``; returns the answer to send back, if there is one."""
        message = self._seal.open(data)
        if message is None:
            self.dropped["forged or damaged"] += 1
            return None
        if message.kind not in protocol.TO_SUPERVISOR or message.generation > self.generation:
            self.dropped["not for us"] += 1
            return None
        if message.generation < self.generation:  # their srun died, and they were started again
            self.dropped["of an earlier start"] += 1
            return self._seal.pack(message._replace(kind=protocol.BYE, number=_LAST_WORD, body=b""))
        node = self.nodes.get(message.node)
        if node is None:
            node = self.nodes[message.node] = Node(message.node.decode("utf-8", "replace"))
        if message.kind == protocol.REPLY:
            self._take_reply(message, node)
            return None
        if message.number <= node.numbers.get(message.part, 0):
            if message.kind != protocol.EXIT:  # two deaths may pass each other; each counts once anyway
                self.dropped["old"] += 1
                return None
        else:
            node.numbers[message.part] = message.number
            node.address, node.seen = sender, now
        self.taken += 1
        if message.kind == protocol.EXIT:
            return self._take_exits(message, node, now)
        if message.kind == protocol.COPIES:
            self._pass_on(message, node)
        if message.kind == protocol.TALLY and message.attempt == self.attempt:
            self._take_tally(message, node, now)
        if message.kind == protocol.LIFE and message.attempt == self.attempt:
            self._take_life(message, node, now)
        if message.kind == protocol.STATES:
            if message.attempt == self.attempt:
                node.raw[message.part] = (message.body, now)
                node.parts = message.parts
                node.states = None
            elif message.attempt:
                self.dropped["of another attempt"] += 1
        if now < node.acked + _ACKS * self.every:
            return None
        node.acked = now
        return self.pack(protocol.ACK, message.number, message.node, b"")

    def put(self, states: Sequence[RankState], exits: Iterable[RankExit], tally: Tally = _NONE.tally) -> None:
        """Store the states that we observed ourselves, and the counts of their guards."""
        self._own = RanksSeen(states, tally)
        for one in exits:
            self._add_exit(one)

    def put_slow(self, states: Sequence[RankState], tally: Tally = _NONE.tally) -> None:
        """Store states from the run directory, for ranks without another report."""
        self._slow = RanksSeen(states, tally)

    def pack(self, kind: int, number: int, node: bytes, body: bytes) -> bytes:
        return self._seal.pack(Datagram(kind, 0, 1, self.generation, self.attempt, number, node, body))

    def _take_exits(self, message: Datagram, node: Node, now: float) -> bytes | None:
        try:
            exits = protocol.read_exits(message.body, node.name, now)
        except ValueError:
            self.dropped["nonsense"] += 1
            return None
        if message.attempt == self.attempt:
            for one in exits:
                self._add_exit(one)
        node.acked = now
        return self.pack(protocol.ACK, message.number, message.node, message.body)

    def _take_tally(self, message: Datagram, node: Node, now: float) -> None:
        try:
            node.tally = read_tally(message.body, now)
        except ValueError:
            self.dropped["nonsense"] += 1

    def _take_life(self, message: Datagram, node: Node, now: float) -> None:
        try:
            node.life = read_life(message.body), now
        except ValueError:
            self.dropped["nonsense"] += 1

    def _add_exit(self, one: RankExit) -> None:
        key = (one.rank, one.pid)
        known = self._dead.get(key)
        if known is not None and known.final >= one.final:
            return
        self._dead[key] = one
        self._news.append(one)
        self._wake()

    def _take_reply(self, message: Datagram, node: Node) -> None:
        reply = self.replies.get(message.number)
        if reply is None:
            self.dropped["not for us"] += 1
            return
        try:
            reply.add(*protocol.read_chunk(message.body))
        except ValueError:
            self.dropped["nonsense"] += 1
            return
        if reply.whole:
            self._pass_on(message, node)

    def _pass_on(self, message: Datagram, node: Node) -> None:
        if (told := self.on.get(message.kind)) is not None:
            told(node, message.body)

    def _read(self, node: Node) -> list[RankState]:
        number = node.numbers.copy()
        states: list[RankState] = []
        for part, (body, at) in sorted(node.raw.items()):
            if part >= node.parts:
                continue
            try:
                states.extend(protocol.read_states(body, node.name, at))
            except ValueError:
                self.dropped["nonsense"] += 1
        if node.numbers == number:  # nothing came meanwhile
            node.states = states
        return states
