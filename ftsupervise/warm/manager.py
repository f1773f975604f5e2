"""Warm start, the supervisor's side: when to start a standby, on which nodes, and whether it is ready for an attempt.

    cold attempt -> its first step -> a standby on each node imports what rank 0 had imported -> the next attempt is handed
    to it, rank by rank, through ``warm/client.py``; what does not fit is started cold there

Nothing depends on a standby. Warm start is off where the command is not plainly a Python program or memory is tight.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ftsupervise.guard import heartbeat
from ftsupervise.guard.heartbeat import Imports
from ftsupervise.host import processes
from ftsupervise.ranks import shm_dir
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import read_record
from ftsupervise.scheduler.allocation import STANDBYS, Allocation
from ftsupervise.warm.client import COLD
from ftsupervise.warm.pythons import PythonCommand, parse

AUTO = "auto"
_WORTH = 1.0  # seconds from a rank's start to its first line after the imports; below this a restart is not the imports
_DOUBTS = 4
_MEANWHILE = 10.0  # seconds that a standby may take besides its imports
# The end of one standby does not end the others.
_STEP = (f"--job-name={STANDBYS}", "--open-mode=append", "--no-kill", "--wait=0")
_TRIES = 5  # standbys of one job
_LEAVE_WITHIN = 2.0  # seconds
_PROGRAMS = Path(__file__).parent


@dataclass(frozen=True)
class WarmSettings:
    """The setting: off, the modules that the run turns out to import, or the modules named here."""

    on: bool = False
    modules: tuple[str, ...] = ()


def wanted(text: str) -> WarmSettings:
    """ "off", "auto" or "torch,numpy". Raises ValueError."""
    if text in ("off", AUTO):
        return WarmSettings(text == AUTO)
    names = tuple(text.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f'"{name}" is not the name of a module')
    return WarmSettings(True, names)


class Warm:
    """The standbys of one job."""

    def __init__(
        self,
        asked: WarmSettings,
        command: tuple[str, ...],
        allocation: Allocation,
        rundir: RunDir,
        say: Callable[[str], None],
    ) -> None:
        self._asked, self._allocation, self._say = asked, allocation, say
        self._env: dict[str, str] = {}
        self._rundir = rundir
        self._file: Path | None = None  # in the directory of the attempt that wrote it: no other one writes there
        self._attempt = 0
        self._dressed = False  # the attempt's command goes through ``client.py``
        self._doubts = 0  # warm attempts in a row that made no step
        self._found: PythonCommand | None = None
        self._tries = 0
        self._pid: int | None = None  # of the standby, or of the srun that holds the standbys of all nodes
        self._step = ""  # of the standbys, where Slurm has started them
        self._news = False  # the watcher of the run directory has news
        self._due = False  # it was the first step
        self._place: Path | None = None
        self._held = -1
        self._read = 0
        self._ready: dict[str, int] = {}  # node -> pid
        self._without: set[str] = set()  # nodes without warm start
        self._nodes = 1  # nodes that should have one
        self._takes = 0.0  # seconds from a rank's start to its first line after the imports
        self._due_by = 0.0  # monotonic: a standby that is not ready then is not waited for
        if asked.on:
            found = parse(command)
            if isinstance(found, PythonCommand):
                self._found = found
            elif asked.modules:  # without named modules it was not asked for explicitly
                say(f"restarts will be cold: {found}")

    # ------------------------------------------------------------------------------------------- for one attempt

    def begin(self, attempt: int, env: dict[str, str]) -> None:
        """Begin an attempt: ``env`` gets the path where its rank 0 lists its imports."""
        self.listen()  # replace one that has died meanwhile
        self._attempt, self._due = attempt, False
        self._env = {key: value for key, value in env.items() if not key.startswith("FTSUPERVISE_")}
        if self._found:  # also beside a standby: it may refuse, and end
            self._file = self._rundir.attempt(attempt) / "imports.json"
            env[heartbeat.ENV_IMPORTS] = str(self._file)

    def dress(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """``command``, or ``client.py`` with it where a standby is ready, or soon will be."""
        self.listen()
        cold = bool(self._doubts % 2)  # does the command itself fail, or its warm start?
        patience = self._takes if self._comes() and not cold else 0.0
        found = parse(command) if self._found and self._place and (self._ready or patience) else None
        self._dressed = isinstance(found, PythonCommand) and not cold
        if not isinstance(found, PythonCommand):
            return command
        proxy = (
            found.python,
            "-IS",
            str(_PROGRAMS / "client.py"),
            str(self._place),
            COLD if cold else f"{patience:.2f}",
            "--",
        )
        return (*command[: found.at], *proxy, *command[found.at :])

    def ended(self, *, stepped: bool) -> None:
        """Record whether the attempt made a step. After a warm attempt without a step the next one starts cold. If that happens
        twice and both cold starts succeed, warm start is switched off."""
        if self._dressed:
            self._doubts = 0 if stepped else self._doubts + 1
        elif self._doubts and stepped:
            self._doubts += self._doubts % 2
            if self._doubts >= _DOUBTS:
                self._say("restarts will be cold: attempts that began warm took no step, and those that began cold did")
                self.stop()
                self._found = None

    def _comes(self) -> bool:
        """Is a standby still importing on any node? It began before a rank that starts now, so the rank waits for it, but no
        longer than its own imports would take."""
        settled = len(self._ready.keys() | self._without)
        return self._pid is not None and settled < self._nodes and time.monotonic() < self._due_by

    def noticed(self) -> bool:
        """Is there news: a first step (rank 0 has listed its imports), or a message of a standby?
        Called by the thread that watches the run directory: it may hang with it."""
        self._news = self._news or self._look()
        return self._news

    def _look(self) -> bool:
        if self._pid is not None and self._place is not None:
            return not _lives(self._pid) or _size(self._place / "said") != self._read
        if self._found is None or self._file is None or self._due or self._tries >= _TRIES:
            return False
        try:
            seen = read_record(Imports, self._file)
        except (OSError, ValueError):
            return False
        if seen is None or seen.attempt != self._attempt:
            return False
        takes = seen.seconds
        if self._dressed and takes < _WORTH:  # from a fork of a standby that has died since: it imported nothing itself
            self._file = None
            return False
        self._takes = takes
        if not self._asked.modules and self._takes < _WORTH:
            self._found = None  # its imports are fast anyway
            return False
        self._due = True
        return True

    def tend(self) -> None:
        """Start a standby when it is due; read its messages. Costs nothing without news."""
        if not self._news:
            return
        self._news = False
        self.listen()
        if self._due and self._pid is None and self._found is not None:
            self._start(self._found)

    # ----------------------------------------------------------------------------------------- the standby itself

    def _start(self, found: PythonCommand) -> None:
        self._tries += 1
        self._due = False
        self._step = ""
        try:
            if self._place is None:
                self._place, self._held = _make_place()
            said = (self._place / "said").open("ab")
        except OSError as error:
            self._found = None
            self._say(f"restarts will be cold: no place for a standby's socket: {error.strerror}")
            return
        self._read = said.tell()
        self._without.clear()
        self._due_by = time.monotonic() + _MEANWHILE + 3 * self._takes  # the ranks train beside it
        orders = {"place": str(self._place), "imports": str(self._file), "modules": list(self._asked.modules)}
        words = [found.python, "-IS", str(_PROGRAMS / "start.py"), json.dumps(orders), str(found.flags), "--"]
        words += found.words
        if found.srun:
            silent = self._allocation.silent()
            nodes = tuple(node for node in self._allocation.nodes if node not in silent)
            self._nodes = len(nodes)
            output = str(self._place / "said")
            words = self._allocation.side_step(nodes, *words, output=output, options=_STEP, whole=True)
            theirs = {key: value for key, value in self._env.items() if not key.startswith("SLURM_")}
            env = {**theirs, **self._allocation.side_env()}
        else:
            env = self._env
        with said:
            try:
                child = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    env=env,
                    start_new_session=True,
                    preexec_fn=processes.die_with_parent(),
                )
            except OSError as error:
                self._found = None
                self._say(f"restarts will be cold: cannot start a standby: {error.strerror}")
                return
        child.returncode = 0  # reaped with everything else that is ours
        self._pid = child.pid

    def listen(self) -> None:
        """Read the standbys' messages; check whether they still run."""
        if self._place is None or self._pid is None:
            return
        try:
            with (self._place / "said").open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except OSError:
            text = b""
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        other = []
        for line in whole.decode("utf-8", "replace").splitlines():
            facts = _facts(line)
            if facts is not None:
                self._on_word(facts)
            elif not line.startswith("srun: ") or "error" in line:
                other.append(line)
        if other:
            self._say(f"a standby: {other[-1][:300]}")
        if not _lives(self._pid):
            self._pid = None
            self._ready.clear()

    def _on_word(self, facts: dict[str, object]) -> None:
        node = str(facts.get("node", ""))
        if "no" in facts:
            self._ready.pop(node, None)
            self._without.add(node)
            self._say(f"no warm start on {node}: {facts['no']}")
        elif facts.get("ready"):
            self._ready[node] = int(str(facts["pid"]))
            if self._found is not None and self._found.srun:  # otherwise it is our own step
                self._step = str(facts.get("step", ""))
            if len(self._ready) == self._nodes:
                self._say("a standby is ready on all nodes: restarts are warm")
        elif isinstance(skipped := facts.get("skipped"), dict) and skipped:
            self._say(f"the standby leaves out {'; '.join(f'{name}: {why}' for name, why in skipped.items())}")

    def not_ours(self, pids: list[int]) -> list[int]:
        """``pids`` below the supervisor without the standby; ranks below a serving standby belong to the attempt."""
        if self._pid is None:
            return pids
        serves = self._found is not None and not self._found.srun and self._pid in self._ready.values()
        apart = {self._pid} if serves else self.branch()
        return [pid for pid in pids if pid not in apart]

    def branch(self) -> frozenset[int]:
        """The standby and all below it."""
        return frozenset() if self._pid is None else frozenset({self._pid, *processes.below(self._pid)})

    def ranks(self) -> list[int]:
        """On this machine without Slurm: the ranks below the standby."""
        if self._pid is None or self._found is None or self._found.srun:
            return []
        return processes.children().get(self._pid, []) if self._pid in self._ready.values() else []

    def stop(self) -> None:
        """End the standbys, bounded; their ranks have ended."""
        pid, self._pid = self._pid, None
        if pid is not None:
            if self._step and _lives(pid):  # srun itself would kill them before they remove their files
                self._allocation.tell_step(self._step)
                _wait_for(pid, _LEAVE_WITHIN)
            processes.send([pid], signal.SIGTERM)
            _wait_for(pid, _LEAVE_WITHIN)
            processes.send([pid, *processes.below(pid)], signal.SIGKILL)
        if self._place is not None:
            shm_dir.clear(str(self._place))
            os.close(self._held)
            self._place = None


def _make_place() -> tuple[Path, int]:
    """A private folder with an unguessable name for every node, locked so that it is not removed as a leftover.
    Raises OSError."""
    shared = shm_dir.SHARED_MEMORY
    top = shared if os.access(shared, os.W_OK) else os.environ.get("TMPDIR") or "/tmp"
    base = shm_dir.new_base(top)
    held = shm_dir.own(base)
    if held is None:
        raise OSError(errno.ENOSPC, f"cannot make {base}")
    return Path(base), held


def _facts(line: str) -> dict[str, object] | None:
    try:
        facts = json.loads(line)
    except ValueError:
        return None
    return facts if isinstance(facts, dict) and "node" in facts else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _wait_for(pid: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while _lives(pid) and time.monotonic() < until:
        _reap(pid)
        time.sleep(0.01)


def _lives(pid: int) -> bool:
    return processes.identity(pid) is not None


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
