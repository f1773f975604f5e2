"""The process in front of the supervisor: whoever has started ``ftsupervise run`` waits for this one, and it uses no disk.

A process of which one thread waits for a dead file system can neither go on nor leave, and a job ends with its process. So the
supervisor is the child of a small one, that passes on signals, ends as its child does, and leaves without it where it has to.
Where the child stands is read in /proc, and what it does is on a board in memory: nothing else is between the two.
"""

from __future__ import annotations

import _thread
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable
from enum import Enum
from typing import NoReturn

from ftsupervise.errors import NoAnswer
from ftsupervise.host.processes import PR_SET_DUMPABLE, die_with_parent, prctl, process_stat, set_name
from ftsupervise.host.pulse import ENV_PULSE
from ftsupervise.host.standing import turns_if_on_disk

_NUMBER, _SECONDS = struct.Struct("<i"), struct.Struct("<d")
_COMMAND, _LEAVING, _BOUND = 0, _NUMBER.size, 2 * _NUMBER.size  # places on the board
_RUNS = -1  # of the command; 0: there has been none; else 1 + the exit code of the last one
_LOOK = 1.0  # seconds between two looks at the child
_TELLS = 10.0  # seconds in which its main thread has waited for a disk, and no command runs: people are told
_STOPPED = 10.0  # the same: it is left behind when it was asked to stop; there may be seconds left
_LEAVES = 2.0  # seconds for a child that has done all to be gone
_DIES = 1.0  # seconds for one that was killed to be gone
_WORDS = 0.5  # seconds for its last words
_NAME = b"ftsup-front"  # as ``ps`` shows it

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OUR_OWN = (
    *(
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGTSTP,
        signal.SIGTTIN,
        signal.SIGTTOU,
    ),  # of a terminal, or not to be caught
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS),  # by what we do
)

_board: mmap.mmap | None = None
_news = -1


class News(Enum):
    """The process in front has seen this of its child, which alone can write it down."""

    WAITS = b"w"  # its main thread waits for a disk
    GOES_ON = b"g"
    LEFT = b"l"  # it is about to be left behind


def stand_before() -> None:
    """Return in a child, which is the supervisor from here on; this process follows it. Returns at once in the supervisor of a
    replica group: the process above that one does more.

    The child stays in the group of this process, which may be that of a terminal: what the command reads there, and a stop from
    there, are as ever. A signal for the whole group comes to the supervisor twice, the second time from here.
    """
    global _board, _news
    if ENV_PULSE in os.environ:
        return
    board = mmap.mmap(-1, _BOUND + _SECONDS.size)
    _SECONDS.pack_into(board, _BOUND, float("inf"))
    _news, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(_news, True)
    passed = signal.valid_signals() - {*_OUR_OWN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed)
    with_parent = die_with_parent(signal.SIGKILL)
    pid = os.fork()
    if pid:
        os.close(_news)
        _Front(pid, board, writer).follow(passed)
    os.close(writer)
    with_parent()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _board = board


# In the child.


def hear(told: Callable[[News], object], seconds: float) -> None:
    """Call ``told`` from a thread when there is news. ``seconds``: the supervisor waits so long for a dead disk, unless it is
    asked to stop."""
    if _board is not None:
        _SECONDS.pack_into(_board, _BOUND, seconds)
        _thread.start_new_thread(_hear, (told,))


def _hear(told: Callable[[News], object]) -> None:
    while byte := os.read(_news, 1):
        told(News(byte))


def command_begins() -> None:
    if _board is not None:
        _NUMBER.pack_into(_board, _COMMAND, _RUNS)


def command_is_over(code: int) -> None:
    """``code``: negative for a signal."""
    if _board is not None:
        _NUMBER.pack_into(_board, _COMMAND, 1 + _as_shell(code))


def leaves(code: int) -> None:
    """Say that all is done: nobody needs to wait for more than the end of this process, with that exit code."""
    if _board is not None:
        _NUMBER.pack_into(_board, _LEAVING, 1 + code)


def exit_code() -> int:
    """Return the code with which the process in front leaves, once that has said so (``News.LEFT``)."""
    return int(_NUMBER.unpack_from(_board, _LEAVING)[0]) - 1 if _board is not None else 0


def _as_shell(code: int) -> int:
    return code if code >= 0 else 128 - code


# In the process in front.


