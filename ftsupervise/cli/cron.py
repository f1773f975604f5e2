"""``ftsupervise cron``: install the crontab emulation, show what runs, remove it."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import time
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftsupervise.cli.command_group import CommandGroup
from ftsupervise.cli.names import Named
from ftsupervise.cli.output import JSON, answer
from ftsupervise.printable import to_type
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ftsupervise.crontab.entries import CronEntries, CronEntry
    from ftsupervise.crontab.history import EntryRun
    from ftsupervise.crontab.install import InstallPlan
    from ftsupervise.crontab.installation import CronDir, Installed
    from ftsupervise.crontab.status import CronStatus, EntryStatus
    from ftsupervise.crontab.tick import CronTicked
    from ftsupervise.findings import Finding
    from ftsupervise.scheduler import Scheduler
    from ftsupervise.scheduler.slurm import Slurm

# Not click.Path, which looks at the path at once: a slot is to look in a child first.
DIR = click.option("--dir", "directory", type=Path, help="The installed folder.")
DRY = click.option(
    "-n", "--dry-run", is_flag=True, help="Show what would be done; change nothing and do not ask Slurm."
)


def _scripts(_ctx: click.Context) -> Iterable[str]:
    from ftsupervise.crontab.install import builtin_scripts

    return [one.name for one in builtin_scripts()]


def _entries(ctx: click.Context) -> Iterable[str]:
    from ftsupervise.crontab.entries import find
    from ftsupervise.crontab.installation import need_installed

    place = _place(ctx.params.get("directory"))
    return [one.name for one in find(place, need_installed(place)).entries]


@click.group(cls=CommandGroup)
def cron() -> None:
    """A crontab for clusters without one: drop a file into a folder, and it runs at the next slot.

    \b
    ftsupervise cron install    once; by default in ~/.config/ftsupervise/cron
    cp my-check ~/.config/ftsupervise/cron/cron.hourly/
    ftsupervise cron status     what ran, how late, where its output is
    """


@cron.command(short_help="Make the folder and start keeping time.")
@click.argument("config", required=False, type=Path)
@DIR
@click.option(
    "--backend",
    type=click.Choice(["auto", "slurm", "scrontab", "crontab", "loop"]),
    help="Which clock; auto: the best there is.",
)
@click.option("--period", metavar="TIME", help="A slot every so often: 5m (the default), 1h.")
@click.option("--partition", help="Partition of the small jobs; best is one that shares its nodes.")
@click.option("--account", help="Account of the small jobs.")
@DRY
@JSON
def install(
    config: Path | None,
    directory: Path | None,
    backend: str | None,
    period: str | None,
    partition: str | None,
    account: str | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Make the folder and start keeping time. Type it again to change settings, or to be sure.

    Settings (sections cron and alerts) come from CONFIG, else from ./ftsupervise.yaml, else from your own config.yaml;
    the options here go before them. PATH, the virtual environment and the variables in cron.env are recorded now.
    """
    from ftsupervise.crontab.install import install as carry_out
    from ftsupervise.crontab.installation import dir_option
    from ftsupervise.errors import SchedulerUnavailable
    from ftsupervise.truth import Health

    given = {"directory": directory, "backend": backend, "partition": partition, "account": account}
    plan = _plan(config, given, period, dry_run=dry_run)
    if dry_run:
        (_answer_dry_run if as_json else _show)(plan)
        return
    slurm = slurm_of(plan.installed.environment) if plan.installed.backend == "slurm" else None
    done = carry_out(plan, utc_now(), slurm)
    where = plan.cron.root
    unknown = done.state is not None and done.state.health is Health.UNKNOWN
    if as_json:
        answer(**_of(plan), dry_run=False, changed=done.changed, state=done.state, notes=(*plan.notes, *done.notes))
        raise SystemExit(SchedulerUnavailable.exit_code if unknown else 0)
    click.echo(f"cron {'is installed' if done.changed else 'was installed already'} in {where}")
    click.echo(f"  kept by   {plan.installed.why}")
    if done.state is not None:
        click.echo(f"  now       {done.state.words}")
    elif plan.installed.backend == "loop":
        click.echo(f"  start it  ftsupervise cron run --foreground{dir_option(plan.cron)}")
    receivers = plan.installed.alerts.get("receivers")
    if receivers:
        click.echo(f"  alerts    to the receivers in {plan.installed.alerts_from}")
    click.echo(f"  drop      executables, .slurm and .sbatch files into {where}/cron.hourly (minutely, daily, weekly)")
    here = dir_option(plan.cron)
    click.echo(f"  watch     ftsupervise cron add watch-all{here}   (every watchdog of every run)")
    click.echo(f"  look      ftsupervise cron status{here}")
    for note in (*plan.notes, *done.notes):
        click.echo(f"  note: {note}")
    if unknown:
        click.echo(f"  not known yet whether time is kept; when Slurm answers: ftsupervise cron ensure{here}", err=True)
        raise SystemExit(SchedulerUnavailable.exit_code)


