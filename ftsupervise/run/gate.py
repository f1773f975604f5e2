"""The gate finds a reason not to start. Each member of a stopped array passes here, in a second or so."""

from __future__ import annotations

import errno
import os
import select
import signal
import stat
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from ftsupervise.errors import DiskFull, Error, NotFound, NotPermitted, from_os_error
from ftsupervise.host import files, pulse
from ftsupervise.host.modes import FOLDER, make_folder, make_root
from ftsupervise.model import Attempt, Claim, End
from ftsupervise.nodes import incidents
from ftsupervise.run import Options
from ftsupervise.rundir import ledger, pinned
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.paths import ENV_GROUP_JOB, RunDir, for_the_group, tell
from ftsupervise.rundir.switches import BRAKE, KILL, SAVE, read_brake, read_finished, read_switch
from ftsupervise.scheduler import LOCAL, kind_of_job, open_scheduler
from ftsupervise.scheduler.ownership import identify_to_change, jobs_of_run, own_job_ids

_ROOM = 16_384  # bytes
_STALE, _STALE_LOOK = 60.0, 2.0  # seconds that a network file system may show a folder as it was, and between two looks


def require_the_launched(options: Options, pause: Callable[[float], bool]) -> None:
    """Raise NotFound or NotPermitted when another folder stands in the place of the run directory."""
    until = time.monotonic() + _STALE
    while True:
        try:
            return pinned.refuse(options.rundir, options.launched)
        except (NotFound, NotPermitted):
            if pinned.is_strangers(options.rundir) or time.monotonic() >= until or not pause(_STALE_LOOK):
                raise


class RunDirGone(NotFound):
    """The run directory that ``launch`` made is not there. It may come back, as a mount does."""


def prepare(rundir: RunDir, *, launched: bool = False) -> None:
    """Make the missing parts of the run directory, and see that there is room for an attempt's pages.

    ``launched``: ``launch`` has made it, so it is never created again, on the disk beneath a mount that is gone. This
    comes before an attempt is claimed: a claim ends an older one. Raises CannotWrite, DiskFull, NotPermitted,
    RunDirGone.
    """
    try:
        if launched:
            require_there(rundir)
        make_root(rundir.root)
        for folder in (rundir.state, rundir.attempts, rundir.beats, rundir.staging, rundir.checkpoints):
            make_folder(folder, FOLDER)
        for_the_group(rundir.switches)
        incidents.prepare(rundir.nodes)
        _probe(rundir.attempts)
        _close_output(rundir)
    except OSError as error:
        raise from_os_error(error, f"use the run directory {rundir.root}") from None


def require_there(rundir: RunDir) -> None:
    try:
        rundir.launches.stat()  # not the directory itself: Slurm 24.11 and later make that for a job's output
    except (FileNotFoundError, NotADirectoryError):
        raise RunDirGone(
            f"the run directory {rundir.root} is not on {os.uname().nodename}: launch made it, so it is not created again",
            hint=f"its file system is not mounted, or it was moved or removed: findmnt -T {rundir.root}; ls -la {rundir.root}",
        ) from None


def _close_output(rundir: RunDir) -> None:
    """Slurm created the job's output with the submitter's umask. We read causes in it, so no other account may write it."""
    for fd in (1, 2):
        try:
            found = os.fstat(fd)
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if (
                ours
                and found.st_mode & 0o022
                and Path(f"/proc/self/fd/{fd}").resolve().is_relative_to(rundir.root.resolve())
            ):
                os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~0o022)
        except OSError:
            continue


def _probe(folder: Path) -> None:
    fd, path = files.create_temporary(folder, "room", 0o600)
    try:
        os.write(fd, bytes(_ROOM))
        os.fsync(fd)  # quotas of network file systems report only now
    finally:
        os.close(fd)
        os.unlink(path)


def another_place(rundir: RunDir, attempt: Path, launched: str) -> str:
    """Return one sentence if the run directory no longer holds this attempt or its launch.

    Then another folder stands in its place, as the disk beneath a lost mount. "" otherwise, and where that cannot be
    read.
    """
    try:
        attempt.stat()
        return pinned.another(rundir, launched) if launched else ""
    except (FileNotFoundError, NotADirectoryError):
        return f"{rundir.root} no longer holds {attempt.name}, this attempt: its file system is gone, or it was moved"
    except OSError:
        pass
    return ""


