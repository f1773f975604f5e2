"""A rank's request to a standby: may a fork become that rank (``Judge``), and how it does (``become``).

It stands alone because it is a list of all that a fork does not set up by itself.

It may not if anything differs that an import may have read, or that a fork cannot change. All else is set again: what a
process inherits from its parent, and what an interpreter sets up at its start. Two things cannot be set again: the seed of
``hash()`` for text (all ranks of a node have the standby's, unless PYTHONHASHSEED is set), and warnings that a module gives
when it is imported (they were given to the standby's log).
"""

from __future__ import annotations

import ctypes
import fcntl
import marshal
import mmap
import os
import resource
import signal
import struct
import sys
import zipimport
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ftsupervise.host import processes
from ftsupervise.warm import client

# The environment of one rank and one attempt. Everything else must be as it was when the modules were imported.
_OF_A_RANK = (
    b"SLURM", b"SRUN_", b"FTSUPERVISE_", b"PMI", b"OMPI_MCA_orte", b"CUDA_VISIBLE_DEVICES", b"GPU_DEVICE_ORDINAL",
    b"ROCR_VISIBLE_DEVICES", b"HIP_VISIBLE_DEVICES", b"ZE_AFFINITY_MASK", b"KRB5CCNAME", b"TORCHELASTIC_", b"XDG_SESSION_ID",
)  # fmt: skip
_OF_A_RANK_WHOLE = {b"_", b"PWD", b"OLDPWD", b"SHLVL", b"RANK", b"LOCAL_RANK", b"WORLD_SIZE", b"LOCAL_WORLD_SIZE",
                    b"NODE_RANK", b"GROUP_RANK", b"MASTER_ADDR", b"MASTER_PORT", b"HOSTNAME",
                    b"TORCHFT_LIGHTHOUSE"}  # fmt: skip
# With these a thread pool depends on the CPUs themselves, not only on their number.
_PINNED = (b"OMP_PROC_BIND", b"OMP_PLACES", b"GOMP_CPU_AFFINITY", b"KMP_AFFINITY")
_PR_SET_MM_MAP = 14
_PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
_sbrk = ctypes.CDLL(None).sbrk
_sbrk.restype, _sbrk.argtypes = ctypes.c_size_t, [ctypes.c_ssize_t]
_kept: list[object] = []  # lives as long as the process


@dataclass(frozen=True)
class RankRequest:
    """The state that the process of a rank would inherit over an exec, as ``client.myself`` lists it."""

    command: list[bytes]
    python: int
    executable: bytes
    env: dict[bytes, bytes]
    fds: list[int]
    limits: dict[int, tuple[int, int]]
    umask: int
    cpus: list[int]
    nice: int
    groups: list[int]
    blocked: list[int]
    ignored: list[int]
    held: dict[str, str]
    devices: list[str]
    oom: str
    cold: bool = False  # it is to be started cold, once nothing of an older attempt lives

    @property
    def attempt(self) -> int:
        number = self.env.get(b"FTSUPERVISE_ATTEMPT", b"")
        return int(number) if number.isdigit() else 0


def read_request(data: bytearray) -> RankRequest | None:
    """Return the request once it is complete. Raises nothing: an invalid one is dropped at its bound."""
    head = len(client.PROTOCOL)
    if len(data) < head + 8 or not data.startswith(client.PROTOCOL):
        return None
    size = int.from_bytes(data[head : head + 8], "little")
    if len(data) < head + 8 + size:
        return None
    try:
        request = RankRequest(**marshal.loads(bytes(data[head + 8 : head + 8 + size])))
    except (EOFError, ValueError, TypeError):
        return None
    return request if isinstance(request.fds, list) and isinstance(request.env, dict) else None


# ------------------------------------------------------------------------------------------------ may it become that rank?


class Incompatible(Exception):
    """This rank has to be started cold; the text says why."""


class Judge:
    """The standby's state when its modules were imported. ``env``: its environment before that. ``flags``: words after its
    interpreter that are the interpreter's options."""

    def __init__(self, cpus: int, env: Mapping[bytes, bytes], flags: int) -> None:
        self.program = processes.own_words()[1 + flags :]
        self.cpus = cpus or len(os.sched_getaffinity(0))
        self.env = {key: value for key, value in env.items() if not _of_a_rank(key)}
        every = {*env, *os.environb}
        self.set = {key: os.environb.get(key) for key in every if os.environb.get(key) != env.get(key)}
        self.of_a_rank = sorted(os.fsdecode(key) for key in self.set if _of_a_rank(key))
        self.here = os.stat(".")
        self.own = {name.partition(".")[0] for name in sys.modules} - {"ftsupervise", "sitecustomize", "__main__"}

    def fits(self, request: RankRequest) -> None:
        """Check that the rank fits. Raises Incompatible."""
        if self.of_a_rank:
            raise Incompatible(f"imported modules set variables of one rank: {', '.join(self.of_a_rank[:5])}")
        if request.python != sys.hexversion or os.fsdecode(request.executable) != sys.executable:
            raise Incompatible("another Python")
        if [os.fsdecode(word) for word in request.command] != processes.own_words():
            raise Incompatible("another command")
        if request.groups != sorted(os.getgroups()):
            raise Incompatible("other groups")
        here = client.held_to()
        if other := [name for name, value in request.held.items() if here.get(name) != value]:
            raise Incompatible(f"another container, cgroup or set of rights: {', '.join(other)}")
        if other := sorted(set(request.devices).symmetric_difference(client.devices())):
            raise Incompatible(f"other devices: {', '.join(other[:5])}")
        theirs = {key: value for key, value in request.env.items() if not _of_a_rank(key)}
        if theirs != self.env:
            names = sorted(key for key in {*theirs, *self.env} if theirs.get(key) != self.env.get(key))
            raise Incompatible(f"another environment: {', '.join(map(os.fsdecode, names[:5]))}")
        if len(request.cpus) != self.cpus:
            raise Incompatible(f"{len(request.cpus)} CPUs, and {self.cpus} when the modules were imported")
        if any(name in theirs for name in _PINNED) and set(request.cpus) != os.sched_getaffinity(0):
            raise Incompatible("threads are to be pinned to other CPUs")
        shadow = self._shadow()
        if shadow:
            raise Incompatible(f"{shadow} beside the program shadows an imported module of that name")

    def folder(self, fd: int) -> None:
        """Check the folder. Raises Incompatible when ``fd`` is another working directory than the one relative paths
        were resolved in.
        """
        theirs = os.fstat(fd)
        if (theirs.st_dev, theirs.st_ino) != (self.here.st_dev, self.here.st_ino):
            raise Incompatible("another working directory")

    def _shadow(self) -> str:
        """Return a module beside the program that an import here would have used instead, maybe a new one; "" if there
        is none.
        """
        first = first_on_path(self.program)
        if first is None:
            return ""
        try:
            names = os.listdir(first)
        except OSError:
            return ""
        inside = {name for name in self.own if _lies_in(name, os.path.realpath(first))}
        for name in names:
            stem = name.partition(".")[0]
            if stem in self.own and stem not in inside:
                whole = os.path.join(first, name)
                if name.endswith((".py", ".so")) or os.path.isfile(os.path.join(whole, "__init__.py")):
                    return whole
        return ""


