"""The channel between two node agents that carries snapshots: TCP, authenticated on both sides, sealed where that can be.

It stands alone because what is proved and sealed here has to be read as one, by who looks for a hole.

    client: hello (can it seal? 16 random bytes)    server: hello, proof    client: proof    then frames both ways

The key is the one that the supervisor gave the agents of this ``ftsupervise run``. Each connection gets a key of its own from
it and from both random numbers, and every frame has its number, so that nothing is taken twice. Where `cryptography` is
installed on both sides each frame is sealed with AES-256-GCM, which costs less than any MAC of the standard library. Elsewhere
a MAC covers each message, and with it the digest of the data: they are then guarded against accidents, not against a forger.

Nothing in a frame is ever a path: a snapshot is named by its rank and its step.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    _CAN_SEAL = True
except ImportError:  # an optional package
    _CAN_SEAL = False

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

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        if self._cipher is not None:
            frame = self._cipher.encrypt(self._nonce_out(), body, None)
        else:
            frame = body + self._mac(self._nonce_out(), body)
        self._send(_LENGTH.pack(len(frame)) + frame)

    def receive(self) -> dict[str, Any]:
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
            message = json.loads(body)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ChannelBroken("no message of ours")
        return message

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
