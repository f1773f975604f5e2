"""The gate: is there a reason not to start? A queued array burns through here, a second or so for each member."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from ftsupervise.errors import NotFound, NotPermitted, from_os_error
from ftsupervise.host import files
from ftsupervise.host.modes import FOLDER, make_folder, make_root
from ftsupervise.nodes import incidents
from ftsupervise.run.settings import Options
from ftsupervise.rundir import pinned
from ftsupervise.rundir.brake import read_brake
from ftsupervise.rundir.paths import RunDir, for_the_group
from ftsupervise.rundir.records import as_whole, read_json
from ftsupervise.rundir.switches import KILL, SAVE, read_switch

_ROOM = 16_384  # bytes
_STALE, _STALE_LOOK = 60.0, 2.0  # seconds that a network file system may show a folder as it was, and between two looks


def require_the_launched(options: Options, pause: Callable[[float], bool]) -> None:
    """Raises NotFound, NotPermitted when another folder stands in the place of the run directory."""
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
    """Make what is missing of the run directory, and see that there is room for an attempt's pages.

    ``launched``: ``launch`` has made it, so it is never made anew, on the disk beneath a mount that is gone. Before an
    attempt is claimed: a claim tells an older one that it is over. Raises CannotWrite, DiskFull, NotPermitted, RunDirGone.
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
        rundir.launches.stat()  # not the directory itself: Slurm makes that for a job's output, from 24.11 on
    except (FileNotFoundError, NotADirectoryError):
        raise RunDirGone(
            f"the run directory {rundir.root} is not on {os.uname().nodename}: launch made it, and it is not made anew",
            hint=f"its file system is not mounted, or it was moved or removed: findmnt -T {rundir.root}; ls -la {rundir.root}",
        ) from None


def _close_output(rundir: RunDir) -> None:
    """Slurm made the job's output with the umask of whoever submitted it. We read causes in it: nobody else writes it."""
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
        os.fsync(fd)  # quotas of network file systems speak up only now
    finally:
        os.close(fd)
        os.unlink(path)


def another_place(rundir: RunDir, attempt: Path, launched: str) -> str:
    """Does the run directory no longer hold the attempt that was begun in it, or the launch? Then what stands there is another
    one: the disk beneath a mount that is gone, or a folder that somebody put in its place. One sentence, or ""; what cannot be
    seen is "".
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
    """One sentence, or "" when the command may start. Raises NotPermitted, CannotWrite, NotFound when it cannot look."""
    try:
        files.among(rundir.switches)
        finished = rundir.finished.name in os.listdir(rundir.state)
        brake = read_brake(rundir)
    except OSError as error:
        raise from_os_error(error, f"look into the run directory {rundir.root}") from None
    if finished:
        return f"the run has finished{_at_step(rundir)}: nothing to do (to train on, remove {rundir.finished})"
    switch = read_switch(rundir, KILL)
    if switch.up:
        why = f": {switch.why}" if switch.why else ""
        return (
            f"the kill switch is up, raised by {switch.who}{why}; nothing is started (ftsupervise clear {rundir.root})"
        )
    if brake is not None:
        return f"the brake is on: {brake.words()}; nothing is started (ftsupervise clear --brake {rundir.root})"
    return ""


def odd_switches(rundir: RunDir) -> tuple[str, ...]:
    """What lies in a switch's place and is not obeyed, one sentence each."""
    return tuple(switch.problem for name in (KILL, SAVE) if (switch := read_switch(rundir, name)).problem)


def _at_step(rundir: RunDir) -> str:
    try:
        step = (read_json(rundir.finished) or {}).get("step")
    except (OSError, ValueError):  # ``touch state/finished`` is enough
        return ""
    return f" at step {step}" if as_whole(step) is not None else ""
