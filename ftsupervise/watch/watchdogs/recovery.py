"""Checks that the run has recovered from its last failure. It is bad from the death of an attempt until a later one trains, or
until a person says by the kill switch that none is to train.

Of a script without the guard it is bad, too, while its attempts begin anew in place of resuming.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ftsupervise.config.find_run import outputs
from ftsupervise.findings import Finding, Words
from ftsupervise.model import OUTPUT, Attempt, CauseKind, JobState
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.starting_over import ADVICE, not_resumed, saves_elsewhere, since_a_person
from ftsupervise.rundir.switches import KILL
from ftsupervise.truth import Health
from ftsupervise.watch import Look
from ftsupervise.watch.watchdogs.is_running import is_hopeless
from ftsupervise.watch.watchdogs.progress_signals import AT_WORK

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Recovery as Settings

_START = timedelta(minutes=30)
_IN_PLACE = timedelta(minutes=1)  # for a restart in the same job, which takes a second or so
WORDS = Words(
    "The run stands still until the next member of the chain has started and resumed.",
    "ftsupervise {command}",
    "read {output} if the next attempt fails too",
)

NOT_RESUMED = Words(
    "Each start trains again what was trained before; after the second one with a checkpoint that was left the chain is held.",
    "ftsupervise status {run_dir}",
    "{advice}{kept}",
)

BEGAN_AGAIN = NOT_RESUMED._replace(
    meaning="Each start works again on what was done before. What is read is a percentage, so nothing is held for it."
)


ELSEWHERE = NOT_RESUMED._replace(
    meaning="If it looks for what was saved in that folder alone, each start begins anew; no step says whether it does.",
    do="give it one folder for all jobs of the run, $FTSUPERVISE_CHECKPOINT_DIR for example{kept}",
)


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    attempts = look.attempts
    read = any((one.source == OUTPUT and one.first_step is not None) or one.percent is not None for one in attempts)
    if read or any(one.written is not None and one.written.by_job for one in attempts):
        yield _resumes(look)
    seen = [a for a in attempts if a.kind not in (None, CauseKind.UNKNOWN)]
    failed = [a for a in seen if a.cause is not None and not a.cause.orderly]
    if not failed or look.rundir.finished.exists():
        yield _finding(look, False, "no failure to recover from")
        return
    last = failed[-1]
    since = next((a for a in attempts if a.number > last.number and a.first_step is not None), None)
    if since is not None:
        text = f"attempt {since.number} trains, from step {since.first_step}"
        yield _finding(look, False, text, attempt=since.number)
    elif works := _works(attempts, last):
        yield _finding(look, False, works)
    elif look.switch(KILL).up:
        yield _finding(look, False, "a person has stopped the run by the kill switch: nothing is to recover")
    elif starting := _starting(look, attempts, last, _patience(look, settings)):
        yield _finding(look, None, f"{starting}: too early to say whether it recovers")
    else:
        step = f" at step {last.last_step}" if last.last_step is not None else ""
        how = "failed" if last.failure is not None else "ended"  # nothing fails of a scancel
        text = f"attempt {last.number} {how}{step} ({last.why()}) and none has trained since"
        command = f"diagnose {look.rundir.quoted()} {last.number}" if last.has_failed else ""
        yield _finding(look, True, text, command, value=last.words, since=last.ended, why=look.why(last))


def _resumes(look: Look) -> Finding:
    """Find whether a script without a guard has begun anew."""
    if look.rundir.finished.exists():
        return look.finding("resume", Health.OK, "it has finished", NOT_RESUMED, names={"advice": ADVICE, "kept": ""})
    counted = since_a_person(look.attempts, look.rundir)
    kept = any(one.written is not None and one.written.kept for one in counted)
    names = {"advice": ADVICE, "kept": f"; what was left is kept in {look.rundir.root}/kept" if kept else ""}
    found, again = not_resumed(look.attempts, look.rundir)
    command = look.run.launch.command
    text = "no attempt has begun anew"
    if found:
        why = found[-1].why(command if isinstance(command, str) else " ".join(command))
        text = f"{found[-1].words()}; {why}"
    elif again is not None:
        return look.finding("resume", Health.BAD, again.words(), BEGAN_AGAIN, names=names)
    elif elsewhere := saves_elsewhere(counted):
        return look.finding("resume", Health.BAD, elsewhere, ELSEWHERE, names=names)
    return look.finding("resume", Health.of(bool(found)), text, NOT_RESUMED, names=names)


def _works(attempts: tuple[Attempt, ...], failed: Attempt) -> str:
    """Return, as a sentence, that an attempt since the failure shows or has shown life without a known step; "" if none.

    Whether it trains, nobody can say.
    """
    for one in reversed(attempts):
        if one.number <= failed.number:
            break
        runs = one is attempts[-1] and one.ended is None and one.kind in (None, CauseKind.UNKNOWN)
        if not runs and one.ended is None:  # lost: nobody knows what it did last
            continue
        if one.percent is not None:
            return f"attempt {one.number} {'is' if runs else 'was'} at {one.percent.words()} by its own words"
        if one.source == OUTPUT:
            life = "prints or computes; it shows no step" if runs else "printed or computed; it showed no step"
            return f"attempt {one.number} {life}"
    return ""


def _patience(look: Look, settings: Settings) -> timedelta:
    """Return how long a start may take: as long as the supervisor gives it, unless the settings say otherwise."""
    hang = look.run.launch.restart.hang
    return settings.start or (hang.start if hang is not None else _START)


def _starting(look: Look, attempts: tuple[Attempt, ...], failed: Attempt, patience: timedelta) -> str:
    """Return, as a sentence, the attempt or launch since the failure that still has time to start; "" if there is none."""
    newest = attempts[-1]
    runs = newest.kind in (None, CauseKind.UNKNOWN)  # UNKNOWN: on another host than this
    open_end = newest.ended is None and runs
    if newest.number > failed.number and open_end and look.now - newest.started < patience:
        return f"attempt {newest.number} is starting"
    records = launches(look.rundir)
    if records and failed.ended is not None and records[-1].at > failed.ended and look.now - records[-1].at < patience:
        return "it has been launched again"
    return "" if open_end else _takes_over(look, newest, patience)


def _takes_over(look: Look, last: Attempt, patience: timedelta) -> str:
    """Return, as a sentence, the job that may still begin the next attempt after ``last``; "" if none does, or the brake keeps
    it from that."""
    try:
        held = look.brake() is not None
    except OSError:
        return ""
    end, waits = last.ended or last.heard or last.started, look.run.watch.is_running.pending_for or patience
    for job in () if held else look.jobs or ():
        since = max(end, job.start_time or end)
        if job.state.waiting:
            if not is_hopeless(job) and look.now - end < waits:
                return f"job {job.id} waits in the queue"
        elif job.id == last.job_id and since == end:
            if job.state in AT_WORK and look.now - end < _IN_PLACE:
                return "the supervisor of its job is there, to start the next attempt"
        elif not job.state.ended and job.state is not JobState.COMPLETING and look.now - since < patience:
            return f"job {job.id} is there, to start the next attempt"
    return ""


def _finding(look: Look, bad: bool | None, summary: str, command: str = "", **more: Any) -> Finding:
    names = {"output": " ".join(outputs(look.run)), "command": command or f"status {look.rundir.quoted()}"}
    return look.finding("attempt", Health.of(bad), summary, WORDS, names=names, **more)
