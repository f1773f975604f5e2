"""The agent's part of the memory tier: it starts the exchange where snapshots appear, passes words on, and answers questions.

    snapshots                    what this node holds: "RANK STEP ATTEMPT WORLD" for each
    snapshots-begin STEP/ATTEMPT RANK,HOST,PORT… =RANK…
                                 invalidate all that is newer ("-": everything), fetch those ranks, and compare the others
                                 with their digest; "done", or "damaged RANK…" for those that it gave up, or why not;
                                 "unverified RANK…": done, and these have no digest that can be taken here

    snapshots-keep STEP/ATTEMPT RANK,… DIR
                                 write what is held of that one into DIR, on the disk; "done", "unverified RANK…", or why not

The questions are answered by a process of their own (``rpc.py``), which may take its time.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.host.in_time import all_at_once
from ftsupervise.rundir.records import as_count
from ftsupervise.snapshots import room
from ftsupervise.snapshots.choice import HeldSnapshot

if TYPE_CHECKING:
    from ftsupervise.snapshots.slots import SnapshotId

_TRIES = 5  # starts of an exchange that ends by itself
NOT_COPIED = b"{}"  # a report without a port
QUESTION, BEGIN, KEEP = "snapshots", "snapshots-begin", "snapshots-keep"
DONE, DAMAGED, UNVERIFIED = "done", "damaged", "unverified"


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
            return "\n".join(" ".join(map(str, one[:4])) for one in held_in(self.place, node))
        return keep(self.place, rest) if verb == KEEP else begin_from(self.place, rest, self._key)

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
    """Parse an answer to the question; lines that make no sense are left out."""
    found = []
    for line in text.splitlines():
        numbers = [as_count(word) for word in line.split()]
        if len(numbers) == 4 and None not in numbers:
            rank, step, attempt, world = (number or 0 for number in numbers)
            found.append(HeldSnapshot(rank, step, attempt, world, node))
    return found


class Supply(NamedTuple):
    """The source from which a rank's snapshot is fetched."""

    rank: int
    host: str
    port: int


def begin_question(step: int, attempt: int, supplies: Iterable[Supply] = (), here: Iterable[int] = ()) -> str:
    """Return the question that invalidates all newer than ``step`` (-1: all) and fetches ``supplies``.

    ``here``: ranks that begin from the snapshots of this node.
    """
    until = f"{step}/{attempt}" if step >= 0 else "-"
    fetched = [f"{one.rank},{one.host},{one.port}" for one in supplies]
    return " ".join([BEGIN, until, *fetched, *(f"={rank}" for rank in here)])


def read_damaged(answer: str) -> frozenset[int]:
    """Return the ranks whose snapshot an answer calls damaged."""
    return _ranks_behind(DAMAGED, answer)


def read_unverified(answer: str) -> frozenset[int]:
    """Return the ranks whose snapshot could not be compared with a digest."""
    return _ranks_behind(UNVERIFIED, answer)


def is_done(answer: str) -> bool:
    """Return whether a node has done what it was asked."""
    return answer == DONE or bool(read_unverified(answer))


def unverified_words(ranks: Collection[int]) -> str:
    """Return a clause on those ranks; "" for none."""
    if not ranks:
        return ""
    few = ", ".join(map(str, sorted(ranks)[:5])) + (f" and {len(ranks) - 5} more" if len(ranks) > 5 else "")
    return f"the snapshot of rank {few} is not verified: it has no digest that could be compared"


def _ranks_behind(wanted: str, answer: str) -> frozenset[int]:
    word, *ranks = answer.split()[:1_000_000] or [""]
    numbers = [as_count(one) for one in ranks]
    return frozenset(one for one in numbers if one is not None) if word == wanted else frozenset()


def begin_from(place: str, rest: str, key: bytes) -> str:
    """Prepare the given generation and return "done", or why not.

    "done" when nothing newer is left, all that was to be fetched is there, and the snapshots here are those that were
    copied.
    """
    from ftsupervise.snapshots.slots import SnapshotId, open_slots

    until, *words = rest.split() or ["-"]
    step, _, attempt = until.partition("/")
    numbers = as_count(step), as_count(attempt)
    wanted = SnapshotId(numbers[0], numbers[1]) if numbers[0] is not None and numbers[1] is not None else None
    supplies, here = [], []
    for word in words:
        if word.startswith("="):
            here += [number for number in (as_count(word[1:]),) if number is not None]
            continue
        rank, host, port = (*word.split(","), "", "")[:3]
        found = as_count(rank), as_count(port)
        if found[0] is None or found[1] is None or wanted is None:
            return f"no such question: {rest}"
        supplies.append(Supply(found[0], host, found[1]))
    problems = _fetch_all(place, supplies, wanted, key) if wanted is not None else []
    for rank_number, path in room.ranks_in(place).items():
        try:
            with open_slots(path, write=True) as file:
                file.invalidate_newer(wanted)
        except (OSError, ValueError) as error:
            problems.append(f"rank {rank_number}: {error}")
    damaged, unknown = list[int](), set[int]()
    if wanted is not None and not problems:
        damaged = give_up_damaged(place, here, wanted, unknown)
        unknown |= {one.rank for one in supplies if _has_no_digest(place, one.rank, wanted)}
    if damaged or (unknown and not problems):
        return " ".join((DAMAGED if damaged else UNVERIFIED, *map(str, damaged or sorted(unknown))))
    return "; ".join(problems) or DONE


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


def keep_question(step: int, attempt: int, ranks: Iterable[int], folder: str) -> str:
    """Return the question that has a node write its snapshots of ``ranks`` into ``folder``."""
    return f"{KEEP} {step}/{attempt} {','.join(map(str, ranks))} {folder}"


def keep(place: str, rest: str) -> str:
    """Write snapshots from this node's memory onto the disk; "done" when all of them are durable, else why not."""
    from ftsupervise.snapshots.kept import write_rank
    from ftsupervise.snapshots.slots import SnapshotId

    wanted, _, rest = rest.partition(" ")
    ranks, _, folder = rest.partition(" ")
    step, _, attempt = wanted.partition("/")
    numbers = [as_count(word) for word in (step, attempt, *ranks.split(","))]
    if None in numbers or not folder.startswith("/"):
        return "no such question"
    first, second, *of = [number or 0 for number in numbers]
    problems: list[str] = []
    unknown: list[int] = []

    def write(rank: int) -> None:
        try:
            if not write_rank(place, folder, rank, SnapshotId(first, second)):
                unknown.append(rank)
        except (OSError, ValueError) as error:
            problems.append(f"rank {rank}: {error}")

    all_at_once(write, of)
    done = " ".join((UNVERIFIED, *map(str, sorted(unknown)))) if unknown else DONE
    return "; ".join(sorted(problems)[:5]) or done


def _fetch_all(place: str, supplies: Sequence[Supply], wanted: object, key: bytes) -> list[str]:
    """Fetch all at the same time: the restart waits for it."""
    from ftsupervise.snapshots.exchange import NotTaken, fetch
    from ftsupervise.snapshots.slots import SnapshotId

    problems: list[str] = []

    def bring(one: Supply) -> None:
        assert isinstance(wanted, SnapshotId)
        try:
            fetch(place, one.rank, wanted, one.host, one.port, key)
        except (NotTaken, OSError, ValueError) as error:
            problems.append(f"rank {one.rank}: {error}")

    all_at_once(bring, supplies)
    return problems
