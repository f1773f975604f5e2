"""The processes of this host: their identity, their tree, and how to end them.

Process numbers are used again; a number and a start time together are an identity. /proc is read directly, because the guard,
the node agents, the supervisor and ``status`` load this when they start: psutil is 30 ms more, as much as all of ``status``.
"""

import os
import select
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

STANDBY = "ftsup-standby"  # the name (comm) of a process that waits to become the next attempt's ranks
_SIGKILL, _SIGTERM = 9, 15  # the module ``signal`` is another millisecond of a start
_DIES = 2.0  # seconds for a child that was killed to be gone
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_MM, PR_SET_CHILD_SUBREAPER = 1, 4, 15, 35, 36  # prctl(2)
_EXITING = 0x4  # PF_EXITING of the kernel
_KILLED = 1 << _SIGKILL - 1  # among the pending signals
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")  # one with a trap hears the signal, and so do those it waits for
# srun passes these on to every rank. Of the others it dies, or it kills its ranks at once, unsaved.
_SRUN, _SRUN_PASSES = "srun", (10, 12)  # USR1, USR2
_LOOKS, _BETWEEN = 10, 0.005  # at a process that has all signals blocked; seconds
_STANDARD = 0x7FFFFFFF & ~(1 << 8 | 1 << 18)  # the mask of the standard signals but SIGKILL and SIGSTOP
# Programs that hear a warning signal only to tear everything down; the ranks below them are told directly.
_LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed", "ft_launcher"),
    "client.py",  # our own passes on what it gets, but its rank is asked itself
)
OUTLIVES = "set -o pipefail\ntrap : "  # begins the code of our own shell around a command (launch/shell_code.py)
# For a shell: the processes with the word "$mark" (NAME=VALUE) in their environment. Zombies have none.
SHELL_MARKED = """grep -lszxF -- "$mark" /proc/[0-9]*/environ 2>/dev/null | tr -c '0-9\\n' ' '"""


# ------------------------------------------------------------------------------------------------------------- identity


class Process(NamedTuple):
    """A process as /proc/PID/stat has it."""

    pid: int
    name: str
    state: str  # one letter: R, S, D (uninterruptible), T (stopped), Z (only its number is left) …
    parent: int
    session: int
    start: int  # clock ticks since boot
    resident: int  # bytes

    @property
    def gone(self) -> bool:
        """Return whether it is a zombie, which holds nothing but its number; in a container it may stand there for long."""
        return self.state in "ZX"


def process(pid: int) -> Optional[Process]:
    """Return the process with this number now; None if there is none. ``stat`` can be read even of one in state D."""
    found = stat_fields(f"/proc/{pid}/stat")
    if found is None:
        return None
    name, fields = found
    return Process(pid, name, fields[0], int(fields[1]), int(fields[3]), int(fields[19]), int(fields[21]) * _PAGE)


class ProcessStat(NamedTuple):
    """The resources that a process has used, and whether it is about to end."""

    state: str
    start: int
    cpu: float  # seconds that it has used
    killed: bool  # SIGKILL is pending: it has not run since
    exiting: bool  # its files are closed before it is gone
    status: int  # as waitpid has it; meaningful for a zombie only

    @property
    def gone(self) -> bool:
        return self.state in "ZX"


def process_stat(pid: int) -> Optional[ProcessStat]:
    """Return the facts of the process with this number now; None if there is none."""
    found = stat_fields(f"/proc/{pid}/stat")
    if found is None:
        return None
    fields = found[1]
    try:
        cpu, killed = (int(fields[11]) + int(fields[12])) * _TICK, bool(int(fields[28]) & _KILLED)
        return ProcessStat(fields[0], int(fields[19]), cpu, killed, is_exiting(fields), int(fields[49]))
    except (IndexError, ValueError):  # a kernel that shows less
        return None


