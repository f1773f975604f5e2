"""Check that the cron is alive and revive it if not: for launch, for ``cron ensure``, and for each running job once a period.

A running job does it in a process of its own (``ftsupervise cron ensure --run RUN``), so that a supervisor that must stay small
and never hang loads no settings, asks no scheduler and sends no mail itself. While slots come, nothing is asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING

from ftsupervise.crontab import chain, history
from ftsupervise.crontab.entries import floor
from ftsupervise.crontab.installation import (
    CronDir,
    Installed,
    default_directory,
    dir_option,
    read_installed,
    stamp,
)
from ftsupervise.errors import CannotWrite, Error, NotFound, UsageError
from ftsupervise.findings import Finding, Severity
from ftsupervise.host import bounded
from ftsupervise.host.ownership import claim_folder, make_folder, user_name
from ftsupervise.truth import Health
from ftsupervise.units import format_slurm_time, show_duration

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.crontab.chain import TickScheduler

# scrontab and crontab, where a cluster has them: our lines stand in a block of the person's own table, and nothing else
# is touched.

TABLES = ("crontab", "scrontab")
_BEGIN, _END = "# begin ftsupervise cron ", "# end ftsupervise cron "
_TIMEOUT = 60.0
_NOT_FOR_SCRON = ("--no-requeue",)  # Slurm itself requeues such a job for its next time


def our_block(cron: CronDir, installed: Installed) -> str:
    """Return our lines, between marks; "" for another back end. Raises UsageError for a period that five fields cannot say."""
    if installed.backend not in TABLES:
        return ""
    command = join(chain.command(cron, installed)).replace("%", "\\%")
    options = chain.directives(cron, installed) if installed.backend == "scrontab" else ()
    head = [f"#SCRON {option}" for option in options if option not in _NOT_FOR_SCRON]
    line = f"{every(installed.period)} {command} >/dev/null 2>&1"
    return "\n".join([_BEGIN + installed.id, *head, line, _END + installed.id]) + "\n"


def every(period: timedelta) -> str:
    """Return "*/5 * * * *" for 5m, "* * * * *" for 1m, "0 */2 * * *" for 2h."""
    minutes, rest = divmod(period, timedelta(minutes=1))
    if not rest and minutes and (60 % minutes == 0 or (minutes % 60 == 0 and 24 % (minutes // 60) == 0)):
        if minutes == 1:  # scrontab does not take */1
            return "* * * * *"
        if minutes < 60:
            return f"*/{minutes} * * * *"
        return "0 * * * *" if minutes == 60 else f"0 */{minutes // 60} * * *"
    raise UsageError(
        f"a table of five fields cannot say every {format_slurm_time(period)}",
        hint="use a period that divides an hour or a day in whole minutes, such as 5m",
    )


def with_block(table: str, chain: str, ours: str) -> str:
    """Return ``table`` with our block in place of the one it had; with ``ours`` empty, without it."""
    rest = _block_of(chain).sub("", table)
    if rest and not rest.endswith("\n"):
        rest += "\n"
    return rest + ours


def put_lines(installed: Installed, ours: str) -> None:
    """Make ``ours`` our block in the person's table; "" removes it. Raises as ``read_table`` does, and CannotWrite."""
    if installed.backend not in TABLES:
        return
    table = read_table(installed)
    wanted = with_block(table, installed.id, ours)
    if wanted == table:
        return
    done = _run([installed.backend, "-"], installed.environment, stdin=wanted)
    if done.code != 0:
        raise CannotWrite(f"{installed.backend} did not take the table: {done.words()}", hint="nothing was changed")


def lost_lines(installed: Installed) -> str:
    """A clause that says how our lines in the person's table were lost; "" when they are there, when the cron was removed, or
    when the table is another account's or another machine's.

    ``scancel`` of a job of scrontab's puts ``#DISABLED:`` before the lines it came from. Raises as ``read_table`` does.
    """
    program = installed.backend
    elsewhere = program == "crontab" and installed.note.get("host") != os.uname().nodename
    if program not in TABLES or elsewhere or installed.removed or installed.owner != user_name():
        return ""
    match = _block_of(installed.id).search(read_table(installed))
    if match is None:
        return f"its lines are no longer in your {program}"
    lines = [line for line in match[0].splitlines()[1:-1] if not line.startswith("#SCRON")]
    if any(line.startswith("#DISABLED") for line in lines) or not any(line[:1] not in ("#", "") for line in lines):
        return f"its lines in your {program} are disabled, as scancel does"
    return ""


