"""A standby waits to become the next attempt: it has imported the ranks' modules, and forks one child for each rank.

It stands alone because it runs in the interpreter of the training, where ``sitecustomize`` begins it.

It runs nothing of the user's program, so it is as clean after a hundred attempts as before the first. An import may
leave things behind that a fork does not carry over (threads, open devices and sockets, processes, an initialised GPU).
They are looked for after each one; a module that leaves such a thing is not imported by the next try.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import marshal
import mmap
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
import zipimport
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ftsupervise.host import memory, ownership, processes
from ftsupervise.host.memory import HostMemory
from ftsupervise.ranks import shm_dir
from ftsupervise.warm import client

# A serving standby: for each request it forks one child and returns its exit status. It never blocks: each connection has its
# own buffer and bound, and connections of other accounts are not read.

_LARGEST = 64 << 20  # bytes of a request
_MOST_FDS = 4096
_READ_WITHIN = 5.0  # seconds from the connection to the complete request
_GO_WITHIN = 10.0  # seconds a child waits for the start message
_CLEAR_WITHIN = 15.0  # seconds for processes of an older attempt to die of SIGKILL; less than client.py waits
_REFUSE_WITHIN = 5.0  # the same, before a rank that does not fit is refused; less than client.py waits for that
_LOOK = 5.0  # milliseconds between two checks of that
_AGAIN = 0.2  # seconds between two SIGKILLs for it
_PARENT = 5.0  # seconds between two looks whether whoever started this standby is there
_LEFTOVERS = 5.0  # seconds between SIGTERM and SIGKILL for processes that the ranks left running
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


@dataclass
class Caller:
    """One connection of a rank, and the child that was forked for it."""

    link: socket.socket
    until: float  # monotonic: it is dropped then, unless it has a child
    data: bytearray = field(default_factory=bytearray)
    request: RankRequest | None = None
    fds: list[int] = field(default_factory=list)
    complete: bool = False  # its request is complete; the fork waits until no process of an older attempt lives
    refused: str = ""  # or it gets this refusal then: its cold start must not meet an older attempt either
    pid: int = 0

    @property
    def attempt(self) -> int:
        return self.request.attempt if self.request is not None else 0

    def receive(self) -> bool:
        """Take the data it has sent. Return False when it has ended, or has sent too much."""
        try:
            data, received, flags, _ = socket.recv_fds(self.link, 1 << 20, client.FDS_AT_ONCE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.fds += received
        if self.request is None:
            self.data += data
        too_much = flags & socket.MSG_CTRUNC or len(self.data) > _LARGEST or len(self.fds) > _MOST_FDS
        return bool(data) and not too_much

    def send(self, data: bytes) -> None:
        try:
            self.link.send(data)
        except OSError:  # it has gone: its end is seen when it is read
            pass

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        self.link.close()


class Entrance:
    """PLACE/NODE.sock, where ranks connect, and the pipe through which signals arrive."""

    def __init__(self, place: str, poll: select.poll) -> None:
        """Open the socket and the pipe. Raises OSError."""
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.path = Path(place) / f"{node}.sock"
        self.path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.listener.bind(str(self.path))
        self.path.chmod(0o600)
        self.listener.listen(1024)
        self.path.with_suffix(".coming").unlink(missing_ok=True)  # waiting clients now find the socket
        self.signals, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.old_wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        poll.register(self.listener, select.POLLIN)
        poll.register(self.signals, select.POLLIN)

    def accept(self) -> socket.socket | None:
        """Return a connection of a process of this account."""
        try:
            link, _ = self.listener.accept()
        except OSError:
            return None
        if client.peer(link)[1] != os.geteuid():
            link.close()
            return None
        link.setblocking(False)
        return link


class Leftovers:
    """The processes below us that ranks of an ended attempt have left: SIGTERM first, SIGKILL when they stay."""

    def __init__(self) -> None:
        self.kill_at: float | None = None  # monotonic
        self._kill_again = 0.0  # monotonic: not sooner

    def _send(self, number: int) -> bool:
        return bool(processes.send(processes.below(os.getpid(), zombies=True), number))

    def ask_to_end(self) -> None:
        if self._send(signal.SIGTERM):
            self.kill_at = time.monotonic() + _LEFTOVERS

    def kill(self) -> None:
        self.kill_at = None
        self._send(signal.SIGKILL)

    def are_gone(self) -> bool:
        """Return whether none is alive or still dying (and holding its memory). Live ones are killed."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # orphans of a rank become our children
            self.kill_at = None
            return True
        if (now := time.monotonic()) >= self._kill_again:
            self._kill_again = now + _AGAIN
            self._send(signal.SIGKILL)
        return False


