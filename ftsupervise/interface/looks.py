"""The looks and acts of ``Run``, each in a process of its own (``probe/own_process.py``), by the rules of its command."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ftsupervise.config.find_run import find_run, require_run_dir, to_launch
from ftsupervise.errors import UsageError
from ftsupervise.interface.answers import RaisedSwitch, RunLaunched
from ftsupervise.launch.switching import end_held, put_up, require_names, runs_to_switch, who_hears
from ftsupervise.printable import to_type
from ftsupervise.rundir.switches import KILL, SAVE, read_switch
from ftsupervise.scheduler import SLURM

if TYPE_CHECKING:
    from ftsupervise.launch.order import LaunchOrder, PlannedLaunch
    from ftsupervise.report.alert_list import AlertsSeen
    from ftsupervise.report.checkpoint_list import CheckpointsSeen
    from ftsupervise.report.published import RunStatus


def status(run: str | None) -> RunStatus:
    from ftsupervise.report.detail import detail, with_receivers
    from ftsupervise.report.published import status_of

    return status_of(with_receivers(detail(find_run(run), datetime.now(timezone.utc), os.environ)))


def checkpoints(run: str | None) -> CheckpointsSeen:
    from ftsupervise.config.checkpoint_place import place_of
    from ftsupervise.report.checkpoint_list import checkpoints_of

    return checkpoints_of(place_of(run, acts=False))


def alerts(run: str | None) -> AlertsSeen:
    from ftsupervise.report.alert_list import alerts_in, journals_of

    return alerts_in(journals_of((run,) if run is not None else ()))


def save(run: str | None, why: str) -> RaisedSwitch:
    return _raised(run, SAVE, why)


def kill(run: str | None, why: str, confirm: str | None) -> RaisedSwitch:
    raised = _raised(run, KILL, why, confirm)
    ended = end_held(find_run(run))
    return raised._replace(ended=ended.jobs, problem=ended.problem)


def _raised(run: str | None, switch: str, why: str, confirm: str | None = None) -> RaisedSwitch:
    """Raise the switch where it is not up: the first reason stays."""
    ((rundir, name),) = runs_to_switch((run,) if run is not None else ())
    require_names([name], confirm)
    heard, before = who_hears(rundir), read_switch(rundir, switch)
    if not before.up:
        put_up(rundir, switch, why)
    now = before if before.up else read_switch(rundir, switch)
    return RaisedSwitch(name, now, before.up, heard.attempt, heard.guard, heard.stop_within)


def plan(run: str | None, order: LaunchOrder) -> PlannedLaunch:
    """Plan a launch. Nothing is submitted."""
    from ftsupervise.config.believed import load_to_act
    from ftsupervise.launch.order import planned

    config, names = to_launch(run)
    if len(names) > 1:
        raise UsageError(
            f"{config} is a sweep of {len(names)} runs", hint=f"name one of them: Run({names[0]!r}).launch()"
        )
    word = to_type(config)
    hint = f"look at it, then: chmod go-w {word}, if it is yours, or ftsupervise launch --trust {word}"
    settings = load_to_act(config, "launch would run the commands in it as you", run=names[0], hint=hint)
    require_run_dir(settings.run_dir)
    return planned(config, settings, order, datetime.now(timezone.utc))


def submit(planned: PlannedLaunch) -> RunLaunched:
    """Submit it, and see to the cron that watches, as ``launch`` does."""
    from ftsupervise.alerts.receivers import without_receivers
    from ftsupervise.launch.folders import handed_over
    from ftsupervise.launch.order import carried_out

    plan, settings = planned.plan, planned.settings
    done, warnings = carried_out(planned, datetime.now(timezone.utc), dict(os.environ))
    handed = handed_over(done.run_dir, settings, plan.workdir)
    said = (*planned.notes, *plan.notes, *handed, *without_receivers(settings), *_who_watches(planned))
    slurm = tuple(f"Slurm warns: {words}" for words in warnings)
    return RunLaunched(plan.name, done.run_dir.root, done.job_ids, done.found_again, done.known_as, (*said, *slurm))


def _who_watches(planned: PlannedLaunch) -> tuple[str, ...]:
    from ftsupervise.crontab.keepalive import see_to
    from ftsupervise.scheduler.slurm import Slurm

    if planned.plan.kind != SLURM:
        return ()
    state = see_to(planned.settings.cron.directory, Slurm(), datetime.now(timezone.utc))
    return (f"cron: {state.words}",) if state.installed else ()
