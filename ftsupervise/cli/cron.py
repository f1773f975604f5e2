"""``ftsupervise cron``: install the crontab emulation, show what runs, remove it."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftsupervise.cli import cron_output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ftsupervise.crontab.install import InstallPlan
    from ftsupervise.crontab.installation import CronDir
    from ftsupervise.findings import Finding

# Not click.Path, which looks at the path at once: a slot is to look in a child first.
DIR = click.option("--dir", "directory", type=Path, help="The installed folder.")
DRY = click.option(
    "-n", "--dry-run", is_flag=True, help="Show what would be done; change nothing and do not ask Slurm."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
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
def install(
    config: Path | None,
    directory: Path | None,
    backend: str | None,
    period: str | None,
    partition: str | None,
    account: str | None,
    dry_run: bool,
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
        _show(plan)
        return
    slurm = cron_output.slurm(plan.installed.environment) if plan.installed.backend == "slurm" else None
    done = carry_out(plan, cron_output.now(), slurm)
    where = plan.cron.root
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
    if done.state is not None and done.state.health is Health.UNKNOWN:
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
    for line in (cron_output.entries_as_json if as_json else cron_output.entry_lines)(
        found, installed, cron_output.now()
    ):
        click.echo(line)
    if not as_json and not found.entries and not found.passed:
        click.echo(f"nothing yet: drop an executable into {place.folder('hourly')}")


@cron.command(short_help="Put a ready-made script into its folder.")
@click.argument("names", nargs=-1)
@click.option(
    "--folder",
    type=click.Choice(["minutely", "hourly", "daily", "weekly"]),
    help="The folder, instead of its usual one.",
)
@DIR
@DRY
def add(names: tuple[str, ...], folder: str | None, directory: Path | None, dry_run: bool) -> None:
    """Put ready-made scripts into their folders: ftsupervise cron add watch-all

    Without a name it lists them.
    """
    from ftsupervise.crontab.install import add as put
    from ftsupervise.crontab.install import builtin_scripts
    from ftsupervise.crontab.installation import need_installed

    if not names:
        for one in builtin_scripts():
            click.echo(f"{one.name:18}  cron.{one.folder:9}  {one.about}")
        return
    place = _place(directory)
    need_installed(place)
    for name in names:
        click.echo(f"would add {name}" if dry_run else f"added {put(place, name, folder)}")


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
    slurm = cron_output.slurm(installed.environment) if installed.backend == "slurm" else None
    seen = gather(place, installed, slurm, cron_output.now())
    for line in cron_output.as_json(seen) if as_json else cron_output.lines(seen):
        click.echo(line)
    raise SystemExit({"DEAD": 2, "UNSTARTED": 2, "LATE": 1, "UNKNOWN": 3}.get(seen.verdict, 0))


@cron.command(short_help="Stop keeping time.")
@DIR
@DRY
def remove(directory: Path | None, dry_run: bool) -> None:
    """Stop keeping time: cancel its jobs, or take its lines out of your table. Folders, files and outputs stay."""
    from ftsupervise.crontab.install import remove as carry_out
    from ftsupervise.crontab.installation import need_installed

    place = _place(directory)
    installed = need_installed(place)
    if dry_run:
        what = "cancel its jobs" if installed.backend == "slurm" else f"take its lines out of your {installed.backend}"
        click.echo(f"would mark {place.root} as removed and {what}; folders, files and outputs stay")
        return
    slurm = cron_output.slurm(installed.environment) if installed.backend == "slurm" else None
    done = carry_out(place, installed, cron_output.now(), slurm)
    _sign_off(installed.id)
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
@click.argument("name", required=False)
@DIR
@click.option("--foreground", is_flag=True, help="Keep time in this terminal: a tick at every slot, until stopped.")
@click.option("--again", is_flag=True, help="Start it even while it runs already.")
@DRY
def run(name: str | None, directory: Path | None, foreground: bool, again: bool, dry_run: bool) -> None:
    """Run the entry NAME now ("hourly/disk", or "disk"), as a slot would: its environment, its bound, its record.

    With --foreground: keep time here, where there is neither Slurm nor crontab, or to try things.
    """
    from ftsupervise.errors import UsageError

    if foreground == (name is not None):
        raise UsageError("name an entry, or say --foreground", hint="ftsupervise cron list shows the entries")
    if foreground:
        cron_output.loop(_place(directory), dry_run)
    else:
        assert name is not None
        cron_output.run_one(_place(directory), name, again=again, dry_run=dry_run)


@cron.command(short_help="Bring the chain back if it is dead.")
@DIR
@click.option(
    "--run", "run_dir", metavar="RUN", help="For this run: notify its receivers when it cannot be brought back."
)
@DRY
def ensure(directory: Path | None, run_dir: str | None, dry_run: bool) -> None:
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
        found = _for_run(run_dir)
        click.echo(found.summary if found is not None else "there is no cron to look after")
        raise SystemExit(codes[found.health] if found is not None else 0)
    place = _place(directory)
    installed = need_installed(place)
    if dry_run:
        click.echo("would ask squeue once and submit what is missing of:")
        for slot in slots_after(cron_output.now(), installed.period, installed.spares):
            click.echo(f"  TZ=UTC0 sbatch --parsable {' '.join(options(installed, slot))} {place.script}")
        return
    state = see_to(place.root, cron_output.slurm(installed.environment), cron_output.now(), thorough=True)
    click.echo(state.words)
    raise SystemExit(codes[state.health])


@cron.command(hidden=True)
@DIR
@click.option("--slot", type=int, help="The slot this job was made for, in seconds since the epoch.")
def tick(directory: Path | None, slot: int | None) -> None:
    """Run one slot; every back end calls this."""
    made_for = datetime.fromtimestamp(slot, timezone.utc) if slot is not None else None
    done = cron_output.tick(cron_output.answering_place(directory), made_for)
    for line in (*done.trouble, *done.notified) if done is not None else ():
        click.echo(line, err=True)


# ------------------------------------------------------------------------------------------------------------- parts


def _place(directory: Path | None) -> CronDir:
    from ftsupervise.config.find_run import cron_directory
    from ftsupervise.crontab.installation import CronDir

    return CronDir(cron_directory(directory))


def _for_run(name: str) -> Finding | None:
    from ftsupervise.cli.config import load_settings
    from ftsupervise.config.find_run import find_run
    from ftsupervise.crontab.keepalive import look_after_for

    return look_after_for(load_settings(find_run(name).config), cron_output.slurm(os.environ), cron_output.now())


def _plan(config: Path | None, given: Mapping[str, object], period: str | None, *, dry_run: bool) -> InstallPlan:
    """The settings of the file that counts, with the options over them. Raises NotTrusted for one that others may write."""
    from ftsupervise.cli.config import settings_to_act_on
    from ftsupervise.config.find_run import CONFIG_NAME
    from ftsupervise.config.load import load_account
    from ftsupervise.config.sources import outer_files
    from ftsupervise.crontab.install import decide
    from ftsupervise.errors import UsageError
    from ftsupervise.units import parse_duration

    path = config if config is not None else Path(CONFIG_NAME)
    if config is not None or path.is_file():
        hint = (
            f"if it is yours: chmod go-w {path}; elsewhere your own config.yaml counts: cd && ftsupervise cron install"
        )
        loaded = settings_to_act_on(path, "cron install", dry_run=dry_run, hint=hint)
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
        now=cron_output.now(),
        env=os.environ,
        python=sys.executable,
    )


def _show(plan: InstallPlan) -> None:
    from ftsupervise.crontab.chain import options
    from ftsupervise.crontab.entries import slots_after

    root, installed = plan.cron.root, plan.installed
    click.echo(f"would make {root} with cron.minutely, cron.hourly, cron.daily, cron.weekly, crontab and state")
    click.echo(f"kept by {installed.why}; times are in {installed.timezone}")
    if plan.script:
        click.echo(f"\n# {plan.cron.script}\n{plan.script}")
        for slot in slots_after(cron_output.now(), installed.period, installed.spares):
            click.echo(f"TZ=UTC0 sbatch --parsable {' '.join(options(installed, slot))} {plan.cron.script}")
    if plan.lines:
        click.echo(f"\n# into your {installed.backend}\n{plan.lines}")
    click.echo(f"\nentries will see: {' '.join(sorted(installed.environment))}")
    for note in plan.notes:
        click.echo(f"note: {note}", err=True)
    click.echo("dry run: nothing was changed, and Slurm was not asked", err=True)
