"""Evidence of a rank as text, gathered while it runs: its process seen from outside, and its own stacks.

    DIR/rank-N.txt       a page for each rank; the first line is also for machines (``EvidenceHeader``)

It is taken on the rank's own node, which writes the pages, all ranks of the node at once. Bounded: a read that hangs (of a
process in state D, of a rank that writes no stacks) loses only the evidence after it, and a page that cannot be written in time
(the ranks may hang because its disk does) goes to the supervisor, as far as it fits into an answer.

Standard library only: it runs on every node.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host import bounded, processes
from ftsupervise.host.begin import on_path
from ftsupervise.host.in_time import PendingCall, all_at_once, in_time
from ftsupervise.host.ownership import make_folder
from ftsupervise.rundir import heartbeat_page
from ftsupervise.rundir.paths import write_whole
from ftsupervise.truth import HeartbeatSample

WITHIN = 3.0  # seconds for everything that is read of a rank
_WRITE = 0.8  # seconds for its page
BOUND = WITHIN + _WRITE + 1.5  # seconds for the evidence of all ranks, with the start of the processes that take it
_ANSWER = 1.0  # seconds for a rank to write its stacks
_SETTLED, _AT_WORK = 0.05, 0.2  # seconds without more output that end it, while the rank has a core or waits for one
_THREADS = 200  # shown of one process
_TEXT = 60_000  # bytes shown of one rank's stacks
_PAGE = 300_000  # characters of a page
_ALL = 240_000  # characters of one node's answer
BETWEEN = "\f"  # separates the texts of two processes
# Frames of a rank that waits for other ranks.
_WAITS = re.compile(
    r"distributed[/_\w]*c10d|/torch/distributed/|/torchft/|mpi4py|horovod"
    r"|\bin (?:all_?reduce|all_?gather\w*|reduce_scatter\w*|broadcast\w*|barrier|allreduce|wait_for_others)$"
)
FRAME = re.compile(r'^  File "([^"]*)", line (\d+) in (\S+)', re.M)


class EvidenceHeader(NamedTuple):
    """The first line of a rank's evidence: how it differs from the others."""

    rank: int  # -1 while only its process is known
    pid: int
    state: str
    syscall: str  # number of the system call, "running", or "" when it may not be read
    wchan: str
    waits: bool  # its stack shows that it waits for other ranks
    at: str  # "train.py:30 main": the innermost frame of the main thread, "" if unknown

    def line(self) -> str:
        return (
            f"pid {self.pid} state {self.state or '?'} syscall {self.syscall or '?'} "
            f"wchan {self.wchan or '?'} waits {'yes' if self.waits else 'no'} at {self.at or '?'}"
        )


_LINE = re.compile(r"pid (\d+) state (\S+) syscall (\S+) wchan (\S+) waits (yes|no) at (.*)")


def parse_header(line: str) -> EvidenceHeader | None:
    """Parse what ``EvidenceHeader.line`` wrote; None for anything else."""
    found = _LINE.match(line)
    if found is None:
        return None
    state, syscall, wchan, at = ("" if word == "?" else word for word in found.group(2, 3, 4, 6))
    return EvidenceHeader(-1, int(found[1]), state, syscall, wchan, found[5] == "yes", at)


def evidence(pid: int, within: float = WITHIN) -> str:
    """Return the evidence of process ``pid`` that can be gathered within ``within`` seconds."""
    until = time.monotonic() + within
    sections: list[str] = []
    stack: list[str] = [""]
    gathered = PendingCall(partial(_gather, pid, until, sections, stack)).is_over(within)
    missing = "" if gathered else "\n== the rest could not be read: a question was not answered in time\n"
    return "\n".join((header_of(pid, stack[0]).line(), *sections)) + missing


class RankProcess(NamedTuple):
    """A rank, and its process on this node."""

    rank: int
    pid: int


def question(ranks: Iterable[RankProcess], into: Path) -> str:
    """Return the question for the evidence of ``ranks``, whose pages go to ``into``."""
    return f"evidence {','.join(f'{one.rank}:{one.pid}' for one in ranks)} {into}"


