"""One replica group as the process that starts the groups sees it: its supervisor, its nodes, and what its directory says.

The supervisor is an ordinary ``ftsupervise run`` in the group's own directory, so that restarts in place, the hang detector,
the fence, the brake and the ledger are those of any run. When it ends itself, the group needs other nodes, or is over.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from ftsupervise.host.modes import FOLDER, as_page, make_folder
from ftsupervise.host.processes import die_with_parent
from ftsupervise.model import Attempt
from ftsupervise.replicas.groups import GroupState, ReplicaGroup
from ftsupervise.rundir import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import ProgressPage, read_progress
from ftsupervise.rundir.switches import read_brake

LEAVE = "leave"  # in a group's state/: it leaves for good
_FIRST, _MOST = 1.0, 60.0  # seconds before a supervisor that ended is started again: doubled each time
_LIVED = 60.0  # seconds after which it counts as the first time again


class GroupProcess:
    """``row`` is what others see of it."""

    def __init__(self, name: str, number: int, rundir: RunDir, nodes: tuple[str, ...], now: datetime) -> None:
        self.number, self.rundir = number, rundir
        self.row = ReplicaGroup(name, GroupState.WAITING, now, nodes=nodes)
        self.newest: Attempt | None = None
        self.page: ProgressPage | None = None  # of the newest attempt
        self.runs_elsewhere = False  # in a job of its own
        self.due = 0.0  # monotonic: when it may be started
        self.lost: tuple[str, ...] = ()  # nodes that were lost under it: its older copy may still run there
        self._pause, self._began = _FIRST, 0.0
        self._leaves, self._braked = False, ""
        self._ended = self._last_number()

    @property
    def alive(self) -> bool:
        return bool(self.row.pid) or self.runs_elsewhere

    @property
    def has_failed(self) -> bool:
        """Was its newest attempt a failure? The exit code of its supervisor is srun's, which may be 0 when a node was lost."""
        return self.newest is not None and (self.newest.failure is not None or self.newest.ended is None)

    @property
    def leaves(self) -> bool:
        """Has a person asked it to leave for good? Where that cannot be seen, the last answer holds."""
        try:
            os.lstat(self.rundir.state / LEAVE)
        except FileNotFoundError:
            self._leaves = False
        except OSError:
            pass
        else:
            self._leaves = True
        return self._leaves

    @property
    def braked(self) -> str:
        """Why it is not started again; "" without a brake. Where that cannot be seen, the last answer holds."""
        try:
            on = read_brake(self.rundir)
        except OSError:
            return self._braked
        clear = f"ftsupervise clear --brake {self.rundir.quoted()}"
        self._braked = "" if on is None else f"{on.words()}; fix the cause, then: {clear}"
        return self._braked

    def move(self, state: GroupState, why: str, now: datetime) -> bool:
        """Is that new?"""
        if (state, why) == (self.row.state, self.row.why):
            return False
        since = self.row.since if state is self.row.state else now
        self.row = self.row._replace(state=state, why=why, since=since)
        return True

    # ----------------------------------------------------------------------------------------------------- its process

    def start(self, command: Sequence[str], env: Mapping[str, str], log: str, now: datetime, at: float) -> None:
        """Start its supervisor. What it and its ranks print goes into the group's own file, in which causes are looked for.
        Raises OSError."""
        make_folder(self.rundir.logs, FOLDER, parents=True)
        fd = as_page(self.rundir.logs / f"{log}.out")
        try:
            child = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=fd,
                stderr=fd,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
        finally:
            os.close(fd)
        child.returncode = 0  # reaped by us
        self._began = at
        self.row = self.row._replace(pid=child.pid)
        self.move(GroupState.RUNNING, "", now)

    def ended(self, at: float) -> int | None:
        """Its exit code, once; None while it runs."""
        if not self.row.pid:
            return None
        try:
            pid, status = os.waitpid(self.row.pid, os.WNOHANG)
        except ChildProcessError:
            pid, status = self.row.pid, 1 << 8
        if pid == 0:
            return None
        self.row = self.row._replace(pid=0)
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

    # ------------------------------------------------------------------------------------------------- its directory

    def look(self, now: datetime) -> list[Attempt]:
        """Read how it is; returns the ends of its attempts since the last look, oldest first. Never raises."""
        try:
            newest = ledger.newest(self.rundir)
            new = self._new_ends(newest)
        except OSError:
            return []
        self.newest = newest
        if newest is not None:
            self.page = read_progress(self.rundir, newest.number)
            self.row = self._seen(newest, now)
        return new

    def step_by(self, now: datetime) -> int | None:
        """The step that its ranks can have reached by now, at most; None where that is not known, or they have made none since
        their start. The page is seconds old."""
        page, seconds = self.page, self.row.seconds
        if page is None or page.ahead is None or page.first is None or not seconds:
            return None
        return page.ahead + round(2 * max(0.0, (now - page.at).total_seconds()) / seconds) + 1

    def _new_ends(self, newest: Attempt | None) -> list[Attempt]:
        last = newest.number if newest is not None else 0
        if last <= self._ended or newest is None:
            return []
        found = [one for one in ledger.backwards(self.rundir, first=self._ended + 1) if one.ended is not None]
        if found:
            self._ended = found[0].number
        return found[::-1]

    def _seen(self, newest: Attempt, now: datetime) -> ReplicaGroup:
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
        """How long it was away before this attempt, and what the others did meanwhile: once it has made a step."""
        if newest.first_step is None or newest.number < 2 or newest.ready is None or row.back_in == newest.number:
            return row
        before = next(ledger.backwards(self.rundir, before=newest.number), None)
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
    """The file of a group's output, in its logs/."""
    return f"{name}-{job or 'local'}".replace("/", "_")
