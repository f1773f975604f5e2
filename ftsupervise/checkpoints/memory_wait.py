"""The words between a rank that waits for the copy of its snapshot and the process of its node that makes the copy.

Where the settings ask for it, a rank goes on only when its buddy node holds the snapshot too, so that no step which has counted
is lost with the node. It asks over a socket in the node's folder, which is this account's alone; the name goes through a
descriptor of the folder, for a path of a socket may have no more than 107 bytes.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

NAME = "copied"  # the socket
_ASKED = struct.Struct("<qqqd")  # rank, step, attempt, seconds that the rank waits at most
_REST, _LEAST = 10.0, 1.0  # times what was waited in vain, and seconds: that long no copy is waited for
_STARTS = 30.0  # seconds within which the other end is there
_LONGEST = 512  # bytes of an answer


class CopyWait:
    """A rank's end. ``seconds``: how long it waits at most, each time; ``problem``: why the last copy was not there."""

    def __init__(self, place: str, rank: int, seconds: float) -> None:
        self._place, self._rank, self._seconds = place, rank, seconds
        self.problem = ""
        self._sock: socket.socket | None = None
        self._not_before = 0.0  # monotonic
        self._absent: float | None = None  # when the other end was first looked for in vain

    def wait(self, step: int, attempt: int) -> bool:
        """Return whether the buddy holds that snapshot, as soon as that is known. Never raises."""
        began = time.monotonic()
        if began < self._not_before:
            return False
        try:
            if self._sock is None:
                self._sock = _connect(self._place, self._seconds)
            self._absent = None
            self._sock.send(_ASKED.pack(self._rank, step, attempt, self._seconds))
            found = self._sock.recv(_LONGEST)
            if found == b"1":
                return True
            self.problem = found[1:].decode("utf-8", "replace") or "the process that copies has ended"
        except TimeoutError:
            self.problem = f"no answer within {self._seconds:g} s"
        except FileNotFoundError:  # it is started once there are snapshots
            self._absent = began if self._absent is None else self._absent
            self.problem = "" if began < self._absent + _STARTS else "nothing copies snapshots on this node"
            return False
        except OSError as error:
            self.problem = str(error.strerror or error)
        self.close()  # a late answer would be taken for that to the next question
        now = time.monotonic()
        self._not_before = now + max(_LEAST, _REST * (now - began))
        return False

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None


class Asked:
    """A rank's question, as the process that copies reads it."""

    def __init__(self, raw: bytes) -> None:
        """Raises ValueError for anything else."""
        if len(raw) != _ASKED.size:
            raise ValueError("no question of a rank")
        self.rank, self.step, self.attempt, self.seconds = _ASKED.unpack(raw)


def answer(sock: socket.socket, why: str) -> None:
    """Answer a rank: the buddy holds its snapshot, or ``why`` not. Raises OSError."""
    sock.send(b"1" if not why else b"0" + why.encode()[: _LONGEST - 1])


def listen(place: str) -> socket.socket:
    """Return the socket at which the ranks of ``place`` ask; an older one is replaced. Raises OSError."""
    with _opened(place) as (sock, fd):
        try:
            os.unlink(NAME, dir_fd=fd)
        except FileNotFoundError:
            pass
        sock.bind(f"/proc/self/fd/{fd}/{NAME}")
        sock.listen(64)
    return sock


def _connect(place: str, seconds: float) -> socket.socket:
    with _opened(place) as (sock, fd):
        sock.settimeout(seconds)
        sock.connect(f"/proc/self/fd/{fd}/{NAME}")
    return sock


@contextmanager
def _opened(place: str) -> Iterator[tuple[socket.socket, int]]:
    """Yield a new socket, which stays open unless the block fails, and a descriptor of the folder. Raises OSError."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            yield sock, fd
        except BaseException:
            sock.close()
            raise
    finally:
        os.close(fd)
