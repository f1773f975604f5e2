"""The gate finds a reason not to start. Each member of a stopped array passes here, in a second or so."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ftsupervise.checkpoints.find import others_in, others_refused
from ftsupervise.errors import AWAY, DiskFull, Error, NotFound, NotPermitted, Refused, from_os_error
from ftsupervise.host import files
from ftsupervise.host.ownership import FOLDER, make_folder, make_root
from ftsupervise.host.signals import STOP, SignalQueue
from ftsupervise.model import Attempt
from ftsupervise.nodes import incidents
from ftsupervise.probe.errand import answers, no_answer, within
from ftsupervise.run import Options
from ftsupervise.rundir import ledger, pinned
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.lineage import keep_lineage
from ftsupervise.rundir.observing import Observes
from ftsupervise.rundir.paths import ENV_GROUP_JOB, RunDir, for_the_group, tell
from ftsupervise.rundir.switches import BRAKE, KILL, SAVE, read_brake, read_switch, reason_not_to_start
from ftsupervise.scheduler import LOCAL, kind_of_job, open_scheduler
from ftsupervise.scheduler.ownership import held_comment, identify_to_change, jobs_of_run, own_job_ids, token_of

_ASK_AGAIN = 3.0  # seconds between two tries of what a start does in the run directory
_WHOSE = 20.0  # seconds to read whose checkpoints lie in the folder
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


def wait_for_answer(options: Options, pause: Callable[[float], bool]) -> bool:
    """Wait until the run directory answers, by a child that does what a start does there: this process hears its signals.

    Returns False when ``pause`` was ended. Raises NoAnswer when it takes longer than ``options.space_wait``.
    """
    until, root = time.monotonic() + options.space_wait, options.rundir.root
    told = False
    while not _answers(options):
        rest = until - time.monotonic()
        if rest <= 0:
            raise no_answer(root)
        if not told:
            tell(None, f"the run directory {root} does not answer; waiting up to {options.space_wait:g} s for it")
            told = True
        if not pause(min(_ASK_AGAIN, rest)):
            return False
    if told:
        tell(None, "the run directory answers again")
    return True


def _answers(options: Options) -> bool:
    def start() -> None:
        pinned.refuse(options.rundir, options.launched)
        prepare(options.rundir, launched=bool(options.launched))
        if not reason_not_to_start(options.rundir):
            keep_lineage(options.rundir, options.name)

    return answers(options.rundir, start)


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


def require_own_checkpoints(rundir: RunDir, name: str, folder: Path) -> None:
    """Give the run its id, and raise Refused where other runs have saved in ``folder`` that it has not taken over.

    A folder that does not answer keeps no attempt back. Raises CannotWrite, NotPermitted.
    """
    try:
        keep_lineage(rundir, name)
        others = within(_WHOSE, lambda: others_in(folder, "*", rundir, name), key=f"runs in {folder}")
    except TimeoutError:
        return
    except OSError as error:
        raise from_os_error(error, f"see whose checkpoints lie in {folder}") from None
    if others:
        raise others_refused(folder, others, rundir)


def require_there(rundir: RunDir) -> None:
    try:
        rundir.launches.stat()  # not the directory itself: Slurm 24.11 and later make that for a job's output
    except (FileNotFoundError, NotADirectoryError):
        raise RunDirGone(
            f"the run directory {rundir.root} is not on {os.uname().nodename}: launch made it, so it is not created again",
            hint="its file system is not mounted, or it was moved or removed: "
            f"findmnt -T {rundir.quoted()}; ls -la {rundir.quoted()}",
        ) from None
    except OSError as error:
        raise from_os_error(error, f"look into the run directory {rundir.root}") from None


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


def keep_output_folders() -> None:
    """Make the folders of this job's output again where somebody has removed them, on the same file system.

    Slurm makes none, and without them the next members end before anything of them starts. Never raises.
    """
    for fd in (1, 2):
        try:
            found = os.fstat(fd)
            path = Path(str(Path(f"/proc/self/fd/{fd}").readlink()).removesuffix(" (deleted)"))
            folder = path.parent
            if not stat.S_ISREG(found.st_mode) or not path.is_absolute() or folder.is_dir():
                continue
            there = next(above for above in folder.parents if above.is_dir())
            if there.stat().st_dev == found.st_dev:  # else its file system is gone, and this is the disk beneath it
                make_folder(folder, FOLDER, parents=True)
                tell(None, f"{folder}, the folder of the jobs' output, was removed: made again for the next member")
        except (OSError, StopIteration):
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
    gone = f"{rundir.root} no longer holds {attempt.name}, this attempt: its file system is gone, or it was moved"
    try:
        if pinned.seen_with(rundir, attempt) is None:
            return gone
        return pinned.another(rundir, launched) if launched else ""
    except (FileNotFoundError, NotADirectoryError):
        return gone
    except PermissionError as error:
        return f"{pinned.ANOTHER}, or closed: {rundir.root}: {error.strerror}"
    except OSError:
        return ""


def odd_switches(rundir: RunDir) -> tuple[str, ...]:
    """Return a sentence for each file in a switch's place that is not obeyed."""
    return tuple(switch.problem for name in (KILL, SAVE) if (switch := read_switch(rundir, name)).problem)


