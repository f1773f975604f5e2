"""The questions that the supervisor may ask an agent. Each is answered by a process of its own, since it may hang.

evidence R:P,… DIR  writes the pages of ranks R with the processes P to DIR; answers their first lines (``evidence.py``)
look R:P,… DIR   the same of a run that may be healthy, without what it could mind
node DIR         writes the page of this node to DIR
kill DIR         SIGKILL for every process of the attempt in DIR on this node; answers how many took it, and for each rank
                 that was dying before (from an agent only; as ``pack_exits``, in hexadecimal)
signal N DIR     signal N for the processes that hear it, of the ranks of the attempt in DIR on this node; answers how many
tasks DIR        the living tasks of the attempt in DIR on this node, one a line: "88.0 3 node-[0-1] 1(x2)" is rank 3 of the
                 step 88.0, which has one task on each of two nodes
ranks DIR        the ranks of the attempt in DIR on this node and their processes, one a line: "3 4711"
ping             "here"
port N N …       the first of these TCP ports that is free on this node; "" when none is
snapshots…       what lies in this node's memory, and what shall (``snapshots/node.py``)
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterable
from time import monotonic

from ftsupervise.ranks.protocol import RankExit, chunks, pack_exits, read_exits
from ftsupervise.rundir.records import as_count

_BOUND = {
    "evidence": 20.0,
    "look": 20.0,
    "node": 5.0,
    "kill": 5.0,
    "ping": 2.0,
    "snapshots": 5.0,
    "snapshots-begin": 300.0,
    "snapshots-keep": 600.0,
}  # seconds
_MOST = 250_000  # bytes of an answer
_AGAIN = 20  # searches until no new process is found: they may fork meanwhile


class Request:
    """One question that is being answered."""

    def __init__(self, question: str, node: str, poll: select.poll, by: Callable[[str, str], str]) -> None:
        """Start the process; ``by`` answers in it. Raises OSError when there is no process or memory for it."""
        self.text, self.question = b"", question
        self._poll = poll
        self.fd, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._until = monotonic() + _BOUND.get(question.partition(" ")[0], 2.0)
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self.fd)
            os.close(write)
            raise
        if self.pid == 0:
            _answer_and_leave(by, question, node, write)
        os.close(write)
        poll.register(self.fd, select.POLLIN)

    def done(self, now: float) -> bool:
        """Read the available output; return True when it is complete, or the time is up."""
        try:
            while piece := os.read(self.fd, 1 << 16):
                self.text += piece
                if len(self.text) > _MOST:
                    break
            over = True
        except BlockingIOError:
            over = now >= self._until
        if over:
            self.close()
        return over

    def close(self) -> None:
        if self.fd < 0:
            return
        self._poll.unregister(self.fd)
        os.close(self.fd)
        self.fd = -1
        try:
            os.kill(self.pid, signal.SIGKILL)  # one that hangs in state D is reaped when it can be
        except ProcessLookupError:
            pass


class Answers:
    """The question that is being answered, and the last answer: it is sent again when it is asked for again."""

    def __init__(
        self,
        node: str,
        poll: select.poll,
        dying: Callable[[], Iterable[RankExit]],
        snapshots: Callable[[str, str], str],
    ) -> None:
        self._node, self._poll, self._dying, self._snapshots = node, poll, dying, snapshots
        self._request: Request | None = None
        self._killed = ("", "")  # a request to kill, and the ranks that were dying when it first came
        self.number, self.pieces = 0, list[bytes]()

    def take(self, number: int, question: str) -> None:
        """Begin to answer a question, unless it is the last one again."""
        if number == self.number:
            return
        self.close()
        self.number, self.pieces = number, []
        if question.startswith("kill ") and self._killed[0] != question:
            self._killed = (question, f" {pack_exits(self._dying(), monotonic()).hex()}".rstrip())
        try:
            by = self._snapshots if question.startswith("snapshots") else answer
            self._request = Request(question, self._node, self._poll, by)
        except OSError:
            self._request = None

    def finish(self, now: float) -> bool:
        """Return whether a question has been answered since the last call."""
        one = self._request
        if one is None or not one.done(now):
            return False
        more = self._killed[1] if one.question == self._killed[0] else ""
        self.pieces, self._request = chunks(one.text + more.encode()), None
        return True

    @property
    def fd(self) -> int:
        return self._request.fd if self._request is not None else -1

    def close(self) -> None:
        if self._request is not None:
            self._request.close()
            self._request = None


def reap() -> None:
    """Wait for the processes that have answered a question."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _answer_and_leave(by: Callable[[str, str], str], question: str, node: str, fd: int) -> None:
    try:
        os.set_blocking(fd, True)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        data = memoryview(by(question, node).encode("utf-8", "replace")[:_MOST])
        while data:
            data = data[os.write(fd, data) :]
        os.close(fd)  # now: with a thread in state D this process does not end
    except BaseException:  # whatever the error, two agents would be worse
        pass
    finally:
        os._exit(0)


