"""Hold what waits in the queue when the brake comes on: the members stay, and none is burnt against a failure that stands."""

from __future__ import annotations

from collections.abc import Mapping

from ftsupervise.errors import Error
from ftsupervise.rundir.brake import read_brake
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.paths import RunDir
from ftsupervise.scheduler import open_scheduler
from ftsupervise.scheduler.ownership import identify_to_change, jobs_of_run, own_job_ids


def hold_pending(rundir: RunDir, env: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Put every waiting job of the run, which the one in ``env`` belongs to, on hold; their ids, and what went wrong ("" if
    nothing did). Never raises."""
    held: list[str] = []
    try:
        records = launches(rundir)
        kind = records[-1].scheduler if records else ""
        scheduler = open_scheduler(kind or ("slurm" if env.get("SLURM_JOB_ID") else "local"), env)
        run = identify_to_change(rundir, records, own_job_ids(env))
        for job in jobs_of_run(run, scheduler.queue(), certain=True):
            if job.state.waiting:
                scheduler.hold(job.base_id)
                held.append(job.base_id)
    except (Error, OSError) as error:
        return tuple(held), str(error).partition("\n")[0]
    return tuple(dict.fromkeys(held)), ""


def keep_the_brake_on(rundir: RunDir, env: Mapping[str, str]) -> None:
    """A member that started all the same (it was not held, or somebody released it): hold the rest again. Never raises."""
    try:
        on = read_brake(rundir)
    except OSError:
        return
    if on is not None:
        hold_pending(rundir, env)
