"""Observe the ranks of one attempt on this node: their pages, their processes, and each death at once.

    BASE/ATTEMPT/rank-N      the pages (``heartbeat_page.py``); the newest attempt counts

A rank is only called dead after it was seen alive: the process of its page was there, with the start time of its page. So a
page from another PID namespace, or a process that we may not read, is unknown, and never dead.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import struct
from pathlib import Path
from time import monotonic

from ftsupervise.host import processes
from ftsupervise.host.memory import OomVictims
from ftsupervise.host.ownership import is_private
from ftsupervise.host.processes import ProcessStat, process_stat
from ftsupervise.ranks.protocol import RankExit
from ftsupervise.ranks.shm_dir import ExitFifo, newest_attempt, was_removed
from ftsupervise.ranks.tally import of_pages
from ftsupervise.rundir import heartbeat_page
from ftsupervise.truth import HeartbeatSample, RankState, Tally

_INFO = struct.Struct("<QQ11Ii")  # struct pidfd_info of Linux 6.15: mask, …, exit code
_INFO_EXIT = 1 << 3
_GET_INFO = 0xC000FF0B | _INFO.size << 16  # PIDFD_GET_INFO
_ANCESTORS = 16
_EARLY = 60.0  # seconds


class _Rank:
    """One page and the processes behind it."""

    __slots__ = ("code", "cpu", "fd", "final", "inode", "pidfd", "reported", "sample", "state", "task", "taskfd")

    def __init__(self, fd: int, inode: int, sample: HeartbeatSample) -> None:
        self.fd, self.inode, self.sample = fd, inode, sample
        self.pidfd = self.taskfd = self.task = -1
        self.state = ""  # unknown
        self.cpu: float | None = None
        self.code: int | None = None
        self.final = False  # no parent on this node would restart it
        self.reported = 0  # 1: its death, 2: that it is final too

    def close(self) -> None:
        for fd in (self.fd, self.pidfd, self.taskfd):
            if fd >= 0:
                os.close(fd)
        self.fd = self.pidfd = self.taskfd = -1


class RankObserver:
    """Observes the ranks under ``base`` whose node is ``node``. It registers its descriptors with ``poll``."""

    def __init__(self, base: str, node: str, poll: select.poll) -> None:
        self.base, self.node, self._poll = base, node, poll
        self.attempt: int | None = None
        self._ranks: dict[str, _Rank] = {}
        self._fds: dict[int, _Rank] = {}
        self._of_other_nodes: dict[str, int] = {}  # pages that are not this node's, by name: their inode
        self._exit_fifo: ExitFifo | None = None
        self._exits: list[RankExit] = []
        self._all_found = False
        self._shown = 0  # ranks at the last check
        self._since = monotonic()  # when we first searched for this attempt's pages
        self._victims = OomVictims()

    # ------------------------------------------------------------------------------------------------------- looking

    def check(self) -> list[RankState]:
        """Return the state of each rank now. Finds new pages; a rank whose page is removed is followed on. Never blocks."""
        self._shown = 0
        if not self._all_found and not self._find_attempt():
            return []
        now = monotonic()
        found = [self._state_of(one, now) for one in self._ranks.values()]
        found.sort()
        self._shown = len(found)
        return found

    def new_pages(self) -> bool:
        """Return whether a page has appeared since the last check, or another one."""
        before = self._shown
        return len(self.check()) > before

    @property
    def sees_ranks(self) -> bool:
        """Return whether a rank here had a page at the last check."""
        return bool(self._ranks)

    def tally(self) -> Tally:
        """Return the counts of the guards of the ranks here at the last check."""
        return of_pages((one.sample for one in self._ranks.values()), monotonic())

    def keep_to_these(self) -> None:
        """Search for no other pages from here on."""
        self._all_found = True

    def living_elsewhere(self) -> frozenset[str]:
        """Return the names of the pages here whose ranks live on other nodes: those of a test cluster share this host."""
        return frozenset(name for name in self._of_other_nodes if _lives(Path(self.base, str(self.attempt), name)))

    def close_fifo(self) -> None:
        """Close the exit FIFO and remove it."""
        if self._exit_fifo is not None and self._exit_fifo.fd >= 0:
            self._poll.unregister(self._exit_fifo.fd)
            self._exit_fifo.close()

    def on_ready(self, fd: int) -> bool:
        """Handle a ready descriptor: a rank has died, or will. Return False when it is none of ours. Then call ``exits``."""
        if self._exit_fifo is not None and fd == self._exit_fifo.fd:
            self._exit_fifo.drain()
            self.check()
            return True
        one = self._fds.get(fd)
        if one is None:
            return False
        self._forget(fd)
        if fd == one.pidfd:
            one.code = _exit_code(fd, one.sample.pid)
            one.state = "X"
        else:
            one.final = True
        self._add_exit(one)
        return True

    def exits(self) -> list[RankExit]:
        """Return the deaths since the last call."""
        exits, self._exits = self._exits, []
        return exits

    def dying(self) -> list[RankExit]:
        """Return ranks that have exited or are exiting without a reported reason: killed from outside.

        Ask before we kill any.
        """
        found = []
        for one in list(self._ranks.values()):
            last = heartbeat_page.read_open(one.fd)
            if not one.state or last is None or last.leaving or last.phase == "finished":
                continue
            seen = process_stat(last.pid)
            if seen is None or seen.start != last.pid_start:
                code = one.code
            elif seen.killed or seen.exiting or seen.gone:
                code = _code_of(seen)
            else:
                continue
            if code != 0:
                found.append(self._exit(last, code, leaving=False, failed=False, final=one.final))
        return found

    def is_early(self) -> bool:
        """Return whether pages may still appear. A rank is watched only once its page is found."""
        return not self._ranks or monotonic() < self._since + _EARLY

    def all_gone(self) -> bool:
        """Return whether no rank that we have seen alive is alive any more."""
        return all(one.state in ("", "X") for one in self._ranks.values())

    def close(self) -> None:
        self.close_fifo()
        self._drop_all()
        self._victims.close()

    def _drop_all(self) -> None:
        for one in self._ranks.values():
            self._drop(one)
        self._ranks.clear()
        self._of_other_nodes.clear()

    # --------------------------------------------------------------------------------------------------------- pages

    def _find_attempt(self) -> bool:
        newest = newest_attempt(self.base)
        if self._ranks and (newest or 0) < (self.attempt or 0) and was_removed(self.base):
            return True  # our ranks live on without their pages' names
        if newest != self.attempt:
            self._drop_all()
            self.attempt, self._since = newest, monotonic()
        if newest is None or not is_private(f"{self.base}/{newest}"):
            return False
        if self._exit_fifo is None:
            self._exit_fifo = ExitFifo(self.base, self.node)
            if self._exit_fifo.fd >= 0:
                self._poll.register(self._exit_fifo.fd, select.POLLIN)
        self._find(f"{self.base}/{newest}")
        return True

    def _find(self, folder: str) -> None:
        try:
            names = {entry.name: entry.inode() for entry in os.scandir(folder) if entry.name.startswith("rank-")}
        except OSError:
            names = {}
        # a removed page says nothing about its rank: only a new one takes its place
        for name in [name for name, one in self._ranks.items() if names.get(name, one.inode) != one.inode]:
            self._drop(self._ranks.pop(name))
        for name, inode in names.items():
            if name not in self._ranks and self._of_other_nodes.get(name) != inode:
                self._open(f"{folder}/{name}", name)

    def _open(self, path: str, name: str) -> None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return
        found = os.fstat(fd)
        sample = heartbeat_page.read_open(fd) if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() else None
        if sample is None or sample.attempt != self.attempt:
            os.close(fd)
            return
        one = _Rank(fd, found.st_ino, sample)
        if self._watch(one):
            self._ranks[name] = one
        else:
            one.close()
            self._of_other_nodes[name] = found.st_ino

    def _state_of(self, one: _Rank, now: float) -> RankState:
        if one.state != "X":
            one.sample = heartbeat_page.read_open(one.fd) or one.sample
            self._check_process(one)
        if one.sample.code is not None:
            self._add_failure(one)
        sample = one.sample
        return RankState(
            sample.rank,
            self.node,
            sample.step,
            sample.phase,
            sample.stepped,
            sample.beaten,
            now,
            sample.pid,
            one.state,
            one.cpu,
            sample.leaving,
        )

    # ----------------------------------------------------------------------------------------------------- processes

    def _watch(self, one: _Rank) -> bool:
        """Find the process of a new page. Return False when it is another node's (several share this host)."""
        pid = one.sample.pid
        seen = process_stat(pid)
        if seen is None or seen.start != one.sample.pid_start or seen.gone:
            return True  # a page without a process that we can see: unknown
        env = processes.environment(pid)
        if self.node and env.get("SLURMD_NODENAME", self.node) != self.node:
            return False
        one.state, one.cpu = seen.state, seen.cpu
        one.pidfd = self._follow(one, pid, seen.start)
        one.task = _task(pid)
        one.final = one.task == pid or env.get("TORCHELASTIC_MAX_RESTARTS") == "0"
        if one.task > 0 and not one.final:
            above = processes.process(one.task)
            one.taskfd = self._follow(one, one.task, above.start) if above is not None else -1
        return True

    def _follow(self, one: _Rank, pid: int, start: int) -> int:
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # an older kernel: each check asks
            return -1
        seen = processes.process(pid)
        if seen is None or seen.start != start:
            os.close(fd)
            return -1
        self._fds[fd] = one
        self._poll.register(fd, select.POLLIN)
        return fd

    def _check_process(self, one: _Rank) -> None:
        if not one.state:
            return
        seen = process_stat(one.sample.pid)
        if seen is not None and seen.start == one.sample.pid_start and not seen.gone:
            one.state, one.cpu = seen.state, seen.cpu
        elif one.pidfd < 0 or one.pidfd not in self._fds:
            one.state = "X"
            one.code = _code_of(seen) if seen is not None and seen.start == one.sample.pid_start else None
            self._add_exit(one)

    def _add_exit(self, one: _Rank) -> None:
        if one.state != "X" or one.reported >= 1 + one.final:
            return
        one.reported = 1 + one.final
        last = heartbeat_page.read_open(one.fd) or one.sample
        one.sample = last
        leaving = last.leaving or last.phase == "finished"
        code = last.code if one.code is None else one.code
        self._exits.append(self._exit(last, code, leaving=leaving, failed=last.failed, final=one.final))

    def _add_failure(self, one: _Rank) -> None:
        """Count a rank as dead whose interpreter exits after a failure: its process may take long to end."""
        if one.final and one.state and not one.reported:
            one.reported = 2
            self._exits.append(self._exit(one.sample, one.sample.code, leaving=True, failed=True, final=True))

    def _exit(self, page: HeartbeatSample, code: int | None, *, leaving: bool, failed: bool, final: bool) -> RankExit:
        oom = code in (None, -signal.SIGKILL) and self._victims.has(page.pid)
        end = page.rank, self.node, page.pid, monotonic(), code, leaving, failed, final, page.told, oom
        return RankExit(*end, page.step)

    def _drop(self, one: _Rank) -> None:
        for fd in (one.pidfd, one.taskfd):
            self._forget(fd)
        one.close()

    def _forget(self, fd: int) -> None:
        if self._fds.pop(fd, None) is not None:
            self._poll.unregister(fd)


