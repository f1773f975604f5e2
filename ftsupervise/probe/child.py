"""One child process that answers questions, seen from its parent: ask with a bound, end with a bound, else let go."""

from __future__ import annotations

import marshal
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ftsupervise.host import processes
from ftsupervise.probe import server
from ftsupervise.probe.abandoned import Notes

_SCRIPT = str(Path(server.__file__))
_GRACE = 0.2  # seconds for a child to die of SIGKILL, or to leave after we hung up


class Late(Exception):
    """No answer within the bound."""


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
        """The child's answer. Raises Late after ``bound`` seconds, Died if it ends instead."""
        until = time.monotonic() + bound
        payload = marshal.dumps((question, args))
        self._send(len(payload).to_bytes(4, "big") + payload, until)
        length = int.from_bytes(self._receive(4, until), "big")
        answer: tuple[Any, ...] = marshal.loads(self._receive(length, until))
        return answer

    def _send(self, data: bytes, until: float) -> None:
        view = memoryview(data)
        while view:
            if not select.select([], [self._to], [], max(0.0, until - time.monotonic()))[1]:
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
            if not select.select([self._from], [], [], max(0.0, until - time.monotonic()))[0]:
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
            return "it closed its mouth"
        return f"signal {-code}" if code < 0 else f"exit {code}"

    def _wait(self, bound: float) -> int | None:
        try:
            return self._process.wait(bound)
        except subprocess.TimeoutExpired:
            return None

    def hang_up(self) -> None:
        """Let an idle child go home by itself."""
        self._to.close()

    def finish(self, notes: Notes) -> bool:
        """End a child that has nothing to do; True if it is gone. Never waits longer than two graces."""
        self.hang_up()
        if self._wait(_GRACE) is None:
            return self.end(notes)
        return self._swept(notes)

    def end(self, notes: Notes) -> bool:
        """Kill it and all of its session; True if all are gone, else ``survivors`` are those left behind."""
        self.hang_up()
        processes.end_group(self.pid)
        self._wait(_GRACE)
        return self._swept(notes)

    def _swept(self, notes: Notes) -> bool:
        """Kill what is left of the session (a command and what it started); remember what does not die."""
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
