"""The lines ``do`` of one run: what a person can type next, for each state that is not well."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.printable import printable
from ftsupervise.report.detail import attempts_of
from ftsupervise.report.pace_word import left_behind, no_step
from ftsupervise.report.queues import scheduler_of
from ftsupervise.report.row import mostly_waits
from ftsupervise.truth import BACK, HANG, NOT_A_NUMBER, LossTrouble

if TYPE_CHECKING:
    from ftsupervise.report.detail import RunDetail

_MOST = 3  # alerts whose advice is shown
_TOLD = frozenset(("hang", "throughput", "brake"))  # alerts that the verdict's own lines answer
_USUAL = frozenset(
    ("", "Priority", "Resources", "Dependency", "JobArrayTaskLimit", "BeginTime")
)  # these end by waiting
_OVER = frozenset(("FINISHED", "NEW"))
_SPACE_WAIT = "within launch.restart.space_wait (10m, where nothing else is set)"  # then its supervisor holds the chain
_NO_NEXT = frozenset(("STOPPED", "STOPPING", "GONE"))  # no next attempt comes by itself


def advice_of(found: RunDetail, advised: Mapping[str, str]) -> Iterator[str]:
    """Yield what to type. ``advised``: name of an alert that fires -> what its watchdog says is to be done."""
    verdict, run = found.status.verdict, found.status.rundir.quoted()
    if verdict not in _OVER:
        yield from _full(found, run)
        yield from _failed(found, run)
    if verdict == "HUNG":
        yield from _hung(found, run)
    elif verdict in ("STALLED", "SILENT"):
        yield from _stalled(found, run)
    elif verdict == "SLOW":
        yield from _slow(found, run)
    elif verdict == "WAITING":
        yield from _waits(found)
    elif verdict == "GONE":
        yield from _gone(found, run)
    elif verdict == "STOPPED" and not found.row.braked:
        waits = any(job.state.waiting for job in found.status.jobs or ())
        yield f"ftsupervise clear {run}   (lowers the switch{'; the jobs that wait go on' if waits else ''})"
        if not waits:
            yield _launch(found)
    if verdict == "RUNNING" and found.status.run.loss_trouble is not None:
        yield from _bad_loss(found, found.status.run.loss_trouble, run)
    if verdict == "RUNNING" and no_step(found.status.run):
        yield f"ftsupervise check hang {run}   (every sign of progress, with its age)"
    if verdict == "RUNNING" and left_behind(found.status.run):
        yield f"ftsupervise check hang {run}   (every sign of progress, with its age)"
    if verdict not in _OVER and found.row.watch_late:
        yield f"ftsupervise watch --every 60s {run}   (nobody is told of anything while no watch looks)"
    if found.status.jobs is None and verdict not in _OVER and _is_of_slurm(found):
        yield "scontrol ping   (whether Slurm's controller answers; nothing is to be done to the run for that)"
    if verdict not in _OVER:
        told = _TOLD | ({"recovery"} if verdict in _NO_NEXT else frozenset())
        if verdict == "GONE" or any(never_starts(job.reason) for job in found.status.jobs or () if job.state.waiting):
            told |= {"is-running"}  # the verdict's own lines say it, with the run's name
        names = [one.watchdog for one in found.row.alerts if one.watchdog not in told]
        for name in list(dict.fromkeys(names))[:_MOST]:
            look = f"ftsupervise check {printable(name)} {run}   (what fires, with its figures)"
            yield f"{printable(name)}: {printable(advised[name])}" if advised.get(name) else look
    if found.row.braked and found.row.asks:
        yield f"ftsupervise clear --finished {run}   (if it is finished; the jobs that are held leave at once)"
        yield f"ftsupervise clear --brake {run}   (if it is not, and the next one goes on)"
    elif found.row.braked:
        held = any(job.state.waiting for job in found.status.jobs or ())
        then = "the jobs that are held start again" if held else "then launch again: ftsupervise launch"
        on = found.status.run.braked
        if on is not None and on.loads:
            yield f"{printable(on.set_aside())}   (where it crashes on {printable(Path(on.loads).name)})"
        yield f"ftsupervise clear --brake {run}   (once that is mended; {then})"


def _is_of_slurm(found: RunDetail) -> bool:
    from ftsupervise.scheduler import SLURM, kind_of

    return kind_of(scheduler_of(found.status.run)) == SLURM


def never_starts(reason: str) -> tuple[str, str] | None:
    """Return why a job with this reason of Slurm's never starts by waiting, and what to do; None where it may start."""
    if reason in _USUAL:
        return None
    from ftsupervise.scheduler import pending
    from ftsupervise.scheduler.parse import is_held

    if is_held(reason):
        return None  # the verdict says who holds it, and what lets it go
    return pending.never_starts(reason)


def _hung(found: RunDetail, run: str) -> Iterator[str]:
    job = next((job for job in found.status.jobs or () if not job.state.waiting), None)
    yield f"ftsupervise check hang {run}   (every sign of progress, with its age)"
    if HANG in found.observes:
        yield f"ftsupervise observe --off --only hang {run}   (its supervisor ends it then)"
    if job is not None:
        saved = "" if found.row.saved is None else f" from step {found.row.saved}"
        now = " at once, where its supervisor is not to be waited for" if found.row.ends_hang else ""
        yield _end_of_job(found, job.id, run, f"goes on{saved}", now)


