"""Turn a fork of the standby into a fresh process of one rank: set again all that a process inherits from its parent, and
all that an interpreter sets up at its start.

Two things cannot be set again: the seed of ``hash()`` for text (all ranks of a node have the standby's, unless PYTHONHASHSEED
is set), and warnings that a module gives when it is imported (they were given to the standby's log).
"""

from __future__ import annotations

import ctypes
import fcntl
import marshal
import mmap
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftsupervise.warm import client as proxy

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 1, 15, 35, 14
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
_sbrk = libc.sbrk
_sbrk.restype, _sbrk.argtypes = ctypes.c_size_t, [ctypes.c_ssize_t]
_kept: list[object] = []  # lives as long as the process


class Cannot(Exception):
    """This fork cannot become that rank; the rank has to be started cold."""


def become(request: Mapping[str, Any], parent: int, imported: Mapping[bytes, bytes | None]) -> None:
    """Take over everything in ``request`` but descriptors and signals. ``imported``: environment variables as the imported
    modules have set them; None: removed. Raises Cannot, OSError, ValueError."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cpus"])
    if os.sched_getaffinity(0) != set(request["cpus"]):
        raise Cannot("its CPUs are not ours to use")
    if request["nice"] != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    _set_oom(request["oom"])
    for number, limits in request["limits"].items():
        if resource.getrlimit(number) != limits:
            resource.setrlimit(number, limits)
    os.environ.clear()
    os.environb.update(request["env"])
    for key, value in imported.items():
        if value is None:
            os.environb.pop(key, None)
        else:
            os.environb[key] = value
    _name_it(request)
    _fresh_standard_files()
    _fresh_seeds()


def hear(request: Mapping[str, Any], ours: Iterable[int]) -> None:
    """Set signals as a fresh interpreter has them. Call it last: from here on signals reach this rank."""
    for number in ours:
        signal.signal(number, signal.SIG_DFL)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    for number in _PYTHON_IGNORES:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN if signal.SIGINT in request["ignored"] else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def take_over(numbers: list[int], received: list[int], here: int, link: int) -> int:
    """Each received descriptor under its own number, inheritable, and the working directory ``here``; of all others only
    the connection stays open: its number from now on."""
    os.fchdir(here)
    top = max(numbers, default=2) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, top) for fd in received]
    link = fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, top)
    keep = {*moved, link}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:  # the one that listed the folder
                continue
    for number, fd in zip(numbers, moved, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    return link


def _set_oom(wanted: str) -> None:
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            if wanted and file.read().strip() != wanted:
                file.seek(0)
                file.write(wanted)
    except OSError:  # lowering needs a privilege: without it the OOM killer only prefers this rank a little
        return


def _name_it(request: Mapping[str, Any]) -> None:
    """Let ``ps`` and ``/proc/PID/environ`` (by which we kill lost ranks) show the rank, not the standby."""
    command: list[bytes] = request["command"]
    libc.prctl(_PR_SET_NAME, os.path.basename(os.fsencode(sys.executable or command[0]))[:15], 0, 0, 0)
    words = b"\0".join(command) + b"\0"
    block = b"".join(key + b"=" + value + b"\0" for key, value in request["env"].items())
    room = mmap.mmap(-1, len(words) + len(block) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.write(words + block)
    _kept.append(room)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    with open("/proc/self/stat", "rb") as file:
        field = dict(enumerate(file.read().rpartition(b")")[2].split(), 3))  # as numbered in proc(5)
    code, data, heap, stack = (field[26], field[27]), (field[45], field[46]), field[47], field[28]
    areas = [*map(int, (*code, *data, heap)), _sbrk(0), int(stack)]
    middle, end = start + len(words), start + len(words) + len(block)
    asked = struct.pack("=11QQIi", *areas, start, middle, middle, end, 0, 0, -1)  # struct prctl_mm_map
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, asked, len(asked), 0)


def _fresh_standard_files() -> None:
    """Renew sys.stdin, stdout and stderr in the same objects, which modules may hold already."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old = getattr(sys, f"__{name}__")
        try:
            os.fstat(fd)
        except OSError:  # closed
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
            continue
        if old is None:
            raise Cannot(f"the standby has no {name}")
        through = bool(old.write_through)  # python -u
        bare = through and mode == "w"
        binary: Any = open(fd, mode + "b", buffering=0 if bare else -1, closefd=False)  # noqa: SIM115
        (binary if bare else binary.raw).name = f"<{name}>"
        lines = not through and (name == "stderr" or binary.isatty())
        coding = {"encoding": old.encoding, "errors": old.errors}
        old.__init__(binary, **coding, newline="\n", line_buffering=lines, write_through=through)
        old.mode = mode
        setattr(sys, name, old)


def _fresh_seeds() -> None:
    """Reseed modules that drew a seed at their import, as each process would have."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))
    # random reseeds itself after each fork; torch begins with the same seed in every process


# A client's session with a standby: the request received so far.


@dataclass
class Caller:
    """One connection, and the child that was forked for it."""

    link: socket.socket
    until: float  # monotonic: it is dropped then, unless it has a child
    data: bytearray = field(default_factory=bytearray)
    request: dict[str, Any] | None = None
    fds: list[int] = field(default_factory=list)
    whole: bool = False  # its request is complete; the fork waits until no process of an older attempt lives
    refused: str = ""  # or it gets this refusal then: its cold start must not meet an older attempt either
    pid: int = 0

    @property
    def attempt(self) -> int:
        return attempt_of(self.request)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.link.close()


def attempt_of(request: dict[str, Any] | None) -> int:
    number = (request or {}).get("env", {}).get(b"FTSUPERVISE_ATTEMPT", b"")
    return int(number) if number.isdigit() else 0


def whole(data: bytearray) -> dict[str, Any] | None:
    """The request once it is complete. Raises nothing: an invalid one is dropped at its bound."""
    head = len(proxy.PROTOCOL)
    if len(data) < head + 8 or not data.startswith(proxy.PROTOCOL):
        return None
    size = int.from_bytes(data[head : head + 8], "little")
    if len(data) < head + 8 + size:
        return None
    try:
        request = marshal.loads(bytes(data[head + 8 : head + 8 + size]))
        return dict(request) if isinstance(request["fds"], list) and isinstance(request["env"], dict) else None
    except (EOFError, ValueError, TypeError, KeyError):
        return None
