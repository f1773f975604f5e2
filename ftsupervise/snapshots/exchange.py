"""The process beside a node's agent that copies snapshots: its ranks' to the buddy node, and the other neighbour's to here.

It stands alone because it is a process of its own, which most agents never start.

    supervisor  -> order (buddy, attempt, which generation) ->  agent  ->  exchange  ->  ``pins`` page, read by the ranks
    supervisor  <- report (port, newest step, what the buddy has) <-  agent  <-  exchange

It is a fork of the agent, so that nothing here can hold up the agent's reports, and it runs at nice 19 within a share of the
node's cores: one thread sends, one for each connection receives. It sends one generation at a time, the one that the supervisor
has named beforehand to all nodes; the ranks keep that one until every buddy has it (``slots.py``). Where the ranks wait
for their copies it names none, and each is copied at once (``exchange.py``).
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from hashlib import blake2b
from hmac import compare_digest
from time import monotonic
from typing import NamedTuple, TypeVar

from ftsupervise.checkpoints import digest
from ftsupervise.host.addresses import own_addresses
from ftsupervise.host.ports import Unproven
from ftsupervise.host.processes import die_with_parent
from ftsupervise.host.ready import readable
from ftsupervise.rundir.records import decode, encode
from ftsupervise.snapshots.ring import CopyOrder, CopyReport, pack, read_order
from ftsupervise.snapshots.room import MemoryRoom, make, node_folder, rank_file, ranks_in
from ftsupervise.snapshots.slots import (
    ALGORITHMS,
    NOTHING,
    Pins,
    PinsPage,
    SlotFile,
    SlotHeader,
    SlotRoom,
    SnapshotId,
    as_bytes,
    create_slots,
    open_slots,
    pack_header,
    parse_header,
    slot_to_write,
)
from ftsupervise.snapshots.wait import Asked, answer, listen

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    _CAN_SEAL = True
except ImportError:  # an optional package
    _CAN_SEAL = False

# The channel between two node agents that carries snapshots: TCP, authenticated on both sides, sealed where that can be.
#
#     client: hello (can it seal? 16 random bytes)    server: hello, proof    client: proof    then frames both ways
#
# The key is the one that the supervisor gave the agents of this ``ftsupervise run``. Each connection gets a key of its own from
# it and from both random numbers, and every frame has its number, so that nothing is taken twice. Where `cryptography` is
# installed on both sides each frame is sealed with AES-256-GCM, which costs less than any MAC of the standard library.
# Elsewhere a MAC covers each message, and with it the digest of the data: they are then guarded against accidents, not
# against a forger.
#
# Nothing in a frame is ever a path: a snapshot is named by its rank and its step.

PIECE = 1 << 20  # bytes of data in a frame: eight times as many in one burst would be felt by a training step
PATIENCE = 20.0  # seconds in which some bytes of a frame must come or go
_HELLO = struct.Struct("<8sB16s")
_MAGIC = b"FTSNAP1\n"
_LENGTH = struct.Struct("<I")
_MAC = _TAG = 16  # bytes
_LONGEST = 1 << 16  # bytes of a message
_HELLO_WITHIN = 5.0  # seconds
_FULL = 0.1  # seconds to the next try where no file can be opened


def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """Yield each connection, for ever."""
    while True:
        try:
            sock = listener.accept()[0]
        except OSError:  # too many open files: some will go
            time.sleep(_FULL)
            continue
        yield sock


class CopyRequest(NamedTuple):
    """A question of one node to another."""

    do: str = ""  # "put": it brings a snapshot of a rank; "get": it fetches the one that is named
    held: int = -1  # of a put: the step that every buddy holds, as its node knows
    each: bool = False  # of a put: each snapshot is copied at once, and none is spared
    rank: int = -1
    step: int = -1
    attempt: int = -1


class CopyOffer(NamedTuple):
    """The snapshot that comes, by the node that has it."""

    header: str = ""  # of its slot, hexadecimal
    meta: int = -1  # bytes: the room that its file has for a description, and for data
    data: int = -1
    digest: str = ""  # the algorithm that it can take
    why: str = ""  # it does not come


class CopyWord(NamedTuple):
    """An answer of one of the two while they copy. With none of the others, ``why`` says why it is not copied."""

    begin: str = ""  # the algorithm of the digest that both take
    digest: str = ""  # of the data, by the one that has sent it
    taken: bool = False
    why: str = ""


Message = TypeVar("Message", CopyRequest, CopyOffer, CopyWord)


class ChannelBroken(ConnectionError):
    """The other side has gone, is too slow, or is not one of ours."""


class SnapshotChannel:
    """One connection whose two ends have proven that they know the key. Every method may raise ChannelBroken."""

    def __init__(self, sock: socket.socket, key: bytes, *, client: bool, seal: bool) -> None:
        self.sealed = seal
        self._sock, self._key = sock, key
        self._ours, self._theirs = (b"c", b"s") if client else (b"s", b"c")
        self._sent = self._received = 0
        self._cipher = AESGCM(key) if seal else None
        self._buffer = bytearray(PIECE + _TAG)
        sock.settimeout(PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: CopyRequest | CopyOffer | CopyWord) -> None:
        body = json.dumps(encode(message, sparse=True)).encode()
        if self._cipher is not None:
            frame = self._cipher.encrypt(self._nonce_out(), body, None)
        else:
            frame = body + self._mac(self._nonce_out(), body)
        self._send(_LENGTH.pack(len(frame)) + frame)

    def receive(self, kind: type[Message]) -> Message:
        (size,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if not _MAC <= size <= _LONGEST:
            raise ChannelBroken("no message of ours")
        frame, nonce = self._take(size), self._nonce_in()
        if self._cipher is not None:
            body = self._open(nonce, frame)
        else:
            body = frame[:-_MAC]
            if not compare_digest(self._mac(nonce, body), frame[-_MAC:]):
                raise ChannelBroken("a message is forged or damaged")
        try:
            return decode(kind, json.loads(body))
        except ValueError:
            raise ChannelBroken("no message of ours") from None

    def send_piece(self, piece: memoryview) -> None:
        """Send at most PIECE bytes; the other side knows how many."""
        if self._cipher is None:
            self._send(piece)
            return
        room = memoryview(self._buffer)[: len(piece) + _TAG]
        if hasattr(self._cipher, "encrypt_into"):
            self._cipher.encrypt_into(self._nonce_out(), piece, None, room)
            self._send(room)
        else:  # an older version
            self._send(self._cipher.encrypt(self._nonce_out(), piece, None))

    def receive_piece(self, into: memoryview) -> None:
        """Fill ``into`` with one piece of that size."""
        if self._cipher is None:
            self._fill(into)
            return
        frame = memoryview(self._buffer)[: len(into) + _TAG]
        self._fill(frame)
        if hasattr(self._cipher, "decrypt_into"):
            try:
                self._cipher.decrypt_into(self._nonce_in(), frame, None, into)
            except InvalidTag:
                raise ChannelBroken("a piece is forged or damaged") from None
        else:
            into[:] = self._open(self._nonce_in(), bytes(frame))

    def close(self) -> None:
        self._sock.close()

    def _open(self, nonce: bytes, frame: bytes) -> bytes:
        assert self._cipher is not None
        try:
            return self._cipher.decrypt(nonce, frame, None)
        except InvalidTag:
            raise ChannelBroken("a frame is forged or damaged") from None

    def _mac(self, nonce: bytes, body: bytes) -> bytes:
        return blake2b(nonce + body, key=self._key, digest_size=_MAC).digest()

    def _nonce_out(self) -> bytes:
        self._sent += 1
        return self._ours + self._sent.to_bytes(11, "big")

    def _nonce_in(self) -> bytes:
        self._received += 1
        return self._theirs + self._received.to_bytes(11, "big")

    def _take(self, size: int) -> bytes:
        room = bytearray(size)
        self._fill(memoryview(room))
        return bytes(room)

    def _fill(self, room: memoryview) -> None:
        fill(self._sock, room)

    def _send(self, data: bytes | memoryview) -> None:
        try:
            self._sock.sendall(data)
        except OSError as error:
            raise ChannelBroken(f"the other side does not read: {error}") from None


def fill(sock: socket.socket, room: memoryview) -> None:
    """Receive exactly as many bytes as ``room`` has. Raises ChannelBroken."""
    try:
        while room:
            got = sock.recv_into(room)
            if not got:
                raise ChannelBroken("the other side has closed the connection")
            room = room[got:]
    except ChannelBroken:
        raise
    except OSError as error:
        raise ChannelBroken(f"nothing came: {error}") from None


# The handshake.


def connect(host: str, port: int, key: bytes, *, seal: bool = True, patience: float = _HELLO_WITHIN) -> SnapshotChannel:
    """Return a channel to another node's agent. Raises ChannelBroken."""
    try:
        sock = socket.create_connection((host, port), timeout=patience)
    except OSError as error:
        raise ChannelBroken(f"no connection to {host}:{port}: {error}") from None
    try:
        hello = _HELLO.pack(_MAGIC, _CAN_SEAL and seal, os.urandom(16))
        sock.sendall(hello)
        answer = bytearray(_HELLO.size)
        fill(sock, memoryview(answer))
        both = hello + answer
        proof = bytearray(_MAC)
        fill(sock, memoryview(proof))
        if not compare_digest(_proof(key, b"server", both), bytes(proof)):
            raise ChannelBroken(f"{host}:{port} does not know the key of this run")
        sock.sendall(_proof(key, b"client", both))
        return SnapshotChannel(sock, _session_key(key, both), client=True, seal=bool(answer[8]))
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError) and not isinstance(error, ChannelBroken):
            raise ChannelBroken(f"{host}:{port} does not answer: {error}") from None
        raise


