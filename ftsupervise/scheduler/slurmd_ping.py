"""Which nodes' slurmd answer? A TCP connection to each, all at once: it finds a dead node in a second, Slurm in SlurmdTimeout.

srun itself has to reach every slurmd from here to start its tasks, so nothing stands between them and us.
"""

from __future__ import annotations

import errno
import re
import select
import socket
import time
from collections.abc import Mapping

_PATIENCE = 2.0  # seconds for all of them together
_AT_ONCE = 500  # connections that are tried at the same time
DEFAULT_PORT = 6818
_NODE = re.compile(r"^NodeName=(\S+).*?\bNodeAddr=(\S+)", re.M)
_PORT = re.compile(r"\bPort=(\d+)")


def addresses(shown: str, port: int) -> dict[str, tuple[str, int]]:
    """node -> address and port, from ``scontrol show node -o`` (which names a port only where it is not the usual one)."""
    found = {}
    for line in shown.splitlines():
        node, own = _NODE.search(line), _PORT.search(line)
        if node:
            found[node[1]] = (node[2], int(own[1]) if own else port)
    return found


def silent(where: Mapping[str, tuple[str, int]], patience: float = _PATIENCE) -> tuple[str, ...]:
    """The nodes that refuse or do not answer. () when none answers: then the network of this host is at fault."""
    names = list(where)
    answered: set[str] = set()
    for begin in range(0, len(names), _AT_ONCE):
        answered |= _try({name: where[name] for name in names[begin : begin + _AT_ONCE]}, patience)
    return tuple(name for name in names if name not in answered) if answered else ()


def _try(where: Mapping[str, tuple[str, int]], patience: float) -> set[str]:
    waiting: dict[int, tuple[str, socket.socket]] = {}
    answered: set[str] = set()
    poll = select.poll()
    try:
        for name, (host, port) in where.items():
            try:
                family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                one = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, proto)
            except OSError:
                answered.add(name)  # a name we cannot look up says nothing about the node
                continue
            waiting[one.fileno()] = (name, one)
            if one.connect_ex(address) in (0, errno.EINPROGRESS):
                poll.register(one, select.POLLOUT)
        until = time.monotonic() + patience
        left = len(waiting)
        while left and (rest := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(rest * 1000):
                poll.unregister(fd)
                left -= 1
                if waiting[fd][1].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    answered.add(waiting[fd][0])
    finally:
        for _, one in waiting.values():
            one.close()
    return answered
