"""Run the executables of one slot at the same time, each with a bound, and end the processes that they leave behind.

Output goes through us, so that it is bounded: the beginning is written as it comes, the end when the run is over. An entry's
processes are found by the process tree and by a mark in their environment, which a daemon that left the tree still has.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ftsupervise.host import files, processes
from ftsupervise.host.begin import StartedProgram, begin
from ftsupervise.units import show_duration

MARK = "FTSUPERVISE_CRON_RUN"
_BEGINS = 2.0  # seconds that one may take to begin before the next one is begun
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_UNKILLABLE = 5.0  # seconds a process may take to die of SIGKILL before it is left behind
_AT_ONCE = 8
Echo = Callable[[bytes], None] | None  # also gets the output, as it comes


@dataclass(frozen=True)
class Task:
    """One executable to be run. ``folder`` is its own; output goes to ``folder/output``."""

    key: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    folder: Path
    cwd: str
    stdin: str = ""


@dataclass(frozen=True)
class Ended:
    """The end of a task. ``code`` is negative for a signal, None when the task was ended at its bound or never began."""

    key: str
    code: int | None
    words: str
    seconds: float


class BoundedOutput:
    """The first half of ``limit`` bytes as they come, the last half at the end, and between them how much is missing."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._half = path, max(1, limit // 2)
        self._file: IO[bytes] | None = None
        self._tail: deque[bytes] = deque()
        self._head = self._kept = self._dropped = 0

    def write(self, data: bytes) -> None:
        room = self._half - self._head
        if room > 0:
            self._put(data[:room])
            self._head += len(data[:room])
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._kept += len(data)
        while self._tail and self._kept - len(self._tail[0]) >= self._half:
            self._kept -= len(self._tail[0])
            self._dropped += len(self._tail.popleft())

    def close(self) -> None:
        if self._dropped:
            self._put(f"\n[... {self._dropped} bytes are not kept ...]\n".encode())
        for data in self._tail:
            self._put(data)
        self._tail.clear()
        if self._file is not None:
            try:
                self._file.close()
            except OSError:
                pass

    def _put(self, data: bytes) -> None:
        """Never raises: losing output must not end the entry."""
        try:
            if self._file is None:
                self._file = os.fdopen(files.open_append(self._path), "ab", buffering=0)
            self._file.write(data)
        except OSError:
            return


@dataclass
class _RunningTask:
    task: Task
    child: StartedProgram
    pipe: IO[bytes]
    output: BoundedOutput
    started: float
    bound: float
    ending: float | None = None  # when SIGKILL follows
    killed: float | None = None
    eof: bool = False


def run_all(
    tasks: Sequence[Task], *, bound: float, output_limit: int, on_end: Callable[[Ended], None], echo: Echo = None
) -> None:
    """Run every task, at most ``_AT_ONCE`` at a time, each for at most ``bound`` seconds. ``on_end`` is called at each end.

    Returns when all have ended or were left behind (a process in state D dies when its device answers, not before).
    """
    before_exec = processes.become_subreaper()
    before = frozenset(processes.below(os.getpid()))
    waiting = list(tasks)
    running: list[_RunningTask] = []
    with selectors.DefaultSelector() as selector:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                task = waiting.pop(0)
                started = _start(task, bound, BoundedOutput(task.folder / "output", output_limit), before_exec)
                if isinstance(started, Ended):
                    on_end(started)
                else:
                    selector.register(started.pipe, selectors.EVENT_READ, started)
                    running.append(started)
            for key, _ in selector.select(timeout=0.1):
                if not _read(key.data, echo) and key.data.eof:
                    selector.unregister(key.fileobj)
            for one in list(running):
                ended = _step(one, before)
                if ended is None:
                    continue
                for _ in range(1000):  # a process that still holds the pipe may write for ever
                    if not _read(one, echo):
                        break
                if one.pipe in selector.get_map():
                    selector.unregister(one.pipe)
                one.pipe.close()
                one.output.close()
                running.remove(one)
                on_end(ended)
    _end_the_rest(before)


