"""The process beside a node's agent that copies snapshots: its ranks' to the buddy node, and the other neighbour's to here.

    supervisor  -> order (buddy, attempt, which generation) ->  agent  ->  exchange  ->  ``kept`` page, read by the ranks
    supervisor  <- report (port, newest step, what the buddy has) <-  agent  <-  exchange

It is a fork of the agent, so that nothing here can hold up the agent's reports, and it runs at nice 19 within a share of the
node's cores: one thread sends, one for each connection receives. It sends one generation at a time, the one that the supervisor
has named beforehand to all nodes; the ranks keep that one until every buddy has it (``memory_pins.py``).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

from ftsupervise.checkpoints.memory_folder import make, node_folder, rank_file
from ftsupervise.checkpoints.memory_pins import Pins, PinsPage
from ftsupervise.checkpoints.memory_slots import SlotHeader, SnapshotId, open_slots
from ftsupervise.host.processes import die_with_parent
from ftsupervise.ranks.protocol import own_addresses
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
from ftsupervise.ranks.snapshot_wire import ChannelBroken, SnapshotChannel, accept, connect
from ftsupervise.rundir.records import as_count, decode, encode

_LOOK = 0.05  # seconds between two looks for the generation that is wanted
_REPORT = 1.0  # seconds between two reports without news
_AGAIN = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds between two tries to reach the buddy
_STRANGERS = 32  # connections that have proven nothing yet; the oldest goes
_NICE = 19
LARGEST = 1200  # bytes of an order or a report


class CopyOrder(NamedTuple):
    """What the supervisor tells a node."""

    number: int  # grows: an older one is not obeyed
    attempt: int
    host: str = ""  # of the buddy; "" where there is none
    port: int = 0
    held: int = -1  # the step that every buddy holds
    wanted: int = -1  # the first snapshot from this step on is copied next


class CopyReport(NamedTuple):
    """What a node tells the supervisor."""

    port: int = 0  # where it takes snapshots
    ranks: int = 0  # that run here and make snapshots
    world: int = 0
    newest: int = -1  # step that all of them have
    sent: int = -1  # step that the buddy has of all of them
    attempt: int = 0  # of ``sent``
    missed: int = -1  # a ``wanted`` that came too late
    order: int = 0  # the last one that was obeyed
    host: str = ""  # how others reach this node, as it thinks
    problem: str = ""


def pack(word: CopyOrder | CopyReport) -> bytes:
    return json.dumps(encode(word, sparse=True)).encode()


def read_order(raw: bytes) -> CopyOrder | None:
    try:
        return decode(CopyOrder, json.loads(raw), lenient=True)
    except ValueError:
        return None


def read_report(raw: bytes) -> CopyReport | None:
    try:
        return decode(CopyReport, json.loads(raw), lenient=True)
    except ValueError:
        return None


class SnapshotExchange:
    """Runs in a process of its own until the agent closes its end of ``talk``."""

    def __init__(self, folder: str, node: str, key: bytes, talk: socket.socket, share: float) -> None:
        """Raises OSError when there can be no folder or no socket."""
        self.held = make(folder, node)
        if self.held is None:
            raise OSError(f"cannot make {folder}")
        self._place, self._key, self._talk = node_folder(folder, node), key, talk
        self._bucket = TokenBucket(rate_of(share))
        self._pins = PinsPage(self._place, write=True)
        self._order = CopyOrder(0, 0)
        self._news = threading.Condition()
        self._lock = threading.Lock()
        self._report = CopyReport()
        self._told, self._told_at = CopyReport(), 0.0
        self._problem, self._missed = "", -1
        self._host = next((one for one in reversed(own_addresses()) if one[:1].isdigit()), "")
        self._door = _Door(key, self._serve)

    def run(self) -> None:
        sender = threading.Thread(target=self._send_for_ever, name="snapshots-out", daemon=True)
        sender.start()
        while self._hear(_LOOK):
            self._tell()

    # ------------------------------------------------------------------------------------------------ with the agent

    def _hear(self, seconds: float) -> bool:
        """Obey what has come; False when the agent has gone."""
        if not select.select([self._talk], [], [], seconds)[0]:
            return True
        raw = self._talk.recv(1 << 16)
        order = read_order(raw)
        if order is not None and order.number > self._order.number:
            self._pins.write(Pins(order.held, order.wanted))
            if order.held > self._order.held:
                self._drop_old(order.held)
            with self._news:
                self._order = order
                self._news.notify_all()
        return bool(raw)

    def _tell(self) -> None:
        ranks, world, newest = self._own()
        with self._lock:
            report = self._report._replace(ranks=ranks, world=world, newest=newest, order=self._order.number)
            report = report._replace(
                port=self._door.port, host=self._host, missed=self._missed, problem=self._problem[:200]
            )
        now = monotonic()
        urgent = report._replace(newest=self._told.newest) != self._told
        if not urgent and now < self._told_at + _REPORT:
            return
        self._told, self._told_at = report, now
        try:
            self._talk.send(pack(report))
        except OSError:  # it has gone: ``_hear`` sees it
            return

    def _own(self) -> tuple[int, int, int]:
        """Ranks of this node that make snapshots, their world, and the newest step that all of them have."""
        files = open_all(self._place)
        try:
            own = [file for file in files if has_writer(file)]
            steps = [{one.step for one in file.held()} for file in own]
            common = set.intersection(*steps) if steps else set()
            return len(own), own[0].world if own else 0, max(common, default=-1)
        except OSError:
            return 0, 0, -1
        finally:
            for file in files:
                file.close()

    def _drop_old(self, held: int) -> None:
        """Remove the copies of ranks that have another buddy now: all of the run holds a newer step elsewhere."""
        for file in open_all(self._place):
            with file:
                try:
                    if not has_writer(file) and all(one.step < held for one in file.held()):
                        os.unlink(file.path)
                except OSError:
                    continue

    # ------------------------------------------------------------------------------------------------------- sending

    def _send_for_ever(self) -> None:
        channel: SnapshotChannel | None = None
        tries, of = 0, ("", 0)
        while True:
            with self._news:
                self._news.wait(_LOOK)
                order = self._order
            if (order.host, order.port) != of:
                _close(channel)
                channel, tries, of = None, 0, (order.host, order.port)
            wanted = self._wanted(order)
            if wanted is None:
                continue
            try:
                channel = channel or connect(order.host, order.port, self._key)
                self._send_all(channel, wanted, order)
                tries = 0
            except NotTaken as error:
                self._problem = str(error)
            except (ChannelBroken, OSError) as error:
                # the first time it may only be that the buddy has closed an idle connection
                self._problem = str(error) if tries else self._problem
                _close(channel)
                channel = None
                threading.Event().wait(0 if not tries else _AGAIN[min(tries, len(_AGAIN)) - 1])
                tries += 1

    def _wanted(self, order: CopyOrder) -> SnapshotId | None:
        """The generation that goes next; None where there is none yet, or no buddy."""
        done = self._report.sent >= order.wanted and self._report.attempt == order.attempt
        if not order.host or order.wanted < 0 or done:
            return None
        first: set[SnapshotId | None] = set()
        files = open_all(self._place)
        try:
            for file in files:
                if has_writer(file):
                    fits = (one for one in file.held() if one.step >= order.wanted and one.attempt == order.attempt)
                    first.add(min(fits, default=None))
        except OSError:
            return None
        finally:
            for file in files:
                file.close()
        if len(first) > 1 and None not in first:  # the ranks heard too late what to keep
            self._missed = order.wanted
        return first.pop() if len(first) == 1 else None

    def _send_all(self, channel: SnapshotChannel, wanted: SnapshotId, order: CopyOrder) -> None:
        files = open_all(self._place)
        try:
            for file in files:
                if has_writer(file):
                    channel.send({"do": "put"})
                    send_snapshot(channel, file, wanted, self._bucket)
        finally:
            for file in files:
                file.close()
        with self._lock:
            self._problem = ""
            self._report = self._report._replace(sent=wanted.step, attempt=wanted.attempt)

    # ----------------------------------------------------------------------------------------------------- receiving

    def _serve(self, channel: SnapshotChannel) -> None:
        """One connection: "put" brings a snapshot of a rank that runs elsewhere, "get" fetches one for it."""
        while True:
            asked = channel.receive()
            try:
                if asked.get("do") == "put":
                    spared = self._spared()
                    receive_snapshot(channel, self._place, spared, self._may_take, self._refuse)
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

    def _spared(self) -> frozenset[SnapshotId]:
        held = self._order.held
        return frozenset(SnapshotId(held, attempt) for attempt in range(self._order.attempt + 1))

    def _refuse(self, header: SlotHeader) -> str:
        """An older attempt may still be alive on a node that Slurm has lost: nothing of it is taken."""
        if header.attempt != self._order.attempt:
            return f"attempt {header.attempt} is not the one that runs here ({self._order.attempt})"
        try:
            with open_slots(rank_file(self._place, header.rank)) as file:
                return f"rank {header.rank} runs here" if has_writer(file) else ""
        except (OSError, ValueError):
            return ""

    def _may_take(self, size: int) -> None:
        require_room(self._place, size)


class _Door:
    """Listens, and lets in who knows the key: a thread for each connection."""

    def __init__(self, key: bytes, serve: Callable[[SnapshotChannel], None]) -> None:
        """Raises OSError."""
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
        while True:
            try:
                sock = self._sock.accept()[0]
            except OSError:  # too many open files: some will go
                threading.Event().wait(0.1)
                continue
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


def _close(channel: SnapshotChannel | None) -> None:
    if channel is not None:
        channel.close()


# ------------------------------------------------------------------------------------------------------- its process


def start_exchange(folder: str, node: str, key: bytes, share: float) -> tuple[int, socket.socket]:
    """Fork it; returns its process and the agent's end of the talk. Raises OSError."""
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
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        SnapshotExchange(folder, node, key, theirs, share).run()
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
