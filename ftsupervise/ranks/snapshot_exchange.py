"""The process beside a node's agent that copies snapshots: its ranks' to the buddy node, and the other neighbour's to here.

    supervisor  -> order (buddy, attempt, which generation) ->  agent  ->  exchange  ->  ``kept`` page, read by the ranks
    supervisor  <- report (port, newest step, what the buddy has) <-  agent  <-  exchange

It is a fork of the agent, so that nothing here can hold up the agent's reports, and it runs at nice 19 within a share of the
node's cores: one thread sends, one for each connection receives. It sends one generation at a time, the one that the supervisor
has named beforehand to all nodes; the ranks keep that one until every buddy has it (``memory_pins.py``). Where the ranks wait
for their copies it names none, and each is copied at once (``snapshot_at_once.py``).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from time import monotonic

from ftsupervise.checkpoints.memory_folder import make, node_folder
from ftsupervise.checkpoints.memory_pins import Pins, PinsPage
from ftsupervise.checkpoints.memory_slots import SnapshotId
from ftsupervise.host.processes import die_with_parent
from ftsupervise.ranks.protocol import own_addresses
from ftsupervise.ranks.snapshot_at_once import CopyAtOnce
from ftsupervise.ranks.snapshot_copy import (
    NotTaken,
    TokenBucket,
    has_writer,
    open_all,
    rate_of,
    receive_snapshot,
    require_room,
    send_snapshot,
)
from ftsupervise.ranks.snapshot_door import CopyServer
from ftsupervise.ranks.snapshot_orders import CopyOrder, CopyReport, pack, read_order
from ftsupervise.ranks.snapshot_wire import ChannelBroken, SnapshotChannel, connect

_LOOK = 0.05  # seconds between two looks for the snapshot that is wanted
_REPORT = 1.0  # seconds between two reports without news
_AGAIN = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between two tries to reach the buddy
_NICE = 19


class SnapshotExchange:
    """Runs in a process of its own until the agent closes its end of ``talk``."""

    def __init__(
        self, folder: str, node: str, key: bytes, talk: socket.socket, share: float, at_once: bool = False
    ) -> None:
        """Open the folder and the sockets. ``at_once``: ranks wait for their copies. Raises OSError when there can be none."""
        self.lock = make(folder, node)
        if self.lock is None:
            raise OSError(f"cannot make {folder}")
        self._place, self._talk = node_folder(folder, node), talk
        self._sender = CopySender(self._place, key, TokenBucket(rate_of(share)))
        self._server = CopyServer(self._place, key, lambda: self._sender.order)
        self._at_once = CopyAtOnce(self._place, key, lambda: self._sender.order) if at_once else None
        self._pins = PinsPage(self._place, write=True)
        host = next((one for one in reversed(own_addresses()) if one[:1].isdigit()), "")
        self._self = CopyReport(port=self._server.port, host=host)
        self._told, self._told_at = CopyReport(), 0.0

    def run(self) -> None:
        threading.Thread(target=self._sender.run, name="snapshots-out", daemon=True).start()
        while self._hear(_LOOK):
            self._tell()

    def _hear(self, seconds: float) -> bool:
        """Obey the orders that have come; return False when the agent has gone."""
        if not select.select([self._talk], [], [], seconds)[0]:
            return True
        raw = self._talk.recv(1 << 16)
        order, before = read_order(raw), self._sender.order
        if order is not None and order.number > before.number:
            self._pins.write(Pins(order.held, order.wanted))
            if order.held > before.held:
                drop_old(self._place, order.held)
            self._sender.obey(order)
        return bool(raw)

    def _tell(self) -> None:
        ranks, world, newest = own_snapshots(self._place)
        report = self._sender.progress(self._self)._replace(ranks=ranks, world=world, newest=newest)
        if self._at_once is not None:
            report = self._at_once.progress(report, self._sender.order)
        now, old = monotonic(), self._told
        sent = old.sent if self._at_once is not None else report.sent  # each step is no news
        urgent = report._replace(newest=old.newest, sent=sent) != old
        if not urgent and now < self._told_at + _REPORT:
            return
        self._told, self._told_at = report, now
        try:
            self._talk.send(pack(report))
        except OSError:  # it has gone: ``_hear`` sees it
            return


class CopySender:
    """Copies the snapshots of this node's ranks to its buddy, one step at a time, as the last order says."""

    def __init__(self, place: str, key: bytes, bucket: TokenBucket) -> None:
        self.order = CopyOrder(0, 0)
        self._place, self._key, self._bucket = place, key, bucket
        self._news = threading.Condition()
        self._sent = SnapshotId(-1, 0)
        self._missed, self._problem = -1, ""

    def obey(self, order: CopyOrder) -> None:
        with self._news:
            self.order = order
            self._news.notify_all()

    def progress(self, report: CopyReport) -> CopyReport:
        """Return ``report`` with the progress of the copies."""
        with self._news:
            return report._replace(
                sent=self._sent.step,
                attempt=self._sent.attempt,
                missed=self._missed,
                order=self.order.number,
                problem=self._problem[:200],
            )

    def run(self) -> None:
        channel: SnapshotChannel | None = None
        tries, of = 0, ("", 0)
        while True:
            with self._news:
                self._news.wait(_LOOK)
                order = self.order
            if (order.host, order.port) != of:
                _close(channel)
                channel, tries, of = None, 0, (order.host, order.port)
            wanted = self._wanted(order)
            if wanted is None:
                continue
            try:
                channel = channel or connect(order.host, order.port, self._key)
                self._send_all(channel, wanted, order.held)
                tries = 0
            except NotTaken as error:
                self._note(str(error))
            except (ChannelBroken, OSError) as error:
                if tries:  # the first time it may only be that the buddy has closed an idle connection
                    self._note(str(error))
                _close(channel)
                channel = None
                threading.Event().wait(0 if not tries else _AGAIN[min(tries, len(_AGAIN)) - 1])
                tries += 1

    def _wanted(self, order: CopyOrder) -> SnapshotId | None:
        """Return the snapshot that goes next; None where there is none yet, or no buddy."""
        done = self._sent.step >= order.wanted and self._sent.attempt == order.attempt
        if not order.host or order.wanted < 0 or done:
            return None
        first: set[SnapshotId | None] = set()
        for file in open_all(self._place):
            with file:
                try:
                    if has_writer(file):
                        fits = (one for one in file.held() if one.step >= order.wanted and one.attempt == order.attempt)
                        first.add(min(fits, default=None))
                except OSError:
                    first.add(None)
        if len(first) > 1 and None not in first:  # the order to keep it reached the ranks too late
            self._missed = order.wanted
        return first.pop() if len(first) == 1 else None

    def _send_all(self, channel: SnapshotChannel, wanted: SnapshotId, held: int) -> None:
        files = open_all(self._place)
        try:
            for file in files:
                if has_writer(file):
                    channel.send({"do": "put", "held": held})  # the buddy may not have heard of that yet
                    send_snapshot(channel, file, wanted, self._bucket)
        finally:
            for file in files:
                file.close()
        with self._news:
            self._sent, self._problem = wanted, ""

    def _note(self, problem: str) -> None:
        with self._news:
            self._problem = problem


