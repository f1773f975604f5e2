"""Who died first? srun's own exit code often names a victim: when one rank is killed it ends the others with SIGTERM and
leaves with 143. Its messages in the job's output say more, in the order in which things happened. Pure, but for reading.

The lines are Slurm's own, as seen on 22.05 to 26.05.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ftsupervise.model import Cause, CauseKind, Claim, NodeRanks, ended
from ftsupervise.printable import OUR_LINE, printable, printable_lines
from ftsupervise.ranks.agent_pool import Agents
from ftsupervise.ranks.rank_table import RankExit
from ftsupervise.run.cause import HARDWARE
from ftsupervise.run.events import SignalQueue
from ftsupervise.run.settings import Options
from ftsupervise.rundir.ledger import read_cause
from ftsupervise.rundir.records import read_json
from ftsupervise.scheduler.parse import is_srun
from ftsupervise.warm.manager import Warm

_TASK = re.compile(
    r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<how>Killed|Terminated|Aborted|Segmentation fault"
    r"|Bus error|Floating point exception|Illegal instruction|Out Of Memory|Exited with exit code (?P<code>\d{1,9}))",
    re.M,
)
_NODE = re.compile(r"^srun: error: Node failure on (?P<node>\S+)", re.M)
_LAUNCH = re.compile(r"^srun: error: Task launch for StepId=\S+ failed on node (?P<node>[^\s:]+)", re.M)
_REFUSED = re.compile(r"^srun: error: Unable to create step for job \S+: (?P<why>.+)$", re.M)
# slurmstepd's own lines begin so; "slurmstepd-node-0: " where several slurmds share a host; since 26.05, and with a log format
# of the site's, only the time; or nothing at all
_STEPD = r"(?:slurmstepd(?:-\S+)?: |\[\d{4}-\d\d-\d\dT\S+\] )?error: "
_OOM = re.compile(rf"^{_STEPD}Detected \d+ oom[-_]kill event", re.M)
_DUE_TO = re.compile(
    rf"^{_STEPD}\*\*\* (?:JOB|STEP) \S+ .*CANCELLED AT \S+ DUE (?:TO|to) ([A-Z][A-Za-z0-9 ]+?)(?:,| \*\*\*)", re.M
)
_NO_CAUSE = ("TASK FAILURE", "SIGNAL ")  # of the first one the task's own line tells; the second one is scancel's
# torchrun's agent exits with 1 whatever happened; this block says what did
_TORCHRUN = re.compile(
    r"Root Cause \(first observed failure\):.{0,100}?\btime\s*: (?P<time>\S+).{0,400}?\bhost\s*: (?P<host>\S+)"
    r".{0,400}?\brank\s*: (?P<rank>\d+)"
    r".{0,400}?\bexitcode\s*: (?P<code>-?\d{1,9})",
    re.S,
)
_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
    "Aborted": signal.SIGABRT,
    "Segmentation fault": signal.SIGSEGV,
    "Bus error": signal.SIGBUS,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_REASONS = {"time limit": CauseKind.TIME_LIMIT, "node failure": CauseKind.NODE, "preemption": CauseKind.PREEMPTED}
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,2000}(?:\x07|\x1b\\)|[@-Z\\^_])")
_OURS = re.compile(rf"^{OUR_LINE}.*\n?", re.M)
_READ = 256_000  # bytes looked at: the messages stand near the end


def first_death(output: str) -> Cause | None:
    """The cause that Slurm's lines in ``output`` tell, None if none does: rank 1 on node-1, killed by SIGKILL."""
    for due in _DUE_TO.finditer(output):
        if not due[1].startswith(_NO_CAUSE):
            said = due[1].lower()
            return Cause(_REASONS[said]) if said in _REASONS else Cause(CauseKind.OTHER, text=said)
    for kind, pattern in ((CauseKind.NODE, _NODE), (CauseKind.LAUNCH, _LAUNCH)):
        if node := pattern.search(output):
            return Cause(kind, (NodeRanks(node["node"]),))
    if refused := _REFUSED.search(output):
        return Cause(CauseKind.NO_STEP, text=refused["why"].strip())
    if _OOM.search(output):
        return Cause(CauseKind.MEMORY)
    if workers := list(_TORCHRUN.finditer(output)):  # one of each node's agent: the earliest that was not told to leave
        worker = min(workers, key=lambda one: (int(one["code"]) == -signal.SIGTERM, one["time"]))
        return ended(int(worker["code"]), worker["host"], worker["rank"])
    deaths = _tasks(output)
    # the first that was not just ended along with the others
    first = next((one for one in deaths if not _told(one)), deaths[0] if deaths else None)
    return _crash(deaths) or first if first is not None and first.kind is CauseKind.EXIT else first


