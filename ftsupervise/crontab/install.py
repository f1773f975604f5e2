"""Install the cron (choose a back end, record the settings, start it), and remove it again.

``decide`` is pure and is all that ``--dry-run`` needs. ``install`` may be typed again at any time, by one person or by two at
once: both derive the same chain from the folder's path and owner, and the next look at the queue cancels the jobs that were
submitted twice.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.crontab import chain, keepalive
from ftsupervise.crontab.entries import check
from ftsupervise.crontab.installation import (
    FOLDERS,
    CronDir,
    Installed,
    default_directory,
    distrust_folder,
    local_zone,
    read_installed,
    recorded,
    write_installed,
)
from ftsupervise.errors import ConfigError, Error, NotFound, NotPermitted, Refused, did_you_mean, from_os_error
from ftsupervise.host import ownership
from ftsupervise.host.begin import on_path
from ftsupervise.host.ownership import FOLDER, OWN, make_folder, set_mode, user_name
from ftsupervise.rundir.paths import write_whole
from ftsupervise.scheduler.slurm import Slurm
from ftsupervise.secrecy import is_secret
from ftsupervise.units import parse_slurm_time, show_duration

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts
    from ftsupervise.config.schema import Cron
    from ftsupervise.model import Job


@dataclass(frozen=True)
class InstallPlan:
    """The install that ``decide`` proposes."""

    cron: CronDir
    installed: Installed
    script: str  # the job of a slot; "" unless the back end is slurm
    lines: str  # our block in a table; "" unless the back end is crontab or scrontab
    notes: tuple[str, ...] = ()


def pick(asked: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Return (back end, reason). Only the PATH is searched."""
    if asked != "auto":
        return asked, f"{asked}, as asked for"
    have = {name: on_path(name, env) for name in ("sbatch", "scrontab", "crontab")}
    if have["sbatch"]:
        other = "; scrontab is on the PATH too: --backend scrontab" if have["scrontab"] else ""
        return "slurm", f"a chain of small Slurm jobs, because sbatch is on the PATH{other}"
    if have["crontab"]:
        return "crontab", "this machine's crontab, because there is no sbatch on the PATH"
    start = "ftsupervise cron run --foreground"
    return "loop", f"a loop that you start ({start}), because there is neither sbatch nor crontab"


