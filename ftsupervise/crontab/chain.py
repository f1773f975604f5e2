"""The chain of jobs that ticks at every slot: the jobs that it lacks or has twice, and the job script of a slot.

The chain cannot fork: the queue is read once, and only jobs that are certainly missing are submitted; if the queue cannot be
read, nothing is changed. The chain cannot die out: the next K slots always have their jobs, and each command that starts
or runs a run checks whether slots still come (``keepalive.py``). A job is identified by its comment:

ftsupervise-cron:3f9a1c20:slot:1795252200                      a tick of the chain 3f9a1c20
ftsupervise-cron:3f9a1c20:entry:hourly.disk:20261121T090000Z   a job script it submitted
"""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ftsupervise.crontab import history
from ftsupervise.crontab.entries import EPOCH, CronEntry, floor, slots_after
from ftsupervise.crontab.history import EntryRun, RunEnd
from ftsupervise.crontab.installation import CronDir, Installed, read_believed
from ftsupervise.errors import Error, SchedulerUnavailable, from_os_error
from ftsupervise.host import ownership, processes
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.model import Job, JobState, Submitted
from ftsupervise.rundir.records import as_count
from ftsupervise.scheduler.parse import is_held, quote
from ftsupervise.units import format_slurm_time
from ftsupervise.version import VERSION

if TYPE_CHECKING:
    from ftsupervise.scheduler import Scheduler

MARK = "ftsupervise-cron"  # begins the comments, and is the job's name
DUPLICATE = "Duplicate jobid"  # Slurm's reason when it drains a node with a job that a killed controller has forgotten
_OVERDUE = 4  # with as many overdue jobs (times the spares) in the queue, no further job is submitted
_MARGIN = timedelta(minutes=2)  # between the bound of the entries and the end of the tick's job


def slot_comment(chain: str, slot: datetime) -> str:
    return f"{MARK}:{chain}:slot:{epoch(slot)}"


def entry_comment(chain: str, entry: str, stamp: str) -> str:
    return f"{MARK}:{chain}:entry:{entry}:{stamp}"


def epoch(slot: datetime) -> int:
    return (slot - EPOCH) // timedelta(seconds=1)


def slot_of(comment: str, chain: str) -> datetime | None:
    """The slot a job of ``chain`` is for; None if it is none of its ticks."""
    text = comment.removeprefix(f"{MARK}:{chain}:slot:")
    seconds = as_count(text) if text != comment and len(text) <= 11 else None
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc)


@dataclass(frozen=True)
class CronChain:
    """The state of the chain in the queue, and the jobs to submit and to cancel."""

    submit: tuple[datetime, ...] = ()  # slots without a job
    cancel: tuple[str, ...] = ()  # jobs that are too many
    ahead: tuple[datetime, ...] = ()  # slots to come that have a job
    overdue: int = 0  # jobs that wait although their slot has come
    running: int = 0
    held: tuple[str, ...] = ()  # jobs on hold: they do not count

    @property
    def alive(self) -> bool:
        """Return whether something in the queue will still tick."""
        return bool(self.ahead or self.overdue or self.running)


def chain_in(jobs: Iterable[Job], name: str, now: datetime, period: timedelta, spares: int) -> CronChain:
    """The chain ``name`` at ``now``. Of several pending jobs for one slot the one with the lowest id stays. Pure."""
    pending: dict[datetime, list[int]] = {}
    held: list[str] = []
    running = overdue = 0
    for job in jobs:
        slot = slot_of(job.comment, name)
        if slot is None:
            continue
        if not job.state.waiting:
            running += job.state in (JobState.RUNNING, JobState.CONFIGURING)
        elif job.state is not JobState.PENDING or is_held(job.reason):
            held.append(job.base_id)
        elif (number := as_count(job.base_id)) is not None:
            pending.setdefault(slot, []).append(number)
    cancel: list[int] = []
    ahead: list[datetime] = []
    for slot, ids in sorted(pending.items()):
        lowest, *more = sorted(ids)
        cancel += more
        if slot <= now:
            overdue += 1
        elif floor(slot, period) != slot:
            cancel.append(lowest)  # left from another period
        else:
            ahead.append(slot)
    wanted = slots_after(now, period, spares) if overdue < spares * _OVERDUE else ()
    return CronChain(
        submit=tuple(slot for slot in wanted if slot not in ahead),
        cancel=tuple(str(number) for number in sorted(cancel)),
        ahead=tuple(ahead),
        overdue=overdue,
        running=running,
        held=tuple(held),
    )


@dataclass(frozen=True)
class Extended:
    """The result of one look at the queue. ``chain`` is None when the queue could not be read; nothing was changed then."""

    chain: CronChain | None
    jobs: tuple[Job, ...] | None = None
    submitted: tuple[datetime, ...] = ()
    cancelled: tuple[str, ...] = ()
    trouble: str = ""


