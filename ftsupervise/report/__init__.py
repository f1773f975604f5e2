"""The status of a run by one check of its directory and one ``squeue``; light enough for every prompt and loop.

A part that could not be read is shown as unknown, with the reason; never as fine nor as gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.errors import Error, from_os_error
from ftsupervise.host import files
from ftsupervise.model import Attempt
from ftsupervise.rundir.heartbeat_page import of_the_group, read_beats
from ftsupervise.rundir.launches import launches, people
from ftsupervise.rundir.ledger import NEWEST, ledger, lives_here, numbers
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import KILL, SAVE, read_brake, read_switch, still_held
from ftsupervise.truth import Beat, SwitchState

if TYPE_CHECKING:
    from ftsupervise.model import Job

HELD = "JobHeldUser"  # Slurm's word


class Status(NamedTuple):
    """The result of one check. ``verdict`` is a word: RUNNING, WAITING, STOPPED, FINISHED, GONE, NEW or UNKNOWN."""

    name: str
    rundir: RunDir
    at: datetime
    verdict: str
    why: str
    jobs: tuple[Job, ...] | None
    blind: str
    attempts: tuple[Attempt, ...]  # of very many the first and the newest, see ``ledger``
    beats: tuple[Beat, ...]
    switches: tuple[SwitchState, ...]
    finished: bool
    not_read: int = 0  # attempts that are not in ``attempts``
    warnings: tuple[str, ...] = ()  # warnings of Slurm's commands beside their answers
    telling: tuple[str, ...] = ()  # receivers that are in trouble, a sentence each

    @property
    def step(self) -> int | None:
        """The step that all ranks have reached; after the attempt's end the ledger's, which is newer."""
        beats = min((beat.step for beat in self.beats if beat.step is not None), default=None)
        last = self.attempts[-1] if self.attempts else None
        told = last.last_step if last is not None and last.ended is not None else None
        return max((step for step in (beats, told) if step is not None), default=None)


def gather(rundir: RunDir, now: datetime, env: Mapping[str, str]) -> Status:
    """Raises NotFound, NotPermitted when the run directory cannot be read."""
    try:
        files.among(rundir.switches)
        records = launches(rundir)
        attempts = ledger(rundir)
        not_read = max(0, len(numbers(rundir)) - len(attempts)) if len(attempts) >= NEWEST else 0
        beats = _of_the_last(read_beats(rundir), attempts)
    except OSError as error:
        raise from_os_error(error, f"read the run directory {rundir.root}") from None
    name = run_name(rundir)
    jobs: tuple[Job, ...] | None = ()
    blind, warnings = "", tuple[str, ...]()
    last = attempts[-1] if attempts else None
    if records or (last is not None and last.job_id):
        from ftsupervise.scheduler import kind_of_job
        from ftsupervise.scheduler.ownership import identify, jobs_of_run, own_job_ids

        jobs, blind, warnings = _queue(
            rundir, records[-1].scheduler if records else kind_of_job(last.job_id if last else ""), env
        )
        if jobs is not None:
            jobs = jobs_of_run(identify(rundir, name, records, last, watch=own_job_ids(env)), jobs)
    switches = tuple(read_switch(rundir, switch) for switch in (KILL, SAVE))
    finished = rundir.finished.exists()
    verdict, why = _verdict(jobs, blind, attempts, switches[0], finished, launched=bool(records))
    if verdict == "WAITING" and why == HELD:
        why = f"{HELD}: {_how_to_let_go(rundir)}"
    if verdict == "GONE" and not attempts:
        why += f": read what they wrote: tail {_logs(rundir, name)}"
    if not finished and verdict in ("WAITING", "GONE", "NEW") and (brake := _brake(rundir)):
        verdict, why = "STOPPED", brake
    return Status(name, rundir, now, verdict, why, jobs, blind, attempts, beats, switches, finished, not_read, warnings)


def _of_the_last(beats: tuple[Beat, ...], attempts: tuple[Attempt, ...]) -> tuple[Beat, ...]:
    """The beats of the newest attempt: an older one's stay until its rank beats again, or for ever where there are
    fewer ranks now. Beats that name no attempt count by their time."""
    if not attempts:
        return beats
    last = attempts[-1]

    def is_its(beat: Beat) -> bool:
        named = beat.facts.get("attempt")
        return named == str(last.number) if named else beat.at >= last.started

    return of_the_group([beat for beat in beats if is_its(beat)])


def _logs(rundir: RunDir, name: str) -> str:
    """The jobs' output files, as a shell's pattern."""
    import shlex

    from ftsupervise.config import sources
    from ftsupervise.config.find_run import starred

    try:
        document = sources.fill(sources.read_file(rundir.config), {})
    except Error:
        document = None
    launch = document.value.get("launch") if document is not None and document.value else None
    output = launch.get("output") if isinstance(launch, dict) else None
    pattern = starred(output, name) if isinstance(output, str) else f"{rundir.logs}/*"
    return "*".join(shlex.quote(part) if part else "" for part in pattern.split("*"))


def run_name(rundir: RunDir) -> str:
    """The name the run was launched under: the first line of run.yaml that says so, else the directory's name."""
    try:
        for line in files.read_bounded(rundir.config, 4_000_000).decode("utf-8").splitlines():
            key, _, value = line.partition(":")
            if key == "name":
                return value.strip().strip("'\"")
    except (OSError, UnicodeDecodeError):
        pass
    return rundir.root.name


