"""A job that has lost its batch host is ended, as Slurm itself ends one without ``--no-kill``: it is requeued where that is
allowed, and otherwise cancelled, so that the next member takes over (22.05 shows JobState=RUNNING, and a BatchHost that is not
in NodeList)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ftsupervise.host import bounded
from ftsupervise.hostlist import expand_hostlist

_FIELDS = re.compile(r"(?:^|\s)(JobId|ArrayJobId|ArrayTaskId|JobState|Requeue|BatchHost|NodeList)=(\S*)")
_ASK = 20.0  # seconds for one question


class ShownJob(NamedTuple):
    """One job, as ``scontrol show job`` tells of it."""

    id: str  # of this member: the plain number may also mean its whole array
    headless: bool | None  # has it lost its batch host? None when that cannot be told
    requeue: bool


def end_without_host(job: str, env: Mapping[str, str]) -> bool:
    """End ``job`` if it has lost its batch host. True when nothing is left to do: Slurm ends it, or knows it no longer.
    Raises OSError where there are no Slurm commands."""

    def ask(*words: str) -> bounded.CompletedCommand:
        return bounded.run(words, timeout=_ASK, env=env)

    answer = ask("scontrol", "--oneliner", "show", "job", job)
    shown = parse_shown_job(answer.stdout, job) if answer.code == 0 else None
    if shown is None or not shown.headless:
        return "Invalid job id" in answer.stderr
    if shown.requeue and ask("scontrol", "requeue", shown.id).code == 0:
        return True
    return ask("scancel", shown.id).code == 0


def parse_shown_job(text: str, job: str) -> ShownJob | None:
    """Of ``scontrol --oneliner show job``; None when ``job`` is not in it."""
    for line in text.splitlines():
        fields = dict(_FIELDS.findall(line))
        if fields.get("JobId") == job:
            array, task = fields.get("ArrayJobId", ""), fields.get("ArrayTaskId", "")
            return ShownJob(f"{array}_{task}" if array else job, _headless(fields), fields.get("Requeue") == "1")
    return None


def _headless(fields: Mapping[str, str]) -> bool | None:
    host, nodes = fields.get("BatchHost", ""), fields.get("NodeList", "")
    if fields.get("JobState") != "RUNNING" or not host or not nodes or "(null)" in (host, nodes):
        return None
    try:
        return host not in expand_hostlist(nodes)
    except ValueError:
        return None
