"""Holds what the process that starts the groups knows of one of them: its supervisor, its nodes, its directory.

The supervisor is an ordinary ``ftsupervise run`` in the group's own directory, so that restarts in place, the hang detector,
the fence, the brake and the ledger are those of any run. When it ends itself, the group needs other nodes, or is over.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import re
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from ftsupervise.host import pulse
from ftsupervise.host.in_time import OneAtATime, in_time
from ftsupervise.host.ownership import FOLDER, as_page, make_folder
from ftsupervise.host.processes import Process, die_with_parent, marked, process, send, signal_exactly, stat_fields
from ftsupervise.host.pulse import ENV_PULSE
from ftsupervise.host.standing import Standing, standing
from ftsupervise.model import Attempt
from ftsupervise.ranks.evidence import evidence
from ftsupervise.replicas.disk import GroupReading, read_group
from ftsupervise.replicas.table import GroupState, ReplicaGroup
from ftsupervise.rundir import ledger
from ftsupervise.rundir.attempt_pages import LostEnd, write_page
from ftsupervise.rundir.heartbeat_page import STACK_SIGNAL
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, RunDir, write_whole

# The pipe between a group's supervisor and the process that started it: no disk is between them.
#
# The supervisor's main thread sends a byte whenever it turns or waits with a bound, and its stacks when it is asked for them.
# The other way round, each supervisor continues the process above it where somebody has stopped that, and says so through the
# pipe.

STOPPED_FOR = 2.0  # seconds after which a stopped process is continued
_STOPPED_LOOK = 0.5  # seconds between two looks at the process above
_STOPPED = "T"  # in /proc/PID/stat; a debugger's "t" is left alone
_CONTINUED = b"\1"
_MOST_READ = 1 << 20  # characters of its stacks


class PulsePipe:
    """The end of the process above."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.stacks = ""  # as the supervisor has written them
        self.has_continued_us = False
        self._read, self.write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def given(self) -> None:
        """The supervisor has the other end now."""
        os.close(self.write)
        self.write = -1

    def close(self) -> None:
        for fd in (self._read, self.write):
            if fd >= 0:
                os.close(fd)
        self._read = self.write = -1

    def hear(self) -> bool:
        """Read what came; return whether the main thread has sent something. Never waits."""
        heard = False
        while self._read >= 0:
            try:
                data = os.read(self._read, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            heard |= pulse.PULSE in data
            self.has_continued_us |= _CONTINUED in data
            self.stacks += data.translate(None, pulse.PULSE + _CONTINUED).decode("utf-8", "replace")
        self.stacks = self.stacks[:_MOST_READ]
        return heard


# In the supervisor of a group.


def answer_parent(env: MutableMapping[str, str]) -> None:
    """Send the bytes from now on, answer with our stacks, and keep the process above us from being stopped. Nothing where we
    are no group's supervisor. Takes the name of the pipe out of ``env``: our command does not get it."""
    number = env.pop(ENV_PULSE, "")
    if not number.isdecimal():
        return
    fd = int(number)
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return
        os.set_inheritable(fd, False)
    except OSError:
        return
    pulse.start(fd)
    if signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)
    threading.Thread(target=_keep_going, args=(os.getppid(),), name="process-above", daemon=True).start()