@cron.command("list", short_help="What runs when, and what is passed over.")
@DIR
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def list_entries(directory: Path | None, as_json: bool) -> None:
    """List what runs when, and which files and lines are passed over, and why."""
    from ftsupervise.crontab.entries import find
    from ftsupervise.crontab.installation import need_installed

    place = _place(directory)
    installed = need_installed(place)
    found = find(place, installed)
    for line in (entries_as_json if as_json else entry_lines)(found, installed, utc_now()):
        click.echo(line)
    if not as_json and not found.entries and not found.passed:
        click.echo(f"nothing yet: drop an executable into {place.folder('hourly')}")


@cron.command(short_help="Put a ready-made script into its folder.")
@click.argument("names", nargs=-1, type=Named(_scripts))
@click.option(
    "--folder",
    type=click.Choice(["minutely", "hourly", "daily", "weekly"]),
    help="The folder, instead of its usual one.",
)
@DIR
@DRY
@JSON
def add(names: tuple[str, ...], folder: str | None, directory: Path | None, dry_run: bool, as_json: bool) -> None:
    """Put ready-made scripts into their folders: ftsupervise cron add watch-all

    Without a name it lists them.
    """
    from ftsupervise.crontab.install import add as put
    from ftsupervise.crontab.install import builtin_scripts
    from ftsupervise.crontab.installation import need_installed

    if not names and as_json:
        answer(scripts=[{"name": one.name, "folder": one.folder, "about": one.about} for one in builtin_scripts()])
        return
    if not names:
        for one in builtin_scripts():
            click.echo(f"{one.name:18}  cron.{one.folder:9}  {one.about}")
        return
    place = _place(directory)
    need_installed(place)
    added = []
    for name in names:
        added.append({"name": name, "path": None if dry_run else put(place, name, folder)})
        if not as_json:
            click.echo(f"would add {name}" if dry_run else f"added {added[-1]['path']}")
    if as_json:
        answer(directory=place.root, dry_run=dry_run, added=added)


@cron.command(short_help="What ran, how late, how it ended.")
@DIR
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
def status(directory: Path | None, as_json: bool) -> None:
    """Show whether it is alive, what ran and how it ended, how late slots come, and which were missed.

    Exit code 2 when it is dead or was never started, 1 when its slots come late, 3 when that is unknown.
    """
    from ftsupervise.crontab.installation import need_installed
    from ftsupervise.crontab.status import gather

    place = _place(directory)
    installed = need_installed(place)
    slurm = slurm_of(installed.environment) if installed.backend == "slurm" else None
    seen = gather(place, installed, slurm, utc_now())
    for line in status_as_json(seen) if as_json else status_lines(seen):
        click.echo(line)
    raise SystemExit({"DEAD": 2, "UNSTARTED": 2, "LATE": 1, "UNKNOWN": 3}.get(seen.verdict, 0))