class _Front:
    """Follows the child ``pid``. ``news``: the pipe to it."""

    def __init__(self, pid: int, board: mmap.mmap, news: int) -> None:
        self._pid, self._board, self._news = pid, board, news
        self._told_to_stop = False
        self._turns: int | None = None  # of its main thread, at the last look, if it waited for a disk then
        self._on_disk = self._left = 0.0  # seconds: since then, and since it said that all is done
        self._told = False  # people were told of it

    def follow(self, passed: set[signal.Signals]) -> NoReturn:
        set_name(_NAME)
        theirs = [int(name) for name in os.listdir("/proc/self/fd")]
        theirs.remove(self._news)
        _thread.start_new_thread(_let_go, (theirs,))  # a file that is closed may be on a disk that hangs already
        looked = time.monotonic()
        while True:
            came = signal.sigtimedwait(passed, _LOOK)
            self._end_as_it_has()
            if came is not None and came.si_signo != signal.SIGCHLD:
                self._told_to_stop |= came.si_signo in _STOP
                os.kill(self._pid, came.si_signo)  # a child that we have not reaped: the number is its own
            now = time.monotonic()
            if now >= looked + _LOOK:
                self._look(min(now - looked, 2 * _LOOK))  # more went by: we were stopped, and so was the child
                looked = now

    def _look(self, seconds: float) -> None:
        leaving, command = (_NUMBER.unpack_from(self._board, at)[0] for at in (_LEAVING, _COMMAND))
        stat = process_stat(self._pid)
        dies = stat is not None and (stat.gone or stat.killed)  # but for a thread that waits for a disk
        if leaving or dies:
            self._left += seconds
            if self._left >= _LEAVES and leaving:
                self._leave(leaving - 1)
            if self._left >= _LEAVES and stat is not None:
                _end_as(os.waitstatus_to_exitcode(stat.status) if stat.gone else -signal.SIGKILL)
            return
        turns = turns_if_on_disk(self._pid) if command != _RUNS else None
        if turns is None or turns != self._turns:
            if self._told:
                self._say(News.GOES_ON)
            self._turns, self._on_disk, self._told = turns, 0.0, False
            return
        self._on_disk += seconds
        bound = _SECONDS.unpack_from(self._board, _BOUND)[0]
        if self._on_disk >= (min(_STOPPED, bound) if self._told_to_stop else bound):
            code = self._code()
            _NUMBER.pack_into(self._board, _LEAVING, 1 + code)
            self._say(News.LEFT)
            time.sleep(_WORDS)
            self._leave(code)
        if self._on_disk >= _TELLS and not self._told:
            self._told = True
            self._say(News.WAITS)

    def _code(self) -> int:
        """Return the exit code of the last command; what the gate ends with where there has been none."""
        last = _NUMBER.unpack_from(self._board, _COMMAND)[0]
        if last > 0:
            return int(last) - 1
        return 0 if self._told_to_stop else NoAnswer.exit_code

    def _say(self, news: News) -> None:
        try:
            os.write(self._news, news.value)
        except OSError:  # it is gone, or has not heard for long
            return

    def _end_as_it_has(self) -> None:
        """Reap it, and what the script that has become this process had started before."""
        done = 1
        while done:
            done, status = os.waitpid(-1, os.WNOHANG)
            if done == self._pid:
                _end_as(os.waitstatus_to_exitcode(status))

    def _leave(self, code: int) -> NoReturn:
        """End it, and go without it where it does not die: its kernel thread waits for the disk."""
        os.kill(self._pid, signal.SIGKILL)
        until = time.monotonic() + _DIES
        while time.monotonic() < until and not os.waitpid(self._pid, os.WNOHANG)[0]:
            time.sleep(0.01)
        os._exit(code)


def _end_as(code: int) -> NoReturn:
    """``code``: negative for a signal."""
    if code < 0:
        try:
            signal.signal(-code, signal.SIG_DFL)
        except (OSError, ValueError):  # SIGKILL
            pass
        prctl(PR_SET_DUMPABLE, 0)  # no second core
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(_as_shell(code))


def _let_go(files: list[int]) -> None:
    """Close those: of the job's output, and what its script has open."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for fd in {*files, null} - {0, 1, 2}:
        try:
            os.close(fd)
        except OSError:  # it was that of the list itself
            continue
