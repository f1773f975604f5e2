"""A serving standby: for each request it forks one child and returns its exit status. It never blocks: each connection has its
own buffer and bound, and connections of other accounts are not read.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftsupervise.host import processes
from ftsupervise.ranks import shm_dir
from ftsupervise.warm import client as proxy
from ftsupervise.warm import rank_setup
from ftsupervise.warm.compat import Incompatible, Judge
from ftsupervise.warm.rank_setup import Caller, whole

_LARGEST = 64 << 20  # bytes of a request
_MOST_FDS = 4096
_READ_WITHIN = 5.0  # seconds from the connection to the whole request
_GO_WITHIN = 10.0  # seconds a child waits for the start message
_CLEAR_WITHIN = 15.0  # seconds for processes of an older attempt to die of SIGKILL; less than client.py waits
_REFUSE_WITHIN = 5.0  # the same, before a rank that does not fit is refused; less than client.py waits for that
_LOOK = 5.0  # milliseconds between two checks of that
_AGAIN = 0.2  # seconds between two SIGKILLs for it
_LEFTOVERS = 5.0  # seconds between SIGTERM and SIGKILL for processes that the ranks left running
_DEAF = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
_PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 15, 36


class Serving:
    """Listens at PLACE/NODE.sock. ``fresh(attempt)`` names a module that changed on disk since its import. ``coming``: the
    descriptor whose lock has said until now that this process is on its way."""

    def __init__(
        self,
        place: str,
        judge: Judge,
        tell: Callable[[dict[str, Any]], None],
        fresh: Callable[[bytes], str],
        coming: int | None = None,
    ) -> None:
        self.tell, self.fresh, self.coming = tell, fresh, coming
        self.judge = judge
        self.place = Path(place)
        self.callers: dict[int, Caller] = {}
        self.newest = 0  # attempt of which a rank was asked for
        self.leaving = False
        self.stale = ""  # the module that has changed on disk: this standby ends, and a new one imports it again
        self.kill_at: float | None = None  # monotonic: SIGKILL for processes left by an ended attempt
        self.kill_again = 0.0  # monotonic: not sooner
        self.poll = select.poll()

    def serve(self) -> None:
        """Serve. Returns only in a child that continues as a rank."""
        self._listen()
        self.tell({"ready": True})
        while True:
            for fd, event in self.poll.poll(self._patience()):
                if fd == self.listener.fileno():
                    self._accept()
                elif fd == self.heard:
                    self._on_signal(os.read(fd, 4096))
                elif fd in self.callers:
                    self._on_caller(self.callers[fd], event)
            if self._fork_for_those_who_wait():
                return
            self._look_around()

    # ------------------------------------------------------------------------------------------------------ beginning

    def _listen(self) -> None:
        rank_setup.libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        rank_setup.libc.prctl(_PR_SET_NAME, processes.STANDBY.encode(), 0, 0, 0)
        node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        if shm_dir.own(str(self.place)) is None or not shm_dir.ours_alone(str(self.place)):
            self.tell({"refused": f"cannot make {self.place}, or another user owns it"})
            os._exit(1)
        self.name = self.place / f"{node}.sock"
        self.name.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.listener.bind(str(self.name))
        self.name.chmod(0o600)
        self.listener.listen(1024)
        self.name.with_suffix(".coming").unlink(missing_ok=True)  # waiting clients now find the socket
        if self.coming is not None:
            os.close(self.coming)
        self.heard, tell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.old_wakeup = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        for number in _DEAF:
            signal.signal(number, signal.SIG_IGN)
        self.poll.register(self.listener, select.POLLIN)
        self.poll.register(self.heard, select.POLLIN)

    # -------------------------------------------------------------------------------------------------------- waiting

    def _patience(self) -> float | None:
        bounds = [caller.until for caller in self.callers.values() if not caller.pid]
        if self.kill_at is not None:
            bounds.append(self.kill_at)
        if any(one.whole and not one.pid for one in self.callers.values()):
            return _LOOK
        return max(0.0, (min(bounds) - time.monotonic()) * 1000 + 1) if bounds else None

    def _look_around(self) -> None:
        now = time.monotonic()
        for caller in [one for one in self.callers.values() if not one.pid and now >= one.until]:
            late = "processes of an older attempt do not die" if caller.whole else "timed out"
            self._refuse(caller, caller.refused or late)
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            self._send_below(signal.SIGKILL)
        if (self.leaving or self.stale) and not self.callers:
            self._leave()

    def _leave(self) -> None:
        self.name.unlink(missing_ok=True)
        self._send_below(signal.SIGKILL)
        shm_dir.leave(str(self.place))
        os._exit(0)

    def _on_signal(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers:  # the job is ending: ranks may be saving, so we do not end them
            self.leaving = True
            self.name.unlink(missing_ok=True)
        self._reap()

    def _reap(self) -> None:
        """Report each ended rank to its client."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid, status = os.waitpid(found.si_pid, 0)
            caller = next((one for one in self.callers.values() if one.pid == pid), None)
            if caller is not None:
                try:
                    caller.link.send(status.to_bytes(4, "little"))
                except OSError:
                    pass
                self._drop(caller)

    def _drop(self, caller: Caller) -> None:
        self._hear_no_more(caller)
        del self.callers[caller.link.fileno()]
        caller.close()
        if caller.pid and not any(one.pid for one in self.callers.values()) and self._below():
            self._send_below(signal.SIGTERM)
            self.kill_at = time.monotonic() + _LEFTOVERS

    # -------------------------------------------------------------------------------------------------------- callers

    def _accept(self) -> None:
        try:
            link, _ = self.listener.accept()
        except OSError:
            return
        if proxy.peer(link)[1] != os.geteuid() or self.leaving:
            link.close()
            return
        link.setblocking(False)
        self.callers[link.fileno()] = Caller(link, time.monotonic() + _READ_WITHIN)
        self.poll.register(link, select.POLLIN | select.POLLRDHUP)

    def _on_caller(self, caller: Caller, event: int) -> None:
        """Read on, or act on its end."""
        if caller.pid:
            if event & (select.POLLHUP | select.POLLRDHUP | select.POLLERR):  # the rank's client was killed
                self._end(caller)
            return
        try:
            data, received, flags, _ = socket.recv_fds(caller.link, 1 << 20, proxy.FDS_AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data, received, flags = b"", [], 0
        caller.fds += received
        if not data or flags & socket.MSG_CTRUNC or len(caller.data) > _LARGEST or len(caller.fds) > _MOST_FDS:
            self._drop(caller)
            return
        if caller.refused:
            return
        if caller.request is not None:
            if not caller.whole and len(caller.fds) > len(caller.request["fds"]):
                caller.whole, caller.until = True, time.monotonic() + _CLEAR_WITHIN
            return
        caller.data += data
        request = whole(caller.data)
        if request is not None:
            caller.data.clear()
            self._judge(caller, request)

    def _judge(self, caller: Caller, request: dict[str, Any]) -> None:
        """Ask for the descriptors of a rank that fits. Another one is refused once no process of an older attempt lives."""
        caller.request = request
        if caller.attempt < self.newest:
            self._refuse(caller, "a newer attempt has begun")
            return
        self.newest = caller.attempt
        try:
            if not self.stale and (changed := self.fresh(request["env"].get(b"FTSUPERVISE_ATTEMPT", b""))):
                self.tell({"refused": f"{changed} has changed"})
                self.stale = changed
            if self.stale:
                raise Incompatible(f"{self.stale} has changed since it was imported")
            if request.get(proxy.COLD):
                raise Incompatible("an attempt that began warm took no step")
            self.judge.fits(request)
            caller.until = time.monotonic() + _READ_WITHIN  # for what it sends now
            caller.link.send(b"send")
        except (Incompatible, OSError, KeyError, TypeError, AttributeError) as problem:
            caller.refused = str(problem) or type(problem).__name__
            caller.whole, caller.until = True, time.monotonic() + _REFUSE_WITHIN

    def _end(self, caller: Caller) -> None:
        """SIGKILL to the rank and its group; its end is reaped as any other."""
        self._hear_no_more(caller)
        for kill in (os.killpg, os.kill):
            try:
                kill(caller.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    def _hear_no_more(self, caller: Caller) -> None:
        """Send the rank's end repeatedly, whatever else is asked."""
        try:
            self.poll.unregister(caller.link)
        except KeyError:
            return

    def _fork_for_those_who_wait(self) -> bool:
        """True in a child that continues as a rank."""
        for caller in [one for one in self.callers.values() if one.whole and not one.pid]:
            if caller.attempt < self.newest:
                self._refuse(caller, "a newer attempt has begun")
            elif caller.refused:
                if self._way_is_clear(caller):
                    self._refuse(caller, caller.refused)
            elif self._way_is_clear(caller) and caller.request is not None and self._fork(caller, caller.request):
                return True
        return False

    def _fork(self, caller: Caller, request: dict[str, Any]) -> bool:
        """True in the child."""
        try:
            self.judge.folder(caller.fds[0])
            parent = os.getpid()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pid = os.fork()
        except (Incompatible, OSError, KeyError, TypeError) as problem:
            self._refuse(caller, str(problem) or type(problem).__name__)
            return False
        if pid == 0:
            self._go_on_as(caller, request, parent)
            return True
        for fd in caller.fds:
            os.close(fd)
        caller.fds.clear()
        caller.pid = pid
        self.poll.modify(caller.link, select.POLLRDHUP)
        return False

    def _refuse(self, caller: Caller, why: str) -> None:
        try:
            caller.link.send(f"{why}\n".encode("utf-8", "replace")[:4000])
        except OSError:
            pass
        self._drop(caller)

    def _way_is_clear(self, caller: Caller) -> bool:
        """Is no process of an older attempt alive or still dying (and holding its memory)? Live ones are killed."""
        if any(one.pid and one.attempt == caller.attempt for one in self.callers.values()):
            return True
        self._reap()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # orphans of a rank become our children
            self.kill_at = None
            return True
        if (now := time.monotonic()) >= self.kill_again:
            self.kill_again = now + _AGAIN
            self._send_below(signal.SIGKILL)
        return False

    # ------------------------------------------------------------------------------------------------------- the child

    def _go_on_as(self, caller: Caller, request: dict[str, Any], parent: int) -> None:
        """In the child: become the rank, report it, wait for the start message. Returns only then."""
        link = caller.link
        try:
            signal.set_wakeup_fd(self.old_wakeup)
            here, *fds = caller.fds
            number = rank_setup.take_over(request["fds"], fds, here, caller.link.fileno())
            self._forget_numbers()
            link = socket.socket(fileno=number)
            link.settimeout(_GO_WITHIN)
            rank_setup.become(request, parent, self.judge.set)
            me = os.pidfd_open(os.getpid())
            socket.send_fds(link, [b"ready"], [me])
            os.close(me)
            rank_setup.hear(request, (signal.SIGCHLD, signal.SIGTERM, *_DEAF))
            if link.recv(2) != b"go":
                os._exit(1)
            link.close()
        except (rank_setup.Cannot, OSError, ValueError) as problem:
            try:
                link.send(f"{problem}\n".encode("utf-8", "replace"))
            except OSError:
                pass
            os._exit(1)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _forget_numbers(self) -> None:
        """Forget these descriptors in the child, which has closed them: their numbers may be reused."""
        self.listener.detach()
        for caller in self.callers.values():
            caller.link.detach()
            caller.fds.clear()

    # ---------------------------------------------------------------------------------------------------- below us

    def _below(self) -> list[int]:
        """All live descendants of this process."""
        tree: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            try:
                fields = Path(f"/proc/{name}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "X":  # one that looks like a zombie may have threads that live
                tree.setdefault(int(fields[1]), []).append(int(name))
        found, queue = [], [os.getpid()]
        while queue:
            below = tree.get(queue.pop(), [])
            found += below
            queue += below
        return found

    def _send_below(self, number: int) -> int:
        pids = self._below()
        for pid in pids:
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):
                continue
        return len(pids)
