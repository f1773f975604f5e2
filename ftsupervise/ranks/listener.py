"""One thread that hears everything about ranks: datagrams of all agents, or this node's own pages and processes.

It belongs to the ring for its whole life, so that a death is heard also while the ring asks Slurm something. What it learns
goes into ``RankTable``; what cannot wait nudges the ring.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from time import monotonic

from ftsupervise.ranks.observe import RankObserver
from ftsupervise.ranks.protocol import ExitRecord
from ftsupervise.ranks.rank_table import RankTable
from ftsupervise.ranks.udp import send
from ftsupervise.truth import RankState

_MANY = 200  # nodes above which datagrams are gathered before they are taken
_GATHER = 0.004  # seconds; less than what the kernel keeps for us in a burst
_AT_ONCE = 5000
_SWITCH = 0.0002  # seconds after which a thread that computes lets another one in
_NEW = 0.1  # seconds between two looks at our own node as long as pages appear


class Listener:
    """``sock``: where the agents send. ``base``, ``node``: the pages of our own node, looked at directly."""

    def __init__(self, pulses: RankTable, sock: socket.socket | None, base: str = "", node: str = "") -> None:
        self.pulses, self.sock = pulses, sock
        self._poll = select.poll()
        self._eyes = RankObserver(base, node, self._poll) if base else None
        self._over = False
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._read, select.POLLIN)
        if sock is not None:
            self._poll.register(sock, select.POLLIN)
        self._due = 0.0
        self._thread = threading.Thread(target=self._listen, name="pulse", daemon=True)
        self._thread.start()

    def look_now(self) -> None:
        """Something is new: a first page is about to appear."""
        self._due = 0.0
        try:
            os.write(self._write, b"\0")
        except OSError:
            return

    def close(self) -> None:
        self._over = True
        self.look_now()
        self._thread.join(2.0)
        if not self._thread.is_alive():
            os.close(self._read)
            os.close(self._write)
            if self._eyes is not None:
                self._eyes.close()

    def _listen(self) -> None:
        while not self._over:
            rest = None if self._eyes is None else max(0.0, self._due - monotonic()) * 1000
            for fd, _ in self._poll.poll(rest):
                if fd == self._read:
                    os.read(self._read, 4096)
                elif self.sock is not None and fd == self.sock.fileno():
                    self._drain(self.sock)
                elif self._eyes is not None and self._eyes.heard(fd):
                    self._tell(self._eyes, self.pulses.local)
            if self._eyes is not None and monotonic() >= self._due:
                self._look(self._eyes)

    def _drain(self, sock: socket.socket) -> None:
        pulses, receive = self.pulses, sock.recvfrom
        if len(pulses.nodes) > _MANY:
            if sys.getswitchinterval() > _SWITCH:  # else each datagram waits 5 ms for whoever computes
                sys.setswitchinterval(_SWITCH)
            time.sleep(_GATHER)
        take, now = pulses.take, monotonic()
        pulses.draining = True
        try:
            for _ in range(_AT_ONCE):
                data, sender = receive(2048)
                answer = take(data, sender, now)
                if answer is not None:
                    send(sock, answer, sender)
        except OSError:  # none left
            return
        finally:
            pulses.draining = False

    def dying(self) -> list[ExitRecord]:
        """As ``RankObserver.dying``, of our own node."""
        return self._eyes.dying() if self._eyes is not None else []

    def _tell(self, eyes: RankObserver, found: Sequence[RankState]) -> None:
        if eyes.attempt == self.pulses.attempt:
            self.pulses.put(found, eyes.news(), eyes.node)

    def _look(self, eyes: RankObserver) -> None:
        self._tell(eyes, eyes.look())
        self._due = monotonic() + (min(_NEW, self.pulses.every) if eyes.is_early() else self.pulses.every)
