"""A launch as a person or a program orders it: the settings with what was chosen for this one time, planned, then submitted."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.errors import SchedulerUnavailable, UsageError
from ftsupervise.scheduler import SCHEDULERS, SLURM, is_job_id, kind_of, open_scheduler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftsupervise.config.schema import Run
    from ftsupervise.launch.plan import Plan
    from ftsupervise.launch.submit import Launched

ASKING = 30.0  # seconds for all that Slurm is asked before something is submitted
MOST_JOBS = 1000


class LaunchOrder(NamedTuple):
    """The choices for one launch, besides the settings."""

    after: str = ""  # a job to attach to
    jobs: int | None = None  # members of the chain, instead of launch.jobs
    exclude: str = ""  # nodes, besides launch.exclude
    again: bool = False  # even though the run is in the queue already
    take_over: tuple[str, ...] = ()  # other runs, whose checkpoints in this run's folder are gone on from
    observe: bool = False
    scheduler: str | None = None  # instead of the configuration's


class PlannedLaunch(NamedTuple):
    """A launch that is not submitted yet. ``notes``: what will not work as intended, a sentence each."""

    plan: Plan
    settings: Run
    order: LaunchOrder
    notes: tuple[str, ...]


def planned(config: Path, settings: Run, order: LaunchOrder, now: datetime, *, dry_run: bool = False) -> PlannedLaunch:
    """Plan it; nothing is submitted. ``config``: the file of the settings. Raises UsageError, ConfigError."""
    from ftsupervise.config.acting import observing_all
    from ftsupervise.launch.submit import expedited_requeue

    _require_sense(order)
    if order.jobs is not None:
        settings = settings.model_copy(update={"launch": settings.launch.model_copy(update={"jobs": order.jobs})})
    if order.scheduler is not None:  # run.yaml records it too, so that a watch asks the right queue
        settings = settings.model_copy(update={"scheduler": order.scheduler})
    if order.observe:
        settings = settings.model_copy(update={"act": observing_all()})
    kind = kind_of(settings.scheduler)
    expedites = None if dry_run else expedited_requeue(settings, kind)
    plan, notes = _plan(settings, config, kind, order, expedites, now)
    return PlannedLaunch(plan, settings, order, (*notes, *_doubts(settings, plan.workdir, now)))


def _require_sense(order: LaunchOrder) -> None:
    if order.jobs is not None and not 1 <= order.jobs <= MOST_JOBS:
        raise UsageError(f"a chain has 1 to {MOST_JOBS} jobs, not {order.jobs}")
    if order.scheduler is not None and order.scheduler not in ("auto", *SCHEDULERS):
        raise UsageError(
            f"there is no scheduler {order.scheduler!r}", hint=f"there are: {', '.join(('auto', *SCHEDULERS))}"
        )
    if order.after and not is_job_id(order.after):
        raise UsageError(f"--after takes a job id such as 87, not {order.after!r}", hint="squeue --me lists yours")
    if order.exclude and not re.fullmatch(r"[A-Za-z0-9_.,\[\]-]+", order.exclude):
        raise UsageError(f"--exclude takes node names such as node-[3,7], not {order.exclude!r}")


def _plan(
    run: Run, config: Path, kind: str, order: LaunchOrder, expedites: bool | None, now: datetime
) -> tuple[Plan, tuple[str, ...]]:
    from ftsupervise.launch.plan import plan, requeued
    from ftsupervise.nodes.exclude import that_fit, to_avoid

    avoid, notes = to_avoid(run, now) if kind == SLURM else ((), ())
    if avoid:  # a dry run asks Slurm too: it prints exactly what would be submitted
        avoid, not_excluded = that_fit(avoid, run, tuple(filter(None, (*run.launch.exclude, order.exclude))))
        notes = (*notes, *not_excluded)
    workdir = config.absolute().parent
    made = plan(
        run,
        kind=kind,
        token=os.urandom(6).hex(),
        workdir=workdir,
        python=sys.executable,
        after=order.after,
        exclude=(order.exclude,) if order.exclude else (),
        avoid=avoid,
    )
    made = requeued(made, run.launch, expedites=expedites)
    own = workdir.stat().st_uid == os.geteuid()
    return replace(made, config=config.absolute(), umask=_umask(), own_workdir=own), notes


def _umask() -> str:
    """Return the umask of this process as a shell has it, where it lets others write what is made; else ""."""
    now = os.umask(0o077)
    os.umask(now)
    return "" if now & 0o022 == 0o022 else f"{now:04o}"


def _doubts(run: Run, workdir: Path, now: datetime) -> tuple[str, ...]:
    """Return notes about well-formed settings that will not work as intended: now, not at 3 a.m."""
    from ftsupervise.alerts.receivers import missing_secrets
    from ftsupervise.launch.doubts import doubts
    from ftsupervise.launch.submit import without_secrets
    from ftsupervise.probe import Probe
    from ftsupervise.watch.watchdogs.preflight import complaints

    _, out = without_secrets(os.environ, run)
    left = f"not given to the jobs, as they hold secrets: {', '.join(out)} (launch.take_along names what they need)"
    with Probe() as probe:
        found = (*complaints(run, probe, now), *doubts(run, workdir, probe.text))
    return (*found, *missing_secrets(run.alerts), *((left,) if out else ()))


def carried_out(planned: PlannedLaunch, now: datetime, env: Mapping[str, str]) -> tuple[Launched, tuple[str, ...]]:
    """Submit it; return what was submitted, and the scheduler's warnings."""
    from ftsupervise.launch.submit import launch_run

    plan, order = planned.plan, planned.order
    scheduler = open_scheduler(plan.kind)
    try:
        done = launch_run(
            plan, planned.settings, scheduler, again=order.again, now=now, env=env, take_over=order.take_over
        )
    except SchedulerUnavailable as error:
        if (
            planned.settings.scheduler == "auto"
        ):  # Slurm's commands are installed; that does not make this machine part of one
            error.hint += (
                "\n  no cluster here? --scheduler local runs it on this machine, ftsupervise sandbox up makes one"
            )
        raise
    return done, tuple(sorted(scheduler.warnings))
