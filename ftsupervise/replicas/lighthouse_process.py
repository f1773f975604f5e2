"""One process that is the lighthouse: started, heard and ended, each within a bound. It dies with its supervisor."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

from ftsupervise.errors import Error
from ftsupervise.host import processes
from ftsupervise.printable import printable
from ftsupervise.replicas.torchft_python import SERVER
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR
from ftsupervise.rundir.records import as_text, as_whole, parse_object
from ftsupervise.units import signal_name

ENV_MARK = "FTSUPERVISE_LIGHTHOUSE"  # in its environment: RUN/replicas, by which its own are told from others
_LISTEN = 30.0  # seconds for it to begin to listen: torchft comes from a cold network file system
_END = 2.0  # seconds for a killed process to be gone
_ANSWER = 10_000  # bytes
_SAID = 2_000  # bytes of its last words
_TAKEN = (errno.EADDRINUSE, errno.EACCES)


class NoLighthouse(Error):
    """It does not listen. ``taken``: the port is another's."""

    def __init__(self, message: str, *, taken: bool = False) -> None:
        super().__init__(message)
        self.taken = taken


class LighthouseProcess:
    """It listens when this is made. Raises NoLighthouse."""

    def __init__(self, python: str, words: Sequence[str], mark: str, env: Mapping[str, str]) -> None:
        self.begun = time.monotonic()
        self.version = ""
        self._last = b""
        given = {key: value for key, value in env.items() if key not in (ENV_ATTEMPT_DIR, "TOKIO_WORKER_THREADS")}
        try:
            self._child = subprocess.Popen(
                [python, "-I", str(SERVER), *words],
                stdin=subprocess.PIPE,  # its end tells it that we are gone
                stdout=subprocess.PIPE,  # its end tells us that it is
                stderr=subprocess.PIPE,
                env={**given, "RUST_LOG": given.get("RUST_LOG", "warn"), ENV_MARK: mark},
                cwd="/",
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise NoLighthouse(f"{python} cannot be started: {error.strerror}") from None
        found = processes.process(self._child.pid)
        self.pid, self.start = self._child.pid, found.start if found else None
        try:
            self._await_listening()
        except BaseException:
            self.end()
            raise

    @property
    def state(self) -> str:
        """One letter as in /proc/PID/stat; "X" when it is gone."""
        found = processes.process(self.pid)
        return found.state if found is not None and found.start == self.start else "X"

    def ended_within(self, seconds: float, wake: int) -> bool:
        """Wait until it ends, ``wake`` (a descriptor) can be read, or the time is over. Is it gone?"""
        ready = self._poll(seconds, wake)
        if self._err().fileno() in ready:
            self._hear()
        return self._out().fileno() in ready

    def proceed(self) -> None:
        """SIGCONT."""
        processes.send([self.pid], signal.SIGCONT)

    def end(self) -> str:
        """SIGKILL if it lives, and why it ended in words. One that does not die is left behind."""
        try:
            code: int | None = self._child.wait(0.05)
        except subprocess.TimeoutExpired:
            code = None
        words = "" if code is None else f"killed by {signal_name(-code)}" if code < 0 else f"it ended with code {code}"
        processes.end_group(self.pid)
        if code is None:
            try:
                self._child.wait(_END)
            except subprocess.TimeoutExpired:
                self._child.returncode = -signal.SIGKILL  # so that not even its destructor waits for it again
                words = f"process {self.pid} cannot be killed"
        self._hear()
        for stream in (self._child.stdin, self._child.stdout, self._child.stderr):
            if stream is not None:
                stream.close()
        last = printable(" ".join(self._last.decode("utf-8", "replace").split())[-300:])
        return f"{words}: {last}" if words and last else words

    def _await_listening(self) -> None:
        told, until = b"", time.monotonic() + _LISTEN
        while not told.endswith(b"\n"):
            ready = self._poll(until - time.monotonic())
            if not ready:
                raise NoLighthouse(f"the lighthouse does not listen within {_LISTEN:.0f} s")
            if self._err().fileno() in ready:
                self._hear()
            if self._out().fileno() in ready:
                part = os.read(self._out().fileno(), _ANSWER)
                told += part
                if not part or len(told) > _ANSWER:
                    raise NoLighthouse(f"the lighthouse ended at its start: {self.end() or 'without a word'}")
        answer = parse_object(told)
        if answer.get("listening") is not True:
            number = as_whole(answer.get("errno")) or 0
            words = as_text(answer.get("problem")) or "its Python has no torchft"
            raise NoLighthouse(words, taken=number in _TAKEN)
        self.version = as_text(answer.get("version"), 60)

    def _poll(self, seconds: float, *more: int) -> list[int]:
        poll = select.poll()
        for fd in (self._out().fileno(), self._err().fileno(), *more):
            poll.register(fd, select.POLLIN)
        return [fd for fd, _ in poll.poll(max(0.0, seconds) * 1000)]

    def _hear(self) -> None:
        """Read what it says, or it would wait for us in the middle of its work."""
        try:
            os.set_blocking(self._err().fileno(), False)
            part = os.read(self._err().fileno(), 1 << 16)
        except (BlockingIOError, ValueError):
            return
        if not part:
            time.sleep(0.01)  # it has closed it, and lives
        self._last = (self._last + part)[-_SAID:]

    def _out(self) -> IO[bytes]:
        assert self._child.stdout is not None
        return self._child.stdout

    def _err(self) -> IO[bytes]:
        assert self._child.stderr is not None
        return self._child.stderr
