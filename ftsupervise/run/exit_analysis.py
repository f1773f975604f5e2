"""Who died first? srun's own exit code often names a victim: when one rank is killed it ends the others with SIGTERM and
leaves with 143. Its messages in the job's output say more, in the order in which things happened. Pure, but for reading.

The lines are Slurm's own, as seen on 22.05 to 26.05.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from collections.abc import Collection
from pathlib import Path

from ftsupervise.printable import printable, printable_lines
from ftsupervise.ranks.rank_table import Death
from ftsupervise.run.cause import NO_STEP
from ftsupervise.rundir.records import as_count, read_json
from ftsupervise.units import signal_name

_TASK = re.compile(
    r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>[\d,\[\]-]+): (?P<how>Killed|Terminated|Aborted|Segmentation fault"
    r"|Bus error|Floating point exception|Illegal instruction|Out Of Memory|Exited with exit code (?P<code>\d+))",
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
    r".{0,400}?\bexitcode\s*: (?P<code>-?\d+)",
    re.S,
)
_SIGNALS = {
    "Killed": "killed by SIGKILL",
    "Terminated": "ended by SIGTERM",
    "Aborted": "killed by SIGABRT",
    "Segmentation fault": "killed by SIGSEGV",
    "Bus error": "killed by SIGBUS",
    "Floating point exception": "killed by SIGFPE",
    "Illegal instruction": "killed by SIGILL",
    "Out Of Memory": "out of memory",
}
_EXIT = re.compile(r" exit \d+$")
_CRASHES = ("Segmentation fault", "Bus error", "Floating point exception", "Illegal instruction")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,2000}(?:\x07|\x1b\\)|[@-Z\\^_])")
_OURS = re.compile(r"^ftsupervise: .*\n?", re.M)
_READ = 256_000  # bytes looked at: the messages stand near the end


def first_death(output: str) -> str:
    """The cause that Slurm's lines in ``output`` tell, "" if none does: "rank 1 on node-1 killed by SIGKILL"."""
    for due in _DUE_TO.finditer(output):
        if not due[1].startswith(_NO_CAUSE):
            return due[1].lower()
    if node := _NODE.search(output):
        return f"node failure on {node['node']}"
    if node := _LAUNCH.search(output):
        return f"launch failed on {node['node']}"
    if refused := _REFUSED.search(output):
        return f"{NO_STEP} ({refused['why'].strip()})"
    if _OOM.search(output):
        return "out of memory (the kernel or Slurm killed a process)"
    if workers := list(_TORCHRUN.finditer(output)):  # one of each node's agent: the earliest that was not told to leave
        worker = min(workers, key=lambda one: (int(one["code"]) == -signal.SIGTERM, one["time"]))
        code = int(worker["code"])
        how = f"killed by {signal_name(-code)}" if code < 0 else f"exit {code}"
        return f"rank {worker['rank']} on {worker['host']} {how}"
    deaths = [_words(match) for match in _TASK.finditer(output)]
    # the first that was not just ended along with the others
    first = next((words for words, victim in deaths if not victim), deaths[0][0] if deaths else "")
    return (_crash(output) or first) if _EXIT.search(first) else first


def words_of(death: Death, output: str, failed: Collection[int] = (), *, before: str = "") -> str:
    """The end of one rank in srun's words if it has any, which know of the kernel's out of memory; else in its node's. What
    the rank itself has said goes first: we did not wait for its process, srun may have seen it killed. ``failed``: the ranks
    that have said so of themselves; one that has not and was the first to leave, as by ``os._exit(7)``, is what they fell over.
    ``before``: the output as it was before we ended anybody; one that was killed first there was killed by somebody else.
    """
    if death.failed and death.code is not None and death.code > 0:
        told = {*failed, death.rank}
        killed = _killed_first(before, told)
        return _crash(output, told) or killed or _left_first(output, told) or death.words()
    said = [_words(match)[0] for match in _TASK.finditer(output) if match["node"] == death.node]
    return next((words for words in said if words.startswith(f"rank {death.rank} ")), death.words())


def _crash(output: str, failed: Collection[int] = ()) -> str:
    """A rank that no signal of anybody's has ended: those that lose their connection to it leave with a code of their own, and
    may be told of before it. "" if there is none. (An abort is no such sign: NCCL's watchdog aborts the victims. Nor is the
    crash of one of ``failed``: it had raised, and fell over in its teardown.)"""
    found = (match for match in _TASK.finditer(output) if match["how"] in _CRASHES and not _one_of(match, failed))
    return next((_words(match)[0] for match in found), "")


def _killed_first(output: str, failed: Collection[int]) -> str:
    """The rank that was gone first, by SIGKILL, and not by srun, which kills only after it has told of another one."""
    first = _TASK.search(output)
    alone = first is not None and first["how"] == "Killed" and first["tasks"].isdigit()
    return _words(first)[0] if first is not None and alone and not _one_of(first, failed) else ""


def _left_first(output: str, failed: Collection[int]) -> str:
    """The first rank that left by itself, with a code; "" if it is one of ``failed``."""
    first = next((match for match in _TASK.finditer(output) if match["how"] not in ("Killed", "Terminated")), None)
    if first is None or not first["code"] or not first["tasks"].isdigit() or _one_of(first, failed):
        return ""
    return _words(first)[0]


def _one_of(match: re.Match[str], ranks: Collection[int]) -> bool:
    tasks = match["tasks"].strip("[]")
    return as_count(tasks) in ranks


def _words(match: re.Match[str]) -> tuple[str, bool]:
    how = match["how"]
    what = f"exit {match['code']}" if match["code"] else _SIGNALS[how]
    tasks = match["tasks"].strip("[]")
    ranks = f"rank {tasks}" if tasks.isdigit() else f"ranks {tasks}"
    return f"{ranks} on {match['node']} {what}", how == "Terminated"


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


def stopped(path: Path) -> str:
    """Why the guard has let the command stop, as it has written it down; "" if it has not. Never raises."""
    try:
        record = read_json(path, limit=64_000)
    except (OSError, ValueError):
        return ""
    return printable(str(record.get("cause", "")), 200) if record else ""


def ends_with_a_rank(command: tuple[str, ...]) -> bool:
    """Is it an srun that is meant to end as soon as one of its ranks has failed?"""
    if not command or os.path.basename(command[0]) != "srun":
        return False
    return may_end_with_a_rank(command)


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

    def next_death(self) -> str:
        """The first death that srun has told of since the last call; "" if none. Costs one fstat when nothing was written."""
        size = self._size()
        if size is None or self._read is None or size <= self._read:
            return ""
        data = self._rest + (self._bytes(max(self._read, size - _READ), size) or b"")
        self._read = size
        whole, _, self._rest = data.rpartition(b"\n")
        if b"srun: error: " not in whole:
            return ""
        death = first_death(plain(whole))
        return "" if death.endswith("ended by SIGTERM") else death  # told to leave: it may be about to save

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
