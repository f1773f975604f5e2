"""UDP sockets that speak both IPv4 and IPv6 where the host does, and the addresses that a name may mean."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

Address = tuple[Any, ...]  # as sockets take it

_BUFFER = 8 << 20  # bytes wanted for what comes in while we are busy; the kernel gives what it allows


def udp(port: int = 0) -> socket.socket:
    """A socket on all addresses of this host that never blocks. Raises OSError."""
    try:
        one = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        one.bind(("::", port))
    except OSError:  # no IPv6 here
        one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        one.bind(("0.0.0.0", port))
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    except OSError:
        pass
    return one


def resolve(sock: socket.socket, hosts: Iterable[str], port: int) -> list[Address]:
    """All that ``hosts`` may mean to ``sock``, each once, in order. Names that nobody knows are left out."""
    found: dict[Address, None] = {}
    flags = socket.AI_V4MAPPED | socket.AI_ALL if sock.family == socket.AF_INET6 else 0
    for host in hosts:
        try:
            told = socket.getaddrinfo(host, port, sock.family, socket.SOCK_DGRAM, 0, flags)
        except (OSError, UnicodeError):
            continue
        for *_, address in told:
            found[address] = None
    return list(found)


def send(sock: socket.socket, data: bytes, to: Address) -> bool:
    """Hand a datagram to the kernel; what it does not take is lost, as any may be."""
    try:
        sock.sendto(data, to)
    except OSError:
        return False
    return True


def names() -> list[str]:
    """What this host is called, and the addresses it would use to reach others; the surest first."""
    own = [os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()]
    found = [name for name in own if name]
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):  # documentation addresses
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((far, 9))  # sends nothing: it asks the routing table
                found.append(probe.getsockname()[0])
        except OSError:
            continue
    return list(dict.fromkeys(found))
