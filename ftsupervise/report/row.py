"""A run as one row: what ``status`` shows of it, as plain values."""

import os
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from ftsupervise.printable import printable
from ftsupervise.report import step_of
from ftsupervise.report.pace_word import moves, no_step
from ftsupervise.report.queues import QueueSeen
from ftsupervise.report.reading import RunReading
from ftsupervise.report.verdict import verdict_of
from ftsupervise.rundir.hang_end import hang_end
from ftsupervise.rundir.ledger import counted
from ftsupervise.rundir.watched import FiringAlert

if TYPE_CHECKING:
    from ftsupervise.model import Job


FINE = 3  # see ``need_of``
_MOSTLY = 0.5  # of its time
_UNSTEADY = 0.2  # of the usual rate: what differs less is the usual rate


class RunRow(NamedTuple):
    """One run as ``status`` shows it. A value that is not known is None, or ""."""

    name: str
    directory: Annotated[str, 4096] = ""
    verdict: str = "UNKNOWN"
    why: Annotated[str, 1000] = ""
    step: int | None = None
    last_step: int | None = None
    rate: float | None = None  # steps a second
    usual: float | None = None
    done_at: datetime | None = None  # when the last step will be made, at ``pace_of`` its rates
    loss: float | None = None
    loss_trouble: Annotated[str, 600] = ""  # what is wrong with it, where something is
    phase: str = ""
    seen_at: datetime | None = None  # the newest sign of its ranks
    saved: int | None = None  # the step of the newest checkpoint
    saved_at: datetime | None = None
    restarts: int = 0  # in the last day
    firing: int = 0  # alerts
    alerts: tuple[FiringAlert, ...] = ()  # the worst of them
    disk: str = ""  # forecast
    groups_away: str = ""  # which replica groups are away, in words
    attempts: int = 0  # that were made
    members_left: int | None = None  # jobs or array members that wait to take over
    ends_at: datetime | None = None  # when Slurm ends the job that runs
    watched_at: datetime | None = None  # the last tick of the watch
    watched_next: datetime | None = None
    watch_late: bool = False
    waits_since: datetime | None = None  # in the queue, for no other reason than that it is not its turn
    queue_share: float | None = None  # of its time, of a run that waits: 0-1
    elsewhere: bool = False  # this account's state directory does not know it: only its directory names it
    braked: bool = False  # it is stopped, by its brake
    asks: bool = False  # and that only asks whether it is finished
    reason: Annotated[str, 1000] = ""  # ``why`` without what to type, where that is in it
    percent: float | None = None  # by its own words, where it prints no step
    ends_hang: bool | None = None  # its supervisor ends its standstill; None: it does not stand, or that is not known
    here: bool = False  # of the directory, or the job, in which this was asked
    full: Annotated[str, 8300] = ""  # which of its file systems has no room left, in words; "" of a run that is over


def _tells_phases(run: RunReading) -> bool:
    """Return False where nothing but its output is read: what shows no step there may train all the same."""
    return not run.beats or any("source" not in beat.facts for beat in run.beats)


def row_of(run: RunReading, queue: QueueSeen) -> RunRow:
    verdict, why = verdict_of(run, queue.jobs, queue.blind)
    found = run.watch.found
    page, last, now = run.page, run.last, run.at
    step = step_of(run)
    if step is None:  # the newest attempts made none
        step = next((one.last_step for one in reversed(run.attempts) if one.last_step is not None), None)
    beat = max((beat.at for beat in run.beats), default=None)
    runs = verdict not in ("FINISHED", "STOPPED", "GONE", "NEW", "WAITING")
    going = runs and verdict not in ("HUNG", "STALLED", "SILENT") and moves(run)
    rate = page.rate if page is not None and going else None
    usual = page.usual if page is not None else None
    stands = verdict in ("HUNG", "STALLED") or (verdict == "RUNNING" and bool(no_step(run)))
    goal = _goal(run)
    pace = pace_of(rate, usual)
    percent = last.percent if last is not None and step is None else None
    left = goal - step if goal is not None and step is not None else None
    done = now + timedelta(seconds=min(left / pace, 3e8)) if left is not None and left > 0 and pace and going else None
    if percent is not None and going and (seconds := percent.left()) is not None:
        done = datetime.fromtimestamp(percent.last_at, timezone.utc) + timedelta(seconds=min(seconds, 3e8))
    waiting = [job for job in queue.jobs or () if job.state.waiting]
    return RunRow(
        name=run.name,
        directory=str(run.rundir.root),
        verdict=verdict,
        why=why,
        step=step,
        last_step=goal,
        rate=rate,
        usual=usual,
        done_at=done,
        percent=None if percent is None else percent.last,
        loss=_loss(run),
        loss_trouble=run.bad_loss if runs else "",
        phase=page.phase if page is not None and runs and _tells_phases(run) else "",
        seen_at=max((at for at in (beat, page.at if page is not None else None) if at is not None), default=None),
        saved=_newest_saved(run),
        saved_at=page.saved_at if page is not None else None,
        restarts=run.restarts,
        firing=found.firing if found is not None else 0,
        alerts=found.alerts if found is not None else (),
        disk=found.disk if found is not None else "",
        groups_away=_groups(run) if runs else "",
        attempts=last.number if last is not None else 0,
        members_left=None if queue.jobs is None else members(waiting),
        ends_at=next((job.end_time for job in queue.jobs or () if not job.state.waiting and job.end_time), None),
        watched_at=found.at if found is not None and not run.watch.gone else None,
        watched_next=run.watch.next_tick,
        watch_late=run.watch.late and not run.watch.gone,
        braked=run.braked is not None and (verdict, why) == ("STOPPED", run.brake),
        asks=run.braked is not None and run.braked.asks,
        ends_hang=hang_end(page, now).by_itself if stands and last is not None and last.ended is None else None,
        full=run.full if verdict not in ("FINISHED", "NEW") else "",
        reason=f"by the brake: {run.braked.words()}" if run.braked is not None and why == run.brake else "",
        **_waits(run, waiting, verdict),
    )


