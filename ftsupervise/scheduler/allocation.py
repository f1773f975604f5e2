"""Questions to Slurm about the job we are in (its nodes, their states, its steps), and the end of a step. All are bounded.

Without Slurm, and when the controller does not answer, every question has an empty answer: a restart does not wait for it.
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from ftsupervise.errors import SchedulerUnavailable
from ftsupervise.host import bounded, processes
from ftsupervise.host.addresses import Names
from ftsupervise.host.begin import searched_alone
from ftsupervise.host.in_time import PendingCall, in_time
from ftsupervise.host.processes import SHELL_MARKED
from ftsupervise.hostlist import compress_hostlist, expand_hostlist
from ftsupervise.model import JobState
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, ENV_GROUP, ENV_GROUP_JOB
from ftsupervise.scheduler import LOCAL, USUAL_KILL_WAIT, ask_slurm_for_kill_wait, kind_of_job
from ftsupervise.scheduler.parse import may_have_run, parse_shown_job, srun, state_and_start
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


_NAMES = Names()  # of the nodes: they stay while we hold them


def silent(
    where: Mapping[str, tuple[str, int]], patience: float = _PATIENCE, names_by: Names = _NAMES
) -> tuple[str, ...]:
    """Return the nodes that refuse or do not answer. () when none answers: then the network of this host is at fault.

    A name that cannot be looked up, or not in time, says nothing about the node.
    """
    names = list(where)
    at = names_by.look_up((host for host, _ in where.values()), patience)
    answered = {name for name in names if not at.get(where[name][0])}
    unknown = len(answered)
    for begin in range(0, len(names), _AT_ONCE):
        some = [name for name in names[begin : begin + _AT_ONCE] if name not in answered]
        answered |= _try({name: (at[where[name][0]], where[name][1]) for name in some}, patience)
    return tuple(name for name in names if name not in answered) if len(answered) > unknown else ()


def _try(where: Mapping[str, tuple[str, int]], patience: float) -> set[str]:
    waiting: dict[int, tuple[str, socket.socket]] = {}
    answered: set[str] = set()
    poll = select.poll()
    try:
        for name, (host, port) in where.items():
            try:
                only_numbers = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=only_numbers)[0]
                family, kind, proto, _, address = found
                one = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, proto)
            except OSError:  # no descriptor is left: that says nothing about the node
                answered.add(name)
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
_LONGEST = 3 * _ASK  # for the answer to some that are asked one after the other
_OF_THE_JOB = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", ENV_GROUP, ENV_GROUP_JOB)
# Every process that inherited the attempt's environment, in whatever session or group; not srun, which reports their end.
KILL_MARKED = f"""mark=${{1:?}}; for p in $({SHELL_MARKED}); do
read -r c < /proc/$p/comm && [ "$c" != srun ] && kill -9 $p; done 2>/dev/null; true"""
AGENTS = "ftsupervise-agents"  # names of the steps that are ours and not the run's
STANDBYS = "ftsupervise-standbys"
_STEP = re.compile(r"^StepId=(\S+) .*\bSrunHost:Pid=([^:\s]+):(\d+)", re.M)
_GIVEN_UP = 3.0  # SlurmdTimeouts until Slurm has given up a node that does not answer: 1.5 to 2.3 were seen
_ENDING = 15.0  # seconds for a step to be gone after SIGKILL

T = TypeVar("T")

GONE = "no longer in the job*"


class Allocation:
    """The job of this process, from its environment."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.job = env.get("SLURM_JOB_ID", "")
        self._env = {k: v for k, v in env.items() if not k.startswith(("SQUEUE_", "SINFO_", "SCANCEL_"))}
        self._silent: frozenset[str] = frozenset()
        self._steps: Callable[[], Mapping[str, str]] | None = None  # as they are, for the end_steps that follows
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
        asked = _beside(self._held, None)
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
        return frozenset(self._steps_and_nodes())

    def _steps_and_nodes(self) -> dict[str, str]:
        if not self.job:
            return {}
        code, out = self._ask("squeue", "-s", "-h", "-j", self.job, "-o", "%i|%N|%j")
        lines = (line.strip().split("|", 2) for line in out.splitlines() if line.count("|") > 1) if code == 0 else ()
        ours = {
            step: nodes for step, nodes, name in lines if name not in (AGENTS, STANDBYS) and self._has_one_of(nodes)
        }
        aside = (".batch", ".extern", ".interactive")
        return {step: nodes for step, nodes in ours.items() if step and not step.endswith(aside)}

    def _has_one_of(self, nodes: str) -> bool:
        return not self.nodes or not nodes or _one_of(self.nodes, nodes, unknown=True)

    def state_of(self, job: str, began: datetime | None = None) -> str | None:
        """Return "RUNNING", "COMPLETING" … of a job that Slurm still has, "" when it has ended; None when that is unknown.

        ``began``: when something was known to run in it. A job of that number that has started later is another one.
        """
        if kind_of_job(job) == LOCAL:
            try:
                return in_time(partial(_state_of_local, job, self._env), _ASK)
            except SchedulerUnavailable:
                return None
        try:
            env = {**self._env, "SLURM_TIME_FORMAT": "%s"}
            done = bounded.run(["squeue", "-h", "-j", job, "-o", "%T|%S"], timeout=_ASK, env=env)
            if is_answer(done, lambda words: bounded.run(words, timeout=_ASK, env=self._env)):
                rows = (line.strip().partition("|") for line in done.stdout.splitlines())
                return next((state for state, _, start in rows if _may_be_of(start, began)), "")
        except OSError:
            return None
        return "" if done.code == 1 and "Invalid job id" in done.stderr else None

    def lives(self, job: str, began: datetime | None = None) -> bool | None:
        """Return whether Slurm has this job, running or completing: in one that waits, whoever's it is by now, nothing runs.
        None when that is unknown."""
        state = self.state_of(job, began)
        return None if state is None else state not in ("", JobState.PENDING.value)

    def kill_wait(self) -> float:
        """Return the seconds between Slurm's SIGTERM and its SIGKILL."""
        asked = ask_slurm_for_kill_wait(self._env, timeout=_ASK)
        return USUAL_KILL_WAIT if asked is None else asked

    def was_cancelled(self, job: str, began: datetime) -> bool:
        """Return whether Slurm says that this job, in which something ran at ``began``, was cancelled or preempted; False also
        where it does not know.

        It knows for the few minutes in which it keeps an ended job.
        """
        _, shown = self._ask("scontrol", "--oneliner", "show", "job", job, env={**self._env, "SLURM_TIME_FORMAT": "%s"})
        state, start = state_and_start(shown)
        return state in ("CANCELLED", "PREEMPTED") and _may_be_of(start, began)

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
        if ended and self._steps is None:
            self._steps = _beside(self._steps_and_nodes, dict[str, str]())
        ahead, self._ahead = self._ahead, None
        return (ahead or self._ask_how_they_are(self.ask_silent()))()

    def ask_ahead(self, silent: Callable[[], frozenset[str]] | None = None, *, steps: bool = False) -> None:
        """Ask now what the next ``how_they_are`` answers: the ranks are dead, and srun takes its time to end.

        ``silent``: what tells the silent nodes, where they have been asked already. ``steps``: ask for them too.
        """
        if self.elsewhere:
            self._steps = _beside(self._steps_and_nodes, dict[str, str]()) if steps else None
            self._ahead = self._ask_how_they_are(silent or self.ask_silent())

    def _ask_how_they_are(self, silent: Callable[[], frozenset[str]]) -> Callable[[], dict[str, str]]:
        states = _beside(self.states, dict[str, str]())
        return lambda: {**states(), **dict.fromkeys(silent(), "silent*")}

    def ask_silent(self) -> Callable[..., frozenset[str]]:
        """Ask ``silent()`` beside the caller. Returns a function that waits for the answer, that many seconds at most."""
        return _beside(self.silent, frozenset())

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

    def begins_again(self) -> float | None:
        """Return the seconds within which Slurm gives up a lost node of ours and begins this job again, ahead of others
        (expedited requeue); None where it does not, or where no other job waits for nodes: the next member begins sooner.
        """
        if not self.job:
            return None
        config, rivals = _beside(self._config, ""), _beside(self._rivals, False)
        code, shown = self._ask("scontrol", "show", "job", "-o", self.job)
        timeout = re.search(r"^SlurmdTimeout\s*=\s*(\d+)", config(), re.M)
        expedited = code == 0 and re.search(r"\bExpeditedRequeue=Yes\b", shown)
        return _GIVEN_UP * float(timeout[1]) + _ASK if expedited and timeout and rivals() else None

    def _rivals(self) -> bool:
        """Return whether other jobs wait for nodes of our partition."""
        words = ("squeue", "-h", "-t", "PENDING", "-p", self._env.get("SLURM_JOB_PARTITION", ""), "-o", "%r")
        code, out = self._ask(*words)
        return code == 0 and not {"Resources", "Priority"}.isdisjoint(line.strip() for line in out.splitlines())

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
        return searched_alone(
            {k: v for k, v in self._env.items() if k in _OF_THE_JOB or not k.startswith(("SLURM_", "FTSUPERVISE_"))}
        )

    def end_steps(self, without: frozenset[str], attempts: Path) -> tuple[str, ...]:
        """Send SIGKILL, on all nodes, to every step but those in ``without`` and those of others; return the steps that are
        left. A step on a node that does not answer ends only when Slurm gives that node up; this does not wait for it."""
        until = time.monotonic() + (_ENDING if not self._silent else 0.3)
        told: frozenset[str] = frozenset()
        asked, self._steps = self._steps or self._steps_and_nodes, None
        while left := {step: nodes for step, nodes in asked().items() if step not in without}:
            asked = self._steps_and_nodes
            if not left.keys() <= told and (theirs := self.of_others(attempts) & left.keys()):
                without |= theirs
                continue
            if left.keys() - told and not self._silent:
                self._ask("scancel", "--signal=KILL", *sorted(left))
                told = told | left.keys()
            stuck = self._silent and all(_one_of(self._silent, nodes, unknown=False) for nodes in left.values())
            if stuck or time.monotonic() >= until:
                return tuple(sorted(left))
            time.sleep(0.05)
        return ()

    def kill_steps(self, without: frozenset[str]) -> None:
        """Send SIGKILL to every step but those in ``without``; wait for none of them."""
        if left := self.steps() - without:
            self._ask("scancel", "--signal=KILL", *sorted(left))

    def tell_ranks(self, number: int, without: frozenset[str], attempts: Path) -> None:
        """Send a signal that srun does not pass on to the tasks of every step but those in ``without`` and those of others."""
        left = self.steps() - without
        if left and (left := left - self.of_others(attempts)):
            self._ask("scancel", f"--signal={number}", *sorted(left))

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

    def shown(self, nodes: Sequence[str]) -> str:
        """Return what Slurm shows of the job and of ``nodes``, for people; "" without Slurm. Takes seconds where it is slow."""
        if not self.job:
            return ""
        named = compress_hostlist(tuple(nodes))
        of_nodes = [("show", "node", named)] if named else []
        questions = [("show", "job", self.job), ("show", "step", self.job), *of_nodes]
        said = []
        for words in questions:
            code, out = self._ask("scontrol", *words)
            said.append(f"== scontrol {' '.join(words)}\n{out if code == 0 else 'no answer'}")
        return "\n".join(said)

    def _config(self) -> str:
        return self._ask("scontrol", "show", "config")[1]

    def _usual_port(self) -> int:
        found = re.search(r"^SlurmdPort\s*=\s*(\d+)", self._config(), re.M)
        return int(found[1]) if found else DEFAULT_PORT

    def _ask(self, *words: str, timeout: float = _ASK, env: Mapping[str, str] | None = None) -> tuple[int | None, str]:
        try:
            done = bounded.run(list(words), timeout=timeout, env=self._env if env is None else env)
        except OSError:  # no Slurm commands here
            return None, ""
        return done.code, done.stdout


