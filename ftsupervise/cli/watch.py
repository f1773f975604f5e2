"""``ftsupervise watch``: one tick over one or many runs, or a tick every so often."""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.model import Finding
    from ftsupervise.watch.tick import Ticked, Told


def _duration(_ctx: click.Context, _param: click.Parameter, value: str | None) -> timedelta | None:
    from ftsupervise.units import parse_duration

    if value is None:
        return None
    try:
        every = parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if every <= timedelta(0):
        raise click.BadParameter("longer than nothing, please")
    return every


@click.command()
@click.argument("runs", nargs=-1)
@click.option("--every", callback=_duration, metavar="TIME", help="Go on, a tick each TIME (60s, 5m), until stopped.")
@click.option("--only", multiple=True, metavar="WATCHDOG", help="This watchdog only; may be given several times.")
@click.option("--no-send", is_flag=True, help="Write down what changed, but send nothing this time.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what changed.")
def watch(runs: tuple[str, ...], every: timedelta | None, only: tuple[str, ...], no_send: bool, quiet: bool) -> None:
    """Look at RUNS (directories, ftsupervise.yaml files or names; default: ./ftsupervise.yaml) from outside their jobs.

    One look at the queue for all of them, every watchdog of each, then the messages that follow: when something is
    wrong, again after a while, and when it is over. One tick ends with 0 ok, 1 warning, 2 critical, 3 could not see.
    """
    from ftsupervise.errors import Error, UsageError
    from ftsupervise.watch.watchdogs import WATCHDOGS

    for name in only:
        if name not in WATCHDOGS:
            raise UsageError(f"--only: no watchdog is called {name!r}", hint=f"there are: {', '.join(WATCHDOGS)}")
    roster = Roster(runs or (None,))
    if len(roster.names) == 1:
        roster.load_one()  # what is wrong with the only run is said at once, with its exit code
    stopping = _stop_on_signals() if every else None
    while True:
        started = time.monotonic()
        roster.refresh()
        if every is None or stopping is None:
            done = _tick(roster, only, every, send=not no_send)
            _print(done, quiet=quiet)
            if not no_send:
                _relieve(done)
            raise SystemExit(_exit_code(done))
        try:
            done = _tick(roster, only, every, send=not no_send)
            _print(done, quiet=quiet)
            if not no_send:
                _relieve(done)
        except (Error, OSError) as error:  # a full disk for an hour must not be the end of the watch
            click.echo(f"watch: this tick failed, the next one is tried: {error}", err=True)
        while not stopping and time.monotonic() - started < every.total_seconds():
            time.sleep(min(0.2, every.total_seconds()))
        if stopping:
            roster.take_leave()
            click.echo("watch: stopped", err=True)
            return


class Roster:
    """The runs that are watched, their settings read anew when their files change. One that cannot be read is told
    (``trouble``) and keeps the settings it had; it does not blind the others."""

    def __init__(self, names: tuple[str | None, ...]) -> None:
        self.names = names
        self.trouble: dict[str, str] = {}  # by run: why its settings cannot be read, "" if they can
        self._known: dict[str | None, tuple[Path, object, Run]] = {}

    @property
    def runs(self) -> list[Run]:
        return [run for _, _, run in self._known.values()]

    def take_leave(self) -> None:
        """Stopped on purpose: the guards and the other watchers need not miss this one."""
        from ftsupervise.rundir import RunDir
        from ftsupervise.watchers import leave

        for run in self.runs:
            leave(RunDir(str(run.run_dir)))

    def load_one(self) -> None:
        """Raises what is wrong with the first run."""
        name = self.names[0]
        path = settings_of(name)
        self._known[name] = (path, _stamp(path), load_settings(path))

    def refresh(self) -> None:
        from ftsupervise.errors import Error
        from ftsupervise.probe import NotSeen, Probe

        self.trouble = {name or "this directory": "" for name in self.names}
        with Probe() as probe:
            for name in self.names:
                label = name or "this directory"
                known = self._known.get(name)
                place = known[0] if known else Path(name or ".")
                look = probe.look(str(place.absolute()))
                if isinstance(look, NotSeen) and look.hung:
                    self.trouble[label] = f"its storage does not answer: {look.sentence}"
                    continue
                try:
                    path = known[0] if known else settings_of(name)
                    stamp = _stamp(path)
                    if known is None or known[1] != stamp:
                        self._known[name] = (path, stamp, load_settings(path))
                except Error as error:
                    self.trouble[label] = error.message
                except OSError as error:
                    self.trouble[label] = str(error)


