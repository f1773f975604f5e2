"""The agent's loop: check the ranks, report to the supervisor, answer it, end when it has gone.

It sleeps until its next report, an exit, a datagram or a signal. Nothing here waits for anything else.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from time import monotonic
from typing import NamedTuple

from ftsupervise.ranks import protocol
from ftsupervise.ranks.observe import RankObserver
from ftsupervise.ranks.protocol import Datagram, ExitRecord, Seal, SupervisorLink
from ftsupervise.ranks.rpc import Answers, reap
from ftsupervise.ranks.shm_dir import clear, leave, own, sweep
from ftsupervise.ranks.snapshot_relay import SnapshotRelay

_SILENT = 40  # reports without an answer after which other addresses are tried again
_LOST = 300.0  # seconds without an answer after which the supervisor counts as gone
_TRY_AGAIN = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # seconds between two reports of an unacknowledged exit
_LAST = 1.0  # seconds for the ranks to end when the supervisor has ended the attempts
_LINGER = 25.0  # seconds that it stays after SIGTERM while there are ranks; Slurm's KillWait is 30 s
_STILL, _LONG = 3, 60  # reports
_NEW = 0.25  # seconds between two checks while pages still appear


class AgentConfig(NamedTuple):
    """The options that the supervisor started the agent with."""

    base: str
    hosts: tuple[str, ...]
    port: int
    generation: int
    every: float = 1.0
    closer: float = 1.0  # used instead while the ranks here make no progress and may soon count as hung
    node: str = ""
    lost: float = _LOST
    snapshots: str = ""  # the folder of the job's snapshots in memory; "" without them
    copies: float = 0.0  # share of this node's cores for copying them


class _UnackedExit:
    """An exit that the supervisor has not acknowledged."""

    __slots__ = ("due", "record", "since", "tries")

    def __init__(self, record: ExitRecord, since: float) -> None:
        self.record, self.since, self.due, self.tries = record, since, since, 0


class ExitReports:
    """The exits of the newest attempt's ranks that the supervisor has not acknowledged; each is reported until it has."""

    def __init__(self, link: SupervisorLink) -> None:
        self.attempt = 0
        self._link = link
        self._unacked: list[_UnackedExit] = []

    def add(self, attempt: int, exits: Iterable[ExitRecord], now: float) -> None:
        if attempt > self.attempt:  # those of the last attempt are old
            self.attempt = attempt
            self._unacked.clear()
        self._unacked.extend(_UnackedExit(one, now) for one in exits)

    def acknowledged(self, exits: Iterable[ExitRecord]) -> None:
        taken = {(one.rank, one.pid, one.final) for one in exits}
        self._unacked = [
            one for one in self._unacked if (one.record.rank, one.record.pid, one.record.final) not in taken
        ]

    def send(self, now: float) -> None:
        for one in self._unacked:
            if now >= one.due:
                self._link.say(
                    protocol.EXIT, self.attempt, protocol.pack_exits([one.record._replace(age=now - one.since)])
                )
                one.due = now + _TRY_AGAIN[min(one.tries, len(_TRY_AGAIN) - 1)]
                one.tries += 1

    def due(self) -> float:
        """When to send next."""
        return min((one.due for one in self._unacked), default=float("inf"))


