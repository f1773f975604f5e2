"""Run the entries that are due at one slot (executables here, all at once; job scripts as jobs), or one entry by hand.

No entry runs twice at the same time: while its last run goes on, the new one is recorded as skipped.
"""

from __future__ import annotations

import errno
import os
import re
import selectors
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ftsupervise.crontab import ENV_DIR, ENV_ENTRY, ENV_SLOT, chain, history
from ftsupervise.crontab.chain import entry_comment
from ftsupervise.crontab.entries import CronEntry, Due, EntryKind, due, find
from ftsupervise.crontab.history import EntryRun, RunEnd, RunStart, SlotEnd
from ftsupervise.crontab.installation import CronDir, Installed, dir_option, stamp
from ftsupervise.errors import Error, NotFound, Refused, SchedulerUnavailable, did_you_mean
from ftsupervise.host import files, processes
from ftsupervise.host.begin import StartedProgram, begin
from ftsupervise.host.local_disks import temporary_folder
from ftsupervise.host.ownership import distrust_route
from ftsupervise.model import Job, JobState
from ftsupervise.rundir.paths import ENV_WATCH_EVERY, ENV_WATCHER, write_whole
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.scheduler import Scheduler

# Run the executables of one slot at the same time, each with a bound, and end the processes that they leave behind.
#
# Output goes through us, so that it is bounded: the beginning is written as it comes, the end when the run is over. An entry's
# processes are found by the process tree and by a mark in their environment, which a daemon that left the tree still has.

MARK = "FTSUPERVISE_CRON_RUN"
_BEGINS = 2.0  # seconds that one may take to begin before the next one is begun
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_UNKILLABLE = 5.0  # seconds a process may take to die of SIGKILL before it is left behind
_AT_ONCE = 8
_OUTPUT = 1_000_000  # bytes of the output of one run that are kept: the beginning and the end
Echo = Callable[[bytes], None] | None  # also gets the output, as it comes


@dataclass(frozen=True)
class Task:
    """One executable to be run. ``folder`` is its own; output goes to ``folder/output``."""

    key: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    folder: Path
    cwd: str
    stdin: str = ""


@dataclass(frozen=True)
class Ended:
    """The end of a task. ``code`` is negative for a signal, None when the task was ended at its bound or never began."""

    key: str
    code: int | None
    words: str
    seconds: float


