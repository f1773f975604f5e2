"""Decide how the time is kept, write it down, start it; and take it away again.

``decide`` is pure and is all that ``--dry-run`` needs. ``install`` may be typed again at any time, by one person or by two at
once: the folder's own identity (a hash of its path and owner) makes both see the same chain, and the doubles they submit are
cancelled by whoever looks next.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.crontab import backends, chain, render, trust
from ftsupervise.crontab.entries import check_times
from ftsupervise.crontab.environment import local_zone, recorded, split
from ftsupervise.crontab.place import (
    FOLDERS,
    CronDir,
    Installed,
    default_directory,
    read_installed,
    user_name,
    write_installed,
)
from ftsupervise.crontab.successors import slot_of
from ftsupervise.errors import ConfigError, Error, NotFound, NotPermitted, Refused, from_os_error
from ftsupervise.host import ownership
from ftsupervise.host.modes import FOLDER, make_folder
from ftsupervise.rundir.paths import write_whole
from ftsupervise.scheduler.slurm import Slurm
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts
    from ftsupervise.config.cron import Cron

README = """\
The cron of {owner}, kept by ftsupervise. It needs no crontab: {why}.

  drop an executable into cron.minutely, cron.hourly, cron.daily or cron.weekly, and it runs at the next slot
  drop a job script (.slurm, .sbatch) there, and it is submitted as a job of its own
  write five-field lines into the file crontab ("*/15 * * * * command", "@hourly command", "@tick command")

  ftsupervise cron status --dir {root}
  ftsupervise cron list --dir {root}       what runs when, and which files are passed over, and why
  ls state/runs/*/last/output

A slot comes every {period}; times are in {timezone}. An entry that runs longer than {limit} is ended, and so is what it
leaves running: longer work belongs in a job script. An entry never runs beside itself. What falls into the hour that
summer time skips runs right after it; what falls into the hour that comes twice runs once. What lies in these
folders runs as {owner}, so files that anybody else could have written are passed over.
"""

CRONTAB = """\
# minute hour day-of-month month day-of-week command      times are in {timezone}; CRON_TZ=Europe/Berlin sets another
# */15 * * * * ftsupervise watch --quiet my-run
# @daily   du -sh "$HOME"
# @tick    every slot
"""


@dataclass(frozen=True)
class Plan:
    """What install is going to do."""

    cron: CronDir
    installed: Installed
    script: str  # the job of a slot; "" unless the back end is slurm
    lines: str  # our block in a table; "" unless the back end is crontab or scrontab
    notes: tuple[str, ...] = ()


def pick(asked: str, env: Mapping[str, str]) -> tuple[str, str]:
    """(back end, why). Looks only at what is on the PATH."""
    if asked != "auto":
        return asked, f"{asked}, as asked for"
    have = {name: shutil.which(name, path=env.get("PATH")) for name in ("sbatch", "scrontab", "crontab")}
    if have["sbatch"]:
        other = "; scrontab is on the PATH too: --backend scrontab" if have["scrontab"] else ""
        return "slurm", f"a chain of small Slurm jobs, because sbatch is on the PATH{other}"
    if have["crontab"]:
        return "crontab", "this machine's crontab, because there is no sbatch on the PATH"
    return (
        "loop",
        "a loop that you start (ftsupervise cron run --foreground), because there is neither sbatch nor crontab",
    )


def decide(
    settings: Cron, alerts: Alerts, *, alerts_from: str, now: datetime, env: Mapping[str, str], python: str
) -> Plan:
    """What an install with these settings does. Raises ConfigError, UsageError."""
    root = settings.directory if settings.directory is not None else default_directory(env)
    cron = CronDir(Path(os.path.abspath(root)))  # noqa: PTH100 - links stay: other nodes may mount it there
    times = {folder: getattr(settings, folder) for folder in FOLDERS}
    try:
        check_times(times)
    except ValueError as error:
        raise ConfigError(f"cron: {error}") from None
    backend, why = pick(settings.backend, env)
    owner = user_name()
    environment, secret = split(recorded(env, settings.env, python))
    installed = Installed(
        id=sha256(f"{owner}\0{cron.root}".encode("utf-8", "surrogateescape")).hexdigest()[:8],
        owner=owner,
        backend=backend,
        why=why,
        python=python,
        period=settings.period,
        spares=settings.spares,
        limit=settings.limit,
        missed=settings.missed,
        timezone=settings.timezone or local_zone(env),
        times=times,
        keep=settings.keep,
        output=settings.output,
        options=_options(settings),
        job_options=tuple(
            f"--{key}={value}"
            for key, value in (("partition", settings.partition), ("account", settings.account), ("qos", settings.qos))
            if value is not None
        ),
        environment=environment,
        secret=secret,
        alerts=json.loads(alerts.model_dump_json(by_alias=True)),
        alerts_from=alerts_from,
        at=now,
        since=now,
        trusted=settings.trusted,
        trusted_group=settings.trusted_group or "",
        note={"host": os.uname().nodename},
    )
    try:
        script = render.script(cron, python, chain.directives(cron, installed)) if backend == "slurm" else ""
    except ValueError as error:
        raise ConfigError(f"the job of a slot cannot be written: {error}") from None
    lines = ""
    if backend in ("crontab", "scrontab"):
        options = chain.directives(cron, installed) if backend == "scrontab" else ()
        lines = backends.block(backend, installed.id, installed.period, render.command(cron, python), options)
    return Plan(cron, installed, script, lines, _notes(installed, settings, env))


def _options(settings: Cron) -> tuple[str, ...]:
    pairs = (
        ("partition", settings.partition),
        ("account", settings.account),
        ("qos", settings.qos),
        ("mem", settings.mem),
    )
    return (*(f"--{key}={value}" for key, value in pairs if value is not None), *settings.sbatch)


def _notes(installed: Installed, settings: Cron, env: Mapping[str, str]) -> tuple[str, ...]:
    notes = []
    if installed.backend == "slurm":
        limit = show_duration(chain.job_limit(installed.limit).total_seconds())
        notes.append(
            f"each slot is one job: 1 CPU, {settings.mem} of memory, no GPU, at most {limit};"
            f" {installed.spares} wait in the queue. One sbatch and one squeue a slot"
        )
        if installed.period < timedelta(minutes=5):
            notes.append("below 5m Slurm's own scheduling (30 to 60 s a round) makes slots late")
    if timedelta(days=1) % installed.period:
        notes.append("this period does not divide the day: slots fall at other times every day")
    if not installed.alerts.get("receivers"):
        notes.append("nobody is told when an entry fails: no alerts.receivers in your settings")
    if installed.secret:
        names = ", ".join(sorted(installed.secret))
        notes.append(
            f"secrets among the variables ({names}) are kept where only you can read them, and not given to Slurm"
        )
    absent = [name for name in settings.env if name not in env]
    if absent:
        notes.append(f"not set now, so entries will not have it: {', '.join(absent)}")
    return tuple(notes)


# -------------------------------------------------------------------------------------------------------- carry out


@dataclass(frozen=True)
class Done:
    """What install did. ``state`` is how the chain is now (slurm only)."""

    changed: bool
    state: chain.State | None
    notes: tuple[str, ...] = ()


def install(plan: Plan, now: datetime, scheduler: chain.Queue | None) -> Done:
    """Write the folder and start the back end. Raises Refused where it belongs to somebody else, CannotWrite …"""
    cron, wanted = plan.cron, plan.installed
    _check_place(cron, wanted)
    before = _before(cron, wanted)
    if before is not None and not before.removed:
        wanted = replace(wanted, since=before.since)
    table = backends.read(wanted.backend, wanted.environment) if plan.lines else ""
    notes: tuple[str, ...] = ()
    script = ""
    if wanted.backend == "slurm":
        wanted, notes = _fit(wanted)
        script = render.script(cron, wanted.python, chain.directives(cron, wanted))
    _write_folder(cron, wanted, script)
    if plan.lines:  # before it is called installed: a table may be refused
        backends.write(wanted.backend, backends.with_block(table, wanted.id, plan.lines), wanted.environment)
    write_installed(cron, wanted)
    if before is not None and before.backend != wanted.backend and not before.removed:
        _leave_table(before)
    changed = before is None or _changed(before, wanted)
    if scheduler is None:
        return Done(changed, None, notes)
    if before is not None and changed and not before.removed and before.backend == "slurm":
        _cancel_pending(wanted, scheduler)  # they would ask for what the old settings asked for
    state = chain.see_to(cron.root, scheduler, now, thorough=True)
    if state.revived:  # somebody may have done the same at the same moment: what is there twice goes now
        chain.see_to(cron.root, scheduler, now, thorough=True)
    return Done(changed, state, notes)


def _check_place(cron: CronDir, wanted: Installed) -> None:
    """Make the folder. Raises NotTrusted where somebody else could put a file into it, or another folder in its place."""
    try:
        make_folder(cron.root, FOLDER, parents=True)
        reason = trust.distrust_folder(cron.root, wanted)
    except OSError as error:
        raise from_os_error(error, f"make {cron.root}") from None
    if reason:
        raise ownership.NotTrusted(
            f"{reason}, so whatever is put into {cron.root} could be somebody else's",
            hint="choose a folder of your own with --dir DIR, or take the right to write away (chmod go-w). Settings that let"
            " others run programs as you: cron.trusted, cron.trusted_group",
        )


def _before(cron: CronDir, wanted: Installed) -> Installed | None:
    try:
        before = read_installed(cron)
    except NotFound:
        return None
    except NotPermitted:
        raise
    except Error:  # damaged: this install mends it
        return None
    if before is not None and before.owner != wanted.owner and not before.removed:
        raise Refused(
            f"the cron in {cron.root} is {before.owner}'s, and one is enough",
            hint="ask them to add your files, or install your own with --dir DIR",
        )
    return before


def _changed(before: Installed, after: Installed) -> bool:
    same = replace(
        after,
        at=before.at,
        since=before.since,
        note=before.note,
        environment=before.environment,
        secret=before.secret,
    )
    return before != same


def _write_folder(cron: CronDir, installed: Installed, script: str) -> None:
    try:
        for folder in (*(cron.folder(name) for name in FOLDERS), cron.slots, cron.runs, cron.log):
            make_folder(folder, parents=True)
        cron.state.chmod(0o700)  # outputs, settings and secrets are in it
        words = {
            "owner": installed.owner,
            "root": cron.root,
            "why": installed.why.partition(";")[0],
            "timezone": installed.timezone,
            "period": show_duration(installed.period.total_seconds()),
            "limit": show_duration(installed.limit.total_seconds()),
        }
        write_whole(cron.root / "README", README.format(**words))
        if not cron.crontab.exists():
            write_whole(cron.crontab, CRONTAB.format(**words))
        if script:
            write_whole(cron.script, script, mode=0o755)
    except OSError as error:
        raise from_os_error(error, f"write {cron.root}") from None


def _fit(installed: Installed) -> tuple[Installed, tuple[str, ...]]:
    """Ask sinfo once what the partition allows: a shorter limit than ours is kept to, whole nodes are warned of."""
    name = next((o.partition("=")[2].partition(",")[0] for o in installed.options if o.startswith("--partition=")), "")
    try:
        partitions = Slurm(installed.environment).partitions()
    except Error:
        return installed, ()
    notes = []
    for partition, most, shared in partitions:
        if partition.rstrip("*") != name and not (not name and partition.endswith("*")):
            continue
        if shared.strip() == "EXCLUSIVE":
            notes.append(
                f"partition {partition.rstrip('*')} gives out whole nodes: each slot takes one; choose another"
            )
        limit = _limit(most)
        if limit is not None and chain.job_limit(installed.limit) > limit:
            bound = max(timedelta(seconds=30), limit - timedelta(minutes=2))
            notes.append(f"jobs in {partition.rstrip('*')} may run {most}: entries are ended after {bound}")
            installed = replace(installed, limit=bound)
        break
    return installed, tuple(notes)


def _limit(text: str) -> timedelta | None:
    from ftsupervise.units import parse_slurm_time

    try:
        return parse_slurm_time(text) if re.match(r"\d", text) else None
    except ValueError:
        return None


def _cancel_pending(installed: Installed, scheduler: chain.Queue) -> None:
    for job in scheduler.queue(users=(installed.owner,)):
        if slot_of(job.comment, installed.id) is not None and job.state.waiting:
            scheduler.cancel(job.base_id, only_pending=True)


def _leave_table(before: Installed) -> None:
    if before.backend in ("crontab", "scrontab"):
        table = backends.read(before.backend, before.environment)
        rest = backends.with_block(table, before.id, "")
        if rest != table:
            backends.write(before.backend, rest, before.environment)


@dataclass(frozen=True)
class Removed:
    """What remove did. ``left``: why some jobs may still stand in the queue; they do nothing when they start."""

    cancelled: tuple[str, ...] = ()
    left: str = ""


def remove(cron: CronDir, installed: Installed, now: datetime, scheduler: chain.Queue | None) -> Removed:
    """End the cron: first written down, so that whatever still starts does nothing; then its jobs and lines go.

    Folders, files and outputs stay. Raises Refused where it is somebody else's, CannotWrite.
    """
    if installed.owner != user_name():
        raise Refused(f"the cron in {cron.root} is {installed.owner}'s", hint="ask them to remove it")
    when = f"by {installed.owner} on {os.uname().nodename}, {now:%Y-%m-%d %H:%M} UTC"
    write_installed(cron, replace(installed, removed=installed.removed or when))
    _leave_table(installed)
    cancelled: list[str] = []
    if scheduler is None:
        return Removed()
    try:
        for _ in range(2):  # a tick that was running may have submitted one more
            jobs = [
                j for j in scheduler.queue(users=(installed.owner,)) if slot_of(j.comment, installed.id) is not None
            ]
            for job in jobs:
                scheduler.cancel(job.base_id)
                cancelled.append(job.base_id)
            if not jobs:
                break
    except Error as error:
        return Removed(tuple(dict.fromkeys(cancelled)), error.message)
    return Removed(tuple(dict.fromkeys(cancelled)))
