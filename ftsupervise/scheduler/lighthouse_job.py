"""Finds the small job that runs the lighthouse where each replica group has jobs of its own, in the queue as it was asked.

While it does not run, no group makes a step, and nobody writes of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from ftsupervise.model import Job
from ftsupervise.rundir.launches import newest_script
from ftsupervise.rundir.paths import RunDir
from ftsupervise.scheduler.ownership import link_of

_SUBMISSION = 1  # of its launch; those of the groups follow


class LighthouseJob(NamedTuple):
    """``runs`` None: that could not be seen."""

    runs: bool | None
    words: str


def lighthouse_job(rundir: RunDir, jobs: Sequence[Job] | None) -> LighthouseJob:
    """Say where it is. ``jobs``: of the run in the queue, None where that could not be asked."""
    if jobs is None:
        return LighthouseJob(None, "the queue could not be asked for its job")
    mine = [job for job in jobs if link_of(job) == _SUBMISSION and not job.state.ended]
    for job in mine:
        if not job.state.waiting:
            return LighthouseJob(True, f"its job {job.id} is {job.state.value}, and has written nothing for a while")
    if mine:
        return LighthouseJob(
            False, f"its job {mine[0].id} waits in the queue ({mine[0].reason or mine[0].state.value})"
        )
    script = newest_script(rundir, _SUBMISSION)
    to_submit = f": sbatch {shlex.quote(str(script))}" if script is not None else ""
    return LighthouseJob(False, f"no job of it is in the queue{to_submit}")