class BoundedOutput:
    """The first half of ``limit`` bytes as they come, the last half at the end, and between them how much is missing."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._half = path, max(1, limit // 2)
        self._file: IO[bytes] | None = None
        self._tail: deque[bytes] = deque()
        self._head = self._kept = self._dropped = 0

    def write(self, data: bytes) -> None:
        room = self._half - self._head
        if room > 0:
            self._put(data[:room])
            self._head += len(data[:room])
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._kept += len(data)
        while self._tail and self._kept - len(self._tail[0]) >= self._half:
            self._kept -= len(self._tail[0])
            self._dropped += len(self._tail.popleft())

    def close(self) -> None:
        if self._dropped:
            self._put(f"\n[... {self._dropped} bytes are not kept ...]\n".encode())
        for data in self._tail:
            self._put(data)
        self._tail.clear()
        if self._file is not None:
            try:
                self._file.close()
            except OSError:
                pass

    def _put(self, data: bytes) -> None:
        """Never raises: losing output must not end the entry."""
        try:
            if self._file is None:
                self._file = os.fdopen(files.open_append(self._path), "ab", buffering=0)
            self._file.write(data)
        except OSError:
            return


@dataclass
class _RunningTask:
    task: Task
    child: StartedProgram
    pipe: IO[bytes]
    output: BoundedOutput
    started: float
    bound: float
    ending: float | None = None  # when SIGKILL follows
    killed: float | None = None
    eof: bool = False


def run_all(
    tasks: Sequence[Task], *, bound: float, output_limit: int, on_end: Callable[[Ended], None], echo: Echo = None
) -> None:
    """Run every task, at most ``_AT_ONCE`` at a time, each for at most ``bound`` seconds. ``on_end`` is called at each end.

    Returns when all have ended or were left behind (a process in state D dies when its device answers, not before).
    """
    before_exec = processes.become_subreaper()
    before = frozenset(processes.below(os.getpid()))
    waiting = list(tasks)
    running: list[_RunningTask] = []
    with selectors.DefaultSelector() as selector:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                task = waiting.pop(0)
                started = _start(task, bound, BoundedOutput(task.folder / "output", output_limit), before_exec)
                if isinstance(started, Ended):
                    on_end(started)
                else:
                    selector.register(started.pipe, selectors.EVENT_READ, started)
                    running.append(started)
            for key, _ in selector.select(timeout=0.1):
                if not _read(key.data, echo) and key.data.eof:
                    selector.unregister(key.fileobj)
            for one in list(running):
                ended = _step(one, before)
                if ended is None:
                    continue
                for _ in range(1000):  # a process that still holds the pipe may write for ever
                    if not _read(one, echo):
                        break
                if one.pipe in selector.get_map():
                    selector.unregister(one.pipe)
                one.pipe.close()
                one.output.close()
                running.remove(one)
                on_end(ended)
    _end_the_rest(before)


def _start(task: Task, bound: float, output: BoundedOutput, before_exec: Callable[[], None]) -> _RunningTask | Ended:
    try:
        given = os.memfd_create("ftsupervise-stdin", os.MFD_CLOEXEC)
        try:
            os.write(given, task.stdin.encode())
            os.lseek(given, 0, os.SEEK_SET)
            reader, writer = os.pipe2(os.O_CLOEXEC)
            env = {**task.env, MARK: str(task.folder)}
            try:
                child = begin(task.argv, (given, writer, writer), env=env, cwd=task.cwd, before_exec=before_exec)
            except OSError:
                os.close(reader)
                raise
            finally:
                os.close(writer)
        finally:
            os.close(given)
        try:
            child.has_begun(_BEGINS)  # one on a mount that hangs begins later, or is ended at its bound
        except OSError:
            os.close(reader)
            raise
    except OSError as error:
        words = f"cannot be started: {error.strerror or error}"
        if error.errno == errno.ENOEXEC:
            words = "cannot be started: it has no #! line that names its interpreter"
        return Ended(task.key, None, words, 0.0)
    os.set_blocking(reader, False)
    return _RunningTask(task, child, os.fdopen(reader, "rb", buffering=0), output, time.monotonic(), bound)


def _read(one: _RunningTask, echo: Echo) -> bool:
    """Read the output that is there; False when there is no more."""
    if one.eof:
        return False
    try:
        data = os.read(one.pipe.fileno(), 65536)
    except BlockingIOError:
        return False
    if not data:
        one.eof = True
        return False
    one.output.write(data)
    if echo is not None:
        echo(data)
    return True


def _step(one: _RunningTask, before: frozenset[int]) -> Ended | None:
    """Check one task: has it ended, is it over its bound, must it be killed?"""
    now = time.monotonic()
    code = one.child.poll()
    seconds = now - one.started
    if one.ending is None and code is None and seconds <= one.bound:
        return None
    left = members(one.child.pid, one.task.folder, before)
    if one.ending is None:
        if code is not None and not left:
            return Ended(one.task.key, code, _words(code), seconds)
        processes.send(left, signal.SIGTERM)
        one.ending = now + _GRACE
        if code is not None:
            one.bound = -1.0  # it has ended by itself, and left processes running
        return None
    if one.child.poll() is None and one.child.pid not in left:
        left.append(one.child.pid)
    if not left:
        return _over(one, seconds)
    if one.killed is None and now >= one.ending:
        one.killed = now
    if one.killed is not None:
        processes.send(left, signal.SIGKILL)
        if now - one.killed > _UNKILLABLE:
            if one.child.poll() is None:
                one.child.returncode = -signal.SIGKILL  # we do not wait for it again
            return _over(one, seconds, tuple(left))
    return None


def _over(one: _RunningTask, seconds: float, left: tuple[int, ...] = ()) -> Ended:
    stuck = f"; processes that do not die were left behind: {', '.join(map(str, left))}" if left else ""
    if one.bound < 0:
        code = one.child.returncode or 0
        return Ended(one.task.key, code, f"{_words(code)}; processes that it left running were ended{stuck}", seconds)
    words = f"ended at its bound of {show_duration(one.bound)}, with all processes that it had started{stuck}"
    return Ended(one.task.key, None, words, seconds)


def members(pid: int, folder: Path, before: frozenset[int]) -> list[int]:
    """The living processes of a task: below its first one, and orphans of ours that carry its mark."""
    found = [pid] if processes.identity(pid) is not None else []
    found += processes.below(pid)
    others = processes.below(os.getpid(), without=before)
    return found + [p for p in others if p not in found and processes.environment(p).get(MARK) == str(folder)]


def _end_the_rest(before: frozenset[int]) -> None:
    """End processes that have neither parent nor mark any more, then reap the orphans."""
    until = time.monotonic() + _UNKILLABLE
    while time.monotonic() < until:
        left = processes.below(os.getpid(), without=before)
        if not left or not processes.send(left, signal.SIGKILL):
            break
        time.sleep(0.02)
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def _words(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


# ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CronSlot:
    """One slot at work. ``queue``: the owner's jobs as Slurm lists them; None when it could not be asked. ``answers``: whether
    a home directory is there, told within a bound.
    """

    cron: CronDir
    installed: Installed
    at: datetime
    now: datetime
    job_id: str
    queue: tuple[Job, ...] | None
    jobs: Callable[[], Scheduler]
    started: float = field(default_factory=time.monotonic)
    answers: Callable[[Path], bool] = Path.is_dir

    def clock(self) -> datetime:
        return self.now + timedelta(seconds=time.monotonic() - self.started)

    def lost(self, run: EntryRun) -> bool:
        return history.lost(run, self.clock(), self.installed.limit, self.living, self.now)

    @property
    def living(self) -> frozenset[str] | None:
        """Return the ids of jobs that run or may yet run; None when Slurm could not be asked."""
        if self.queue is None:
            return None
        return frozenset(job.raw_id or job.base_id for job in self.queue if job.state is not JobState.COMPLETING)

    def claim(self, entry: CronEntry, start: RunStart, at: datetime | None = None) -> Path | None:
        return history.claim_run(self.cron, entry.key, at or self.at, start)

    def end(self, folder: Path, outcome: str, words: str) -> None:
        history.write_end(folder, RunEnd(self.clock(), outcome, words))

    def start(self, entry: CronEntry, missed: int = 0) -> RunStart:
        """The record of a run that begins now."""
        now, late = self.clock(), round((self.clock() - self.at).total_seconds(), 3)
        job = entry.kind is EntryKind.JOB
        comment = entry_comment(self.installed.id, entry.key, stamp(self.at)) if job else ""
        return RunStart(now, late, os.uname().nodename, os.getpid(), self.job_id, missed, comment)


def work(slot: CronSlot, entries: tuple[CronEntry, ...], *, bound: float) -> SlotEnd:
    """Run all entries that are due, each for at most ``bound`` seconds. One entry's error is recorded, not raised."""
    ran: list[str] = []
    skipped: list[str] = []
    missed: dict[str, int] = {}
    trouble: list[str] = []
    tasks: list[Task] = []
    for entry in entries:
        try:
            owed = _owed(slot, entry)
            if owed.missed:
                missed[entry.name] = len(owed.missed)
            if not owed.run:
                _write_missed(slot, entry, owed)
            elif why := busy(slot, history.newest_begun(slot.cron, entry.key)):
                skipped.append(entry.name)
                if folder := slot.claim(entry, slot.start(entry)):
                    slot.end(folder, "skipped", f"skipped: {why}")
            else:
                tasks += _begin(slot, entry, len(owed.missed))
                ran.append(entry.name)
        except OSError as error:
            trouble.append(f"{entry.name}: {error.strerror or error}")
    if tasks:
        _execute(slot, tasks, bound, trouble)
    return SlotEnd(None, tuple(ran), tuple(skipped), missed, tuple(trouble))


