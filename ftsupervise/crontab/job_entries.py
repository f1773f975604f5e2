"""Job scripts that people dropped: each becomes a job of its own, and how that job ends is found out.

A job is known by its comment, so one whose sbatch gave no clear answer is found as well. Slurm forgets a finished job
after minutes; one whose end was not seen is written down as "unknown", which is neither a failure nor a success.
"""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.crontab import history
from ftsupervise.crontab.entries import CronEntry
from ftsupervise.crontab.history import EntryRun, RunEnd
from ftsupervise.crontab.installation import Installed, read_believed
from ftsupervise.errors import Error, SchedulerUnavailable
from ftsupervise.model import Job, JobState
from ftsupervise.scheduler.parse import quote

if TYPE_CHECKING:
    from ftsupervise.scheduler import Scheduler

_OUTPUT = re.compile(r"^#SBATCH\s+(?:.*\s)?(?:--output[= ]|-o\s?)\s*(\S+)", re.M)
_LIMIT = 1_000_000
_SHELL = re.compile(r"#!\s*(?:\S*/)?(?:env\s+(?:-\S+\s+)*)?(?:\S*/)?(?:sh|bash|dash|ksh|zsh)(?:\s|$)")


def prepare(entry: CronEntry, installed: Installed, folder: Path, comment: str, secrets: Path) -> tuple[str, str]:
    """The script of ``entry`` as it is submitted, and where its output will be ("" for ``folder/output``).

    Raises OSError, NotTrusted; ValueError when it is no script, or larger than any.
    """
    assert entry.path is not None
    try:
        text = read_believed(entry.path, installed, _LIMIT).decode("utf-8", "surrogateescape")
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise ValueError(f"larger than {_LIMIT} bytes") from None
    home = installed.environment.get("HOME", "/")
    first = (f"--job-name={quote(entry.path.name)}", f"--chdir={quote(home)}", *map(quote, installed.job_options))
    return completed(text, first, comment, folder, secrets if installed.secret else None)


def completed(
    text: str, first: tuple[str, ...], comment: str, folder: Path, secrets: Path | None = None
) -> tuple[str, str]:
    """The dropped script with what makes it ours, and where its output will be. Pure.

    Its own ``#SBATCH`` lines count before ``first``, but not before our comment, by which we know it, nor our output file
    unless its own is an absolute path. A shell script reads ``secrets`` first: variables that must not stand in the environment
    of a job, which Slurm keeps. Raises ValueError when it is no script.
    """
    source = ""
    if secrets is not None and _SHELL.match(text):
        file = shlex.quote(str(secrets))
        source = f"[ ! -r {file} ] || . {file}\n"
    own = [path.strip("\"'") for path in _OUTPUT.findall(text)]
    elsewhere = own[-1] if own and own[-1].startswith("/") else ""
    ours = f"--output={quote(str(folder / 'output').replace('%', '%%'))}"
    last = (f"--comment={quote(comment)}", *([] if elsewhere else [ours]))
    return with_directives(text, first, last, source), elsewhere


def with_directives(script: str, first: tuple[str, ...], last: tuple[str, ...], command: str = "") -> str:
    """A job script with ``#SBATCH`` lines added: ``first`` ones give way to the script's own, ``last`` ones do not; and with
    the line ``command`` before its first command.

    sbatch reads such lines up to the first command, and of two for the same option the later one counts.
    Raises ValueError when it is no script.
    """
    lines = script.splitlines(keepends=True)
    if not lines or not lines[0].startswith("#!"):
        raise ValueError("a job script begins with a line such as #!/bin/bash")
    if not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    end = 1
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith("#")):
        end += 1
    head = [lines[0], *(f"#SBATCH {option}\n" for option in first)]
    return "".join([*head, *lines[1:end], *(f"#SBATCH {option}\n" for option in last), command, *lines[end:]])


def living(run: EntryRun, queue: Iterable[Job]) -> Job | None:
    """The job of an open run, if it is in the queue."""
    comment = run.start.job_comment
    return next((job for job in queue if comment and job.comment == comment), None)


def follow(run: EntryRun, queue: tuple[Job, ...] | None, jobs: Scheduler, now: datetime) -> None:
    """Write down the end of an open run whose job is gone from the queue; nothing while it lives or Slurm cannot say.

    One question more to the scheduler, for a job that has just ended. Raises OSError when the end cannot be written.
    """
    if queue is None or living(run, queue) is not None:
        return
    job_id = run.start.job_id
    try:
        job = jobs.describe(job_id) if job_id else None
    except SchedulerUnavailable:
        return
    except Error:
        job = None
    if job is not None and not job.state.ended:
        return
    seconds = 0.0  # when the end was not seen
    if job is not None and job.start_time is not None and job.end_time is not None:
        seconds = max(0.0, (job.end_time - job.start_time).total_seconds())
    if job is None:
        words, outcome = f"job {job_id or '?'} has left the queue; its end was not seen", "unknown"
    elif job.state is JobState.COMPLETED:
        words, outcome = f"job {job_id} COMPLETED", "ok"
    else:
        reason = f" ({job.reason})" if job.reason else ""
        words, outcome = f"job {job_id} {job.state.value}{reason}", "failed"
    history.write_end(run.folder, RunEnd(now, outcome, words, seconds=round(seconds, 3)))
