"""What agents that have lost their supervisor are still good for: a job without its batch host is ended.

With ``--no-kill`` Slurm takes a lost node out of a job and leaves the job running, even without its batch host: nothing is
supervised or trained, and the other nodes are held until the time limit. So the agents of a few nodes stay, ask Slurm, and end
such a job.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ftsupervise.rundir.records import as_count

_FEW = 4  # nodes whose agents stay: several may be lost at once, and thousands would ask the controller
_STAY = 3600.0  # seconds; Slurm gives a node up after its SlurmdTimeout (300 s if nobody changed it)
_PAUSES = (2.0, 5.0, 10.0, 20.0, 30.0)  # seconds between two questions; the last for all that follow


def stays(env: Mapping[str, str]) -> bool:
    """Is this node one of the few?"""
    node = as_count(env.get("SLURM_NODEID", ""))
    return bool(env.get("SLURM_JOB_ID")) and node is not None and node < _FEW


def see_to_the_end(env: Mapping[str, str], stay: float = _STAY, pauses: Sequence[float] = _PAUSES) -> None:
    """Ask Slurm again and again for ``stay`` seconds; end the job once its batch host is lost."""
    from ftsupervise.scheduler.batch_host import end_without_host

    until, count = time.monotonic() + stay, 0
    while time.monotonic() < until:
        time.sleep(pauses[min(count, len(pauses) - 1)])
        count += 1
        try:
            if end_without_host(env["SLURM_JOB_ID"], env):
                return
        except OSError:  # no Slurm commands on this node
            return