def stat_fields(path: str) -> Optional[tuple[str, list[str]]]:
    """Return the name in /proc/PID/stat or /proc/PID/task/TID/stat, and the fields behind it: the first is the state.
    Source: proc(5). None when the process or thread is gone."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - half the price, and asked of every process there is
            text = file.read().decode("utf-8", "replace")
    except OSError:  # gone, or going while we read
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    return name, rest.split()


def is_exiting(fields: list[str]) -> bool:
    """Return whether the process or thread with these ``stat_fields`` is being taken down."""
    return bool(int(fields[6]) & _EXITING)


def own_bytes(pid: int) -> int:
    """Return resident bytes without the pages of mapped files, which come and go with the page cache; 0 if it is gone."""
    return sum(int(line.split()[1]) << 10 for line in _status(pid) if line.startswith(("RssAnon:", "RssShmem:")))


def identity(pid: int) -> Optional[int]:
    """Return the start time of a living process in clock ticks since boot; None if there is none, or only its corpse."""
    found = process(pid)
    return None if found is None or found.gone else found.start


def lives(pid: int, start: Optional[int]) -> bool:
    """Return whether this same process is still alive."""
    return start is not None and identity(pid) == start


def locked_by_the_killed(fd: int) -> bool:
    """Return whether the open file is locked by a killed process of this host that only a dead mount keeps from ending.

    It runs no more code. False also where that cannot be seen. Source: /proc/locks in proc(5).
    """
    found = os.fstat(fd)
    name = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        with open("/proc/locks", encoding="ascii") as file:  # noqa: PTH123
            holders = [words[4] for line in file if name in (words := line.split()) and "->" not in words]
    except OSError:
        return False
    ends = [process_stat(int(pid)) for pid in holders if pid.isdecimal() and pid != "0"]
    return (
        bool(ends)
        and len(ends) == len(holders)
        and all(one is None or one.gone or one.killed or one.exiting for one in ends)
    )


def boot_id() -> str:
    """Return the id of this boot: process numbers of another one mean nothing. "" if it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""


# --------------------------------------------------------------------------------------------- which belong together


def living(*, zombies: bool = False) -> Iterator[Process]:
    """Yield every process of this host that can be seen and is not a zombie.

    ``zombies``: those too, for one whose main thread has ended looks like a zombie, and may have threads that live.
    """
    for name in os.listdir("/proc"):
        one = process(int(name)) if name.isdigit() else None
        if one is not None and (zombies or not one.gone):
            yield one


def environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty if it is gone, a zombie or another account's."""
    pairs = (item.partition("=") for item in os.fsdecode(_environ(pid)).split("\0"))
    found = {key: value for key, mark, value in pairs if mark}
    return found if found and _is_ours(pid) else {}


def _is_ours(pid: int) -> bool:
    """Return whether this account has started the process. Root reads the environments of all: there anybody writes the marks
    of root's runs, also into that of a program which gets root's rights."""
    if os.geteuid() != 0:
        return True  # else it could not be read
    try:
        with open(f"/proc/{pid}/status", "rb") as file:  # noqa: PTH123
            return next((line for line in file if line.startswith(b"Uid:")), b"").split()[1:3] == [b"0", b"0"]
    except OSError:
        return False


