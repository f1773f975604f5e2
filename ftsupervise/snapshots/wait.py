"""The words between a rank that waits for the copy of its snapshot and the process of its node that makes the copy.

Where the settings ask for it, a rank goes on only when its buddy node holds the snapshot too, so that no step which has counted
is lost with the node. It asks over a socket in the node's folder, which is this account's alone; the name goes through a
descriptor of the folder, for a path of a socket may have no more than 107 bytes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from ftsupervise.checkpoints.compared_file import ComparedFile, FilePart
from ftsupervise.checkpoints.digest import in_parallel

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


# ------------------------------------------------------------------------------------------

# Copies a loaded state into the loop's arrays by several threads at once.
#
# The arrays of a state lie in the memory of this process, or in a file of which each block is compared as it is read
# (``compared_file.py``). A framework copies them one after the other, with as many threads as the loop lets it have: one, under
# torchrun. New memory takes several times as long, for each of its pages is made at the first write.

LARGE = 1 << 20  # bytes: a smaller array is copied by its framework
_PIECE = 8 << 20  # bytes that are copied at once

Range = tuple[int, int]  # an address, and how many bytes


class Copies:
    """Copies that are still to be made. ``run`` makes them; until then the targets hold what they held. ``files``: where the
    sources lie, if not in memory that is right already."""

    def __init__(self, files: Sequence[ComparedFile] = ()) -> None:
        self._files = files
        self._pieces: list[FilePart] = []
        self._later: list[tuple[Range, Callable[[], object]]] = []
        self._arrays: list[object] = []

    def add(self, target: int, source: int, size: int, *arrays: object) -> None:
        """Copy ``size`` bytes, from one address to another. ``arrays``: those that they belong to, held until ``run``."""
        self._arrays += arrays
        self._pieces.append(FilePart(target, source, size))

    def later(self, source: int, size: int, copy: Callable[[], object]) -> None:
        """Let ``copy`` take the bytes at ``source`` itself, in its turn."""
        self._later.append(((source, size), copy))

    def hold(self, sources: Iterable[Range]) -> None:
        """Make small arrays usable where they lie, now. Raises as ``run`` does."""
        for file, found in self._by_file(sources):
            file.hold(found)

    def use(self, sources: Iterable[Range]) -> None:
        """Make large arrays usable where they lie, now. Raises as ``run`` does."""
        for file, found in self._by_file(sources):
            file.compare(found)

    def run(self) -> None:
        """Raises what reading the files raises (``ComparedFile``), and what the copies of ``later`` raise."""
        pieces, self._pieces = self._pieces, []
        later, self._later = self._later, []
        self.use(source for source, _ in later)
        left = pieces
        for file in self._files:
            mine = [one for one in left if file.owns(one.at)]
            left = [one for one in left if not file.owns(one.at)]
            file.copy(one._replace(at=one.at - file.address) for one in mine)
        parts = [
            (target + at, source + at, min(_PIECE, size - at))
            for target, source, size in left
            for at in range(0, size, _PIECE)
        ]
        for _ in in_parallel(lambda one: ctypes.memmove(*one), parts):  # lets go of the interpreter's lock
            pass
        for _, copy in later:
            copy()
        self._arrays.clear()

    def _by_file(self, sources: Iterable[Range]) -> Iterable[tuple[ComparedFile, list[Range]]]:
        wanted = list(sources) if self._files else []
        for file in self._files:
            yield (
                file,
                [(at - file.address, at - file.address + size) for at, size in wanted if size and file.owns(at)],
            )
