"""TCP ports of this host that a job can be told to listen on.

A port is tried by binding it, and given back at once: nothing can hold it for a process that is yet to start.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

_ANY = ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0"))


def first_free(ports: Iterable[int]) -> int | None:
    """The first of ``ports`` that no process of this host uses, on any of its addresses; None when all are in use.

    Sockets of ended connections count as well, for the minute that the kernel keeps them.
    """
    return next((port for port in ports if _is_free(port)), None)


def _is_free(port: int) -> bool:
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