def _keep_going(parent: int) -> None:
    looks = 0  # a clock would also count the time in which we were stopped ourselves, as all of a suspended job are
    while os.getppid() == parent:
        time.sleep(_STOPPED_LOOK)
        looks = looks + 1 if is_stopped(parent) else 0
        one = process(parent)
        if looks * _STOPPED_LOOK >= STOPPED_FOR and one is not None and os.getppid() == parent:
            looks = 0
            signal_exactly(one, signal.SIGCONT)
            pulse.send(_CONTINUED)


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped (SIGSTOP) and may be continued. One with a controlling terminal is left alone: the
    person who sits there may have stopped it (Ctrl-Z)."""
    found = stat_fields(f"/proc/{pid}/stat")
    return found is not None and found[1][0] == _STOPPED and found[1][4] == "0"


# ------------------------------------------------------------------------------------------


# Ends the supervisor of a group that stands for ever, so that another one takes its place.
#
# One whose main thread has sent nothing for ten minutes, and that waits for no file system meanwhile, will not go on: its
# stacks are read, then it is killed. What follows is the end of any killed supervisor. One that waits for a dead disk goes on
# when the disk answers, and its ranks train meanwhile: it is left alone. So is one of which it cannot be seen where it stands.

ENV_SILENCE = "FTSUPERVISE_SILENCE_SECONDS"  # for tests
# seconds: more than twice what the waits that send nothing may take, one behind the other: two minutes for the fence on two
# dead file systems, one and a half for snapshots from other nodes, half a minute for Slurm
SILENCE = 600.0
_AGO = 0.1  # of that: from then on it is looked at where it stands
_LOOK = 5.0  # seconds between two such looks, at most
_SEEN = 0.2  # seconds for one
_GAP = 5.0  # seconds between two reads of the pipe: where more went by we did not run, and it may not have run either
_STACKS = 4.0  # seconds for its stacks
_DIES = 10.0  # seconds after SIGKILL


def silence_bound(env: Mapping[str, str]) -> float:
    text = env.get(ENV_SILENCE, "")
    return float(text) if text.isdecimal() else SILENCE


class SupervisorWatch:
    """Follows one supervisor from its start to its end. ``at`` is monotonic."""

    def __init__(self, at: float, bound: float = SILENCE) -> None:
        """Raises OSError."""
        self.pipe = PulsePipe()
        self.ended_for = ""  # why we have ended it
        self._bound, self._pid, self._evidence = bound, 0, ""
        self._heard = self._looked = at
        self._silent = self._counts = 0.0  # seconds: of silence, and of those in which it waited for no file system
        self._asked: float | None = None  # since when its stacks are read, or since its SIGKILL
        self._stands, self._told = Standing.FREE, False
        self._look, self._outside = OneAtATime[Standing](), OneAtATime[str]()

    def begin(self, pid: int) -> None:
        """It has started."""
        self._pid = pid
        self.pipe.given()

    def look(self, at: float) -> str:
        """Hear it, and end it when its time is over. Returns a sentence for the log where there is news."""
        gap, self._heard = at - self._heard, at
        heard = self.pipe.hear()
        if self.ended_for:
            return self._after_the_kill(at)
        if heard:
            goes_on, self._told, self._asked = self._told or self._asked is not None, False, None
            self._silent, self._counts, self._stands = 0.0, 0.0, Standing.FREE
            return "its supervisor goes on" if goes_on else ""
        if self._asked is not None:
            return self._kill(at) if self._have_stacks(at) else ""
        if gap > _GAP:
            return ""
        self._silent += gap
        if self._silent >= _AGO * self._bound and at >= self._looked + min(_LOOK, _AGO * self._bound):
            self._looked = at
            self._stands = self._look(lambda: standing(self._pid), _SEEN) or Standing.UNSEEN
        self._counts += gap if self._stands is Standing.FREE else 0.0
        return self._judge(at)

    def _judge(self, at: float) -> str:
        words = f"its supervisor has not answered for {self._silent:.0f} s"
        if self._counts >= self._bound and self._stands is Standing.FREE:
            self._asked = at
            self._ask_for_stacks()
            return f"{words}, and {self._stands.value}: it is ended by SIGKILL as soon as its stacks are read"
        if self._silent < self._bound or self._told or self._stands is Standing.FREE:
            return ""
        self._told = True
        return f"{words}; {self._stands.value}: it is left alone"

    def _ask_for_stacks(self) -> None:
        self.pipe.stacks = ""
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", _status(self._pid), re.M)
        if caught is not None and int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1:
            self._send(STACK_SIGNAL)

    def _have_stacks(self, at: float) -> bool:
        assert self._asked is not None
        outside = self._outside(lambda: evidence(self._pid), 0.0)
        self._evidence = outside or self._evidence
        return outside is not None or at >= self._asked + _STACKS

    def _kill(self, at: float) -> str:
        self.ended_for = f"its supervisor did not answer for {self._silent:.0f} s and was ended"
        self._asked, self._told = at, False
        self._send(signal.SIGKILL)
        return f"{self.ended_for}; its ranks are ended too, then the group is started again"

    def _after_the_kill(self, at: float) -> str:
        assert self._asked is not None
        if self._told or at < self._asked + _DIES:
            return ""
        self._told = True
        return "SIGKILL does not end its supervisor: nothing is started in its place before it has ended"

    def record(self, attempt: Path, why: str) -> None:
        """Write down ``why`` the attempt has no end of its own in the ledger ("": it has one), and the stacks of a supervisor
        that we have ended. Raises OSError."""
        if why:
            write_page(attempt, LostEnd(why))
        if not self.ended_for:
            return
        make_folder(attempt / "evidence")
        inside = self.pipe.stacks or "none: it did not answer the signal that asks for them\n"
        text = f"{self._evidence}\n== Python stacks (the main thread is the last one)\n{inside}"
        write_whole(attempt / "evidence" / "supervisor.txt", text)

    def _send(self, number: int) -> None:
        send([self._pid], number)  # a child that we have not reaped: the number is its own


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------


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
        newest = self.seen.newest
        return newest is not None and (newest.failure is not None or newest.ended is None)

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
            send([self.row.pid], number)  # a child that we have not reaped: the number is its own

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
        page, seconds = self.seen.page, self.row.seconds
        if page is None or page.ahead is None or page.first is None or not seconds:
            return None
        return page.ahead + round(2 * max(0.0, (now - page.at).total_seconds()) / seconds) + 1

    def _row(self, newest: Attempt, now: datetime) -> ReplicaGroup:
        page = self.seen.page
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
