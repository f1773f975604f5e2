"""A rank's snapshots in its node's memory: one file with a few slots, each of which holds the state after one step.

    rank-N, in the folder that room.py names:

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
import mmap
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeVar

from ftsupervise.checkpoints import digest
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


NOTHING = SnapshotId(TORN, -1)  # what an empty or torn slot holds


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
        """Return the same without the digest, which its writer adds later (``slots.py``)."""
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
        """Return the step of each slot, TORN for one that holds none (``slot_to_write``). Raises OSError."""
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
    no room (``room.py``); ``fill`` may write slots before the file gets its name. Raises OSError, and leaves
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


# ------------------------------------------------------------------------------------------

# The generations of snapshots that no rank overwrites: the one that every buddy holds, and the one that is being copied.
#
# A buddy copy takes seconds where snapshots come many times a second. Without a word to the ranks the slot that is being copied
# would be overwritten on the way, and after the loss of a node the buddy would hold a step that nobody else holds any more. So
# the copier writes two numbers into the node's folder, and a rank that is about to write a snapshot reads them:
#
#     held    the step that every buddy holds; -1 where there is none
#     wanted  the first snapshot of this step or a later one is copied next; -1 where nothing is copied
#
# Both are functions of the step alone, so the ranks of all nodes keep the same generations. Two more slots take turns, so that
# a rank that is killed while it writes has a whole newer one: SLOTS in all, and two where nothing is copied.

SLOTS = 4  # held by every buddy, being copied, and two that take turns
SLOTS_ALONE = 2  # where nothing is copied
NAME = "pins"
_PAGE = struct.Struct("<qq")


class Pins(NamedTuple):
    held: int = -1
    wanted: int = -1


_Age = TypeVar("_Age", int, SnapshotId)


def slot_to_write(held: Sequence[_Age], spared: Collection[_Age]) -> int:
    """Return the slot to write over: an empty one, or the oldest that is not spared; the oldest where all are. Pure.

    ``held``: what each slot holds, lower than all else for an empty or torn one: -1, or ``NOTHING``.
    """
    return min(range(len(held)), key=lambda slot: (held[slot] in spared, held[slot]))


def spared(steps: Sequence[int], pins: Pins) -> frozenset[int]:
    """Return those of ``steps`` that a rank does not overwrite: the pinned ones, and the newest. Pure."""
    wanted = min((step for step in steps if pins.wanted >= 0 and step >= pins.wanted), default=-1)
    return frozenset(step for step in (pins.held, wanted, max(steps)) if step >= 0 and step in steps)


class PinsPage:
    """The two numbers in the node's folder ``place``: each is one aligned word, written by the copier alone."""

    def __init__(self, place: str, *, write: bool = False) -> None:
        """Open the page. Raises OSError: FileNotFoundError for a reader before there is a copier."""
        flags = (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(f"{place}/{NAME}", flags, 0o600)
        try:
            if write and os.fstat(fd).st_size != _PAGE.size:
                os.pwrite(fd, _PAGE.pack(-1, -1), 0)
            if os.fstat(fd).st_size < _PAGE.size:  # it is being made
                raise FileNotFoundError(f"{place}/{NAME}")
            access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
            self._map = mmap.mmap(fd, _PAGE.size, access=access)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("q")

    def read(self) -> Pins:
        return Pins(self._words[0], self._words[1])

    def write(self, pins: Pins) -> None:
        """Write the held one first: between the two stores it is also the first of the wanted."""
        self._words[0] = pins.held
        self._words[1] = pins.wanted

    def close(self) -> None:
        self._words.release()
        self._map.close()


# ------------------------------------------------------------------------------------------

# Takes the digest of a snapshot in memory beside the loop, right after the copy; it is compared before a rank begins
# from it.
#
# Memory without ECC, a driver or a process that writes where it should not can change a bit, and a copy that lies on
# another node for hours can change too. The digest comes after the header that makes the slot valid: a rank that is
# killed in between leaves a snapshot without one, which is used, and people are told that it is
# not verified. Taking it costs half a copy of the state
# (xxh3_128), beside the loop.


class Summing:
    """A thread that takes the digest of the newest snapshot. ``lock`` is held by who begins to write a slot: until then the
    slot is what it was."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._news = threading.Condition()
        self._next: tuple[SlotFile, int, SlotHeader, memoryview] | None = None
        self._algorithm = ALGORITHMS.index(digest.best_algorithm())
        self._thread: threading.Thread | None = None

    def take(self, file: SlotFile, slot: int, header: SlotHeader, data: memoryview) -> None:
        """Take the digest of the committed snapshot, unless a newer one comes first. Without xxhash it is crc32, which takes
        as long as four copies: beside the loop, and zlib lets go of the interpreter's lock."""
        with self._news:
            self._next = file, slot, header, data
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ftsupervise-digests", daemon=True)
                self._thread.start()
            self._news.notify()

    def forget(self) -> None:
        """Forget the file, which is about to be closed."""
        with self._news:
            self._next = None
        with self.lock:
            return

    def _run(self) -> None:
        while (
            True
        ):  # at the loop's own priority: a thread of a lower one could be stopped with the interpreter's lock in hand
            with self._news:
                while self._next is None:
                    self._news.wait()
                (file, slot, header, data), self._next = self._next, None
            try:
                found = self._sum(file, slot, header, data)
                with self.lock:
                    if file.fd >= 0 and file.still(slot, header):
                        file.commit(slot, found)
            except (OSError, ValueError):  # removed, or cut short: the loop finds out
                continue
            finally:
                del data

    def _sum(self, file: SlotFile, slot: int, header: SlotHeader, data: memoryview) -> SlotHeader:
        """Take the digest. Raises OSError; ValueError once it is not that snapshot any more, whose memory may be given back."""
        sums = digest.hasher(ALGORITHMS[self._algorithm])
        for begin in range(0, header.data_size, PIECE):
            if not file.still(slot, header):
                raise ValueError("written over")
            sums.update(data[begin : min(begin + PIECE, header.data_size)])
        return header._replace(algorithm=self._algorithm, digest=as_bytes(sums.hexdigest()))


class Compared(Enum):
    """The outcome of a comparison. UNKNOWN: the digest was not taken before the rank died, or cannot be taken here."""

    SAME = 0
    DAMAGED = 1
    UNKNOWN = 2


def compare(file: SlotFile, slot: int, header: SlotHeader) -> Compared:
    """Compare a snapshot with its checksums. Raises OSError."""
    try:
        file.meta(slot, header)
    except ValueError:
        return Compared.DAMAGED
    if not header.algorithm:
        return Compared.UNKNOWN
    try:
        sums = digest.hasher(ALGORITHMS[header.algorithm])
    except digest.CannotJudge:
        return Compared.UNKNOWN
    buffer = memoryview(bytearray(PIECE >> 3))  # it stays in the processor's cache
    offset = header.meta_size
    while offset < header.size:
        start, most = file.extent(slot, header, offset)
        size = os.preadv(file.fd, [buffer[: min(len(buffer), most)]], start)
        if not size:
            return Compared.DAMAGED  # cut short
        sums.update(buffer[:size])
        offset += size
    return Compared.SAME if as_bytes(sums.hexdigest()) == header.digest else Compared.DAMAGED


def as_bytes(hexdigest: str) -> bytes:
    """Return a digest as it stands in a header."""
    return bytes.fromhex(hexdigest).ljust(16, b"\0")
