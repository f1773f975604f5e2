"""``ftsupervise launch``: submit the run once, and print what was submitted and how to stop it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ftsupervise.cli import time_limit
from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import JSON, answer, for_programs, say
from ftsupervise.printable import printable
from ftsupervise.scheduler import LOCAL, SCHEDULERS, SLURM, is_job_id, kind_of, open_scheduler

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.launch.plan import Plan
    from ftsupervise.launch.submit import Launched

_ASKING = 30.0  # seconds for all that Slurm is asked before something is submitted
_SUBMITTING = 15.0  # seconds for each run of a sweep, besides


@click.command()
@click.argument("run", metavar="[RUN]", required=False, type=RUN)
@click.option("-n", "--dry-run", is_flag=True, help="Print exactly what would be submitted; touch nothing.")
@click.option(
    "--after", metavar="JOBID", default="", help="Attach to a job that runs or waits: start when it has ended."
)
@click.option("--jobs", type=click.IntRange(1, 1000), help="Members of the chain, instead of launch.jobs.")
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
    typed = _Typed(after.strip(), exclude, jobs, scheduler, observe, dry_run, trust)
    planned = []
    for name in names:
        with _asking():
            planned.append(_planned(path, name, typed))
    for sentence in dict.fromkeys(sentence for one in planned for sentence in one.doubts):
        say(f"note: {sentence}", err=True)
    if dry_run:
        with _asking():
            (_answer_dry_run if as_json else _show)(planned, consent["take_over"])
    elif as_json:
        _launch_for_programs(planned, consent)
    elif len(planned) > 1:
        _launch_sweep(path, planned, consent)
    else:
        _launch_one(planned[0], consent)


@contextmanager
def _asking() -> Iterator[None]:
    """For what Slurm is asked within: a person waits; sbatch is given its own time."""
    import time

    from ftsupervise import host

    before = host.answer_by
    host.answer_by = before or time.monotonic() + _ASKING
    try:
        yield
    finally:
        host.answer_by = before


class _Typed(NamedTuple):
    """What was typed in the place of settings."""

    after: str
    exclude: str
    jobs: int | None
    scheduler: str | None
    observe: bool
    dry_run: bool
    trust: bool


class _Planned(NamedTuple):
    """A run that is to be launched, and what a person has to know before."""

    plan: Plan
    settings: Run
    doubts: tuple[str, ...]


def _planned(path: Path, name: str, typed: _Typed) -> _Planned:
    """Return the run of ``path``; ``name``: which one, where that is a sweep."""
    from ftsupervise.cli.config import settings_to_act_on
    from ftsupervise.config.acting import observing_all
    from ftsupervise.launch.submit import expedited_requeue

    hint = f"look at it (launch --dry-run), then: chmod go-w {path}, if it is yours, or launch --trust"
    settings = settings_to_act_on(path, "launch", run=name, dry_run=typed.dry_run, trust=typed.trust, hint=hint)
    if typed.jobs is not None:
        settings = settings.model_copy(update={"launch": settings.launch.model_copy(update={"jobs": typed.jobs})})
    if typed.scheduler is not None:  # run.yaml records it too, so that a watch asks the right queue
        settings = settings.model_copy(update={"scheduler": typed.scheduler})
    if typed.observe:
        settings = settings.model_copy(update={"act": observing_all()})
    kind = kind_of(settings.scheduler)
    expedites = None if typed.dry_run else expedited_requeue(settings, kind)
    plan = _plan(settings, path, kind, typed.after, typed.exclude, expedites)
    return _Planned(plan, settings, _doubts(settings, plan.workdir))


def _launch_one(one: _Planned, consent: dict[str, Any]) -> None:
    from ftsupervise.launch.folders import handed_over

    plan, settings, _ = one
    with _asking():
        done, warnings = _carry_out(plan, settings, **consent)
    seen = _seen_of(settings, plan.workdir)
    _tell(done, plan, settings, handed_over(done.run_dir, settings.share), guard=not seen)
    for sentence in seen:
        say(sentence)
    _tell_who_watches(plan, settings)
    for words in warnings:
        say(f"note: Slurm warns: {printable(words)}", err=True)


def _launch_sweep(path: Path, planned: list[_Planned], consent: dict[str, Any]) -> None:
    """Launch each run, a line each. One that may not start now keeps none of the others; an answer that is none ends it."""
    from ftsupervise.cli.config import without_receivers
    from ftsupervise.errors import Error, Refused, about

    refused, warned = 0, list[str]()
    for index, one in enumerate(planned):
        time_limit.extend(_ASKING + _SUBMITTING)
        try:
            with _asking():
                done, warnings = _carry_out(one.plan, one.settings, **consent)
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
    say(f"  save now       ftsupervise save {whole}")
    say(f"  stop           ftsupervise kill {whole}   (one of them: its name in the place of the file)")
    for note in dict.fromkeys((*planned[0].plan.notes, *without_receivers(planned[0].settings))):
        say(f"  note: {note}")
    _tell_who_watches(planned[0].plan, planned[0].settings)
    for words in warned:
        say(f"note: Slurm warns: {printable(words)}", err=True)
    if refused:
        raise Refused(f"{refused} of {len(planned)} runs were not launched; the reason of each stands above")


def _plan(run: Run, config: Path, kind: str, after: str, exclude: str, expedites: bool | None) -> Plan:
    import re
    from dataclasses import replace

    from ftsupervise.errors import UsageError
    from ftsupervise.launch.plan import plan, requeued
    from ftsupervise.nodes.exclude import that_fit, to_avoid

    if after and not is_job_id(after):
        raise UsageError(f"--after takes a job id such as 87, not {after!r}", hint="squeue --me lists yours")
    if exclude and not re.fullmatch(r"[A-Za-z0-9_.,\[\]-]+", exclude):
        raise UsageError(f"--exclude takes node names such as node-[3,7], not {exclude!r}")
    avoid, unread = to_avoid(run, datetime.now(timezone.utc)) if kind == SLURM else ((), ())
    for sentence in unread:
        say(f"note: {sentence}", err=True)
    if avoid:  # a dry run asks Slurm too: it prints exactly what would be submitted
        avoid, not_excluded = that_fit(avoid, run, tuple(filter(None, (*run.launch.exclude, exclude))))
        for sentence in not_excluded:
            say(f"note: {sentence}", err=True)
    workdir = config.absolute().parent
    made = plan(
        run,
        kind=kind,
        token=os.urandom(6).hex(),
        workdir=workdir,
        python=sys.executable,
        after=after,
        exclude=(exclude,) if exclude else (),
        avoid=avoid,
    )
    made = requeued(made, run.launch, expedites=expedites)
    return replace(made, config=config.absolute(), own_workdir=workdir.stat().st_uid == os.geteuid())


def _doubts(run: Run, workdir: Path) -> tuple[str, ...]:
    """Return notes about well-formed settings that will not work as intended: now, not at 3 a.m."""
    from ftsupervise.alerts.receivers import missing_secrets
    from ftsupervise.launch.doubts import doubts
    from ftsupervise.launch.submit import without_secrets
    from ftsupervise.probe import Probe
    from ftsupervise.watch.watchdogs.preflight import complaints

    _, out = without_secrets(os.environ, run)
    left = f"not given to the jobs, as they hold secrets: {', '.join(out)} (launch.take_along names what they need)"
    with Probe() as probe:
        found = (*complaints(run, probe, datetime.now(timezone.utc)), *doubts(run, workdir, probe.text))
    return (*found, *missing_secrets(run.alerts), *((left,) if out else ()))


def _seen_of(run: Run, workdir: Path) -> tuple[str, ...]:
    """Return what will be seen of a script without the guard, and what not."""
    from ftsupervise.cli.config import what_is_seen
    from ftsupervise.launch.doubts import without_guard
    from ftsupervise.probe import Probe

    with Probe() as probe:
        return what_is_seen(run) if without_guard(run, workdir, probe.text) else ()


def _show(planned: list[_Planned], take_over: tuple[str, ...]) -> None:
    from ftsupervise.cli.config import without_receivers
    from ftsupervise.launch.script import render

    for plan, run, _ in planned:
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
        if refused := _refusal(one.plan, one.settings, take_over):
            of = f"{one.plan.name}: " if len(planned) > 1 else ""
            say(f"note: launch would refuse at present: {of}{refused}", err=True)
    of_all = f"no directory of the {len(planned)} runs" if len(planned) > 1 else f"{first.plan.run_dir}"
    say(f"dry run: nothing was submitted, {of_all} was {'' if len(planned) > 1 else 'not '}touched", err=True)


def _answer_dry_run(planned: list[_Planned], take_over: tuple[str, ...]) -> None:
    from ftsupervise.launch.script import render

    runs = []
    for plan, run, _ in planned:
        scripts = [render(plan.part(index), run.launch, plan.link(index)) for index in range(plan.submissions)]
        refused = _refusal(plan, run, take_over)
        runs.append({**_of(plan), "scripts": scripts, "would_refuse": refused or None, "notes": plan.notes})
    answer(runs=runs, dry_run=True)


def _launch_for_programs(planned: list[_Planned], consent: dict[str, Any]) -> None:
    """Launch each, and tell a program what was submitted, also where an error ends it. One that is refused keeps no other."""
    from ftsupervise.errors import Refused

    runs, refused = list[dict[str, Any]](), 0
    try:
        for one in planned:
            try:
                runs.append(_launched_for_programs(one, consent))
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


def _launched_for_programs(one: _Planned, consent: dict[str, Any]) -> dict[str, Any]:
    """Launch it, and return what was submitted."""
    plan, run, _ = one
    time_limit.extend(_SUBMITTING)
    with _asking(), for_programs(True):
        done, warnings = _carry_out(plan, run, **consent)
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


def _carry_out(plan: Plan, run: Run, again: bool, take_over: tuple[str, ...]) -> tuple[Launched, list[str]]:
    """Print what was submitted, and the scheduler's warnings."""
    from ftsupervise.errors import SchedulerUnavailable
    from ftsupervise.launch.submit import launch_run

    scheduler = open_scheduler(plan.kind)
    try:
        now, env = datetime.now(timezone.utc), dict(os.environ)
        done = launch_run(plan, run, scheduler, again=again, now=now, env=env, take_over=take_over)
        return done, sorted(scheduler.warnings)
    except SchedulerUnavailable as error:
        if run.scheduler == "auto":  # Slurm's commands are installed; that does not make this machine part of a cluster
            error.hint += (
                "\n  no cluster here? --scheduler local runs it on this machine, ftsupervise sandbox up makes one"
            )
        raise


def _tell(done: Launched, plan: Plan, run: Run, handed: tuple[str, ...], *, guard: bool) -> None:
    """``guard``: it is not known that the command has none."""
    from ftsupervise.cli.config import without_receivers
    from ftsupervise.config.find_run import outputs
    from ftsupervise.units import show_duration

    where = done.run_dir.root
    say(_submitted(done, plan))
    say(f"  run directory  {where}")
    say(f"  look           ftsupervise status {_short(where)}")
    say(f"  output         tail -f {' '.join(map(_globbed, outputs(run)))}")
    say(f"  watch          ftsupervise watch --every 60s {_short(where)}")
    does = "saves first" if guard else f"SIGTERM after {show_duration(run.launch.restart.stop_within.total_seconds())}"
    if guard:
        say(f"  save now       touch {_short(where)}/switches/save-switch")
    say(f"  stop           touch {_short(where)}/switches/kill-switch   ({does}; anyone in the group may)")
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
