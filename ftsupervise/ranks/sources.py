"""The sources from which the supervisor learns of the ranks: the agents' datagrams, its own node's pages, or beats in
the run directory.

Each source has a thread that lives as long as the supervisor and fills the ``RankTable``: a death is received also
while the supervisor waits for Slurm.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from time import monotonic

from ftsupervise.host.in_time import Every
from ftsupervise.ranks.observe import RankObserver
from ftsupervise.ranks.protocol import RankExit, send_datagram
from ftsupervise.ranks.rank_table import RankTable
from ftsupervise.rundir.heartbeat_page import of_the_group, read_beats
from ftsupervise.rundir.ledger import counted
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Beat, RankState

_MANY = 200  # nodes above which datagrams are gathered before they are taken
_GATHER = 0.004  # seconds; less than what the kernel keeps for us in a burst
_AT_ONCE = 5000
_SWITCH = 0.0002  # seconds after which a busy thread lets another one run
_NEW = 0.1  # seconds between two checks of our own node while pages still appear
_EVERY_BEATS = 2.0  # seconds
_SHARE = 10  # a reading of the beats that takes T is repeated after 10 T at the earliest


class Listener:
    """The thread that receives datagrams.

    ``sock``: where the agents send. ``base``, ``node``: the pages of our own node, read here.
    """

    def __init__(self, table: RankTable, sock: socket.socket | None, base: str = "", node: str = "") -> None:
        self._table, self._sock = table, sock
        self._poll = select.poll()
        self._observer = RankObserver(base, node, self._poll) if base else None
        self._over = False
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._read, select.POLLIN)
        if sock is not None:
            self._poll.register(sock, select.POLLIN)
        self._due = 0.0
        self._thread = threading.Thread(target=self._listen, name="rank-reports", daemon=True)
        self._thread.start()

    def look_now(self) -> None:
        """Check soon: a first page is about to appear."""
        self._due = 0.0
        try:
            os.write(self._write, b"\0")
        except OSError:
            return

    def dying(self) -> list[RankExit]:
        """Return the same as ``RankObserver.dying``, of our own node."""
        return self._observer.dying() if self._observer is not None else []

    def close(self) -> None:
        self._over = True
        self.look_now()
        self._thread.join(2.0)
        if not self._thread.is_alive():
            os.close(self._read)
            os.close(self._write)
            if self._observer is not None:
                self._observer.close()

    def _listen(self) -> None:
        observer = self._observer
        while not self._over:
            rest = None if observer is None else max(0.0, self._due - monotonic()) * 1000
            for fd, _ in self._poll.poll(rest):
                if fd == self._read:
                    os.read(self._read, 4096)
                elif self._sock is not None and fd == self._sock.fileno():
                    self._drain(self._sock)
                elif observer is not None and observer.on_ready(fd):
                    self._put(observer, self._table.local)
            if observer is not None and monotonic() >= self._due:
                self._put(observer, observer.check())
                self._due = monotonic() + (min(_NEW, self._table.every) if observer.is_early() else self._table.every)

    def _put(self, observer: RankObserver, states: Sequence[RankState]) -> None:
        if observer.attempt == self._table.attempt:
            self._table.put(states, observer.exits(), observer.tally())

    def _drain(self, sock: socket.socket) -> None:
        table, receive = self._table, sock.recvfrom
        if len(table.nodes) > _MANY:
            if sys.getswitchinterval() > _SWITCH:  # else each datagram waits 5 ms for a busy thread
                sys.setswitchinterval(_SWITCH)
            time.sleep(_GATHER)
        take, now = table.take, monotonic()
        table.draining = True
        try:
            for _ in range(_AT_ONCE):
                data, sender = receive(2048)
                answer = take(data, sender, now)
                if answer is not None:
                    send_datagram(sock, answer, sender)
        except OSError:  # none left
            return
        finally:
            table.draining = False


class BeatPoller:
    """Reads beats while ``needed()`` and puts them into the table: for nodes without a reachable agent. Slower, but needs no
    network. Clocks of hosts differ, so the time when we saw a beat change counts."""

    def __init__(self, rundir: RunDir, table: RankTable, needed: Callable[[], bool]) -> None:
        self._rundir, self._table, self._needed = rundir, table, needed
        self._known: dict[int, tuple[Beat, float, float]] = {}  # rank -> its beat, when it and its step were new to us
        self._polling = Every(lambda took: max(_EVERY_BEATS, _SHARE * took), self._poll, "beats")

    def close(self) -> None:
        self._polling.close(0.5)

    def _poll(self) -> None:
        if not self._needed():
            return
        try:
            found = read_beats(self._rundir)
        except OSError:
            return
        mine = [one for one in found if one.facts.get("attempt") == str(self._table.attempt)]
        told = counted(mine)
        first_at = None if told.first_at is None else monotonic() - (time.time() - told.first_at)
        self._table.put_slow(
            self.states(tuple(mine), self._table.attempt, monotonic()), told._replace(first_at=first_at)
        )

    def states(self, beats: tuple[Beat, ...], attempt: int, now: float) -> list[RankState]:
        """Return the states of ``attempt``, with the times at which they were first seen as they are."""
        known, self._known = self._known, {}
        for beat in of_the_group([beat for beat in beats if beat.facts.get("attempt") == str(attempt)]):
            before = known.get(beat.rank)
            at = stepped = now
            if before is not None and before[0].pid == beat.pid:
                at = before[1] if before[0].at == beat.at else now
                stepped = before[2] if before[0].step == beat.step else now
            self._known[beat.rank] = (beat, at, stepped)
        return [
            RankState(
                beat.rank, beat.host, beat.step, beat.phase, stepped, at, now, beat.pid, read="source" in beat.facts
            )
            for beat, at, stepped in self._known.values()
        ]