@cron.command(short_help="Stop keeping time.")
@DIR
@DRY
@JSON
def remove(directory: Path | None, dry_run: bool, as_json: bool) -> None:
    """Stop keeping time: cancel its jobs, or take its lines out of your table. Folders, files and outputs stay."""
    from ftsupervise.crontab.install import remove as carry_out
    from ftsupervise.crontab.installation import need_installed

    place = _place(directory)
    installed = need_installed(place)
    if dry_run:
        if as_json:
            answer(directory=place.root, dry_run=True, kept_by=installed.backend)
            return
        what = "cancel its jobs" if installed.backend == "slurm" else f"take its lines out of your {installed.backend}"
        click.echo(f"would mark {place.root} as removed and {what}; folders, files and outputs stay")
        return
    slurm = slurm_of(installed.environment) if installed.backend == "slurm" else None
    done = carry_out(place, installed, utc_now(), slurm)
    _sign_off(installed.id)
    if as_json:
        answer(directory=place.root, dry_run=False, cancelled=done.cancelled, left=done.left or None)
        return
    click.echo(f"cron in {place.root} is removed; its folders stay")
    if done.cancelled:
        click.echo(f"  cancelled  {' '.join(done.cancelled)}")
    if done.left:
        click.echo(f"  note: jobs may be left in the queue ({done.left}); they do nothing when they start")


def _sign_off(cron: str) -> None:
    """Take down the pages of the watches that this cron has run: nobody need miss them. Best effort."""
    from ftsupervise.probe.errand import within
    from ftsupervise.rundir.heartbeat_page import remove_watchers
    from ftsupervise.rundir.paths import RunDir, state_dir

    def go() -> None:
        for run in (state_dir() / "runs").iterdir():
            remove_watchers(RunDir(run.resolve()), f"cron-{cron}-")

    try:
        within(5.0, go)
    except OSError:  # no run was ever launched, or their storage does not answer: the others say which file to remove
        return


@cron.command(short_help="Run one entry now; or keep time here.")
@click.argument("name", required=False, type=Named(_entries))
@DIR
@click.option("--foreground", is_flag=True, help="Keep time in this terminal: a tick at every slot, until stopped.")
@click.option("--again", is_flag=True, help="Start it even while it runs already.")
@DRY
@JSON
def run(name: str | None, directory: Path | None, foreground: bool, again: bool, dry_run: bool, as_json: bool) -> None:
    """Run the entry NAME now ("hourly/disk", or "disk"), as a slot would: its environment, its bound, its record.

    With --foreground: keep time here, where there is neither Slurm nor crontab, or to try things.
    """
    from ftsupervise.errors import UsageError

    if foreground == (name is not None):
        raise UsageError("name an entry, or say --foreground", hint="ftsupervise cron list shows the entries")
    if foreground and as_json:
        raise UsageError("--json is for one entry, and --foreground goes on", hint="ftsupervise cron status --json")
    if foreground:
        loop(_place(directory), dry_run)
    else:
        assert name is not None
        run_one(_place(directory), name, again=again, dry_run=dry_run, as_json=as_json)


