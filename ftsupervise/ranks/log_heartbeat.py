"""``python -m ftsupervise.ranks.log_heartbeat``: the heartbeat of a command that has no guard, read from what it writes anyway.

It follows a log for steps, or a file that the command touches, and writes what it sees as the beat of rank 0. It is a process
of its own: a log on a dead mount, or a regular expression that takes for ever, stops this process and not the supervisor. Each
second in which it could look, it says so. When it does not, the supervisor knows nothing of the command, and ends nothing.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host import processes
from ftsupervise.host.ownership import open_to_read
from ftsupervise.host.ready import readable
from ftsupervise.ranks.life import LOOKED, PROCESSES, QUIET, SAYS, CommandProcesses, ProcessesSeen
from ftsupervise.rundir import heartbeat_page
from ftsupervise.rundir.attempt_pages import forget_page, write_page
from ftsupervise.rundir.log_lines import last_step, lines, whole
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, RunDir
from ftsupervise.rundir.percent_reader import PercentReader
from ftsupervise.rundir.records import as_count
from ftsupervise.rundir.step_reader import StepReader
from ftsupervise.truth import Beat, LinesWithoutStep, PercentReached

USUAL = "auto"  # in place of a regular expression: the usual forms of a step
_EVERY = 1.0  # seconds between two looks
_MOST = 262_144  # bytes of a log that are read at a look
_NUMBER = 4096  # bytes of a file whose content may be a step

_STARTING = "start"  # the phase of a command that has shown nothing yet
_SOURCE = "launch.heartbeat"  # a fact of its beats
_OF_A_STEP = ("first", "first_at", "active_at", "epoch", "last_step")  # facts that go with it
_GRACE = 30.0  # seconds before a sign of life is a beat, where nobody asked: the guard may report by then
_WINDOW = 10.0  # seconds over which processes count as idle
_IDLE = 0.05  # share of a core
_LINES, _AFTER = 200, 600.0  # lines, or seconds, without a step after which that is said
_AGAIN = 30.0  # seconds between two pages about it
_PERCENT = 5.0  # seconds between two pages of a percentage

Key = tuple[int, ...]


class ProgressSign(NamedTuple):
    """Progress since the last look. ``step``: None when none is told."""

    step: int | None
    first: int | None = None  # the step that was shown first, where more than one was needed to be sure
    total: int | None = None  # the last step to be made, where the lines say so
    epoch: int | None = None  # at that first step, where the lines say so
    first_at: float | None = None  # when that first step was shown, in epoch seconds
    withdrawn: bool = False  # what was told as a step was none: it began anew
    starting: bool = False  # no progress: the command is there, and has shown nothing yet


class FollowedLog:
    """The steps in the lines that are added to a log: an open file, or a path whose file may be rotated or cut."""

    def __init__(
        self, pattern: re.Pattern[str] | None, path: Path | None, fd: int = 0, begin: int | None = None
    ) -> None:
        """Pass over the earlier lines: earlier attempts wrote them. Raises OSError when ``fd`` is no file.

        ``pattern``: a person's own; None: what behaves like a step. ``begin``: the size of that file when the attempt began.
        """
        self.reader = StepReader() if pattern is None else None
        self.percent = PercentReader() if pattern is None else None
        self.grown = 0  # how often lines of the command were added
        self.lines = 0  # of the command that were read
        self._pattern, self._path = pattern, path
        self._fd = -1 if path is not None else fd
        self._at = 0
        self._step: int | None = None
        if path is None:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(0, "the job's output is not a file")
            self._at = found.st_size if begin is None else min(begin, found.st_size)
        elif self._open(path):
            self._at = os.fstat(self._fd).st_size

    def look(self) -> ProgressSign | None:
        """Return the step now, when it is another one than before. Raises OSError."""
        found = [step for step in (self._read(), self._read() if self._rotated() else None) if step is not None]
        if not found and self._step is not None and self.reader is not None and self.reader.step is None:
            self._step = None
            return ProgressSign(None, withdrawn=True)
        if not found or found[-1] == self._step:
            return None
        self._step = found[-1]
        if self.reader is not None:
            read = self.reader
            return ProgressSign(self._step, read.first, read.total, read.epoch, read.first_at)
        return ProgressSign(self._step)

    def _read(self) -> int | None:
        if self._fd < 0 and not (self._path is not None and self._open(self._path)):
            return None
        size = os.fstat(self._fd).st_size
        if size < self._at:  # it was cut
            self._at = 0
        begin = max(self._at, size - _MOST)
        data = os.pread(self._fd, min(_MOST, size - begin), begin)
        self._at = whole(data, begin)
        added = data[: self._at - begin]
        count, now = 0, time.time()
        for line in lines(added):
            count += 1
            if self.percent is not None:
                self.percent.read(line, now)
        self.grown += count > 0
        self.lines += count
        if self.reader is not None:
            self.reader.feed(added, now)
            return self.reader.step
        return None if self._pattern is None else last_step(added, self._pattern)

    def _rotated(self) -> bool:
        """Return whether the path names another file by now. That is read from its beginning."""
        if self._path is None or self._fd < 0:
            return False
        try:
            there, here = self._path.stat(), os.fstat(self._fd)
        except FileNotFoundError:
            return False
        if (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino):
            return False
        os.close(self._fd)
        self._fd, self._at = -1, 0
        return True

    def _open(self, path: Path) -> bool:
        try:
            self._fd = open_to_read(path)
        except FileNotFoundError:
            return False
        return True


class TouchedFile:
    """A file that the command touches, or writes its step into."""

    def __init__(self, path: Path, output: int = 0) -> None:
        """Open the file. Raises OSError when it is ``output``, the job's: our own lines in it are no progress."""
        self._path = path
        self._key = self._look()[0]
        own = os.fstat(output)
        if self._key[:2] == (own.st_dev, own.st_ino):
            raise OSError(0, f"{path} is the job's own output; give the regular expression of a step (heartbeat.log)")

    def look(self) -> ProgressSign | None:
        """Return the step in it, when it was touched since the last look. Raises OSError."""
        key, step = self._look()
        if key == self._key or not key:
            return None
        self._key = key
        return ProgressSign(step)

    def _look(self) -> tuple[Key, int | None]:
        try:
            fd = open_to_read(self._path)
        except FileNotFoundError:
            return (), None
        try:
            found = os.fstat(fd)
            text = os.read(fd, _NUMBER).split()[:1] if found.st_size <= _NUMBER else []
        finally:
            os.close(fd)
        step = as_count(text[0].decode("ascii", "replace")) if text else None
        return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size), step


