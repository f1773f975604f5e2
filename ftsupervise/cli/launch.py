"""``ftsupervise launch``: submit the run once, and print what was submitted and how to stop it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli import time_limit
from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import JSON, answer, for_programs, say
from ftsupervise.launch.order import ASKING, MOST_JOBS, LaunchOrder, PlannedLaunch
from ftsupervise.printable import printable, to_type
from ftsupervise.scheduler import LOCAL, SCHEDULERS, SLURM

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.launch.plan import Plan
    from ftsupervise.launch.submit import Launched

_SUBMITTING = 15.0  # seconds for each run of a sweep, besides


@click.command()
@click.argument("run", metavar="[RUN]", required=False, type=RUN)
@click.option("-n", "--dry-run", is_flag=True, help="Print exactly what would be submitted; touch nothing.")
@click.option(
    "--after", metavar="JOBID", default="", help="Attach to a job that runs or waits: start when it has ended."
)
@click.option("--jobs", type=click.IntRange(1, MOST_JOBS), help="Members of the chain, instead of launch.jobs.")
@click.option("--exclude", metavar="NODES", default="", help="Nodes to exclude, besides launch.exclude.")
@click.option("--again", is_flag=True, help="Submit even though the run is in the queue already.")
@click.option(
    "--take-over",
    metavar="RUN",
    multiple=True,
    help="Go on from the checkpoints that another run left in this run's folder; may be repeated. They are never removed.",
)
@click.option("--trust", is_flag=True, help="Launch from settings that another account may write; this is remembered.")
@click.option(
    "--observe",
    is_flag=True,
    help="Only tell what would be done to it: nothing is ended, held or left out (act: observe).",
)
@click.option("--scheduler", type=click.Choice(["auto", *SCHEDULERS]), help="Instead of the configuration's.")
@JSON
def launch(
    run: str | None,
    dry_run: bool,
    after: str,
    jobs: int | None,
    exclude: str,
    trust: bool,
    observe: bool,
    scheduler: str | None,
    **consent: Any,
) -> None:
    """Submit RUN as a chain of jobs. RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.

    A run that was launched before is submitted from the ftsupervise.yaml it was launched from, as that is now. Of a file
    with a sweep all runs are launched, each as a chain of its own; a name that was launched before means one of them.
    One member runs, the others wait in the queue to take over. Typing the same command again after an unclear answer
    of sbatch finds the job that was accepted instead of making a second one.
    """
    from ftsupervise.config.find_run import to_launch
    from ftsupervise.errors import UsageError

    as_json = consent.pop("as_json")
    with _asking():
        path, names = to_launch(run)
    if len(names) > 1 and consent["take_over"]:
        raise UsageError("--take-over is for one run of a sweep", hint=f"name it: ftsupervise launch {names[0]}")
    order = LaunchOrder(after.strip(), jobs, exclude, observe=observe, scheduler=scheduler, **consent)
    planned = []
    for name in names:
        with _asking():
            planned.append(_planned(path, name, order, dry_run=dry_run, trust=trust))
    for sentence in dict.fromkeys(sentence for one in planned for sentence in one.notes):
        say(f"note: {sentence}", err=True)
    if dry_run:
        with _asking():
            (_answer_dry_run if as_json else _show)(planned)
    elif as_json:
        _launch_for_programs(planned)
    elif len(planned) > 1:
        _launch_sweep(path, planned)
    else:
        _launch_one(planned[0])


@contextmanager
def _asking() -> Iterator[None]:
    """For what Slurm is asked within: a person waits; sbatch is given its own time."""
    import time

    from ftsupervise import host

    before = host.answer_by
    host.answer_by = before or time.monotonic() + ASKING
    try:
        yield
    finally:
        host.answer_by = before


def _planned(path: Path, name: str, order: LaunchOrder, *, dry_run: bool, trust: bool) -> PlannedLaunch:
    """Return the run of ``path``; ``name``: which one, where that is a sweep."""
    from ftsupervise.cli.config import settings_to_act_on
    from ftsupervise.launch.order import planned

    hint = f"look at it (launch --dry-run), then: chmod go-w {to_type(path)}, if it is yours, or launch --trust"
    settings = settings_to_act_on(path, "launch", run=name, dry_run=dry_run, trust=trust, hint=hint)
    return planned(path, settings, order, datetime.now(timezone.utc), dry_run=dry_run)


def _launch_one(one: PlannedLaunch) -> None:
    from ftsupervise.cli.config import what_is_seen
    from ftsupervise.launch.folders import handed_over
    from ftsupervise.launch.order import carried_out

    plan, settings = one.plan, one.settings
    with _asking():
        done, warnings = carried_out(one, datetime.now(timezone.utc), dict(os.environ))
    guard = _guard_of(settings, plan.workdir)
    _tell(done, plan, settings, handed_over(done.run_dir, settings, plan.workdir), guard)
    for sentence in what_is_seen(settings) if guard is False else ():
        say(sentence)
    _tell_who_watches(plan, settings)
    for words in warnings:
        say(f"note: Slurm warns: {printable(words)}", err=True)


def _launch_sweep(path: Path, planned: list[PlannedLaunch]) -> None:
    """Launch each run, a line each. One that may not start now keeps none of the others; an answer that is none ends it."""
    from ftsupervise.alerts.receivers import without_receivers
    from ftsupervise.errors import Error, Refused, about
    from ftsupervise.launch.order import carried_out

    refused, warned = 0, list[str]()
    for index, one in enumerate(planned):
        time_limit.extend(ASKING + _SUBMITTING)
        try:
            with _asking():
                done, warnings = carried_out(one, datetime.now(timezone.utc), dict(os.environ))
        except Refused as error:
            refused += 1
            say(about(one.plan.name, str(error)), err=True)
            continue
        except Error as error:
            left = f"{index - refused} of {len(planned)} runs are in the queue, of those from {one.plan.name} on none"
            error.message = f"{about(one.plan.name, error.message)}; {left}"
            raise
        say(_submitted(done, one.plan))
        warned += [words for words in warnings if words not in warned]
    if refused == len(planned):
        raise Refused(f"none of the {refused} runs was launched; the reason of each stands above")
    whole = _short(path.absolute())
    say(f"  look           ftsupervise status {whole}")
    say(f"  watch          ftsupervise watch --every 60s {whole}")
    guard = _guard_of(planned[0].settings, planned[0].plan.workdir)
    if guard is not False:
        say(f"  save now       ftsupervise save {whole}{'' if guard else '   (with a guard)'}")
    stops = _when_stopped(planned[0].settings, guard)
    say(f"  stop           ftsupervise kill {whole}   ({stops}; one of them: its name in the place of the file)")
    for note in dict.fromkeys((*planned[0].plan.notes, *without_receivers(planned[0].settings))):
        say(f"  note: {note}")
    _tell_who_watches(planned[0].plan, planned[0].settings)
    for words in warned:
        say(f"note: Slurm warns: {printable(words)}", err=True)
    if refused:
        raise Refused(f"{refused} of {len(planned)} runs were not launched; the reason of each stands above")


def _guard_of(run: Run, workdir: Path) -> bool | None:
    """Return whether its script has the guard; None: not known."""
    from ftsupervise.launch.doubts import guard_of
    from ftsupervise.probe import Probe

    with Probe() as probe:
        return guard_of(run, workdir, probe.text)[1]


def _when_stopped(run: Run, guard: bool | None) -> str:
    """Return what the kill switch does."""
    from ftsupervise.units import show_duration

    ended = f"SIGTERM after {show_duration(run.launch.restart.stop_within.total_seconds())}"
    return "saves first" if guard else ended if guard is False else f"with a guard it saves first, without one {ended}"


def _show(planned: list[PlannedLaunch]) -> None:
    from ftsupervise.alerts.receivers import without_receivers
    from ftsupervise.launch.script import render

    for one in planned:
        plan, run = one.plan, one.settings
        if len(planned) > 1:
            click.echo(f"# ---- run {plan.name}")
        for index in range(plan.submissions):
            script = render(plan.part(index), run.launch, plan.link(index))
            if plan.submissions > 1:
                click.echo(f"# ---- job {index + 1} of {plan.submissions}")
            click.echo(script, nl=not script.endswith("\n"))
    first = planned[0]
    for note in dict.fromkeys((*first.plan.notes, *without_receivers(first.settings))):
        say(f"note: {note}", err=True)
    for one in planned:
        if refused := _refusal(one.plan, one.settings, one.order.take_over):
            of = f"{one.plan.name}: " if len(planned) > 1 else ""
            say(f"note: launch would refuse at present: {of}{refused}", err=True)
    of_all = f"no directory of the {len(planned)} runs" if len(planned) > 1 else f"{first.plan.run_dir}"
    say(f"dry run: nothing was submitted, {of_all} was {'' if len(planned) > 1 else 'not '}touched", err=True)


def _answer_dry_run(planned: list[PlannedLaunch]) -> None:
    from ftsupervise.launch.script import render

    runs = []
    for one in planned:
        plan, run = one.plan, one.settings
        scripts = [render(plan.part(index), run.launch, plan.link(index)) for index in range(plan.submissions)]
        refused = _refusal(plan, run, one.order.take_over)
        runs.append({**_of(plan), "scripts": scripts, "would_refuse": refused or None, "notes": plan.notes})
    answer(runs=runs, dry_run=True)


def _launch_for_programs(planned: list[PlannedLaunch]) -> None:
    """Launch each, and tell a program what was submitted, also where an error ends it. One that is refused keeps no other."""
    from ftsupervise.errors import Refused

    runs, refused = list[dict[str, Any]](), 0
    try:
        for one in planned:
            try:
                runs.append(_launched_for_programs(one))
            except Refused as error:
                if len(planned) == 1:
                    raise
                refused += 1
                runs.append({**_of(one.plan), "refused": str(error)})
    finally:
        if runs:
            answer(runs=runs, dry_run=False)
    if refused:
        raise Refused(f"{refused} of {len(planned)} runs were not launched")


def _launched_for_programs(one: PlannedLaunch) -> dict[str, Any]:
    """Launch it, and return what was submitted."""
    from ftsupervise.launch.order import carried_out

    plan, run = one.plan, one.settings
    time_limit.extend(ASKING + _SUBMITTING)
    with _asking(), for_programs(True):
        done, warnings = carried_out(one, datetime.now(timezone.utc), dict(os.environ))
        _tell_who_watches(plan, run)
    submitted = {"job_ids": done.job_ids, "found_again": done.found_again, "known_as": done.known_as or plan.name}
    return {**_of(plan), **submitted, "notes": plan.notes, "warnings": warnings}


def _of(plan: Plan) -> dict[str, Any]:
    chain = {"scheduler": plan.kind, "chain": plan.chain, "members": plan.members, "after": plan.after or None}
    return {"run": plan.name, "directory": plan.run_dir, **chain, "groups": len(plan.groups)}


def _refusal(plan: Plan, run: Run, take_over: tuple[str, ...]) -> str:
    """Return why a launch would be refused now, by the run directory; "" if it would not."""
    from ftsupervise.errors import Error
    from ftsupervise.launch.folders import require_own
    from ftsupervise.launch.submit import check_checkpoints, check_may_start, refuse_outputs
    from ftsupervise.rundir.paths import RunDir

    try:
        require_own(RunDir(plan.run_dir))
        refuse_outputs(run)
        check_may_start(RunDir(plan.run_dir), plan.name)
        check_checkpoints(RunDir(plan.run_dir), run, take_over)
    except Error as error:
        return str(error)
    return ""


def _tell(done: Launched, plan: Plan, run: Run, handed: tuple[str, ...], guard: bool | None) -> None:
    from ftsupervise.alerts.receivers import without_receivers
    from ftsupervise.config.find_run import outputs

    where = done.run_dir.root
    say(_submitted(done, plan))
    say(f"  run directory  {where}")
    say(f"  look           ftsupervise status {_short(where)}")
    say(f"  output         tail -f {' '.join(map(_globbed, outputs(run)))}")
    say(f"  watch          ftsupervise watch --every 60s {_short(where)}")
    if guard is not False:
        say(f"  save now       touch {_short(where)}/switches/save-switch{'' if guard else '   (with a guard)'}")
    stops = _when_stopped(run, guard)
    say(f"  stop           touch {_short(where)}/switches/kill-switch   ({stops}; anyone in the group may)")
    if done.known_as not in ("", plan.name):
        say(f"  note: another run is called {plan.name}; from elsewhere this one is called {done.known_as}")
    for note in (*plan.notes, *handed, *without_receivers(run)):
        say(f"  note: {note}")


def _submitted(done: Launched, plan: Plan) -> str:
    ids = " ".join(done.job_ids)
    members = f"{plan.members} members, one at a time" if plan.members > 1 else "one member"
    if plan.groups:
        members = f"the lighthouse, then {len(plan.groups)} groups, each {members}"
    if done.found_again:
        return f"{plan.name}: found in the queue as job {ids}: an earlier sbatch had been accepted after all"
    kind = "on this machine " if plan.kind == LOCAL else ""
    attached = f", after job {plan.after}" if plan.after else ""
    return f"{plan.name}: submitted {kind}as job {ids} ({members}{attached})"


def _tell_who_watches(plan: Plan, run: Run) -> None:
    """Check at launch that the cron that watches is alive, where there is one. A failure does not affect the launch."""
    from ftsupervise.crontab.keepalive import see_to
    from ftsupervise.scheduler.slurm import Slurm

    if plan.kind != SLURM:
        return
    state = see_to(run.cron.directory, Slurm(), datetime.now(timezone.utc))
    if state.installed:
        say(f"  cron           {state.words}")


def _globbed(pattern: str) -> str:
    """Return a path with its stars, for a shell."""
    try:
        pattern = str(Path(pattern).relative_to(Path.cwd()))
    except ValueError:
        pass
    import shlex

    return "*".join(shlex.quote(part) if part else "" for part in pattern.split("*"))


def _short(path: Path) -> str:
    try:
        text = str(path.relative_to(Path.cwd()))
    except ValueError:
        text = str(path)
    import shlex

    return shlex.quote(text)
