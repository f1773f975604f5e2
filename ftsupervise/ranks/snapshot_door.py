"""Takes the snapshots of other nodes, and serves ours: one port, and a thread for each connection.

A peer that does not prove within seconds that it knows the key of this run is shut out, and never holds up another one.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from ftsupervise.checkpoints.memory_folder import rank_file
from ftsupervise.checkpoints.memory_slots import SlotHeader, SnapshotId, open_slots
from ftsupervise.ranks.snapshot_copy import (
    NotTaken,
    TokenBucket,
    has_writer,
    receive_snapshot,
    require_room,
    send_snapshot,
)
from ftsupervise.ranks.snapshot_orders import CopyOrder
from ftsupervise.ranks.snapshot_wire import ChannelBroken, SnapshotChannel, accept, accepted
from ftsupervise.rundir.records import as_count

_STRANGERS = 32  # connections that have proven nothing yet; the oldest goes


class CopyServer:
    """Serves the connections of one node, whose folder is ``place``. ``order()``: the supervisor's last order."""

    def __init__(self, place: str, key: bytes, order: Callable[[], CopyOrder]) -> None:
        """Open the port. Raises OSError."""
        self._place, self._order = place, order
        self._door = _Door(key, self._serve)
        self.port = self._door.port

    def _serve(self, channel: SnapshotChannel) -> None:
        """Serve one connection: "put" brings a snapshot of a rank that runs elsewhere, "get" fetches one for it."""
        while True:
            asked = channel.receive()
            try:
                if asked.get("do") == "put":
                    receive_snapshot(channel, self._place, self._spared(asked), self._may_take, self._refuse)
                elif asked.get("do") == "get":
                    self._give(channel, asked)
                else:
                    raise ChannelBroken("no such request")
            except NotTaken:
                continue

    def _give(self, channel: SnapshotChannel, asked: dict[str, Any]) -> None:
        numbers = [as_count(str(asked.get(name))) for name in ("rank", "step", "attempt")]
        rank, step, attempt = numbers
        if rank is None or step is None or attempt is None:
            raise ChannelBroken("no such request")
        try:
            file = open_slots(rank_file(self._place, rank))
        except (OSError, ValueError) as error:
            channel.send({"why": f"nothing of rank {rank}: {error}"})
            raise NotTaken(str(error)) from None
        with file:
            send_snapshot(channel, file, SnapshotId(step, attempt), TokenBucket(None))

    def _spared(self, asked: dict[str, Any]) -> frozenset[SnapshotId]:
        """Return what is not written over: the step that every buddy holds, as the newer order of the two nodes has it; none
        where each snapshot is copied at once."""
        if asked.get("each") is True:
            return frozenset()
        order, told = self._order(), as_count(str(asked.get("held")))
        held = order.held if told is None else max(order.held, told)
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
        self._unproven: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="snapshots-door", daemon=True).start()

    def _accept(self) -> None:
        for sock in accepted(self._sock):
            with self._lock:
                self._unproven[sock] = None
                if len(self._unproven) > _STRANGERS:
                    _shut(next(iter(self._unproven)))
            threading.Thread(target=self._let_in, args=(sock,), name="snapshots-in", daemon=True).start()

    def _let_in(self, sock: socket.socket) -> None:
        with sock:
            try:
                channel = accept(sock, self._key)
                with self._lock:
                    self._unproven.pop(sock, None)
                self._serve(channel)
            except (ChannelBroken, OSError):
                pass
            finally:
                with self._lock:
                    self._unproven.pop(sock, None)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