def reason_not_to_start(rundir: RunDir) -> str:
    """Return one sentence, or "" when the command may start. Raises NotPermitted, CannotWrite, NotFound when it cannot read."""
    try:
        files.among(rundir.switches)
        finished = rundir.finished.name in os.listdir(rundir.finished.parent)
        braked = rundir if rundir.whole is None or (rundir.state / BRAKE).exists() else RunDir(rundir.whole)
        brake = read_brake(braked)
    except OSError as error:
        raise from_os_error(error, f"look into the run directory {rundir.root}") from None
    if finished:
        return f"the run has finished{_at_step(rundir)}: nothing to do (to train on, remove {rundir.finished})"
    switch = read_switch(rundir, KILL)
    if switch.up:
        why = f": {switch.why}" if switch.why else ""
        whole = rundir.whole or rundir.root  # a replica group has the switches of its run
        return f"the kill switch is up, raised by {switch.who}{why}; nothing is started (ftsupervise clear {whole})"
    if brake is not None:
        return f"the brake is on: {brake.words()}; nothing is started (ftsupervise clear --brake {braked.root})"
    return ""


def odd_switches(rundir: RunDir) -> tuple[str, ...]:
    """Return a sentence for each file in a switch's place that is not obeyed."""
    return tuple(switch.problem for name in (KILL, SAVE) if (switch := read_switch(rundir, name)).problem)


def _at_step(rundir: RunDir) -> str:
    try:
        mark = read_finished(rundir)
    except OSError:
        return ""
    return f" at step {mark.step}" if mark is not None and mark.step is not None else ""


# The signals that the supervisor waits for, together with news of other threads, as bytes in one pipe.

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PASS_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)


class SignalQueue:
    """Signals as bytes in a pipe, so that they are waited for together with everything else and none is lost."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {n: signal.signal(n, lambda *_: None) for n in (*STOP, *PASS_ON, signal.SIGCHLD)}
        self.stopped_at: float | None = None  # monotonic: the first time that we were asked to stop

    def wait(self, timeout: float | None) -> bytes:
        """Return the numbers of the signals that came, each once, in order (0: another thread has news); b"" after
        ``timeout`` seconds.

        Each comes once: a burst of thousands must not stand before the SIGTERM behind it.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            pulse.beat()
            rest = None if until is None else max(0.0, until - time.monotonic())
            if select.select([self._read], [], [], pulse.part(rest))[0]:
                break
            if until is not None and time.monotonic() >= until:
                return b""
        try:
            found = bytes(dict.fromkeys(os.read(self._read, 1 << 16)))  # all that a pipe holds
        except BlockingIOError:
            return b""
        if self.stopped_at is None and any(number in STOP for number in found):
            self.stopped_at = time.monotonic()
        return found

    def wake(self) -> None:
        """Wake the waiting thread, from another one."""
        try:
            os.write(self._write, b"\0")
        except OSError:  # full: it wakes anyway
            return

    def close(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read)
        os.close(self._write)


# The waits before, between and after attempts: a back-off, a full disk, a run directory that is not mounted.
#
# A full disk would burn a chain of members in seconds, and the end of an attempt that found no space would be forgotten: the
# next attempt would count it as lost. So both wait, with a bound, and stop waiting when asked to stop.

_LOOK = 3.0  # seconds between two checks of a full disk
_LAST = 10.0  # seconds for the last pages when we were asked to stop
_FULL = (errno.ENOSPC, errno.EDQUOT)


def shut(options: Options) -> str:
    """Return why no command may start; "" also when that cannot be read: the wait goes on, and the start checks again."""
    try:
        return reason_not_to_start(options.rundir)
    except Error:
        return ""


def wait_unless_stopped(
    seconds: float,
    signals: SignalQueue,
    options: Options,
    log: Path | None = None,
    ask: Callable[[Options], str] = shut,
) -> bool:
    """Wait. Return False when a stop signal, however short the wait, or the answer of ``ask`` ended it."""
    until = time.monotonic() + seconds
    while True:
        rest = until - time.monotonic()
        for number in signals.wait(min(max(rest, 0.0), 1.0)):
            if number in STOP or number == options.warning:
                tell(log, "asked to stop while waiting")
                return False
        if rest <= 0:
            return True
        if why := ask(options):
            tell(log, why)
            return False