def _stamp(path: Path) -> object:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def load_settings(path: Path) -> Run:
    from ftsupervise.config.load import load

    return load(path)


def settings_of(name: str | None) -> Path:
    """The file with a run's settings: as launched if it was launched, else the one that is named."""
    from ftsupervise.config.locate import CONFIG_NAME, find_run
    from ftsupervise.errors import NotFound

    path = Path(name if name is not None else CONFIG_NAME)
    if path.is_file():
        return path
    if name is not None and (path / CONFIG_NAME).is_file():
        return path / CONFIG_NAME
    rundir = find_run(name)
    if not rundir.config.is_file():
        raise NotFound(
            f"{rundir.root} was not made by launch: it has no run.yaml", hint="name its ftsupervise.yaml instead"
        )
    return rundir.config


def _tick(roster: Roster, only: tuple[str, ...], every: timedelta | None, *, send: bool) -> Ticked:
    from ftsupervise.config.locate import state_dir
    from ftsupervise.scheduler import kind_of, open_scheduler
    from ftsupervise.watch.tick import tick

    kinds = dict.fromkeys(kind_of(run.scheduler) for run in roster.runs)
    return tick(
        roster.runs,
        {kind: open_scheduler(kind) for kind in kinds},
        datetime.now(timezone.utc),
        state=state_dir(),
        env=os.environ,
        only=only,
        send=send,
        roster=roster.trouble,
        every=every,
    )


def _relieve(done: Ticked) -> None:
    if not done.waiting:
        return
    from ftsupervise.cli.relief import relieve

    for run in done.waiting:
        for sentence in relieve(run, done.at):
            click.echo(f"{done.at.astimezone():%H:%M:%S} {run.name}: it waits; {sentence}")


def _print(done: Ticked, *, quiet: bool) -> None:
    from ftsupervise.model import Health

    stamp = done.at.astimezone().strftime("%H:%M:%S")
    for told in done.runs:
        bad = [f for f in (*told.findings, *_own_trouble(told)) if f.health is Health.BAD]
        unseen = [f for f in told.findings if f.health is Health.UNKNOWN]
        for notice in told.notices:
            click.echo(f"{stamp} {told.name}: {notice.reason.value}: {notice.finding.summary}")
        for summary in told.events:
            click.echo(f"{stamp} {told.name}: {summary}")
        if quiet:
            continue
        if bad or unseen:
            for finding in (*bad, *unseen):
                click.echo(f"{stamp} {told.name}: {finding.health.value}: {finding.watchdog}: {finding.summary}")
        else:
            click.echo(f"{stamp} {told.name}: ok ({len(told.findings)} looks)")
    for message, error in done.delivered.failed:
        click.echo(f"{stamp} not delivered to {message.receiver}: {error} (it is tried again)", err=True)
    for line in done.trouble:
        click.echo(f"{stamp} {line}", err=True)


def _own_trouble(told: Told) -> list[Finding]:
    """That telling itself is in trouble is found while it tells, so it does not stand among the findings."""
    from ftsupervise.alerts.trouble import JOURNAL, RECEIVER

    return [alert.finding for alert in told.firing if alert.finding.watchdog in (JOURNAL, RECEIVER)]


def _exit_code(done: Ticked) -> int:
    """Nagios: the worst of what was found; 3 only if nothing is known to be bad and something could not be seen."""
    from ftsupervise.model import Health, Severity

    findings = [finding for told in done.runs for finding in (*told.findings, *_own_trouble(told))]
    bad = [finding.severity for finding in findings if finding.health is Health.BAD]
    if bad:
        return 2 if max(bad) >= Severity.CRITICAL else 1
    return 3 if any(finding.health is Health.UNKNOWN for finding in findings) else 0


def _stop_on_signals() -> list[int]:
    """A list that fills when somebody asks this loop to stop."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _frame: asked.append(n))
    return asked
