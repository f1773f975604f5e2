"""Warm start, the supervisor's side: when to start standbys, and which attempts to hand to them.

    cold attempt -> its first step -> a standby on each node imports what rank 0 had imported -> the next attempt is handed
    to it, rank by rank, through ``warm/client.py``; what does not fit is started cold there

Nothing depends on a standby. Warm start is off where the command is not plainly a Python program or memory is tight.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import IO, NamedTuple

from ftsupervise.guard.heartbeat import ENV_IMPORTS, Imports
from ftsupervise.host import processes
from ftsupervise.host.begin import begin
from ftsupervise.host.memory import SHARED_MEMORY
from ftsupervise.host.ownership import as_page
from ftsupervise.ranks import shm_dir
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import decode, parse_object, read_record
from ftsupervise.scheduler.allocation import STANDBYS, Allocation
from ftsupervise.scheduler.parse import is_srun, srun_options
from ftsupervise.warm.client import COLD

# The standbys of a job, as the supervisor starts, hears and ends them: one process on this machine, or an srun that holds one
# on each node. They report, one JSON object a line, into a log in a private folder that has the same name on every node.

PROGRAMS = Path(__file__).parent
# The end of one standby does not end the others.
_STEP = (f"--job-name={STANDBYS}", "--open-mode=append", "--no-kill", "--wait=0")
_BEGINS = 2.0  # seconds for one to begin; after that it is listened to all the same
_LEAVE_WITHIN = 2.0  # seconds

# ------------------------------------------------------------------------- the commands whose start a standby can replace

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_NEVER = ("--multi-prog", "--pty", "--het-group", "--chdir", "--export", "--container", "--no-container", "--propagate")
_FLAGS = frozenset("bBdOPqRsuv")  # Python's options that a standby can be started with


@dataclass(frozen=True)
class PythonCommand:
    """A Python command. ``words`` begins at the interpreter, which stands at ``at`` in the whole; the ``flags`` words
    after it are its own.
    """

    at: int
    words: tuple[str, ...]
    flags: int
    srun: bool

    @property
    def python(self) -> str:
        return self.words[0]


def parse_command(command: Sequence[str]) -> PythonCommand | str:
    """Return the parsed command, or the reason why no standby can replace its start."""
    if not command:
        return "there is no command"
    srun = is_srun(command)
    if srun and ":" in command:
        return "srun starts several programs"
    at = _after_srun(command) if srun else 0
    if isinstance(at, str):
        return at
    words = tuple(command[at:])
    if not words or not _PYTHON.fullmatch(words[0].rpartition("/")[2]):
        return f"the command does not start with python ({words[0] if words else 'srun alone'})"
    flags = _flags(words)
    return flags if isinstance(flags, str) else PythonCommand(at, words, flags, srun)


def _after_srun(command: Sequence[str]) -> int | str:
    """Return the index at which the command of srun begins, or why a rank of it would differ from its standby."""
    options, at = srun_options(command)
    for name, _ in options:
        long = name.startswith("--")
        if name == "-D" or (long and any(name.startswith(one) or one.startswith(name) for one in _NEVER)):
            return f"srun {name} changes the environment of a rank"
    return at


def _flags(words: tuple[str, ...]) -> int | str:
    """Return the number of words after ``words[0]`` that are the interpreter's options."""
    at = 1
    while at < len(words):
        word = words[at]
        if word == "-":
            break
        if not word.startswith("-"):
            return at - 1
        if word.startswith("--"):
            return f"python {word}"
        for place, letter in enumerate(word[1:], 1):
            if letter in "cm":
                return at - 1 if place == 1 else f"python {word}"
            if letter in "WX":
                at += place + 1 == len(word)
                break
            if letter not in _FLAGS:
                return f"python -{letter}"
        at += 1
    return "python reads its program from its input"


# ---------------------------------------------------------------------------------------------- the standbys of a start


class StandbyFolder:
    """The private folder for the standbys' sockets and their log, with an unguessable name."""

    def __init__(self) -> None:
        """Make the folder. Raises OSError."""
        shared = SHARED_MEMORY
        top = shared if os.access(shared, os.W_OK) else os.environ.get("TMPDIR") or "/tmp"
        self.path = Path(shm_dir.new_base(top))
        self.log = self.path / shm_dir.STANDBY_LOG
        lock = shm_dir.create_locked(str(self.path))  # as long as it is held, the folder is not removed as a leftover
        if lock is None:
            raise OSError(errno.ENOSPC, f"cannot make {self.path}")
        self._lock = lock

    def remove(self) -> None:
        shm_dir.clear(str(self.path))
        os.close(self._lock)