@cron.command(short_help="Bring the chain back if it is dead.")
@DIR
@click.option(
    "--run", "run_dir", metavar="RUN", help="For this run: notify its receivers when it cannot be brought back."
)
@click.option("--at-last", is_flag=True, hidden=True, help="The run's job ends: ask the queue even while slots come.")
@DRY
@JSON
def ensure(directory: Path | None, run_dir: str | None, at_last: bool, dry_run: bool, as_json: bool) -> None:
    """Bring the chain back if it is dead. Harmless at any time; launch and running jobs do it too.

    Exit code 0 when it lives, 2 when it does not, 69 when that is unknown.
    """
    from ftsupervise.crontab.chain import options
    from ftsupervise.crontab.entries import slots_after
    from ftsupervise.crontab.installation import need_installed
    from ftsupervise.crontab.keepalive import see_to
    from ftsupervise.truth import Health

    codes = {Health.OK: 0, Health.BAD: 2, Health.UNKNOWN: 69}
    if run_dir is not None and not dry_run:
        found = _for_run(run_dir, thorough=at_last)
        if as_json:
            answer(health=None if found is None else found.health, finding=found)
            raise SystemExit(codes[found.health] if found is not None else 0)
        click.echo(found.summary if found is not None else "there is no cron to look after")
        raise SystemExit(codes[found.health] if found is not None else 0)
    place = _place(directory)
    installed = need_installed(place)
    if dry_run:
        coming = slots_after(utc_now(), installed.period, installed.spares)
        lines = [f"TZ=UTC0 sbatch --parsable {' '.join(options(installed, slot))} {place.script}" for slot in coming]
        if as_json:
            answer(directory=place.root, dry_run=True, would_submit=lines)
            return
        click.echo("would ask squeue once and submit what is missing of:")
        for line in lines:
            click.echo(f"  {line}")
        return
    state = see_to(place.root, slurm_of(installed.environment), utc_now(), thorough=True)
    if as_json:
        answer(directory=place.root, dry_run=False, state=state)
    else:
        click.echo(state.words)
    raise SystemExit(codes[state.health])


@cron.command(hidden=True)
@DIR
@click.option("--slot", type=int, help="The slot this job was made for, in seconds since the epoch.")
def tick(directory: Path | None, slot: int | None) -> None:
    """Run one slot; every back end calls this."""
    made_for = datetime.fromtimestamp(slot, timezone.utc) if slot is not None else None
    done = tick_once(answering_place(directory), made_for)
    for line in (*done.trouble, *done.notified) if done is not None else ():
        click.echo(line, err=True)


# ------------------------------------------------------------------------------------------------------------- parts


def _place(directory: Path | None) -> CronDir:
    from ftsupervise.config.find_run import cron_directory
    from ftsupervise.crontab.installation import CronDir

    return CronDir(cron_directory(directory))


def _for_run(name: str, *, thorough: bool) -> Finding | None:
    from ftsupervise.cli.config import load_settings
    from ftsupervise.config.find_run import find_run
    from ftsupervise.crontab.keepalive import look_after_for

    settings = load_settings(find_run(name).config)
    return look_after_for(settings, slurm_of(os.environ), utc_now(), thorough=thorough)


def _plan(config: Path | None, given: Mapping[str, object], period: str | None, *, dry_run: bool) -> InstallPlan:
    """The settings of the file that counts, with the options over them. Raises NotTrusted for one that others may write."""
    from ftsupervise.cli.config import settings_to_act_on
    from ftsupervise.config.find_run import CONFIG_NAME, names_in
    from ftsupervise.config.load import load_account
    from ftsupervise.config.sources import outer_files
    from ftsupervise.crontab.install import decide
    from ftsupervise.errors import UsageError
    from ftsupervise.units import parse_duration

    path = config if config is not None else Path(CONFIG_NAME)
    if config is not None or path.is_file():
        hint = (
            f"if it is yours: chmod go-w {to_type(path)}; elsewhere your own config.yaml counts: "
            "cd && ftsupervise cron install"
        )
        loaded = settings_to_act_on(path, "cron install", run=(names_in(path) or ("",))[0], dry_run=dry_run, hint=hint)
        settings, alerts, origin = loaded.cron, loaded.alerts, str(path.absolute())
    else:
        account = load_account()
        settings, alerts, origin = account.cron, account.alerts, str(outer_files(os.environ)[0])
    changes = {key: value for key, value in given.items() if value is not None}
    if period is not None:
        try:
            changes["period"] = parse_duration(period)
        except ValueError as error:
            raise UsageError(f"--period: {error}") from None
        if changes["period"] < timedelta(seconds=1) or changes["period"] % timedelta(seconds=1):  # type: ignore[operator]
            raise UsageError("--period: whole seconds, at least one", hint='such as "5m"')
    for key in ("partition", "account"):
        value = changes.get(key)
        if isinstance(value, str) and not all(c.isalnum() or c in "_.+@,-" for c in value):
            raise UsageError(f"--{key}: {value!r} is not a name")
    return decide(
        settings.model_copy(update=changes),
        alerts,
        alerts_from=origin,
        now=utc_now(),
        env=os.environ,
        python=sys.executable,
    )