class BeatsOfCommand:
    """Writes the progress as the beat of rank 0, on ``node``: the scheduler's name of this machine, where it has one."""

    def __init__(self, rundir: RunDir, attempt: int, area: Path | None, asked: bool = True, node: str = "") -> None:
        self._rundir, self._attempt, self._area, self._asked = rundir, attempt, area, asked
        self._node = node or os.uname().nodename
        self._facts = {"every": f"{_EVERY:g}", "attempt": str(attempt), "source": _SOURCE}
        self._step: int | None = None
        self._pid = 0
        self.written = False  # a beat

    def write(self, seen: ProgressSign) -> None:
        """Write a beat. Raises OSError, and GuardIsThere."""
        self._pid = self._pid or self._of_the_command()
        self.look_for_a_guard()
        if seen.withdrawn:
            self._step = None
            for name in _OF_A_STEP:
                self._facts.pop(name, None)
        if seen.step is not None:
            if seen.step != self._step:
                self._facts["active_at"] = f"{time.time():.3f}"
            self._step = seen.step
            if "first" not in self._facts:
                first = seen.step if seen.first is None else seen.first
                began = time.time() if seen.first_at is None else seen.first_at
                self._facts |= {"first": str(first), "first_at": f"{began:.3f}"}
                self._facts |= {} if seen.epoch is None else {"epoch": str(seen.epoch)}
            if seen.total is not None:
                self._facts["last_step"] = str(seen.total)
        phase = _STARTING if seen.starting else "train" if self._asked else ""
        at = datetime.now(timezone.utc)
        beat = Beat(0, self._step, phase, at, self._pid, self._node, dict(self._facts))
        heartbeat_page.write_beat(self._rundir, beat, self._area)
        self.written = True

    def _of_the_command(self) -> int:
        """Return the first rank of an srun here, else the oldest process of the attempt: the evidence of a hang is of it."""
        mine = processes.marked(ENV_ATTEMPT_DIR).get(str(self._rundir.attempt(self._attempt)), [])
        named = {one.pid: processes.environment(one.pid) for one in mine}
        ranks = {pid: env for pid, env in named.items() if env.get("SLURM_TASK_PID") == str(pid)}
        if ranks:
            return min(ranks, key=lambda pid: as_count(ranks[pid].get("SLURM_PROCID", "")) or 0)
        return min(mine, key=lambda one: one.start).pid if mine else os.getpid()

    def look_for_a_guard(self) -> None:
        """Raises OSError, and GuardIsThere."""
        beats = heartbeat_page.read_beats(self._rundir)
        if any(one.facts.get("attempt") == str(self._attempt) and "source" not in one.facts for one in beats):
            raise GuardIsThere