def _start(task: Task, bound: float, output: BoundedOutput, before_exec: Callable[[], None]) -> _RunningTask | Ended:
    try:
        given = os.memfd_create("ftsupervise-stdin", os.MFD_CLOEXEC)
        try:
            os.write(given, task.stdin.encode())
            os.lseek(given, 0, os.SEEK_SET)
            reader, writer = os.pipe2(os.O_CLOEXEC)
            env = {**task.env, MARK: str(task.folder)}
            try:
                child = begin(task.argv, (given, writer, writer), env=env, cwd=task.cwd, before_exec=before_exec)
            except OSError:
                os.close(reader)
                raise
            finally:
                os.close(writer)
        finally:
            os.close(given)
        try:
            child.has_begun(_BEGINS)  # one on a mount that hangs begins later, or is ended at its bound
        except OSError:
            os.close(reader)
            raise
    except OSError as error:
        words = f"cannot be started: {error.strerror or error}"
        if error.errno == errno.ENOEXEC:
            words = "cannot be started: it has no #! line that names its interpreter"
        return Ended(task.key, None, words, 0.0)
    os.set_blocking(reader, False)
    return _RunningTask(task, child, os.fdopen(reader, "rb", buffering=0), output, time.monotonic(), bound)


def _read(one: _RunningTask, echo: Echo) -> bool:
    """Read the output that is there; False when there is no more."""
    if one.eof:
        return False
    try:
        data = os.read(one.pipe.fileno(), 65536)
    except BlockingIOError:
        return False
    if not data:
        one.eof = True
        return False
    one.output.write(data)
    if echo is not None:
        echo(data)
    return True


def _step(one: _RunningTask, before: frozenset[int]) -> Ended | None:
    """Check one task: has it ended, is it over its bound, must it be killed?"""
    now = time.monotonic()
    code = one.child.poll()
    seconds = now - one.started
    if one.ending is None and code is None and seconds <= one.bound:
        return None
    left = members(one.child.pid, one.task.folder, before)
    if one.ending is None:
        if code is not None and not left:
            return Ended(one.task.key, code, _words(code), seconds)
        processes.send(left, signal.SIGTERM)
        one.ending = now + _GRACE
        if code is not None:
            one.bound = -1.0  # it has ended by itself, and left processes running
        return None
    if one.child.poll() is None and one.child.pid not in left:
        left.append(one.child.pid)
    if not left:
        return _over(one, seconds)
    if one.killed is None and now >= one.ending:
        one.killed = now
    if one.killed is not None:
        processes.send(left, signal.SIGKILL)
        if now - one.killed > _UNKILLABLE:
            if one.child.poll() is None:
                one.child.returncode = -signal.SIGKILL  # we do not wait for it again
            return _over(one, seconds, tuple(left))
    return None


def _over(one: _RunningTask, seconds: float, left: tuple[int, ...] = ()) -> Ended:
    stuck = f"; processes that do not die were left behind: {', '.join(map(str, left))}" if left else ""
    if one.bound < 0:
        code = one.child.returncode or 0
        return Ended(one.task.key, code, f"{_words(code)}; processes that it left running were ended{stuck}", seconds)
    words = f"ended at its bound of {show_duration(one.bound)}, with all processes that it had started{stuck}"
    return Ended(one.task.key, None, words, seconds)


def members(pid: int, folder: Path, before: frozenset[int]) -> list[int]:
    """The living processes of a task: below its first one, and orphans of ours that carry its mark."""
    found = [pid] if processes.identity(pid) is not None else []
    found += processes.below(pid)
    others = processes.below(os.getpid(), without=before)
    return found + [p for p in others if p not in found and processes.environment(p).get(MARK) == str(folder)]


def _end_the_rest(before: frozenset[int]) -> None:
    """End processes that have neither parent nor mark any more, then reap the orphans."""
    until = time.monotonic() + _UNKILLABLE
    while time.monotonic() < until:
        left = processes.below(os.getpid(), without=before)
        if not left or not processes.send(left, signal.SIGKILL):
            break
        time.sleep(0.02)
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def _words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