def _of(plan: InstallPlan) -> dict[str, object]:
    installed = plan.installed
    return {"directory": plan.cron.root, "kept_by": installed.backend, "why": installed.why, "period": installed.period}


def _answer_dry_run(plan: InstallPlan) -> None:
    answer(**_of(plan), dry_run=True, script=plan.script or None, lines=plan.lines or None, notes=plan.notes)


def _show(plan: InstallPlan) -> None:
    from ftsupervise.crontab.chain import options
    from ftsupervise.crontab.entries import slots_after

    root, installed = plan.cron.root, plan.installed
    click.echo(f"would make {root} with cron.minutely, cron.hourly, cron.daily, cron.weekly, crontab and state")
    click.echo(f"kept by {installed.why}; times are in {installed.timezone}")
    if plan.script:
        click.echo(f"\n# {plan.cron.script}\n{plan.script}")
        for slot in slots_after(utc_now(), installed.period, installed.spares):
            click.echo(f"TZ=UTC0 sbatch --parsable {' '.join(options(installed, slot))} {plan.cron.script}")
    if plan.lines:
        click.echo(f"\n# into your {installed.backend}\n{plan.lines}")
    click.echo(f"\nentries will see: {' '.join(sorted(installed.environment))}")
    for note in plan.notes:
        click.echo(f"note: {note}", err=True)
    click.echo("dry run: nothing was changed, and Slurm was not asked", err=True)


# ------------------------------------------------------------------------------------------
# The output of ``cron status`` and ``cron list``, line by line, and the ticks that are made in a terminal.

_COLOURS = {
    "ALIVE": "green",
    "WAITING": "yellow",
    "UNSTARTED": "red",
    "LATE": "yellow",
    "UNKNOWN": "yellow",
    "DEAD": "red",
    "REMOVED": "cyan",
}


def local_time(at: datetime, installed: Installed) -> str:
    """Return a time as the crontab file means it."""
    return at.astimezone(installed.zone).strftime("%Y-%m-%d %H:%M:%S" if at.second else "%Y-%m-%d %H:%M")


def status_lines(seen: CronStatus) -> Iterator[str]:
    """Yield the verdict first, then its grounds."""
    installed = seen.installed
    head = click.style(seen.verdict, fg=_COLOURS.get(seen.verdict, "cyan"), bold=True)
    yield f"cron in {seen.cron.root}: {head}{_why(seen)}"
    yield f"  kept by   {installed.why}"
    period = show_duration(installed.period.total_seconds())
    coming = f", next {local_time(seen.next_slot, installed)}" if seen.next_slot else ""
    yield f"  slots     every {period}{coming} ({installed.timezone})"
    yield from _slot_lines(seen)
    if seen.chain is not None:
        chain = seen.chain
        more = [f"{len(chain.ahead)} wait for their slots", f"{chain.running} running"]
        more += [f"{chain.overdue} overdue"] if chain.overdue else []
        more += [f"{len(chain.held)} held: scontrol release {' '.join(chain.held)}"] if chain.held else []
        yield f"  jobs      {', '.join(more)}"
    elif seen.blind:
        yield f"  jobs      unknown: {seen.blind}"
    if seen.drained:
        from ftsupervise.crontab.chain import drained_words

        yield f"  nodes     {drained_words(seen.drained)} (sinfo -R)"
    for words in seen.warnings:
        yield f"  note      each command of Slurm warns: {words}"
    for entry in seen.entries:
        yield from _entry_lines(entry, seen)
    for passed in seen.passed:
        yield f"  {passed.name}: passed over: {passed.why}"
    if not seen.entries:
        yield f"  nothing to run yet: drop an executable or a .slurm file into {seen.cron.folder('hourly')}"