def _beside(question: Callable[[], T], unknown: T) -> Callable[..., T]:
    """Ask in a thread. Returns a function that waits for the answer: so many seconds at most, by default for longer than all
    bounds of one question. ``unknown`` is the answer where there is none until then."""
    asked = PendingCall(question, "asking")

    def answer(seconds: float = _LONGEST) -> T:
        return found if (found := asked(seconds)) is not None else unknown

    return answer


def _one_of(some: Collection[str], nodes: str, *, unknown: bool) -> bool:
    """Return whether one of ``some`` is in the host list ``nodes``."""
    try:
        return not set(some).isdisjoint(expand_hostlist(nodes))
    except ValueError:
        return unknown


def _state_of_local(job: str, env: Mapping[str, str]) -> str | None:
    """Return the state of a member of a chain on this machine; "" where its chain has gone on without it."""
    from ftsupervise.scheduler.local import Local

    local = Local(env)
    found = local.describe(job)
    if found is None:
        return "" if local.describe(job.partition("_")[0]) is not None else None
    return "" if found.state.ended else found.state.value


def _may_be_of(start: str, began: datetime | None) -> bool:
    """Return whether a job that has started at ``start`` (epoch seconds) may be the one in which something ran at ``began``."""
    return began is None or not start.isdigit() or may_have_run(start, began)


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