def cause_of(death: RankExit, output: str, failed: Collection[int] = (), *, before: str = "") -> Cause:
    """The end of one rank as srun tells it, if it does, which knows of the kernel's out of memory; else as its node does. What
    the rank itself has said goes first: we did not wait for its process, srun may have seen it killed. ``failed``: the ranks
    that have said so of themselves; one that has not and was the first to leave, as by ``os._exit(7)``, is what they fell over.
    ``before``: the output as it was before we ended anybody; one that was killed first there was killed by somebody else.
    """
    deaths, rank = _tasks(output), str(death.rank)
    if death.failed and death.code is not None and death.code > 0:
        told = {rank, *map(str, failed)}
        killed = _killed_first(_tasks(before), told)
        return _crash(deaths, told) or killed or _left_first(deaths, told) or death.cause()
    said = (one for one in deaths if one.at == (NodeRanks(death.node, rank),))
    return next(said, death.cause())


def _told(one: Cause) -> bool:
    """It was ended along with the others, and may be about to save."""
    return one.kind is CauseKind.SIGNAL and one.signal == signal.SIGTERM


def _crash(deaths: Iterable[Cause], failed: Collection[str] = ()) -> Cause | None:
    """A rank that no signal of anybody's has ended: those that lose their connection to it leave with a code of their own, and
    may be told of before it. (An abort is no such sign: NCCL's watchdog aborts the victims. Nor is the crash of one of
    ``failed``: it had raised, and fell over in its teardown.)"""
    return next((one for one in deaths if one.signal in _CRASHES and one.at[0].ranks not in failed), None)


def _killed_first(deaths: Sequence[Cause], failed: Collection[str]) -> Cause | None:
    """The rank that was gone first, by SIGKILL, and not by srun, which kills only after it has told of another one."""
    first = deaths[0] if deaths else None
    return first if first is not None and first.signal == signal.SIGKILL and _alone(first, failed) else None


def _left_first(deaths: Iterable[Cause], failed: Collection[str]) -> Cause | None:
    """The first rank that left by itself, with a code; None if it is one of ``failed``."""
    first = next((one for one in deaths if one.signal not in (signal.SIGKILL, signal.SIGTERM)), None)
    left = first is not None and first.code is not None and _alone(first, failed)
    return first if left else None


def _alone(one: Cause, failed: Collection[str]) -> bool:
    """Is it of one rank, and of none of ``failed``?"""
    return one.at[0].ranks.isdigit() and one.at[0].ranks not in failed


def _tasks(output: str) -> list[Cause]:
    """What srun tells of its tasks, in its order."""
    return [_task(match) for match in _TASK.finditer(output)]


def _task(match: re.Match[str]) -> Cause:
    at = (NodeRanks(match["node"], match["tasks"].strip("[]")),)
    if match["code"]:
        return Cause(CauseKind.EXIT, at, code=int(match["code"]))
    number = _SIGNALS.get(match["how"])
    return Cause(CauseKind.MEMORY, at) if number is None else Cause(CauseKind.SIGNAL, at, signal=int(number))


def hardware(output: str) -> str:
    """The line in which a GPU or a node tells of a fault of its own; "" if there is none."""
    found = HARDWARE.search(output)
    return found[0].strip() if found is not None else ""


def blamed(output: str) -> tuple[str, ...]:
    """The nodes that Slurm's lines say went away or took no task."""
    return tuple(dict.fromkeys(match["node"] for found in (_NODE, _LAUNCH) for match in found.finditer(output)))