@dataclass(frozen=True)
class StandbyOrder:
    """The standby to be started, and its purpose."""

    command: PythonCommand
    env: Mapping[str, str]
    imports: Path  # where rank 0 has listed its imports
    modules: tuple[str, ...]  # those that the user has named
    within: float  # seconds in which a standby should be ready


class StandbyReport(NamedTuple):
    """One report of a standby."""

    node: str
    pid: int = 0
    step: str = ""  # the job step in which it runs
    ready: bool = False
    refused: str = ""  # why there is no warm start on this node
    skipped: Mapping[str, str] = MappingProxyType({})  # module -> why it was not imported


class Standbys:
    """The standbys of one start, which ends when their process has ended: then there is a new start, or none."""

    def __init__(
        self, order: StandbyOrder, folder: StandbyFolder, allocation: Allocation, say: Callable[[str], None]
    ) -> None:
        """Start them. Raises OSError when the process cannot be started."""
        self._log, self._allocation, self._say = folder.log, allocation, say
        self._by_srun = order.command.srun
        silent = allocation.silent() if self._by_srun else ()
        self._nodes = tuple(node for node in allocation.nodes if node not in silent) if self._by_srun else ("",)
        self._step = ""  # where Slurm has started them; it is not our own step
        self._ready: dict[str, int] = {}  # node -> pid
        self._refused: set[str] = set()  # nodes without warm start
        self._ready_by = monotonic() + order.within
        with os.fdopen(as_page(self._log), "ab") as log:
            self._bytes_read = log.seek(0, os.SEEK_END)  # bytes of the log that have been read
            self._process = self._start(order, folder.path, log)

    def _start(self, order: StandbyOrder, folder: Path, log: IO[bytes]) -> processes.Process:
        orders = {"place": str(folder), "imports": str(order.imports), "modules": list(order.modules)}
        its = order.command
        words = [its.python, "-IS", str(PROGRAMS / "sitecustomize.py"), json.dumps(orders)]
        words += [str(its.flags), "--", *its.words]
        env = dict(order.env)
        if self._by_srun:
            words = self._allocation.side_step(self._nodes, *words, output=str(self._log), options=_STEP, whole=True)
            theirs = {key: value for key, value in env.items() if not key.startswith("SLURM_")}
            env = {**theirs, **self._allocation.side_env(), "PATH": env.get("PATH", os.defpath)}  # the ranks' own
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            files = (null, log.fileno(), log.fileno())
            child = begin(words, files, env=env, before_exec=processes.die_with_parent(), anywhere=not self._by_srun)
        finally:
            os.close(null)
        child.has_begun(_BEGINS)  # its Python may lie on a disk that hangs: the next attempt then begins without it
        found = processes.process(child.pid)
        assert found is not None, "a child that is not reaped has an entry in /proc"
        return found

    # ------------------------------------------------------------------------------------------------------ their state

    @property
    def alive(self) -> bool:
        return processes.lives(self._process.pid, self._process.start)

    def ready_somewhere(self) -> bool:
        return bool(self._ready)

    def importing(self) -> bool:
        """Return whether a standby is still importing on any node.

        It began before a rank that starts now, so the rank waits for it, but no longer than its own imports would take.
        """
        return len(self._ready.keys() | self._refused) < len(self._nodes) and monotonic() < self._ready_by

    def has_news(self) -> bool:
        """Return whether one has reported, or ended. Called by another thread."""
        try:
            size = self._log.stat().st_size
        except OSError:
            size = 0
        return size != self._bytes_read or not self.alive

    def read(self) -> None:
        """Read their reports."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._bytes_read)
                text = file.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._bytes_read += len(whole)
        other = []
        for line in whole.splitlines():
            try:
                self._take(decode(StandbyReport, parse_object(line)))
            except ValueError:
                other.append(line.decode("utf-8", "replace"))
        complaints = [line for line in other if not line.startswith("srun: ") or "error" in line]
        if complaints:
            self._say(f"a standby: {complaints[-1][:300]}")

    def _take(self, report: StandbyReport) -> None:
        node = report.node
        if report.refused:
            self._ready.pop(node, None)
            self._refused.add(node)
            self._say(f"no warm start on {node}: {report.refused}")
        elif report.ready:
            self._ready[node] = report.pid
            self._step = report.step if self._by_srun else ""
            if len(self._ready) == len(self._nodes):
                self._say("a standby is ready on all nodes: restarts are warm")
        elif report.skipped:
            skipped = "; ".join(f"{name}: {why}" for name, why in report.skipped.items())
            self._say(f"the standby leaves out {skipped}")

    # ------------------------------------------------------------------------------------------------- their processes

    def _serves_here(self) -> bool:
        return not self._by_srun and self._process.pid in self._ready.values()

    def tree(self) -> frozenset[int]:
        """Return the standby and all below it."""
        return frozenset({self._process.pid, *processes.below(self._process.pid)})

    def apart(self) -> frozenset[int]:
        """Return the standby whose ``tree()`` is not the attempt's; none where it serves here, with the ranks below it."""
        return frozenset({self._process.pid}) if self.alive and not self._serves_here() else frozenset()

    def serving(self) -> int:
        """Return a standby that serves here; 0 where there is none."""
        return self._process.pid if self._serves_here() else 0

    def ranks(self) -> list[int]:
        """Return the ranks below a standby that serves here, on this machine without Slurm."""
        return processes.children().get(self._process.pid, []) if self._serves_here() else []

    def stop(self) -> None:
        """End them, bounded; their ranks have ended."""
        if self._step and self.alive:  # srun itself would kill them before they remove their files
            self._allocation.tell_step(self._step)
            processes.wait_gone([self._process], _LEAVE_WITHIN)
        processes.signal_exactly(self._process, signal.SIGTERM)
        processes.wait_gone([self._process], _LEAVE_WITHIN)
        if self.alive:
            processes.send(list(self.tree()), signal.SIGKILL)


