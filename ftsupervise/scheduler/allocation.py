"""Questions to Slurm about the job we are in (its nodes, their states, its steps), and the end of a step. All are bounded.

Without Slurm, and when the controller does not answer, every question has an empty answer: a restart does not wait for it.
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ftsupervise.host import bounded, processes
from ftsupervise.host.processes import SHELL_MARKED
from ftsupervise.hostlist import compress_hostlist, expand_hostlist
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, ENV_GROUP, ENV_GROUP_JOB
from ftsupervise.scheduler.parse import parse_shown_job, srun
from ftsupervise.scheduler.slurm import is_answer

# Silent nodes are found by a TCP connection to each slurmd, all at once: this takes a second, and Slurm takes SlurmdTimeout.
#
# srun itself has to reach every slurmd from here to start its tasks, so nothing stands between them and us.

_PATIENCE = 2.0  # seconds for all of them together
_AT_ONCE = 500  # connections that are tried at the same time
DEFAULT_PORT = 6818
_NODE = re.compile(r"^NodeName=(\S+).*?\bNodeAddr=(\S+)", re.M)
_PORT = re.compile(r"\bPort=(\d+)")


def addresses(shown: str, port: int) -> dict[str, tuple[str, int]]:
    """node -> address and port, from ``scontrol show node -o`` (which names a port only where it is not the usual one)."""
    found = {}
    for line in shown.splitlines():
        node, own = _NODE.search(line), _PORT.search(line)
        if node:
            found[node[1]] = (node[2], int(own[1]) if own else port)
    return found


def silent(where: Mapping[str, tuple[str, int]], patience: float = _PATIENCE) -> tuple[str, ...]:
    """Return the nodes that refuse or do not answer. () when none answers: then the network of this host is at fault."""
    names = list(where)
    answered: set[str] = set()
    for begin in range(0, len(names), _AT_ONCE):
        answered |= _try({name: where[name] for name in names[begin : begin + _AT_ONCE]}, patience)
    return tuple(name for name in names if name not in answered) if answered else ()


def _try(where: Mapping[str, tuple[str, int]], patience: float) -> set[str]:
    waiting: dict[int, tuple[str, socket.socket]] = {}
    answered: set[str] = set()
    poll = select.poll()
    try:
        for name, (host, port) in where.items():
            try:
                family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                one = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, proto)
            except OSError:
                answered.add(name)  # a name that cannot be looked up says nothing about the node
                continue
            waiting[one.fileno()] = (name, one)
            if one.connect_ex(address) in (0, errno.EINPROGRESS):
                poll.register(one, select.POLLOUT)
        until = time.monotonic() + patience
        left = len(waiting)
        while left and (rest := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(rest * 1000):
                poll.unregister(fd)
                left -= 1
                if waiting[fd][1].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    answered.add(waiting[fd][0])
    finally:
        for _, one in waiting.values():
            one.close()
    return answered


_TELL = 2.0  # seconds for a command whose answer is not needed
_ASK = 10.0  # seconds for one question
_OF_THE_JOB = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", ENV_GROUP, ENV_GROUP_JOB)
# Every process that inherited the attempt's environment, in whatever session or group; not srun, which reports their end.
KILL_MARKED = f"""mark=${{1:?}}; for p in $({SHELL_MARKED}); do
read -r c < /proc/$p/comm && [ "$c" != srun ] && kill -9 $p; done 2>/dev/null; true"""
AGENTS = "ftsupervise-agents"  # names of the steps that are ours and not the run's
STANDBYS = "ftsupervise-standbys"
_STEP = re.compile(r"^StepId=(\S+) .*\bSrunHost:Pid=([^:\s]+):(\d+)", re.M)
_ENDING = 15.0  # seconds for a step to be gone after SIGKILL

T = TypeVar("T")

GONE = "no longer in the job*"


class Allocation:
    """The job of this process, from its environment."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.job = env.get("SLURM_JOB_ID", "")
        self._env = {k: v for k, v in env.items() if not k.startswith(("SQUEUE_", "SINFO_", "SCANCEL_"))}
        self._silent: frozenset[str] = frozenset()
        self._steps: Callable[[], frozenset[str]] | None = None  # as they are, for the end_steps that follows
        self._ahead: Callable[[], dict[str, str]] | None = None  # for the how_they_are that follows
        self._addresses: dict[str, tuple[str, int]] = {}
        here = env.get("SLURMD_NODENAME", "")
        text = env.get("SLURM_JOB_NODELIST", "") if self.job else ""
        try:
            self.nodes = expand_hostlist(text) if text else ()
        except ValueError:
            self.nodes = ()
        # true if a node may be lost while we go on: only where a replica group may lose one
        self.elsewhere = len(self.nodes) > 1 or bool(here and self.nodes and self.nodes != (here,))
        self._asked = (
            self.nodes if not here or here in self.nodes else (*self.nodes, here)
        )  # one answers, by a connection

    def states(self) -> dict[str, str]:
        """Return node -> its state in sinfo's words ("mixed", "down*"), GONE for one the job has lost; {} without an answer."""
        if not self.elsewhere:
            return {}
        words = ("sinfo", "-h", "-N", "-n", self._env["SLURM_JOB_NODELIST"], "-o", "%N|%T")
        asked = _beside(self._held)
        code, out = self._ask(*words)
        held = asked()
        pairs = (line.strip().partition("|") for line in out.splitlines()) if code == 0 else ()
        return {node: state if held is None or node in held else GONE for node, bar, state in pairs if bar}

    def _held(self) -> frozenset[str] | None:
        """Return the nodes that the job still has; None when that is unknown.

        With --no-kill it loses those that fail, and does not get them back when they recover.
        """
        code, out = self._ask("squeue", "-h", "-j", self.job, "-o", "%N")
        try:
            return frozenset(expand_hostlist(out.strip())) if code == 0 and out.strip() else None
        except ValueError:
            return None

    def steps(self) -> frozenset[str]:
        """Return the job's living steps on our nodes, without the batch script's own and our agents'.

        A replica group has only some of the job's nodes, and the steps on the others belong to other groups.
        """
        if not self.job:
            return frozenset()
        code, out = self._ask("squeue", "-s", "-h", "-j", self.job, "-o", "%i|%N|%j")
        lines = (line.strip().split("|", 2) for line in out.splitlines() if line.count("|") > 1) if code == 0 else ()
        found = (step for step, nodes, name in lines if name not in (AGENTS, STANDBYS) and self._has_one_of(nodes))
        return frozenset(step for step in found if step and not step.endswith((".batch", ".extern", ".interactive")))

    def _has_one_of(self, nodes: str) -> bool:
        try:
            return not self.nodes or not nodes or not set(self.nodes).isdisjoint(expand_hostlist(nodes))
        except ValueError:
            return True

    def lives(self, job: str) -> bool | None:
        """Return whether Slurm has this job, waiting, running or completing. None when that is unknown."""
        try:
            done = bounded.run(["squeue", "-h", "-j", job, "-o", "%T"], timeout=_ASK, env=self._env)
            if is_answer(done, lambda words: bounded.run(words, timeout=_ASK, env=self._env)):
                return bool(done.stdout.strip())
        except OSError:
            return None
        return False if done.code == 1 and "Invalid job id" in done.stderr else None

    def of_others(self, attempts: Path) -> frozenset[str]:
        """Return steps with a living srun that were started beside the run. Such a step has an srun on this host without an
        attempt in its environment, or one on a host outside the job. Steps for which this is unknown are not among them."""
        code, out = self._ask("scontrol", "-o", "show", "step", self.job)
        found = _STEP.findall(out) if code == 0 else ()
        here, ours = _short(os.uname().nodename), {_short(node) for node in self.nodes}
        theirs = set()
        for step, host, pid in found:
            if not int(pid) or host == "(null)":
                continue
            if _short(host) == here:
                if _is_stranger(int(pid), attempts):
                    theirs.add(step)
            elif _short(host) not in ours:
                theirs.add(step)
        return frozenset(theirs)

    def how_they_are(self, *, ended: bool = False) -> dict[str, str]:
        """Return ``states()``, with "silent*" for the ``silent()`` ones. All questions are asked at the same time, because
        the restart waits for the answers. ``ended``: the steps too, for the ``end_steps`` that follows."""
        if ended:
            self._steps = _beside(self.steps)
        ahead, self._ahead = self._ahead, None
        return (ahead or self._ask_how_they_are())()

    def ask_ahead(self) -> None:
        """Ask now what the next ``how_they_are`` answers: the ranks are dead, and srun takes its time to end."""
        if self.elsewhere:
            self._ahead = self._ask_how_they_are()

    def _ask_how_they_are(self) -> Callable[[], dict[str, str]]:
        silent, states = _beside(self.silent), _beside(self.states)
        return lambda: {**states(), **dict.fromkeys(silent(), "silent*")}

    @property
    def last_silent(self) -> frozenset[str]:
        """Return the last answer of ``silent()``."""
        return self._silent

    def silent(self) -> frozenset[str]:
        """Return nodes of the allocation whose slurmd does not answer us, whatever Slurm thinks of them. Remembered."""
        where = self._where()
        if where:
            self._silent = frozenset(silent(where)) & frozenset(self.nodes)
        return self._silent

    def kill_ranks(self, attempt_dir: Path, nodes: tuple[str, ...]) -> bool:
        """Send SIGKILL to every process of an attempt on ``nodes`` (all), through a small step beside theirs. Bounded.

        Once a step is being terminated (``--kill-on-bad-exit``, a SIGTERM to srun), its slurmstepd waits for KillWait,
        30 s by default, and takes no SIGKILL from ``scancel`` meanwhile: seen on 22.05. Returns False when not all
        could be reached.
        """
        if not self.job:
            return False
        silent = self.silent()
        where = tuple(node for node in nodes or self.nodes if node not in silent)
        if not where:
            return False
        mark = f"{ENV_ATTEMPT_DIR}={attempt_dir}"
        words = self.side_step(where, "sh", "-c", KILL_MARKED, "kill", mark)
        try:
            done = bounded.run(words, timeout=_ASK, env=self.side_env())
        except OSError:
            return False
        return done.code == 0 and not silent

    def side_step(
        self,
        nodes: Sequence[str],
        *command: str,
        output: str = "/dev/null",
        options: Sequence[str] = (),
        whole: bool = False,
    ) -> list[str]:
        """Return the srun that runs ``command`` once on each of ``nodes``, beside the ranks and at no cost to them.

        It must run with ``side_env()``, so that nothing of the job's own step options gets into it. ``whole``: with the
        GPUs of the job too, for a command that does the ranks' work.
        """
        count = len(nodes)
        words = ["--overlap", "--mem=0", "--cpu-bind=none", "--kill-on-bad-exit=0", "--quiet"]
        words += [] if whole else ["--gres=none"]
        words += [f"--nodes={count}", f"--ntasks={count}", f"--nodelist={compress_hostlist(tuple(nodes))}"]
        words += ["--input=none", f"--output={output}", *options]
        return [*srun(f"--jobid={self.job}", *words), *command]

    def side_env(self) -> dict[str, str]:
        return {k: v for k, v in self._env.items() if k in _OF_THE_JOB or not k.startswith(("SLURM_", "FTSUPERVISE_"))}

    def end_steps(self, without: frozenset[str], attempts: Path) -> tuple[str, ...]:
        """Send SIGKILL, on all nodes, to every step but those in ``without`` and those of others; return the steps that are
        left. A step on a node that does not answer ends only when Slurm gives that node up; this does not wait for it."""
        until = time.monotonic() + (_ENDING if not self._silent else 0.3)
        told: frozenset[str] = frozenset()
        asked, self._steps = self._steps or self.steps, None
        while left := asked() - without:
            asked = self.steps
            if not left <= told and (theirs := self.of_others(attempts) & left):
                without |= theirs
                continue
            if left - told and not self._silent:
                self._ask("scancel", "--signal=KILL", *sorted(left))
                told = told | left
            if time.monotonic() >= until:
                return tuple(sorted(left))
            time.sleep(0.05)
        return ()

    def kill_steps(self, without: frozenset[str]) -> None:
        """Send SIGKILL to every step but those in ``without``; wait for none of them."""
        if left := self.steps() - without:
            self._ask("scancel", "--signal=KILL", *sorted(left))

    def tell_step(self, step: str) -> None:
        """Send SIGTERM to the tasks of one step, on all its nodes."""
        self._ask("scancel", "--signal=TERM", step, timeout=_TELL)

    def address(self, node: str) -> str:
        """Return the address at which Slurm reaches a node; "" when that is unknown."""
        if self.nodes and not self._addresses:
            self._learn_addresses()
        return self._addresses.get(node, ("", 0))[0]

    def _where(self) -> dict[str, tuple[str, int]]:
        """Return node -> address and port of its slurmd, asked for once: they stay while we hold the nodes."""
        if self.elsewhere and not self._addresses:
            self._learn_addresses()
        return self._addresses if self.elsewhere else {}

    def _learn_addresses(self) -> None:
        code, shown = self._ask("scontrol", "show", "node", "-o", compress_hostlist(self._asked))
        if code == 0:
            self._addresses = addresses(shown, self._usual_port())

    def _usual_port(self) -> int:
        _, out = self._ask("scontrol", "show", "config")
        found = re.search(r"^SlurmdPort\s*=\s*(\d+)", out, re.M)
        return int(found[1]) if found else DEFAULT_PORT

    def _ask(self, *words: str, timeout: float = _ASK) -> tuple[int | None, str]:
        try:
            done = bounded.run(list(words), timeout=timeout, env=self._env)
        except OSError:  # no Slurm commands here
            return None, ""
        return done.code, done.stdout