def _block_of(chain: str) -> re.Pattern[str]:
    off = r"^(?:#DISABLED: )*"
    return re.compile(rf"{off}{re.escape(_BEGIN + chain)}\n.*?{off}{re.escape(_END + chain)}\n?", re.M | re.S)


def read_table(installed: Installed) -> str:
    """The person's table; "" when there is none. Raises NotFound where the cluster has no such program, Error."""
    program = installed.backend
    done = _run([program, "-l"], installed.environment)
    said = done.stderr + done.stdout
    if done.code == 0:
        return done.stdout
    if re.search(r"no crontab", said, re.I):
        return ""
    if re.search(r"not enabled|disabled|not supported|Unknown command|not allowed", said, re.I):
        raise NotFound(f"{program} exists but is not in use here: {done.words()}", hint="--backend slurm, or loop")
    raise Error(f"{program} -l failed: {done.words()}", hint="nothing was changed")


def _run(argv: list[str], env: Mapping[str, str], stdin: str | None = None) -> bounded.CompletedCommand:
    try:
        return bounded.run(argv, timeout=_TIMEOUT, env=env, stdin=stdin)
    except (FileNotFoundError, PermissionError):
        raise NotFound(f"there is no {argv[0]} on this machine's PATH", hint="--backend slurm, or loop") from None


@dataclass(frozen=True)
class CronState:
    """The state of the cron in one folder. ``health``: OK if it lives (or was revived), BAD if it does not, UNKNOWN."""

    health: Health
    words: str
    revived: bool = False
    installed: bool = True


def look_after_for(run: Run, scheduler: TickScheduler, now: datetime, *, thorough: bool = False) -> Finding | None:
    """Revive the cron that watches ``run``, or notify the run's own receivers that it is dead, and when it lives again.
    ``thorough`` as in ``see_to``.

    None when there is no cron to look after. Nothing is written while all is well.
    """
    from ftsupervise.alerts.deliver import deliver
    from ftsupervise.alerts.journal import Journal
    from ftsupervise.alerts.record import record
    from ftsupervise.rundir.paths import RunDir

    found = look_after(run.cron.directory, scheduler, now, run=run.name, thorough=thorough)
    if found is None or run.run_dir is None:
        return found
    journal = Journal(RunDir(run.run_dir).watch / "journal")
    alerts = (alert.finding for alert in journal.read().alerts.values())
    known = any((one.watchdog, one.run) == (found.watchdog, run.name) for one in alerts)
    if found.health is Health.BAD or known:
        record(journal, [found], run.alerts, now, run_name=run.name, partial=True)
        deliver([journal], run.alerts, now)
    return found


def look_after(
    directory: Path | None, scheduler: TickScheduler, now: datetime, *, run: str, thorough: bool = False
) -> Finding | None:
    """Return a running job's finding about the cron that watches it, after ``see_to``. Call it once a period, and
    ``thorough`` as the job ends.

    None while there is no cron to look after (nothing installed, or removed by its owner).
    """
    state = see_to(directory, scheduler, now, thorough=thorough)
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


def see_to(directory: Path | None, scheduler: TickScheduler, now: datetime, *, thorough: bool = False) -> CronState:
    """Revive the cron if it is dead, and describe its state in one sentence. Idempotent; one squeue at most.

    ``thorough`` asks the queue even while slots come. No error of the cron is raised, so that it cannot harm a run.
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
    cron: CronDir,
    installed: Installed,
    newest: datetime | None,
    scheduler: TickScheduler,
    now: datetime,
    *,
    thorough: bool,
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
    """Check a cron that a table or a loop keeps. Lines that were disabled are put back.

    ``thorough`` checks for them even while slots come.
    """
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
    """Put our lines back into the person's table if they are lost. Returns a sentence that says so, "" if they were not."""
    try:
        lost = lost_lines(installed)
        if lost:
            put_lines(installed, our_block(cron, installed))
    except Error:  # nothing was changed, and the last slot tells the state
        return ""
    return f"cron was stopped ({lost}); the lines were put back" if lost else ""


def _first_to_revive(cron: CronDir, slot: datetime) -> bool:
    """Return True for one caller per slot, so that twenty runs that find the chain dead make one new one."""
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
