"""One trial: a sandbox of three nodes, a launcher, a fault; what happened, by the job's stamps and its ranks' ends."""

from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery.launchers import Launcher
from ftsupervise.host.memory import SHARED_MEMORY
from ftsupervise.ranks import shm_dir
from ftsupervise.sandbox import Sandbox, temporary
from ftsupervise.snapshots import room

FAULTS = ("SIGKILL", "exit 1", "SIGSTOP", "slurmd", "crash")
WORDS = {
    "SIGKILL": "SIGKILL to a rank",
    "exit 1": "a rank leaves with exit 1",
    "SIGSTOP": "SIGSTOP to a rank (a hang)",
    "slurmd": "slurmd killed on a node, its ranks live on",
    "crash": "a node crashes: slurmd and its ranks end",
}
RANKS = 4
_COLD = 180.0  # seconds for the first steps
# Slurm's own default for KillWait; SlurmdTimeout is 300 s by default, which nobody wants to wait for here
SHAPE: dict[str, Any] = {"nodes": 3, "gpus_per_node": 0, "kill_wait": 30, "slurmd_timeout": 6}


@dataclass
class Event:
    at: float  # seconds, monotonic
    what: str
    rank: int
    pid: int
    step: int


@dataclass
class Trial:
    """Seconds after the fault, None for what did not happen within the bound."""

    launcher: str
    fault: str
    cold: float | None = None  # from the launch to the first step, before the fault
    acts: float | None = None  # the first of the surviving ranks is down
    down: float | None = None  # all old ranks are
    process: float | None = None  # the first process of the next attempt has begun
    first: float | None = None  # its first step
    new: float | None = None  # its first step that had not been made before
    stall: float | None = None  # from the last step of the old ranks to the first new one
    redone: int | None = None
    load: float = 0.0
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Events:
    """The job's file of stamps, followed, and every process that stamped, held by a pidfd: told apart even when numbers
    are used again."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, list[Event]()
        self.ended: dict[int, float] = {}
        self._fds: dict[int, int] = {}  # fd -> pid
        self._read = 0
        self._poll = select.poll()

    def look(self, patience: float = 0.005) -> list[Event]:
        """What is new since the last look; waits so many seconds for somebody's end."""
        for fd, _ in self._poll.poll(patience * 1000):
            self.ended.setdefault(self._fds[fd], time.monotonic())
            self._poll.unregister(fd)
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        new = []
        for line in data.decode().splitlines():
            at, what, rank, pid, step = line.split()
            new.append(Event(int(at) / 1e9, what, int(rank), int(pid), int(step)))
            if what == "process":
                self._hold(int(pid))
        self.seen += new
        return new

    def _hold(self, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.ended.setdefault(pid, time.monotonic())
            return
        self._fds[fd] = pid
        self._poll.register(fd, select.POLLIN)

    def until(self, question: Any, bound: float) -> bool:
        end = time.monotonic() + bound
        while not question():
            if time.monotonic() > end:
                return False
            self.look()
        return True

    def pids(self, before: float = float("inf")) -> list[int]:
        return [event.pid for event in self.seen if event.what == "process" and event.at < before]

    def steps(self, pids: list[int]) -> list[Event]:
        return [event for event in self.seen if event.what == "step" and event.pid in pids]

    def close(self) -> None:
        """Nobody of the job is left."""
        for fd in self._fds:
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                pass
            os.close(fd)


@dataclass
class Stage:
    """Where a launcher plays: its sandbox, its folder and the environment of the job."""

    sandbox: Sandbox
    folder: Path
    env: dict[str, str]
    events: Events


@contextmanager
def stage(launcher: Launcher, **more: str) -> Iterator[Stage]:
    top = Path(tempfile.mkdtemp(prefix="fts-rec-", dir="/tmp"))
    folder = top / "run"
    folder.mkdir()
    events = Events(folder / "events")
    before = set(Path(SHARED_MEMORY).iterdir())
    try:
        with temporary(top / "slurm", **SHAPE) as sandbox:
            own = {
                "RECOVERY_EVENTS": str(events.path),
                "RECOVERY_FOLDER": str(folder),
                "RECOVERY_PORT": str(_free_port()),
                "FTSUPERVISE_STATE_DIR": str(folder / "state"),
                "TMPDIR": str(folder),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "PYTHONWARNINGS": "ignore",
            }
            env = {**sandbox.env(), **own, **launcher.env, **more}
            yield Stage(sandbox, folder, env, events)
    finally:
        events.close()
        shutil.rmtree(top, ignore_errors=True)
        _clear_pages(set(Path(SHARED_MEMORY).iterdir()) - before)
        room.remove_leftovers()


def _clear_pages(found: set[Path]) -> None:
    """The pages of agents that went down with their sandbox. Those that somebody holds are another run's."""
    for base in found:
        if not re.fullmatch(rf"ftsupervise-{os.getuid()}-[0-9a-f]{{16}}", base.name):
            continue
        try:
            fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shm_dir.clear(str(base))
        except OSError:
            continue
        finally:
            os.close(fd)


def play(launcher: Launcher, fault: str, bound: float) -> Trial:
    """One fault under one launcher, followed to the first new step or for ``bound`` seconds."""
    trial = Trial(launcher.name, fault)
    own = {"RECOVERY_FAULT": fault, "RECOVERY_AT": str(launcher.at)}
    with stage(launcher, **own) as on:
        events = on.events
        began = time.monotonic()
        launcher.submit(on.folder, on.env)
        trial.load = os.getloadavg()[0]
        if not events.until(lambda: any(e.what == "fault" for e in events.seen), _COLD + launcher.at / 10):
            trial.note = "never came to the fault"
            return trial
        at = next(e.at for e in events.seen if e.what == "fault")
        if fault in ("slurmd", "crash"):
            at = time.monotonic()
            on.sandbox.node("node-1", "kill" if fault == "slurmd" else "crash")
        old = events.pids(before=at)
        trial.cold = events.steps(old)[0].at - began
        events.until(lambda: _new_step(events, old, launcher.goes_on) is not None, bound)
        _measure(trial, events, old, at, launcher.goes_on)
        _keep(on, trial)
    return trial


def _new_step(events: Events, old: list[int], goes_on: bool) -> Event | None:
    """The first that the ranks as they were had not made; by whom is left, where ``goes_on``."""
    if goes_on:
        fault = next(event for event in events.seen if event.what == "fault")
        return next((event for event in events.steps(old) if event.step > fault.step), None)
    last = max(event.step for event in events.steps(old))
    fresh = [pid for pid in events.pids() if pid not in old]
    return next((event for event in events.steps(fresh) if event.step > last), None)


def _measure(trial: Trial, events: Events, old: list[int], at: float, goes_on: bool) -> None:
    victims = {e.pid for e in events.seen if e.what == "fault"} if trial.fault != "slurmd" else set()
    survivors = [end for pid, end in events.ended.items() if pid in old and pid not in victims]
    downs = [events.ended.get(pid) for pid in old]
    fresh = [e for e in events.seen if e.what == "process" and e.pid not in old]
    steps = events.steps([e.pid for e in fresh])
    new = _new_step(events, old, goes_on)
    before = [event for event in events.steps(old) if event is not new and (new is None or event.at < new.at)][-1]
    trial.acts = min(survivors) - at if survivors else None
    trial.down = max(d for d in downs if d is not None) - at if None not in downs else None
    trial.process = fresh[0].at - at if fresh else None
    trial.first = steps[0].at - at if steps else None
    if new is not None:
        trial.new, trial.stall = new.at - at, new.at - before.at
        trial.redone = sum(1 for e in steps if e.step <= before.step and e.at < new.at)


def _keep(on: Stage, trial: Trial) -> None:
    """With RECOVERY_KEEP=DIR the trial's own files stay there, to be read afterwards."""
    if keep := os.environ.get("RECOVERY_KEEP"):
        name = f"{trial.launcher}-{trial.fault.replace(' ', '')}-{time.monotonic():.0f}"
        shutil.copytree(
            on.folder, Path(keep) / name, ignore=shutil.ignore_patterns("*.pt"), ignore_dangling_symlinks=True
        )


def _free_port() -> int:
    """The first of some ports that are likely free: each new start of a loop takes the next one."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1]) % 20000 + 10000
