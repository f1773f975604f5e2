"""One copy of the person's run at work, for one row of the drill: launched, watched, looked at, hit, and ended."""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ftsupervise.alerts.journal import Journal
from ftsupervise.drill.mailbox import Mail, Mailbox
from ftsupervise.drill.verdict import SeenAfter, is_guarded
from ftsupervise.errors import Error
from ftsupervise.findings import AlertState
from ftsupervise.host import bounded, files, processes
from ftsupervise.host.ownership import OWN, claim_folder
from ftsupervise.host.processes import Process
from ftsupervise.launch.plan import plan
from ftsupervise.launch.rehearsal import is_the_persons
from ftsupervise.launch.submit import prepare, submit
from ftsupervise.model import Attempt
from ftsupervise.printable import printable
from ftsupervise.replicas.record import LighthouseRecord, read_lighthouse
from ftsupervise.replicas.table import read_table
from ftsupervise.report.alert_list import alerts_in
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, ENV_STATE_DIR, RunDir
from ftsupervise.rundir.switches import SAVE, raise_switch
from ftsupervise.scheduler import open_scheduler

if TYPE_CHECKING:
    from types import TracebackType

    from ftsupervise.config.schema import Run
    from ftsupervise.sandbox import Sandbox

_POLL = 0.2
_TICK = "3s"  # from one look of the copy's watch to the next
_WORKS = 20.0  # seconds that a script without the guard works before it is hit
_SAVED = 30.0  # seconds for a save that was asked for
_TOLD = 25.0  # seconds from the return of the run to the message about it
_GONE = 10.0  # seconds for all processes of a row to be gone
_LOG = 4 << 20  # bytes
_SURELY = 5  # steps: more than may be on their way while it is hit
_DISK = 4 << 30  # bytes: as large as the copy may become on a disk of its own
_TIMES = 10
LEAVES = 60.0  # seconds to see that the time is over, and to take everything away
TIME_IS_OVER = "the time of the drill was over (--within gives it more)"
_MOUNTED = 10.0  # seconds for a mount
Found = TypeVar("Found")


class CannotTry(Exception):
    """The row says nothing about the run; the words say why."""


class DrillPlace(NamedTuple):
    """The place where the drill works. ``run``: as it is copied for each row; ``sandbox``: None on ``scheduler: local``."""

    run: Run
    workdir: Path
    folder: Path  # gone with this process
    env: Mapping[str, str]
    sandbox: Sandbox | None
    start: float  # seconds for the first step
    until: float = math.inf  # monotonic: the time of the whole drill is over

    @property
    def kind(self) -> str:
        return self.run.scheduler


