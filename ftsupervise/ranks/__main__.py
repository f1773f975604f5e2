"""``python -m ftsupervise.ranks --base DIR --to HOST,HOST --port N``: the agent. ``ftsupervise run`` starts one per node."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import NamedTuple

from ftsupervise.host.memory import remove_empty
from ftsupervise.ranks import protocol
from ftsupervise.ranks.life import LifeReports
from ftsupervise.ranks.observe import RankObserver
from ftsupervise.ranks.protocol import Address, Datagram, RankExit, Seal, resolve, send_datagram, udp
from ftsupervise.ranks.rpc import Answers, reap
from ftsupervise.ranks.shm_dir import clear, create_locked, remove_stale
from ftsupervise.ranks.tally import pack
from ftsupervise.rundir.paths import ENV_GROUP, ENV_GROUP_JOB
from ftsupervise.rundir.records import as_count
from ftsupervise.snapshots.node import SnapshotRelay
from ftsupervise.truth import Tally

# The agent's loop: check the ranks, report to the supervisor, answer it, end when it has gone.
#
# It sleeps until its next report, an exit, a datagram or a signal. Nothing here waits for anything else.

_SILENT = 40  # reports without an answer after which other addresses are tried again
_REFUSED = 4  # refusals ("port unreachable") after which the supervisor counts as gone
_LOST = 300.0  # seconds without an answer after which the supervisor counts as gone
_TRY_AGAIN = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # seconds between two reports of an unacknowledged exit
_LAST = 1.0  # seconds for the ranks to end when the supervisor has ended the attempts
_LINGER = 25.0  # seconds that it stays after SIGTERM while there are ranks; Slurm's KillWait is 30 s
_LINGER_TO_KEEP = 28.5  # the same while there are snapshots, which may go to the disk after the ranks' end
_STILL, _LONG = 3, 60  # reports
_TALLY = 5  # reports between two tallies that tell nothing new
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
    at_once: bool = False  # the ranks wait for the copies


class SupervisorLink:
    """The datagrams to and from the supervisor. They go to all its addresses until one has answered, and to that one from then
    on. Registers its descriptors with ``poll``."""

    def __init__(
        self, seal: Seal, node: bytes, generation: int, hosts: Iterable[str], port: int, poll: select.poll
    ) -> None:
        """Open the sockets. Raises OSError when there can be none."""
        self._seal, self.node, self._generation, self._poll = seal, node, generation, poll
        self._sock = udp()
        poll.register(self._sock, select.POLLIN)
        self._hosts = resolve(self._sock, hosts, port)
        self._address: Address | None = None  # where it answered from
        self._connected: socket.socket | None = None  # to that address: the kernel reports a closed port
        self._refusals = 0
        self._sent = self._acked = 0  # our newest number, and the newest that was acknowledged
        self._asked = 0  # the newest request taken
        self.answered_at = monotonic()

    def say(self, kind: int, attempt: int, body: bytes, part: int = 0, parts: int = 1) -> None:
        self._sent += 1
        self._send(Datagram(kind, part, parts, self._generation, attempt, self._sent, self.node, body))

    def reply(self, number: int, attempt: int, piece: bytes) -> None:
        """Send one piece of the answer to question ``number``."""
        self._send(Datagram(protocol.REPLY, 0, 1, self._generation, attempt, number, self.node, piece))

    def _send(self, message: Datagram) -> None:
        data = self._seal.pack(message)
        if self._connected is None:
            for address in self._hosts:
                send_datagram(self._sock, data, address)
            return
        try:
            self._connected.send(data)
        except ConnectionRefusedError:
            self._refusals += 1
        except OSError:  # lost, as any may be
            return

    @property
    def refused(self) -> bool:
        """Return whether the supervisor has gone: its port is closed."""
        return self._refusals >= _REFUSED

    def owns(self, fd: int) -> bool:
        return fd == self._sock.fileno() or (self._connected is not None and fd == self._connected.fileno())

    def receive(self, fd: int) -> Iterator[Datagram]:
        """Yield what has arrived at ``fd`` for this start of this agent.

        These are acknowledgements and requests, each request once, and again while the supervisor has no answer.
        """
        sock = self._connected if self._connected is not None and self._connected.fileno() == fd else self._sock
        for _ in range(100):
            try:
                data, sender = sock.recvfrom(4096)
            except ConnectionRefusedError:
                self._refusals += 1
                return
            except OSError:  # none left, or another address has answered
                return
            message = self._seal.open(data)
            if message is None or message.kind not in protocol.TO_AGENT or message.node != self.node:
                continue
            if message.generation == self._generation and self._is_timely(message, sender):
                yield message

    def _is_timely(self, message: Datagram, sender: Address) -> bool:
        """Return whether the number is one that we have sent; note when the supervisor has answered."""
        if message.kind == protocol.ACK:
            if message.number > self._sent:
                return False
            if self._acked < message.number:
                self._acked, self.answered_at, self._refusals = message.number, monotonic(), 0
                self._send_to(sender)
        elif message.kind == protocol.COPY:  # has a number of its own
            self.answered_at = monotonic()
        elif message.number > self._asked:
            self._asked, self.answered_at = message.number, monotonic()
        else:
            return message.kind == protocol.ASK and message.number == self._asked
        return True

    def send_to_all(self) -> None:
        """Send to all addresses again: another one may reach it."""
        self._send_to(None)

    def _send_to(self, address: Address | None) -> None:
        if address == self._address:
            return
        if self._connected is not None:
            self._poll.unregister(self._connected)
            self._connected.close()
        self._address, self._connected = address, None
        if address is None:
            return
        one = socket.socket(self._sock.family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            one.connect(address)
        except OSError:
            one.close()
            return
        self._connected = one
        self._poll.register(one, select.POLLIN)

    def close(self) -> None:
        self._sock.close()


class ExitReports:
    """The exits of the newest attempt's ranks that the supervisor has not acknowledged; each is reported until it has."""

    def __init__(self, link: SupervisorLink) -> None:
        self.attempt = 0
        self._link = link
        self._unacked: dict[RankExit, tuple[float, int]] = {}  # when to send it next, and how often it was sent

    def add(self, attempt: int, exits: Iterable[RankExit]) -> None:
        if attempt > self.attempt:  # those of the last attempt are old
            self.attempt = attempt
            self._unacked.clear()
        self._unacked.update((one, (one.at, 0)) for one in exits)

    def acknowledged(self, exits: Iterable[RankExit]) -> None:
        taken = {(one.rank, one.pid, one.final) for one in exits}
        for one in [one for one in self._unacked if (one.rank, one.pid, one.final) in taken]:
            del self._unacked[one]

    def send(self, now: float) -> None:
        for one, (due, tries) in self._unacked.items():
            if now >= due:
                self._link.say(protocol.EXIT, self.attempt, protocol.pack_exits([one], now))
                self._unacked[one] = (now + _TRY_AGAIN[min(tries, len(_TRY_AGAIN) - 1)], tries + 1)

    def due(self) -> float:
        """Return when to send next."""
        return min((due for due, _ in self._unacked.values()), default=float("inf"))


