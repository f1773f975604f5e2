"""Starts the process that reads a heartbeat from the command's own output (``ranks/log_heartbeat.py``), for the
supervisor.

The beats reach the supervisor through the run directory. The pipe says only that the process could look just now: while
it cannot, a beat that stays the same proves nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from ftsupervise.host import processes
from ftsupervise.ranks.life import LOOKED, PROCESSES, SAYS, ProcessesSeen
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import RankState

_SILENT = 5.0  # seconds without a look after which nothing is known of the command
_OURS = ("FTSUPERVISE_", "SLURM_")  # what marks a process as the attempt's own
_END = 1.0  # seconds for it to end
_LAST = 4.0  # the same for one that could look until now: on a busy machine it has no turn for a while
_LATE = 10.0  # seconds without a rank's report to a start that was put off
_BRIEF = 2.0  # seconds: a command that lasts no longer has no steps that would be waited for


class LogFollower:
    """The follower of one attempt. Make it before the command, whose processes are told from it by that.

    ``log`` and ``file`` empty: nobody has asked for it. It reads the output all the same, until a guard reports.
    ``guarded``: the attempt before had a guard. Then the process is started late, and only where no rank has reported by then:
    it would take processor time from ranks that start.
    ``everywhere``: what the processes do on all nodes, where there are nodes beside this one; None: this is the only one.
    """

    def __init__(
        self,
        log: str,
        file: Path | None,
        rundir: RunDir,
        attempt: int,
        area: Path | None,
        say: Callable[[str], None],
        everywhere: Callable[[], tuple[str, ProcessesSeen] | None] | None = None,
        guarded: bool = False,
    ) -> None:
        self._say, self._looked, self._ended = say, monotonic(), False
        self._asked, self._everywhere = bool(log or file), everywhere
        self._processes: tuple[str, float | None] = ("", None)  # the state of those here, and their CPU seconds
        self._rest, self._reported, self._began = b"", False, monotonic()
        self._process: processes.Process | None = None
        self.leave_out: Callable[[int], object] = lambda _: None  # told of a process that is none of the command's
        node = os.environ.get("SLURMD_NODENAME", "")
        self._words = (log, str(file or ""), str(rundir.root), str(attempt), str(area or ""), _size(1), node)
        self._pipe, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._asked or not guarded:
            self._start()

    def _start(self) -> None:
        output = _readable(1)
        try:
            child = subprocess.Popen(
                processes.own_command(*self._words, module="ftsupervise.ranks.log_heartbeat"),
                stdin=subprocess.DEVNULL if output is None else output,
                stdout=self._write,
                stderr=subprocess.DEVNULL,
                env={key: value for key, value in os.environ.items() if not key.startswith(_OURS)},
                start_new_session=True,
                preexec_fn=_before_exec(),
            )
        except OSError as error:
            self._say(f"launch.heartbeat is not read: {error.strerror}")
            self._ended = True
        else:
            child.returncode = 0  # reaped with everything else that is ours
            self._process, self._looked = processes.process(child.pid), monotonic()
            self.leave_out(child.pid)
        finally:
            os.close(self._write)
            self._write = -1
            if output is not None:
                os.close(output)

    def believed(self, states: Sequence[RankState]) -> Sequence[RankState]:
        """Return ``states``, as far as they may speak of a hang: while the follower does not look, beats without a
        process behind them prove nothing.
        """
        if self._write >= 0 and not states and monotonic() - self._began >= _LATE:
            self._start()
        self._hear()
        if not self._ended and monotonic() - self._looked < _SILENT:
            return [self._with_processes(one) if one.read else one for one in states]
        if not self._reported and self._asked:
            self._reported = True
            self._say("launch.heartbeat is not read at present: until it is, no hang is noticed")
        return [one for one in states if not one.read]

    def _with_processes(self, one: RankState) -> RankState:
        """Return the state of what was read, with what the processes of the command do."""
        if self._everywhere is None:
            return one._replace(state=self._processes[0], cpu=self._processes[1])
        found = self._everywhere()
        if found is None:
            return one._replace(state="", cpu=None)
        node, seen = found
        if seen.state == "T":
            one = one._replace(rank=seen.rank, node=node, pid=seen.pid)
        return one._replace(state=seen.state, cpu=seen.cpu)

    def _hear(self) -> None:
        while not self._ended:
            try:
                data = os.read(self._pipe, 4096)
            except BlockingIOError:
                return
            if not data:
                self._ended = True
                return
            self._looked = monotonic()
            *said, rest = (self._rest + data).split(b"\n")
            self._rest = rest.lstrip(LOOKED)[-4096:]
            for line in said:
                if line.lstrip(LOOKED).startswith(PROCESSES):
                    self._note(line.lstrip(LOOKED).removeprefix(PROCESSES).decode("ascii", "replace").split())
                    continue
                self._say(line.lstrip(LOOKED).removeprefix(SAYS).decode("utf-8", "replace"))

    def _note(self, words: Sequence[str]) -> None:
        """Take what the processes do here."""
        self._processes = (words[0], float(words[1])) if len(words) == 2 else ("", None)

    def close(self) -> None:
        """Let it take a last look and end; bounded. What it has not read by then is missing from the step of the attempt."""
        self._hear()
        if self._process is not None:
            brief = not self._asked and monotonic() - self._began < _BRIEF
            processes.signal_exactly(self._process, signal.SIGKILL if brief else signal.SIGTERM)
            bound = _LAST if monotonic() - self._looked < _SILENT else _END
            for one in processes.wait_gone([self._process], bound):
                processes.signal_exactly(one, signal.SIGKILL)
        self._hear()
        for fd in (self._pipe, self._write):
            if fd >= 0:
                os.close(fd)


def _before_exec() -> Callable[[], None]:
    """Return the function that the follower calls before its exec. It is asked for its last look by SIGTERM, which waits for
    it (``log_heartbeat.follow``) where it is still starting by then.
    """
    dies = processes.die_with_parent(signal.SIGKILL)

    def before_exec() -> None:
        dies()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    return before_exec


def _size(fd: int) -> str:
    """Return the size of the file that ``fd`` is, where it is one: the first lines may be there before anybody reads."""
    try:
        return str(os.fstat(fd).st_size)
    except OSError:
        return ""


def _readable(fd: int) -> int | None:
    """Return ``fd``, which was opened for writing, opened anew for reading; None where that cannot be."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
