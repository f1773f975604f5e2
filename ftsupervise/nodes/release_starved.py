"""What ``watch`` does for a run of which all jobs wait: take back the exclusions that keep them from starting.

A member that starts or fails does it by itself (``selector.py``). But with one node excluded and another one dead there may
be too few left for any to start, and then no supervisor runs that could do it.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.nodes import incidents
from ftsupervise.rundir.paths import RunDir

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run


def relieve(run: Run, now: datetime) -> tuple[str, ...]:
    """Bring Slurm's lists of the waiting jobs up to date; a sentence for each that is another one now. Bounded."""
    assert run.run_dir is not None
    rundir = RunDir(Path(run.run_dir))
    if not incidents.any_exclusions(rundir.nodes):
        return ()
    from ftsupervise.nodes import exclude, shared_store
    from ftsupervise.nodes.settings import of_run
    from ftsupervise.scheduler.slurm import clean_environment

    scoring, places = of_run(run)
    judged = shared_store.judge(places, scoring, now)
    return exclude.apply(rundir, clean_environment(os.environ), judged.nodes, whole=judged.whole).changed
