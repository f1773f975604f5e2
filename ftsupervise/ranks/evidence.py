"""Evidence of a rank as text, gathered while it runs: its process seen from outside, and its own stacks.

    DIR/rank-N.txt       a page for each rank; the first line is also for machines (``EvidenceHeader``)
    DIR/flight/rank_N    the dump of its flight recorder, where its worker server gives one
    DIR/node-NAME.txt    the node: load, memory, GPUs, and what its kernel says of faults

It is taken on the rank's own node, which writes the pages, all ranks of the node at once. Bounded: a read that hangs (of a
process in state D, of a rank that writes no stacks) loses only the evidence after it, and a page that cannot be written in time
(the ranks may hang because its disk does) goes to the supervisor, as far as it fits into an answer.

Standard library only: it runs on every node.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from ftsupervise.host import bounded, files, processes
from ftsupervise.host.begin import on_path
from ftsupervise.host.in_time import PendingCall, all_at_once, in_time
from ftsupervise.host.ownership import make_folder
from ftsupervise.rundir import heartbeat_page
from ftsupervise.rundir.heartbeat_page import ENV_SERVERS, server_note
from ftsupervise.rundir.paths import write_whole
from ftsupervise.rundir.records import as_count
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
_NODE = 0.3  # seconds more for the page of the node
_SMI = 2.0  # seconds for nvidia-smi, which hangs with its driver
_GPU = (
    "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw,"
    "ecc.errors.uncorrected.volatile.total,pstate"
)
_LINES, _RECORDS = 200, 200_000  # of the kernel's log: shown, looked at
_SERVER = 0.7  # seconds for one answer of a worker server
_CGROUP_V2 = ("memory.current", "memory.max", "memory.events", "memory.pressure")
_CGROUP_V1 = ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.failcnt")
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


def evidence(
    pid: int,
    within: float = WITHIN,
    rank: int | None = None,
    flight: Path | None = None,
    *,
    goes_on: bool = False,
) -> str:
    """Return the evidence of process ``pid`` that can be gathered within ``within`` seconds. ``flight``: the folder for the
    dump of its flight recorder, as that of ``rank``. ``goes_on``: as in ``question``."""
    until = monotonic() + within
    sections: list[str] = []
    stack: list[str] = [""]
    of = RankProcess(-1 if rank is None else rank, pid)
    gathered = PendingCall(partial(_gather, of, until, sections, stack, flight, goes_on)).is_over(within)
    missing = "" if gathered else "\n== the rest could not be read: a question was not answered in time\n"
    return "\n".join((header_of(pid, stack[0]).line(), *sections)) + missing


class RankProcess(NamedTuple):
    """A rank, and its process on this node."""

    rank: int
    pid: int


def question(ranks: Iterable[RankProcess], into: Path, *, goes_on: bool = False) -> str:
    """Return the question for the evidence of ``ranks``, whose pages go to ``into``. ``goes_on``: the run may be healthy, and
    nothing is asked of it that it could mind."""
    verb = "look" if goes_on else "evidence"
    return f"{verb} {','.join(f'{one.rank}:{one.pid}' for one in ranks)} {into}"


_QUESTION = re.compile(r"((?:\d{1,9}:\d{1,9},)*\d{1,9}:\d{1,9}) (/.+)", re.S)


def asked_for(text: str) -> tuple[list[RankProcess], Path] | None:
    """Parse what follows the verb of ``question``; None for anything else."""
    found = _QUESTION.fullmatch(text)
    if found is None:
        return None
    pairs = [pair.split(":") for pair in found[1].split(",")]
    return [RankProcess(int(rank), int(pid)) for rank, pid in pairs], Path(found[2])


def take(ranks: Sequence[RankProcess], into: Path, node: str, *, goes_on: bool = False) -> str:
    """Write the pages of ``ranks``, all at once, and that of their ``node``; return the first lines of those of the ranks, in
    this order, and the whole of a page that could not be written."""
    most = _ALL // max(1, len(ranks))
    beside = PendingCall(partial(take_node, into, node))
    texts = all_at_once(partial(_take, into=into, goes_on=goes_on), ranks, WITHIN + _WRITE + 0.2)
    beside.is_over(_NODE)
    return BETWEEN.join((text or "").replace(BETWEEN, " ")[:most] for text in texts)


def take_node(into: Path, node: str) -> None:
    """Write the page of this node."""
    name = re.sub(r"[^\w.-]", "_", node or os.uname().nodename)
    try:
        _write(into / f"node-{name}.txt", _of_node()[:_PAGE])
    except OSError:  # the disk is full
        return


def _of_node() -> str:
    """Return how the node is. What may take long comes last."""
    memory = "\n".join(
        re.findall(r"^(?:MemTotal|MemAvailable|SwapTotal|SwapFree|Dirty|Writeback):.*$", _text("/proc/meminfo"), re.M)
    )
    pressure = "\n".join(
        f"{name}: {text}" for name in ("cpu", "memory", "io") if (text := _text(f"/proc/pressure/{name}").strip())
    )
    sections = {
        "load": _shown("/proc/loadavg"),
        "memory": memory,
        "pressure": pressure or "cannot read",
        "the kernel on faults": _kernel(),
        "GPUs": _gpus(),
    }
    return "\n".join(f"== {title}\n{text.rstrip()}\n" for title, text in sections.items())


# The kernel's words for hardware, memory and storage that fail
_FAULTS = re.compile(
    r"NVRM|\bXid\b|hardware error|\bmce\b|EDAC|uncorrect|out of mem|oom[-_]kill|killed process|blocked for more than|"
    r"I/O error|nfs: server|lustre|gpfs|not responding|remount|link (?:is )?down|segfault|general protection",
    re.I,
)


def _kernel() -> str:
    """Return the newest lines of the kernel's log about faults, each with its seconds since boot."""
    found: deque[str] = deque(maxlen=_LINES)
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return f"cannot read: {error.strerror}"
    try:
        for _ in range(_RECORDS):
            try:
                head, _, text = os.read(fd, 8192).decode("utf-8", "replace").partition(";")
            except BrokenPipeError:  # overwritten meanwhile
                continue
            words = head.split(",")
            if _FAULTS.search(text) and len(words) > 2:
                found.append(f"[{(as_count(words[2]) or 0) / 1e6:.3f}] {text.partition(chr(10))[0]}")
    except BlockingIOError:  # that was all
        pass
    except OSError as error:
        return f"cannot read: {error.strerror}"
    finally:
        os.close(fd)
    return "\n".join(found) or "nothing"