def accept(sock: socket.socket, key: bytes, *, seal: bool = True, patience: float = _HELLO_WITHIN) -> SnapshotChannel:
    """Return the channel of a connection that came in. Raises ChannelBroken for a peer that does not know the key."""
    sock.settimeout(patience)
    hello = bytearray(_HELLO.size)
    fill(sock, memoryview(hello))
    magic, can, _ = _HELLO.unpack(hello)
    if magic != _MAGIC:
        raise ChannelBroken("not one of ours")
    answer = _HELLO.pack(_MAGIC, bool(can) and _CAN_SEAL and seal, os.urandom(16))
    both = bytes(hello) + answer
    try:
        sock.sendall(answer + _proof(key, b"server", both))
    except OSError as error:
        raise ChannelBroken(f"the other side does not read: {error}") from None
    proof = bytearray(_MAC)
    fill(sock, memoryview(proof))
    if not compare_digest(_proof(key, b"client", both), bytes(proof)):
        raise ChannelBroken("the other side does not know the key of this run")
    return SnapshotChannel(sock, _session_key(key, both), client=False, seal=bool(answer[8]))


def _proof(key: bytes, side: bytes, both: bytes | bytearray) -> bytes:
    return blake2b(side + both, key=key, person=b"snapshot-proof", digest_size=_MAC).digest()