def _beside(question: Callable[[], T]) -> Callable[[], T]:
    """Ask in a thread. Returns a function that waits for the answer."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(question()), name="asking", daemon=True)
    thread.start()

    def answer() -> T:
        thread.join()
        return found[0]

    return answer


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


def _is_stranger(pid: int, attempts: Path) -> bool:
    """Return whether the process lives, without an attempt of this run in its environment.

    The environment of another user's process cannot be read: it counts as a stranger's.
    """
    mine = processes.environment(pid).get(ENV_ATTEMPT_DIR, "").startswith(f"{attempts}/")
    return not mine and processes.identity(pid) is not None


# A job that has lost its batch host is ended, as Slurm itself ends one without ``--no-kill``: it is requeued where that is
# allowed, and otherwise cancelled, so that the next member takes over (22.05 shows JobState=RUNNING, and a BatchHost that
# is not in NodeList).

_ONE_QUESTION = 20.0  # seconds for one question


def end_without_host(job: str, env: Mapping[str, str]) -> bool:
    """End ``job`` if it has lost its batch host. Returns True when nothing is left to do: Slurm ends it, or knows it no
    longer. Raises OSError where there are no Slurm commands."""

    def ask(*words: str) -> bounded.CompletedCommand:
        return bounded.run(words, timeout=_ONE_QUESTION, env=env)

    answer = ask("scontrol", "--oneliner", "show", "job", job)
    shown = parse_shown_job(answer.stdout, job) if answer.code == 0 else None
    if shown is None or not shown.headless:
        return "Invalid job id" in answer.stderr
    if shown.requeue and ask("scontrol", "requeue", shown.id).code == 0:
        return True
    return ask("scancel", shown.id).code == 0