class Scene:
    """``with Scene(place, "kill-rank") as scene``: a copy that is at work, and nothing of it afterwards."""

    def __init__(self, place: DrillPlace, row: str) -> None:
        self.place, self.folder = place, place.folder / row
        self.rundir = RunDir(self.folder / "run")
        state = self.folder / "state"
        self.env = {**place.env, ENV_STATE_DIR: str(state), "FTSUPERVISE_LOCAL_KILL_WAIT": "5"}
        self.mailbox = Mailbox()
        self.run = place.run
        self.token, self.job = secrets.token_hex(6), ""
        self._scheduler = open_scheduler(place.kind, self.env)
        self._stack = ExitStack()

    def __enter__(self) -> Scene:
        claim_folder(self.folder, OWN)
        self._stack.enter_context(self.mailbox)
        self._stack.callback(self._end)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    # ------------------------------------------------------------------------------------------------------ to its work

    def launch(self) -> None:
        """Submit the copy and begin to watch it."""
        from ftsupervise.config.load import dump
        from ftsupervise.drill.copied import for_a_row

        now = datetime.now(timezone.utc)
        self.run = for_a_row(self.place.run, self.rundir.root, self.mailbox.port, self.mailbox.domain)
        planned = plan(
            self.run, kind=self.place.kind, token=self.token, workdir=self.place.workdir, python=sys.executable
        )
        prepare(self.rundir, self.run.name, dump(self.run), self.run.share)
        done = submit(planned, self.run.launch, self._scheduler, again=True, now=now, env=self.env)
        self.job = done.job_ids[0]
        watch = subprocess.Popen(
            processes.own_command("watch", "--every", _TICK, "--quiet", str(self.rundir.root)),
            cwd="/",
            env=dict(self.env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if (found := processes.process(watch.pid)) is not None:
            self._stack.callback(processes.end_child, found)

    def until_it_works(self) -> Attempt:
        """Return the attempt that makes steps, once it has saved where it has a guard. Raises CannotTry."""
        if not self.job:
            self.launch()
        found = self.wait(self.place.start, self._stepping)
        if found is None or found.ended is not None:
            raise CannotTry(self._why_not_working(found))
        if is_guarded(found):
            with suppress(CannotTry):  # then it goes on from nothing, and that is what is seen
                self.save()
        else:
            sleep(_WORKS)
        self.wait(
            _TOLD, lambda: self.mailbox.mails or self.mailbox.refused
        )  # that it has started is no news of the fault
        newest = self.newest()
        if newest is None or newest.number != found.number or newest.ended is not None:
            raise CannotTry(self._why_not_working(newest or found))
        return newest

    def _stepping(self) -> Attempt | None:
        found = self.newest()
        if found is None:
            return None
        moves = found.last_step is not None and found.last_step > (found.first_step or 0)
        return found if moves or found.ended is not None else None

    def _why_not_working(self, found: Attempt | None) -> str:
        said = self.last_line()
        tail = f"; the last line that it printed: {said}" if said else ""
        if found is None:
            return f"the copy was not started within {self.place.start:.0f} s{tail}"
        if found.ended is not None:
            return f"the copy ended before anything was done to it: {found.words}{tail}"
        return f"no step of the copy was seen within {self.place.start:.0f} s (--start gives it longer){tail}"

    def save(self) -> int:
        """Have the copy save; return the step. Raises CannotTry."""
        before = self.newest()
        was = before.saved if before is not None else None
        self.ask_to_save()

        def saved() -> int | None:
            now = self.newest()
            return now.saved if now is not None and now.saved is not None and now.saved != was else None

        found = self.wait(_SAVED, saved)
        if found is None:
            raise CannotTry(f"it did not save within {_SAVED:.0f} s when the save switch was raised")
        return found

    def ask_to_save(self) -> None:
        now = datetime.now(timezone.utc)
        raise_switch(self.rundir, SAVE, who="drill", host=os.uname().nodename, why="a drill", now=now)

    # --------------------------------------------------------------------------------------------------------- to look

    def wait(self, seconds: float, look: Callable[[], Found | None]) -> Found | None:
        """Return the first answer of ``look`` that is true; None where there was none within ``seconds``. Raises CannotTry
        where the time of the whole drill is over before."""
        until = monotonic() + seconds
        while True:
            if found := look():
                return found
            if monotonic() >= self.place.until:
                raise CannotTry(TIME_IS_OVER)
            if monotonic() >= until:
                return None
            sleep(_POLL)

    def attempts(self) -> tuple[Attempt, ...]:
        with suppress(OSError):
            return ledger(self.rundir)
        return ()

    def newest(self) -> Attempt | None:
        return next(reversed(self.attempts()), None)

    def follow(self, at: datetime, left: Attempt, seconds: float, *, mail: bool = True) -> SeenAfter:
        """Watch what becomes of the attempt ``left``, which was hit at ``at``, for ``seconds`` at most. ``mail``: wait for the
        message about it too."""

        def came_back() -> Attempt | None:
            later = (one for one in self.attempts() if one.number > left.number and one.first_step is not None)
            return next(later, None)

        back = self.wait(seconds, came_back)
        back_at = datetime.now(timezone.utc) if back is not None else None
        ended = next((one for one in self.attempts() if one.number == left.number and one.cause is not None), None)
        mails = self.mails_since(at) if mail and (ended or back) else ()
        return SeenAfter(at, left, seconds, ended, back, back_at, mails)

    def mails_since(self, at: datetime, seconds: float = _TOLD) -> tuple[Mail, ...]:
        """Return the messages that came after ``at``; waits for the first one for ``seconds`` at most."""
        return self.wait(seconds, lambda: self.mailbox.since(at)) or ()

    def messages_kept(self) -> bool:
        """Return whether the journal keeps a message that was refused."""
        return any(message.tries for message in alerts_in([self._journal()]).waiting)

    def fires(self, watchdog: str) -> bool:
        """Return whether an alert of that name fires, in the journal of the run or that of its watch about Slurm."""
        own = Journal(Path(self.env[ENV_STATE_DIR]) / "watch" / "journal")
        seen = alerts_in([self._journal(), own]).alerts
        return any(one.finding.watchdog == watchdog and one.state is AlertState.FIRING for one in seen)

    def _journal(self) -> Journal:
        return Journal(self.rundir.watch / "journal")

    def has_ended(self, left: Attempt) -> bool:
        return any(one.number == left.number and one.cause is not None for one in self.attempts())

    def trains_on(self, left: Attempt) -> bool:
        """Return whether it has made steps since ``left`` was looked at: in that attempt, or in a later one."""
        now = self.newest()
        if now is None or now.last_step is None or now.cause is not None:
            return False
        return now.number > left.number or now.last_step > (left.last_step or 0) + _SURELY

    def lighthouse_after(self, restarts: int) -> LighthouseRecord | None:
        """Return the page of its lighthouse, once that listens and has been started again so often."""
        try:
            page = read_lighthouse(self.rundir.replicas)
        except (OSError, ValueError):
            return None
        return page if page is not None and page.down_since is None and page.restarts >= restarts else None

    def group_attempts(self) -> dict[str, int]:
        """Return the number of the newest attempt of each replica group."""
        table = read_table(self.rundir)
        return {row.name: row.attempt for row in table.groups} if table is not None else {}

    def last_line(self) -> str:
        """Return the last line of the output that is not the supervisor's."""
        for path in sorted(self.rundir.logs.glob("*"), reverse=True):
            with suppress(OSError):
                lines = files.read_bounded(path, _LOG).decode("utf-8", "replace").splitlines()
                said = [line for line in lines if line.strip() and " ftsupervise: " not in line[:60]]
                if said:
                    return printable(said[-1], 200)
        return ""

    # ---------------------------------------------------------------------------------------------------------- to hit

    def ranks(self, attempt: Attempt) -> list[Process]:
        """Return the processes that train, by rank where the guard says which they are. Raises CannotTry where none is here."""
        folder = str(self.rundir.attempt(attempt.number))
        marked = {one.pid: one for one in processes.marked(ENV_ATTEMPT_DIR).get(folder, [])}
        found = [marked[beat.pid] for beat in read_beats(self.rundir) if beat.pid in marked]
        if not found:  # the innermost: a shell may be around it
            mine, below = {pid for pid in marked if is_the_persons(pid)}, processes.children()
            found = [marked[pid] for pid in sorted(mine) if not mine.intersection(below.get(pid, ()))]
        if not found:
            raise CannotTry("none of its processes runs on this machine")
        return found

    def supervisor(self) -> list[Process]:
        """Return the processes of ``ftsupervise run``. Raises CannotTry where none is here."""
        found = [one for one in self.processes() if self.token.encode() in _command_line(one.pid)]
        if not found:
            raise CannotTry("its supervisor does not run on this machine")
        return found

    def processes(self) -> list[Process]:
        """Return all that lives of this row."""
        return processes.marked(ENV_STATE_DIR).get(self.env[ENV_STATE_DIR], [])

    def mount(self) -> None:
        """Give the run directory a disk of its own, in memory, before the copy is launched. It goes with the folder."""
        claim_folder(self.rundir.root, OWN)
        self._mount("mount", "-t", "tmpfs", "-o", f"size={_DISK},mode=700", "tmpfs")

    def fill(self, *, full: bool = True) -> datetime:
        """Take all free space of that disk away, or give it back; return when."""
        for _ in range(_TIMES):
            found = os.statvfs(self.rundir.root)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            with suppress(CannotTry):  # it has grown meanwhile
                self._mount("mount", "-o", f"remount,size={used if full else _DISK}")
                return datetime.now(timezone.utc)
        raise CannotTry("the disk of the copy grew faster than it could be filled")

    def _mount(self, *words: str) -> None:
        done = bounded.run([*words, str(self.rundir.root)], timeout=_MOUNTED)
        if done.code:
            raise CannotTry(f"{words[0]} said: {printable(done.stderr.strip(), 200)}")

    def cancel_member(self) -> None:
        """Take away the job that runs now, as a person would; its successors stay."""
        running = [one for one in self._scheduler.queue() if one.base_id == self.job and one.nodes]
        for one in running:
            self._scheduler.cancel(one.id)

    def _end(self) -> None:
        """End the job and all processes of the row, at once: nothing of it is to be saved."""
        with suppress(Error, OSError):
            if self.job:
                self._scheduler.cancel(self.job)
        processes.end_all(self.processes, _GONE)


def kill(ones: list[Process], number: int = signal.SIGKILL) -> datetime:
    """Send a signal to each; return when."""
    at = datetime.now(timezone.utc)
    for one in ones:
        processes.signal_exactly(one, number)
    return at


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
