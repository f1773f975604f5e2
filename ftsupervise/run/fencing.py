"""The supervisor's side of the fence: seal the staging areas of older attempts, open this attempt's, delete leftovers.

Each step is bounded: a hung checkpoint file system is reported after the bound. A failed seal does not stop the run: then only
the guard's check for a newer attempt separates the two, and the log says so.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host.begin import searched_alone
from ftsupervise.host.files import remove_tree
from ftsupervise.host.in_time import Every, PendingCall, in_time
from ftsupervise.host.processes import SHELL_MARKED, Process, end_child, process
from ftsupervise.host.signals import SignalQueue
from ftsupervise.model import CauseKind
from ftsupervise.rundir import fence, heartbeat_page, switches
from ftsupervise.rundir.fence import superseded
from ftsupervise.rundir.ledger import ledger, newest, numbers
from ftsupervise.rundir.paths import ENV_AREA, ENV_ATTEMPT_DIR, ENV_CHECKPOINT_DIR, ENV_STAGING, RunDir
from ftsupervise.rundir.switches import KILL, read_switch
from ftsupervise.truth import Beat

_BOUND = 60.0  # seconds for one file system
_QUICKLY = 5.0  # seconds for one listing
_MISSED = 5.0  # seconds without a beat, beside two of its intervals, after which nobody is left of an attempt that ends
_ASKED = (  # by a signal
    CauseKind.CANCELLED,
    CauseKind.TIME_LIMIT,
    CauseKind.PREEMPTED,
    CauseKind.REQUEUED,
    CauseKind.INTERRUPTED,
)
_LATELY = 120.0  # seconds after its last beat in which a rank may still be running


@dataclass(frozen=True)
class FenceToken:
    """The staging areas of attempt ``number``. None: there is none, and only the guard's check protects its writes."""

    number: int
    area: Path | None
    staging: Path | None

    def env(self) -> dict[str, str]:
        found = {ENV_AREA: self.area, ENV_STAGING: self.staging}
        return {key: str(path) for key, path in found.items() if path is not None}


def begin(rundir: RunDir, number: int, env: Mapping[str, str], say: Callable[[str], None]) -> FenceToken:
    """Seal every older attempt's staging areas, for the run directory and for checkpoints; open those of ``number``."""
    swept: list[Path] = []
    try:
        known = numbers(rundir)
    except OSError:
        known = []
    area = _one(rundir, "the run directory", lambda: rundir.staging, number, known, swept, say)
    for folder in swept:
        try:
            if switches.put_back(rundir, folder):
                say("an older attempt was lowering the save switch; the switch is up again")
        except OSError as error:
            say(f"cannot check what an older attempt left in {folder}: {error.strerror}")
    areas = lambda: fence.staging(rundir, _checkpoints(rundir, env))  # noqa: E731
    staging = _one(rundir, "the checkpoints", areas, number, known, swept, say)
    if swept:
        PendingCall(partial(sweep, swept), "sweep")
    return FenceToken(number, area, staging)


def _checkpoints(rundir: RunDir, env: Mapping[str, str]) -> Path:
    return Path(env.get(ENV_CHECKPOINT_DIR) or rundir.checkpoints).absolute()


def last_number(rundir: RunDir, env: Mapping[str, str]) -> int:
    """Return the last attempt that has left a staging area beside the checkpoints, also one of an older numbering: the run
    directory was made anew, and they were kept. 0 where there is none, or the file system does not answer in time."""
    try:
        return in_time(lambda: fence.last_area(fence.staging(rundir, _checkpoints(rundir, env))), _QUICKLY) or 0
    except OSError:
        return 0


def at_work(rundir: RunDir, job: str, lives: Callable[[str, datetime], bool | None], now: datetime) -> int | None:
    """Return the newest attempt, if it may still be running; None when it is over.

    It is over when its end is on record, or its supervisor is gone and no rank of it has beaten lately. ``lives`` asks
    Slurm whether it has that job; None: unknown. ``job`` is our own: Slurm starts a job again only after its end. An
    attempt that cannot be seen may be running.
    """
    try:
        attempts = ledger(rundir)
    except OSError:
        return max(1, fence.last_area(rundir.staging))
    last = attempts[-1] if attempts else None
    if last is None or last.ended:
        return None
    if last.cause is None or _beats_lately(rundir, last.number, now):
        return last.number
    if last.cause.kind is CauseKind.LOST or last.cause.late or not last.job_id or last.job_id == job:
        return None
    return None if lives(last.job_id, last.started) is False else last.number


