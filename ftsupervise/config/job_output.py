"""The files that the jobs of a run write to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run


def outputs(run: Run) -> tuple[str, ...]:
    """The files that the jobs write to, as paths in which * stands for what differs from job to job."""
    assert run.run_dir is not None
    launch = run.launch
    files = [f"{run.run_dir}/logs/*" if launch.output is None else starred(launch.output, run.name)]
    if launch.error is not None:
        files.append(starred(launch.error, run.name))
    return tuple(dict.fromkeys(files))


def starred(pattern: str, name: str) -> str:
    """sbatch's pattern as a shell's: the name filled in, "%%" a percent sign, any other "%" and its letter a star."""

    def meant(match: re.Match[str]) -> str:
        return {"%%": "%", "%x": name}.get(match[0], "*")

    return re.sub(r"\*+", "*", re.sub(r"%%|%\d*[A-Za-z]", meant, pattern))
