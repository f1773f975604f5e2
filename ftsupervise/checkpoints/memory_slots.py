"""A rank's snapshots in its node's memory: one file with a few slots, each of which holds the state after one step.

    rank-N, in the folder that memory_folder.py names:

    page 0      world, rank, number of slots and their sizes; written before the file gets its name
    each slot   a page with the header; room for the description (JSON); room for the data

A slot that is being written has a header with step -1. The header that names its step is written last, under a checksum, so a
process that is killed at any moment leaves the slot valid or not, never half. A reader of a live slot (the node's agent, which
copies it to the buddy node) takes the header before and after: the same twice, and what was read in between is that snapshot.

A snapshot is known by its step together with the attempt that made it. Two attempts may have made different states of one step,
so all ranks must hold the same of both. Readers use ``pread`` and never map the file: it may be cut short at any time.

Standard library only: ranks, agents and the supervisor use this. Nothing here is durable, since memory is not.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host import files

PAGE = 4096
TORN = -1  # the step of a slot that is being written, or was given up
PIECE = 8 << 20  # bytes that are taken, or copied, at once
_MOST = 1 << 50  # bytes of a slot; more is a damaged page
_FILE = struct.Struct("<8sIIIQQ")  # magic, world, rank, slots, room for the description, room for the data
_FILE_MAGIC = b"FTSNAPF1"
_SLOT = struct.Struct("<8sQqqIIQQI16sI16sd")
_SLOT_MAGIC = b"FTSNAPS1"
_CRC = struct.Struct("<I")
_fence = threading.Lock()


class SnapshotId(NamedTuple):
    """A snapshot that all ranks share: they may begin from it when each holds it."""

    step: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.step}/{self.attempt}"


class SlotHeader(NamedTuple):
    """The header of a slot."""

    turn: int  # counts the writings of this slot: a reader sees that it was written over
    step: int  # TORN while it is being written
    attempt: int
    world: int
    rank: int
    meta_size: int  # bytes of the description
    data_size: int  # bytes of the data
    meta_crc: int = 0
    layout: bytes = b""  # 16 bytes: a digest over names, types and shapes; "" where the maker gives none
    algorithm: int = 0  # of the digest: one of ALGORITHMS
    digest: bytes = b""  # of the data, 16 bytes
    at: float = 0.0  # epoch seconds

    @property
    def id(self) -> SnapshotId:
        return SnapshotId(self.step, self.attempt)

    @property
    def size(self) -> int:
        """Bytes of description and data: this much is sent to another node."""
        return self.meta_size + self.data_size

    def unsummed(self) -> SlotHeader:
        """Return the same without the digest, which its writer adds later (``memory_sums.py``)."""
        return self._replace(algorithm=0, digest=b"", layout=self.layout.ljust(16, b"\0"))


ALGORITHMS = (
    "",
    "xxh3_128",
    "crc32",
    "xxh3_128-8M",
    "xxh3_128-1M",
)  # of ``SlotHeader.algorithm``; 0: the data has no digest


class SlotRoom(NamedTuple):
    """The shape of a file: how many slots, and how much each can hold."""

    slots: int
    meta: int  # bytes, whole pages
    data: int  # bytes, whole pages

    @property
    def stride(self) -> int:
        return PAGE + self.meta + self.data

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return PAGE + self.slots * self.stride

    def holds(self, meta: int, data: int) -> bool:
        return meta <= self.meta and data <= self.data


def room_for(slots: int, meta: int, data: int) -> SlotRoom:
    """Return slots for states of that size; the description has room to grow."""
    return SlotRoom(slots, _pages(max(1 << 16, 2 * meta)), _pages(max(1, data)))


class SlotFile:
    """The slots of one rank. Made by ``open_slots`` or ``create_slots``; one process writes it, any of ours may read it."""

    def __init__(self, path: Path, fd: int, world: int, rank: int, room: SlotRoom) -> None:
        self.path, self.fd = path, fd
        self.world, self.rank, self.room = world, rank, room

    def __enter__(self) -> SlotFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def is_gone(self) -> bool:
        """Return whether the file has lost its name (removed by the end of a login session, or replaced). Raises OSError."""
        return os.fstat(self.fd).st_nlink == 0

    # --------------------------------------------------------------------------------------------------------- reading

    def header(self, slot: int) -> SlotHeader | None:
        """Return the header of a slot; None when it is damaged or was never written. Its step may be TORN. Raises OSError."""
        return _parse_header(os.pread(self.fd, _SLOT.size + _CRC.size, self._at(slot)))

    def valid(self, slot: int) -> SlotHeader | None:
        """Return the header of a slot that holds a snapshot of this file's rank and world; None when it holds none."""
        found = self.header(slot)
        if found is None or found.step < 0 or (found.world, found.rank) != (self.world, self.rank):
            return None
        return found if self.room.holds(found.meta_size, found.data_size) else None

    def held(self) -> dict[SnapshotId, int]:
        """Return the snapshots in the file, newest last, each with its slot. Raises OSError."""
        found = {}
        for slot in range(self.room.slots):
            if (header := self.valid(slot)) is not None:
                found[header.id] = slot
        return dict(sorted(found.items()))

    def steps(self) -> list[int]:
        """Return the step of each slot, TORN for one that holds none (``memory_pins.slot_to_write``). Raises OSError."""
        headers = (self.valid(slot) for slot in range(self.room.slots))
        return [TORN if header is None else header.step for header in headers]

    def still(self, slot: int, header: SlotHeader) -> bool:
        """Return whether it is the same snapshot still.

        Then all that was read of it since ``header`` was read belongs to it.
        """
        _order_stores()
        found = self.header(slot)
        return found is not None and found.unsummed() == header.unsummed()

    def read(self, slot: int, header: SlotHeader, offset: int, size: int) -> bytes:
        """Read bytes ``offset`` and on of description and data, one after the other; fewer at the end, or of a file cut
        short.
        """
        parts, end = [], min(offset + size, header.size)
        while offset < end:
            start, most = self.extent(slot, header, offset)
            part = os.pread(self.fd, min(most, end - offset), start)
            if not part:
                break
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def extent(self, slot: int, header: SlotHeader, offset: int) -> tuple[int, int]:
        """Return where byte ``offset`` of description and data lies in the file, and how many follow it there
        (``os.sendfile``).
        """
        start = self._at(slot) + PAGE
        if offset < header.meta_size:
            return start + offset, header.meta_size - offset
        return start + self.room.meta + offset - header.meta_size, header.size - offset

    def pieces(self, slot: int, header: SlotHeader, size: int = PIECE) -> Iterator[bytes]:
        """Yield description and data in pieces. A reader of a live file asks ``still`` after the last."""
        offset = 0
        while offset < header.size and (part := self.read(slot, header, offset, size)):
            yield part
            offset += len(part)

    def meta(self, slot: int, header: SlotHeader) -> bytes:
        """Return the description. Raises ValueError when it is not the one that belongs to ``header``."""
        found = self.read(slot, header, 0, header.meta_size)
        if len(found) != header.meta_size or zlib.crc32(found) != header.meta_crc:
            raise ValueError(f"{self.path}: the description of step {header.step} is damaged")
        return found

    def data_at(self, slot: int) -> int:
        """Return where a slot's data begins in the file: a multiple of the page size."""
        return self._at(slot) + PAGE + self.room.meta

    # --------------------------------------------------------------------------------------------------------- writing

    def begin(self, slot: int) -> int:
        """Note that the slot holds nothing from now on; return the turn of the next snapshot. Raises OSError."""
        before = self.header(slot)
        turn = (before.turn if before is not None else time.monotonic_ns()) + 1
        self._put(slot, SlotHeader(turn, TORN, 0, self.world, self.rank, 0, 0))
        _order_stores()
        return turn

    def write(self, slot: int, header: SlotHeader, offset: int, data: bytes | memoryview) -> None:
        """Put bytes ``offset`` and on of description and data into a slot that was begun. Raises OSError, ValueError."""
        if not self.room.holds(header.meta_size, header.data_size) or offset + len(data) > header.size:
            raise ValueError(f"{self.path}: {header.size} bytes do not fit into a slot")
        view = memoryview(data)
        while view:
            start, most = self.extent(slot, header, offset)
            done = os.pwrite(self.fd, view[:most], start)
            view, offset = view[done:], offset + done

    def write_meta(self, slot: int, meta: bytes) -> None:
        if len(meta) > self.room.meta:
            raise ValueError(f"{self.path}: a description of {len(meta)} bytes does not fit into a slot")
        os.pwrite(self.fd, meta, self._at(slot) + PAGE)

    def commit(self, slot: int, header: SlotHeader) -> None:
        """Write the header last: from now on the slot holds that snapshot.

        Raises OSError, ValueError for one of another rank.
        """
        if (header.world, header.rank) != (self.world, self.rank) or header.step < 0:
            raise ValueError(f"{self.path} holds rank {self.rank} of {self.world}, not rank {header.rank}")
        _order_stores()
        self._put(slot, header)

    def receive(self, slot: int, header: SlotHeader, pieces: Iterator[bytes]) -> None:
        """Write a snapshot that was sent from another node, its header last. Raises OSError; ValueError when the pieces are
        not as long as the header says or its description does not match, and then the slot holds nothing."""
        turn = self.begin(slot)
        offset = 0
        for piece in pieces:
            self.write(slot, header, offset, piece)
            offset += len(piece)
        if offset != header.size:
            raise ValueError(f"{self.path}: {offset} bytes of {header.size} have come")
        self.meta(slot, header)
        self.commit(slot, header._replace(turn=turn))

    def invalidate_newer(self, than: SnapshotId | None) -> tuple[SnapshotId, ...]:
        """Give up the snapshots made after ``than`` (None: all): the run goes on from there, and makes those steps again.
        Later snapshots of another attempt are given up too, whatever their step. Returns those that were given up. Raises
        OSError."""
        gone = [one for one in self.held().items() if than is None or _after(one[0], than)]
        for _, slot in gone:
            self.begin(slot)
        return tuple(one for one, _ in gone)

    def _put(self, slot: int, header: SlotHeader) -> None:
        os.pwrite(self.fd, pack_header(header), self._at(slot))

    def _at(self, slot: int) -> int:
        if not 0 <= slot < self.room.slots:
            raise ValueError(f"{self.path} has no slot {slot}")
        return PAGE + slot * self.room.stride


