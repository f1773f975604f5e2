"""TCP ports of this host that a job can be told to listen on.

A port is tried by binding it, and given back at once: nothing can hold it for a process that is yet to start.
"""

from __future__ import annotations

import errno
import socket
import threading
import zlib
from collections.abc import Iterable

_FIRST, _COUNT = 20_000, 10_000  # below those that the kernel gives away (ip_local_port_range)
_TRIES = 8  # ports of one turn
_LISTENS = "0A"  # the state in /proc/net/tcp
_ANY = ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0"))


def first_free(ports: Iterable[int]) -> int | None:
    """The first of ``ports`` that no process of this host uses, on any of its addresses; None when all are in use.

    Sockets of ended connections count as well, for the minute that the kernel keeps them.
    """
    return next((port for port in ports if _is_free(port)), None)


def free_port(ports: Iterable[int]) -> int:
    """The first of ``ports`` that is free; where all are in use, as by an account that knows them too, one that the kernel
    chooses. 0 when no port of this host is free."""
    return first_free(ports) or first_free(_chosen() for _ in range(_TRIES)) or 0


def _chosen() -> int:
    for family, address in _ANY:
        try:
            with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as one:
                one.bind((address, 0))
                return int(one.getsockname()[1])
        except OSError:
            continue
    return 0


def _is_free(port: int) -> bool:
    if not port:
        return False
    for family, address in _ANY:
        try:
            with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as one:
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind((address, port))
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # this host has no IPv6, or no IPv4
                return False
    return True


def ports_of(name: str, turn: int) -> list[int]:
    """The ports that ``name`` may have in its ``turn``, the first that is free counts; none that it had in the 1,249 turns
    before. Pure. ``name``: a run's directory, and what of it needs a port."""
    begin = zlib.crc32(name.encode()) // _TRIES * _TRIES + turn * _TRIES
    return [_FIRST + (begin + number) % _COUNT for number in range(_TRIES)]


# The addresses at which a listener is reached as ``localhost``, by the kernel's tables: the first that is there has the port.
_SERVES = {
    "127.0.0.1": (
        *("0100007F", "0000000000000000FFFF00000100007F", "00000000", "0000000000000000FFFF000000000000"),
        "00000000000000000000000000000000",
    ),
    "::1": ("00000000000000000000000001000000", "00000000000000000000000000000000"),
}


def listener(port: int) -> int | None:
    """The account (uid) that listens at ``port`` of this host, on any address; None if none does, or it cannot be seen."""
    return next(iter(_listeners(port).values()), None)


def listeners_here(port: int) -> dict[str, int]:
    """Address by which this host reaches itself ("127.0.0.1", "::1") -> the account (uid) that listens there at ``port``."""
    found = _listeners(port)
    named = {here: next((found[at] for at in rows if at in found), None) for here, rows in _SERVES.items()}
    return {here: uid for here, uid in named.items() if uid is not None}


def _listeners(port: int) -> dict[str, int]:
    """Address, as the kernel has it -> the account that listens there at ``port``. Source: /proc/net/tcp in proc(5)."""
    found: dict[str, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table, encoding="ascii") as file:  # noqa: PTH123
                rows = [line.split() for line in file]
        except OSError:
            continue
        for row in rows:
            address, _, at = row[1].rpartition(":")
            if len(row) > 7 and row[3] == _LISTENS and at == f"{port:04X}":
                found.setdefault(address, int(row[7]))
    return found


_STRANGERS = 32  # connections that have proven nothing yet


class Unproven:
    """The connections to a port of ours whose peers have proven nothing yet. Of more than 32 the oldest is ended, so that other
    accounts take few threads and descriptors, and keep nobody out."""

    def __init__(self) -> None:
        self._all: dict[socket.socket, None] = {}
        self._lock = threading.Lock()

    def add(self, sock: socket.socket) -> None:
        with self._lock:
            self._all[sock] = None
            oldest = next(iter(self._all)) if len(self._all) > _STRANGERS else None
        if oldest is not None:
            self.end(oldest)

    def remove(self, sock: socket.socket) -> None:
        """Count it no more: its peer has proven who it is, or it has ended."""
        with self._lock:
            self._all.pop(sock, None)

    def end(self, sock: socket.socket) -> None:
        """Have its thread end. It counts no more: the next one that is too many is another."""
        self.remove(sock)
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