class TallyReports:
    """The counts of the guards here: reported at once when a save or a first step is new, else after ``every`` seconds.

    Without a guard it is told what the processes do.
    """

    def __init__(self, link: SupervisorLink, every: float, life: LifeReports) -> None:
        self._link, self._every, self._life = link, every, life
        self._due, self._told = 0.0, (0, Tally())

    def report(self, observer: RankObserver, now: float) -> None:
        """Report the counts as of its last check, if that is due."""
        attempt, tally = observer.attempt or 0, observer.tally()
        told = attempt, Tally(tally.first, saved=tally.saved, saving=round(tally.saving, 1), last_step=tally.last_step)
        if told != self._told or now >= self._due:
            self._told, self._due = told, now + self._every
            self._link.say(protocol.TALLY, attempt, pack(tally, now))
        if not observer.sees_ranks:
            self._life.report(now)


class Agent:
    def __init__(self, config: AgentConfig, key: bytes) -> None:
        """Open the sockets. Raises OSError when there can be none."""
        self.config = config
        self.poll = select.poll()
        node = config.node.encode()[:255]
        self.link = SupervisorLink(Seal(key), node, config.generation, config.hosts, config.port, self.poll)
        self.observer = RankObserver(config.base, config.node, self.poll)
        self.exits = ExitReports(self.link)
        every = _TALLY * config.every
        life = LifeReports(config.base, config.node, every, partial(self.link.say, protocol.LIFE))
        self.tallies = TallyReports(self.link, every, life)
        self.snapshots = SnapshotRelay(
            config.snapshots, config.node, key, config.copies, self.poll, self._copies, config.at_once
        )
        self.answers = Answers(config.node, self.poll, self._dying, self.snapshots.answer)
        self.over = False
        self.orphan = False  # we end because the supervisor has gone without notice
        self.keeps = False  # another agent will follow in this job, and needs the snapshots
        self.leave_at: float | None = None
        self.progress = 0.0  # monotonic: the last of any rank here
        self.signals, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.poll.register(self.signals, select.POLLIN)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # addressed to the ranks
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    # -------------------------------------------------------------------------------------------------------- its life

    def run(self) -> None:
        keep = create_locked(self.config.base)  # noqa: F841 - locked as long as we live
        remove_stale()
        # nodes begin together, their reports should not
        check_at = monotonic()
        due = check_at + self.config.every * (int.from_bytes(os.urandom(2), "big") / 65536)
        self.link.say(protocol.HELLO, 0, b"")
        try:
            while not self.over:
                now = monotonic()
                if now >= due or (now >= check_at and self.observer.new_pages()):
                    self._report(now)
                    reap()
                    due = now + (self.config.closer if self._stands_still(now) else self.config.every)
                check_at = now + (_NEW if self.observer.is_early() else self.config.every)
                self.exits.send(monotonic())
                self._listen(max(0.0, min(due, check_at, self.exits.due()) - monotonic()))
                self._check_end(monotonic())
        finally:
            self._end()

    def _leave(self) -> None:
        """End, for Slurm or without a supervisor. SIGKILL may follow, so remove the pages now. Open ones are still read."""
        if self.leave_at is None:
            self.leave_at = monotonic() + (_LINGER_TO_KEEP if self.snapshots.has_any() else _LINGER)
            self.observer.check()
            self.observer.keep_to_these()
            self._clear()

    def _check_end(self, now: float) -> None:
        """Stay after Slurm's SIGTERM as long as there are ranks: they get time to save, and their exits are reported."""
        if self.link.refused and self.leave_at is None:
            self.orphan = True
            self._leave()
        if self.leave_at is not None:
            # while there are snapshots the supervisor may still have them written to the disk, and says when that is
            # over
            stays = self.snapshots.has_any() and not self.link.refused
            self.over = self.over or now >= self.leave_at or (self.observer.all_gone() and not stays)
        if not self.over and now - self.link.answered_at > self.config.lost:
            self.over = self.orphan = True

    def _report(self, now: float) -> None:
        """Check the ranks and report them."""
        states = self.observer.check()
        self.progress = max((max(one.stepped, one.beaten) for one in states), default=0.0)
        self._collect_exits()
        if now - self.link.answered_at > _SILENT * self.config.every:
            self.link.send_to_all()
        bodies = protocol.pack_states(states, now)[:255]
        for part, body in enumerate(bodies):
            self.link.say(protocol.STATES, self.observer.attempt or 0, body, part, len(bodies))
        self.tallies.report(self.observer, now)
        self._answer(now)
        self.snapshots.beat()

    def _stands_still(self, now: float) -> bool:
        """Return whether the standstill may soon count as a hang, so that its end matters at once."""
        return _STILL < (now - self.progress) / self.config.every < _LONG

    def _collect_exits(self) -> None:
        attempt = self.observer.attempt or 0
        if attempt > self.exits.attempt:
            clear(self.config.base, before=attempt)
        self.exits.add(attempt, self.observer.exits())

    # -------------------------------------------------------------------------------------------------------- listening

    def _listen(self, seconds: float) -> None:
        for fd, _ in self.poll.poll(seconds * 1000):
            if fd == self.signals:
                os.read(fd, 4096)
                self.orphan = False
                self._leave()
            elif self.link.owns(fd):
                for message in self.link.receive(fd):
                    self._handle(message)
            elif fd == self.answers.fd:
                self._answer(monotonic())
            elif self.snapshots.heard(fd):
                continue
            elif self.observer.on_ready(fd):
                self.tallies.report(self.observer, monotonic())
                self._collect_exits()

    def _handle(self, message: Datagram) -> None:
        if message.kind == protocol.ACK:
            self.exits.acknowledged(protocol.read_exits(message.body, self.config.node, monotonic()))
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

    def _dying(self) -> list[RankExit]:
        self.observer.check()  # one whose page is new may be dying already
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
        """Remove this node's pages of the attempts that we know; a later start of the agents may look at what came since."""
        self.observer.close_fifo()
        newest = max(self.exits.attempt, self.observer.attempt or 0)
        clear(self.config.base, before=newest + 1, keep=self.observer.living_elsewhere())
        remove_empty(self.config.base)

    def _all_gone_within(self, seconds: float) -> bool:
        until = monotonic() + seconds
        while True:
            self.observer.check()
            if self.observer.all_gone() or monotonic() >= until:
                return self.observer.all_gone()
            self._listen(0.05)