def _owed(slot: CronSlot, entry: CronEntry) -> Due:
    newest = history.runs(slot.cron, entry.key, most=1)
    period = slot.installed.period
    seen = newest[0].at if newest else history.first_seen(slot.cron, entry.key, slot.at - period)
    return due(entry.schedule, slot.at, period, min(seen, slot.at))


def busy(slot: CronSlot, newest: EntryRun | None) -> str:
    """Return why an entry whose newest run is ``newest`` must not start now; "" if it may."""
    if newest is None or not newest.open:
        return ""
    start = newest.start
    if start.job_comment:
        if slot.queue is None:
            return f"Slurm could not be asked whether its job {start.job_id} still runs"
        job = chain.living(newest, slot.queue)
        if job is not None:
            return f"its job {job.id} is {job.state.value}"
        # otherwise ``follow`` would have recorded it
        return f"it is not known whether its job {start.job_id} has ended"
    if slot.lost(newest):
        return ""
    return f"it has been running since {newest.began:%H:%M:%S} UTC on {start.host or 'another host'}"


def _write_missed(slot: CronSlot, entry: CronEntry, owed: Due) -> None:
    """Record the slots that an entry missed and that no later run makes up for."""
    if owed.missed and (folder := slot.claim(entry, slot.start(entry), owed.missed[-1])):
        times = f"{len(owed.missed)} slots" if len(owed.missed) > 1 else "the slot"
        span = show_duration((slot.at - owed.missed[0]).total_seconds())
        slot.end(folder, "missed", f"{times} of the last {span} missed, and no later run makes up for them")


