"""Copies each snapshot to the buddy at once, while the rank that made it waits: no step that has counted is made again.

A thread for each rank of the node, with a connection to the buddy of its own. It tries again for as long as the rank waits,
since the supervisor may not have named a buddy yet. A buddy that takes no connection is given up soon: the rank goes on
without its copy, and meets the loss of that node in its next collective.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from time import monotonic

from ftsupervise.checkpoints.memory_folder import rank_file
from ftsupervise.checkpoints.memory_slots import SnapshotId, open_slots
from ftsupervise.checkpoints.memory_wait import Asked, answer, listen
from ftsupervise.ranks.snapshot_copy import NotTaken, TokenBucket, send_snapshot
from ftsupervise.ranks.snapshot_orders import CopyOrder, CopyReport
from ftsupervise.ranks.snapshot_wire import ChannelBroken, SnapshotChannel, accepted, connect

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
                        channel.send({"do": "put", "held": -1, "each": True})
                        send_snapshot(channel, file, wanted, TokenBucket(None))
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