# ------------------------------------------------------------------------------------------


# Agents that have lost their supervisor end a job whose batch host is lost.
#
# With ``--no-kill`` Slurm takes a lost node out of a job and leaves the job running, even without its batch host: nothing
# is supervised or trained, and the other nodes are held until the time limit. So the agents of a few nodes stay, ask Slurm,
# and end such a job.

_FEW = 4  # nodes whose agents stay: several may be lost at once, but thousands would overload the controller
_STAY = 3600.0  # seconds; Slurm gives a node up after its SlurmdTimeout (300 s by default)
_PAUSES = (2.0, *(5.0,) * 24, 10.0, 20.0, 30.0)  # seconds between two questions; the last for all that follow


def stays(env: Mapping[str, str]) -> bool:
    """Return whether this node is one of the few. The nodes of replica groups belong to a job that has agents of its own."""
    if env.get(ENV_GROUP) and not env.get(ENV_GROUP_JOB):
        return False
    node = as_count(env.get("SLURM_NODEID", ""))
    return bool(env.get("SLURM_JOB_ID")) and node is not None and node < _FEW


def see_to_the_end(env: Mapping[str, str], stay: float = _STAY, pauses: Sequence[float] = _PAUSES) -> None:
    """Ask Slurm again and again for ``stay`` seconds; end the job once its batch host is lost."""
    from ftsupervise.scheduler.allocation import end_without_host

    until, count = time.monotonic() + stay, 0
    turn = max(1, as_count(env.get("SLURM_NODEID", "")) or 1)  # the more of us there are, the less each asks
    while time.monotonic() < until:
        time.sleep(turn * pauses[min(count, len(pauses) - 1)])
        count += 1
        try:
            if end_without_host(env["SLURM_JOB_ID"], env):
                return
        except OSError:  # no Slurm commands on this node
            return