def _gpus() -> str:
    program = on_path("nvidia-smi")
    if not program:
        return "no nvidia-smi"
    try:
        done = bounded.run([program, f"--query-gpu={_GPU}", "--format=csv"], timeout=_SMI, output_limit=_TEXT)
    except OSError as error:
        return f"nvidia-smi cannot be started: {error.strerror}"
    return f"nvidia-smi did not answer within {_SMI:g} s" if done.timed_out else done.stdout + done.stderr


def _take(one: RankProcess, into: Path, goes_on: bool) -> str:
    text = evidence(one.pid, rank=one.rank, flight=into / "flight", goes_on=goes_on)[:_PAGE]
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


def _gather(
    of: RankProcess, until: float, sections: list[str], stack: list[str], flight: Path | None, goes_on: bool
) -> None:
    """Gather the evidence, the reads that cannot hang first."""
    pid = of.pid

    def add(title: str, text: str) -> None:
        sections.append(f"\n== {title}\n{text.rstrip()}")

    add("process", _shown(f"/proc/{pid}/status"))
    environment = processes.environment(pid)
    directory = environment.get(heartbeat_page.ENV_PAGES, "")
    page = next((one for one in _pages(directory) if one.pid == pid), None)
    if page is None:
        add("page", "not found: the rank's own report of its step and phase is unknown")
    else:
        add("page", _of_page(page))
        asked = _Stacks(heartbeat_page.stack_path(directory, page.rank), pid)
        stack[0] = asked.wait(min(until, monotonic() + _ANSWER))
        add("Python stacks (the main thread is the last one)", stack[0] or f"none: {asked.problem}")
    add("memory", _memory(pid))
    add("threads: name, state, where in the kernel", _threads(pid))
    add("open files", _files(pid))
    add("kernel stack", _shown(f"/proc/{pid}/stack"))
    rank = page.rank if page is not None else of.rank
    if (server := server_of(pid, rank, directory, environment)) is not None:
        asked_server = _ServerSeen(server, until)
        add("worker server", asked_server.words(flight / f"rank_{rank}" if flight is not None and rank >= 0 else None))
        if not stack[0] and (said := asked_server.stacks()):
            stack[0] = said
            add("Python stacks (by the worker server; the main thread is the last one)", said)
    elif flight is not None and not goes_on and (stem := environment.get(_PIPE, "")):
        add("flight recorder", _dumped_by_pipe(RankProcess(rank, pid), stem, environment, flight, until))
    if spy := on_path("py-spy"):
        add("py-spy", _spy(spy, pid, until))