_QUESTION = re.compile(r"((?:\d{1,9}:\d{1,9},)*\d{1,9}:\d{1,9}) (/.+)", re.S)


def asked_for(text: str) -> tuple[list[RankProcess], Path] | None:
    """Parse what follows the verb of ``question``; None for anything else."""
    found = _QUESTION.fullmatch(text)
    if found is None:
        return None
    pairs = [pair.split(":") for pair in found[1].split(",")]
    return [RankProcess(int(rank), int(pid)) for rank, pid in pairs], Path(found[2])


def take(ranks: Sequence[RankProcess], into: Path) -> str:
    """Write the pages of ``ranks``, all at once; return their first lines in this order, and the whole of a page that could not
    be written."""
    most = _ALL // max(1, len(ranks))
    texts = all_at_once(partial(_take, into=into), ranks, WITHIN + _WRITE + 0.2)
    return BETWEEN.join((text or "").replace(BETWEEN, " ")[:most] for text in texts)


def _take(one: RankProcess, into: Path) -> str:
    text = evidence(one.pid)[:_PAGE]
    try:
        written = in_time(partial(_write, into / f"rank-{one.rank}.txt", text), _WRITE)
    except OSError:  # the disk is full
        written = None
    return text.partition("\n")[0] if written else text


def _write(page: Path, text: str) -> bool:
    """Write a page. Not synced: a crash of the node loses the ranks as well. Raises OSError."""
    make_folder(page.parent)
    write_whole(page, text, sync=False)
    return True


def _gather(pid: int, until: float, sections: list[str], stack: list[str]) -> None:
    """Gather the evidence, the reads that cannot hang first."""

    def add(title: str, text: str) -> None:
        sections.append(f"\n== {title}\n{text.rstrip()}")

    add("process", _shown(f"/proc/{pid}/status"))
    directory = _directory_of(pid)
    page = next((one for one in _pages(directory) if one.pid == pid), None)
    if page is None:
        add("page", "not found: the rank's own report of its step and phase is unknown")
    else:
        add("page", _of_page(page))
        asked = _Stacks(heartbeat_page.stack_path(directory, page.rank), pid)
        stack[0] = asked.wait(min(until, time.monotonic() + _ANSWER))
        add("Python stacks (the main thread is the last one)", stack[0] or f"none: {asked.problem}")
    add("threads: name, state, where in the kernel", _threads(pid))
    add("open files", _files(pid))
    add("kernel stack", _shown(f"/proc/{pid}/stack"))
    if spy := on_path("py-spy"):
        add("py-spy", _spy(spy, pid, until))


def _pages(directory: str) -> tuple[HeartbeatSample, ...]:
    try:
        return heartbeat_page.read_pages(directory) if directory else ()
    except OSError:
        return ()


def _directory_of(pid: int) -> str:
    """Return the directory of the process's page, from its environment."""
    words = _text(f"/proc/{pid}/environ", 1_000_000).split("\0")
    return next((word.partition("=")[2] for word in words if word.startswith(f"{heartbeat_page.ENV_PAGES}=")), "")


def _of_page(page: HeartbeatSample) -> str:
    now = time.monotonic()
    last = f"last step {now - page.stepped:.1f} s ago, last sign of life {now - page.beaten:.1f} s ago"
    return f"rank {page.rank}, step {page.step}, phase {page.phase}, {last}{', leaving' if page.leaving else ''}"


def header_of(pid: int, stack: str) -> EvidenceHeader:
    """Return the line that shows how this rank differs from the others."""
    found = processes.process(pid)
    frames = FRAME.findall(main_thread(stack))
    at = f"{os.path.basename(frames[0][0])}:{frames[0][1]} {frames[0][2]}" if frames else ""
    waits = any(_WAITS.search(line) for line in main_thread(stack).splitlines())
    number, *_ = _text(f"/proc/{pid}/syscall").split() or [""]
    wchan = _text(f"/proc/{pid}/wchan")
    return EvidenceHeader(-1, pid, found.state if found else "X", number, "" if wchan == "0" else wchan, waits, at)