def _brake(rundir: RunDir) -> str:
    try:
        on = read_brake(rundir)
    except OSError:
        return ""
    return f"brake: {on.words()}; fix the cause, then: ftsupervise clear --brake {rundir.quoted()}" if on else ""


def _how_to_let_go(rundir: RunDir) -> str:
    try:
        ours = bool(still_held(rundir))
    except OSError:
        ours = False
    how = f"ftsupervise clear --brake {rundir.quoted()}" if ours else "scontrol release JOBID"
    return f"on hold{' since the brake' if ours else ''}; let it go: {how}"


def _queue(rundir: RunDir, kind: str, env: Mapping[str, str]) -> tuple[tuple[Job, ...] | None, str, tuple[str, ...]]:
    """The jobs, or why they are not known; and the scheduler's warnings."""
    from ftsupervise.scheduler import open_scheduler

    try:
        scheduler = open_scheduler(kind or "auto", env)
        return scheduler.queue(users=people(rundir)), "", tuple(sorted(scheduler.warnings))
    except Error as error:
        return None, error.message, ()


def _verdict(
    jobs: tuple[Job, ...] | None,
    blind: str,
    attempts: tuple[Attempt, ...],
    kill: SwitchState,
    finished: bool,
    *,
    launched: bool,
) -> tuple[str, str]:
    if finished:
        return "FINISHED", ""
    if jobs is None:
        return "UNKNOWN", blind
    running = [job for job in jobs if not job.state.waiting and not job.state.ended]
    by = f"kill switch{f', raised by {kill.who}' if kill.who else ''}{f': {kill.why}' if kill.why else ''}"
    if running:
        word = running[0].state.value
        return ("STOPPING", by) if kill.up else (word, f"job {running[0].id}")
    if kill.up:
        return "STOPPED", by
    waiting = [job for job in jobs if job.state.waiting]
    if waiting:
        held = waiting[0].state.value != "PENDING"
        return "WAITING", waiting[0].state.value if held else waiting[0].reason
    if attempts and lives_here(attempts[-1]):
        return "RUNNING", f"attempt {attempts[-1].number}, outside the queue"
    if launched and not attempts:
        return "GONE", "no job of it is in the queue, and none has begun an attempt"
    return ("GONE", "no job of it is in the queue") if attempts else ("NEW", "nothing was launched yet")