class LifeOfCommand:
    """Looks at the processes of the attempt here: they show a standstill that the output cannot."""

    def __init__(self, mark: str) -> None:
        """``mark``: the value of the attempt in their environment."""
        self._began = time.monotonic()
        self._processes = CommandProcesses(lambda: processes.marked(ENV_ATTEMPT_DIR).get(mark, []))
        self._last: tuple[float, ProcessesSeen] | None = None  # at the last sign of life
        self._grown = 0

    def look(self) -> ProcessesSeen | None:
        """Return what they do now; None where they cannot be seen, or may do their work elsewhere."""
        return self._processes.look()

    def sign(self, log: FollowedLog | TouchedFile, doing: ProcessesSeen | None) -> ProgressSign | None:
        """Return a sign of life since the last one: output, or CPU time and traffic while none is stopped."""
        now = time.monotonic()
        grown = log.grown if isinstance(log, FollowedLog) else 0
        alive, self._grown = grown != self._grown, grown
        if doing is not None and self._last is not None and doing.state != "T":
            at, before = self._last
            seconds = now - at
            alive = alive or doing.cpu - before.cpu >= _IDLE * seconds or doing.moved - before.moved >= QUIET * seconds
        if doing is not None and (alive or self._last is None or now - self._last[0] >= _WINDOW):
            self._last = now, doing
        return ProgressSign(None) if alive and now - self._began >= _GRACE else None

    def waits(self, doing: ProcessesSeen | None) -> ProgressSign | None:
        """Return that the command is there, once it may have shown something: what it waits for from its start on may be a
        file or a server that never answers."""
        past = doing is not None and time.monotonic() - self._began >= _GRACE
        return ProgressSign(None, starting=True) if past else None


class StepsNotFound:
    """Says of an output in which no step is found that it is so: in the attempt's folder, and once to the supervisor."""

    def __init__(self, folder: Path, *, asked: bool) -> None:
        self._folder, self._asked, self._began = folder, asked, time.monotonic()
        self._told: LinesWithoutStep | None = None
        self._due, self._over = 0.0, False

    def look(self, log: FollowedLog | TouchedFile, beats: BeatsOfCommand, seen: ProgressSign | None) -> str:
        """Write the page, or remove it where a step was found. Return what the supervisor is to say. Raises OSError, and
        GuardIsThere."""
        if seen is not None and seen.withdrawn:
            self._over = False
        step = None if seen is None else seen.step
        if step is not None and not self._over:
            self._over = True
            if self._told is not None:
                forget_page(LinesWithoutStep, self._folder)
        now = time.monotonic()
        if self._over or not isinstance(log, FollowedLog) or now < self._due or not log.lines:
            return ""
        if log.lines < _LINES and now - self._began < _AFTER:
            return ""
        self._due = now + _AGAIN
        found, before = LinesWithoutStep(log.lines, self._asked), self._told
        if found == before:
            return ""
        self._told = found
        try:
            beats.look_for_a_guard()
        except GuardIsThere:
            if before is not None:
                forget_page(LinesWithoutStep, self._folder)
            raise
        write_page(self._folder, found)
        return "" if before is not None else found.words()


