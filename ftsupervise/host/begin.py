"""Starts a program and returns in time, also where the program itself lies on a dead mount.

``subprocess.Popen`` waits until its child has become the program, and that hangs where the program, the interpreter in its
first line or its working directory does not answer: with all threads of this process, because the interpreter is locked.
Here that wait has a bound. The child exists then, and becomes the program when the mount answers, unless it is killed before.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence

_AS_USUAL = (signal.SIGPIPE, signal.SIGXFSZ)  # that Python itself ignores
_NOT_FOUND, _NOT_STARTED = 127, 126  # exit codes, as a shell has them
_REAP = 0.2  # seconds for a child that could not begin
_LOOK = 0.25  # seconds from one call of ``waiting`` to the next


class StartedProgram:
    """A child that becomes a program, in a session of its own. ``has_begun`` has to be asked once."""

    def __init__(self, pid: int, reader: int, name: str) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reader, self._name = reader, name

    def has_begun(self, seconds: float, waiting: Callable[[], object] = lambda: None) -> bool:
        """Wait until it is the program, for ``seconds``; False: its file system has not answered yet.

        One that cannot begin later ends with 127 or 126. ``waiting`` is called now and then. Raises OSError when it cannot be
        started at all.
        """
        try:
            said = self._said(time.monotonic() + seconds, waiting)
        finally:
            os.close(self._reader)
        if not said:
            return said is not None
        until = time.monotonic() + _REAP
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.001)
        number = int.from_bytes(said, "little")
        raise OSError(number, os.strerror(number), self._name)

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs. 0 where somebody else has reaped it."""
        if self.returncode is None:
            try:
                done, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def _said(self, until: float, waiting: Callable[[], object]) -> bytes | None:
        """Return the number of its error; b"" when it has begun, None when it has not by ``until``."""
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        while True:
            waiting()
            left = until - time.monotonic()
            if poll.poll(max(0.0, min(left, _LOOK)) * 1000):
                return os.read(self._reader, 4)
            if left <= 0:
                return None


def path_folders(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the folders in which a program of Slurm's or of this machine is looked for: the absolute ones in PATH. An empty
    entry, or a relative one, is the current directory, where a program of anybody may lie."""
    return [folder for folder in os.get_exec_path(env) if folder.startswith("/")]


def searched_alone(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` for a shell or an srun of ours, in which PATH has these folders alone."""
    return {**env, "PATH": os.pathsep.join(path_folders(env)) or os.defpath}


def on_path(name: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of such a program; None where there is none."""
    import shutil

    return shutil.which(name, path=os.pathsep.join(path_folders(env)))


def begin(
    argv: Sequence[str],
    files: tuple[int, int, int],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    before_exec: Callable[[], object] | None = None,
    anywhere: bool = False,
) -> StartedProgram:
    """Start ``argv`` with the descriptors ``files`` as its input, output and error output; waits for nothing.

    ``before_exec`` is called in the child. ``anywhere``: it is the command of a run, which is found as a shell finds it: by all
    of PATH (an srun before it is Slurm's). Raises OSError where there can be no more processes.
    """
    words, environment = list(argv), dict(os.environ if env is None else env)
    name = os.fspath(words[0])
    folders = os.get_exec_path(environment) if anywhere else path_folders(environment)
    places = [name] if "/" in name else [os.path.join(one, name) for one in folders]  # noqa: PTH118
    reader, writer = os.pipe2(os.O_CLOEXEC)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # our handlers are not its own
    try:
        pid = os.fork()
        if not pid:
            _become(places, words, environment, files, writer, cwd, before_exec, before)
    except BaseException:
        os.close(reader)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(writer)
    return StartedProgram(pid, reader, name)


def _become(
    places: Sequence[str],
    words: list[str],
    env: Mapping[str, str],
    files: tuple[int, int, int],
    writer: int,
    cwd: str | None,
    before_exec: Callable[[], object] | None,
    mask: set[int | signal.Signals],
) -> None:
    """Never returns. No import and no lock: another thread of the parent may have held it."""
    number = errno.ECANCELED
    try:
        os.setsid()
        for one in signal.valid_signals():
            if callable(signal.getsignal(one)) or one in _AS_USUAL:
                signal.signal(one, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        safe = [os.dup(fd) if fd < 3 and fd != at else fd for at, fd in enumerate(files)]  # else one overwrites another
        for at, fd in enumerate(safe):
            if fd != at:
                os.dup2(fd, at)
        os.closerange(3, writer)
        os.closerange(writer + 1, 1 << 20)
        if before_exec is not None:
            before_exec()
        if cwd is not None:
            os.chdir(cwd)
        number = _exec(places, words, env)
    except OSError as error:
        number = error.errno or number
    except BaseException:  # of ``before_exec``: there is nobody above who could be told otherwise
        pass
    finally:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        try:
            os.write(writer, number.to_bytes(4, "little"))
        except OSError:  # it is not waited for any more
            pass
        os._exit(_NOT_FOUND if number == errno.ENOENT else _NOT_STARTED)


def _exec(places: Sequence[str], words: list[str], env: Mapping[str, str]) -> int:
    """Return why none of ``places`` is the program: the first reason that is another than that it is not there."""
    why = errno.ENOENT
    for place in places:
        try:
            os.execve(place, words, env)
        except OSError as error:
            is_there = error.errno not in (errno.ENOENT, errno.ENOTDIR)
            if len(places) == 1 or (is_there and why == errno.ENOENT):
                why = error.errno or why
    return why
