"""A client's session with a standby: the request received so far."""

from __future__ import annotations

import marshal
import os
import socket
from dataclasses import dataclass, field
from typing import Any

from ftsupervise.warm import client as proxy


@dataclass
class Caller:
    """One connection, and the child that was forked for it."""

    link: socket.socket
    until: float  # monotonic: it is dropped then, unless it has a child
    data: bytearray = field(default_factory=bytearray)
    request: dict[str, Any] | None = None
    fds: list[int] = field(default_factory=list)
    whole: bool = False  # its request is complete; the fork waits until no process of an older attempt lives
    refused: str = ""  # or it gets this refusal then: its cold start must not meet an older attempt either
    pid: int = 0

    @property
    def attempt(self) -> int:
        return attempt_of(self.request)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.link.close()


def attempt_of(request: dict[str, Any] | None) -> int:
    number = (request or {}).get("env", {}).get(b"FTSUPERVISE_ATTEMPT", b"")
    return int(number) if number.isdigit() else 0


def whole(data: bytearray) -> dict[str, Any] | None:
    """The request once it is complete. Raises nothing: an invalid one is dropped at its bound."""
    head = len(proxy.PROTOCOL)
    if len(data) < head + 8 or not data.startswith(proxy.PROTOCOL):
        return None
    size = int.from_bytes(data[head : head + 8], "little")
    if len(data) < head + 8 + size:
        return None
    try:
        request = marshal.loads(bytes(data[head + 8 : head + 8 + size]))
        return dict(request) if isinstance(request["fds"], list) and isinstance(request["env"], dict) else None
    except (EOFError, ValueError, TypeError, KeyError):
        return None
