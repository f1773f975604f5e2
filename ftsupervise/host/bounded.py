"""Run a command and return in time, whatever the command does.

``subprocess.run(timeout=…)`` kills the child at the bound and then waits for it again, this time for ever: a child in
uninterruptible sleep (a hung mount, a stuck device) keeps its caller. Here the child has its own session, its output
goes to memory files instead of pipes that a grandchild could hold open, and one that does not die is left behind and reported.
One that writes without an end is ended while it writes: its output takes memory.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ftsupervise import host
from ftsupervise.host import pulse
from ftsupervise.host.processes import end_group

_AT_LEAST = 1.0  # least seconds for a command

_OUTPUT_LIMIT = (
    64_000_000  # bytes of stdout kept: a queue of 100,000 jobs is 20 MB; a command that writes more is ended
)
_LOOK = 0.02  # seconds from one look at the size of the output to the next
_KEPT = 100_000  # bytes kept of stderr, and of the output of a command that wrote without an end
_SENTENCE = 300  # characters of its own words in a message


@dataclass(frozen=True)
class CompletedCommand:
    """The result of a command. ``code`` is None when it was ended at the bound; negative for a signal.

    ``endless``: the bound was that of its output, of which the beginning is here.
    """

    argv: tuple[str, ...]
    code: int | None
    stdout: str
    stderr: str
    seconds: float
    endless: bool = False

    @property
    def timed_out(self) -> bool:
        return self.code is None

    def words(self) -> str:
        """Return the command's own complaint, for an error message: its first 300 characters."""
        said = " ".join((self.stderr[:_KEPT].strip() or self.stdout[:_KEPT].strip()).split())
        said = said if len(said) <= _SENTENCE else said[: _SENTENCE - 1] + "…"
        if self.endless:
            return f"it wrote without an end, and was ended after {self.seconds:.0f} s ({said})"
        if self.timed_out:
            return f"no answer within {self.seconds:.0f} s" + (f" ({said})" if said else "")
        return said or f"exit code {self.code}"


_waited_for: set[int] = set()  # children of this process whose end ``run`` waits for
_starting = threading.Lock()  # held until a child that is being started is among them
_START_WITHIN = 0.2  # seconds


def reap() -> list[tuple[int, int]]:
    """Reap the children of this process that have ended, and return their status; not those that ``run`` waits for, in
    another thread.
    """
    reaped: list[tuple[int, int]] = []
    if not _starting.acquire(timeout=_START_WITHIN):  # a program on a hung disk is being started: later
        return reaped
    try:
        while (first := _first_ended()) is not None:
            others = _children() - _waited_for if first in _waited_for else {first}
            ended = [one for pid in others if (one := _wait_for(pid))[0]]
            reaped += ended
            if not ended:
                break
    finally:
        _starting.release()
    return reaped


def awaited() -> frozenset[int]:
    """Return the children of this process whose end ``run`` waits for, in any thread, with those that are being started now."""
    locked = _starting.acquire(timeout=_START_WITHIN)
    try:
        return frozenset(_waited_for)
    finally:
        if locked:
            _starting.release()


def _first_ended() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def _wait_for(pid: int) -> tuple[int, int]:
    try:
        return os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def _children() -> set[int]:
    """Return the children of this process, of all its threads; those that have ended too."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            found.update(map(int, Path(f"/proc/self/task/{thread}/children").read_text("ascii").split()))
        except OSError:  # a thread that has just ended, or a kernel that does not say: they are seen the next time
            continue
    return found


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    cwd: str | None = None,
    output_limit: int = _OUTPUT_LIMIT,
) -> CompletedCommand:
    """Run ``argv`` for at most ``timeout`` seconds (plus half a second to see it die).

    ``output_limit``: bytes of its stdout that are kept; 0: none is, however much it writes. One that writes more than 64 MB
    to what is kept is ended as at the bound. Raises FileNotFoundError or PermissionError when it cannot be started at all.
    Never raises for what it does.
    """
    started = time.monotonic()
    if host.answer_by is not None:
        timeout = min(timeout, max(_AT_LEAST, host.answer_by - started))
    with _memory_file() as out, _memory_file() as err, _memory_file() as given:
        if stdin is not None:
            given.write(stdin.encode())
            given.seek(0)
        # Not a with-block: leaving one would wait for the child, which is the very thing that must be bounded.
        with _starting:
            child = subprocess.Popen(
                list(argv),
                stdin=given,
                stdout=out if output_limit else subprocess.DEVNULL,
                stderr=err,
                env=None if env is None else dict(env),
                cwd=cwd,
                start_new_session=True,
            )
            _waited_for.add(child.pid)
        written = (err.fileno(), out.fileno())
        try:
            code = _wait(child, timeout, written)
        finally:
            _waited_for.discard(child.pid)
        seconds, endless = time.monotonic() - started, _is_endless(written)
        code = None if endless else code
        stdout = _text(out, min(output_limit, _KEPT) if endless else output_limit)
        return CompletedCommand(tuple(argv), code, stdout, _text(err, _KEPT), seconds, endless)


def _memory_file() -> IO[bytes]:
    """Return a nameless file in memory: no disk that could be full or hung stands between a command and its answer."""
    return os.fdopen(os.memfd_create("ftsupervise-output", os.MFD_CLOEXEC), "w+b")


def _is_endless(written: Sequence[int]) -> bool:
    return any(os.fstat(fd).st_size > _OUTPUT_LIMIT for fd in written)


def _wait(child: subprocess.Popen[bytes], timeout: float, written: Sequence[int]) -> int | None:
    until = time.monotonic() + timeout
    try:
        _await_end(child.pid, timeout, written)
        return child.wait(0.0 if _is_endless(written) else max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    except BaseException:  # Ctrl-C must not leave the child behind
        end_group(child.pid)
        raise
    end_group(child.pid)
    try:
        child.wait(0.5)
    except subprocess.TimeoutExpired:
        child.returncode = -signal.SIGKILL  # so that not even its destructor waits for it again
    return None


def _await_end(pid: int, seconds: float, written: Sequence[int]) -> None:
    """Return when the child ends, or has written too much: ``Popen.wait`` with a timeout would look for it every 50 ms."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:  # a kernel without it
        return
    try:
        poll, until = select.poll(), time.monotonic() + seconds
        poll.register(fd, select.POLLIN)
        while (rest := until - time.monotonic()) > 0 and not _is_endless(written):
            pulse.beat()
            if poll.poll(min(pulse.part(rest) or 0.0, _LOOK) * 1000):
                return
    finally:
        os.close(fd)


def _text(file: IO[bytes], limit: int) -> str:
    file.seek(0)
    return file.read(limit).decode("utf-8", "replace")