def wait_for_space(do: Callable[[], object], seconds: float, pause: Callable[[float], bool]) -> bool:
    """Repeat ``do`` every few seconds while the disk is full or the run directory is not mounted.

    Returns False when ``pause`` was ended; it has reported why. Raises DiskFull or RunDirGone when that lasts longer
    than ``seconds``, and at once whatever else ``do`` raises.
    """
    until, waits_for = time.monotonic() + seconds, ""
    while True:
        try:
            do()
        except (DiskFull, RunDirGone) as error:
            rest = until - time.monotonic()
            if rest <= 0:
                raise
            what = "it" if isinstance(error, RunDirGone) else "space"
            if waits_for != what:
                tell(None, f"{error.message}; waiting up to {seconds:g} s for {what} ({error.hint})")
                waits_for = what
            if not pause(min(_LOOK, rest)):
                return False
        else:
            if waits_for:
                tell(None, "there is space again" if waits_for == "space" else "the run directory is there again")
            return True


class PendingWrites:
    """Pages that must still be written for lack of space, in their order, and the ends of attempts among them."""

    def __init__(self) -> None:
        self._pages: dict[str, Callable[[], object]] = {}
        self.ends: dict[int, Attempt] = {}

    def __bool__(self) -> bool:
        return bool(self._pages)

    def end(self, mine: Claim, ended: End, then: str) -> None:
        """Write the end of an attempt. The job's output has its text in any case."""
        now = datetime.now(timezone.utc)
        log = mine.folder / "run.log"
        write = partial(ledger.write_end, mine, ended, then, now)
        problem = self.write(f"the end of attempt {mine.number} ({ended.cause.words()}; {then})", write, log)
        if problem is not None and problem.errno in _FULL:
            self.ends[mine.number] = ledger.as_attempt(mine, ended, now)

    def write(self, what: str, page: Callable[[], object], log: Path | None) -> OSError | None:
        """Write now, or keep it until there is space; return the error, None if written. It replaces an earlier ``what``."""
        self._pages.pop(what, None)
        try:
            page()
        except OSError as error:
            kept = "; it is written as soon as there is space" if error.errno in _FULL else ""
            tell(log, f"cannot write {what}: {error.strerror or error}{kept}")
            if kept:
                self._pages[what] = page
            return error
        return None

    def settle(self) -> None:
        """Write the kept pages. Raises DiskFull while there is no space; another error is reported and its page dropped."""
        for what, page in list(self._pages.items()):
            try:
                page()
            except OSError as error:
                if error.errno in _FULL:
                    raise from_os_error(error, f"write {what}") from None
                tell(None, f"cannot write {what}: {error.strerror or error}")
            else:
                tell(None, f"written now: {what}")
            del self._pages[what]
        self.ends.clear()

    def settle_at_last(self, options: Options, signals: SignalQueue, *, asked_to_stop: bool) -> None:
        """Write the kept pages before the job ends.

        Pages that still cannot be written are reported once more: only the job's output has them. ``asked_to_stop``: we were
        asked to stop, and there may be seconds left; otherwise a stop signal ends the wait.
        """
        if not self._pages:
            return
        listen = partial(wait_unless_stopped, signals=signals, options=options, ask=lambda _: "")
        seconds, pause = (min(_LAST, options.space_wait), _sleep) if asked_to_stop else (options.space_wait, listen)
        try:
            if wait_for_space(self.settle, seconds, pause):
                return
            self.settle()
        except DiskFull:
            for what in self._pages:
                tell(None, f"not written for lack of space: {what}")


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return True


# Hold the waiting jobs when the brake comes on: the members stay queued, and none is spent on a failure that repeats.


def hold_pending(rundir: RunDir, env: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Hold every waiting job of the run that the job in ``env`` belongs to. Returns their ids and the error ("" if none).
    Never raises. The brake of a replica group stops this group alone: of its jobs those are held that are no other group's."""
    held: list[str] = []
    if rundir.whole is not None and not env.get(ENV_GROUP_JOB):
        return (), ""
    try:
        records = launches(rundir)
        kind, mine = records[-1].scheduler if records else "", ledger.job_id(env)
        scheduler = open_scheduler(kind or (kind_of_job(mine) if mine else LOCAL), env)
        run = identify_to_change(rundir, records, own_job_ids(env))
        for job in jobs_of_run(run, scheduler.queue(), certain=True):
            if job.state.waiting and (rundir.whole is None or job.base_id in own_job_ids(env)):
                scheduler.hold(job.base_id)
                held.append(job.base_id)
    except (Error, OSError) as error:
        return tuple(held), str(error).partition("\n")[0]
    return tuple(dict.fromkeys(held)), ""


def keep_the_brake_on(rundir: RunDir, env: Mapping[str, str]) -> None:
    """Hold the waiting jobs again when a member started in spite of the brake. Never raises."""
    try:
        on = read_brake(rundir)
    except OSError:
        return
    if on is not None:
        hold_pending(rundir, env)