def first_on_path(words: list[str]) -> str | None:
    """Return the folder that the interpreter will put first in ``sys.path``; None for none.

    ``words``: the program and its arguments. Raises Incompatible.
    """
    if getattr(sys.flags, "safe_path", False):
        return None
    if words and words[0].startswith(("-c", "-m")):
        return os.getcwd()
    if not words or os.path.isdir(words[0]):
        return words[0] if words else None
    try:
        zipimport.zipimporter(words[0])
    except zipimport.ZipImportError:
        return os.path.dirname(os.path.realpath(words[0]))
    raise Incompatible("the program is a zip archive")


def _lies_in(name: str, folder: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return bool(file) and os.path.realpath(str(file)).startswith(folder + os.sep)


def _of_a_rank(key: bytes) -> bool:
    return key in _OF_A_RANK_WHOLE or key.startswith(_OF_A_RANK)


# ------------------------------------------------------------------------------------------------------ how it becomes it


class Cannot(Exception):
    """This fork cannot become that rank; the rank has to be started cold."""


def become(request: RankRequest, imported: Mapping[bytes, bytes | None]) -> None:
    """Take over everything in ``request`` but descriptors and signals. ``imported``: environment variables as the imported
    modules have set them; None: removed. Raises Cannot, OSError, ValueError."""
    os.setsid()
    os.umask(request.umask)
    os.sched_setaffinity(0, request.cpus)
    if os.sched_getaffinity(0) != set(request.cpus):
        raise Cannot("its CPUs are not ours to use")
    if request.nice != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, request.nice)
    _set_oom(request.oom)
    for number, limits in request.limits.items():
        if resource.getrlimit(number) != limits:
            resource.setrlimit(number, limits)
    os.environ.clear()
    os.environb.update(request.env)
    for key, value in imported.items():
        if value is None:
            os.environb.pop(key, None)
        else:
            os.environb[key] = value
    _set_command_line(request)
    _fresh_standard_files()
    _fresh_seeds()


def restore_signals(request: RankRequest, ours: Iterable[int]) -> None:
    """Set signals as a fresh interpreter has them. Call it last: from here on signals reach this rank."""
    for number in ours:
        signal.signal(number, signal.SIG_DFL)
    for number in request.ignored:
        signal.signal(number, signal.SIG_IGN)
    for number in _PYTHON_IGNORES:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN if signal.SIGINT in request.ignored else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)


def adopt_descriptors(numbers: list[int], received: list[int], here: int, link: int) -> int:
    """Give each received descriptor its own number, inheritable, and take the working directory ``here``.

    Of all others only the connection stays open: its number from now on is returned.
    """
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
    for number, fd in zip(numbers, moved):
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


def _set_command_line(request: RankRequest) -> None:
    """Let ``ps`` and ``/proc/PID/environ`` (by which we kill lost ranks) show the rank, not the standby."""
    processes.set_name(os.path.basename(os.fsencode(sys.executable or request.command[0])))
    words = b"\0".join(request.command) + b"\0"
    block = b"".join(key + b"=" + value + b"\0" for key, value in request.env.items())
    room = mmap.mmap(-1, len(words) + len(block) + 1, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.write(words + block)
    _kept.append(room)
    start = ctypes.addressof(ctypes.c_char.from_buffer(room))
    found = processes.stat_fields("/proc/self/stat")
    if found is None:
        raise Cannot("its /proc/self/stat cannot be read")
    field = dict(enumerate(found[1], 3))  # as numbered in proc(5)
    code, data, heap, stack = (field[26], field[27]), (field[45], field[46]), field[47], field[28]
    areas = [*map(int, (*code, *data, heap)), _sbrk(0), int(stack)]
    middle, end = start + len(words), start + len(words) + len(block)
    asked = struct.pack("=11QQIi", *areas, start, middle, middle, end, 0, 0, -1)  # struct prctl_mm_map
    processes.prctl(processes.PR_SET_MM, _PR_SET_MM_MAP, asked, len(asked))


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