def may_still_save(
    rundir: RunDir, job: str, state_of: Callable[[str, datetime], str | None], now: datetime
) -> Leaving | None:
    """Return the newest attempt, if it may be about to save: nobody begins over it meanwhile. None where it is over.

    An attempt whose job runs is not over, however early Slurm has started ours. One whose job ends, because somebody cancelled
    or preempted it or its time is over, may save until its ranks are gone; and its supervisor may keep what only the memory
    holds when its end is already on record. ``state_of`` asks Slurm for the state of a job. ``job`` is our own.
    """
    try:
        last = newest(rundir)
    except OSError:
        return None
    if last is None or not last.job_id or last.job_id == job:
        return None
    if last.ended and (last.kind not in _ASKED or now - last.ended > timedelta(seconds=_LATELY)):
        return None
    state = state_of(last.job_id, last.started)
    if state == "" or state == "PENDING":
        return None
    runs = state == "RUNNING"
    beats = _beats(rundir, last.number)
    if not last.ended and beats is not None and (beats or runs):
        heard = max((*(one.at for one in beats), last.started, *((last.heard,) if last.heard else ())))
        slowest = max((_seconds(one.facts.get("every", "")) for one in beats), default=0.0)
        if abs((now - heard).total_seconds()) > (_LATELY if runs else 2 * slowest + _MISSED):
            return None  # nobody is left who could save
    return Leaving(last.number, last.job_id, runs and not last.ended)


def _seconds(text: str) -> float:
    return float(text) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text) else 0.0


class Leaving(NamedTuple):
    """An attempt that may be about to save."""

    number: int
    job: str
    runs: bool  # nobody has asked it to stop, as far as we know

    def words(self) -> str:
        how = "is still running" if self.runs else "was asked to stop and may be about to save"
        return f"attempt {self.number} {how} in job {self.job}; waiting for its end"


def _beats_lately(rundir: RunDir, number: int, now: datetime) -> bool:
    found = _beats(rundir, number)
    return found is None or any(abs((now - one.at).total_seconds()) < _LATELY for one in found)


def _beats(rundir: RunDir, number: int) -> list[Beat] | None:
    """Return the beats of the ranks of an attempt; None when they cannot be read."""
    try:
        return [one for one in heartbeat_page.read_beats(rundir) if one.facts.get("attempt") == str(number)]
    except OSError:
        return None


def _one(
    rundir: RunDir,
    what: str,
    place: Callable[[], Path],
    number: int,
    known: Iterable[int],
    swept: list[Path],
    say: Callable[[str], None],
) -> Path | None:
    """Seal and open in one place, in bounded time; return the staging area, None when there can be none."""
    found: list[Path | None] = []
    trouble: list[OSError] = []

    def work() -> None:
        try:
            areas = place()
            try:
                swept.extend(fence.seal(areas, number, known))
            except OSError as error:
                trouble.append(error)
            found.append(fence.open_area(areas, number))
        except OSError as error:
            trouble.append(error)

    if not PendingCall(work, "seal").is_over(_BOUND):
        say(f"{what} cannot be sealed against older attempts: no answer within {_BOUND:.0f} s")
    if found == [None] and superseded(rundir, number) is None:
        say(
            f"{what}: the staging area {number:04d} is sealed, though no newer attempt has begun: an older run of other "
            "numbers has been here; nothing but the guard's own check keeps this attempt's writes apart from a newer one's"
        )
    for error in trouble:
        say(f"{what} cannot be sealed against older attempts: {error.strerror}: {error.filename or ''}".rstrip(": "))
    return found[0] if found else None