def _session_key(key: bytes, both: bytes | bytearray) -> bytes:
    return blake2b(both, key=key, person=b"snapshot-seal", digest_size=32).digest()


# ------------------------------------------------------------------------------------------
# Copy one rank's snapshot from one node's memory to another's, over a ``SnapshotChannel``.
#
#     -> CopyOffer    <- CopyWord: begin    -> pieces    -> CopyWord: digest    <- CopyWord: taken
#
# Any of them may say ``why`` instead.
#
# The sender reads a live file: it takes the header before and after, and says "torn" where they differ. The receiver writes
# into a slot that is not needed any more, compares the digest that both have taken on the way, sets the header last and only
# then says that it has the snapshot. A connection that ends anywhere leaves a slot that holds nothing.

_BURST = 0.004  # seconds of processor time: about two pieces
_LEAST = 0.0005  # of a core, about 1 MB a second: never so slow that a copy has no end
_FLOCK = struct.Struct("hhlli")
_RESERVED = 2  # slots of a copy: the one that is spared, and the one that comes


class CpuShare:
    """Holds the thread that copies to a share of the cores, by the processor time that it has really used: what a byte costs
    differs by two between machines, and by more with what else they do."""

    def __init__(self, cores: float | None, sleep: Callable[[float], object] = time.sleep) -> None:
        """``cores`` that it may keep busy, 0.02 is 2 % of one; None: as fast as it goes."""
        self._cores, self._sleep = cores, sleep
        self._left = _BURST
        self._since: tuple[float, float] | None = None  # monotonic time, processor time of this thread

    def keep(self) -> None:
        """Wait until what this thread has used lies within its share. Only one thread may call it."""
        if self._cores is None:
            return
        now = time.monotonic(), time.thread_time()
        if self._since is not None:
            may, did = (new - old for new, old in zip(now, self._since))
            self._left = min(_BURST, self._left + may * self._cores - did)
        self._since = now
        if self._left < 0:
            self._sleep(-self._left / self._cores)


