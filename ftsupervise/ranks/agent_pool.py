"""The supervisor's node agents: it starts one per node, receives their reports, and asks them questions.

With one node, or without Slurm, there is no agent: the supervisor reads the pages itself. Where agents cannot be started, or
their datagrams are lost, ``BeatPoller`` reads the beats of the run directory instead, and the run's log says so once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic

from ftsupervise.host import bounded, interpreter, processes
from ftsupervise.ranks import protocol, shm_dir
from ftsupervise.ranks.hang_detector import CLOSER
from ftsupervise.ranks.rank_table import Listener, Node, RankExit, RankTable, death_of
from ftsupervise.ranks.rpc import read_killed
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.paths import RunDir, tell
from ftsupervise.scheduler.allocation import AGENTS, Allocation
from ftsupervise.truth import Beat, RankState

# Beats of the run directory as rank states, for nodes without a reachable agent: needs no network, but is slower.
#
# It has its own thread, since a file system may hang. Clocks of hosts differ, so the time when we saw a beat change counts.

_EVERY_BEATS = 2.0  # seconds
_SHARE = 10  # a reading that takes T is repeated after 10 T at the earliest


class BeatPoller:
    """Reads beats while ``needed()`` and passes them to ``put``."""

    def __init__(
        self,
        rundir: RunDir,
        needed: Callable[[], bool],
        attempt: Callable[[], int],
        put: Callable[[list[RankState]], None],
    ) -> None:
        self._rundir, self._needed, self._attempt, self._put = rundir, needed, attempt, put
        self._known: dict[int, tuple[Beat, float, float]] = {}  # rank -> its beat, when it and its step were new to us
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go, name="slow-beats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(0.5)

    def _go(self) -> None:
        pause = _EVERY_BEATS
        while not self._over.wait(pause):
            pause = _EVERY_BEATS
            if not self._needed():
                continue
            began = monotonic()
            try:
                found = read_beats(self._rundir)
            except OSError:
                continue
            pause = max(_EVERY_BEATS, _SHARE * (monotonic() - began))
            self._put(self.pulses(found, self._attempt(), monotonic()))

    def pulses(self, beats: tuple[Beat, ...], attempt: int, now: float) -> list[RankState]:
        """Those of ``attempt``, with the times at which they were first seen as they are."""
        known, self._known = self._known, {}
        for beat in beats:
            if beat.facts.get("attempt") != str(attempt):
                continue
            before = known.get(beat.rank)
            at = stepped = now
            if before is not None and before[0].pid == beat.pid:
                at = before[1] if before[0].at == beat.at else now
                stepped = before[2] if before[0].step == beat.step else now
            self._known[beat.rank] = (beat, at, stepped)
        return [
            RankState(beat.rank, beat.host, beat.step, beat.phase, stepped, at, now, beat.pid)
            for beat, at, stepped in self._known.values()
        ]


ENV_EVERY = "FTSUPERVISE_PULSE_SECONDS"  # between two beats of a node
_EVERY = 1.0
_RATE = 12_500  # datagrams a second that the supervisor has to receive
_SILENT = 15.0  # seconds without a report after which a node's ranks are followed through the run directory
_AGAIN = (0.05, 0.1, 0.2, 0.4)  # seconds between two sends of an unanswered question
_PAUSES = (1.0, 5.0, 30.0, 120.0, 600.0)  # seconds before agents that ended are started again
_LOOK = 0.5  # seconds between two checks of whether they run
_END = 1.0  # seconds for them to end
_ALIVE = 3.0  # missing beats after which a present node counts as silent
AT_ONCE = 0.3  # seconds in which the agent of a healthy node has finished a kill


class Agents:
    """The agents of one supervisor; call ``begin`` for each attempt."""

    def __init__(
        self,
        rundir: RunDir,
        allocation: Allocation,
        env: Mapping[str, str],
        nudge: Callable[[], None],
        child: Sequence[str] = (),
        silence: float = _SILENT,
        often: float = _EVERY,
    ) -> None:
        self.allocation, self.child, self._silence, self._often = allocation, tuple(child), silence, often
        self.base = shm_dir.new_base()
        self._env = env
        self._key = os.urandom(protocol.KEY)
        here = env.get("SLURMD_NODENAME", "")
        self.remote = bool(allocation.job) and allocation.nodes not in ((), (here,))
        self.pulses = RankTable(self._key, self._interval(), nudge)
        self._log: Path | None = None
        self._began = monotonic()
        self._srun: tuple[int, int] | None = None  # pid, start
        self._complaint = -1  # what srun says
        self._starts, self._due, self._looked = 0, 0.0, 0.0
        self._away: frozenset[str] = frozenset()
        self._number = 0
        self._answered = threading.Condition()
        self.pulses.on_reply = self._wake
        self._told: set[str] = set()
        self._sock = None
        if self.remote:
            try:
                self._sock = protocol.udp()
            except OSError as error:
                self._say_once(f"cannot open a socket for the node agents: {error.strerror}")
        self._hold = None if self.remote else shm_dir.own(self.base)
        if not self.remote:
            shm_dir.sweep()
        self._node = here or os.uname().nodename
        self._killed = False  # in this attempt, by us
        self._dying: list[RankExit] = []  # ranks that were already exiting when we killed the others of this attempt
        self._listener = Listener(self.pulses, self._sock, "" if self.remote else self.base, self._node)
        self._slow = BeatPoller(rundir, self._blind, lambda: self.pulses.attempt, self.pulses.put_slow)

    @property
    def pids(self) -> frozenset[int]:
        """Our child processes that are not the attempt's."""
        return frozenset((self._srun[0],)) if self._srun is not None else frozenset()

    def begin(self, attempt: int, log: Path, away: frozenset[str] = frozenset()) -> str:
        """Begin a new attempt; returns the directory for its pages. ``away``: nodes that get no agent."""
        self._log, self._began = log, monotonic()
        self.pulses.begin(attempt)
        self._dying, self._killed = [], False
        if self._srun is not None and self._away - away:  # a node is back
            self._stop_srun()
        self._away = away
        self._starts, self._due, self._looked = 0, 0.0, 0.0
        self.tend()
        self._listener.look_now()
        return f"{self.base}/{attempt}"

    def tend(self) -> None:
        """Start the agents if they do not run, with growing pauses."""
        if not self.remote or self._sock is None:
            return
        now = monotonic()
        if self._srun is not None and now < self._looked + _LOOK:  # asked many times a second
            return
        self._looked = now
        if self._srun is not None and processes.identity(self._srun[0]) != self._srun[1]:
            self._say_once("the node agents have ended" + self._complaints())
            self._srun = None
            self._due = monotonic() + _PAUSES[min(self._starts, len(_PAUSES)) - 1]
        if self._srun is None and monotonic() >= self._due:
            self._start()

    # --------------------------------------------------------------------------------------------------------- asking

    def ask(self, node: str, verb: str, argument: object = "", timeout: float = 5.0) -> str | None:
        """The answer of ``node``'s agent to a question ("evidence" PID, "kill" DIR, "ping"); None after ``timeout`` seconds."""
        return self.ask_all({node: f"{verb} {argument}".strip()}, timeout).get(node)

    def ask_all(self, questions: Mapping[str, str], timeout: float) -> dict[str, str]:
        """node -> answer, of those that answered in time. All are asked at once."""
        if not self.remote:
            return {node: text for node, one in questions.items() if (text := self._ask_here(one, timeout)) is not None}
        waiting: dict[int, tuple[Node, bytes]] = {}
        answers: dict[str, str] = {}
        for name, question in questions.items():
            node = self.pulses.nodes.get(name.encode())
            if node is None or node.address is None:
                continue
            self._number += 1
            self.pulses.replies[self._number] = {}
            waiting[self._number] = (
                node,
                self.pulses.pack(protocol.ASK, self._number, name.encode(), question.encode()),
            )
        until, tries = monotonic() + timeout, 0
        try:
            while waiting and (now := monotonic()) < until:
                for node, data in waiting.values():
                    if self._sock is not None and node.address is not None:
                        protocol.send_datagram(self._sock, data, node.address)
                again = now + _AGAIN[min(tries, len(_AGAIN) - 1)]
                tries += 1
                while waiting and (rest := min(again, until) - monotonic()) > 0:
                    with self._answered:
                        self._answered.wait(min(rest, 0.05))
                    for number in [one for one in waiting if self._whole(one)]:
                        pieces = self.pulses.replies[number]
                        told = b"".join(pieces[index] for index in sorted(pieces) if index >= 0)
                        answers[waiting.pop(number)[0].name] = told.decode("utf-8", "replace")
        finally:
            for number in range(self._number - len(questions), self._number + 1):
                self.pulses.replies.pop(number, None)
        return answers

    def kill(self, attempt_dir: Path, nodes: Sequence[str], timeout: float = 1.5) -> frozenset[str]:
        """Kill an attempt's processes on ``nodes``; returns the nodes that did it. Notes dying ranks."""
        if not self.remote:
            if not self._killed:
                self._dying = [death_of(one, self._node) for one in self._listener.dying()]
            self._killed = True
            return frozenset()
        answers = self.ask_all(dict.fromkeys(nodes, f"kill {attempt_dir}"), timeout)
        done: set[str] = set()
        for node, text in answers.items():
            killed, dying = read_killed(text)
            self._dying += [death_of(one, node) for one in dying]
            done.update({node} if killed else ())
        return frozenset(done)

    def end_what_lives_on(self, attempt_dir: Path, nodes: Sequence[str]) -> None:
        """``kill`` on nodes that Slurm has lost but whose agent still reports; a silent agent is not waited for."""
        heard = set(nodes) - set(self.pulses.silent(nodes, _ALIVE * self.pulses.every)) if self.remote else ()
        if heard:
            self.kill(attempt_dir, sorted(heard), AT_ONCE)

    def first_failure_before_kill(self, told: RankExit) -> RankExit:
        """The rank that failed first. A killed process closes its connections before it is gone, and other ranks may report the
        exception of that earlier."""
        return self._dying[0] if told.failed and self._dying else told

    # -------------------------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """End the agents, and leave no page behind."""
        self._slow.close()
        self._stop_srun()
        self._listener.close()
        if self._sock is not None:
            self._sock.close()
        if self._hold is not None:
            os.close(self._hold)
        shm_dir.clear(self.base)

    def _stop_srun(self) -> None:
        if self._srun is None:
            return
        pid, start = self._srun
        for _ in range(3):  # each may be lost
            self._number += 1
            for name, node in list(self.pulses.nodes.items()):
                if self._sock is not None and node.address is not None:
                    protocol.send_datagram(
                        self._sock, self.pulses.pack(protocol.BYE, self._number, name, b""), node.address
                    )
            if _gone_within(pid, start, _END / 3):
                break
        else:
            processes.send(
                [pid], signal.SIGTERM
            )  # it kills agents that did not receive the request; this is not waited for
        self._srun = None

    # ------------------------------------------------------------------------------------------------------- starting

    def _start(self) -> None:
        nodes = tuple(node for node in self.allocation.nodes if node not in self._away)
        if not nodes or self._sock is None:
            return
        self._starts += 1
        self.pulses.restart(self.pulses.generation + 1)
        words = interpreter.command("--base", self.base, module="ftsupervise.ranks")
        words += ["--to", ",".join(protocol.own_addresses()), "--port", str(self._sock.getsockname()[1])]
        words += ["--generation", str(self.pulses.generation), "--every", f"{self.pulses.every:g}"]
        words += ["--closer", f"{_closer(self.pulses.every, len(nodes)):g}"]
        words += ["--child", *self.child] if self.child else []
        options = (f"--job-name={AGENTS}", "--no-kill", "--wait=0")
        env = self.allocation.side_env()
        env[protocol.ENV_KEY] = self._key.hex()
        if self._complaint < 0:
            self._complaint = os.memfd_create("ftsupervise-agents", os.MFD_CLOEXEC)
        try:
            child = subprocess.Popen(
                self.allocation.side_step(nodes, *words, options=options),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._complaint,
                env=env,
                start_new_session=True,  # without a signal when we die: srun would kill the agents before their cleanup
            )
        except OSError as error:
            self._say_once(f"cannot start the node agents: {error.strerror}")
            self._due = monotonic() + _PAUSES[-1]
            return
        child.returncode = 0  # reaped with everything else that is ours
        self._srun = (child.pid, processes.identity(child.pid) or 0)

    def _interval(self) -> float:
        try:
            wanted = float(self._env.get(ENV_EVERY, ""))
        except ValueError:
            wanted = self._often
        return max(0.02, wanted, len(self.allocation.nodes) / _RATE)

    # ----------------------------------------------------------------------------------------------------- being blind

    def _blind(self) -> bool:
        """Are there ranks that only the run directory reports? Says so once."""
        if monotonic() - self._began < self._silence:
            return False
        if not self.remote:
            return not self.pulses.local
        silent = self.pulses.silent((node for node in self.allocation.nodes if node not in self._away), self._silence)
        if silent:
            some = ", ".join(silent[:3]) + (f" and {len(silent) - 3} more" if len(silent) > 3 else "")
            port = self._sock.getsockname()[1] if self._sock is not None else 0
            self._say_once(
                f"no answer from the agents on {some}: their ranks are followed through the run directory, which is slower. "
                f"Does a firewall block UDP to {os.uname().nodename}:{port}?"
            )
            return True
        return self.pulses.without_ranks()  # ranks that could make no page, or have no guard

    def _complaints(self) -> str:
        if self._complaint < 0:
            return ""
        said = os.pread(self._complaint, 16_000, 0).decode("utf-8", "replace").splitlines()
        errors = [line for line in said if "error" in line]
        return f": {errors[-1]}" if errors else ""

    def _say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            tell(self._log, text)

    # ---------------------------------------------------------------------------------------------------------- parts

    def _whole(self, number: int) -> bool:
        pieces = self.pulses.replies[number]
        return -1 in pieces and len(pieces) == int(pieces[-1]) + 1

    def _wake(self) -> None:
        with self._answered:
            self._answered.notify_all()

    def _ask_here(self, question: str, timeout: float) -> str | None:
        words = interpreter.command("--answer", question, module="ftsupervise.ranks")
        try:
            done = bounded.run(words, timeout=timeout, env=os.environ)
        except OSError:
            return None
        return done.stdout if done.code == 0 or done.stdout else None


def _gone_within(pid: int, start: int, seconds: float) -> bool:
    until = monotonic() + seconds
    pause = threading.Event()
    while processes.identity(pid) == start:
        if monotonic() >= until:
            return False
        pause.wait(0.01)
    return True


def _closer(every: float, nodes: int) -> float:
    """Seconds between two reports of a node whose ranks make no progress: a hang is acted on in time, not up to a second
    later. 2,500 reports a second are a small part of what the supervisor can receive."""
    return min(every, max(CLOSER, nodes / 2500))