# ------------------------------------------------------------------------------------------


AUTO = "auto"
_WORTH = 1.0  # seconds from a rank's start to its first line after the imports; below this a restart is not the imports
_DOUBTS = 4
_MEANWHILE = 10.0  # seconds that a standby may take besides its imports
_STARTS = 5  # of standbys, in one job


@dataclass(frozen=True)
class WarmSettings:
    """The setting: off, the modules that the run turns out to import, or the modules named here."""

    on: bool = False
    modules: tuple[str, ...] = ()


def parse_setting(text: str) -> WarmSettings:
    """Parse "off", "auto" or "torch,numpy". Raises ValueError."""
    if text in ("off", AUTO):
        return WarmSettings(text == AUTO)
    names = tuple(text.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f'"{name}" is not the name of a module')
    return WarmSettings(True, names)


@dataclass
class AttemptImports:
    """One attempt: whether it began warm, and what its rank 0 has imported."""

    attempt: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None  # in the attempt's directory, where no other attempt writes
    warm: bool = False  # the command goes through ``client.py``
    listed: bool = False  # rank 0 has made its first step and listed its imports; no standby was started for it yet


class WarmStart:
    """The standbys of one job. The thread that watches the run directory calls ``has_news``; the supervisor calls the rest."""

    def __init__(
        self,
        settings: WarmSettings,
        command: tuple[str, ...],
        allocation: Allocation,
        rundir: RunDir,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._allocation, self._rundir, self._say = settings, allocation, rundir, say
        self._command: PythonCommand | None = None  # None: warm start is off
        self._imports = AttemptImports()
        self._import_seconds = 0.0  # from a rank's start to its first line after the imports
        self._folder: StandbyFolder | None = None
        self._standbys: Standbys | None = None
        self._starts = 0
        self._doubts = 0  # warm attempts in a row that made no step
        self._news = False
        if settings.on:
            found = parse_command(command)
            if isinstance(found, PythonCommand):
                self._command = found
            elif settings.modules:  # without named modules it was not asked for explicitly
                say(f"restarts will be cold: {found}")

    # ---------------------------------------------------------------------------------------------- for one attempt

    def begin(self, attempt: int, env: dict[str, str]) -> None:
        """Begin an attempt: ``env`` gets the path where its rank 0 lists its imports."""
        self._read_reports()  # replace a standby that has died meanwhile
        plain = {key: value for key, value in env.items() if not key.startswith("FTSUPERVISE_")}
        self._imports = AttemptImports(attempt, plain)
        if self._command:  # also beside a standby: it may refuse, and end
            self._imports.file = self._rundir.attempt(attempt) / "imports.json"
            env[ENV_IMPORTS] = str(self._imports.file)

    def wrap(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return ``command``, or ``client.py`` with it where a standby is ready, or soon will be."""
        self._read_reports()
        standbys, folder = self._standbys, self._folder
        if self._command is None or standbys is None or folder is None:
            return command
        cold = bool(self._doubts % 2)  # finds out whether the command itself fails, or its warm start
        patience = self._import_seconds if standbys.importing() and not cold else 0.0
        found = parse_command(command)
        if not isinstance(found, PythonCommand) or not (standbys.ready_somewhere() or patience):
            return command
        self._imports.warm = not cold
        how = COLD if cold else f"{patience:.2f}"
        client = (found.python, "-IS", str(PROGRAMS / "client.py"), str(folder.path), how, "--")
        return (*command[: found.at], *client, *command[found.at :])

    def ended(self, *, stepped: bool, fault: bool) -> None:
        """Record whether the attempt made a step. After a warm attempt without a step the next one starts cold. If that happens
        twice and both cold starts succeed, warm start is switched off. ``fault``: its start may be why it made none."""
        if self._imports.warm and (stepped or fault):
            self._doubts = 0 if stepped else self._doubts + 1
        elif self._doubts and stepped and not self._imports.warm:
            self._doubts += self._doubts % 2
            if self._doubts >= _DOUBTS:
                self._say("restarts will be cold: attempts that began warm took no step, and those that began cold did")
                self.stop()
                self._command = None

    # ----------------------------------------------------------------------------------------------- while it runs

    def has_news(self) -> bool:
        """Return whether rank 0 has made its first step, or a standby reported.

        It reads the run directory, and may hang with it.
        """
        standbys = self._standbys
        self._news = self._news or (self._first_step() if standbys is None else standbys.has_news())
        return self._news

    def _first_step(self) -> bool:
        """Return whether rank 0 has listed its imports, and they are worth a standby."""
        now = self._imports
        if self._command is None or now.file is None or now.listed or self._starts >= _STARTS:
            return False
        try:
            seen = read_record(Imports, now.file)
        except (OSError, ValueError):
            return False
        if seen is None or seen.attempt != now.attempt:
            return False
        if (
            now.warm and seen.seconds < _WORTH
        ):  # from a fork of a standby that has died since: it imported nothing itself
            now.file = None
            return False
        self._import_seconds = seen.seconds
        if not self._settings.modules and seen.seconds < _WORTH:
            self._command = None  # its imports are fast anyway
            return False
        now.listed = True
        return True

    def act(self) -> None:
        """Read the standbys' reports; start standbys when they are due. Costs nothing without news."""
        if not self._news:
            return
        self._news = False
        self._read_reports()
        now = self._imports
        if now.listed and now.file is not None and self._standbys is None and self._command is not None:
            now.listed = False
            self._start(self._command, now.file)

    def _start(self, command: PythonCommand, imports: Path) -> None:
        self._starts += 1
        within = _MEANWHILE + 3 * self._import_seconds  # the ranks train beside it
        order = StandbyOrder(command, self._imports.env, imports, self._settings.modules, within)
        try:
            self._folder = self._folder or StandbyFolder()
            self._standbys = Standbys(order, self._folder, self._allocation, self._say)
        except OSError as error:
            self._command = None
            self._say(f"restarts will be cold: cannot start a standby: {error.strerror}")

    def _read_reports(self) -> None:
        if self._standbys is not None:
            self._standbys.read()
            if not self._standbys.alive:
                self._standbys = None

    # ----------------------------------------------------------------------------------------------- their processes

    def apart(self) -> frozenset[int]:
        """Return children of the supervisor that are not the attempt's, nor is what is below them."""
        return self._standbys.apart() if self._standbys is not None else frozenset()

    def serving(self) -> int:
        """Return the standby on this machine without Slurm, which is not the attempt's though the ranks are below it.
        0: none.
        """
        return self._standbys.serving() if self._standbys is not None else 0

    def tree(self) -> frozenset[int]:
        """Return the standbys and all below them."""
        return self._standbys.tree() if self._standbys is not None else frozenset()

    def ranks(self) -> list[int]:
        """Return the ranks below the standby, on this machine without Slurm."""
        return self._standbys.ranks() if self._standbys is not None else []

    def stop(self) -> None:
        """End the standbys, bounded; their ranks have ended."""
        standbys, self._standbys = self._standbys, None
        if standbys is not None:
            standbys.stop()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