def each_end(share: float) -> float:
    """Return the cores that sending may keep busy on this node, and receiving as many: together ``share`` of them."""
    return max(_LEAST, share * len(os.sched_getaffinity(0)) / 2)


class NotTaken(Exception):
    """A snapshot that was not copied, and why. The channel is good for the next one."""


def send_snapshot(channel: SnapshotChannel, file: SlotFile, wanted: SnapshotId, share: CpuShare) -> None:
    """Send a snapshot. Raises NotTaken, ChannelBroken, OSError."""
    slot = file.held().get(wanted)
    header = file.valid(slot) if slot is not None else None
    if slot is None or header is None or header.id != wanted:
        channel.send(CopyOffer(why=f"there is no step {wanted.step} of attempt {wanted.attempt} any more"))
        raise NotTaken("it was overwritten")
    room, can = file.room, digest.best_algorithm()
    channel.send(CopyOffer(pack_header(header).hex(), room.meta, room.data, can))
    answer = channel.receive(CopyWord)
    if answer.begin not in (can, digest.CRC32):
        raise NotTaken(answer.why[:200] or "refused")
    sums = digest.hasher(answer.begin)
    buffer = memoryview(bytearray(PIECE))
    offset = 0
    while offset < header.size:
        start, most = file.extent(slot, header, offset)
        piece = buffer[: min(PIECE, most)]
        share.keep()
        if os.preadv(file.fd, [piece], start) != len(piece):
            raise ChannelBroken(f"{file.path} was cut short")  # mid-frame: only a new connection goes on from here
        if offset >= header.meta_size:
            sums.update(piece)
        channel.send_piece(piece)
        offset += len(piece)
    if not file.still(slot, header):
        channel.send(CopyWord(why="torn"))
        raise NotTaken("it was overwritten while it was copied")
    known = header.algorithm and ALGORITHMS[header.algorithm] == answer.begin
    if known and as_bytes(sums.hexdigest()) != header.digest:
        channel.send(CopyWord(why="it is damaged: its bytes are not those that were copied there"))
        raise NotTaken(f"the snapshot of step {wanted.step} of rank {header.rank} is damaged")
    channel.send(CopyWord(digest=sums.hexdigest()))
    answer = channel.receive(CopyWord)
    if not answer.taken:
        raise NotTaken(answer.why[:200] or "not taken")


def receive_snapshot(
    channel: SnapshotChannel,
    place: str,
    spared: Collection[SnapshotId],
    may_take: Callable[[int], None],
    share: CpuShare,
    refuse: Callable[[SlotHeader], str] = lambda header: "",
) -> SlotHeader:
    """Write the other side's data into the file of its rank in ``place``.

    ``spared``: generations that are not overwritten; ``refuse``: why this one is not taken, "" if it is. Raises
    NotTaken, ChannelBroken; OSError of our own memory is reported to the other side and raised as NotTaken.
    """
    offer = _offer(channel.receive(CopyOffer))
    why = refuse(offer.header)
    try:
        file = None if why else _file_for(offer, place, may_take)
    except (OSError, ValueError) as error:
        why, file = f"no room: {error}", None
    if file is None:
        channel.send(CopyWord(why=why))
        raise NotTaken(why)
    with file:
        headers = [file.valid(slot) for slot in range(file.room.slots)]
        slot = slot_to_write([header.id if header else NOTHING for header in headers], spared)
        turn = file.begin(slot)
        channel.send(CopyWord(begin=offer.algorithm))
        sums = _take_pieces(channel, file, slot, offer, share)
        end = channel.receive(CopyWord)
        if not end.digest:
            raise NotTaken(end.why[:200] or "given up")
        algorithm, whole = ALGORITHMS.index(offer.algorithm), as_bytes(sums)
        header = offer.header._replace(turn=turn, algorithm=algorithm, digest=whole)
        why = "" if end.digest == sums else "the digest is another one"
        try:
            if not why:
                file.meta(slot, header)
        except (ValueError, OSError) as error:
            why = str(error)
        if why:
            channel.send(CopyWord(why=why))
            raise NotTaken(why)
        file.commit(slot, header)
        channel.send(CopyWord(taken=True))
        return header


class _Offer(NamedTuple):
    header: SlotHeader
    room: SlotRoom
    algorithm: str  # of the digest that both sides take


