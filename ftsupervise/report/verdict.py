"""The state of a run in one word, and why: from its directory and the queue. UNKNOWN where the queue could not be asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftsupervise.errors import Error
from ftsupervise.printable import printable
from ftsupervise.report.pace_word import heard, pace_word
from ftsupervise.report.reading import RunReading
from ftsupervise.rundir.ledger import lives_here
from ftsupervise.rundir.paths import RunDir

if TYPE_CHECKING:
    from ftsupervise.model import Attempt, Job

_HELD = "JobHeldUser"  # Slurm's word
_MOST = 300  # characters of what an attempt ended with
_LATELY = 60.0  # seconds: a run that was heard then runs, whatever the queue says or does not


def verdict_of(run: RunReading, jobs: tuple[Job, ...] | None, blind: str) -> tuple[str, str]:
    """RUNNING, HUNG, STALLED, SILENT, SLOW, STOPPING, WAITING, STOPPED, FINISHED, GONE, NEW or UNKNOWN, or Slurm's word for
    another state of a job; why."""
    verdict, why = _first(run, jobs, blind)
    if _leaves(run, verdict):
        return "STOPPED", run.brake
    if verdict == "RUNNING":
        word, because = pace_word(run)
        if jobs is None and word:
            because = f"{because}; {why}"
        return (word, because) if word else (verdict, "; ".join(filter(None, (why, because))))
    if verdict == "WAITING":
        from ftsupervise.scheduler.ownership import why_held

        by_member = next(filter(None, map(why_held, jobs or ())), "")
        if by_member or why == _HELD:  # Slurm shows a dependency before a hold
            why = f"{_HELD}: {_how_to_let_go(run, by_member)}"
    if verdict == "GONE" and not run.attempts:
        why += f": read what they wrote: tail {logs_pattern(run.rundir, run.name)}"
    if not run.finished and verdict in ("WAITING", "GONE", "NEW") and run.brake:
        return "STOPPED", run.brake
    return verdict, why


def _leaves(run: RunReading, verdict: str) -> bool:
    """Return whether its job only looks as if it ran: the brake has come on, nothing trains in it, and it is about to leave."""
    newest = run.last
    return bool(run.brake) and verdict in ("RUNNING", "COMPLETING") and newest is not None and newest.ended is not None


def _first(run: RunReading, jobs: tuple[Job, ...] | None, blind: str) -> tuple[str, str]:
    if run.finished:
        return "FINISHED", ""
    if jobs is None:
        at = heard(run) if run.last is not None and run.last.ended is None else None
        lately = at is not None and abs((run.at - at).total_seconds()) < _LATELY
        return ("RUNNING", "its ranks are heard, Slurm does not answer") if lately else ("UNKNOWN", blind)
    kill = run.switches[0]
    running = [job for job in jobs if not job.state.waiting and not job.state.ended]
    by = f"kill switch{f', raised by {kill.who}' if kill.who else ''}{f': {kill.why}' if kill.why else ''}"
    if running:
        word = running[0].state.value
        begun = "" if run.attempts or word != "RUNNING" else ", no attempt has begun yet"
        return ("STOPPING", by) if kill.up else (word, f"job {running[0].id}{begun}")
    if kill.up:
        return "STOPPED", by
    waiting = [job for job in jobs if job.state.waiting]
    if waiting:
        first = min(waiting, key=lambda job: job.state.value != "EXPEDITING")  # in front of all others
        return "WAITING", first.reason if first.state.value == "PENDING" else first.state.value
    if run.last is not None and lives_here(run.last):
        return "RUNNING", f"attempt {run.last.number}, outside the queue"
    if run.records and not run.attempts:
        return "GONE", "no job of it is in the queue, and none has begun an attempt"
    if run.last is None:
        return "NEW", "nothing was launched yet"
    return "GONE", f"no job of it is in the queue{_how_it_ended(run.last)}"


def _how_it_ended(last: Attempt) -> str:
    if last.ended is None or not last.words:
        return ""
    from ftsupervise.secrecy import masked  # a line of the output may stand in it

    return f"; attempt {last.number} ended: {masked(printable(last.why(), _MOST))}"


def logs_pattern(rundir: RunDir, name: str) -> str:
    """Return the output files of its jobs as a pattern for a shell."""
    pattern = output_of(rundir, name)
    import shlex

    return "*".join(shlex.quote(part) if part else "" for part in pattern.split("*"))


def output_of(rundir: RunDir, name: str) -> str:
    """Return the same, not quoted."""
    from ftsupervise.config import sources
    from ftsupervise.config.find_run import starred

    try:
        document = sources.fill(sources.read_file(rundir.config), {})
    except Error:
        document = None
    launch = document.value.get("launch") if document is not None and document.value else None
    output = launch.get("output") if isinstance(launch, dict) else None
    return starred(output, name) if isinstance(output, str) else f"{rundir.logs}/*"


def _how_to_let_go(run: RunReading, by_member: str) -> str:
    if by_member:
        return f"held by a member of the chain: {by_member}; repair it, then: ftsupervise clear --brake {run.rundir.quoted()}"
    how = f"ftsupervise clear --brake {run.rundir.quoted()}" if run.held_by_us else "scontrol release JOBID"
    return f"on hold{' since the brake' if run.held_by_us else ''}; let it go: {how}"