class Serving:
    """A standby that serves. ``changed_module(attempt)`` names a module that changed on disk since its import. ``coming``: the
    descriptor whose lock has said until now that this process is on its way."""

    def __init__(
        self,
        place: str,
        judge: Judge,
        report: Callable[[dict[str, Any]], None],
        changed_module: Callable[[bytes], str],
        coming: int | None = None,
        parent: int | None = None,
    ) -> None:
        """``parent``: who started this process; without it nothing would end it: slurmstepd signals its own children alone."""
        self.judge, self.report, self.changed_module, self.parent = judge, report, changed_module, parent
        processes.become_subreaper()
        processes.set_name(processes.STANDBY.encode())
        if shm_dir.create_locked(place) is None:
            self.report({"refused": f"cannot make {place}, or another user owns it"})
            os._exit(1)
        self.poll = select.poll()
        self.entrance = Entrance(place, self.poll)
        if coming is not None:
            os.close(coming)
        self.leftovers = Leftovers()
        self.callers: dict[int, Caller] = {}
        self.newest = 0  # attempt of which a rank was asked for
        self.leaving = False
        self.stale = ""  # the module that has changed on disk: this standby ends, and a new one imports it again

    def serve(self) -> None:
        """Serve. Returns only in a child that continues as a rank."""
        self.report({"ready": True})
        while True:
            for fd, event in self.poll.poll(self._poll_timeout()):
                if fd == self.entrance.listener.fileno():
                    self._accept()
                elif fd == self.entrance.signals:
                    self._on_signal(os.read(fd, 4096))
                elif fd in self.callers:
                    self._on_caller(self.callers[fd], event)
            if self._fork_waiting():
                return
            self._check_bounds()

    # -------------------------------------------------------------------------------------------------------- waiting

    def _poll_timeout(self) -> float:
        """Return the milliseconds until the next bound."""
        if any(one.complete and not one.pid for one in self.callers.values()):
            return _LOOK
        bounds = [time.monotonic() + _PARENT, *(caller.until for caller in self.callers.values() if not caller.pid)]
        if self.leftovers.kill_at is not None:
            bounds.append(self.leftovers.kill_at)
        return max(0.0, (min(bounds) - time.monotonic()) * 1000 + 1)

    def _check_bounds(self) -> None:
        now = time.monotonic()
        for caller in [one for one in self.callers.values() if not one.pid and now >= one.until]:
            late = "processes of an older attempt do not die" if caller.complete else "timed out"
            self._refuse(caller, caller.refused or late)
        if self.leftovers.kill_at is not None and now >= self.leftovers.kill_at:
            self.leftovers.kill()
        if self.parent not in (None, os.getppid()):
            self._leave()
        if (self.leaving or self.stale) and not self.callers:
            self.entrance.path.unlink(missing_ok=True)
            self.leftovers.kill()
            memory.remove_empty(str(self.entrance.path.parent))
            os._exit(0)

    def _on_signal(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers:
            self._leave()
        self._reap()

    def _leave(self) -> None:
        """The job is ending: ranks may be saving, so we do not end them."""
        self.leaving = True
        self.entrance.path.unlink(missing_ok=True)

    def _reap(self) -> None:
        """Report each ended rank to its client."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            caller = next((one for one in self.callers.values() if one.pid == pid), None)
            if caller is not None:
                caller.send(status.to_bytes(4, "little"))
                self._drop(caller)

    def _drop(self, caller: Caller) -> None:
        self._unwatch(caller)
        del self.callers[caller.link.fileno()]
        caller.close()
        if caller.pid and not any(one.pid for one in self.callers.values()):
            self.leftovers.ask_to_end()

    # -------------------------------------------------------------------------------------------------------- callers

    def _accept(self) -> None:
        link = self.entrance.accept()
        if link is None:
            return
        if self.leaving:
            link.close()
            return
        self.callers[link.fileno()] = Caller(link, time.monotonic() + _READ_WITHIN)
        self.poll.register(link, select.POLLIN | select.POLLRDHUP)

    def _on_caller(self, caller: Caller, event: int) -> None:
        """Read on, or react to its end."""
        if caller.pid:
            if event & (select.POLLHUP | select.POLLRDHUP | select.POLLERR):  # the rank's client was killed
                self._kill_rank(caller)
            return
        if not caller.receive():
            self._drop(caller)
        elif caller.request is None:
            request = read_request(caller.data)
            if request is not None:
                caller.data.clear()
                self._judge(caller, request)
        elif not caller.complete and len(caller.fds) > len(caller.request.fds):
            caller.complete, caller.until = True, time.monotonic() + _CLEAR_WITHIN

    def _judge(self, caller: Caller, request: RankRequest) -> None:
        """Ask for the descriptors of a rank that fits. Another one is refused once no process of an older attempt lives."""
        caller.request = request
        if caller.attempt < self.newest:
            self._refuse(caller, "a newer attempt has begun")
            return
        self.newest = caller.attempt
        try:
            if not self.stale and (changed := self.changed_module(request.env.get(b"FTSUPERVISE_ATTEMPT", b""))):
                self.report({"refused": f"{changed} has changed"})
                self.stale = changed
            if self.stale:
                raise Incompatible(f"{self.stale} has changed since it was imported")
            if request.cold:
                raise Incompatible("an attempt that began warm took no step")
            self.judge.fits(request)
            caller.until = time.monotonic() + _READ_WITHIN  # for the descriptors
            caller.link.send(b"send")
        except (Incompatible, OSError, TypeError, AttributeError) as problem:
            caller.refused = str(problem) or type(problem).__name__
            caller.complete, caller.until = True, time.monotonic() + _REFUSE_WITHIN

    def _kill_rank(self, caller: Caller) -> None:
        """Send SIGKILL to the rank and its group; its end is reaped as any other."""
        self._unwatch(caller)
        for kill in (os.killpg, os.kill):
            try:
                kill(caller.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    def _unwatch(self, caller: Caller) -> None:
        """Send the rank's end repeatedly, whatever else is asked."""
        try:
            self.poll.unregister(caller.link)
        except KeyError:
            return

    def _fork_waiting(self) -> bool:
        """Fork for waiting ranks; return True in a child that continues as a rank."""
        for caller in [one for one in self.callers.values() if one.complete and not one.pid]:
            if caller.attempt < self.newest:
                self._refuse(caller, "a newer attempt has begun")
            elif caller.refused:
                if self._older_attempts_are_gone(caller):
                    self._refuse(caller, caller.refused)
            elif (
                self._older_attempts_are_gone(caller)
                and caller.request is not None
                and self._fork(caller, caller.request)
            ):
                return True
        return False

    def _fork(self, caller: Caller, request: RankRequest) -> bool:
        """Fork; return True in the child."""
        try:
            self.judge.folder(caller.fds[0])
            die_with_parent = processes.die_with_parent(signal.SIGKILL)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pid = os.fork()
        except (Incompatible, OSError, TypeError) as problem:
            self._refuse(caller, str(problem) or type(problem).__name__)
            return False
        if pid == 0:
            self._become(caller, request, die_with_parent)
            return True
        for fd in caller.fds:
            os.close(fd)
        caller.fds.clear()
        caller.pid = pid
        self.poll.modify(caller.link, select.POLLRDHUP)
        return False

    def _refuse(self, caller: Caller, why: str) -> None:
        caller.send(f"{why}\n".encode("utf-8", "replace")[:4000])
        self._drop(caller)

    def _older_attempts_are_gone(self, caller: Caller) -> bool:
        """Return whether no process of an older attempt is alive."""
        if any(one.pid and one.attempt == caller.attempt for one in self.callers.values()):
            return True
        self._reap()
        return self.leftovers.are_gone()

    # ------------------------------------------------------------------------------------------------------- the child

    def _become(self, caller: Caller, request: RankRequest, die_with_parent: Callable[[], None]) -> None:
        """Become the rank, in the child; report it and wait for the start message. Returns only then."""
        link = caller.link
        try:
            signal.set_wakeup_fd(self.entrance.old_wakeup)
            here, *fds = caller.fds
            number = adopt_descriptors(request.fds, fds, here, caller.link.fileno())
            self._forget_descriptors()
            link = socket.socket(fileno=number)
            link.settimeout(_GO_WITHIN)
            die_with_parent()
            become(request, self.judge.set)
            me = os.pidfd_open(os.getpid())
            socket.send_fds(link, [b"ready"], [me])
            os.close(me)
            restore_signals(request, (signal.SIGCHLD, signal.SIGTERM, *_IGNORED))
            if link.recv(2) != b"go":
                os._exit(1)
            link.close()
        except (Cannot, OSError, ValueError) as problem:
            try:
                link.send(f"{problem}\n".encode("utf-8", "replace"))
            except OSError:
                pass
            os._exit(1)
        except BaseException:  # a fork of the standby must not go on in its loop
            traceback.print_exc()
            os._exit(1)

    def _forget_descriptors(self) -> None:
        """Forget these descriptors in the child, which has closed them: their numbers may be reused."""
        self.entrance.listener.detach()
        for caller in self.callers.values():
            caller.link.detach()
            caller.fds.clear()


# ------------------------------------------------------------------------------------------


ENV = "FTSUPERVISE_STANDBY"
_TRIES = 6
_LOOK_WITHIN = 2.0  # seconds; less than client.py waits for an answer
_THREAD_ENDS = 0.5  # seconds for a thread that was asked to end, as pools do before a fork
_LEAST_FREE = 2 << 30  # bytes
_LEAST_SHARE = 0.1  # of the memory
_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # this one
_NEVER = {"mpi4py", "horovod", "tensorflow"}  # they join something, or start threads, when they are imported


def stand_by(text: str) -> None:
    """Stand by; return in a child that is to go on as a rank. ``text``: its orders as JSON, see ``warm/restarts.py``."""
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
    Serving(orders["place"], judge, standby.report, standby.changed_module, coming, orders.get("parent")).serve()
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
        first = first_on_path(processes.own_words()[1 + int(self.orders["flags"]) :])
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
        words = processes.own_words()
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


# ------------------------------------------------------------------------------------------
# A rank's request: may a fork become that rank (``Judge``), and how it does (``become``).
#
# It may not if anything differs that an import may have read, or that a fork cannot change. All else is set again: what a
# process inherits from its parent, and what an interpreter sets up at its start. Two things cannot be set again: the seed of
# ``hash()`` for text (all ranks of a node have the standby's, unless PYTHONHASHSEED is set), and warnings that a module gives
# when it is imported (they were given to the standby's log).


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