def _pages(directory: str) -> tuple[HeartbeatSample, ...]:
    try:
        return heartbeat_page.read_pages(directory) if directory else ()
    except OSError:
        return ()


def _of_page(page: HeartbeatSample) -> str:
    now = monotonic()
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
        seen, since = self._before, monotonic()
        while (now := monotonic()) < until:
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


class _ServerSeen:
    """The answers of PyTorch's worker server of a rank, each with a bound of its own."""

    def __init__(self, server: WorkerServer, until: float) -> None:
        self._server, self._until = server, until
        self._answers = False

    def words(self, dump: Path | None) -> str:
        """Return whether it answers and what it counts. Its flight recorder's dump goes to ``dump``."""
        where = self._server.path or f"127.0.0.1:{self._server.port}"
        state = processes.process(self._server.pid)
        if state is None or state.state in "Tt":
            return f"{where}: not asked, the process is stopped"
        try:
            self._answers = self._ask("ping").strip() == b"pong"
            if not self._answers:
                return f"{where}: it is no worker server"
            lines = [f"{where}: it answers, so the process is not stopped; of the training that says nothing"]
            lines.append(f"wait counters: {self._counters()}")
        except NotAsked as refused:
            return f"{where}: not asked, {refused}"
        except (OSError, LookupError) as error:
            return f"{where}: {error}"
        if dump is not None:
            lines.append(self._dumped(dump))
        return "\n".join(lines)

    def stacks(self) -> str:
        """Return the Python stacks, for a rank without the guard; "" where it gives none: the interpreter may be held."""
        if not self._answers:
            return ""
        try:
            return self._ask("dump_traceback").decode("utf-8", "replace")
        except (OSError, LookupError, NotAsked):
            return ""

    def _ask(self, handler: str) -> bytes:
        return self._server.ask(handler, self._patience())

    def _counters(self) -> str:
        try:
            return self._ask("wait_counter_values").decode("utf-8", "replace")
        except LookupError:
            return "none"

    def _dumped(self, path: Path) -> str:
        try:
            raw = self._server.dump(self._patience())
            make_folder(path.parent, parents=True)
            write_whole(path, raw, sync=False)
        except (OSError, LookupError, NotAsked) as error:
            return f"flight recorder: {error}"
        return f"flight recorder: {len(raw)} bytes in flight/{path.name}"

    def _patience(self) -> float:
        return max(0.1, min(_SERVER, self._until - monotonic()))