# The signals that the supervisor waits for, together with news of other threads, as bytes in one pipe.


# The waits before, between and after attempts: a back-off, a full disk, a run directory that is not mounted.
#
# A full disk, a read-only file system or an expired ticket would burn a chain of members in seconds, and the end of an attempt
# that could not be written would be forgotten: the
# next attempt would count it as lost. So both wait, with a bound, and stop waiting when asked to stop.

_LOOK = 3.0  # seconds between two checks of a full disk
_LAST = 10.0  # seconds for the last pages when we were asked to stop
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAY_PASS = (*_FULL, *AWAY, errno.EROFS, errno.EACCES, errno.EKEYEXPIRED, errno.ENOKEY)


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


def passes(error: Error) -> bool:
    """Return whether a full disk or a missing mount is to blame, which passes: every caller waits for that."""
    return isinstance(error, (DiskFull, RunDirGone))


def may_pass(options: Options, error: Error) -> bool:
    """Return whether a member waits for the end of ``error``: the next one would come to the same run directory.

    What ``launch`` could use was read-only, did not answer or needed a new ticket only meanwhile, unless the folder is a
    stranger's now.
    """
    ours = options.launched and not isinstance(error, Refused) and not pinned.is_strangers(options.rundir)
    return passes(error) or bool(ours)


def wait_for_space(
    do: Callable[[], object],
    seconds: float,
    pause: Callable[[float], bool],
    passing: Callable[[Error], bool] = passes,
) -> bool:
    """Repeat ``do`` every few seconds while the disk is full, the run directory is not mounted, or what else is ``passing``.

    Returns False when ``pause`` was ended; it has reported why. Raises such an error when it lasts longer than ``seconds``, and
    at once whatever else ``do`` raises.
    """
    until, waits_for = time.monotonic() + seconds, ""
    while True:
        try:
            do()
        except Error as error:
            rest = until - time.monotonic()
            if rest <= 0 or not passing(error):
                raise
            what = "space" if isinstance(error, DiskFull) else "it" if isinstance(error, RunDirGone) else "a change"
            if waits_for != what:
                tell(None, f"{error.message}; waiting up to {seconds:g} s for {what} ({error.hint})")
                waits_for = what
            if not pause(min(_LOOK, rest)):
                return False
        else:
            if waits_for:
                now = {"space": "there is space again", "it": "the run directory is there again"}
                tell(None, now.get(waits_for, "the run directory can be used again"))
            return True


