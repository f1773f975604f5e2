"""Reads all runs of an account, a row each, side by side, so that one on a dead mount delays no other.

The rows are plain values: ``--json`` prints them, and ``--watch`` reads them back.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.errors import Error, NotFound
from ftsupervise.host.in_time import LOOK, PendingCall, in_time
from ftsupervise.report.queues import ask_queues
from ftsupervise.report.reading import RunReading, read_own
from ftsupervise.report.row import RunRow, members, need_of, row_of
from ftsupervise.report.who_ended import with_ends
from ftsupervise.rundir.paths import RunDir, state_dir
from ftsupervise.rundir.pinned import gone_for_good

if TYPE_CHECKING:
    from ftsupervise.model import Job

WITHIN = 4.0  # seconds after which a directory does not answer, while no other does
_AT_MOST = 8.0  # seconds for all directories together
_STUCK = 0.5  # seconds after which another thread takes the place of one that reads
_THREADS, _MOST_THREADS = 4, 64
_GLANCE = 0.1  # seconds
_MOST_RUNS = 5000


class Overview(NamedTuple):
    at: datetime
    rows: tuple[RunRow, ...]
    warnings: tuple[str, ...] = ()


def my_runs() -> dict[str, Path]:
    """Return name -> directory of every run that this account has launched, without those that were over and have been
    deleted. Raises Error. May hang.
    """
    found = all_runs()
    left = in_time(lambda: {name: at for name, at in found.items() if not gone_for_good(state_dir(), at)}, LOOK)
    return found if left is None else left


def all_runs() -> dict[str, Path]:
    """Return name -> directory of every run that this account has launched and not forgotten. Raises Error. May hang."""
    from ftsupervise.errors import from_os_error

    folder = state_dir() / "runs"
    try:
        names = sorted(one.name for one in folder.iterdir() if not one.name.startswith("."))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise from_os_error(error, "list the runs this account has launched") from None
    found: dict[str, Path] = {}
    for name in names[:_MOST_RUNS]:
        try:
            found[name] = (folder / name).readlink()
        except OSError:  # a directory of that name, or gone meanwhile
            continue
    return found


def overview(
    runs: Mapping[str, Path],
    now: datetime,
    env: Mapping[str, str],
    *,
    here: Path | None = None,
    within: float = WITHIN,
) -> Overview:
    """Make a row for each of ``runs``, and one for each run of which only jobs are known: the run of ``here`` first, then
    those that need a look."""
    from ftsupervise.scheduler import kind_of
    from ftsupervise.scheduler.ownership import run_in_comment

    read = read_side_by_side(runs, now, within=within)
    known = {name: one for name, one in read.items() if isinstance(one, RunReading)}
    readings = with_ends(tuple(known.values()), env)
    read.update(zip(known, readings, strict=True))
    queues = ask_queues(readings, env, always=kind_of("auto", env))
    queue_of = {id(one): seen for one, seen in zip(readings, queues.of, strict=True)}
    rows = []
    for name, directory in runs.items():
        one = read[name]
        if isinstance(one, RunReading):
            rows.append(row_of(one, queue_of[id(one)])._replace(name=name))
        else:
            rows.append(RunRow(name, str(directory), "UNKNOWN", one))
    elsewhere: dict[str, list[Job]] = {}
    for job in queues.others:
        elsewhere.setdefault(run_in_comment(job), []).append(job)
    rows += [_of_jobs(name, jobs) for name, jobs in elsewhere.items()]
    mine = set() if here is None else {str(here), os.path.realpath(here)}
    rows = [row._replace(here=row.directory in mine) for row in rows]
    return Overview(now, tuple(sorted(rows, key=_order)), queues.warnings)


def _of_jobs(name: str, jobs: Sequence[Job]) -> RunRow:
    """Make the row of a run that was launched with another state directory: only its jobs are known."""
    running = [job for job in jobs if not job.state.waiting and not job.state.ended]
    waiting = members([job for job in jobs if job.state.waiting])
    verdict = running[0].state.value if running else "WAITING"
    where = next((job.directory for job in jobs if job.directory), "")
    why = f"job {jobs[0].id}; this account's state directory does not have it: name its directory"
    ends = running[0].end_time if running else None
    return RunRow(name, where, verdict, why, members_left=waiting, ends_at=ends, elsewhere=True)


def _order(row: RunRow) -> tuple[bool, int, str]:
    """Put the run of this place first, then those that need a look, and last those that are over."""
    return (not row.here, need_of(row), row.name)


def read_side_by_side(
    runs: Mapping[str, Path], now: datetime, *, within: float = WITHIN
) -> dict[str, RunReading | str]:
    """Read the directory of each run; a sentence says why one could not be read. One that hangs on a dead mount is left behind,
    and another takes its place."""
    todo, ended, woken = deque(runs), deque[str](), threading.Event()
    reads: dict[str, tuple[PendingCall[RunReading | str], float]] = {}  # those under way, each with its begin
    found: dict[str, RunReading | str] = {}

    def read(name: str) -> RunReading | str:
        try:
            return _read(runs[name], now)
        finally:
            ended.append(name)
            woken.set()

    began = time.monotonic()
    until = began + within
    while (todo or reads) and (at := time.monotonic()) < min(until, began + _AT_MOST):
        stuck = sum(at - since > _STUCK for _, since in reads.values())
        while todo and len(reads) < min(_THREADS + stuck, _MOST_THREADS):
            name = todo.popleft()
            reads[name] = PendingCall(partial(read, name), "read-run"), at
        woken.wait(_GLANCE)
        woken.clear()
        while ended:
            name = ended.popleft()
            found[name] = reads.pop(name)[0](None) or "it was not read"
            until = time.monotonic() + within  # the others come: this host is slow, not their disk
    return {
        name: found.get(name) or f"{directory} has not answered for {within:g} s" for name, directory in runs.items()
    }


def _read(directory: Path, now: datetime) -> RunReading | str:
    try:
        return read_own(RunDir(directory), now, row=True)
    except NotFound:
        return f"{directory} is not there any more"
    except Error as error:
        return error.message
    except Exception as error:  # one directory that is damaged in a new way hides no other
        return f"{type(error).__name__}: {error}"
