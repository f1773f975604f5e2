"""When will the scheduler end this job? The environment knows on new Slurms; on 22.05 the controller has to be asked once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

from ftsupervise.rundir.paths import ENV_DEADLINE

_END_TIME = re.compile(r"\bEndTime=(\S+)")


def from_environment(env: Mapping[str, str]) -> float | None:
    """Epoch seconds from FTSUPERVISE_DEADLINE, else SLURM_JOB_END_TIME; None if neither says."""
    for name in (ENV_DEADLINE, "SLURM_JOB_END_TIME"):
        try:
            value = float(env.get(name, ""))
        except ValueError:
            continue
        if value > 0:
            return value
    return None


def ask_slurm(env: Mapping[str, str], *, timeout: float = 8.0) -> float | None:
    """Epoch seconds at which this job ends, as ``scontrol show job`` says; None if there is no limit or no answer.

    Asked in a child that is abandoned when it hangs. One request to the controller: ask once per job, not per rank.
    """
    job = env.get("SLURM_JOB_ID", "")
    if not job.isdigit():
        return None
    from ftsupervise.host import bounded

    try:
        answer = bounded.run(
            ["scontrol", "show", "job", "-o", job], timeout=timeout, env={**env, "SLURM_TIME_FORMAT": "%s"}
        )
    except OSError:  # no scontrol here
        return None
    return parse_end_time(answer.stdout) if answer.code == 0 else None


def parse_end_time(text: str) -> float | None:
    """``EndTime=`` of ``scontrol show job``: epoch seconds, or local time as Slurm prints it; None for Unknown."""
    match = _END_TIME.search(text)
    if match is None:
        return None
    word = match[1]
    if word.isascii() and word.isdigit():
        return float(word[:18]) or None
    try:
        return datetime.fromisoformat(word).timestamp()
    except ValueError:
        return None