def open_slots(path: str | os.PathLike[str], *, write: bool = False) -> SlotFile:
    """Open the file of a rank. Raises OSError; ValueError for a damaged one; PermissionError for one another account may
    write."""
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "not a file of ours alone (mode 0600)", os.fspath(path))
        raw = os.pread(fd, _FILE.size + _CRC.size, 0)
        if len(raw) < _FILE.size + _CRC.size or _CRC.unpack_from(raw, _FILE.size)[0] != zlib.crc32(raw[: _FILE.size]):
            raise ValueError(f"{os.fspath(path)} is not a file of snapshots, or is damaged")
        magic, world, rank, slots, meta, data = _FILE.unpack_from(raw)
        room = SlotRoom(slots, meta, data)
        if magic != _FILE_MAGIC or not 1 <= slots <= 64 or max(meta, data) > _MOST or found.st_size < room.size:
            raise ValueError(f"{os.fspath(path)} is not a file of snapshots of this version, or was cut short")
        return SlotFile(Path(path), fd, world, rank, room)
    except BaseException:
        os.close(fd)
        raise


def create_slots(
    path: str | os.PathLike[str],
    world: int,
    rank: int,
    room: SlotRoom,
    may_take: Callable[[int], None] = lambda size: None,
    fill: Callable[[SlotFile], None] = lambda new: None,
) -> SlotFile:
    """Make a new file with its memory taken, in the place of an older one. Takes seconds per GB: call it from a side
    thread.

    ``may_take(bytes)`` is asked for the whole, and again before each piece of 8 MiB; it raises OSError where there is
    no room (``memory_room.py``); ``fill`` may write slots before the file gets its name. Raises OSError, and leaves
    nothing then.
    """
    target = Path(path)
    may_take(room.size)
    fd, temp = files.create_temporary(target.parent, target.name, 0o600, read=True)
    new = SlotFile(target, fd, world, rank, room)
    try:
        take(fd, room.size, may_take)
        raw = _FILE.pack(_FILE_MAGIC, world, rank, room.slots, room.meta, room.data)
        os.pwrite(fd, raw + _CRC.pack(zlib.crc32(raw)), 0)
        fill(new)
        os.replace(temp, target)
        return new
    except BaseException:
        os.ftruncate(fd, 0)
        new.close()
        try:
            os.unlink(temp)
        except OSError:
            pass
        raise


