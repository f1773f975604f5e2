"""Members of the chain that have begun no attempt yet: each writes a page when it begins, and removes it when it claims one.

A page that stays is of a member that ended before it had an attempt: it was killed at the gate, or found no way to start. The
next member counts it as it counts failed attempts. A member that was asked to stop, or had nothing to do, takes its page away.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.host import processes
from ftsupervise.host.ownership import held, held_to_write, make_folder, remove_entry
from ftsupervise.model import Attempt, Cause, CauseKind, Failure, FailureKind
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import EPOCH, read_record, write_json

_MOST = 64  # pages that are read and kept
KILLED = "ended at the gate without a record"


class MemberPage(NamedTuple):
    """A member without an attempt."""

    job: Annotated[str, 200] = ""
    at: datetime = EPOCH  # when it began
    after: int = 0  # the newest attempt at that time
    step: int | None = None  # that this one had reached when the member ended
    host: Annotated[str, 300] = ""
    pid: int = 0
    pid_start: int | None = None
    boot_id: Annotated[str, 100] = ""
    why: Annotated[str, 500] = ""  # it ended without an attempt; "": it is at the gate, or was killed there


def begin(rundir: RunDir, job: str, now: datetime, after: int) -> None:
    """Write the page of this process, a member of the chain. Raises OSError."""
    pid = os.getpid()
    _write(
        rundir,
        MemberPage(job, now, after, None, os.uname().nodename, pid, processes.identity(pid), processes.boot_id()),
    )


def end(rundir: RunDir, job: str, why: str, step: int | None) -> None:
    """Write down why it ended without an attempt. Raises OSError, ValueError."""
    found = read_record(MemberPage, _page(rundir, job), limit=16_000) or MemberPage(job)
    _write(rundir, found._replace(why=why, step=step))


def at_the_gate(rundir: RunDir, job: str) -> bool:
    """Return whether it has a page: it has begun, and has no attempt yet."""
    return os.path.lexists(_page(rundir, job))


def forget(rundir: RunDir, job: str) -> None:
    """Remove its page: it has an attempt, or its end says nothing against the run. Never raises."""
    try:
        remove_entry(_page(rundir, job))
    except OSError:
        return


def forget_all(rundir: RunDir) -> None:
    """Remove all pages: a person has released the brake. Raises OSError, NotTrusted."""
    try:
        with held(_folder(rundir)) as here:
            for name in os.listdir(here):
                (here / name).unlink(missing_ok=True)
    except FileNotFoundError:
        return


def without_attempt(rundir: RunDir, reached: int | None, lives: Callable[[str], bool | None]) -> tuple[Attempt, ...]:
    """Return the members that ended before they had an attempt, in the form of attempts that failed to start.

    ``reached``: the step that the run has reached now; a member at whose end it had not come so far does not count.
    ``lives`` asks whether the scheduler has a job: one for which that is unknown may be at the gate.
    """
    try:
        names = sorted(os.listdir(_folder(rundir)))[-_MOST:]
    except OSError:
        return ()
    pages = [page for name in names if (page := _read(_folder(rundir) / name)) is not None]
    found = (one for one in pages if one.step is None or reached is None or one.step >= reached)
    return tuple(_as_attempt(one) for one in found if one.why or not _may_live(one, lives))


def _as_attempt(one: MemberPage) -> Attempt:
    if one.why:
        cause, failure = Cause(CauseKind.NOT_STARTED, text=one.why), Failure(FailureKind.START, one.why)
    else:
        cause, failure = Cause(CauseKind.LOST), Failure(FailureKind.LOST, KILLED)
    return Attempt(one.after, one.job, one.at, host=one.host, ended=one.at, cause=cause, failure=failure)


def _may_live(one: MemberPage, lives: Callable[[str], bool | None]) -> bool:
    if one.host == os.uname().nodename:
        return processes.boot_id() == one.boot_id and processes.lives(one.pid, one.pid_start)
    return lives(one.job) is not False


def _read(path: Path) -> MemberPage | None:
    try:
        return read_record(MemberPage, path, limit=16_000)
    except (OSError, ValueError):
        return None


def _write(rundir: RunDir, one: MemberPage) -> None:
    folder = _folder(rundir)
    make_folder(folder)
    with held_to_write(folder) as here:
        write_json(here / _page(rundir, one.job).name, one, sync=False)
        for old in sorted(here.iterdir(), key=lambda path: path.lstat().st_mtime)[:-_MOST]:
            old.unlink(missing_ok=True)


def _folder(rundir: RunDir) -> Path:
    return rundir.state / "members"


def _page(rundir: RunDir, job: str) -> Path:
    return _folder(rundir) / f"{re.sub(r'[^A-Za-z0-9_-]', '_', job)[:100]}.json"