_USAGE = """usage: python -m ftsupervise.ranks --base DIR --to HOST[,HOST…] --port N --generation N [--every S] [--closer S]
                                   [--snapshots DIR --copies SHARE [--at-once 1]]
  --base DIR       where the ranks' pages are, one sub-directory per attempt
  --to, --port     where the supervisor listens; every address of these names is tried
  --generation N   which start of the agents this is
  --every S        seconds between two beats
  --closer S       the same while no rank of the node makes progress
  --snapshots DIR  where the ranks' snapshots are in memory, and the share of this node's cores for their copies
  --at-once 1      the ranks wait for these copies
  --answer TEXT    run no agent: answer one question ("evidence RANK:PID DIR") and exit
The key comes in $FTSUPERVISE_NODE_KEY. `ftsupervise run` starts this by itself."""


_OPTIONS = {
    f"--{name}"
    for name in ["base", "to", "port", "generation", "every", "closer", "lost", "snapshots", "copies", "at-once"]
}


def config(words: list[str]) -> AgentConfig:
    """Return the settings from the arguments. Raises ValueError where they make no sense."""
    given = dict(zip(words[::2], words[1::2], strict=True))
    if not given.keys() <= _OPTIONS:
        raise ValueError(" ".join(words))
    return AgentConfig(
        base=given["--base"],
        hosts=tuple(given["--to"].split(",")),
        port=int(given["--port"]),
        generation=int(given["--generation"]),
        every=float(given.get("--every", "1")),
        closer=float(given.get("--closer", given.get("--every", "1"))),
        node=os.environ.get("SLURMD_NODENAME", "") or os.uname().nodename,
        lost=float(given.get("--lost", "300")),
        snapshots=given.get("--snapshots", ""),
        copies=float(given.get("--copies", "0")),
        at_once=given.get("--at-once") == "1",
    )


def main() -> int:
    if sys.argv[1:2] == ["--answer"] and len(sys.argv) == 3:
        from ftsupervise.ranks.rpc import answer

        sys.stdout.write(answer(sys.argv[2], os.environ.get("SLURMD_NODENAME", "")))
        sys.stdout.flush()
        os.close(1)  # now: with a thread in state D this process does not end
        os._exit(0)  # a hung thread does not delay the exit
    from ftsupervise.ranks.protocol import ENV_KEY, KEY

    key = os.environ.pop(ENV_KEY, "")
    try:
        given, secret = config(sys.argv[1:]), bytes.fromhex(key)
        if len(secret) != KEY:
            raise ValueError("no key")
    except (KeyError, ValueError):
        sys.stderr.write(_USAGE + "\n")
        return 2
    here = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")  # where srun runs, as this node sees it
    hosts = [host for host in dict.fromkeys((here, *given.hosts)) if host]
    agent = Agent(given._replace(hosts=tuple(hosts)), secret)
    agent.run()
    if agent.orphan:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if stays(os.environ):
            see_to_the_end(os.environ)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
