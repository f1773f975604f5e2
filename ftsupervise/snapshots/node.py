"""The agent's part of the memory tier: it starts the exchange where snapshots appear, passes words on, and answers questions.

    snapshots           ``HeldSnapshot``: what this node holds
    snapshots-begin     ``Begin``: give up all that is newer, fetch some ranks, and compare the others with their digest
    snapshots-keep      ``Keep``: write what is held of one snapshot onto the disk

A question is its verb and, where it has one, a record as JSON; both of these are answered by a ``Done``.
The questions are answered by a process of their own (``rpc.py``), which may take its time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.host.in_time import all_at_once
from ftsupervise.rundir.records import decode, encode
from ftsupervise.snapshots import room
from ftsupervise.snapshots.choice import HeldSnapshot

if TYPE_CHECKING:
    from ftsupervise.snapshots.slots import SnapshotId

_TRIES = 5  # starts of an exchange that ends by itself
NOT_COPIED = b"{}"  # a report without a port
QUESTION, BEGIN, KEEP = "snapshots", "snapshots-begin", "snapshots-keep"


class Supply(NamedTuple):
    """The source from which the snapshots of some ranks are fetched."""

    ranks: tuple[int, ...]
    host: str
    port: int


class Begin(NamedTuple):
    """Give up all snapshots newer than this one (step -1: all), and have this one of the ranks that begin here."""

    step: int
    attempt: int
    supplies: tuple[Supply, ...] = ()
    here: tuple[int, ...] = ()  # ranks that begin from the snapshots of this node

    def question(self) -> str:
        return f"{BEGIN} {_json(self)}"


class Keep(NamedTuple):
    """Write the snapshots of ``ranks`` into ``folder``."""

    step: int
    attempt: int
    ranks: tuple[int, ...]
    folder: str  # absolute

    def question(self) -> str:
        return f"{KEEP} {_json(self)}"


class Done(NamedTuple):
    """What a node says that was to begin from a snapshot, or to keep one."""

    problem: str  # why it was not done; "" if it was
    damaged: tuple[int, ...] = ()  # ranks whose snapshot it gave up for that
    unverified: tuple[int, ...] = ()  # ranks whose snapshot has no digest that could be compared: done all the same


NO_ANSWER = Done("no answer")


def read_done(text: str) -> Done:
    """Parse an answer; one that makes no sense is a problem."""
    try:
        return decode(Done, json.loads(text))
    except ValueError:
        return Done(text[:200] or "an empty answer")


def _json(record: object) -> str:
    return json.dumps(encode(record, sparse=True), separators=(",", ":"))


class SnapshotRelay:
    """Passes orders and reports on; ``say`` sends a report to the supervisor. Where there is no folder nothing happens."""

    def __init__(
        self,
        folder: str,
        node: str,
        key: bytes,
        share: float,
        poll: select.poll,
        say: Callable[[bytes], object],
        at_once: bool = False,
    ) -> None:
        self.fd = -1
        self._folder, self._node, self._key, self._share = folder, node, key, share
        self._poll, self._say, self._at_once = poll, say, at_once
        self._talk: socket.socket | None = None
        self._pid = 0
        self._tries = 0
        self._last = b""  # order
        self._held = room.make(folder, node) if folder else None
        if folder:
            room.remove_leftovers()

    @property
    def place(self) -> str:
        return room.node_folder(self._folder, self._node) if self._folder else ""

    def has_any(self) -> bool:
        """Return whether there are snapshots on this node."""
        return self._held is not None and bool(room.ranks_in(self.place))

    def beat(self) -> None:
        """Once the ranks here make snapshots, start the exchange, or say that there are some where nothing is copied."""
        if self._talk is not None or self._held is None or not room.ranks_in(self.place):
            return
        if self._share > 0:
            self._start()
        else:
            self._say(NOT_COPIED)

    def heard(self, fd: int) -> bool:
        """Handle a ready descriptor; False when it is not ours."""
        if self._talk is None or fd != self.fd:
            return False
        try:
            while raw := self._talk.recv(4096):
                self._say(raw)
            self._stop()  # it has ended
        except BlockingIOError:
            pass
        except OSError:
            self._stop()
        return True

    def order(self, body: bytes) -> None:
        """Pass an order of the supervisor on. It starts the exchange also on a node without ranks."""
        self._last = body
        if self._talk is None:
            self._start()
        elif self._talk is not None:
            self._pass_on()

    def answer(self, question: str, node: str) -> str:
        """Answer a question, in the process that answers."""
        verb, _, rest = question.partition(" ")
        if verb == QUESTION:
            return _json(held_in(self.place, node))
        try:
            if verb == KEEP:
                return _json(keep(self.place, decode(Keep, json.loads(rest))))
            return _json(begin_from(self.place, decode(Begin, json.loads(rest)), self._key))
        except ValueError as error:
            return _json(Done(f"no such question: {error}"))

    def close(self, *, keep: bool) -> None:
        """End the exchange. ``keep``: another agent will follow in this job."""
        self._stop()
        if self._held is not None:
            if not keep:
                room.remove(self._folder, self._node)
            os.close(self._held)
            self._held = None
            if not keep:  # left on this host by a node of a test cluster that was lost
                room.remove_leftovers()

    def _start(self) -> None:
        if self._held is None or self._share <= 0 or self._tries >= _TRIES:
            return
        self._tries += 1
        from ftsupervise.snapshots.exchange import start_exchange  # here: most agents have no snapshots

        try:
            self._pid, self._talk = start_exchange(self._folder, self._node, self._key, self._share, self._at_once)
        except OSError:
            return
        self.fd = self._talk.fileno()
        self._poll.register(self.fd, select.POLLIN)
        self._pass_on()

    def _pass_on(self) -> None:
        if self._talk is not None and self._last:
            try:
                self._talk.send(self._last)
            except OSError:  # full or gone: it is told again with its next report
                return

    def _stop(self) -> None:
        if self._talk is None:
            return
        self._poll.unregister(self.fd)
        self._talk.close()
        self._talk, self.fd = None, -1
        try:
            os.kill(self._pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def held_in(place: str, node: str) -> list[HeldSnapshot]:
    """Return the whole snapshots in ``place``."""
    from ftsupervise.snapshots.slots import open_slots

    found = []
    for _, path in sorted(room.ranks_in(place).items()):
        try:
            with open_slots(path) as file:
                found += [HeldSnapshot(file.rank, one.step, one.attempt, file.world, node) for one in file.held()]
        except (OSError, ValueError):  # of another kind, or just removed: it holds nothing
            continue
    return found


def read_held(text: str, node: str) -> list[HeldSnapshot]:
    """Parse the answer of ``node`` on what it holds; nothing where it makes no sense."""
    try:
        return [one._replace(node=node) for one in decode(tuple[HeldSnapshot, ...], json.loads(text))]
    except ValueError:
        return []


def unverified_words(ranks: Collection[int]) -> str:
    """Return a clause on those ranks; "" for none."""
    if not ranks:
        return ""
    few = ", ".join(map(str, sorted(ranks)[:5])) + (f" and {len(ranks) - 5} more" if len(ranks) > 5 else "")
    return f"the snapshot of rank {few} is not verified: it has no digest that could be compared"


def begin_from(place: str, asked: Begin, key: bytes) -> Done:
    """Prepare the given generation.

    It is done when nothing newer is left, all that was to be fetched is there, and the snapshots here are those that were
    copied.
    """
    from ftsupervise.snapshots.slots import SnapshotId, open_slots

    wanted = SnapshotId(asked.step, asked.attempt) if asked.step >= 0 else None
    problems = _fetch_all(place, asked.supplies, wanted, key) if wanted is not None else []
    for rank, path in room.ranks_in(place).items():
        try:
            with open_slots(path, write=True) as file:
                file.invalidate_newer(wanted)
        except (OSError, ValueError) as error:
            problems.append(f"rank {rank}: {error}")
    if wanted is None or problems:
        return Done("; ".join(problems))
    unknown = set[int]()
    damaged = give_up_damaged(place, asked.here, wanted, unknown)
    if damaged:
        return Done("damaged", tuple(damaged))
    fetched = [rank for one in asked.supplies for rank in one.ranks]
    unknown |= {rank for rank in fetched if _has_no_digest(place, rank, wanted)}
    return Done("", unverified=tuple(sorted(unknown)))


def _has_no_digest(place: str, rank: int, wanted: SnapshotId) -> bool:
    """Return whether what was fetched for a rank came without one: it was compared on the way where it has one."""
    from ftsupervise.snapshots.slots import open_slots

    try:
        with open_slots(room.rank_file(place, rank)) as file:
            slot = file.held().get(wanted)
            header = file.valid(slot) if slot is not None else None
            return header is not None and not header.algorithm
    except (OSError, ValueError):
        return False


def give_up_damaged(place: str, ranks: Iterable[int], wanted: SnapshotId, unknown: set[int] | None = None) -> list[int]:
    """Compare that snapshot of each of ``ranks`` with its digest, all at the same time, and give up the damaged ones.
    ``unknown``: those that have none to compare are added there."""
    from ftsupervise.snapshots.slots import Compared, compare, open_slots

    damaged: list[int] = []

    def look(rank: int) -> None:
        try:
            with open_slots(room.rank_file(place, rank), write=True) as file:
                slot = file.held().get(wanted)
                header = file.valid(slot) if slot is not None else None
                found = compare(file, slot, header) if slot is not None and header is not None else Compared.DAMAGED
                if found is Compared.UNKNOWN and unknown is not None:
                    unknown.add(rank)
                if found is not Compared.DAMAGED:
                    return
                if slot is not None:
                    file.begin(slot)
        except (OSError, ValueError):  # it cannot be read: no rank can begin from it
            pass
        damaged.append(rank)

    all_at_once(look, ranks)
    return sorted(damaged)


def keep(place: str, asked: Keep) -> Done:
    """Write snapshots from this node's memory onto the disk: done when all of them are durable."""
    from ftsupervise.snapshots.kept import write_rank
    from ftsupervise.snapshots.slots import SnapshotId

    if asked.step < 0 or not asked.folder.startswith("/"):
        return Done("no such question")
    problems: list[str] = []
    unknown: list[int] = []

    def write(rank: int) -> None:
        try:
            if not write_rank(place, asked.folder, rank, SnapshotId(asked.step, asked.attempt)):
                unknown.append(rank)
        except (OSError, ValueError) as error:
            problems.append(f"rank {rank}: {error}")

    all_at_once(write, asked.ranks)
    return Done("; ".join(sorted(problems)[:5]), unverified=() if problems else tuple(sorted(unknown)))


def _fetch_all(place: str, supplies: Sequence[Supply], wanted: SnapshotId, key: bytes) -> list[str]:
    """Fetch all at the same time: the restart waits for it."""
    from ftsupervise.snapshots.exchange import NotTaken, fetch

    problems: list[str] = []

    def bring(one: tuple[int, Supply]) -> None:
        rank, supply = one
        try:
            fetch(place, rank, wanted, supply.host, supply.port, key)
        except (NotTaken, OSError, ValueError) as error:
            problems.append(f"rank {rank}: {error}")

    all_at_once(bring, [(rank, one) for one in supplies for rank in one.ranks])
    return problems