def _lives(path: Path) -> bool:
    """Return whether the process of the page there lives."""
    page = heartbeat_page.read_page(path)
    seen = process_stat(page.pid) if page is not None else None
    return page is not None and seen is not None and seen.start == page.pid_start and not seen.gone


def _task(pid: int) -> int:
    """Return the process that Slurm (or a standby) started: ``pid`` or one above it; -1 when it was not Slurm."""
    for _ in range(_ANCESTORS):
        here = processes.process(pid)
        above = processes.process(here.parent) if here is not None and here.parent > 0 else None
        if here is None or above is None:
            return -1
        if above.name.startswith("slurmstepd") or above.name == processes.STANDBY:
            return pid
        pid = here.parent
    return -1


def _exit_code(pidfd: int, pid: int) -> int | None:
    """Return the exit code of a process that is not our child: readable while it is a zombie, on newer kernels also later."""
    seen = process_stat(pid)
    if seen is not None and seen.gone:
        return _code_of(seen)
    raw = bytearray(_INFO.pack(_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, raw)
    except OSError:
        return None
    info = _INFO.unpack(raw)
    return os.waitstatus_to_exitcode(info[13]) if info[0] & _INFO_EXIT else None


def _code_of(ended: ProcessStat) -> int | None:
    if ended.killed and not ended.status:
        return None  # before Linux 5.17 it is reported once the process has taken the signal
    try:
        return os.waitstatus_to_exitcode(ended.status)
    except ValueError:
        return None