def sweep(folders: list[Path]) -> None:
    """Delete what older attempts staged and did not commit: maybe terabytes. The next attempt deletes the rest."""
    for folder in folders:
        remove_tree(folder)


# While the command runs, a thread watches the kill switch and the attempts: a newer one ends ours.


@dataclass
class Observed:
    """The last state of the run directory."""

    kill_since: float | None = None  # monotonic time since which the kill switch is known to be up
    newer: int | None = None  # an attempt that has begun after ours


class RunDirWatcher:
    """A thread that watches the run directory while the command runs: a hung file system blocks only this thread."""

    def __init__(
        self,
        rundir: RunDir,
        attempt: int,
        signals: SignalQueue,
        every: float,
        also: Callable[[], bool] = lambda: False,
    ) -> None:
        self.seen = Observed()
        self._also = also  # another check to make there
        self._rundir, self._attempt, self._signals = rundir, attempt, signals
        self._looking = Every(every, self._look_on, "watch-run-dir")

    def close(self, seconds: float = 1.0) -> None:
        self._looking.close(seconds)

    def _look_on(self) -> None:
        if self._look() | self._also():
            self._signals.wake()

    def _look(self) -> bool:
        """Return whether there is anything new."""
        seen = self.seen
        before = (seen.kill_since, seen.newer)
        switch = read_switch(self._rundir, KILL)
        if not switch.up:
            seen.kill_since = None
        elif seen.kill_since is None:
            seen.kill_since = time.monotonic()
        seen.newer = superseded(self._rundir, self._attempt)
        return (seen.kill_since, seen.newer) != before


# A reaper ends the command when ``ftsupervise run`` itself is killed and can no longer do it.
#
# Slurm ends a job whose batch script is gone, with all its processes; on this machine, in an interactive allocation, or with a
# script that goes on after it, Slurm does not, and a command that ignores SIGTERM would train on for ever. A shell of a
# megabyte waits at a pipe that closes when the supervisor ends. It then sends SIGTERM to each process that inherited the
# attempt's environment, whatever its session and group, and SIGKILL to those that remain after the grace.

# The last line read is the mark to end, "" if there is none. Zombies have no environment, so they are not waited for.
_SHELL = f"""trap '' TERM INT HUP QUIT; grace=$1; mark=
while IFS= read -r line; do mark=$line; done
[ -n "$mark" ] || exit 0
tell() {{
  pids=$({SHELL_MARKED})
  [ -n "$pids" ] && kill -s "$1" $pids 2>/dev/null
  [ -n "$pids" ]
}}
tell CONT; tell TERM
while [ "$grace" -gt 0 ] && tell 0; do sleep 1; grace=$((grace - 1)); done
tries=50
while [ "$tries" -gt 0 ] && tell KILL; do sleep 0.1; tries=$((tries - 1)); done
"""


class OrphanReaper:
    """The shell that ends orphans. ``grace``: seconds between SIGTERM and SIGKILL."""

    def __init__(self, grace: float) -> None:
        self.shell: Process | None = None
        read, self._write = os.pipe2(os.O_CLOEXEC)
        try:
            shell = subprocess.Popen(
                ["/bin/sh", "-c", _SHELL, "ftsupervise-minder", f"{grace:.0f}"],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=searched_alone({"PATH": os.environ.get("PATH", os.defpath)}),
                start_new_session=True,
            )
        except OSError:  # no shell or no memory: the run goes on without it
            return
        finally:
            os.close(read)
        shell.returncode = 0  # reaped with everything else that is ours
        self.shell = process(shell.pid)

    def set_attempt(self, attempt_dir: Path | None) -> None:
        """End this attempt's processes when we die; None: no processes."""
        text = f"{ENV_ATTEMPT_DIR}={attempt_dir}" if attempt_dir is not None else ""
        try:
            os.write(self._write, (text if "\n" not in text else "").encode() + b"\n")
        except OSError:  # it was ended from outside
            return

    def stop(self) -> None:
        if self._write < 0:
            return
        os.close(self._write)
        self._write = -1
        if self.shell is None:
            return
        end_child(self.shell)
        self.shell = None
