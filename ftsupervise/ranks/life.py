"""Tells what the processes of a command without a guard do on one node: they are stopped, wait for a device, work or sleep.

The follower of the output looks at those beside the supervisor. On other nodes the agent looks, and reports it with a datagram
of its own, for there is no page of a rank: state, rank, process, CPU seconds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from ftsupervise.host import processes
from ftsupervise.rundir.heartbeat_page import ENV_PAGES
from ftsupervise.rundir.records import as_count

# The words of the follower (``log_heartbeat``) on its pipe to the supervisor: it has looked; the text of the line follows; what
# the processes do. They stand here, so that the supervisor does not load all forms of a step for them.
LOOKED, SAYS, PROCESSES = b".", b"!", b"@"

_SEARCH = 5.0  # seconds between two searches for processes
QUIET = 1000  # bytes in a second: less is an idle thread's own talk
# their work is done by processes that are not to be seen here
_AWAY = frozenset(("docker", "podman", "ssh", "kubectl", "mpirun", "mpiexec", "orted", "pdsh", "ray"))
_WORST = "TRDS"  # one is stopped; one runs; one waits for a device; all sleep
_FORM = struct.Struct("<BIIQ")  # state, rank, pid, CPU in 1/100 s


class ProcessesSeen(NamedTuple):
    """The processes of an attempt on a node, taken together."""

    state: str  # one of ``_WORST``
    cpu: float  # seconds that they have used
    moved: int = 0  # bytes that they have read and written
    pid: int = 0  # of one in that state
    rank: int = 0  # its rank, by Slurm


class CommandProcesses:
    """The processes that ``search`` finds: each is looked at, and looked for again after some seconds."""

    def __init__(self, search: Callable[[], Iterable[processes.Process]]) -> None:
        self._search = search
        self._processes: list[processes.Process] = []
        self._found = 0.0  # when they were last searched for
        self._used: dict[tuple[int, int], tuple[float, int]] = {}  # process -> CPU seconds, bytes

    def look(self) -> ProcessesSeen | None:
        """Return what they do now; None where they cannot be seen, or may do their work elsewhere."""
        now = monotonic()
        if now - self._found >= _SEARCH:
            self._processes = list(self._search())
            self._found = monotonic()
        states: dict[str, int] = {}
        for one in self._processes:
            seen = processes.process_stat(one.pid)
            if one.name in _AWAY:
                return None
            if seen is not None and seen.start == one.start and not seen.gone:
                states.setdefault(seen.state if seen.state in _WORST else "S", one.pid)
                self._used[(one.pid, one.start)] = (seen.cpu, _moved(one.pid))
        if not states:
            return None
        state = min(states, key=_WORST.index)
        used = self._used.values()
        cpu, moved = sum(cpu for cpu, _ in used), sum(moved for _, moved in used)
        rank = as_count(processes.environment(states[state]).get("SLURM_PROCID", "")) if state == "T" else None
        return ProcessesSeen(state, cpu, moved, states[state], rank or 0)


def _moved(pid: int) -> int:
    """Return the bytes that it has read and written so far, on disks, pipes and sockets."""
    try:
        text = Path(f"/proc/{pid}/io").read_text("ascii")
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines()[:2])


class LifeReports:
    """The reports of one node's agent, while no rank of it has a page."""

    def __init__(self, base: str, node: str, every: float, say: Callable[[int, bytes], object]) -> None:
        """``base``: where the pages of the ranks would be; ``say``: sends the report of an attempt."""
        self._base, self._node, self._every, self._say = base, node, every, say
        self._attempt = 0
        self._processes = CommandProcesses(self._search)
        self._due = 0.0
        self._last: tuple[float, int] | None = None  # when, and the bytes that had been moved

    def report(self, now: float) -> None:
        """Look, and report, if that is due."""
        if now < self._due:
            return
        self._due = now + self._every
        seen = self._processes.look()
        if seen is None:
            self._last = None
            return
        if self._last is not None and seen.state in "DS":
            at, moved = self._last
            if seen.moved - moved >= QUIET * (now - at):  # it sends or receives, and does not stand still
                seen = seen._replace(state="R")
        self._last = now, seen.moved
        self._say(self._attempt, pack(seen))

    def _search(self) -> list[processes.Process]:
        """Find those of the newest attempt on this node: several nodes may share a host."""
        found: dict[int, list[processes.Process]] = {}
        for value, some in processes.marked(ENV_PAGES).items():
            base, _, name = value.rpartition("/")
            number = as_count(name)
            if base == self._base and number is not None:
                found[number] = some
        newest = max(found, default=0)
        if newest != self._attempt:
            self._attempt, self._last = newest, None
        return [one for one in found.get(newest, ()) if self._is_here(one.pid)]

    def _is_here(self, pid: int) -> bool:
        return not self._node or processes.environment(pid).get("SLURMD_NODENAME", self._node) == self._node


def pack(seen: ProcessesSeen) -> bytes:
    return _FORM.pack(ord(seen.state), seen.rank, seen.pid, int(seen.cpu * 100))


def read(body: bytes) -> ProcessesSeen:
    """Unpack a body of ``pack``. Raises ValueError for any other body."""
    try:
        state, rank, pid, cpu = _FORM.unpack(body)
    except struct.error as error:
        raise ValueError(f"no report of processes: {error}") from None
    if chr(state) not in _WORST:
        raise ValueError("no state of a process")
    return ProcessesSeen(chr(state), cpu * 0.01, 0, pid, rank)


def together(nodes: Iterable[tuple[str, ProcessesSeen]]) -> tuple[str, ProcessesSeen] | None:
    """Return what the processes of all nodes do together, and the node of the one that tells; None where there are none."""
    found = sorted(nodes, key=lambda one: _WORST.index(one[1].state))
    if not found:
        return None
    name, worst = found[0]
    return name, worst._replace(cpu=sum(one.cpu for _, one in found))