def _environ(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:  # noqa: PTH123
            return file.readall()
    except OSError:
        return b""


def marked(name: str) -> dict[str, list[Process]]:
    """Return the living processes of this account with ``name`` in their environment, by its value.

    Children inherit it, whatever they do with sessions and groups.
    """
    found: dict[str, list[Process]] = {}
    mark = f"{name}=".encode()
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or mark not in _environ(int(pid)):  # of most one look is enough
            continue
        one = process(int(pid))
        value = environment(int(pid)).get(name)
        if one is not None and not one.gone and value is not None and one.pid != os.getpid():
            found.setdefault(value, []).append(one)
    return found


def children(*, zombies: bool = False) -> dict[int, list[int]]:
    """Return the living processes of this host by their parent."""
    found: dict[int, list[int]] = {}
    for one in living(zombies=zombies):
        found.setdefault(one.parent, []).append(one.pid)
    return found


def below(pid: int, without: frozenset[int] = frozenset(), *, zombies: bool = False) -> list[int]:
    """Return all living descendants of ``pid``, parents first; not the branches that begin with a pid in ``without``."""
    tree, found = children(zombies=zombies), []
    queue = [one for one in tree.get(pid, ()) if one not in without]
    while queue:
        one = queue.pop(0)
        found.append(one)
        queue.extend(tree.get(one, ()))
    return found


def who_hears(pid: int, number: int, tree: Optional[Mapping[int, list[int]]] = None) -> list[int]:
    """Return, on every branch from ``pid`` down, the first process that signal ``number`` would not kill and that is no
    launcher. Processes below such a one (loader workers, helpers) are its own affair and are left out. ``tree``:
    ``children()``, where the caller has it."""
    tree, found, queue = children() if tree is None else tree, [], [pid]
    while queue:
        one = queue.pop(0)
        names = _names(one)
        tears_down = names.intersection(_LAUNCHERS) or (_SRUN in names and number not in _SRUN_PASSES)
        hears = not tears_down and _handles(one, number)
        if hears:
            found.append(one)
        if not hears or names.intersection(_SHELLS):
            queue.extend(tree.get(one, ()))
    return found


def hearing_tasks(ranks: Iterable[int], number: int) -> dict[int, list[int]]:
    """Return those of ``ranks`` that srun has started, each with the processes on its branch that hear the signal. One without
    any dies where srun hands the signal on: it has no handler, or none yet."""
    tasks = [pid for pid in ranks if environment(pid).get("SLURM_TASK_PID") == str(pid)]
    tree = children() if tasks else {}
    return {pid: who_hears(pid, number, tree) for pid in tasks}


def is_heard(takers: list[int], number: int, ranks: list[int]) -> bool:
    """Return whether something acts on the signal, which one of ``takers`` handles (``who_hears``) or hands on to ranks (srun).

    srun would kill those that have no handler: ``ranks``, as far as they are on this host, are asked
    themselves. Where none is here, they may hear it. Our own shell around a command has one only to outlive the signal.
    """
    others = [pid for pid in takers if _SRUN not in _names(pid)]
    if any(not _only_outlives(pid) for pid in others):
        return True
    if len(others) == len(takers) or not ranks:
        return bool(takers) and len(others) < len(takers)
    return any(
        _handles(pid, number) and not _only_outlives(pid) and not _names(pid).intersection(_LAUNCHERS) for pid in ranks
    )


def _only_outlives(pid: int) -> bool:
    """Return whether it is our shell around a command that sets no trap of its own."""
    words = _words(pid)
    header, _, code = (words[2] if len(words) > 2 else "").partition("\n")[2].partition("\n")
    return (
        words[1:2] == ["-c"] and words[2].startswith(OUTLIVES) and header.startswith("trap : ") and "trap" not in code
    )


def sruns(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _SRUN in _names(pid)]


# ------------------------------------------------------------------------------------------------------------------ end


@cache
def _libc() -> Any:
    """Return the C library; None in a Python built without libffi: orphans are then found by their other marks."""
    try:
        import ctypes  # here, because a reader of the ledger does not need it
    except ImportError:
        return None
    libc = ctypes.CDLL(None)
    libc.prctl.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return libc


def prctl(option: int, value: Union[int, bytes], more: Union[int, bytes] = 0, length: int = 0) -> None:
    """Call prctl(2) for this process, a struct and its length included; nothing where this Python cannot call it."""
    libc = _libc()
    if libc is not None:
        libc.prctl(option, value, more, length, 0)


def die_with_parent(number: int = _SIGTERM) -> Callable[[], None]:
    """Return the function that a child calls before its exec, to get signal ``number`` when this process dies."""
    _libc()  # not in the child: another thread may hold the loader's lock while this process forks
    parent = os.getpid()

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


def become_subreaper() -> Callable[[], None]:
    """Become the parent of all orphans below us, so that nothing of an attempt survives it, even in a session of its own.
    Returns ``die_with_parent()``."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    return die_with_parent()


def set_name(name: bytes) -> None:
    """Set the name (comm) of this process, as ``ps`` shows it: 15 bytes."""
    prctl(PR_SET_NAME, name[:15])


def send(pids: list[int], number: int) -> int:
    """Send the signal to each. Returns the number of processes that were signalled."""
    told = 0
    for pid in pids:
        try:
            os.kill(pid, number)
            told += 1
        except (ProcessLookupError, PermissionError):
            continue
    return told


def signal_exactly(one: Process, number: int) -> None:
    """Send a signal to this very process. Nothing happens if it has ended or belongs to another account. It goes through a
    pidfd, after a second look at the start time: between looking and sending, a number may have found a new owner."""
    import signal

    try:
        fd = os.pidfd_open(one.pid)
    except ProcessLookupError:
        return
    except OSError:  # a kernel or container without pidfd: only the second look remains
        if lives(one.pid, one.start):
            send([one.pid], number)
        return
    try:
        if lives(one.pid, one.start):
            signal.pidfd_send_signal(fd, number)
    except (ProcessLookupError, PermissionError):
        pass
    finally:
        os.close(fd)


def wait_gone(processes: Iterable[Process], seconds: float) -> list[Process]:
    """Wait until they are gone. Returns those that are still there after ``seconds``."""
    end = time.monotonic() + seconds
    left = [one for one in processes if lives(one.pid, one.start)]
    while left and time.monotonic() < end:
        _look_out(left[0].pid, 0.02)
        left = [one for one in left if lives(one.pid, one.start)]
    return left


def _look_out(pid: int, seconds: float) -> None:
    """Wait until the process ends, for ``seconds`` at most."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # gone, or a kernel or container without pidfd
        time.sleep(seconds)
        return
    try:
        ended = select.poll()
        ended.register(fd, select.POLLIN)
        ended.poll(seconds * 1000)
    finally:
        os.close(fd)


def end_all(choose: Callable[[], Iterable[Process]], seconds: float, known: Collection[Process] = ()) -> list[Process]:
    """Send SIGKILL to all that ``choose`` finds and all ``known`` before, for a dying process has lost its environment and
    its mark. Repeated until none is left. Returns those that are still there after ``seconds``."""
    end, told = time.monotonic() + seconds, {(one.pid, one.start): one for one in known}
    while True:
        told |= {(one.pid, one.start): one for one in choose()}
        left = [one for one in told.values() if lives(one.pid, one.start)]
        if not left or time.monotonic() >= end:
            return left
        for one in left:
            signal_exactly(one, _SIGKILL)
        time.sleep(0.02)


def end_group(leader: int) -> None:
    """Send SIGKILL to the process group that ``leader`` leads."""
    try:
        os.killpg(leader, _SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def end_child(leader: Process) -> None:
    """Send SIGKILL to a child of ours that leads a session and to all in its group; it is reaped if it dies of that. Nothing
    happens where it was reaped long ago, and another process has its number."""
    found = process(leader.pid)
    if found is not None and found.start != leader.start:
        return
    end_group(leader.pid)
    until = time.monotonic() + _DIES
    try:
        while not os.waitpid(leader.pid, os.WNOHANG)[0] and time.monotonic() < until:
            time.sleep(0.002)
    except ChildProcessError:
        pass


def _handles(pid: int, number: int) -> bool:
    """Return whether the signal is caught, or blocked in the main thread, as by programs that wait for signals in a
    thread (srun).

    For the moment in which a process starts another one, both have all signals blocked, and may die of one afterwards: who
    blocks all is looked at again. Neither of the two sleeps then: one is in state D, the other runs.
    """
    bit, seen = 1 << (number - 1), dict[str, str]()
    for _ in range(_LOOKS):
        seen = dict(line.split(":\t", 1) for line in _status(pid) if ":\t" in line)
        blocked = int(seen.get("SigBlk", "0"), 16)
        if int(seen.get("SigCgt", "0"), 16) & bit:
            return True
        if not blocked & bit or blocked & _STANDARD != _STANDARD:
            return bool(blocked & bit)
        time.sleep(_BETWEEN)
    return seen["State"].startswith("S") or (seen["Threads"] != "1" and not seen["State"].startswith("D"))


def _status(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/status").read_text("ascii", "replace").splitlines()
    except OSError:  # gone meanwhile
        return []


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()[: 1 << 16].decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def _names(pid: int) -> set[str]:
    """Return the name of the program; for an interpreter also that of the script or module it runs."""
    words = _words(pid)
    if not words:
        return set()
    first = words[:3] if os.path.basename(words[0]).startswith("python") else words[:1]
    return {os.path.basename(word) for word in first}


def own_words() -> list[str]:
    """Return the interpreter of this process and all words after it, as ``sys.orig_argv`` has them from Python 3.10 on."""
    given = getattr(sys, "orig_argv", None)
    return list(given) if given is not None else [os.fsdecode(word) for word in _own_line().split(b"\0")[:-1]]


def _own_line() -> bytes:
    try:
        return Path("/proc/self/cmdline").read_bytes()
    except OSError:
        return b""


# --------------------------------------------------------------------------------------------------- start one of ours
#
# Every ``python -m ftsupervise …`` that is put into a job script, a crontab line or a child process is built here, so that no
# other account can influence it: none runs a stranger's module in the current directory (see ``ftsupervise/start.py``). The
# environment is left alone: the training command below it keeps its PYTHONPATH and finds its own modules as before.

START = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "start.py")  # noqa: PTH100, PTH118, PTH120


def own_command(*words: str, module: Optional[str] = None, python: Optional[str] = None) -> list[str]:
    """Return ``ftsupervise WORD …``, or another program of this package (``module``: "ftsupervise.ranks"), as a command
    line. ``python``: the interpreter, by its full path; default: the one that runs this."""
    program = ["-m", module] if module else []
    return [python or sys.executable, "-I", START, *program, *words]