# ---------------------------------------------------------------------------------------------------------- one run


def _begin(slot: CronSlot, entry: CronEntry, missed: int) -> list[Task]:
    """Claim the run and start it: a task to be executed, or none for a job script, which is submitted here."""
    start = slot.start(entry, missed)
    try:
        folder = slot.claim(entry, start)
    except OSError:  # a full disk: the disk watchdog among the entries reports it
        folder = Path(tempfile.mkdtemp(prefix="ftsupervise-cron-", dir=temporary_folder(distrust_route)))
    if folder is not None and entry.kind is EntryKind.JOB:
        _submit(slot, entry, folder, start)
        return []
    return [] if folder is None else [_task(slot, entry, folder)]


def _task(slot: CronSlot, entry: CronEntry, folder: Path) -> Task:
    """The task that executes an entry, with the environment that was recorded at install."""
    ours = {ENV_SLOT: slot.at.isoformat(), ENV_ENTRY: entry.name, ENV_DIR: str(slot.cron.root)}
    env = {**slot.installed.whole_environment, **entry.env, **ours, **_as_a_watch(slot, entry)}
    home = env.get("HOME", "/")
    return Task(entry.key, entry.argv, env, folder, home if slot.answers(Path(home)) else "/", entry.stdin)


def _as_a_watch(slot: CronSlot, entry: CronEntry) -> dict[str, str]:
    """Return the name and the interval under which an entry checks runs, if it does: others miss it when it is late. The
    node is no part of the name, for the next slot's job runs on another one."""
    period = slot.installed.period
    after = entry.schedule.next_after(slot.at, period)
    if after is None:  # never again
        return {}
    seconds = max(period, after - slot.at).total_seconds()
    name = watcher_of(slot.installed, entry.key)
    return {ENV_WATCHER: name, ENV_WATCH_EVERY: f"{seconds:.0f}"}


def watcher_of(installed: Installed, entry: str) -> str:
    """Return the name of an entry as a watch."""
    return f"cron-{installed.id}-{re.sub('[^A-Za-z0-9._-]', '_', entry)}"[:100]


