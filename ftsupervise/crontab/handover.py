"""Job scripts that people dropped: each becomes a job of its own, and how that job ends is found out.

A job is known by its comment, so one whose sbatch gave no clear answer is found as well. Slurm forgets a finished job
after minutes; one that ended unseen is written down as "unknown", which is neither a failure nor a success.
"""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from ftsupervise.crontab import history, trust
from ftsupervise.crontab.history import Ran
from ftsupervise.crontab.parts import with_directives, with_first_command
from ftsupervise.crontab.place import Installed
from ftsupervise.errors import Error, SchedulerUnavailable
from ftsupervise.model import Job, JobState, Submitted
from ftsupervise.rundir.paths import write_whole
from ftsupervise.scheduler.parse import quote

_OUTPUT = re.compile(r"^#SBATCH\s+(?:.*\s)?(?:--output[= ]|-o\s?)\s*(\S+)", re.M)
_LIMIT = 1_000_000
_SHELL = re.compile(r"#!\s*(?:\S*/)?(?:env\s+(?:-\S+\s+)*)?(?:\S*/)?(?:sh|bash|dash|ksh|zsh)(?:\s|$)")


class Jobs(Protocol):
    """What a dropped script needs of a scheduler."""

    kind: str

    def submit(
        self, script: str, *, script_path: Path, token: str, env: Mapping[str, str] | None = None
    ) -> Submitted: ...

    def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]: ...

    def describe(self, job_id: str) -> Job | None: ...


@dataclass(frozen=True)
class Prepared:
    """A script ready to be submitted, and where its output will be ("" for ``folder/output``)."""

    text: str
    output: str = ""


def prepare(
    text: str,
    *,
    name: str,
    folder: Path,
    home: str,
    comment: str,
    options: tuple[str, ...],
    secrets: Path | None = None,
) -> Prepared:
    """The dropped script with what makes it ours. Its own ``#SBATCH`` lines stand, but for the comment we know it by and an
    output file that is not an absolute path. A shell script reads ``secrets`` first: variables that must not stand in the
    environment of a job, which Slurm keeps. Raises ValueError when it is no script.
    """
    if secrets is not None and _SHELL.match(text):
        file = shlex.quote(str(secrets))
        text = with_first_command(text, f"[ ! -r {file} ] || . {file}")
    own = _OUTPUT.findall(text)
    elsewhere = own[-1].strip("\"'") if own and own[-1].strip("\"'").startswith("/") else ""
    ours = f"--output={quote(str(folder / 'output').replace('%', '%%'))}"
    first = (f"--job-name={quote(name)}", f"--chdir={quote(home)}", *(quote(option) for option in options))
    last = (f"--comment={quote(comment)}", *([] if elsewhere else [ours]))
    return Prepared(with_directives(text, first, last), elsewhere)


def read_script(path: Path, installed: Installed) -> str:
    """Raises OSError, NotTrusted; ValueError when it is larger than any job script."""
    try:
        return trust.read(path, installed, _LIMIT).decode("utf-8", "surrogateescape")
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise ValueError(f"larger than {_LIMIT} bytes") from None


def submit(prepared: Prepared, folder: Path, comment: str, env: Mapping[str, str], jobs: Jobs) -> str:
    """The id of the new job. Raises the scheduler's errors, OSError."""
    copy = folder / "job.sbatch"
    write_whole(copy, prepared.text.encode("utf-8", "surrogateescape"), mode=0o755)
    return jobs.submit(prepared.text, script_path=copy, token=comment, env=env).job_id


def living(ran: Ran, queue: Iterable[Job]) -> Job | None:
    """The job of an open run, if it is in the queue."""
    for job in queue:
        if ran.job_comment and job.comment == ran.job_comment:
            return job
    return None


def follow(ran: Ran, queue: tuple[Job, ...] | None, jobs: Jobs, now: datetime) -> str:
    """Write down the end of an open run whose job is gone from the queue; "" while it lives or nobody can tell.

    One question more to the scheduler, for a job that has just ended. Raises OSError when the end cannot be written.
    """
    if queue is None or living(ran, queue) is not None:
        return ""
    try:
        job = jobs.describe(ran.job_id) if ran.job_id else None
    except SchedulerUnavailable:
        return ""
    except Error:
        job = None
    if job is not None and not job.state.ended:
        return ""
    seconds = 0.0  # when nobody saw
    if job is not None and job.start_time is not None and job.end_time is not None:
        seconds = max(0.0, (job.end_time - job.start_time).total_seconds())
    if job is None:
        words, outcome = f"job {ran.job_id or '?'} has left the queue; nobody saw how", "unknown"
    elif job.state is JobState.COMPLETED:
        words, outcome = f"job {ran.job_id} COMPLETED", "ok"
    else:
        words, outcome = f"job {ran.job_id} {job.state.value}", "failed"
        if job.reason:
            words += f" ({job.reason})"
    history.write_end(ran.folder, now, outcome, words, seconds=seconds)
    return words