def _goal(run: RunReading) -> int | None:
    """Return the step after which the training is complete: what the newest attempt says, else the newest that made steps."""
    if run.page is not None and run.page.last_step is not None:
        return run.page.last_step
    stepped = next((one.number for one in reversed(run.attempts) if one.last_step is not None), None)
    if stepped is None or run.last is None or (stepped == run.last.number and run.page is not None):
        return None
    from ftsupervise.rundir.progress import read_progress

    page = read_progress(run.rundir, stepped)
    return page.last_step if page is not None else None


def _waits(run: RunReading, waiting: Sequence["Job"], verdict: str) -> dict[str, Any]:
    """Return since when it waits in the queue, and the share of its time that it has waited so far."""
    if verdict != "WAITING" or not waiting:
        return {}
    from ftsupervise.scheduler.parse import is_held

    ended = run.last.ended if run.last is not None else None
    launched = max((one.at for one in run.records if one.at <= run.at), default=None)
    since = max((at for at in (ended, launched, waiting[0].submit_time) if at is not None), default=None)
    if since is None or waiting[0].state.value != "PENDING" or is_held(waiting[0].reason):
        return {}
    if not run.attempts:
        return {"waits_since": since}
    from ftsupervise.report.account import Spent, account

    whole = run.attempts[0].number == 1  # of a longer ledger only the newest are read
    spent = account(run.attempts, run.records if whole else (), run.at, afterwards=Spent.QUEUE)
    return {"waits_since": since, "queue_share": round(spent.shares()[Spent.QUEUE], 4)}


def pace_of(rate: float | None, usual: float | None) -> float | None:
    """Return the steps a second to reckon with: the usual ones, unless the last minute was much slower or faster."""
    if rate is None or usual is None:
        return usual if rate is None else rate
    return usual if abs(rate - usual) <= _UNSTEADY * usual else rate


def _groups(run: RunReading) -> str:
    if not os.path.lexists(run.rundir.replicas):  # what reads them is imported where there are some
        return ""
    from ftsupervise.report.groups import running_words

    return running_words(run.rundir, run.at)


def _loss(run: RunReading) -> float | None:
    told = counted(run.beats).loss
    return told if told is not None or run.page is None else run.page.loss


def _newest_saved(run: RunReading) -> int | None:
    told = run.last.saved if run.last is not None else None
    page = run.page.saved if run.page is not None else None
    own = max((step for step in (told, page) if step is not None), default=None)
    if own is not None:
        return own
    for one in reversed(run.attempts):  # the newest may have ended before it had loaded anything
        if one.saved is not None:
            return one.saved
        if one.resumed is not None and one.resumed.begun:
            return one.resumed.step
    return None


def members(waiting: Sequence["Job"]) -> int:
    """Count these jobs and members of arrays."""
    if not waiting:
        return 0
    from ftsupervise.scheduler.parse import array_size

    return sum(array_size(job.id) for job in waiting)


def need_of(row: RunRow) -> int:
    """Say how soon a person should look at it. 0: at once, it holds its nodes and does nothing. 1: it does not go on, or
    its state is not known. 2: it loses time. ``FINE``. 4: it is over."""
    if row.verdict in ("FINISHED", "NEW"):
        return 4
    if row.verdict in ("HUNG", "STALLED", "SILENT"):
        return 0
    critical = any(one.severity == "critical" for one in row.alerts)
    if row.verdict in ("UNKNOWN", "GONE") or row.braked or critical or row.watch_late or row.full:
        return 1
    on_hold = row.verdict == "WAITING" and row.waits_since is None and not row.elsewhere
    if row.verdict == "SLOW" or row.firing or row.loss_trouble or row.groups_away or on_hold or mostly_waits(row):
        return 2
    return FINE


def beside_running(row: RunRow, trouble: str) -> tuple[tuple[str, str], ...]:
    """Return what is not well with a run that is RUNNING, each with its colour: it would look well without it. ``trouble``:
    what kind of trouble its loss is in; "" for none."""
    if row.verdict != "RUNNING":
        return ()
    found = []
    if row.alerts:
        critical = row.alerts[0].severity == "critical"
        words = f"{'ALERT' if critical else 'alert'} {printable(row.alerts[0].watchdog)}"
        found.append((words, "red" if critical else "yellow"))
    if trouble:
        found.append((trouble, "red"))
    if row.watch_late:
        found.append(("its watch is LATE", "red"))
    if row.full:
        found.append(("its disk is full", "red"))
    return tuple(found)


def reason_of(row: RunRow) -> str:
    """Return ``why`` without what to type."""
    return row.reason or row.why


def mostly_waits(row: RunRow) -> bool:
    return row.queue_share is not None and row.queue_share > _MOSTLY
