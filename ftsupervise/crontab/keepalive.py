"""Is the cron alive, and if not, bring it back: for launch, for ``cron ensure``, and for each running job once a period.

A running job does it in a process of its own (``ftsupervise cron ensure --run RUN``), so that a supervisor that must stay small
and never hang loads no settings, asks no scheduler and sends no mail itself. While slots come, nothing is asked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.crontab import backends, chain, history
from ftsupervise.crontab.installation import (
    CronDir,
    Installed,
    default_directory,
    dir_option,
    read_installed,
    stamp,
    user_name,
)
from ftsupervise.crontab.schedule import floor
from ftsupervise.errors import Error
from ftsupervise.findings import Finding, Severity
from ftsupervise.host.modes import claim_folder, make_folder
from ftsupervise.truth import Health
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.scheduler.slurm import Slurm


@dataclass(frozen=True)
class CronState:
    """How the cron of one folder is. ``health``: OK it lives (or was brought back), BAD it does not, UNKNOWN."""

    health: Health
    words: str
    revived: bool = False
    installed: bool = True


def look_after_for(run: Run, scheduler: Slurm, now: datetime) -> Finding | None:
    """Revive the cron that watches ``run``, or notify the run's own receivers that it is dead, and when it lives again.

    None when there is no cron to look after. Nothing is written while all is well.
    """
    from ftsupervise.alerts.deliver import deliver
    from ftsupervise.alerts.journal import Journal
    from ftsupervise.alerts.record import record
    from ftsupervise.rundir.paths import RunDir

    found = look_after(run.cron.directory, scheduler, now, run=run.name)
    if found is None or run.run_dir is None:
        return found
    journal = Journal(RunDir(run.run_dir).watch / "journal")
    alerts = (alert.finding for alert in journal.read().alerts.values())
    known = any((one.watchdog, one.run) == (found.watchdog, run.name) for one in alerts)
    if found.health is Health.BAD or known:
        record(journal, [found], run.alerts, now, run_name=run.name, partial=True)
        deliver([journal], run.alerts, now)
    return found


def look_after(directory: Path | None, scheduler: Slurm, now: datetime, *, run: str) -> Finding | None:
    """What a running job says about the cron that watches it, after ``see_to``. Call it once a period.

    None while there is no cron to look after (nothing installed, or removed by its owner).
    """
    state = see_to(directory, scheduler, now)
    if not state.installed:
        return None
    cron = CronDir(default_directory(os.environ) if directory is None else directory)
    return Finding(
        run=run,
        watchdog="cron",
        subject="chain",
        health=state.health,
        severity=Severity.WARNING,
        summary=state.words,
        at=now,
        meaning="Nothing outside the job watches this run." if state.health is Health.BAD else "",
        look=f"ftsupervise cron status{cron.option}",
        do=f"ftsupervise cron ensure{cron.option}",
    )


def see_to(directory: Path | None, scheduler: Slurm, now: datetime, *, thorough: bool = False) -> CronState:
    """Bring the cron back if it is dead, and say in one sentence how it is. Idempotent; one squeue at most.

    ``thorough`` asks the queue even while slots come. Raises nothing that a person can cause: its cron never harms a run.
    """
    cron = CronDir(default_directory(os.environ) if directory is None else directory)
    try:
        installed = read_installed(cron)
        if installed is None:
            words = f"no cron is installed in {cron.root}: ftsupervise cron install{dir_option(cron)}"
            return CronState(Health.UNKNOWN, words, installed=False)
        if installed.removed:
            words = f"the cron in {cron.root} was removed: {installed.removed}"
            return CronState(Health.UNKNOWN, words, installed=False)
        newest = history.newest_slot(cron, installed, now)
    except Error as error:
        return CronState(Health.UNKNOWN, f"cannot tell whether cron is alive: {error.message}")
    except OSError as error:
        return CronState(Health.UNKNOWN, f"cannot tell whether cron is alive: {cron.root}: {error.strerror}")
    if installed.backend == "slurm":
        return _see_to_chain(cron, installed, newest, scheduler, now, thorough=thorough)
    return _see_to_lines(cron, installed, newest, now, thorough=thorough)


def _see_to_chain(
    cron: CronDir, installed: Installed, newest: datetime | None, scheduler: Slurm, now: datetime, *, thorough: bool
) -> CronState:
    age = now - max(newest or installed.at, installed.at)
    fresh = age < 2 * installed.period
    last = _last(newest, now, "it has not had a slot yet")
    if fresh and not thorough:
        return CronState(Health.OK, f"cron {'is alive' if newest is not None else 'was installed'}: {last}")
    if installed.owner != user_name():
        words = f"the cron in {cron.root} belongs to {installed.owner}; {last}"
        return CronState(Health.OK if fresh else Health.BAD, words)
    if not thorough and not _first_to_revive(cron, floor(now, installed.period)):
        return CronState(Health.UNKNOWN, "another command is bringing cron back at this moment")
    state = _judge(chain.extend(cron, installed, scheduler, now), installed, age)
    if fresh or state.health is Health.UNKNOWN:
        return state
    words = chain.drained_words(chain.drained(scheduler) or ())
    return replace(state, words=f"{state.words}; {words}") if words else state


def _judge(done: chain.Extended, installed: Installed, age: timedelta) -> CronState:
    if done.chain is None:
        return CronState(Health.UNKNOWN, f"cannot tell whether cron is alive: {done.trouble}")
    ahead = len(done.chain.ahead) + len(done.submitted)
    if done.trouble and not ahead:
        return CronState(Health.BAD, f"cron is dead and could not be brought back: {done.trouble}")
    jobs = f"{ahead} jobs for its next slots in the queue"
    if not done.chain.alive:
        how = "is started" if age < installed.period else "was dead and was brought back"
        return CronState(Health.OK, f"cron {how}: {jobs}", revived=True)
    if done.chain.held:
        jobs += f", {len(done.chain.held)} held ({', '.join(done.chain.held[:3])}: scontrol release)"
    if age > max(6 * installed.period, timedelta(minutes=30)):
        words = f"cron has had no slot for {_ago(age)} although its jobs are in the queue: {jobs}"
        return CronState(Health.BAD, words)
    return CronState(Health.OK, f"cron is alive: {jobs}" + (f"; {done.trouble}" if done.trouble else ""))


def _see_to_lines(
    cron: CronDir, installed: Installed, newest: datetime | None, now: datetime, *, thorough: bool
) -> CronState:
    """How a cron is that a table or a loop keeps. Lines that were disabled are put back; ``thorough`` checks for them even
    while slots come."""
    bound = max(3 * installed.period, timedelta(minutes=3))
    lives = newest is not None and now - newest < bound
    if (thorough or not lives) and (restored := _restore(cron, installed)):
        return CronState(Health.OK, restored, revived=True)
    last = _last(newest, now, "it has never had a slot")
    if lives:
        return CronState(Health.OK, f"cron is alive (kept by {installed.backend}): {last}")
    waits, todo = "its loop has not been started yet", f": ftsupervise cron run --foreground{cron.option}"
    if installed.backend != "loop":
        machine = installed.note.get("host", "another machine")
        waits, todo = "it has not had a slot yet", f"; it is kept by {installed.backend} on {machine}"
    if newest is None and now - installed.at < bound:
        return CronState(Health.UNKNOWN, f"cron is installed, and {waits}{todo}")
    return CronState(Health.BAD, f"cron does not run: {last}{todo}")


def _restore(cron: CronDir, installed: Installed) -> str:
    """Put our lines back into the person's table if they are not there any more; what was done, "" if nothing was."""
    try:
        lost = backends.lost(installed)
        if lost:
            backends.put(installed, backends.block(cron, installed))
    except Error:  # then it is as it was, and the last slot says how that is
        return ""
    return f"cron was stopped ({lost}); they were put back" if lost else ""


def _first_to_revive(cron: CronDir, slot: datetime) -> bool:
    """True for one caller per slot, so that twenty runs that find the chain dead make one new one."""
    folder = cron.state / "revivals"
    try:
        make_folder(folder)
        claim_folder(folder / stamp(slot))
        for name in sorted(os.listdir(folder))[:-20]:
            (folder / name).rmdir()
    except FileExistsError:
        return False
    except OSError:  # a full or read-only disk must not keep a dead chain dead
        return True
    return True


def _last(newest: datetime | None, now: datetime, never: str) -> str:
    return never if newest is None else f"its last slot was {_ago(now - newest)} ago"


def _ago(age: timedelta) -> str:
    return show_duration(max(0.0, age.total_seconds()))