class TickScheduler(Protocol):
    """The methods of Slurm that a crontab made of jobs needs. Each raises SchedulerUnavailable."""

    warnings: set[str]  # warnings that came with its answers

    def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]:
        """Return all live jobs of ``users``."""

    def submit(
        self,
        script: str,
        *,
        script_path: Path,
        token: str,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> Submitted:
        """Hand in ``script``, with further ``options`` of sbatch and ``arguments`` of the script."""

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None:
        """End a job. One that is gone already is no error."""

    def drained(self, reason: str) -> tuple[str, ...]:
        """Return the nodes that Slurm has drained for ``reason``."""


def extend(cron: CronDir, installed: Installed, scheduler: TickScheduler, now: datetime) -> Extended:
    """Read the queue once, submit the jobs that are missing, cancel duplicates. An error of Slurm's stands in ``trouble``."""
    try:
        jobs = scheduler.queue(users=(installed.owner,))
    except Error as error:  # SchedulerUnavailable, or no squeue on this node
        return Extended(None, trouble=f"the queue could not be read: {error.message}")
    found = chain_in(jobs, installed.id, now, installed.period, installed.spares)
    submitted: list[datetime] = []
    cancelled: list[str] = []
    trouble = ""
    env = {**installed.environment, "TZ": "UTC0"}  # no secret is in it: Slurm keeps a job's environment
    try:
        for slot in found.submit:
            trouble = f"no successor for {slot:%H:%M:%S} UTC"
            scheduler.submit(
                _tick_script(cron),
                script_path=cron.script,
                token=slot_comment(installed.id, slot),
                env=env,
                options=options(installed, slot),
                arguments=(str(epoch(slot)),),
            )
            submitted.append(slot)
        trouble = ""
    except Error as error:
        trouble = f"{trouble}: {error.message}"
    for job_id in found.cancel:
        try:
            scheduler.cancel(job_id, only_pending=True)
        except Error as error:
            trouble = trouble or f"job {job_id} is there twice and could not be cancelled: {error.message}"
            break
        cancelled.append(job_id)
    return Extended(found, jobs, tuple(submitted), tuple(cancelled), trouble)


def _tick_script(cron: CronDir) -> str:
    """Return the text of ``state/tick.sbatch``, as install wrote it. Raises Error, NotTrusted where others may write it."""
    try:
        return ownership.read_trusted(cron.script).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise from_os_error(error, f"read {cron.script}") from None


def drained(scheduler: TickScheduler) -> tuple[str, ...] | None:
    """Return the nodes that Slurm has drained by itself after its controller was killed; None when it could not be asked."""
    try:
        return scheduler.drained(DUPLICATE)
    except Error:
        return None


def drained_words(nodes: Sequence[str]) -> str:
    """Return a clause that says that Slurm has drained ``nodes``, and why; "" for none."""
    if not nodes:
        return ""
    names = compress_hostlist(tuple(nodes))
    return f'Slurm has drained {names} ("{DUPLICATE}", as after a killed controller), and starts nothing there'


# ------------------------------------------------------------------------------------------------- the job of a slot


def options(installed: Installed, slot: datetime) -> tuple[str, ...]:
    """Return the options of sbatch for the job of ``slot``. Its times are UTC: the caller sets TZ."""
    begin = slot.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    return (f"--begin={begin}", f"--comment={slot_comment(installed.id, slot)}")


def directives(cron: CronDir, installed: Installed) -> tuple[str, ...]:
    """The ``#SBATCH`` options of every tick: the smallest possible job, in a folder that only this account may write."""
    return (
        f"--job-name={MARK}",
        f"--chdir={cron.state}",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=1",
        "--no-requeue",
        "--output=/dev/null",
        f"--time={format_slurm_time(job_limit(installed.limit))}",
        *installed.options,
    )


def job_limit(limit: timedelta) -> timedelta:
    """Return the time limit of a tick's job whose entries may run for ``limit``: whole minutes, as Slurm keeps them."""
    return -(-(limit + _MARGIN) // timedelta(minutes=1)) * timedelta(minutes=1)


def command(cron: CronDir, installed: Installed) -> tuple[str, ...]:
    """The command that every back end runs at each slot."""
    return tuple(processes.own_command("cron", "tick", "--dir", str(cron.root), python=installed.python))


def script(cron: CronDir, installed: Installed) -> str:
    """Return the text of ``state/tick.sbatch``: one file for every slot, which comes as its argument.

    Raises ValueError for what cannot stand in a job script.
    """
    paths = {"directory": str(cron.root), "state": str(cron.state), "log": str(cron.log)}
    options, words = directives(cron, installed), command(cron, installed)
    return render("cron.sbatch.j2", {**paths, "options": options, "command": words, "version": VERSION})


def render(template: str, values: Mapping[str, object]) -> str:
    """A file of ours from ``templates/``. Raises ValueError for what cannot be quoted in a job script."""
    from importlib import resources

    import jinja2

    source = (resources.files("ftsupervise.templates") / template).read_text("utf-8")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters.update(quote=lambda text: shlex.quote(str(text)), sbatch=lambda text: quote(str(text)))
    return environment.from_string(source).render(values)


# Job scripts that people dropped: each becomes a job of its own, and its end is recorded.
#
# A job is known by its comment, so one whose sbatch gave no clear answer is found as well. Slurm forgets a finished job
# after minutes; one whose end was not seen is written down as "unknown", which is neither a failure nor a success.

_OUTPUT = re.compile(r"^#SBATCH\s+(?:.*\s)?(?:--output[= ]|-o\s?)\s*(\S+)", re.M)
_LIMIT = 1_000_000
_SHELL = re.compile(r"#!\s*(?:\S*/)?(?:env\s+(?:-\S+\s+)*)?(?:\S*/)?(?:sh|bash|dash|ksh|zsh)(?:\s|$)")


def prepare(entry: CronEntry, installed: Installed, folder: Path, comment: str, secrets: Path) -> tuple[str, str]:
    """The script of ``entry`` as it is submitted, and the path of its output ("" for ``folder/output``).

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
    """The dropped script with our options, and the path of its output. Pure.

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
    """Return the job of an open run, if it is in the queue."""
    comment = run.start.job_comment
    return next((job for job in queue if comment and job.comment == comment), None)


def follow(run: EntryRun, queue: tuple[Job, ...] | None, jobs: Scheduler, now: datetime) -> None:
    """Record the end of an open run whose job has left the queue. Nothing is recorded while it lives or Slurm does not answer.

    A job that has just ended costs one more question to the scheduler. Raises OSError when the end cannot be written.
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
    if job is not None and job.comment != run.start.job_comment:  # another job has got its number since
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