class _Stacks:
    """A request to a rank for its stacks."""

    def __init__(self, path: Path, pid: int) -> None:
        self._path, self._pid = path, pid
        self._before = self._size()
        self.problem = "" if self._ask(pid) else "the rank has no handler for the question"
        if not self.problem and (found := processes.process(pid)) is not None and found.state in "Tt":
            self.problem = "the process is stopped; it answers when it continues"
            self._before = -1  # not waited for

    def wait(self, until: float) -> str:
        """Return the rank's answer, "" when there was none in time."""
        if self.problem:
            return ""
        seen, since = self._before, time.monotonic()
        while (now := time.monotonic()) < until:
            size = self._size()
            if size != seen:
                seen, since = size, now
            elif size > self._before and now - since >= (_AT_WORK if self._runs() else _SETTLED):
                break
            time.sleep(0.01)
        if seen <= self._before:
            self.problem = "the process did not answer"
            return ""
        with self._path.open("rb") as file:
            file.seek(max(0, self._before))
            return file.read(_TEXT).decode("utf-8", "replace")

    def _runs(self) -> bool:
        found = processes.process(self._pid)
        return found is not None and found.state == "R"

    def _ask(self, pid: int) -> bool:
        bit = 1 << (heartbeat_page.STACK_SIGNAL - 1)
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", _text(f"/proc/{pid}/status"), re.M)
        if self._before < 0 or caught is None or not int(caught[1], 16) & bit:
            return False
        try:
            os.kill(pid, heartbeat_page.STACK_SIGNAL)
        except OSError:
            return False
        return True

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return -1


def main_thread(stack: str) -> str:
    """Return the stack of the main thread, which faulthandler shows last, as the first one made."""
    return re.split(r"^(?:Current thread|Thread) .*$", stack, flags=re.M)[-1]


def _threads(pid: int) -> str:
    lines = []
    try:
        names = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError as error:
        return f"cannot read: {error.strerror}"
    for name in names[:_THREADS]:
        found = processes.stat_fields(f"/proc/{pid}/task/{name}/stat")
        if found is not None:
            where = _text(f"/proc/{pid}/task/{name}/wchan").strip() or "?"
            lines.append(f"{name} {found[0]} {found[1][0]} {where}")
    if len(names) > _THREADS:
        lines.append(f"… and {len(names) - _THREADS} more")
    return "\n".join(lines)


def _files(pid: int) -> str:
    """Count the open files of each kind and list the paths of the plain ones. Names only: no file is touched."""
    kinds: dict[str, int] = {}
    paths = []
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115 - a name, not a path
            kind = target.partition(":")[0] if ":" in target[:12] else "file"
            kinds[kind] = kinds.get(kind, 0) + 1
            if kind == "file":
                paths.append(target)
    except OSError as error:
        return f"cannot read: {error.strerror}"
    return (
        ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        + "\n"
        + "\n".join(sorted(set(paths))[:50])
    )


def _spy(program: str, pid: int, until: float) -> str:
    """Run py-spy without stopping the process, which works for a stopped process too."""
    patience = max(0.2, until - time.monotonic() - 0.2)
    try:
        done = bounded.run([program, "dump", "--nonblocking", "-p", str(pid)], timeout=patience, output_limit=_TEXT)
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    return f"no answer within {patience:.1f} s" if done.timed_out else (done.stdout + done.stderr)[:_TEXT]


def _read(path: str, limit: int = _TEXT) -> str:
    """Read a file. Raises OSError."""
    with open(path, "rb") as file:  # noqa: PTH123
        return file.read(limit).decode("utf-8", "replace")


def _shown(path: str) -> str:
    """Return the text of a file, or why it cannot be read."""
    try:
        return _read(path)
    except OSError as error:
        return f"cannot read: {error.strerror}"


def _text(path: str, limit: int = _TEXT) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return _read(path, limit)
    except OSError:
        return ""