def take(fd: int, size: int, may_take: Callable[[int], None]) -> None:
    """Give the file its memory, piece by piece. Raises OSError: ENOSPC of a full tmpfs, or what ``may_take`` raises."""
    at = os.fstat(fd).st_size
    while at < size:
        piece = min(PIECE, size - at)
        may_take(piece)
        os.posix_fallocate(fd, at, piece)
        at += piece


def claim(fd: int) -> bool:
    """Hold the file as its one writer, until this process ends, whatever it forked. False: another process holds it. The
    claim is lost when this process closes any descriptor of that file. Raises OSError."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- the bytes


def pack_header(one: SlotHeader) -> bytes:
    """Return a header as it stands in a slot, and as it is sent to another node."""
    numbers = (one.turn & (1 << 64) - 1, one.step, one.attempt, one.world, one.rank, one.meta_size, one.data_size)
    raw = _SLOT.pack(_SLOT_MAGIC, *numbers, one.meta_crc, one.layout, one.algorithm, one.digest, one.at)
    return raw + _CRC.pack(zlib.crc32(raw))


def parse_header(raw: bytes) -> SlotHeader:
    """Return a header that was sent. Raises ValueError when it is damaged."""
    if (found := _parse_header(raw)) is None:
        raise ValueError("the header of a snapshot is damaged")
    return found


def _parse_header(raw: bytes) -> SlotHeader | None:
    if len(raw) != _SLOT.size + _CRC.size or _CRC.unpack_from(raw, _SLOT.size)[0] != zlib.crc32(raw[: _SLOT.size]):
        return None
    magic, *fields = _SLOT.unpack_from(raw)
    one = SlotHeader(*fields)
    known = magic == _SLOT_MAGIC and one.algorithm < len(ALGORITHMS)
    return one if known and max(one.meta_size, one.data_size) <= _MOST else None


def _after(one: SnapshotId, other: SnapshotId) -> bool:
    return one.step > other.step or one.attempt > other.attempt


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _order_stores() -> None:
    """Let no store or load move from one side of this to the other, also on processors that reorder them.

    The first pair orders what came before its release, the second what comes after its acquire.
    """
    with _fence:
        pass
    with _fence:
        pass
