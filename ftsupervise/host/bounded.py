"""Run a command and return in time, whatever the command does.

``subprocess.run(timeout=…)`` kills the child at the bound and then waits for it again, this time for ever: a child in
uninterruptible sleep (a hung mount, a stuck device) keeps its caller. Here the child has its own session, its output
goes to memory files instead of pipes that a grandchild could hold open, and one that does not die is left behind and reported.
So is one that cannot even begin, because the program lies on a mount that hangs (``begin.py``).
One that writes without an end is ended while it writes: its output takes memory.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ftsupervise import host
from ftsupervise.host import pulse
from ftsupervise.host.begin import StartedProgram, begin
from ftsupervise.host.processes import die_with_parent, end_group, send

_AT_LEAST = 1.0  # least seconds for a command

_OUTPUT_LIMIT = (
    64_000_000  # bytes of stdout kept: a queue of 100,000 jobs is 20 MB; a command that writes more is ended
)
_LOOK = 0.02  # seconds from one look at the size of the output to the next
_KEPT = 100_000  # bytes kept of stderr, and of the output of a command that wrote without an end
_DIES = 0.5  # seconds for a killed one to be gone
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
_starting = threading.Lock()  # held until a child that was just made is among them


def _unlock() -> None:
    """Another thread may have held it when this process was forked."""
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


def reap() -> list[tuple[int, int]]:
    """Reap the children of this process that have ended, and return their status; not those that ``run`` waits for, in
    another thread.
    """
    reaped: list[tuple[int, int]] = []
    with _starting:
        while (first := _first_ended()) is not None:
            others = _children() - _waited_for if first in _waited_for else {first}
            ended = [one for pid in others if (one := _wait_for(pid))[0]]
            reaped += ended
            if not ended:
                break
    return reaped


def awaited() -> frozenset[int]:
    """Return the children of this process whose end ``run`` waits for, in any thread, with those that are being started now."""
    with _starting:
        return frozenset(_waited_for)


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
            given.write(stdin.encode("utf-8", "surrogateescape"))
            given.seek(0)
        written = (err.fileno(), out.fileno())
        # this process may leave before the bound, and nobody else would end it then
        with_us = die_with_parent(signal.SIGKILL)
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            with _starting:
                child = begin(
                    argv,
                    (given.fileno(), written[1] if output_limit else null, written[0]),
                    env=env,
                    cwd=cwd,
                    before_exec=with_us,
                )
                _waited_for.add(child.pid)
        finally:
            os.close(null)
        try:
            code = _wait(child, started + timeout, written)
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


def _wait(child: StartedProgram, until: float, written: Sequence[int]) -> int | None:
    """Raises OSError when it cannot be started at all."""
    try:
        if child.has_begun(until - time.monotonic(), pulse.beat):
            _await_end(child, until, written)
    except OSError:
        raise
    except BaseException:  # Ctrl-C must not leave the child behind
        _end(child.pid)
        raise
    if not _is_endless(written) and (code := child.poll()) is not None:
        return code
    _end(child.pid)
    dead = time.monotonic() + _DIES
    while child.poll() is None and time.monotonic() < dead:
        time.sleep(0.005)
    return None


def _end(pid: int) -> None:
    """Kill it and its group, which it leads as soon as it runs."""
    end_group(pid)
    send([pid], signal.SIGKILL)


def _await_end(child: StartedProgram, until: float, written: Sequence[int]) -> None:
    """Return when the child ends, or has written too much."""
    try:
        fd = os.pidfd_open(child.pid)
    except OSError:  # a kernel without it
        fd = -1
    try:
        poll = select.poll()
        if fd >= 0:
            poll.register(fd, select.POLLIN)
        while (rest := until - time.monotonic()) > 0 and not _is_endless(written):
            pulse.beat()
            if poll.poll(min(pulse.part(rest) or 0.0, _LOOK) * 1000) or (fd < 0 and child.poll() is not None):
                return
    finally:
        if fd >= 0:
            os.close(fd)


def _text(file: IO[bytes], limit: int) -> str:
    file.seek(0)
    return file.read(limit).decode("utf-8", "replace")
