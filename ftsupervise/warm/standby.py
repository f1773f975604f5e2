"""A standby waits to become the next attempt: it has imported the ranks' modules, and forks one child for each rank.

It runs nothing of the user's program, so it is as clean after a hundred attempts as before the first. An import may
leave things behind that a fork does not carry over (threads, open devices and sockets, processes, an initialised GPU).
They are looked for after each one; a module that leaves such a thing is not imported by the next try.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

from ftsupervise.host import ownership, processes
from ftsupervise.host.memory import HostMemory
from ftsupervise.warm.rank_setup import Judge, first_on_path
from ftsupervise.warm.serve import Serving

ENV = "FTSUPERVISE_STANDBY"
_TRIES = 6
_LOOK_WITHIN = 2.0  # seconds; less than client.py waits for an answer
_THREAD_ENDS = 0.5  # seconds for a thread that was asked to end, as pools do before a fork
_LEAST_FREE = 2 << 30  # bytes
_LEAST_SHARE = 0.1  # of the memory
_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # this one
_NEVER = {"mpi4py", "horovod", "tensorflow"}  # they join something, or start threads, when they are imported


def stand_by(text: str) -> None:
    """Stand by; return in a child that is to go on as a rank. ``text``: its orders as JSON, see ``warm/standbys.py``."""
    orders: dict[str, Any] = json.loads(text)
    _set_environment(orders)
    coming = orders.pop("coming", None)
    if coming is not None:
        os.set_inheritable(coming, False)  # a new start gives up the lock: clients have waited long enough
    listed = json.loads(ownership.read_trusted(orders["imports"])) if orders.get("imports") else {}
    standby = Standby(orders, listed)
    if standby.memory_is_tight():
        standby.report({"refused": "there is too little free memory on this node"})
        os._exit(0)
    standby.load()
    judge = Judge(standby.cpus, standby.env, int(orders["flags"]))
    Serving(orders["place"], judge, standby.report, standby.changed_module, coming).serve()
    standby.drop_ours()


def _set_environment(orders: dict[str, Any]) -> None:
    """Set the environment of the ranks: modules read it when they are imported."""
    del os.environ[ENV]
    if orders.get("pythonpath") is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = orders["pythonpath"]


class Standby:
    """One process of one node, until it serves."""

    def __init__(self, orders: dict[str, Any], listed: dict[str, Any]) -> None:
        self.orders = orders
        self.modules: list[str] = orders.get("modules") or listed.get("modules", [])  # a declared list wins
        self.ours: list[str] = listed.get("ours", []) if is_theirs() else []  # of this package, as the ranks import it
        self.cpus = int(listed.get("cpus") or orders.get("cpus") or 0)  # that a rank has; 0: not known
        self.rss = int(listed.get("rss", 0))
        self.skipped: dict[str, str] = orders.setdefault("skipped", {})
        self.missing: dict[str, str] = {}  # of the modules that the user has named
        self.env = dict(os.environb)
        self.stamps: dict[str, int] = {}
        self._checked: bytes | None = None  # for the ranks of this attempt, and nothing had changed

    def report(self, facts: dict[str, Any]) -> None:
        """Send one line to the supervisor, on standard output."""
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}" if "SLURM_STEP_ID" in os.environ else ""
        line = json.dumps({"node": node, "pid": os.getpid(), "step": step, **facts}) + "\n"
        try:
            os.write(1, line.encode())
        except OSError:
            return

    def memory_is_tight(self) -> bool:
        """Return whether memory is tight here, the host's or the job's.

        Unknown counts as enough: an error costs one process.
        """
        try:
            rooms = HostMemory().rooms()
        except (OSError, ValueError):
            return False
        return any(free < max(_LEAST_FREE + 2 * self.rss, int(_LEAST_SHARE * total)) for free, total in rooms)

    # ----------------------------------------------------------------------------------------------------- importing

    def load(self) -> None:
        """Import the modules; start again without those that leave something behind. Ends the process if that never works."""
        everywhere = os.sched_getaffinity(0)
        if 0 < self.cpus < len(everywhere):  # thread pools take their size from the CPUs at this moment
            os.sched_setaffinity(0, sorted(everywhere)[: self.cpus])
        started = time.monotonic()
        before = _traces()
        found = self._import(before)
        if found:
            self.skipped.update(found)
            if len(self.skipped) < _TRIES:
                self._start_again()
            self.report({"refused": "; ".join(f"{name} {why}" for name, why in self.skipped.items())})
            os._exit(0)
        os.sched_setaffinity(0, everywhere)
        self._import_ours()
        self.stamps = _stamps(self.ours)
        gc.collect()
        gc.freeze()  # the collector of a child need not touch, and so copy, what all share
        self.report(
            {
                "modules": len(sys.modules),
                "seconds": round(time.monotonic() - started, 2),
                "skipped": {**self.skipped, **self.missing},
            }
        )

    def _import(self, before: set[str]) -> dict[str, str]:
        """Return the first top-level name whose import leaves something behind, with a description of it."""
        last = ""
        for name in self.modules:
            top = name.partition(".")[0]
            if top in self.skipped or top in _NEVER or name in self.skipped or name in sys.modules:
                continue
            if last and top != last and (left := _left_behind(before)):
                return {last: left}
            last = top
            try:
                with warnings.catch_warnings():
                    importlib.import_module(name)
            except Exception as problem:  # the rank may fail on it too: that is not for the standby to decide
                if self.orders.get("modules"):  # but a user who named it is notified
                    self.missing[name] = f"cannot be imported here: {problem}"[:200]
        left = _left_behind(before) or _bad_fork()
        return {last or "the interpreter's start": left} if left else {}

    def _import_ours(self) -> None:
        """Import what the ranks' guard consists of. Nothing of it leaves anything behind; of frameworks it imports those that
        are here already."""
        try:
            for name in self.ours:
                if not self.skipped or not name.startswith("ftsupervise.integrations"):
                    importlib.import_module(name)
        except Exception:  # the ranks import it themselves then
            self.ours = []

    def drop_ours(self) -> None:
        """Forget, in the child, the modules of this package that its rank would not have found imported here."""
        kept = () if self._has_another() else self.ours
        for name in [name for name in sys.modules if name == "ftsupervise" or name.startswith("ftsupervise.")]:
            if name not in kept:
                del sys.modules[name]

    def _has_another(self) -> bool:
        """Return whether the rank would find another ftsupervise beside its program."""
        first = first_on_path(sys.orig_argv[1 + int(self.orders["flags"]) :])
        if first is None:
            return False
        beside = os.path.join(first, "ftsupervise")
        return os.path.lexists(beside) and os.path.realpath(beside) != _PACKAGE

    def _start_again(self) -> NoReturn:
        os.environ.clear()
        os.environb.update(self.env)
        hook = str(Path(__file__).parent)
        path = self.orders.get("pythonpath")
        os.environ["PYTHONPATH"] = f"{hook}{os.pathsep}{path}" if path else hook
        os.environ[ENV] = json.dumps(self.orders)
        words = sys.orig_argv
        os.execvp(words[0], words)

    def changed_module(self, attempt: bytes) -> str:
        """Return the module that changed on disk since its import, or "".

        Checked once for all ranks of an attempt (b"": unknown), for as long as ranks can wait.
        """
        if attempt and attempt == self._checked:
            return ""
        until = time.monotonic() + _LOOK_WITHIN
        for path, stamp in self.stamps.items():
            if _stamp(path) != stamp:
                return path
            if time.monotonic() > until:  # ranks wait for it
                break
        self._checked = attempt
        return ""


def is_theirs() -> bool:
    """Return whether this package is the one that a rank would import, but for files beside its program."""
    for finder in sys.meta_path:
        look = getattr(finder, "find_spec", None)
        found = look("ftsupervise", None) if look is not None else None
        if found is not None:
            return os.path.realpath(os.path.dirname(found.origin or "")) == _PACKAGE
    return False


def _traces() -> set[str]:
    """Return the resources that a fork would not carry over: a rank has the descriptors of a fresh process, and no others."""
    found = {f"process {pid}" for pid in _children()}
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"descriptor {name}, {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:  # the one that listed the folder
            continue
    return found


def _left_behind(before: set[str]) -> str:
    """Return the new resources since the last snapshot, in words; "" if none."""
    new = sorted(_traces() - before)
    if new:
        return f"opened or started {', '.join(new)[:200]}"
    if _threads():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()  # pools that know about forks (OpenBLAS) end theirs before one
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        until = time.monotonic() + _THREAD_ENDS
        while _threads() and time.monotonic() < until:
            time.sleep(0.005)
        if threads := _threads():
            return f"left {threads} threads"
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return "initialised CUDA" if cuda is not None and cuda.is_initialized() else ""


def _threads() -> int:
    """Return the threads besides this one.

    One that is being taken down does not count: it was joined, and has had no turn since.
    """
    living = 0
    for name in os.listdir("/proc/self/task"):
        found = processes.stat_fields(f"/proc/self/task/{name}/stat")
        if found is not None:
            living += found[1][0] not in "ZX" and not processes.is_exiting(found[1])
    return living - 1


def _bad_fork() -> str:
    """Return why torch's CUDA would refuse a child; "" if it would not. Only a child can tell."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None:
        return ""
    pid = os.fork()
    if pid == 0:
        bad = True
        try:
            bad = bool(cuda._is_in_bad_fork())
        finally:
            os._exit(1 if bad else 0)
    bad_there = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    return "touched CUDA, which no fork of it could use" if bad_there else ""


def _children() -> list[str]:
    """Return the children, asked for after each module: a look at every process of the host would take a hundred times
    longer.
    """
    try:
        return Path("/proc/thread-self/children").read_text("ascii").split()
    except OSError:
        return []


def _stamps(ours: list[str]) -> dict[str, int]:
    """Return the paths that change when a package is installed or edited.

    These are the folders that packages are installed in, and the file of each module but Python's own, of this package
    only ``ours``. About 1 µs each: torch has 800.
    """
    folders = {entry for entry in sys.path if os.path.basename(entry) in ("site-packages", "dist-packages")}
    installed = tuple(f"{folder}/" for folder in folders)
    never = (f"{os.path.dirname(os.__file__)}/", f"{Path(__file__).parents[1]}/")
    files = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    read = {file for file in files if file and (file.startswith(installed) or not file.startswith(never))}
    read |= {str(getattr(sys.modules[name], "__file__", None) or "") for name in ours} - {""}
    return {
        path: stamp for path in (*folders, *read) if (stamp := _stamp(path))
    }  # the folders first: time may be short


def _stamp(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