def _why(seen: CronStatus) -> str:
    if seen.verdict == "REMOVED":
        return f" {seen.installed.removed}"
    where = f"--dir {shlex.quote(str(seen.cron.root))}"
    start = f": ftsupervise cron run --foreground {where}" if seen.installed.backend == "loop" else ""
    if seen.verdict == "UNSTARTED":
        return f", its loop was never started{start}"
    last = seen.newest
    said = ", no slot yet"
    if last is not None:
        said = f", last slot {show_duration(max(0.0, (seen.at - last).total_seconds()))} ago"
    if seen.verdict != "DEAD":
        return said
    lost = f" ({seen.lost_lines})" if seen.lost_lines else ""
    return f"{said}{lost}{start or f': ftsupervise cron ensure {where}'}"


def _slot_lines(seen: CronStatus) -> Iterator[str]:
    slots = seen.slots
    if not slots.known:
        return
    parts = [f"{len(slots.known)} of the last {max(slots.expected, len(slots.known))} came"]
    if slots.missed:
        newest = ", ".join(local_time(at, seen.installed) for at in slots.missed[-3:])
        parts.append(f"{len(slots.missed)} missed (last: {newest})")
    if slots.died:
        parts.append(f"{len(slots.died)} cut off")
    if slots.lates:
        worst = max(slots.lates)
        parts.append(f"late by {show_duration(slots.lates[-1])} now, {show_duration(worst)} at worst")
    yield f"            {'; '.join(parts)}"


def _entry_lines(entry: EntryStatus, seen: CronStatus) -> Iterator[str]:
    installed = seen.installed
    coming = local_time(entry.next, installed) if entry.next else "never"
    last, current = entry.last, entry.current
    word = click.style(entry.word, fg={"ok": "green", "failed": "red", "cut off": "red"}.get(entry.word, "yellow"))
    if last is None and current is None:
        yield f"  {entry.entry.name}: has not run yet; next {coming}"
        return
    if last is None:
        yield f"  {entry.entry.name}: {word}; next {coming}"
    else:
        took = f" in {show_duration(last.end.seconds)}" if last.end.seconds >= 0.05 else ""
        late = f", {show_duration(last.start.late)} late" if last.start.late >= 1 else ""
        missed = f", after {last.start.missed} missed slots" if last.start.missed else ""
        how = last.end.words or "its tick was killed"
        when = local_time(last.began, installed)
        yield f"  {entry.entry.name}: {word}; last {when}: {how}{took}{late}{missed}; next {coming}"
    if current is not None:
        job = (
            f" as job {current.start.job_id}"
            if current.start.job_id
            else f" on {current.start.host}"
            if current.start.host
            else ""
        )
        yield f"      runs since {local_time(current.began, installed)}{job}"
    newest = entry.runs[0]
    if newest not in (last, current):
        yield f"      {local_time(newest.at, installed)}: {newest.end.words}"
    for run in (last, current):
        if run is not None:
            yield f"      output: {run.output}"


def status_as_json(seen: CronStatus) -> Iterator[str]:
    """One JSON object."""
    slots = seen.slots
    chain = dataclasses.asdict(seen.chain) if seen.chain is not None else None
    yield json.dumps(
        {
            "schema_version": 1,
            "verdict": seen.verdict,
            "directory": str(seen.cron.root),
            "backend": seen.installed.backend,
            "period": seen.installed.period.total_seconds(),
            "next_slot": seen.next_slot,
            "slots": {
                "known": len(slots.known),
                "expected": slots.expected,
                "missed": slots.missed,
                "cut_off": [slot.at for slot in slots.died],
                "last": slots.last.at if slots.last else None,
                "late": slots.lates[-1] if slots.lates else None,
                "worst_late": max(slots.lates, default=None),
            },
            "drained": seen.drained,
            "lost_lines": seen.lost_lines,
            "chain": chain,
            "blind": seen.blind,
            "entries": [_entry_json(entry) for entry in seen.entries],
            "passed_over": [dataclasses.asdict(passed) for passed in seen.passed],
        },
        default=lambda value: value.isoformat() if isinstance(value, datetime) else str(value),
        indent=1,
    )