def _end_of_job(found: RunDetail, job_id: str, run: str, goes_on: str, now: str = "") -> str:
    """Return what ends its job, and by what it ``goes_on``."""
    from ftsupervise.scheduler import how_to_end

    end = how_to_end(job_id, run)
    if end.before_next:
        return f"{end.types}   (ends its jobs{now}; then {end.before_next}; launched again, it {goes_on})"
    then = (
        f"no other waits, so launch it again: it {goes_on}"
        if found.row.members_left == 0
        else f"the next one {goes_on}"
    )
    return f"{end.types}   (ends this job{now}; {then})"


def _full(found: RunDetail, run: str) -> Iterator[str]:
    if full := found.row.full:
        later = f"{_SPACE_WAIT} it goes on by itself, later by: ftsupervise clear --brake {run}"
        then = "" if found.status.verdict in _NO_NEXT or found.status.verdict == "WAITING" else f"; {later}"
        yield f"make room: {printable(full)}{then}"
        yield f"ftsupervise checkpoints prune --dry-run {run} --last 2   (the checkpoints that can go)"


def _failed(found: RunDetail, run: str) -> Iterator[str]:
    """Yield what to type where the newest attempt failed and left more than its cause, which stands here already."""
    last = attempts_of(found.status)[-1:]
    if last and last[0].has_failed and (found.log is not None or _has_evidence(found, last[0].number)):
        yield f"ftsupervise diagnose {run}   (what failed first, whose it was, and what to try)"
    elif found.row.braked and found.log is not None:
        look = f"ftsupervise logs {run}"
        yield f"{look}   (what its last job wrote)" if found.row.asks else f"{look} --errors   (what failed)"


def _has_evidence(found: RunDetail, attempt: int) -> bool:
    return os.path.lexists(found.status.rundir.attempt(attempt) / "evidence")


def _stalled(found: RunDetail, run: str) -> Iterator[str]:
    if found.log is not None:
        yield f"ftsupervise logs {run}   (what its job wrote last)"
    if HANG in found.observes and found.row.ends_hang is False:
        yield f"ftsupervise observe --off --only hang {run}   (its supervisor ends it then)"
    yield f"ftsupervise check hang {run}   (every sign of progress, with its age)"


def _bad_loss(found: RunDetail, trouble: LossTrouble, run: str) -> Iterator[str]:
    if trouble.kind == NOT_A_NUMBER:
        before = "" if trouble.since is None else f" from before step {trouble.since}"
        if BACK in found.observes:
            yield f"ftsupervise observe --off --only going_back {run}   (else it begins from its newest checkpoint)"
        job = next((job for job in found.status.jobs or () if not job.state.waiting), None)
        if job is not None:
            yield _end_of_job(found, job.id, run, f"begins from a checkpoint{before}")
        else:
            yield f"end its program and start it again: it begins from a checkpoint{before}"
        if trouble.then == "warn":
            yield "guard.loss: {nonfinite: resume} in the settings lets the run go back by itself the next time"
    else:
        yield f"ftsupervise check loss {run}   (its loss, and what was usual)"


def _gone(found: RunDetail, run: str) -> Iterator[str]:
    last = found.status.run.last
    failed = last is not None and last.ended is not None and last.failure is not None
    yield _launch(found, "once that is mended" if failed else "")


def _launch(found: RunDetail, first: str = "") -> str:
    """Return what launches it again, what comes ``first``, and where it goes on."""
    saved = "" if found.row.saved is None else f"it goes on from step {found.row.saved}"
    said = "; ".join(one for one in (first, saved) if one)
    return f"ftsupervise launch {found.status.rundir.quoted()}{f'   ({said})' if said else ''}"


def _slow(found: RunDetail, run: str) -> Iterator[str]:
    page = found.status.run.page
    slowest = f"; look first at {printable(page.slowest)}" if page is not None and page.slowest else ""
    yield f"ftsupervise check throughput {run}   (its steps an hour, and what is usual{slowest})"
    yield f"ftsupervise nodes list {run}   (what its nodes did before)"


def _waits(found: RunDetail) -> Iterator[str]:
    from ftsupervise.scheduler.ownership import why_held

    waiting = [job for job in found.status.jobs or () if job.state.waiting]
    jobs = dict.fromkeys(job.id.partition("_")[0] for job in waiting)
    never = next((words for job in waiting if (words := never_starts(job.reason)) is not None), None)
    if never is not None:
        yield f"scancel {' '.join(jobs)}   (takes it out of the queue)"
        yield f"{never[1]}: {never[0]}, and it never starts by waiting"
        yield f"ftsupervise launch {found.status.rundir.quoted()}   (once that is corrected)"
        yield f"scontrol show job {next(iter(jobs))}   (all that it asks for)"
    elif any(map(why_held, waiting)):
        run = found.status.rundir.quoted()
        yield f"ftsupervise clear --brake {run}   (once that is repaired; the jobs that are held start again)"
    elif jobs and mostly_waits(found.row) and _is_of_slurm(found):
        yield f"squeue --start --jobs {','.join(jobs)}   (when Slurm expects to start it)"
