"""The supervisor's node agents: one job step starts one per node, they report to the supervisor, and answer its questions.

With one node, or without Slurm, there is no agent: the supervisor reads the pages itself. Where agents cannot be started, or
their datagrams are lost, ``BeatPoller`` reads the beats of the run directory instead, and the run's log says so once.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

from ftsupervise.host import bounded, processes
from ftsupervise.host.addresses import own_addresses
from ftsupervise.host.in_time import Every
from ftsupervise.ranks import protocol, shm_dir
from ftsupervise.ranks.hang_detector import CLOSER
from ftsupervise.ranks.life import ProcessesSeen
from ftsupervise.ranks.observe import RankObserver
from ftsupervise.ranks.protocol import RankExit, send_datagram
from ftsupervise.ranks.rank_table import Node, RankTable, Reply
from ftsupervise.ranks.rpc import read_killed
from ftsupervise.rundir.heartbeat_page import of_the_group, read_beats
from ftsupervise.rundir.ledger import counted
from ftsupervise.rundir.paths import RunDir, tell
from ftsupervise.scheduler.allocation import AGENTS, Allocation
from ftsupervise.snapshots.ring import SnapshotRing
from ftsupervise.snapshots.room import SnapshotPlace
from ftsupervise.truth import Beat, RankState

# The sources from which the supervisor learns of the ranks: the agents' datagrams, its own node's pages, or beats in
# the run directory.
#
# Each source has a thread that lives as long as the supervisor and fills the ``RankTable``: a death is received also
# while the supervisor waits for Slurm.

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


# ------------------------------------------------------------------------------------------


_EVERY = 1.0  # seconds between two reports of a node
_RATE = 12_500  # datagrams a second that the supervisor has to receive
SILENT = 15.0  # seconds without a report after which a node's ranks are followed through the run directory
_AGAIN = (0.05, 0.1, 0.2, 0.4)  # seconds between two sends of an unanswered question
_PAUSES = (1.0, 5.0, 30.0, 120.0, 600.0)  # seconds before agents that ended are started again
_LOOK = 0.5  # seconds between two checks of whether they run
_END = 1.0  # seconds for them to end
_ALIVE = 3.0  # missing reports after which a present node counts as silent
AT_ONCE = 0.3  # seconds in which the agent of a healthy node has finished a kill


@dataclass
class ObservedAttempt:
    """The attempt whose ranks are observed."""

    began: float  # monotonic
    log: Path | None = None
    away: frozenset[str] = frozenset()  # nodes that get no agent
    killed: bool = False  # by us
    unkilled: dict[str, float] = field(default_factory=dict)  # node -> when its agent was last asked to kill, in vain
    dying: list[RankExit] = field(default_factory=list)  # ranks that were already exiting when we killed the others


class Questions:
    """Asks the agents of nodes. Each question is sent again until it is answered, or the time is over."""

    def __init__(self, table: RankTable) -> None:
        """Open the sockets. Raises OSError when there can be none."""
        self.sock = protocol.udp()
        self._table = table
        self._number = 0
        self._open = 0  # calls of ``ask`` that wait
        self._arrived = threading.Condition()
        table.on[protocol.REPLY] = self._wake

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])

    def ask(self, questions: Mapping[str, str], timeout: float, *, gives_way: bool = False) -> dict[str, str]:
        """Return node -> answer, of those that answered in time. All are asked at once.

        An agent drops a question when the next one comes. ``gives_way``: it is asked once no other one waits.
        """
        until, tries = monotonic() + timeout, 0
        with self._arrived:
            while gives_way and self._open:
                if monotonic() >= until:
                    return {}
                self._arrived.wait(0.05)
            self._open += 1
        waiting: dict[int, tuple[Node, bytes, Reply]] = {}
        for name, question in questions.items():
            node = self._table.nodes.get(name.encode())
            if node is not None and node.address is not None:
                self._number += 1
                data = self._table.pack(protocol.ASK, self._number, name.encode(), question.encode())
                waiting[self._number] = node, data, self._table.replies.setdefault(self._number, Reply())
        asked, answers = tuple(waiting), dict[str, str]()
        try:
            while waiting and (now := monotonic()) < until:
                for node, data, _ in waiting.values():
                    self._send(data, node)
                again = now + _AGAIN[min(tries, len(_AGAIN) - 1)]
                tries += 1
                while waiting and (rest := min(again, until) - monotonic()) > 0:
                    with self._arrived:
                        self._arrived.wait(min(rest, 0.05))
                    for number in [number for number, (_, _, reply) in waiting.items() if reply.whole]:
                        node, _, reply = waiting.pop(number)
                        answers[node.name] = reply.text
        finally:
            for number in asked:
                self._table.replies.pop(number, None)
            with self._arrived:
                self._open -= 1
        return answers

    def order_copies(self, name: str, body: bytes) -> None:
        """Send an order of ``snapshots/ring.py``; it may be lost."""
        node = self._table.nodes.get(name.encode())
        if node is not None:
            self._send(self._table.pack(protocol.COPY, 0, name.encode(), body), node)

    def tell_to_end(self, *, keep: bool) -> None:
        """Tell all agents to end; it may be lost. ``keep``: others will follow in this job."""
        self._number += 1
        for name, node in list(self._table.nodes.items()):
            self._send(self._table.pack(protocol.BYE, self._number, name, protocol.KEEP if keep else b""), node)

    def _send(self, data: bytes, node: Node) -> None:
        if node.address is not None:
            protocol.send_datagram(self.sock, data, node.address)

    def _wake(self, node: Node, body: bytes) -> None:
        with self._arrived:
            self._arrived.notify_all()


class AgentStep:
    """The job step that runs the agents: an srun. When it ends it is started again, with growing pauses."""

    def __init__(
        self, allocation: Allocation, key: bytes, command: Callable[[int], Sequence[str]], say: Callable[[str], None]
    ) -> None:
        """``command``: of the agent, for so many nodes; called for each start."""
        self._allocation, self._command, self._say = allocation, command, say
        self._env = {**allocation.side_env(), protocol.ENV_KEY: key.hex()}
        self._process: processes.Process | None = None
        self._complaint = -1  # a file for the output of srun
        self._starts, self._due, self._checked = 0, 0.0, 0.0

    @property
    def pids(self) -> frozenset[int]:
        one = self._process
        return frozenset((one.pid,)) if one is not None and processes.lives(one.pid, one.start) else frozenset()

    def begin(self) -> None:
        """Prepare for a new attempt: no pause comes before the next start."""
        self._starts, self._due, self._checked = 0, 0.0, 0.0

    def keep_running(self, nodes: Sequence[str]) -> None:
        """Start the agents if they do not run."""
        now, one = monotonic(), self._process
        if one is not None:
            if now < self._checked + _LOOK:  # asked many times a second
                return
            self._checked = now
            if processes.lives(one.pid, one.start):
                return
            self._process = None
            self._say("the node agents have ended" + self._complaints())
            # those of an earlier attempt have ended: the first start for this one does not wait
            self._due = now + _PAUSES[min(self._starts, len(_PAUSES)) - 1] if self._starts else now
        if now >= self._due and nodes:
            self._start(nodes)

    def _start(self, nodes: Sequence[str]) -> None:
        self._starts += 1
        words = self._allocation.side_step(
            nodes, *self._command(len(nodes)), options=(f"--job-name={AGENTS}", "--no-kill", "--wait=0")
        )
        if self._complaint < 0:
            self._complaint = os.memfd_create("ftsupervise-agents", os.MFD_CLOEXEC)
        try:
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._complaint,
                env=self._env,
                start_new_session=True,  # without a signal when we die: srun would kill the agents before their cleanup
            )
        except OSError as error:
            self._say(f"cannot start the node agents: {error.strerror}")
            self._due = monotonic() + _PAUSES[-1]
            return
        child.returncode = 0  # reaped with everything else that is ours
        self._process = processes.process(child.pid)

    def _complaints(self) -> str:
        said = os.pread(self._complaint, 16_000, 0).decode("utf-8", "replace").splitlines()
        errors = [line for line in said if "error" in line]
        return f": {errors[-1]}" if errors else ""

    def stop(self, tell_to_end: Callable[[], None]) -> None:
        one, self._process = self._process, None
        if one is None:
            return
        for _ in range(3):  # each may be lost
            tell_to_end()
            if not processes.wait_gone([one], _END / 3):
                return
        # it kills agents that did not receive the request; this is not waited for
        processes.signal_exactly(one, signal.SIGTERM)


class Agents:
    """The agents of one supervisor; call ``begin`` for each attempt."""

    def __init__(
        self,
        rundir: RunDir,
        allocation: Allocation,
        env: Mapping[str, str],
        wake: Callable[[], None],
        silence: float | None = SILENT,  # None: the ranks have no guard, and only the run directory reports them
        often: float = _EVERY,
        snapshots: SnapshotPlace = SnapshotPlace(),  # noqa: B008 - a frozen value
    ) -> None:
        here = env.get("SLURMD_NODENAME", "")
        self.remote = bool(allocation.job) and allocation.nodes not in ((), (here,))
        self.base = shm_dir.new_base()
        key = os.urandom(protocol.KEY)
        self.table = RankTable(key, max(0.02, often, len(allocation.nodes) / _RATE), wake)
        self._nodes, self._node, self._silence = allocation.nodes, here or os.uname().nodename, silence
        self._attempt = ObservedAttempt(monotonic())
        self._said: set[str] = set()
        self._questions: Questions | None = None  # without one there can be no agents
        self._lock = None
        if self.remote:
            try:
                self._questions = Questions(self.table)
            except OSError as error:
                self._say_once(f"cannot open a socket for the node agents: {error.strerror}")
        else:
            self._lock = shm_dir.create_locked(self.base)
            shm_dir.remove_stale()
        self.ring = SnapshotRing(lambda: tuple(self.present()), self._order_copies, at_once=snapshots.at_once)
        self._snapshots = snapshots
        self.table.on[protocol.COPIES] = self._hear_copies
        self._step = AgentStep(allocation, key, self._command, self._say_once)
        sock = self._questions.sock if self._questions is not None else None
        self._listener = Listener(self.table, sock, "" if self.remote else self.base, self._node)
        self._poller = BeatPoller(rundir, self.table, self._blind)

    @property
    def pids(self) -> frozenset[int]:
        """Return our child processes that are not the attempt's."""
        return self._step.pids

    def begin(self, attempt: int, log: Path, away: frozenset[str] = frozenset()) -> str:
        """Begin a new attempt; returns the directory for its pages. ``away``: nodes that get no agent."""
        before, self._attempt = self._attempt, ObservedAttempt(monotonic(), log, away)
        self.table.begin(attempt)
        if before.away - away:  # a node is back
            self._stop_step(keep=True)
        self._step.begin()
        self.keep_running()
        self._listener.look_now()
        return f"{self.base}/{attempt}"

    def keep_running(self) -> None:
        """Start the agents if they do not run, with growing pauses."""
        if self._questions is not None:
            self._step.keep_running(self.present())

    def present(self) -> list[str]:
        """Return the nodes that have an agent in this attempt."""
        return [node for node in self._nodes if node not in self._attempt.away]

    def answering(self) -> list[str]:
        """Return the nodes that can be asked: those with an agent, or this one."""
        return self.present() if self.remote else [self._node]

    def silent(self, nodes: Iterable[str], seconds: float) -> list[str]:
        """Return those of ``nodes`` whose agent has not reported for ``seconds``, or never."""
        return self.table.silent(nodes, seconds)

    def life(self) -> tuple[str, ProcessesSeen] | None:
        """Return what the processes of a command without a guard do on all nodes together, and the node of the one that tells;
        None where that is not known."""
        return self.table.life(self.present()) if self.remote else None

    def _command(self, nodes: int) -> list[str]:
        """Return the agents' command, for a new start of them on this many nodes."""
        self.table.restart(self.table.generation + 1)
        every, port = self.table.every, self._questions.port if self._questions is not None else 0
        return [
            *processes.own_command("--base", self.base, module="ftsupervise.ranks"),
            *("--to", ",".join(own_addresses()), "--port", str(port)),
            *("--generation", str(self.table.generation), "--every", f"{every:g}"),
            *("--closer", f"{_closer(every, nodes):g}"),
            *self._snapshots.options(),
        ]

    def _hear_copies(self, node: Node, body: bytes) -> None:
        if node.address is not None:
            self.ring.hear(node.name, str(node.address[0]), body)

    def _order_copies(self, node: str, body: bytes) -> None:
        if self._questions is not None:
            self._questions.order_copies(node, body)

    # --------------------------------------------------------------------------------------------------------- asking

    def ask(self, questions: Mapping[str, str], timeout: float) -> dict[str, str]:
        """Return node -> the answer of its agent to a question ("evidence RANK:PID DIR", "kill DIR", "ping").

        Only those that answered within ``timeout`` seconds are in it. All are asked at once.
        """
        if not self.remote:
            return {node: text for node, one in questions.items() if (text := _answer_here(one, timeout)) is not None}
        return self._questions.ask(questions, timeout) if self._questions is not None else {}

    def ask_in_passing(self, questions: Mapping[str, str], timeout: float) -> dict[str, str]:
        """Do the same for a question that never takes the place of another one: no kill and no hang waits for it."""
        if not self.remote or self._questions is None:
            return self.ask(questions, timeout)
        return self._questions.ask(questions, timeout, gives_way=True)

    def kill(self, attempt_dir: Path, nodes: Sequence[str], timeout: float = 1.5) -> frozenset[str]:
        """Kill an attempt's processes on ``nodes``; returns the nodes that did it. Notes dying ranks."""
        now = self._attempt
        if not self.remote:
            if not now.killed:
                now.dying = self._listener.dying()
            now.killed = True
            return frozenset()
        done: set[str] = set()
        asked_at = monotonic()
        for node, text in self.ask(dict.fromkeys(nodes, f"kill {attempt_dir}"), timeout).items():
            killed, dying = read_killed(text, node)
            now.dying += dying
            done.update({node} if killed else ())
        now.unkilled.update(dict.fromkeys(set(nodes) - done, asked_at))
        return frozenset(done)

    def kill_survivors(self, attempt_dir: Path, nodes: Sequence[str]) -> None:
        """Do the same as ``kill`` on nodes that Slurm has lost but whose agent still reports; a silent agent is not
        waited for, nor is one that has been asked in vain and has said nothing since.
        """
        now, table, asked = monotonic(), self.table, self._attempt.unkilled
        within = {node: min(_ALIVE * table.every, now - asked.get(node, 0.0)) for node in nodes if self.remote}
        if reporting := sorted(node for node, seconds in within.items() if not table.silent([node], seconds)):
            self.kill(attempt_dir, reporting, AT_ONCE)

    def first_failure_before_kill(self, reported: RankExit) -> RankExit:
        """Return the rank that failed first.

        A killed process closes its connections before it is gone, and other ranks may report the exception of that
        earlier.
        """
        return self._attempt.dying[0] if reported.failed and self._attempt.dying else reported

    # -------------------------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """End the agents, and leave no page behind."""
        self._poller.close()
        self._stop_step(keep=False)
        self._listener.close()
        if self._questions is not None:
            self._questions.sock.close()
        if self._lock is not None:
            os.close(self._lock)
        shm_dir.clear(self.base)

    def _stop_step(self, *, keep: bool) -> None:
        if self._questions is not None:
            self._step.stop(partial(self._questions.tell_to_end, keep=keep))

    # ----------------------------------------------------------------------------------------------------- being blind

    def _blind(self) -> bool:
        """Return whether there are ranks that only the run directory reports. Says so once."""
        if self._silence is None:
            return True
        if monotonic() - self._attempt.began < self._silence:
            return False
        if not self.remote:
            return not self.table.local
        silent = self.table.silent(self.present(), self._silence)
        if not silent:
            return self.table.without_ranks()  # ranks that could make no page, or have no guard
        some = ", ".join(silent[:3]) + (f" and {len(silent) - 3} more" if len(silent) > 3 else "")
        port = self._questions.port if self._questions is not None else 0
        self._say_once(
            f"no answer from the agents on {some}: their ranks are followed through the run directory, which is slower. "
            f"Does a firewall block UDP to {os.uname().nodename}:{port}?"
        )
        return True

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            tell(self._attempt.log, text)


def _answer_here(question: str, timeout: float) -> str | None:
    words = processes.own_command("--answer", question, module="ftsupervise.ranks")
    try:
        done = bounded.run(words, timeout=timeout, env=os.environ)
    except OSError:
        return None
    return done.stdout if done.code == 0 or done.stdout else None


def _closer(every: float, nodes: int) -> float:
    """Return the seconds between two reports of a node whose ranks make no progress.

    A hang is acted on in time, not up to a second later. 2,500 reports a second are a small part of what the supervisor
    can receive.
    """
    return min(every, max(CLOSER, nodes / 2500))