def _entry_json(entry: EntryStatus) -> dict[str, object]:
    return {
        "name": entry.entry.name,
        "schedule": entry.entry.schedule.text,
        "next": entry.next,
        "state": entry.word,
        "last": _run_json(entry.last),
        "running": _run_json(entry.current),
        "runs": [{"at": run.at, "outcome": run.end.outcome, "words": run.end.words} for run in entry.runs],
    }


def _run_json(run: EntryRun | None) -> dict[str, object] | None:
    if run is None:
        return None
    return {
        "at": run.began,
        "slot": run.at,
        "late": run.start.late,
        "seconds": run.end.seconds,
        "code": run.end.code,
        "words": run.end.words,
        "job_id": run.start.job_id,
        "output": str(run.output),
    }


def entry_lines(found: CronEntries, installed: Installed, now: datetime) -> Iterator[str]:
    """Yield the output of ``cron list``: what runs when, and what is passed over."""
    from ftsupervise.crontab.status import next_slot

    for entry in found.entries:
        coming = next_slot(entry, installed, now)
        when = local_time(coming, installed) if coming else "never"
        yield f"{entry.name:32}  {entry.schedule.text:14}  next {when}  {_program(entry)}"
    for passed in found.passed:
        yield f"{passed.name:32}  passed over: {passed.why}"


def entries_as_json(found: CronEntries, installed: Installed, now: datetime) -> Iterator[str]:
    """Yield the output of ``cron list --json``: one JSON object."""
    from ftsupervise.crontab.status import next_slot

    entries = []
    for entry in found.entries:
        coming = next_slot(entry, installed, now)
        due = coming.isoformat() if coming else None
        entries.append({"name": entry.name, "schedule": entry.schedule.text, "next": due, "runs": _program(entry)})
    passed = [{"name": one.name, "why": one.why} for one in found.passed]
    yield json.dumps({"schema_version": 1, "entries": entries, "passed_over": passed}, indent=1, ensure_ascii=False)


def _program(entry: CronEntry) -> str:
    return str(entry.path) if entry.path else entry.argv[-1]


# A tick, one entry by hand, the loop in a terminal.


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


def slurm_of(env: Mapping[str, str]) -> Slurm:
    from ftsupervise.scheduler.slurm import Slurm

    return Slurm(env)


def queue_of(env: Mapping[str, str]) -> Scheduler:
    from ftsupervise.scheduler import open_scheduler

    return open_scheduler("auto", env)


_HOME = 4.0  # seconds for a home directory to answer
_ANSWER = 15.0  # seconds in which the folder of a cron must answer before a slot of it begins


def answering_place(directory: Path | None) -> CronDir:
    """Return the installed folder, once a child has read it as a slot does. Raises NoAnswer where it hangs: no slot begins
    then, and while that child hangs none is sent after it. A slot that hangs could not be ended, and each would leave one more.
    """
    from ftsupervise.config.find_run import cron_directory
    from ftsupervise.crontab import ENV_DIR
    from ftsupervise.crontab.entries import find
    from ftsupervise.crontab.installation import CronDir, read_installed
    from ftsupervise.errors import NoAnswer
    from ftsupervise.probe.errand import within

    def read() -> str:
        place = CronDir(cron_directory(directory))
        installed = read_installed(place)
        if installed is not None:
            find(place, installed)
        return str(place.root)

    where = directory or os.environ.get(ENV_DIR) or "the folder of the cron"
    try:
        return CronDir(Path(within(_ANSWER, read, key=f"cron {where}")))
    except TimeoutError as error:
        raise NoAnswer(f"{where}: {error}", hint="no slot was begun; the next one tries again") from None