def own_snapshots(place: str) -> tuple[int, int, int]:
    """Return the ranks of this node that make snapshots, their world, and the newest step that all of them have."""
    steps, world = [], 0
    for file in open_all(place):
        with file:
            try:
                if has_writer(file):
                    steps.append({one.step for one in file.held()})
                    world = file.world
            except OSError:
                return 0, 0, -1
    return len(steps), world, max(set.intersection(*steps), default=-1) if steps else -1


def drop_old(place: str, held: int) -> None:
    """Remove the copies of ranks that have another buddy now: the run holds the newer step ``held`` elsewhere."""
    for file in open_all(place):
        with file:
            try:
                if not has_writer(file) and all(one.step < held for one in file.held()):
                    os.unlink(file.path)
            except OSError:
                continue


def _close(channel: SnapshotChannel | None) -> None:
    if channel is not None:
        channel.close()


# ------------------------------------------------------------------------------------------------------- its process


def start_exchange(
    folder: str, node: str, key: bytes, share: float, at_once: bool = False
) -> tuple[int, socket.socket]:
    """Fork the exchange; return its process and the agent's end of the link. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = die_with_parent(signal.SIGKILL)
    pid = os.fork()
    if pid:
        theirs.close()
        ours.setblocking(False)
        return pid, ours
    try:
        ours.close()
        before()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # it ends with its agent, which may have ranks to wait for
        if not at_once:  # else a training step waits for it
            os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        SnapshotExchange(folder, node, key, theirs, share, at_once).run()
    except BaseException:  # whatever the error, two agents would be worse
        pass
    finally:
        os._exit(0)


def fetch(place: str, rank: int, wanted: SnapshotId, host: str, port: int, key: bytes) -> None:
    """Bring a rank's snapshot from another node to here, as fast as it goes. Raises NotTaken, ChannelBroken."""
    channel = connect(host, port, key)
    try:
        channel.send({"do": "get", "rank": rank, "step": wanted.step, "attempt": wanted.attempt})
        receive_snapshot(channel, place, (), lambda size: require_room(place, size))
    finally:
        channel.close()