def answer(question: str, node: str) -> str:
    verb, _, rest = question.partition(" ")
    if verb == "ping":
        return "here"
    if verb == "kill":
        return str(kill_all(rest, node))
    if verb == "signal":
        return str(signal_ranks(rest, node))
    if verb == "tasks":
        return tasks_of(rest, node)
    if verb == "ranks":
        return "\n".join(f"{rank} {pid}" for rank, pid in sorted(rank_processes(rest, node).items()))
    if verb in ("evidence", "look"):
        return _evidence(rest, node, goes_on=verb == "look")
    if verb == "node":
        from pathlib import Path

        from ftsupervise.ranks.evidence import take_node

        take_node(Path(rest), node)
        return "done"
    numbers = [number for word in rest.split() if (number := as_count(word)) is not None]
    if len(numbers) < max(1, len(rest.split())) or verb != "port":
        return f"no such question: {verb}"
    from ftsupervise.host.ports import free_port

    return str(free_port(numbers))


def _evidence(rest: str, node: str, *, goes_on: bool) -> str:
    try:
        from ftsupervise.ranks.evidence import asked_for, take  # imported here: most agents are never asked

        asked = asked_for(rest)
        return take(*asked, node, goes_on=goes_on) if asked is not None else "no such question"
    except Exception as error:  # the evidence so far is lost, and the answer says so
        return f"no evidence of {rest}: {type(error).__name__}: {error}"


def read_killed(text: str, node: str) -> tuple[bool, list[RankExit]]:
    """Parse the agent's answer to "kill": whether it was done, and the ranks that were dying before."""
    count, _, rest = text.partition(" ")
    try:
        dying = read_exits(bytes.fromhex(rest), node, monotonic())
    except ValueError:
        dying = []
    return as_count(count) is not None, dying


def kill_all(attempt_dir: str, node: str) -> int:
    """Kill all processes with the attempt's environment except srun, which reports their end; returns their number."""
    from ftsupervise.host import processes  # here: most agents are never asked to kill
    from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR

    ended: set[tuple[int, int]] = set()
    for _ in range(_AGAIN):
        found = processes.marked(ENV_ATTEMPT_DIR).get(attempt_dir, [])
        new = [
            one for one in found if (one.pid, one.start) not in ended and one.name != "srun" and _is_on(one.pid, node)
        ]
        if not new:
            break
        for one in new:
            ended.add((one.pid, one.start))
            processes.signal_exactly(one, signal.SIGKILL)
    return len(ended)


def signal_ranks(rest: str, node: str) -> int:
    """Signal the first process on each branch of a rank here that hears it, "15 DIR"; returns how many got it."""
    from ftsupervise.host import processes
    from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR

    words, _, attempt_dir = rest.partition(" ")
    if (number := as_count(words)) not in signal.valid_signals():
        return 0
    found = processes.marked(ENV_ATTEMPT_DIR).get(attempt_dir, [])
    tasks = processes.hearing_tasks([one.pid for one in found if _is_on(one.pid, node)], number)
    return processes.send([pid for hearing in tasks.values() for pid in hearing], number)


def tasks_of(attempt_dir: str, node: str) -> str:
    """Return the living tasks of the attempt here, as the answer to "tasks" has them. Steps within a step have theirs, too."""
    from ftsupervise.host import processes
    from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR

    found = []
    for one in processes.marked(ENV_ATTEMPT_DIR).get(attempt_dir, []):
        env = processes.environment(one.pid)
        if env.get("SLURM_TASK_PID") == str(one.pid) and node in ("", env.get("SLURMD_NODENAME") or node):
            step = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"
            rank, tasks = env.get("SLURM_PROCID", ""), env.get("SLURM_STEP_TASKS_PER_NODE", "-")
            found.append(f"{step} {rank} {env.get('SLURM_STEP_NODELIST', '-')} {tasks}")
    return "\n".join(found)


_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")  # by torch's launchers, Slurm and MPI
_LAUNCHERS = frozenset(
    ("sh", "bash", "dash", "zsh", "ksh", "srun", "torchrun", "mpirun", "mpiexec", "orterun", "timeout", "time")
)


def rank_processes(attempt_dir: str, node: str) -> dict[int, int]:
    """Return rank -> its process, of the attempt here, for a command whose ranks have no page: as the environments of the
    processes say it, of each rank the one that began the others, and no shell or launcher around it. Rank 0 where none says it.
    """
    from ftsupervise.host import processes
    from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR

    found = [one for one in processes.marked(ENV_ATTEMPT_DIR).get(attempt_dir, []) if one.name not in _LAUNCHERS]
    environments = {one.pid: processes.environment(one.pid) for one in found if _is_on(one.pid, node)}
    told = next((name for name in _RANKS if any(name in env for env in environments.values())), "")
    ranks = {
        pid: rank
        for pid, env in environments.items()
        if (rank := as_count(env.get(told, "") if told else "0")) is not None
    }
    first: dict[int, int] = {}
    for one in sorted(found, key=lambda one: (one.start, one.pid)):
        if one.pid in ranks and ranks.get(one.parent) != ranks[one.pid]:
            first.setdefault(ranks[one.pid], one.pid)
    return first


def _is_on(pid: int, node: str) -> bool:
    """Return whether it is a process of ``node``. Several nodes of a test cluster share one host."""
    from ftsupervise.host import processes

    return node in ("", processes.environment(pid).get("SLURMD_NODENAME") or node)