def _memory(pid: int) -> str:
    """Return the memory of the process, and that of its cgroup where it may be read."""
    status = _text(f"/proc/{pid}/status")
    lines = re.findall(r"^(?:VmRSS|VmHWM|RssAnon|RssShmem|VmSwap):.*$", status, re.M)
    for line in _text(f"/proc/{pid}/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        v2 = number == "0" and not controllers
        if not v2 and "memory" not in controllers.split(","):
            continue
        folder = f"/sys/fs/cgroup{'' if v2 else '/memory'}{path.rstrip('/')}"
        names = _CGROUP_V2 if v2 else _CGROUP_V1
        lines += [
            f"{folder}/{name}: {' '.join(text.split())}" for name in names if (text := _text(f"{folder}/{name}", 2000))
        ]
    return "\n".join(lines) or "cannot read"


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
    patience = max(0.2, until - monotonic() - 0.2)
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


# ------------------------------------------------------------------------------------------

# NCCL's flight recorder writes its dump when something is written into a pipe, which the program has asked for by a variable of
# its environment; the names of pipe and dump end in the rank. A thread of the rank that looks each second does it, and may need
# the interpreter for it: no run that may be healthy is asked.
# Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp (DumpPipe), FlightRecorder.cpp (getWriter) of PyTorch 2.13.

_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DUMPED = 2.0  # seconds
_WRITTEN = 0.15  # seconds without more of it


def _dumped_by_pipe(of: RankProcess, stem: str, environment: Mapping[str, str], into: Path, until: float) -> str:
    """Have a rank write the dump of its flight recorder, and keep it in ``into``; return in words what became of that."""
    pipe = f"{stem}{of.rank}.pipe"
    try:
        folder = os.readlink(f"/proc/{of.pid}/cwd")  # noqa: PTH115 - a name, not a path
        usual = f"{environment.get('HOME', '/tmp')}/.cache/torch/comm_lib_trace_rank_"
        prefix = next((environment[name] for name in _DUMPS if environment.get(name)), usual)
        dump = Path(folder, f"{prefix}{of.rank}")
        before = _state_of(dump)
        _write_into(Path(folder, pipe))
        if not _is_written(dump, before, min(until, monotonic() + _DUMPED)):
            return f"{dump}: not written in time"
        raw = files.read_bounded(dump, _DUMP)
        make_folder(into, parents=True)
        write_whole(into / f"rank_{of.rank}", raw, sync=False)
    except OSError as error:
        return f"{error.filename or pipe}: {error.strerror or error}"
    return f"{len(raw)} bytes in flight/rank_{of.rank}"


def _write_into(pipe: Path) -> None:
    """Write into a pipe of this account's that somebody reads. Raises OSError."""
    fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISFIFO(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "it is no pipe of this account's", str(pipe))
        os.write(fd, b"1\n")
    finally:
        os.close(fd)


def _state_of(path: Path) -> tuple[int, int] | None:
    """Return time and size of a file of this account's; None where there is none."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return (found.st_mtime_ns, found.st_size) if found.st_uid == os.geteuid() else None


def _is_written(path: Path, before: tuple[int, int] | None, until: float) -> bool:
    """Wait for a file that is another than ``before``, and does not change any more."""
    seen, since = before, monotonic()
    while (now := monotonic()) < until:
        found = _state_of(path)
        if found != seen:
            seen, since = found, now
        elif seen not in (None, before) and now - since >= _WRITTEN:
            return True
        time.sleep(0.02)
    return False


# ------------------------------------------------------------------------------------------

# PyTorch's worker server of a rank: a thread in C++ that answers HTTP while the main thread hangs, and while the interpreter is
# held. It gives the flight recorder's dump. The training has started it, nothing here does.
#
# Its address is in ``ENV_SERVERS``, in the environment in which the rank began, or in the note that its guard left beside its
# page. What listens there must be this very process, of this account (SO_PEERCRED, or the kernel's table of TCP sockets). An
# answer is read up to a size and a time, and nothing here knows what it means: a dump is written as it came.
# Source: torch/csrc/distributed/c10d/control_plane/ of PyTorch 2.13; POST /handler/NAME.

_DUMP = 16 << 20  # bytes of a dump
_LONGEST_PATH = 107  # bytes of the path of a socket
_PIECE = 1 << 16
_PEER = struct.Struct("3i")  # pid, uid, gid
_HERE = ("127.0.0.1", "localhost", "::1")


class NotAsked(Exception):
    """It is not asked, and why."""


class WorkerServer(NamedTuple):
    """The server of the process ``pid``. ``path``: of its socket; or ``port``, on this host."""

    pid: int
    path: str = ""
    port: int = 0

    def ask(self, handler: str, within: float, limit: int = _TEXT) -> bytes:
        """Return the answer of a handler ("ping"). Raises NotAsked where another process listens, LookupError where the server
        has no such handler, OSError where it does not answer in time or with more than ``limit`` bytes."""
        until = monotonic() + within
        with self._connected(within) as sock:
            sock.sendall(b"POST /handler/%s HTTP/1.0\r\nHost: rank\r\nContent-Length: 0\r\n\r\n" % handler.encode())
            return _answer(sock, until, limit)

    def dump(self, within: float) -> bytes:
        """Return the flight recorder's dump, with stacks where it is NCCL's. Raises as ``ask`` does."""
        until = monotonic() + within
        try:
            return self.ask("dump_nccl_trace_pickle", within, _DUMP)
        except LookupError:  # a build without NCCL
            return self.ask("fr_trace_json", max(0.1, until - monotonic()), _DUMP)

    def _connected(self, within: float) -> socket.socket:
        host = "" if self.path else _listens_at(self.pid, self.port)
        family = socket.AF_UNIX if self.path else socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(within)
            sock.connect(self.path or (host, self.port))
            if self.path:
                _require_peer(sock, self.pid)
            elif _listens_at(self.pid, self.port) != host:  # it had ended, and somebody else was faster
                raise NotAsked(f"it listens no more at port {self.port}")
        except BaseException:
            sock.close()
            raise
        return sock


def server_of(pid: int, rank: int, directory: str, environment: Mapping[str, str]) -> WorkerServer | None:
    """Return the server that the rank names, in the folder ``directory`` of its page or the ``environment`` in which it began;
    None where it names none, or what is no address."""
    named = next((environment[name] for name in ENV_SERVERS if environment.get(name)), "")
    if directory:
        try:
            named = files.read_bounded(server_note(directory, rank), 1000).decode("utf-8", "replace").strip() or named
        except OSError:
            pass
    host, _, port = named.rpartition(":")
    if host in _HERE and (number := as_count(port)) is not None and 0 < number < 65536:
        return WorkerServer(pid, port=number)
    if not named or "\0" in named:
        return None
    try:
        path = os.path.join(os.readlink(f"/proc/{pid}/cwd"), named)  # noqa: PTH115, PTH118 - a name, not a path
    except OSError:
        return None
    return WorkerServer(pid, path) if len(os.fsencode(path)) <= _LONGEST_PATH else None


def _require_peer(sock: socket.socket, pid: int) -> None:
    """Raise NotAsked unless ``pid`` of this account listens at the other end."""
    peer, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.geteuid():
        raise NotAsked(f"uid {uid} listens at its socket")
    if peer != pid:
        raise NotAsked(f"process {peer} listens at its socket")


# An address of this host as the kernel's tables of listeners have it, and the one by which such a listener is reached here, and
# no other: at another address somebody else may listen at the same port.
_REACHED_AT = {
    "0100007F": "127.0.0.1",
    "00000000": "127.0.0.1",
    "0000000000000000FFFF00000100007F": "127.0.0.1",
    "00000000000000000000000001000000": "::1",
    "00000000000000000000000000000000": "::1",
}


def _listens_at(pid: int, port: int) -> str:
    """Return the address of this host at which ``pid`` of this account listens at the TCP port, by the kernel's tables. Raises
    NotAsked where it does not, OSError."""
    inodes = {inode: at for name in ("tcp", "tcp6") for inode, at in _listeners(f"/proc/{pid}/net/{name}", port)}
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115 - a name, not a path
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            return inodes[target[8:-1]]
    raise NotAsked(f"it does not listen at port {port}")


def _listeners(table: str, port: int) -> list[tuple[str, str]]:
    """Return the inodes of this account's sockets that listen at ``port`` of this host, each with where it is reached."""
    try:
        lines = Path(table).read_text("ascii", "replace").splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    mine = str(os.geteuid())
    found = [(row[9], row[1].rpartition(":")) for row in rows if len(row) > 9 and row[3] == "0A" and row[7] == mine]
    return [
        (inode, _REACHED_AT[address])
        for inode, (address, _, at) in found
        if at == f"{port:04X}" and address in _REACHED_AT
    ]


def _answer(sock: socket.socket, until: float, limit: int) -> bytes:
    """Return the body of a whole answer. Raises LookupError for one that says "not found", OSError for none."""
    found = bytearray()
    while True:
        rest = until - monotonic()
        if rest <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(rest)
        piece = sock.recv(_PIECE)
        if not piece:
            break
        found += piece
        if len(found) > limit + _PIECE:
            raise OSError(f"an answer of more than {limit} bytes")
        if _is_whole(found):
            break
    head, _, body = bytes(found).partition(b"\r\n\r\n")
    words = head.split(None, 2)
    if len(words) < 2 or not head.startswith(b"HTTP/1."):
        raise OSError("no answer in HTTP")
    if words[1] == b"404":
        raise LookupError("no such handler")
    if words[1] != b"200":
        raise OSError(f"answered {words[1].decode('ascii', 'replace')[:10]}")
    if len(body) < _length(head):
        raise OSError("an answer that was cut off")
    return body


def _is_whole(found: bytes | bytearray) -> bool:
    head, end, body = bytes(found).partition(b"\r\n\r\n") if len(found) < _PIECE else found.partition(b"\r\n\r\n")
    return bool(end) and (length := _length(bytes(head))) >= 0 and len(body) >= length


def _length(head: bytes) -> int:
    """Return what an answer says of its length; -1 where it says nothing: it ends with the connection."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            number = as_count(value.decode("ascii", "replace").strip())
            return number if number is not None else -1
    return -1