def root_error(path: Path) -> str:
    """The error in a file of torchrun's (``@record``): "ValueError: no such shape"; "" if there is none. Never raises."""
    try:
        said = (read_json(path, limit=1_000_000) or {}).get("message")
    except (OSError, ValueError):
        return ""
    if isinstance(said, dict):
        said = said.get("message")
    return printable(str(said).strip().partition("\n")[0], 500) if said else ""


def stopped(path: Path) -> Cause | None:
    """Why the guard has let the command stop, as it has written it down; None if it has not. Never raises."""
    try:
        word = printable(str((read_json(path, limit=64_000) or {}).get("cause", "")), 200)
    except (OSError, ValueError):
        return None
    return read_cause({}, word) if word else None


def ends_with_a_rank(command: tuple[str, ...]) -> bool:
    """Is it an srun that is meant to end as soon as one of its ranks has failed?"""
    return is_srun(command) and may_end_with_a_rank(command)


def may_end_with_a_rank(command: tuple[str, ...]) -> bool:
    """Nobody has asked srun to go on without a rank that failed."""
    return not any(word in ("-K0", "--kill-on-bad-exit=0") for word in command)


def plain(data: bytes) -> str:
    """A job's output as lines that can be searched and printed: without colours and other escape sequences, each state of a
    progress bar on a line of its own, and ``?`` for what else cannot be seen."""
    text = _ESCAPES.sub("", data.decode("utf-8", "replace"))
    return printable_lines(text.replace("\r\n", "\n").replace("\r", "\n"))


class Output:
    """Where this process's own output goes, from now on, if that is a file: the batch script's log."""

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._start = self._read = self._size()
        self._rest = b""

    @property
    def is_file(self) -> bool:
        return self._start is not None

    def next_death(self) -> Cause | None:
        """The first death that srun has told of since the last call; None if none. Costs one fstat when nothing was written."""
        size = self._size()
        if size is None or self._read is None or size <= self._read:
            return None
        data = self._rest + (self._bytes(max(self._read, size - _READ), size) or b"")
        self._read = size
        whole, _, self._rest = data.rpartition(b"\n")
        if b"srun: error: " not in whole:
            return None
        death = first_death(plain(whole))
        return None if death is None or _told(death) else death

    def since(self) -> str | None:
        """What was written since, the last part of it, as plain lines and without our own, which repeat what the command and
        earlier causes say; None when it goes to a terminal or a pipe, or cannot be read."""
        size = self._size()
        if size is None or self._start is None:
            return None
        if size <= self._start:
            return ""
        data = self._bytes(max(self._start, size - _READ), size)
        return None if data is None else _OURS.sub("", plain(data))

    def _bytes(self, begin: int, end: int) -> bytes | None:
        try:
            # opened anew: ours was opened for writing only
            reader = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return os.pread(reader, end - begin, begin)
        except OSError:
            return None
        finally:
            os.close(reader)

    def _size(self) -> int | None:
        try:
            found = os.fstat(self._fd)
        except OSError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None


# The command of one attempt: what is to be run, and how it is being ended.


class Ending(NamedTuple):
    """How the command is being ended. Times are monotonic."""

    kill_at: float  # SIGKILL for what is then left
    cause: Cause | None = None  # where we end it for what we saw
    by: int = 0  # the signal that told us to stop
    died_at: float | None = None  # when we first saw that it is over


class Touched(NamedTuple):
    """From ``at`` (monotonic) on a death may be our own doing; the command's output until then."""

    at: float
    output: str


@dataclass(frozen=True)
class CommandSpec:
    """What is to be run, and with what."""

    options: Options
    mine: Claim
    command: tuple[str, ...]
    end: float | None  # of the job, epoch seconds
    ears: SignalQueue
    warm: Warm
    agents: Agents | None = None
    # SIGKILL for what no signal of ours reaches: the ranks on other nodes
    kill_ranks: Callable[[], bool] = lambda: True

    @property
    def restarts(self) -> bool:
        return self.options.budgets.in_place > 0 and may_end_with_a_rank(self.command)

    @property
    def ends_with_a_rank(self) -> bool:
        return ends_with_a_rank(self.command)
