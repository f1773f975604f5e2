"""Call a function of this package in a process of its own, and have its value, or what it raises, within a bound.

An errand is a fork. This is for a caller that must not be forked: a notebook with its threads, a scheduler that holds
gigabytes, or a process that lives for weeks. A new interpreter starts, and watches a child of its own that does the work; when
nothing moves in that any more, it is given up as every errand is, and the caller is told.

    asked("interface.looks:status", None, patience=12.0, slurm=8.0)

It costs what a command costs, a quarter of a second. Values come back as they are, so both ends have to be this package.
"""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from ftsupervise import host
from ftsupervise.errors import Error, NoAnswer
from ftsupervise.host import processes
from ftsupervise.probe.errand import Stuck, portable, watched

_PROGRAM = "ftsupervise.probe.own_process"
_MARK = b"ftsupervise-answer:"  # before it: the output that a site makes every Python print when it starts
_MOST = 60.0  # seconds beyond the patience: the machine is busy, and something moves
_DIES = 0.5  # seconds for it to die
_STUCK = "a file system, or Slurm, does not answer; sinfo shows whether Slurm does, and ls of a dead mount hangs"


def asked(function: str, *args: Any, patience: float, slurm: float, cwd: str | None = None) -> Any:
    """Return what ``function`` ("room.module:name") returns for ``args``, or raise what it raises.

    ``patience``: seconds without a movement in which it is given up; ``slurm``: those for all that Slurm is asked in it;
    ``cwd``: where relative paths begin, default: here. Raises NoAnswer when it is given up.
    """
    given = base64.b64encode(pickle.dumps((function, args, patience, slurm, cwd)))
    try:
        one = subprocess.Popen(
            processes.own_command(module=_PROGRAM),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise Error(f"no process can be started for it: {error.strerror or error}") from None
    try:
        out, err = one.communicate(given, timeout=patience + _MOST)
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer within {patience + _MOST:.0f} s", hint=_STUCK) from None
    finally:
        _end(one)
    _, mark, raw = out.rpartition(_MARK)
    if not mark:
        said = err.decode("utf-8", "replace").strip().splitlines()
        raise Error(f"the process that did it was lost: {said[-1] if said else f'exit code {one.returncode}'}")
    raised, value = pickle.loads(base64.b64decode(raw))  # from our own child
    if raised is not None:
        raise raised
    return value


def _end(one: subprocess.Popen[bytes]) -> None:
    """End it and what it has begun, where it has not ended; one that does not die is left behind."""
    if one.poll() is None:
        processes.end_group(one.pid)
        with suppress(subprocess.TimeoutExpired):
            one.wait(_DIES)
    for file in (one.stdin, one.stdout, one.stderr):
        if file is not None:
            file.close()


def _answer() -> None:
    """Answer one question, which comes as the input of this process."""
    processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGKILL)
    function, args, patience, slurm, cwd = pickle.loads(base64.b64decode(sys.stdin.buffer.read()))
    room, _, name = function.partition(":")
    key = " ".join((function, cwd or "", *(one for one in args if isinstance(one, str))))
    value: object = None
    raised: BaseException | None = None
    try:
        work = getattr(import_module(f"ftsupervise.{room}"), name)
        host.answer_by = time.monotonic() + slurm
        value = watched(lambda _: _done(work, args, cwd), key=key, patience=patience)
    except Stuck as stuck:
        raised = NoAnswer(stuck.message, hint=_STUCK)
    except BaseException as problem:  # handed to the caller, who raises it
        raised = portable(problem)
    sys.stdout.buffer.write(_MARK + base64.b64encode(pickle.dumps((raised, value))))


def _done(work: Callable[..., object], args: tuple[object, ...], cwd: str | None) -> object:
    """Do it, in the child that may hang."""
    if cwd is not None:
        os.chdir(cwd)
    return work(*args)


if __name__ == "__main__":
    _answer()