def _offer(message: CopyOffer) -> _Offer:
    if message.why:
        raise NotTaken(message.why[:200])
    meta, data = message.meta, message.data
    try:
        header = parse_header(bytes.fromhex(message.header))
    except ValueError as error:
        raise ChannelBroken(str(error)) from None
    if meta < 0 or data < 0 or header.step < 0 or not 0 <= header.rank < header.world:
        raise ChannelBroken("no snapshot")
    if header.meta_size > meta or header.data_size > data:
        raise ChannelBroken("no snapshot: it does not fit into its own slot")
    both = message.digest == digest.best_algorithm()
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


def _take_pieces(channel: SnapshotChannel, file: SlotFile, slot: int, offer: _Offer, share: CpuShare) -> str:
    """Write the pieces; returns the digest of the data among them."""
    sums, header = digest.hasher(offer.algorithm), offer.header
    buffer = memoryview(bytearray(PIECE))
    offset = 0
    while offset < header.size:
        _, most = file.extent(slot, header, offset)
        piece = buffer[: min(PIECE, most)]
        share.keep()
        channel.receive_piece(piece)
        if offset >= header.meta_size:
            sums.update(piece)
        file.write(slot, header, offset, piece)
        offset += len(piece)
    return sums.hexdigest()


# The contents of a node's folder.


def has_writer(file: SlotFile) -> bool:
    """Return whether a living rank holds the file as its own (``claim``).

    Otherwise it is a copy, or its rank has ended.
    """
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        found = _FLOCK.unpack(fcntl.fcntl(file.fd, fcntl.F_GETLK, asked))
    except OSError:
        return False
    return bool(found[0] != fcntl.F_UNLCK)


def require_room(place: str, size: int) -> None:
    """Check the room in ``place``. Raises OSError where ``size`` bytes more are too many (``room.py``)."""
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


# ------------------------------------------------------------------------------------------


_LOOK = 0.05  # seconds between two looks for the snapshot that is wanted
_REPORT = 1.0  # seconds between two reports without news
_AGAIN = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between two tries to reach the buddy
_NICE = 19


class SnapshotExchange:
    """Runs in a process of its own until the agent closes its end of ``talk``."""

    def __init__(
        self, folder: str, node: str, key: bytes, talk: socket.socket, share: float, at_once: bool = False
    ) -> None:
        """Open the folder and the sockets. ``at_once``: ranks wait for their copies. Raises OSError when there can be none."""
        self.lock = make(folder, node)
        if self.lock is None:
            raise OSError(f"cannot make {folder}")
        self._place, self._talk = node_folder(folder, node), talk
        cores = each_end(share)
        self._sender = CopySender(self._place, key, CpuShare(cores))
        self._server = CopyServer(self._place, key, lambda: self._sender.order, cores)
        self._at_once = CopyAtOnce(self._place, key, lambda: self._sender.order) if at_once else None
        self._pins = PinsPage(self._place, write=True)
        host = next((one for one in reversed(own_addresses()) if one[:1].isdigit()), "")
        self._self = CopyReport(port=self._server.port, host=host)
        self._told, self._told_at = CopyReport(), 0.0

    def run(self) -> None:
        threading.Thread(target=self._sender.run, name="snapshots-out", daemon=True).start()
        while self._hear(_LOOK):
            self._tell()

    def _hear(self, seconds: float) -> bool:
        """Obey the orders that have come; return False when the agent has gone."""
        if not readable([self._talk], seconds):
            return True
        raw = self._talk.recv(1 << 16)
        order, before = read_order(raw), self._sender.order
        if order is not None and order.number > before.number:
            self._pins.write(Pins(order.held, order.wanted))
            if order.held > before.held:
                drop_old(self._place, order.held)
            self._sender.obey(order)
        return bool(raw)

    def _tell(self) -> None:
        ranks, world, newest = own_snapshots(self._place)
        report = self._sender.progress(self._self)._replace(ranks=ranks, world=world, newest=newest)
        if self._at_once is not None:
            report = self._at_once.progress(report, self._sender.order)
        now, old = monotonic(), self._told
        sent = old.sent if self._at_once is not None else report.sent  # each step is no news
        urgent = report._replace(newest=old.newest, sent=sent) != old
        if not urgent and now < self._told_at + _REPORT:
            return
        self._told, self._told_at = report, now
        try:
            self._talk.send(pack(report))
        except OSError:  # it has gone: ``_hear`` sees it
            return