def answers(home: Path) -> bool:
    """Return whether a home directory is there and its file system answers; an entry begins in ``/`` otherwise."""
    from ftsupervise.probe.errand import within

    try:
        return bool(within(_HOME, home.is_dir, key=f"home {home}"))
    except TimeoutError:
        return False


def tick_once(place: CronDir, slot: datetime | None) -> CronTicked | None:
    from ftsupervise.crontab.installation import read_installed
    from ftsupervise.crontab.tick import tick as make

    installed = read_installed(place)
    for name, value in (installed.whole_environment if installed is not None else {}).items():
        os.environ.setdefault(
            name, value
        )  # receivers need the proxy; a tick of crontab, or of Slurm, has only some of these variables
    return make(
        place,
        slot=slot,
        now=utc_now(),
        job_id=os.environ.get("SLURM_JOB_ID", ""),
        slurm=slurm_of,
        jobs=queue_of,
        answers=answers,
    )


def run_one(place: CronDir, name: str, *, again: bool, dry_run: bool, as_json: bool) -> None:
    from ftsupervise.crontab.dispatch import CronSlot, entry_called, run_now
    from ftsupervise.crontab.installation import need_installed
    from ftsupervise.errors import Error

    installed = need_installed(place)
    entry = entry_called(place, installed, name)
    if dry_run and as_json:
        answer(entry=entry.name, dry_run=True, kind=entry.kind, argv=entry.argv)
        return
    if dry_run:
        click.echo(f"would {'submit' if entry.kind.value == 'job' else 'run'} {' '.join(entry.argv)}")
        return
    at = utc_now()
    queue = None
    if entry.kind.value == "job":
        try:
            queue = queue_of(installed.environment).queue()
        except Error:
            queue = None  # so that no run starts beside an earlier one that may still go on
    scheduler = partial(queue_of, installed.environment)
    slot = CronSlot(place, installed, at.replace(microsecond=0), at, "", queue, scheduler, answers=answers)
    done = run_now(slot, entry, again=again, echo=_to_nobody if as_json else _to_terminal)
    if as_json:
        answer(entry=entry.name, dry_run=False, code=done.code, words=done.words, output=done.folder)
        raise SystemExit(done.code)
    click.echo(f"{entry.name}: {done.words}; output in {done.folder}", err=True)
    raise SystemExit(done.code)


def _to_nobody(data: bytes) -> None:
    """Show nothing: a program is told the folder in which the output is."""


def _to_terminal(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def loop(place: CronDir, dry_run: bool) -> None:
    from ftsupervise.cli.watch import stop_on_signals
    from ftsupervise.crontab.entries import slots_after
    from ftsupervise.crontab.installation import need_installed
    from ftsupervise.errors import Error

    installed = need_installed(place)
    if dry_run:
        for slot in slots_after(utc_now(), installed.period, 5):
            click.echo(f"would tick at {local_time(slot, installed)}")
        return
    stopping = stop_on_signals()
    period = show_duration(installed.period.total_seconds())
    click.echo(f"cron: a tick every {period} in {place.root}; Ctrl-C stops it", err=True)
    while not stopping:
        slot = slots_after(utc_now(), installed.period, 1)[0]
        while not stopping and utc_now() < slot:
            time.sleep(min(0.5, max(0.0, (slot - utc_now()).total_seconds())))
        if stopping:
            break
        try:
            done = tick_once(place, slot)
        except (Error, OSError) as error:  # a file system that is away for a while must not end the keeping of time
            click.echo(f"{local_time(slot, installed)} {error}", err=True)
            continue
        if done is None:
            click.echo("cron: removed", err=True)
            return
        for line in (*(f"ran {name}" for name in done.worked.ran), *done.trouble, *done.notified):
            click.echo(f"{local_time(done.slot, installed)} {line}")  # a late tick works for a later slot
    click.echo("cron: stopped", err=True)
