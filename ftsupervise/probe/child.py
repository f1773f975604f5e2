"""One child process that answers questions, seen from its parent: ask with a bound, end with a bound, else abandon it.

It stands alone because whoever asks need not know how a child is made, spoken to and given up.
"""

from __future__ import annotations

import marshal
import os
import select
import stat
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftsupervise.host import processes
from ftsupervise.probe import server
from ftsupervise.probe.errand import Notes, is_ready

_SCRIPT = str(Path(server.__file__))
_GRACE = 0.2  # seconds for a child to die of SIGKILL, or to exit after we closed its input


class Late(Exception):
    """There is no answer within the bound."""


class Died(Exception):
    """The child ended instead of answering."""


class Child:
    """A running ``server.py`` for the device ``mine``, or for one command. Raises OSError if it cannot be started."""

    def __init__(self, mine: str, *, command: bool = False) -> None:
        self._command = command
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _SCRIPT, "command" if command else mine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        os.set_blocking(self._to.fileno(), False)
        self.pid = self._process.pid
        self.survivors: tuple[int, ...] = ()

    def ask(self, question: str, args: tuple[Any, ...], bound: float) -> tuple[Any, ...]:
        """Return the child's answer. Raises Late after ``bound`` seconds, Died if it ends instead."""
        until = time.monotonic() + bound
        payload = marshal.dumps((question, args))
        self._send(len(payload).to_bytes(4, "big") + payload, until)
        length = int.from_bytes(self._receive(4, until), "big")
        answer: tuple[Any, ...] = marshal.loads(self._receive(length, until))
        return answer

    def _send(self, data: bytes, until: float) -> None:
        view = memoryview(data)
        while view:
            if not is_ready(self._to, until - time.monotonic(), select.POLLOUT):
                raise Late
            try:
                view = view[os.write(self._to.fileno(), view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise Died(self._how()) from None

    def _receive(self, count: int, until: float) -> bytes:
        parts = []
        while count:
            if not is_ready(self._from, until - time.monotonic()):
                raise Late
            part = os.read(self._from.fileno(), min(count, 1 << 20))
            if not part:
                raise Died(self._how())
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _how(self) -> str:
        code = self._wait(_GRACE)
        if code is None:
            return "it closed its output"
        return f"signal {-code}" if code < 0 else f"exit {code}"

    def _wait(self, bound: float) -> int | None:
        try:
            return self._process.wait(bound)
        except subprocess.TimeoutExpired:
            return None

    def hang_up(self) -> None:
        """Ask an idle child to exit."""
        self._to.close()

    def finish(self, notes: Notes) -> bool:
        """End a child that has nothing to do; return True if it is gone. Never waits longer than two graces."""
        self.hang_up()
        if self._wait(_GRACE) is None:
            return self.end(notes)
        return self._swept(notes)

    def end(self, notes: Notes) -> bool:
        """Kill it and all of its session; return True if all are gone, else ``survivors`` are those left behind."""
        self.hang_up()
        processes.end_group(self.pid)
        self._wait(_GRACE)
        return self._swept(notes)

    def _swept(self, notes: Notes) -> bool:
        """Kill the rest of the session (a command and its children); remember processes that do not die."""
        self._from.close()
        left = processes.end_all(self._remaining, _GRACE)
        if self._process.returncode is None and not left:
            self._wait(_GRACE)
        self.survivors = tuple(one.pid for one in left)
        if processes.identity(self.pid) is None:
            notes.forget(self.pid)
        return not left

    def _remaining(self) -> list[processes.Process]:
        if self._command:
            return [one for one in processes.living() if one.session == self.pid]
        its = processes.process(self.pid) if self._process.returncode is None else None
        return [its] if its is not None else []


# The possible answers: frozen values, and the two ways of having none.
#
# ``Missing`` is an answer: we checked, and it is not there. ``NotSeen`` is none: nothing is known about the subject, so its
# receiver must neither complain about the subject nor call it fine.


@dataclass(frozen=True)
class NotSeen:
    """The thing could not be read. ``seconds`` is for how long the device has not answered (0: it refused at once)."""

    what: str
    why: str
    seconds: float = 0.0
    hung: bool = False  # the device does not answer, as opposed to: it said no

    @property
    def sentence(self) -> str:
        waited = f" for {self.seconds:.0f} s" if self.hung else ""
        return f"{self.what} not seen{waited}: {self.why}"


@dataclass(frozen=True)
class Missing:
    """The thing was looked for, and does not exist."""

    path: str


@dataclass(frozen=True)
class Space:
    """One file system as an ordinary user may use it. Bytes and inodes; ``free`` is bavail, never bfree."""

    total: int  # the part that users can have: used + free, as df counts it
    used: int
    free: int
    inodes: int  # 0: this file system has no fixed number of them
    inodes_free: int


@dataclass(frozen=True)
class Mount:
    """A mount by the mount table: "/scratch", "lustre", "10.0.0.1@o2ib:/scratch"."""

    point: str
    kind: str
    source: str


@dataclass(frozen=True)
class Entry:
    """A file or directory as the file server reports it; ``mtime`` in seconds of the server's clock."""

    name: str
    mode: int
    size: int
    mtime: float
    inode: int
    uid: int
    links: int = 1
    device: int = 0

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)


@dataclass(frozen=True)
class Listing:
    entries: tuple[Entry, ...]
    more: bool  # there were more entries than asked for


@dataclass(frozen=True)
class Tail:
    """The end of a file: its facts, and ``data`` which begins at byte ``start``."""

    entry: Entry
    start: int
    data: bytes


@dataclass(frozen=True)
class Text:
    name: str
    mtime: float
    data: bytes


@dataclass(frozen=True)
class Tree:
    """Everything below a path: bytes, files, newest change; ``more`` if the counting stopped at its bound."""

    size: int
    files: int
    newest: float
    more: bool
    empty: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessMemory:
    """A process. ``start`` in clock ticks since boot (with ``pid`` its identity); bytes."""

    pid: int
    parent: int
    start: int
    state: str
    resident: int
    own: int  # resident without mapped files, which are no leak


@dataclass(frozen=True)
class Ran:
    """A command that came to an end, or was ended at its bound (``late``)."""

    code: int
    out: bytes
    err: bytes
    late: bool