def _submit(slot: CronSlot, entry: CronEntry, folder: Path, start: RunStart) -> None:
    """Submit a dropped job script. An error becomes the end of its run."""
    ours = {ENV_SLOT: slot.at.isoformat(), ENV_ENTRY: entry.name, **_as_a_watch(slot, entry)}
    env = {**slot.installed.environment, **ours}
    try:
        script, output = chain.prepare(entry, slot.installed, folder, start.job_comment, slot.cron.secrets)
        copy = folder / "job.sbatch"
        write_whole(copy, script.encode("utf-8", "surrogateescape"), mode=0o755)
        job = slot.jobs().submit(script, script_path=copy, token=start.job_comment, env=env)
        history.write_start(folder, replace(start, at=slot.clock(), output=output, job_id=job.job_id))
    except SchedulerUnavailable:
        return  # it may be in the queue all the same: the next tick looks for its comment
    except Error as error:
        slot.end(folder, "failed", error.message)
    except (ValueError, OSError) as error:
        slot.end(folder, "failed", getattr(error, "strerror", None) or str(error))


def _execute(slot: CronSlot, tasks: list[Task], bound: float, trouble: list[str], echo: Echo = None) -> list[Ended]:
    folders = {task.key: task.folder for task in tasks}
    ends = []

    def write_end(ended: Ended) -> None:
        outcome = "ok" if ended.code == 0 else "failed"
        record = RunEnd(slot.clock(), outcome, ended.words, ended.code, round(ended.seconds, 3))
        try:
            history.write_end(folders[ended.key], record)
        except OSError as error:
            trouble.append(f"{ended.key}: {ended.words}; its record cannot be written: {error.strerror}")
        history.prune_runs(slot.cron, ended.key, slot.installed.keep)
        ends.append(ended)

    run_all(tasks, bound=bound, output_limit=_OUTPUT, on_end=write_end, echo=echo)
    return ends


# ---------------------------------------------------------------------------------------------------------- by hand


@dataclass(frozen=True)
class RunByHand:
    """``code`` is the entry's own exit code (1 when it was ended at its bound), 0 for a job that was submitted."""

    folder: Path
    code: int
    words: str


def entry_called(cron: CronDir, installed: Installed, name: str) -> CronEntry:
    """Return the entry ``name``: "hourly/disk", or "disk" if there is only one.

    Raises NotFound, saying why a file is passed over.
    """
    found = find(cron, installed)
    matching = [entry for entry in found.entries if name in (entry.name, entry.name.partition("/")[2])]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise NotFound(f"several entries are called {name!r}", hint=f"one of: {', '.join(e.name for e in matching)}")
    hint = f"ftsupervise cron list{dir_option(cron)}"
    for passed in found.passed:
        if name in (passed.name, passed.name.partition("/")[2]):
            raise NotFound(f"{passed.name} is passed over: {passed.why}", hint=hint)
    near = did_you_mean(name, (word for one in found.entries for word in (one.name, one.name.partition("/")[2])))
    raise NotFound(f"no entry is called {name!r} in {cron.root}{near}", hint=hint)


def run_now(slot: CronSlot, entry: CronEntry, *, again: bool, echo: Echo) -> RunByHand:
    """Run ``entry`` once, bounded and recorded, as a slot would; ``echo`` gets its output as it comes.

    Raises Refused while it runs already, CannotWrite, the scheduler's errors.
    """
    why = busy(slot, history.newest_begun(slot.cron, entry.key))
    if why and not again:
        raise Refused(f"{entry.name} is not started: {why}", hint="--again starts it anyway")
    start = slot.start(entry)
    folder = slot.claim(entry, start)
    if folder is None:
        raise Refused(f"{entry.name} was started this very second", hint="try again")
    if entry.kind is EntryKind.JOB:
        _submit(slot, entry, folder, start)
        newest = history.newest_begun(slot.cron, entry.key)
        if newest is not None and newest.end.outcome:
            raise Error(f"{entry.name}: {newest.end.words}")
        job = newest.start.job_id if newest is not None else ""
        words = f"submitted as job {job}" if job else "handed to sbatch, which gave no clear answer"
        return RunByHand(folder, 0, words)
    (ended,) = _execute(slot, [_task(slot, entry, folder)], slot.installed.limit.total_seconds(), [], echo)
    code = ended.code
    return RunByHand(folder, 1 if code is None else code if code >= 0 else 128 - code, ended.words)