class Agent:
    def __init__(self, config: AgentConfig, key: bytes) -> None:
        """Raises OSError when there can be no socket."""
        self.config = config
        self.poll = select.poll()
        node = config.node.encode()[:255]
        self.link = SupervisorLink(Seal(key), node, config.generation, config.hosts, config.port, self.poll)
        self.observer = RankObserver(config.base, config.node, self.poll)
        self.exits = ExitReports(self.link)
        self.snapshots = SnapshotRelay(config.snapshots, config.node, key, config.copies, self.poll, self._copies)
        self.answers = Answers(config.node, self.poll, self._dying, self.snapshots.answer)
        self.over = False
        self.orphan = False  # we end because the supervisor has gone without notice
        self.keeps = False  # another agent will follow in this job, and needs the snapshots
        self.leave_at: float | None = None
        self.pages = 0
        self.progress = 0.0  # monotonic: the last of any rank here
        self.signals, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.poll.register(self.signals, select.POLLIN)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # meant for the ranks
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    # -------------------------------------------------------------------------------------------------------- its life

    def run(self) -> None:
        keep = own(self.config.base)  # noqa: F841 - locked as long as we live
        sweep()
        # nodes begin together, their reports should not
        look = monotonic()
        due = look + self.config.every * (int.from_bytes(os.urandom(2), "big") / 65536)
        self.link.say(protocol.HELLO, 0, b"")
        try:
            while not self.over:
                now = monotonic()
                if now >= due or (now >= look and self._new_pages()):
                    self._report(now)
                    reap()
                    due = now + (self.config.closer if self._stand_still(now) else self.config.every)
                look = now + (_NEW if self.observer.is_early() else self.config.every)
                self.exits.send(monotonic())
                self._listen(max(0.0, min(due, look, self.exits.due()) - monotonic()))
                self._check_end(monotonic())
        finally:
            self._end()

    def _leave(self) -> None:
        """End, for Slurm or without a supervisor. SIGKILL may follow, so remove the pages now. Open ones are still read."""
        if self.leave_at is None:
            self.leave_at = monotonic() + _LINGER
            self.observer.look()
            self.observer.keep_to_these()
            self._clear()

    def _check_end(self, now: float) -> None:
        """Stay after Slurm's SIGTERM as long as there are ranks: they get time to save, and their exits are reported."""
        if self.link.refused and self.leave_at is None:
            self.orphan = True
            self._leave()
        if self.leave_at is not None:
            self.over = self.over or now >= self.leave_at or self.observer.all_gone()
        if not self.over and now - self.link.heard > self.config.lost:
            self.over = self.orphan = True

    def _new_pages(self) -> bool:
        """Did a page appear, or another one?"""
        before, self.pages = self.pages, len(self.observer.look())
        return self.pages > before

    def _report(self, now: float) -> None:
        """Check the ranks and report them."""
        states = self.observer.look()
        self.pages = len(states)
        self.progress = max((max(one.stepped, one.beaten) for one in states), default=0.0)
        self._collect_exits()
        if now - self.link.heard > _SILENT * self.config.every:
            self.link.send_to_all()
        bodies = protocol.pack_states(states, now)[:255]
        for part, body in enumerate(bodies):
            self.link.say(protocol.STATES, self.observer.attempt or 0, body, part, len(bodies))
        self._answer(now)
        self.snapshots.beat()

    def _stand_still(self, now: float) -> bool:
        """Has the standstill reached the length at which it may soon count as a hang, so that its end matters at once?"""
        return _STILL < (now - self.progress) / self.config.every < _LONG

    def _collect_exits(self) -> None:
        attempt = self.observer.attempt or 0
        if attempt > self.exits.attempt:
            clear(self.config.base, before=attempt)
        self.exits.add(attempt, self.observer.news(), monotonic())

    # -------------------------------------------------------------------------------------------------------- listening

    def _listen(self, seconds: float) -> None:
        for fd, _ in self.poll.poll(seconds * 1000):
            if fd == self.signals:
                os.read(fd, 4096)
                self.orphan = False
                self._leave()
            elif self.link.owns(fd):
                for message in self.link.receive(fd):
                    self._obey(message)
            elif fd == self.answers.fd:
                self._answer(monotonic())
            elif self.snapshots.heard(fd):
                continue
            elif self.observer.heard(fd):
                self._collect_exits()

    def _obey(self, message: Datagram) -> None:
        if message.kind == protocol.ACK:
            self.exits.acknowledged(protocol.read_exits(message.body))
        elif message.kind == protocol.BYE:
            self.over, self.orphan = True, False
            self.keeps = message.body == protocol.KEEP
        elif message.kind == protocol.COPY:
            self.snapshots.order(message.body)
        else:
            self.answers.take(message.number, message.body.decode("utf-8", "replace"))
            self._send_answer()

    def _copies(self, report: bytes) -> None:
        self.link.say(protocol.COPIES, self.exits.attempt, report)

    def _dying(self) -> list[ExitRecord]:
        self.observer.look()  # one whose page is new may be dying already
        return self.observer.dying()

    def _answer(self, now: float) -> None:
        if self.answers.finish(now):
            self._send_answer()

    def _send_answer(self) -> None:
        for piece in self.answers.pieces:
            self.link.reply(self.answers.number, self.exits.attempt, piece)

    # ---------------------------------------------------------------------------------------------------------- the end

    def _end(self) -> None:
        self.answers.close()
        if self._all_gone_within(_LAST):
            self._clear()
        until = monotonic() + _LAST
        self._collect_exits()
        while self.exits.due() < float("inf") and monotonic() < until:
            self.exits.send(monotonic())
            self._listen(0.01)
        self.snapshots.close(keep=self.keeps)
        self.observer.close()
        self.link.close()

    def _clear(self) -> None:
        """Remove the pages of the attempts that we know; a later start of the agents may look at what came since."""
        self.observer.close_fifo()
        clear(self.config.base, before=max(self.exits.attempt, self.observer.attempt or 0) + 1)
        leave(self.config.base)

    def _all_gone_within(self, seconds: float) -> bool:
        until = monotonic() + seconds
        while True:
            self.observer.look()
            if self.observer.all_gone() or monotonic() >= until:
                return self.observer.all_gone()
            self._listen(0.05)
