"""What ``ftsupervise cron`` runs: a tick, one entry by hand, the loop in a terminal."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import click

from ftsupervise.cli.cron_output import local

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftsupervise.crontab.installation import CronDir
    from ftsupervise.crontab.tick import CronTicked
    from ftsupervise.scheduler import Scheduler
    from ftsupervise.scheduler.slurm import Slurm


def now() -> datetime:
    return datetime.now(timezone.utc)


def slurm(env: Mapping[str, str]) -> Slurm:
    from ftsupervise.scheduler.slurm import Slurm

    return Slurm(env)


def jobs(env: Mapping[str, str]) -> Scheduler:
    from ftsupervise.scheduler import open_scheduler

    return open_scheduler("auto", env)


def tick(place: CronDir, slot: datetime | None) -> CronTicked | None:
    from ftsupervise.crontab.installation import read_installed
    from ftsupervise.crontab.tick import tick as one

    installed = read_installed(place)
    for name, value in (installed.whole_environment if installed is not None else {}).items():
        os.environ.setdefault(
            name, value
        )  # receivers need the proxy; a tick of crontab, or of Slurm, has not all of it
    return one(place, slot=slot, now=now(), job_id=os.environ.get("SLURM_JOB_ID", ""), slurm=slurm, jobs=jobs)


def run_one(place: CronDir, name: str, *, again: bool, dry_run: bool) -> None:
    from ftsupervise.crontab.dispatch import CronSlot, entry_called, run_now
    from ftsupervise.crontab.installation import need_installed
    from ftsupervise.errors import Error

    installed = need_installed(place)
    entry = entry_called(place, installed, name)
    if dry_run:
        click.echo(f"would {'submit' if entry.kind.value == 'job' else 'run'} {' '.join(entry.argv)}")
        return
    at = now()
    queue = None
    if entry.kind.value == "job":
        try:
            queue = jobs(installed.environment).queue()
        except Error:
            queue = None  # then an earlier run that may still go on is not started beside
    slot = CronSlot(place, installed, at.replace(microsecond=0), at, "", queue, lambda: jobs(installed.environment))
    done = run_now(slot, entry, again=again, echo=_to_terminal)
    click.echo(f"{entry.name}: {done.words}; output in {done.folder}", err=True)
    raise SystemExit(done.code)


def _to_terminal(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def loop(place: CronDir, dry_run: bool) -> None:
    from ftsupervise.crontab.entries import slots_after
    from ftsupervise.crontab.installation import need_installed
    from ftsupervise.errors import Error
    from ftsupervise.units import show_duration

    installed = need_installed(place)
    if dry_run:
        for slot in slots_after(now(), installed.period, 5):
            click.echo(f"would tick at {local(slot, installed)}")
        return
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _frame: stopping.append(n))
    period = show_duration(installed.period.total_seconds())
    click.echo(f"cron: a tick every {period} in {place.root}; Ctrl-C stops it", err=True)
    while not stopping:
        slot = slots_after(now(), installed.period, 1)[0]
        while not stopping and now() < slot:
            time.sleep(min(0.5, max(0.0, (slot - now()).total_seconds())))
        if stopping:
            break
        try:
            done = tick(place, slot)
        except (Error, OSError) as error:  # a file system that is away for a while must not end the keeping of time
            click.echo(f"{local(slot, installed)} {error}", err=True)
            continue
        if done is None:
            click.echo("cron: removed", err=True)
            return
        for line in (*(f"ran {name}" for name in done.worked.ran), *done.trouble, *done.notified):
            click.echo(f"{local(done.slot, installed)} {line}")  # a late one works for a later slot
    click.echo("cron: stopped", err=True)
