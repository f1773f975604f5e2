"""Raise a switch of a run, for the commands and for Python: which run, who hears it, and what of its chain is ended with it.

A switch is raised in a hurry on a loaded login node: nothing is imported that it does not need.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.host.ownership import shown_user

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ftsupervise.model import Job
    from ftsupervise.rundir.paths import RunDir
    from ftsupervise.scheduler import Scheduler

FoundRun = tuple["RunDir", str]  # and the name of the run
_SILENT = 60.0  # seconds after which a guard would have reported
_ASKING = 10.0  # seconds for all that the scheduler is asked once the kill switch is up


def runs_to_switch(runs: tuple[str, ...], *, brake: bool = False) -> list[FoundRun]:
    """Find all of them before anything is done to one. Raises NotTrusted where a switch would be written through a link of
    another account."""
    from ftsupervise.config.find_run import each_run, find_run
    from ftsupervise.host.ownership import refuse_link

    found = {rundir.root: rundir for rundir in (find_run(run) for run in each_run(runs) or (None,))}
    for rundir in found.values() if not brake else ():
        _refuse_a_group(rundir)
    for rundir in found.values():
        refuse_link(rundir.switches)
        refuse_link(rundir.state)
    return [(rundir, rundir.root.name) for rundir in found.values()]


def _refuse_a_group(rundir: RunDir) -> None:
    """Refuse a replica group: its switches are those of its run."""
    from ftsupervise.errors import UsageError

    if rundir.whole is not None:
        leave = f"ftsupervise groups leave {rundir.root.name} {rundir.whole}"
        raise UsageError(
            f"{rundir.root.name} is a replica group, and a switch is for its whole run: name {rundir.whole}",
            hint=f"to let only this group leave: {leave}",
        )


def require_names(names: list[str], confirm: str | None) -> None:
    """Raise UsageError unless ``confirm`` is None or the name of the one run."""
    from ftsupervise.errors import UsageError

    if confirm is not None and [confirm] != names:
        name = " and ".join(names)
        called = f"this run is called {name!r}" if len(names) == 1 else f"these runs are called {name}"
        raise UsageError(f"{called}, not {confirm!r}: nothing was done")


class Hearing(NamedTuple):
    """Tells what would hear a switch."""

    attempt: int | None = None  # the one that runs, if any
    guard: bool | None = None  # whether one reports in it; None: not known, or not yet
    stop_within: float | None = None  # seconds from the kill switch until it is ended
    age: float = 0.0  # seconds since the attempt began
    problem: str = ""  # why it cannot be seen whether one runs


def who_hears(rundir: RunDir) -> Hearing:
    """Return who would hear a switch of the run."""
    from datetime import datetime, timezone

    from ftsupervise.model import NOBODY, OUTPUT
    from ftsupervise.rundir.ledger import newest, stop_within

    try:
        last = newest(rundir)
        if last is None or last.ended is not None or last.cause is not None:
            return Hearing()
        age = (datetime.now(timezone.utc) - last.started).total_seconds()
        guard = None if last.source == NOBODY and age <= _SILENT else last.source not in (OUTPUT, NOBODY)
        return Hearing(last.number, guard, stop_within(rundir, last.number), max(0.0, age))
    except OSError as error:
        return Hearing(problem=f"its attempts cannot be read ({error.strerror or error})")


def put_up(rundir: RunDir, switch: str, why: str) -> None:
    """Raise the switch as this account. Raises CannotWrite, NotPermitted."""
    from datetime import datetime, timezone

    from ftsupervise.config.find_run import require_same
    from ftsupervise.errors import from_os_error
    from ftsupervise.rundir.switches import raise_switch

    try:
        raise_switch(
            rundir, switch, who=shown_user(), host=os.uname().nodename, why=why, now=datetime.now(timezone.utc)
        )
    except OSError as error:
        raise from_os_error(error, f"write {rundir.switches / switch}") from None
    require_same(rundir)  # else it is up in what somebody has put there since the run was found


class JobsEnded(NamedTuple):
    """The jobs that were ended. ``problem``: why some may still be there."""

    jobs: tuple[str, ...] = ()
    problem: str = ""


def end_held(rundir: RunDir) -> JobsEnded:
    """End the members that the brake holds: nobody will release them, and by themselves they stay in the queue for ever.

    Only jobs that are certainly this run's, that wait, and that are on hold. The switch is up whatever comes of it.
    """
    from ftsupervise.errors import Error
    from ftsupervise.rundir.switches import nothing_held, read_brake, still_held

    try:
        braked = [
            one for one in (rundir, *map(rundir.group, rundir.group_names())) if read_brake(one) or still_held(one)
        ]
        held = {job for one in braked if (on := read_brake(one)) for job in on.held}
        ended = _cancel_held(rundir, held.union(*map(still_held, braked))) if braked else []
        for one in braked:
            nothing_held(one)
    except (Error, OSError) as error:
        return JobsEnded(problem=str(error).partition("\n")[0])
    return JobsEnded(tuple(ended))


def end_now(rundir: RunDir) -> JobsEnded:
    """End all jobs that are certainly this run's, those that run too, as the scheduler ends them: who does not save within the
    time that it gives is killed."""
    from ftsupervise.errors import Error
    from ftsupervise.rundir.switches import nothing_held

    arrays = set[str]()

    def cancel(scheduler: Scheduler, job: Job) -> None:
        if job.base_id not in arrays:  # an array is ended whole: with those of its members that begin meanwhile
            scheduler.cancel(job.base_id)
        arrays.add(job.base_id)

    try:
        ended = _cancel(rundir, lambda job: True, cancel)
        for one in (rundir, *map(rundir.group, rundir.group_names())):
            nothing_held(one)
    except (Error, OSError) as error:
        return JobsEnded(problem=str(error).partition("\n")[0])
    return JobsEnded(tuple(ended))


def _cancel_held(rundir: RunDir, known: Collection[str]) -> list[str]:
    """Return the jobs that were cancelled. ``known``: those that the brake's page names, for Slurm's word comes seconds later.

    Raises Error, OSError.
    """
    from ftsupervise.scheduler.parse import is_held

    return _cancel(
        rundir,
        lambda job: job.state.waiting and (is_held(job.reason) or job.base_id in known),
        lambda scheduler, job: scheduler.cancel(job.id, only_pending=True),
    )


def _cancel(rundir: RunDir, which: Callable[[Job], bool], cancel: Callable[[Scheduler, Job], object]) -> list[str]:
    """Return those jobs of the run that were cancelled. Raises Error, OSError."""
    import time

    from ftsupervise import host
    from ftsupervise.rundir.launches import launches, people
    from ftsupervise.scheduler import open_scheduler
    from ftsupervise.scheduler.ownership import identify_to_change, jobs_of_run

    before = host.answer_by
    host.answer_by = before or time.monotonic() + _ASKING
    ended = []
    try:
        records = launches(rundir)
        run = identify_to_change(rundir, records, frozenset())
        for kind in dict.fromkeys(record.scheduler for record in records if record.scheduler):
            scheduler = open_scheduler(kind)
            for job in jobs_of_run(run, scheduler.queue(users=people(rundir, records)), certain=True):
                if which(job):
                    cancel(scheduler, job)
                    ended.append(job.id)
    finally:
        host.answer_by = before
    return ended
