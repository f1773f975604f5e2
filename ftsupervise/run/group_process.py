"""Holds what the process that starts the groups knows of one of them: its supervisor, its nodes, its directory.

The supervisor is an ordinary ``ftsupervise run`` in the group's own directory, so that restarts in place, the hang detector,
the fence, the brake and the ledger are those of any run. When it ends itself, the group needs other nodes, or is over.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from ftsupervise.host.in_time import OneAtATime, in_time
from ftsupervise.host.ownership import FOLDER, as_page, make_folder
from ftsupervise.host.processes import Process, die_with_parent, marked
from ftsupervise.host.pulse import ENV_PULSE
from ftsupervise.model import Attempt
from ftsupervise.replicas.groups import GroupState, ReplicaGroup
from ftsupervise.run.group_disk import GroupReading, read_group
from ftsupervise.run.group_pulse import STOPPED_FOR, is_stopped
from ftsupervise.run.group_silence import SupervisorWatch, silence_bound
from ftsupervise.rundir import ledger
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, RunDir
from ftsupervise.rundir.progress import ProgressPage

_FIRST, _MOST = 1.0, 60.0  # seconds before a supervisor that ended is started again: doubled each time
_LIVED = 60.0  # seconds after which it counts as the first time again
_OPENS = 5.0  # seconds for the file of its output to be opened
_ENVIRONMENTS = 2.0  # seconds for those of all processes of this host to be read


class GroupProcess:
    """One replica group. ``row`` is what others see of it."""

    def __init__(self, name: str, number: int, rundir: RunDir, nodes: tuple[str, ...], now: datetime) -> None:
        self.number, self.rundir = number, rundir
        self.row = ReplicaGroup(name, GroupState.WAITING, now, nodes=nodes)
        self.seen = GroupReading()
        self.runs_elsewhere = False  # in a job of its own
        self.code: tuple[int, float] | None = None  # of its supervisor, and when that ended, until it was looked after
        self.due = 0.0  # monotonic: when it may be started
        self.lost: tuple[str, ...] = ()  # nodes that were lost under it: its older copy may still run there
        self.orphaned = False  # its supervisor was killed: its ranks may still run
        self.watch: SupervisorWatch | None = None  # of its newest supervisor
        self._marked = OneAtATime[dict[str, list[Process]]]()
        self._pause, self._began = _FIRST, 0.0
        self._stopped: float | None = None  # monotonic: since when it was seen stopped
        self._ended = self._last_number()

    @property
    def alive(self) -> bool:
        return bool(self.row.pid) or self.runs_elsewhere

    @property
    def has_failed(self) -> bool:
        """Tell whether its newest attempt failed. The exit code of its supervisor is srun's, which may be 0 for a lost node."""
        return self.newest is not None and (self.newest.failure is not None or self.newest.ended is None)

    @property
    def newest(self) -> Attempt | None:
        return self.seen.newest

    @property
    def page(self) -> ProgressPage | None:
        return self.seen.page

    @property
    def leaves(self) -> bool:
        return self.seen.leaves

    @property
    def braked(self) -> str:
        return self.seen.braked

    def move(self, state: GroupState, why: str, now: datetime) -> bool:
        """Set its state, and tell whether that is new."""
        if (state, why) == (self.row.state, self.row.why):
            return False
        since = self.row.since if state is self.row.state else now
        self.row = self.row._replace(state=state, why=why, since=since)
        return True

    # ----------------------------------------------------------------------------------------------------- its process

    def start(self, command: Sequence[str], env: Mapping[str, str], log: str, now: datetime, at: float) -> None:
        """Start its supervisor. What it and its ranks print goes into the group's own file, in which causes are looked for.
        Raises OSError."""

        def opened() -> int:
            make_folder(self.rundir.logs, FOLDER, parents=True)
            return as_page(self.rundir.logs / f"{log}.out")

        fd = in_time(opened, _OPENS, late=os.close)
        if fd is None:
            raise OSError(errno.ETIMEDOUT, f"{self.rundir.logs} does not answer")
        watch = None
        try:
            watch = SupervisorWatch(at, silence_bound(env))
            child = subprocess.Popen(
                command,
                env={**env, ENV_PULSE: str(watch.pipe.write)},
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                start_new_session=True,
                pass_fds=(watch.pipe.write,),
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
        except BaseException:
            if watch is not None:
                watch.pipe.close()
            raise
        finally:
            os.close(fd)
        child.returncode = 0  # reaped by us
        watch.begin(child.pid)
        self.watch, self.orphaned, self._began = watch, False, at
        self.row = self.row._replace(pid=child.pid)
        self.move(GroupState.RUNNING, "", now)

    def ended(self, at: float) -> int | None:
        """Return the exit code of its supervisor, once; None while that runs."""
        if not self.row.pid:
            return None
        try:
            pid, status = os.waitpid(self.row.pid, os.WNOHANG)
        except ChildProcessError:
            pid, status = self.row.pid, 1 << 8
        if pid == 0:
            return None
        self.row = self.row._replace(pid=0)
        if self.watch is not None:
            self.watch.pipe.close()
        if at - self._began > _LIVED:
            self._pause = _FIRST
        self.due = at + self._pause
        self._pause = min(_MOST, 2 * self._pause)
        return os.waitstatus_to_exitcode(status)

    def signal(self, number: int) -> None:
        if self.row.pid:
            try:
                os.kill(self.row.pid, number)  # a child that we have not reaped: the number is its own
            except ProcessLookupError:
                return

    def continued(self, at: float) -> bool:
        """Continue its supervisor once that has been stopped (SIGSTOP) for two seconds. True where that was done."""
        if not self.row.pid or not is_stopped(self.row.pid):
            self._stopped = None
            return False
        if self._stopped is None:
            self._stopped = at
        if at - self._stopped < STOPPED_FOR:
            return False
        self._stopped = None
        self.signal(signal.SIGCONT)
        return True

    def listen(self, at: float) -> str:
        """Hear its supervisor, and end one that stands for ever. Returns a sentence where there is news."""
        return self.watch.look(at) if self.row.pid and self.watch is not None else ""

    def has_continued_us(self) -> bool:
        """Tell whether its supervisor has continued this process, which was stopped; once."""
        if self.watch is None:
            return False
        done, self.watch.pipe.has_continued_us = self.watch.pipe.has_continued_us, False
        return done

    def left_behind(self) -> list[int] | None:
        """Return the processes of its attempts that run on this host, once its supervisor has ended; None where that cannot be
        seen."""
        found = self._marked(lambda: marked(ENV_ATTEMPT_DIR), _ENVIRONMENTS)
        if found is None:
            return None
        mine = f"{self.rundir.attempts}{os.sep}"
        return sorted(one.pid for folder, some in found.items() if folder.startswith(mine) for one in some)

    # ------------------------------------------------------------------------------------------------- its directory

    @property
    def known(self) -> tuple[RunDir, GroupReading, int]:
        """Return the arguments of ``read_group``."""
        return self.rundir, self.seen, self._ended

    def look(self, now: datetime) -> tuple[Attempt, ...]:
        """``take`` what its directory says now. Never raises."""
        return self.take(read_group(*self.known), now)

    def take(self, seen: GroupReading, now: datetime) -> tuple[Attempt, ...]:
        """Believe this reading; returns the ends of its attempts since the last one, oldest first."""
        self.seen = seen
        if seen.newest is not None:
            self.row = self._row(seen.newest, now)
        if seen.ends:
            self._ended = seen.ends[-1].number
        return seen.ends

    def step_by(self, now: datetime) -> int | None:
        """Return the highest step that its ranks can have reached by now; None where that is not known, or they have made
        none since their start. The page may be seconds old."""
        page, seconds = self.page, self.row.seconds
        if page is None or page.ahead is None or page.first is None or not seconds:
            return None
        return page.ahead + round(2 * max(0.0, (now - page.at).total_seconds()) / seconds) + 1

    def _row(self, newest: Attempt, now: datetime) -> ReplicaGroup:
        page = self.page
        step = newest.last_step if page is None or newest.ended is not None else page.ahead
        row = self.row._replace(
            attempt=newest.number, job=newest.job_id, step=step if step is not None else self.row.step
        )
        if page is None:
            return row._replace(stalled=None)
        age = max(0.0, (now - page.at).total_seconds())
        stalled = None if page.stepped is None else round(page.stepped + age, 1)
        row = row._replace(seconds=1 / page.rate if page.rate else row.seconds, stalled=stalled)
        return self._rejoined(row, newest)

    def _rejoined(self, row: ReplicaGroup, newest: Attempt) -> ReplicaGroup:
        """Add how long it was away before this attempt, and what the others did meanwhile, once it has made a step."""
        if newest.first_step is None or newest.number < 2 or newest.ready is None or row.back_in == newest.number:
            return row
        before = self.seen.before
        if before is None or (before.ended is None and before.worked is None):
            return row
        progress = before.started + timedelta(seconds=before.worked) if before.worked is not None else before.ended
        assert progress is not None
        back = (newest.started + timedelta(seconds=newest.ready) - progress).total_seconds()
        made = None if before.last_step is None else newest.first_step - before.last_step - 1
        return row._replace(
            back=round(max(0.0, back), 1),
            missed=None if made is None else max(0, made),
            redone=None if made is None else max(0, -made),
            back_in=newest.number,
        )

    def _last_number(self) -> int:
        try:
            return max(ledger.numbers(self.rundir), default=0)
        except OSError:
            return 0


def log_name(name: str, job: str) -> str:
    """Return the name of the file of a group's output, in its logs/."""
    return f"{name}-{job or 'local'}".replace("/", "_")