class PercentPage:
    """Writes the percentage that the output shows, where it shows no step."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._told, self._due = folder, "", 0.0

    def look(self, log: FollowedLog | TouchedFile, step: int | None, *, last: bool) -> bool:
        """Write the page where there is something new, and return whether there is a percentage. Raises OSError."""
        reader = log.percent if isinstance(log, FollowedLog) else None
        if reader is None:
            return False
        found = None if step is not None else reader.found()
        if found is None and not self._told:
            return False
        now, says = time.monotonic(), repr(found)
        if says != self._told and (last or now >= self._due or found is None):
            self._due, self._told = now + _PERCENT, says
            if found is None:  # it was no progress after all
                forget_page(PercentReached, self._folder)
            else:
                write_page(self._folder, found)
        return found is not None


class GuardIsThere(Exception):
    """The ranks beat by themselves."""


def follow(
    one: FollowedLog | TouchedFile,
    beats: BeatsOfCommand,
    life: LifeOfCommand,
    tell: Callable[[bytes], None],
    every: float,
    unread: StepsNotFound,
    percent: PercentPage,
    *,
    asked: bool = True,
) -> None:
    """Look again and again, until the ranks beat by themselves, and once more after a SIGTERM. Raises BrokenPipeError once the
    supervisor has gone."""
    told, last, look = "", False, one.look
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # one that came while this process was starting
    while True:
        try:
            seen = look()
            tell(LOOKED)
            doing = None if last else life.look()  # the command is over, and its last step is waited for
            if doing is not None:
                tell(PROCESSES + f"{doing.state} {doing.cpu:.2f}\n".encode())
            if seen is None and not asked:
                seen = life.sign(one, doing) or (None if beats.written else life.waits(doing))
            if seen is not None:
                beats.write(seen)
            known = one.reader.step if isinstance(one, FollowedLog) and one.reader is not None else None
            shows = percent.look(one, known, last=last)
            if not shows and (said := unread.look(one, beats, seen)):
                tell(SAYS + said.encode() + b"\n")
        except GuardIsThere:
            if asked:
                tell(SAYS + b"the loop has a guard, which is believed instead of launch.heartbeat\n")
            return
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            if (text := error.strerror or str(error)) != told:
                told = text
                tell(SAYS + f"launch.heartbeat cannot look: {text}\n".encode())
        if last:
            return
        last = bool(readable([woken], every))


def source(pattern: str, path: str, begin: int | None = None) -> FollowedLog | TouchedFile:
    """Return the source that the words of the command line name. Raises OSError, ValueError."""
    if pattern:
        return FollowedLog(None if pattern == USUAL else re.compile(pattern), Path(path) if path else None, begin=begin)
    return TouchedFile(Path(path))


def main() -> int:
    pattern, path, run, attempt, area, begin, node = sys.argv[1:8]
    asked = bool(pattern or path)

    def tell(data: bytes) -> None:
        try:
            os.write(1, data)
        except BlockingIOError:  # the supervisor has not read for hours
            return

    try:
        one = source(pattern if asked else USUAL, path, as_count(begin))
    except OSError as error:
        if not asked:  # a terminal or a pipe: somebody sees it
            return 0
        tell(SAYS + f"launch.heartbeat cannot look: {error.strerror or error}\n".encode())
        return 1
    beats = BeatsOfCommand(RunDir(run), int(attempt), Path(area) if area else None, asked, node)
    folder = RunDir(run).attempt(int(attempt))
    life, unread = LifeOfCommand(str(folder)), StepsNotFound(folder, asked=pattern not in ("", USUAL))
    try:
        follow(one, beats, life, tell, _EVERY, unread, PercentPage(folder), asked=asked)
    except BrokenPipeError:  # the supervisor has gone
        return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