class CopySender:
    """Copies the snapshots of this node's ranks to its buddy, one step at a time, as the last order says."""

    def __init__(self, place: str, key: bytes, share: CpuShare) -> None:
        self.order = CopyOrder(0, 0)
        self._place, self._key, self._share = place, key, share
        self._news = threading.Condition()
        self._sent = SnapshotId(-1, 0)
        self._missed, self._problem = -1, ""

    def obey(self, order: CopyOrder) -> None:
        with self._news:
            self.order = order
            self._news.notify_all()

    def progress(self, report: CopyReport) -> CopyReport:
        """Return ``report`` with the progress of the copies."""
        with self._news:
            return report._replace(
                sent=self._sent.step,
                attempt=self._sent.attempt,
                missed=self._missed,
                order=self.order.number,
                problem=self._problem[:200],
            )

    def run(self) -> None:
        channel: SnapshotChannel | None = None
        tries, of = 0, ("", 0)
        while True:
            with self._news:
                self._news.wait(_LOOK)
                order = self.order
            if (order.host, order.port) != of:
                _close(channel)
                channel, tries, of = None, 0, (order.host, order.port)
            wanted = self._wanted(order)
            if wanted is None:
                continue
            try:
                channel = channel or connect(order.host, order.port, self._key)
                self._send_all(channel, wanted, order.held)
                tries = 0
            except NotTaken as error:
                self._note(str(error))
            except (ChannelBroken, OSError) as error:
                if tries:  # the first time it may only be that the buddy has closed an idle connection
                    self._note(str(error))
                _close(channel)
                channel = None
                self.pause(of, 0 if not tries else _AGAIN[min(tries, len(_AGAIN)) - 1])
                tries += 1

    def pause(self, of: tuple[str, int], seconds: float) -> None:
        """Wait before the next try, and no longer than until another buddy is named."""
        with self._news:
            self._news.wait_for(lambda: (self.order.host, self.order.port) != of, seconds)

    def _wanted(self, order: CopyOrder) -> SnapshotId | None:
        """Return the snapshot that goes next; None where there is none yet, or no buddy."""
        done = self._sent.step >= order.wanted and self._sent.attempt == order.attempt
        if not order.host or order.wanted < 0 or done:
            return None
        first: set[SnapshotId | None] = set()
        for file in open_all(self._place):
            with file:
                try:
                    if has_writer(file):
                        fits = (one for one in file.held() if one.step >= order.wanted and one.attempt == order.attempt)
                        first.add(min(fits, default=None))
                except OSError:
                    first.add(None)
        if len(first) > 1 and None not in first:  # the order to keep it reached the ranks too late
            self._missed = order.wanted
        return first.pop() if len(first) == 1 else None

    def _send_all(self, channel: SnapshotChannel, wanted: SnapshotId, held: int) -> None:
        files = open_all(self._place)
        try:
            for file in files:
                if has_writer(file):
                    channel.send(CopyRequest("put", held))  # the buddy may not have heard of that yet
                    send_snapshot(channel, file, wanted, self._share)
        finally:
            for file in files:
                file.close()
        with self._news:
            self._sent, self._problem = wanted, ""

    def _note(self, problem: str) -> None:
        with self._news:
            self._problem = problem


def own_snapshots(place: str) -> tuple[int, int, int]:
    """Return the ranks of this node that make snapshots, their world, and the newest step that all of them have."""
    steps, world = [], 0
    for file in open_all(place):
        with file:
            try:
                if has_writer(file):
                    steps.append({one.step for one in file.held()})
                    world = file.world
            except OSError:
                return 0, 0, -1
    return len(steps), world, max(set.intersection(*steps), default=-1) if steps else -1


def drop_old(place: str, held: int) -> None:
    """Remove the copies of ranks that have another buddy now: the run holds the newer step ``held`` elsewhere."""
    for file in open_all(place):
        with file:
            try:
                if not has_writer(file) and all(one.step < held for one in file.held()):
                    os.unlink(file.path)
            except OSError:
                continue


def _close(channel: SnapshotChannel | None) -> None:
    if channel is not None:
        channel.close()


# ------------------------------------------------------------------------------------------------------- its process


