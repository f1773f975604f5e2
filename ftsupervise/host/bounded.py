"""Run a command and return in time, whatever the command does.

``subprocess.run(timeout=…)`` kills the child at the bound and then waits for it again, this time for ever: a child in
uninterruptible sleep (a hung mount, a stuck device) keeps its caller. Here the child has its own session, its output
goes to memory files instead of pipes that a grandchild could hold open, and one that does not die is left behind and reported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from ftsupervise import host
from ftsupervise.host.processes import end_group

_AT_LEAST = 1.0  # least seconds for a command

_OUTPUT_LIMIT = 64_000_000  # bytes of stdout kept: a queue of 100,000 jobs is 20 MB


@dataclass(frozen=True)
class CompletedCommand:
    """The result of a command. ``code`` is None when it was ended at the bound; negative for a signal."""

    argv: tuple[str, ...]
    code: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.code is None

    def words(self) -> str:
        """The command's own complaint, for an error message."""
        said = " ".join((self.stderr.strip() or self.stdout.strip()).split())
        if self.timed_out:
            return f"no answer within {self.seconds:.0f} s" + (f" ({said})" if said else "")
        return said or f"exit code {self.code}"


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

    ``output_limit``: bytes of its stdout that are kept; 0: none is, however much it writes. Raises FileNotFoundError or
    PermissionError when it cannot be started at all. Never raises for what it does.
    """
    started = time.monotonic()
    if host.answer_by is not None:
        timeout = min(timeout, max(_AT_LEAST, host.answer_by - started))
    with _memory_file() as out, _memory_file() as err, _memory_file() as given:
        if stdin is not None:
            given.write(stdin.encode())
            given.seek(0)
        # Not a with-block: leaving one would wait for the child, which is the very thing that must be bounded.
        child = subprocess.Popen(
            list(argv),
            stdin=given,
            stdout=out if output_limit else subprocess.DEVNULL,
            stderr=err,
            env=None if env is None else dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        code = _wait(child, timeout)
        seconds = time.monotonic() - started
        return CompletedCommand(tuple(argv), code, _text(out, output_limit), _text(err, 100_000), seconds)


def _memory_file() -> IO[bytes]:
    """A nameless file in memory: no disk that could be full or hung stands between a command and its answer."""
    return os.fdopen(os.memfd_create("ftsupervise-output", os.MFD_CLOEXEC), "w+b")


def _wait(child: subprocess.Popen[bytes], timeout: float) -> int | None:
    try:
        return child.wait(timeout)
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


def _text(file: IO[bytes], limit: int) -> str:
    file.seek(0)
    return file.read(limit).decode("utf-8", "replace")