def decide(
    settings: Cron, alerts: Alerts, *, alerts_from: str, now: datetime, env: Mapping[str, str], python: str
) -> InstallPlan:
    """Plan an install with these settings. Raises ConfigError, UsageError."""
    root = settings.directory if settings.directory is not None else default_directory(env)
    cron = CronDir(Path(os.path.abspath(root)))  # noqa: PTH100 - links stay: other nodes may mount it there
    times = {folder: getattr(settings, folder) for folder in FOLDERS}
    for folder, text in times.items():
        try:
            check(text)
        except ValueError as error:
            raise ConfigError(f"cron: cron.{folder}: {error}") from None
    backend, why = pick(settings.backend, env)
    owner = user_name()
    variables = recorded(env, settings.env, python)
    secret = {name: value for name, value in variables.items() if is_secret(name, value)}
    options = {name: getattr(settings, name) for name in ("partition", "account", "qos", "mem")}
    words = tuple(f"--{name}={value}" for name, value in options.items() if value is not None)
    installed = Installed(
        id=sha256(f"{owner}\0{cron.root}".encode("utf-8", "surrogateescape")).hexdigest()[:8],
        owner=owner,
        backend=backend,
        why=why,
        python=python,
        period=settings.period,
        spares=settings.spares,
        limit=settings.limit,
        timezone=settings.timezone or local_zone(env),
        times=times,
        keep=settings.keep,
        options=(*words, *settings.sbatch),
        job_options=tuple(word for word in words if not word.startswith("--mem=")),
        environment={name: value for name, value in variables.items() if name not in secret},
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
        script = chain.script(cron, installed) if backend == "slurm" else ""
    except ValueError as error:
        raise ConfigError(f"the job of a slot cannot be written: {error}") from None
    return InstallPlan(cron, installed, script, keepalive.our_block(cron, installed), _notes(installed, settings, env))


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
        notes.append("this period does not divide the day: slots fall at different times every day")
    if not installed.alerts.get("receivers"):
        notes.append("alerts.receivers is empty in your settings: nobody is notified when an entry fails")
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
class InstallDone:
    """The result of an install. ``state``: the chain as it is now (slurm only)."""

    changed: bool
    state: keepalive.CronState | None
    notes: tuple[str, ...] = ()


def install(plan: InstallPlan, now: datetime, scheduler: chain.TickScheduler | None) -> InstallDone:
    """Write the folder and start the back end. Raises Refused where it belongs to another account, CannotWrite …"""
    cron, wanted = plan.cron, plan.installed
    _check_place(cron, wanted)
    before = _before(cron, wanted)
    lives = before is not None and not before.removed
    if before is not None and lives:
        wanted = replace(wanted, since=before.since)
    if plan.lines:
        keepalive.read_table(wanted)  # raises where the cluster has no such table, before anything is written
    notes: tuple[str, ...] = ()
    if wanted.backend == "slurm":
        wanted, notes = _fit(wanted)
    _write_folder(cron, wanted)
    if plan.lines:  # before the cron counts as installed: a table may be refused
        keepalive.put_lines(wanted, plan.lines)
    write_installed(cron, wanted)
    if before is not None and lives and before.backend != wanted.backend:
        keepalive.put_lines(before, "")
    changed = before is None or _changed(before, wanted)
    if scheduler is None:
        return InstallDone(changed, None, notes)
    if before is not None and lives and changed and before.backend == "slurm":
        for job in _jobs(wanted, scheduler):  # they would ask for the resources of the old settings
            if job.state.waiting:
                scheduler.cancel(job.base_id, only_pending=True)
    state = keepalive.see_to(cron.root, scheduler, now, thorough=True)
    if state.revived:  # another install may have submitted the same jobs at this moment: this cancels duplicates
        keepalive.see_to(cron.root, scheduler, now, thorough=True)
    return InstallDone(changed, state, notes)


def _check_place(cron: CronDir, wanted: Installed) -> None:
    """Make the folder. Raises NotTrusted where another account could put a file into it, or another folder in its place."""
    try:
        make_folder(cron.root, FOLDER, parents=True)
        reason = distrust_folder(cron.root, wanted)
    except OSError as error:
        raise from_os_error(error, f"make {cron.root}") from None
    if reason:
        raise ownership.NotTrusted(
            f"{reason}, so a file in {cron.root} could come from another account",
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
    except Error:  # damaged: this install writes it anew
        return None
    if before is not None and before.owner != wanted.owner and not before.removed:
        raise Refused(
            f"the cron in {cron.root} is {before.owner}'s, and one is enough",
            hint="ask them to add your files, or install your own with --dir DIR",
        )
    return before


def _changed(before: Installed, after: Installed) -> bool:
    volatile = {name: getattr(before, name) for name in ("at", "since", "note", "environment", "secret")}
    return before != replace(after, **volatile)


def _write_folder(cron: CronDir, installed: Installed) -> None:
    script = chain.script(cron, installed) if installed.backend == "slurm" else ""
    try:
        make_folder(cron.root, FOLDER, parents=True)
        make_folder(cron.state, OWN)  # outputs, settings and secrets are in it: nobody else ever opens a folder of it
        set_mode(cron.state.resolve(), OWN)
        for folder in (*(cron.folder(name) for name in FOLDERS), cron.slots, cron.runs, cron.log):
            make_folder(folder)
        words = {
            "owner": installed.owner,
            "root": str(cron.root),
            "why": installed.why.partition(";")[0],
            "timezone": installed.timezone,
            "period": show_duration(installed.period.total_seconds()),
            "limit": show_duration(installed.limit.total_seconds()),
        }
        write_whole(cron.root / "README", chain.render("cron.readme.j2", words))
        if not cron.crontab.exists():
            write_whole(cron.crontab, chain.render("cron.crontab.j2", words))
        if script:
            write_whole(cron.script, script, mode=0o755)
    except OSError as error:
        raise from_os_error(error, f"write {cron.root}") from None


def _fit(installed: Installed) -> tuple[Installed, tuple[str, ...]]:
    """Ask sinfo once for the limits of the partition: a shorter time limit is kept, and whole nodes give a warning."""
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
    try:
        return parse_slurm_time(text) if re.match(r"\d", text) else None
    except ValueError:
        return None


def _jobs(installed: Installed, scheduler: chain.TickScheduler) -> list[Job]:
    """The jobs of its ticks in the queue."""
    found = scheduler.queue(users=(installed.owner,))
    return [job for job in found if chain.slot_of(job.comment, installed.id) is not None]


@dataclass(frozen=True)
class RemoveDone:
    """The result of a removal. ``left``: why some jobs may still be in the queue; they do nothing when they start."""

    cancelled: tuple[str, ...] = ()
    left: str = ""


def remove(cron: CronDir, installed: Installed, now: datetime, scheduler: chain.TickScheduler | None) -> RemoveDone:
    """Remove the cron: it is recorded as removed first (a tick that still starts does nothing), then its jobs and lines go.

    Folders, files and outputs stay. Raises Refused where it belongs to another account, CannotWrite.
    """
    if installed.owner != user_name():
        raise Refused(f"the cron in {cron.root} is {installed.owner}'s", hint="ask them to remove it")
    when = f"by {installed.owner} on {os.uname().nodename}, {now:%Y-%m-%d %H:%M} UTC"
    write_installed(cron, replace(installed, removed=installed.removed or when))
    keepalive.put_lines(installed, "")
    if scheduler is None:
        return RemoveDone()
    cancelled: dict[str, None] = {}
    left = ""
    try:
        for _ in range(2):  # a tick that was running may have submitted one more
            for job in _jobs(installed, scheduler):
                scheduler.cancel(job.base_id)
                cancelled[job.base_id] = None
    except Error as error:
        left = error.message
    return RemoveDone(tuple(cancelled), left)


# ------------------------------------------------------------------------------------------------ built-in scripts


@dataclass(frozen=True)
class BuiltinScript:
    """One script that comes with ftsupervise, with its folder and the first line of its comment."""

    folder: str  # such as "hourly"
    name: str
    about: str
    text: str


def builtin_scripts() -> tuple[BuiltinScript, ...]:
    """Return all of them, by folder and name; those that are jobs of their own come last."""
    top = resources.files("ftsupervise.cron")
    found = []
    for place in (top, top / "as-jobs"):
        for folder in sorted(place.iterdir(), key=lambda one: one.name):
            if folder.name.startswith("cron.") and folder.is_dir():
                for script in sorted(folder.iterdir(), key=lambda one: one.name):
                    text = script.read_text("utf-8")
                    about = next((line[2:] for line in text.splitlines() if line.startswith("# ")), "")
                    found.append(BuiltinScript(folder.name.removeprefix("cron."), script.name, about, text))
    return tuple(found)


def add(cron: CronDir, name: str, folder: str | None = None) -> str:
    """Put the script called ``name`` into its folder (or ``folder``) and return its path.

    Raises NotFound, Refused if it is there.
    """
    known = {one.name: one for one in builtin_scripts()}
    if name not in known:
        raise NotFound(
            f"no ready-made script is called {name!r}{did_you_mean(name, known)}", hint=f"there are: {', '.join(known)}"
        )
    one = known[name]
    path = cron.folder(folder or one.folder) / name
    if path.exists():
        raise Refused(f"{path} is there already", hint="it was left as it is")
    try:
        write_whole(path, one.text, mode=0o755)
    except OSError as error:
        raise from_os_error(error, f"write {path}") from None
    return str(path)