def start_exchange(
    folder: str, node: str, key: bytes, share: float, at_once: bool = False
) -> tuple[int, socket.socket]:
    """Fork the exchange; return its process and the agent's end of the link. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = die_with_parent(signal.SIGKILL)
    pid = os.fork()
    if pid:
        theirs.close()
        ours.setblocking(False)
        return pid, ours
    try:
        ours.close()
        before()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # it ends with its agent, which may have ranks to wait for
        if not at_once:  # else a training step waits for it
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        SnapshotExchange(folder, node, key, theirs, share, at_once).run()
    except BaseException:  # whatever the error, two agents would be worse
        pass
    finally:
        os._exit(0)


def fetch(place: str, rank: int, wanted: SnapshotId, host: str, port: int, key: bytes) -> None:
    """Bring a rank's snapshot from another node to here, as fast as it goes. Raises NotTaken, ChannelBroken."""
    channel = connect(host, port, key)
    try:
        channel.send(CopyRequest("get", rank=rank, step=wanted.step, attempt=wanted.attempt))
        receive_snapshot(channel, place, (), lambda size: require_room(place, size), CpuShare(None))
    finally:
        channel.close()


# ------------------------------------------------------------------------------------------

# Takes the snapshots of other nodes, and serves ours: one port, and a thread for each connection.
#
# A peer that does not prove within seconds that it knows the key of this run is shut out, and never holds up another one.


class CopyServer:
    """Serves the connections of one node, whose folder is ``place``. ``order()``: the supervisor's last order."""

    def __init__(self, place: str, key: bytes, order: Callable[[], CopyOrder], cores: float | None = None) -> None:
        """Open the port. ``cores`` that taking copies may keep busy (``CpuShare``). Raises OSError."""
        self._place, self._order, self._cores = place, order, cores
        self._door = _Door(key, self._serve)
        self.port = self._door.port

    def _serve(self, channel: SnapshotChannel) -> None:
        """Serve one connection: "put" brings a snapshot of a rank that runs elsewhere, "get" fetches one for it."""
        within, at_once = CpuShare(self._cores), CpuShare(None)
        while True:
            asked = channel.receive(CopyRequest)
            try:
                if asked.do == "put":
                    share = at_once if asked.each else within
                    receive_snapshot(channel, self._place, self._spared(asked), self._may_take, share, self._refuse)
                elif asked.do == "get":
                    self._give(channel, asked)
                else:
                    raise ChannelBroken("no such request")
            except NotTaken:
                continue

    def _give(self, channel: SnapshotChannel, asked: CopyRequest) -> None:
        if min(asked.rank, asked.step, asked.attempt) < 0:
            raise ChannelBroken("no such request")
        try:
            file = open_slots(rank_file(self._place, asked.rank))
        except (OSError, ValueError) as error:
            channel.send(CopyOffer(why=f"nothing of rank {asked.rank}: {error}"))
            raise NotTaken(str(error)) from None
        with file:
            send_snapshot(channel, file, SnapshotId(asked.step, asked.attempt), CpuShare(None))

    def _spared(self, asked: CopyRequest) -> frozenset[SnapshotId]:
        """Return what is not written over: the step that every buddy holds, as the newer order of the two nodes has it; none
        where each snapshot is copied at once."""
        if asked.each:
            return frozenset()
        order = self._order()
        held = max(order.held, asked.held)
        return frozenset(SnapshotId(held, attempt) for attempt in range(order.attempt + 1))

    def _refuse(self, header: SlotHeader) -> str:
        """Return why a snapshot is refused: an older attempt may still be alive on a node that Slurm has lost, and
        nothing of it is taken.
        """
        attempt = self._order().attempt
        if header.attempt != attempt:
            return f"attempt {header.attempt} is not the one that runs here ({attempt})"
        try:
            with open_slots(rank_file(self._place, header.rank)) as file:
                return f"rank {header.rank} runs here" if has_writer(file) else ""
        except (OSError, ValueError):
            return ""

    def _may_take(self, size: int) -> None:
        require_room(self._place, size)


class _Door:
    """Listens, and admits peers that know the key: a thread for each connection."""

    def __init__(self, key: bytes, serve: Callable[[SnapshotChannel], None]) -> None:
        """Open the port. Raises OSError."""
        self._key, self._serve = key, serve
        try:
            self._sock = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError:  # no IPv6 here
            self._sock = socket.create_server(("0.0.0.0", 0))
        self.port = int(self._sock.getsockname()[1])
        self._unproven = Unproven()
        threading.Thread(target=self._accept, name="snapshots-door", daemon=True).start()

    def _accept(self) -> None:
        for sock in accepted(self._sock):
            self._unproven.add(sock)
            try:
                threading.Thread(target=self._let_in, args=(sock,), name="snapshots-in", daemon=True).start()
            except RuntimeError:  # no more threads: some will end
                self._unproven.end(sock)
                sock.close()

    def _let_in(self, sock: socket.socket) -> None:
        with sock:
            try:
                channel = accept(sock, self._key)
                self._unproven.remove(sock)
                self._serve(channel)
            except (ChannelBroken, OSError):
                pass
            finally:
                self._unproven.remove(sock)


