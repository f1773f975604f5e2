"""Copy one rank's snapshot from one node's memory to another's, over a ``SnapshotChannel``.

    -> header, room, digest it can take    <- begin, with the digest to take    -> pieces    -> digest    <- taken

Any of them may be {"why": …} instead.

The sender reads a live file: it takes the header before and after, and says "torn" where they differ. The receiver writes into
a slot that is not needed any more, compares the digest that both have taken on the way, sets the header last and only then
says that it has the snapshot. A connection that ends anywhere leaves a slot that holds nothing.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ftsupervise.checkpoints import digest
from ftsupervise.checkpoints.memory_folder import rank_file, ranks_in
from ftsupervise.checkpoints.memory_room import MemoryRoom
from ftsupervise.checkpoints.memory_slots import (
    ALGORITHMS,
    SlotFile,
    SlotHeader,
    SlotRoom,
    SnapshotId,
    create_slots,
    open_slots,
    pack_header,
    parse_header,
)
from ftsupervise.checkpoints.memory_sums import as_bytes
from ftsupervise.ranks.snapshot_wire import PIECE, ChannelBroken, SnapshotChannel
from ftsupervise.rundir.records import as_count

CPU_PER_BYTE = 1.1e-9  # seconds of both ends together: sealed, with the digest
_BURST = 2 * PIECE
_FLOCK = struct.Struct("hhlli")
_RESERVED = 2  # slots of a copy: the one that is kept, and the one that comes


class TokenBucket:
    """Bounds the bytes per second that are sent."""

    def __init__(self, rate: float | None, sleep: Callable[[float], object] = time.sleep) -> None:
        """``rate`` in bytes per second; None: as fast as it goes."""
        self._rate, self._sleep = rate, sleep
        self._left, self._at = float(_BURST), time.monotonic()

    def take(self, size: int) -> None:
        """Wait until ``size`` more bytes may go."""
        if self._rate is None:
            return
        now = time.monotonic()
        self._left = min(float(_BURST), self._left + (now - self._at) * self._rate) - size
        self._at = now
        if self._left < 0:
            self._sleep(-self._left / self._rate)


def rate_of(share: float, cores: int | None = None) -> float:
    """Return bytes per second whose copying takes ``share`` of this node's cores, sending and receiving together."""
    return max(1e6, share * (cores or len(os.sched_getaffinity(0))) / CPU_PER_BYTE)


class NotTaken(Exception):
    """A snapshot that was not copied, and why. The channel is good for the next one."""


def send_snapshot(channel: SnapshotChannel, file: SlotFile, wanted: SnapshotId, bucket: TokenBucket) -> None:
    """Send a snapshot. Raises NotTaken, ChannelBroken, OSError."""
    slot = file.held().get(wanted)
    header = file.valid(slot) if slot is not None else None
    if slot is None or header is None or header.id != wanted:
        channel.send({"why": f"there is no step {wanted.step} of attempt {wanted.attempt} any more"})
        raise NotTaken("it was overwritten")
    room, can = file.room, digest.best_algorithm()
    channel.send({"header": pack_header(header).hex(), "meta": room.meta, "data": room.data, "digest": can})
    answer = channel.receive()
    if answer.get("begin") not in (can, digest.CRC32):
        raise NotTaken(str(answer.get("why", "refused"))[:200])
    sums = digest.hasher(answer["begin"])
    buffer = memoryview(bytearray(PIECE))
    offset = 0
    while offset < header.size:
        start, most = file.extent(slot, header, offset)
        piece = buffer[: min(PIECE, most)]
        bucket.take(len(piece))
        if os.preadv(file.fd, [piece], start) != len(piece):
            raise ChannelBroken(f"{file.path} was cut short")  # mid-frame: only a new connection goes on from here
        if offset >= header.meta_size:
            sums.update(piece)
        channel.send_piece(piece)
        offset += len(piece)
    if not file.still(slot, header):
        channel.send({"why": "torn"})
        raise NotTaken("it was overwritten while it was copied")
    known = header.algorithm and ALGORITHMS[header.algorithm] == answer["begin"]
    if known and as_bytes(sums.hexdigest()) != header.digest:
        channel.send({"why": "it is damaged: its bytes are not those that were copied there"})
        raise NotTaken(f"the snapshot of step {wanted.step} of rank {header.rank} is damaged")
    channel.send({"digest": sums.hexdigest()})
    answer = channel.receive()
    if not answer.get("taken"):
        raise NotTaken(str(answer.get("why", "not taken"))[:200])


