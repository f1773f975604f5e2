"""What agents that have lost their ring are still good for: a job without its batch host is ended.

With ``--no-kill`` Slurm takes a lost node out of a job and leaves the job running, be it the batch host: nothing supervises,
nothing trains, and the other nodes are held until the time limit (22.05: JobState=RUNNING, and a BatchHost that is not in
NodeList). So the agents of a few nodes stay, ask Slurm, and end such a job as Slurm ends one without ``--no-kill``: it is
requeued where it may be, and else cancelled, so that the next member takes over.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ftsupervise.host import bounded
from ftsupervise.hostlist import expand_hostlist
from ftsupervise.rundir.records import as_count

_FEW = 4  # nodes whose agents stay: several may be lost at once, and thousands would ask the controller
_STAY = 3600.0  # seconds; Slurm gives a node up after its SlurmdTimeout (300 s if nobody changed it)
_PAUSES = (2.0, 5.0, 10.0, 20.0, 30.0)  # seconds between two questions; the last for all that follow
_ASK = 20.0


def stays(env: Mapping[str, str]) -> bool:
    """Is this one of the few?"""
    node = as_count(env.get("SLURM_NODEID", ""))
    return bool(env.get("SLURM_JOB_ID")) and node is not None and node < _FEW


class Shown(NamedTuple):
    """One job, as ``scontrol show job`` tells of it."""

    id: str  # of this one: the plain number may also mean its whole array
    headless: bool | None  # has it lost its batch host? None when that cannot be told
    requeue: bool


def read(text: str, job: str) -> Shown | None:
    """Of ``scontrol --oneliner show job``; None when ``job`` is not in it."""
    for line in text.splitlines():
        fields = dict(
            re.findall(r"(?:^|\s)(JobId|ArrayJobId|ArrayTaskId|JobState|Requeue|BatchHost|NodeList)=(\S*)", line)
        )
        if fields.get("JobId") == job:
            array, task = fields.get("ArrayJobId", ""), fields.get("ArrayTaskId", "")
            return Shown(f"{array}_{task}" if array else job, _headless(fields), fields.get("Requeue") == "1")
    return None


def _headless(fields: Mapping[str, str]) -> bool | None:
    host, nodes = fields.get("BatchHost", ""), fields.get("NodeList", "")
    if fields.get("JobState") != "RUNNING" or not host or not nodes or "(null)" in (host, nodes):
        return None
    try:
        return host not in expand_hostlist(nodes)
    except ValueError:
        return None


def see_to_the_end(env: Mapping[str, str], stay: float = _STAY, pauses: Sequence[float] = _PAUSES) -> None:
    """Wait for Slurm's verdict on the batch host; end the job if that is lost. Who gets no answer asks again."""
    job, until, count = env["SLURM_JOB_ID"], time.monotonic() + stay, 0
    while time.monotonic() < until:
        time.sleep(pauses[min(count, len(pauses) - 1)])
        count += 1
        try:
            said = bounded.run(["scontrol", "--oneliner", "show", "job", job], timeout=_ASK, env=env)
            shown = read(said.stdout, job) if said.code == 0 else None
            if "Invalid job id" in said.stderr or (shown is not None and shown.headless and _end(shown, env)):
                return
        except OSError:  # no Slurm commands on this node
            return


def _end(job: Shown, env: Mapping[str, str]) -> bool:
    """False when Slurm took neither."""
    if job.requeue and bounded.run(["scontrol", "requeue", job.id], timeout=_ASK, env=env).code == 0:
        return True
    return bounded.run(["scancel", job.id], timeout=_ASK, env=env).code == 0