# ------------------------------------------------------------------------------------------

# Copies each snapshot to the buddy at once, while the rank that made it waits: no step that has counted is made again.
#
# A thread for each rank of the node, with a connection to the buddy of its own. It tries again for as long as the rank waits,
# since the supervisor may not have named a buddy yet. A buddy that takes no connection is given up soon: the rank goes on
# without its copy, and meets the loss of that node in its next collective.

_FIRST, _LAST = 0.002, 0.1  # seconds between two tries, twice as long each time
_GONE = 0.2  # seconds for which a buddy is tried that takes no connection: the loss of its node must be seen soon
_PATIENCE = 60.0  # seconds at most, whatever a rank says


class CopyAtOnce:
    """Serves the ranks of ``place``. ``order()``: the supervisor's last order, which names the buddy."""

    def __init__(self, place: str, key: bytes, order: Callable[[], CopyOrder]) -> None:
        """Open the socket. Raises OSError."""
        self._place, self._key, self._order = place, key, order
        self._sock = listen(place)
        self._lock = threading.Lock()
        self._sent: dict[int, SnapshotId] = {}
        self._problem = ""
        threading.Thread(target=self._accept, name="snapshots-at-once", daemon=True).start()

    def progress(self, report: CopyReport, order: CopyOrder) -> CopyReport:
        """Return ``report`` with the newest step that the buddy holds of all ranks here."""
        with self._lock:
            sent = [one.step for one in self._sent.values() if one.attempt == order.attempt]
            step = min(sent) if sent and len(sent) >= report.ranks else -1
            return report._replace(sent=step, attempt=order.attempt, order=order.number, problem=self._problem[:200])

    def _accept(self) -> None:
        for sock in accepted(self._sock):
            threading.Thread(target=self._serve, args=(sock,), name="snapshots-rank", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """Serve one rank until it has gone."""
        buddy = _Buddy(self._key)
        with sock:
            try:
                while raw := sock.recv(256):
                    asked = Asked(raw)
                    why = self._copy(asked, buddy)
                    with self._lock:
                        self._problem = why
                        if not why:
                            self._sent[asked.rank] = SnapshotId(asked.step, asked.attempt)
                    answer(sock, why)
            except (OSError, ValueError):
                pass
            finally:
                buddy.close()

    def _copy(self, asked: Asked, buddy: _Buddy) -> str:
        """Copy that snapshot; return why it is not copied, "" if it is."""
        until, pause, closed = monotonic() + min(asked.seconds, _PATIENCE), _FIRST, 0.0
        wanted = SnapshotId(asked.step, asked.attempt)
        while True:
            try:
                channel = buddy.channel(self._order())
                if channel is None:
                    why = "there is no second node to copy to"
                else:
                    with open_slots(rank_file(self._place, asked.rank)) as file:
                        # of the two slots there, the older one is written over: the newest whole step stays
                        channel.send(CopyRequest("put", each=True))
                        send_snapshot(channel, file, wanted, CpuShare(None))
                    return ""
                closed = 0.0
            except NotTaken as error:
                why, closed = str(error), 0.0
            except (ChannelBroken, OSError, ValueError) as error:
                buddy.close()
                why, closed = str(error), closed or monotonic()
            now = monotonic() + pause
            if now >= until or (closed and now >= closed + _GONE):
                return why
            threading.Event().wait(pause)
            pause = min(_LAST, 2 * pause)


class _Buddy:
    """The connection to the buddy, made anew where the supervisor names another one."""

    def __init__(self, key: bytes) -> None:
        self._key, self._of = key, ("", 0)
        self._channel: SnapshotChannel | None = None

    def channel(self, order: CopyOrder) -> SnapshotChannel | None:
        """Return the channel; None where there is no buddy. Raises ChannelBroken."""
        if (order.host, order.port) != self._of:
            self.close()
            self._of = order.host, order.port
        if self._channel is None and order.host:
            self._channel = connect(order.host, order.port, self._key)
        return self._channel

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