def receive_snapshot(
    channel: SnapshotChannel,
    place: str,
    spared: Collection[SnapshotId],
    may_take: Callable[[int], None],
    refuse: Callable[[SlotHeader], str] = lambda header: "",
) -> SlotHeader:
    """Write the other side's data into the file of its rank in ``place``.

    ``spared``: generations that are not overwritten; ``refuse``: why this one is not taken, "" if it is. Raises
    NotTaken, ChannelBroken; OSError of our own memory is reported to the other side and raised as NotTaken.
    """
    offer = _offer(channel.receive())
    why = refuse(offer.header)
    try:
        file = None if why else _file_for(offer, place, may_take)
    except (OSError, ValueError) as error:
        why, file = f"no room: {error}", None
    if file is None:
        channel.send({"why": why})
        raise NotTaken(why)
    with file:
        slot = slot_to_receive([file.valid(slot) for slot in range(file.room.slots)], spared)
        turn = file.begin(slot)
        channel.send({"begin": offer.algorithm})
        sums = _take_pieces(channel, file, slot, offer)
        end = channel.receive()
        if "digest" not in end:
            raise NotTaken(str(end.get("why", "given up"))[:200])
        algorithm, whole = ALGORITHMS.index(offer.algorithm), as_bytes(sums)
        header = offer.header._replace(turn=turn, algorithm=algorithm, digest=whole)
        why = "" if end["digest"] == sums else "the digest is another one"
        try:
            if not why:
                file.meta(slot, header)
        except (ValueError, OSError) as error:
            why = str(error)
        if why:
            channel.send({"why": why})
            raise NotTaken(why)
        file.commit(slot, header)
        channel.send({"taken": True})
        return header


class _Offer(NamedTuple):
    header: SlotHeader
    room: SlotRoom
    algorithm: str  # of the digest that both sides take


def _offer(message: dict[str, Any]) -> _Offer:
    if "why" in message:
        raise NotTaken(str(message["why"])[:200])
    meta, data = as_count(str(message.get("meta"))), as_count(str(message.get("data")))
    try:
        header = parse_header(bytes.fromhex(str(message.get("header"))))
    except ValueError as error:
        raise ChannelBroken(str(error)) from None
    if meta is None or data is None or header.step < 0 or not 0 <= header.rank < header.world:
        raise ChannelBroken("no snapshot")
    if header.meta_size > meta or header.data_size > data:
        raise ChannelBroken("no snapshot: it does not fit into its own slot")
    both = message.get("digest") == digest.best_algorithm()
    return _Offer(header, SlotRoom(_RESERVED, meta, data), digest.best_algorithm() if both else digest.CRC32)


def _file_for(offer: _Offer, place: str, may_take: Callable[[int], None]) -> SlotFile:
    """Return the file of the rank in ``place``, made anew where there is none that fits."""
    header, path = offer.header, rank_file(place, offer.header.rank)
    try:
        file = open_slots(path, write=True)
        fits = (file.world, file.rank) == (header.world, header.rank) and file.room.slots >= _RESERVED
        if fits and file.room.holds(header.meta_size, header.data_size):
            return file
        file.close()
    except (OSError, ValueError):
        pass
    return create_slots(path, header.world, header.rank, offer.room, may_take)


def slot_to_receive(slots: list[SlotHeader | None], spared: Collection[SnapshotId]) -> int:
    """Return the slot to write over: an empty one, or the oldest that is not spared; the oldest where all are. Pure."""

    def order(slot: int) -> tuple[bool, bool, SnapshotId]:
        held = slots[slot]
        if held is None:
            return False, False, SnapshotId(-1, -1)
        return True, held.id in spared, held.id

    return min(range(len(slots)), key=order)


def _take_pieces(channel: SnapshotChannel, file: SlotFile, slot: int, offer: _Offer) -> str:
    """Write the pieces; returns the digest of the data among them."""
    sums, header = digest.hasher(offer.algorithm), offer.header
    buffer = memoryview(bytearray(PIECE))
    offset = 0
    while offset < header.size:
        _, most = file.extent(slot, header, offset)
        piece = buffer[: min(PIECE, most)]
        channel.receive_piece(piece)
        if offset >= header.meta_size:
            sums.update(piece)
        file.write(slot, header, offset, piece)
        offset += len(piece)
    return sums.hexdigest()


# The contents of a node's folder.


def has_writer(file: SlotFile) -> bool:
    """Return whether a living rank holds the file as its own (``memory_slots.claim``).

    Otherwise it is a copy, or its rank has ended.
    """
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        found = _FLOCK.unpack(fcntl.fcntl(file.fd, fcntl.F_GETLK, asked))
    except OSError:
        return False
    return bool(found[0] != fcntl.F_UNLCK)


def require_room(place: str, size: int) -> None:
    """Check the room in ``place``. Raises OSError where ``size`` bytes more are too many (``memory_room.py``)."""
    room = MemoryRoom(place)
    try:
        room.may_take(size)
    finally:
        room.close()


def open_all(place: str) -> list[SlotFile]:
    """Return the rank files in ``place`` that can be read, for the caller to close; others are left out."""
    found = []
    for _, path in sorted(ranks_in(place).items()):
        try:
            found.append(open_slots(path))
        except (OSError, ValueError):
            continue
    return found
