"""The agent's loop: check the ranks, report to the supervisor, answer it, hold one child, end when it has gone.

It sleeps until its next beat, a death, a datagram or a signal. Nothing here waits for anything else.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.ranks import protocol
from ftsupervise.ranks.observe import RankObserver
from ftsupervise.ranks.protocol import Address, Datagram, ExitRecord, resolve, send_datagram, udp
from ftsupervise.ranks.rpc import Request, pack_dying
from ftsupervise.ranks.shm_dir import clear, leave, own, sweep

if TYPE_CHECKING:
    import subprocess

_SILENT = 40  # beats without an answer after which other addresses are tried again
_LOST = 300.0  # seconds without an answer after which the supervisor counts as gone
_TRY_AGAIN = (
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.4,
    0.8,
    1.6,
    3.2,
)  # seconds between two reports of an unacknowledged death
_REFUSED = 4  # refusals ("port unreachable") after which the supervisor counts as gone
_LAST = 1.0  # seconds for the ranks to end when the supervisor has ended the attempts
_LINGER = 25.0  # seconds that it stays after SIGTERM while there are ranks; Slurm's KillWait is 30 s
_STILL, _LONG = 3, 60  # beats
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
    child: tuple[str, ...] = ()
    lost: float = _LOST


class _UnackedExit:
    """A death that the supervisor has not acknowledged."""

    __slots__ = ("due", "gone", "since", "tries")

    def __init__(self, gone: ExitRecord, since: float) -> None:
        self.gone, self.since, self.due, self.tries = gone, since, since, 0


class _SequenceState:
    """Numbers of both directions."""

    __slots__ = ("acked", "asked", "heard", "sent")

    def __init__(self) -> None:
        self.sent = self.acked = 0  # our newest number, and the newest that the supervisor has answered
        self.asked = 0  # the newest question taken
        self.heard = monotonic()


class Agent:
    def __init__(self, orders: AgentConfig, key: bytes) -> None:
        """Raises OSError when there can be no socket."""
        self.orders, self.seal, self.talk = orders, protocol.Seal(key), _SequenceState()
        self.sock = udp()
        self.poll = select.poll()
        self.poll.register(self.sock, select.POLLIN)
        self.eyes = RankObserver(orders.base, orders.node, self.poll)
        self.name = orders.node.encode()[:255]
        self.hosts = resolve(self.sock, orders.hosts, orders.port)
        self.ring: Address | None = None  # where it answered from
        self.link: socket.socket | None = None  # connected to it: the kernel reports a closed port
        self.refused = 0
        self.untaken: list[_UnackedExit] = []
        self.asked: Request | None = None
        self.last_answer: tuple[int, list[bytes]] = (0, [])
        self.dying = ("", "")  # a request to kill, and the ranks that were dying when it first came
        self.attempt = 0
        self.over = False
        self.orphan = False  # we end because the supervisor has gone without notice
        self.leave_at: float | None = None
        self.pages = 0
        self.progress = 0.0  # monotonic: the last of any rank here
        self.child: subprocess.Popen[bytes] | None = None
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.poll.register(self._read, select.POLLIN)

    # -------------------------------------------------------------------------------------------------------- its life

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # meant for the ranks
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        keep = own(self.orders.base)  # noqa: F841 - locked as long as we live
        sweep()
        self._start_child()
        # nodes begin together, their beats should not
        look = monotonic()
        due = look + self.orders.every * (int.from_bytes(os.urandom(2), "big") / 65536)
        self._say(protocol.HELLO, b"")
        try:
            while not self.over:
                now = monotonic()
                if now >= due or (now >= look and self._new_pages()):
                    self._beat(now)
                    due = now + (self.orders.closer if self._stand_still(now) else self.orders.every)
                look = now + (_NEW if self.eyes.is_early() else self.orders.every)
                self._tell_deaths(monotonic())
                self._listen(max(0.0, min([due, look, *(one.due for one in self.untaken)]) - monotonic()))
                self._think_of_the_end(monotonic())
        finally:
            self._end()

    def _told_to_leave(self) -> None:
        """End, for Slurm or without a supervisor. SIGKILL may follow, so remove the pages now. Open ones are still read."""
        if self.leave_at is None:
            self.leave_at = monotonic() + _LINGER
            self.eyes.look()
            self.eyes.keep_to_these()
            self._clear()

    def _think_of_the_end(self, now: float) -> None:
        """Stay after Slurm's SIGTERM as long as there are ranks: they get time to save, and their deaths are reported."""
        if self.leave_at is not None:
            self.over = self.over or now >= self.leave_at or self.eyes.all_gone()
        if not self.over and now - self.talk.heard > self.orders.lost:
            self.over = self.orphan = True

    def _new_pages(self) -> bool:
        """Did a page appear, or another one?"""
        before, self.pages = self.pages, len(self.eyes.look())
        return self.pages > before

    def _beat(self, now: float) -> None:
        """Check the ranks and report them."""
        pulses = self.eyes.look()
        self.pages = len(pulses)
        self.progress = max((max(one.stepped, one.beaten) for one in pulses), default=0.0)
        self._collect_deaths()
        if now - self.talk.heard > _SILENT * self.orders.every:
            self._found_ring(None)  # another address may reach it
        bodies = protocol.pack_pulses(pulses, now)[:255]
        for part, body in enumerate(bodies):
            self._say(protocol.PULSE, body, part, len(bodies))
        if self.asked is not None:
            self._finish_answer(now)
        self._reap()

    def _stand_still(self, now: float) -> bool:
        """Has the standstill reached the length at which it may soon count as a hang, so that its end matters at once?"""
        return _STILL < (now - self.progress) / self.orders.every < _LONG

    def _listen(self, seconds: float) -> None:
        for fd, _ in self.poll.poll(seconds * 1000):
            if fd == self._read:
                os.read(self._read, 4096)
                self.orphan = False
                self._told_to_leave()
            elif fd == self.sock.fileno():
                self._take_datagrams(self.sock)
            elif self.link is not None and fd == self.link.fileno():
                self._take_datagrams(self.link)
            elif self.asked is not None and fd == self.asked.fd:
                self._finish_answer(monotonic())
            elif self.eyes.heard(fd):
                self._collect_deaths()

    # ---------------------------------------------------------------------------------------------------------- telling

    def _say(self, kind: int, body: bytes, part: int = 0, parts: int = 1) -> None:
        self.talk.sent += 1
        attempt = self.eyes.attempt or 0
        data = self.seal.pack(
            Datagram(kind, part, parts, self.orders.generation, attempt, self.talk.sent, self.name, body)
        )
        self._send(data)

    def _send(self, data: bytes) -> None:
        if self.link is None:
            for address in self.hosts:
                send_datagram(self.sock, data, address)
            return
        try:
            self.link.send(data)
        except ConnectionRefusedError:
            self._on_refused()
        except OSError:  # lost, as any may be
            return

    def _found_ring(self, where: Address | None) -> None:
        """Send to this address alone from here on, or to all again."""
        if where == self.ring:
            return
        if self.link is not None:
            self.poll.unregister(self.link)
            self.link.close()
        self.ring, self.link = where, None
        if where is None:
            return
        link = socket.socket(self.sock.family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            link.connect(where)
        except OSError:
            link.close()
            return
        self.link = link
        self.poll.register(link, select.POLLIN)

    def _on_refused(self) -> None:
        self.refused += 1
        if self.refused >= _REFUSED and self.leave_at is None:
            self.orphan = True
            self._told_to_leave()

    def _collect_deaths(self) -> None:
        now = monotonic()
        if self.eyes.attempt is not None and self.eyes.attempt > self.attempt:
            # deaths of the last attempt are old
            self.attempt = self.eyes.attempt
            clear(self.orders.base, before=self.attempt)
            self.untaken.clear()
        self.untaken.extend(_UnackedExit(gone, now) for gone in self.eyes.news())

    def _tell_deaths(self, now: float) -> None:
        for one in self.untaken:
            if now >= one.due:
                self._say(protocol.DEATH, protocol.pack_gone([one.gone._replace(age=now - one.since)]))
                one.due = now + _TRY_AGAIN[min(one.tries, len(_TRY_AGAIN) - 1)]
                one.tries += 1

    # -------------------------------------------------------------------------------------------------------- listening

    def _take_datagrams(self, sock: socket.socket) -> None:
        for _ in range(100):
            try:
                data, sender = sock.recvfrom(4096)
            except ConnectionRefusedError:
                self._on_refused()
                return
            except OSError:  # none left
                return
            message = self.seal.open(data)
            if message is None or message.kind not in protocol.TO_AGENT or message.node != self.name:
                continue
            if message.generation == self.orders.generation:
                self._obey(message, sender)

    def _obey(self, message: Datagram, sender: Address) -> None:
        talk = self.talk
        if message.kind == protocol.ACK:
            if message.number > talk.sent:
                return
            if talk.acked < message.number:
                talk.acked, talk.heard, self.refused = message.number, monotonic(), 0
                self._found_ring(sender)
            taken = {(one.rank, one.pid, one.final) for one in protocol.read_gone(message.body)}
            self.untaken = [one for one in self.untaken if (one.gone.rank, one.gone.pid, one.gone.final) not in taken]
        elif message.number > talk.asked:
            talk.asked, talk.heard = message.number, monotonic()
            if message.kind == protocol.BYE:
                self.over, self.orphan = True, False
            else:
                self._begin_answer(message)
        elif message.kind == protocol.ASK and message.number == self.last_answer[0]:
            self._send_answer()

    def _begin_answer(self, message: Datagram) -> None:
        if self.asked is not None:
            self.asked.close()
        question = message.body.decode("utf-8", "replace")
        self.last_answer = (message.number, [])
        if question.startswith("kill ") and self.dying[0] != question:
            self.eyes.look()  # one whose page is new may be dying already
            self.dying = (question, pack_dying(self.eyes.dying()))
        try:
            self.asked = Request(question, self.orders.node, self.poll)
        except OSError:
            self.asked = None

    def _finish_answer(self, now: float) -> None:
        if self.asked is None or not self.asked.done(now):
            return
        self.last_answer = (self.last_answer[0], protocol.chunks(self.asked.text + self._more().encode()))
        self.asked = None
        self._send_answer()

    def _more(self) -> str:
        return self.dying[1] if self.asked is not None and self.asked.question == self.dying[0] else ""

    def _send_answer(self) -> None:
        number, pieces = self.last_answer
        for piece in pieces:
            told = Datagram(protocol.REPLY, 0, 1, self.orders.generation, self.attempt, number, self.name, piece)
            self._send(self.seal.pack(told))

    # ---------------------------------------------------------------------------------------------------------- the end

    def _start_child(self) -> None:
        if not self.orders.child:
            return
        import subprocess  # 8 ms that most agents do without

        try:
            self.child = subprocess.Popen(self.orders.child, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:
            sys.stderr.write(f"ftsupervise.ranks: cannot start {self.orders.child[0]}: {error.strerror}\n")

    def _reap(self) -> None:
        """Wait for the processes that answer questions, and for the child."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if self.child is not None and ended[0] == self.child.pid:
                    self.child.returncode, self.child = os.waitstatus_to_exitcode(ended[1]), None
        except ChildProcessError:
            return

    def _end(self) -> None:
        if self.asked is not None:
            self.asked.close()
        if self.child is not None:
            try:
                os.killpg(self.child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        if self._all_gone_within(_LAST):
            self._clear()
        until = monotonic() + _LAST
        self._collect_deaths()
        while self.untaken and monotonic() < until:
            self._tell_deaths(monotonic())
            self._listen(0.01)
        self.eyes.close()
        self.sock.close()

    def _clear(self) -> None:
        """No page of the attempts that we know; a later start of the agents may look at what came since."""
        self.eyes.close_fifo()
        clear(self.orders.base, before=max(self.attempt, self.eyes.attempt or 0) + 1)
        leave(self.orders.base)

    def _all_gone_within(self, seconds: float) -> bool:
        until = monotonic() + seconds
        while True:
            self.eyes.look()
            if self.eyes.all_gone() or monotonic() >= until:
                return self.eyes.all_gone()
            self._listen(0.05)