class PendingWrites:
    """Pages that must still be written for lack of space, in their order, and the ends of attempts among them."""

    def __init__(self) -> None:
        self._pages: dict[str, Callable[[], object]] = {}
        self.ends: dict[int, Attempt] = {}

    def __bool__(self) -> bool:
        return bool(self._pages)

    def end(self, folder: Path, one: Attempt) -> None:
        """Write the end of an attempt. The job's output has its text in any case."""
        write = partial(ledger.write_end, folder, one)
        problem = self.write(f"the end of attempt {one.number} ({one.words}; {one.then})", write, folder / "run.log")
        if problem is not None and problem.errno in _MAY_PASS:
            self.ends[one.number] = one

    def write(self, what: str, page: Callable[[], object], log: Path | None) -> OSError | None:
        """Write now, or keep it until there is space; return the error, None if written. It replaces an earlier ``what``."""
        self._pages.pop(what, None)
        try:
            page()
        except OSError as error:
            when = "there is space" if error.errno in _FULL else "it can be"
            kept = f"; it is written as soon as {when}" if error.errno in _MAY_PASS else ""
            tell(log, f"cannot write {what}: {error.strerror or error}{kept}")
            if kept:
                self._pages[what] = page
            return error
        return None

    def settle(self) -> None:
        """Write the kept pages. Raises CannotWrite, DiskFull, NotPermitted while there is no space, or the directory cannot be
        written; another error is reported and its page dropped."""
        for what, page in list(self._pages.items()):
            try:
                page()
            except OSError as error:
                if error.errno in _MAY_PASS:
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
            if wait_for_space(self.settle, seconds, pause, lambda _: True):
                return
            self.settle()
        except Error as error:
            why = "for lack of space" if isinstance(error, DiskFull) else f"({error.message})"
            for what in self._pages:
                tell(None, f"not written {why}: {what}")


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


def keep_the_brake_on(options: Options, env: Mapping[str, str]) -> None:
    """Hold the waiting jobs again when a member started in spite of the brake, and this one with them. Never raises."""
    try:
        on = read_brake(options.rundir)
    except OSError:
        return
    if on is not None:
        hold_pending(options.rundir, env)
        if not options.rundir.has_finished() and not read_switch(options.rundir, KILL).up:
            put_back(options, env)


def may_go_back(options: Options, env: Mapping[str, str]) -> bool:
    """Return whether this job may be put back into the queue: a script of somebody's own may have more to do."""
    return bool(options.launched and ledger.job_id(env)) and options.rundir.whole is None


def put_back(options: Options, env: Mapping[str, str]) -> bool:
    """Put this job back into the queue, on hold, where nothing was started: no member is used up by that. Never raises."""
    mine = ledger.job_id(env)
    if not may_go_back(options, env):
        return False
    tell(None, f"job {mine} goes back into the queue, on hold, if the cluster allows it")
    try:
        return open_scheduler(kind_of_job(mine), env).put_back(mine)
    except (Error, OSError):
        return False


def hold_unseen(options: Options, env: Mapping[str, str], why: str) -> None:
    """Hold the chain, this job too, where the run directory cannot be used: only the scheduler can keep the members then.

    Its jobs are those that the same launch has submitted, by the token in their comments; the comment says why. Never raises.
    """
    mine = ledger.job_id(env)
    if not may_go_back(options, env):
        return
    if Observes(options.rundir, options.observe)(BRAKE):
        tell(None, f"would have held the chain: {why}; this decision is only told")
        return
    try:
        scheduler = open_scheduler(kind_of_job(mine), env)
        queue = [job for job in scheduler.queue() if token_of(job) == options.launched.partition(".")[0]]
        waiting = [job for job in queue if job.state.waiting]
        for job in waiting:
            scheduler.hold(job.base_id)
            scheduler.remark(job.id, held_comment(job, why))
        held = ", ".join(dict.fromkeys(job.base_id for job in waiting))
        tell(None, f"{why}; on hold: {held or 'no other member'}")
        tell(None, f"when the run directory can be used again: ftsupervise clear --brake {options.rundir.quoted()}")
        for job in queue:
            if job.id == mine:
                scheduler.remark(job.id, held_comment(job, why))
                put_back(options, env)
    except (Error, OSError) as error:
        tell(None, f"cannot hold the waiting members: {str(error).partition(chr(10))[0]}")
