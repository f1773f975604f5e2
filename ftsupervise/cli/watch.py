"""``ftsupervise watch``: one tick over one or many runs, or a tick every so often."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING

import click

from ftsupervise.cli.names import RUN, WATCHDOG
from ftsupervise.cli.output import plain, say, say_json
from ftsupervise.units import count

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.findings import Finding
    from ftsupervise.model import Attempt
    from ftsupervise.rundir.paths import RunDir
    from ftsupervise.watch.roster import Roster, RunReport
    from ftsupervise.watch.tick import TickResult


_FIND = 8.0  # seconds to find the runs of sweeps


def _duration(_ctx: click.Context, _param: click.Parameter, value: str | None) -> timedelta | None:
    from ftsupervise.units import parse_duration

    if value is None:
        return None
    try:
        every = parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if every <= timedelta(0):
        raise click.BadParameter("give a time above zero")
    return every


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=RUN)
@click.option("--all", "everything", is_flag=True, help="Every run this account has launched.")
@click.option(
    "--every", callback=_duration, metavar="TIME", help="Repeat the check every TIME (60s, 5m), until stopped."
)
@click.option("--only", multiple=True, type=WATCHDOG, metavar="WATCHDOG", help="This watchdog only; may be repeated.")
@click.option("--no-send", is_flag=True, help="Record what changed, but send nothing this time.")
@click.option(
    "--trust", is_flag=True, help="Use settings of another account too, commands included; this is remembered."
)
@click.option("-q", "--quiet", is_flag=True, help="Print only what changed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --every one on a line, for each tick.")
def watch(
    runs: tuple[str, ...],
    everything: bool,
    every: timedelta | None,
    only: tuple[str, ...],
    no_send: bool,
    trust: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Check each RUN from outside its jobs. RUN is a directory, an ftsupervise.yaml, or a name; default:
    ./ftsupervise.yaml.

    It asks the queue once, runs every watchdog of each run, and sends the messages that follow: when something is
    wrong, again after a while, and when it is over. One tick ends with 0 ok, 1 warning, 2 critical, 3 could not see.
    """
    from ftsupervise.errors import Error, UsageError, did_you_mean
    from ftsupervise.watch.roster import Roster
    from ftsupervise.watch.watchdogs import installed, is_watchdog

    for name in only:
        if not is_watchdog(name):
            wrong = f"--only: no watchdog is called {name!r}{did_you_mean(name, installed())}"
            raise UsageError(wrong, hint=f"there are: {', '.join(installed())}")
    if everything and runs:
        raise UsageError("--all and names of runs do not go together", hint="leave one of them out")
    roster = Roster((None,) if everything else _each(runs) or (None,), trust=trust)
    shown = Shown()
    stopping = stop_on_signals() if every else None
    first = True
    while True:
        started = time.monotonic()
        try:
            if everything:
                _name_all(roster)
            done = _tick(roster, only, every, send=not no_send)
            if first and len(roster.names) == 1 and not everything:
                _refuse(done, named=bool(runs))
            if not quiet and not as_json:
                shown.warn(roster.runs)
            if as_json:
                _answer(done, one_line=every is not None)
            else:
                _print(done, shown, quiet=quiet)
            shown.not_used(roster)
            if every is None or stopping is None:
                raise SystemExit(_exit_code(done))
        except (Error, OSError) as error:  # a full disk for an hour must not be the end of the watch
            if first or every is None:
                raise
            say(f"watch: this tick failed, and the next one will be tried: {error}", err=True)
        first = False
        while not stopping and time.monotonic() - started < every.total_seconds():
            time.sleep(min(0.2, every.total_seconds()))
        if stopping:
            _sign_off(roster)
            say("watch: stopped", err=True)
            return


class Shown:
    """The lines that a repeating watch has printed: unchanged ones are not printed again at each tick."""

    def __init__(self) -> None:
        self._last: dict[str, object] = {}

    def new(self, about: str, what: object) -> bool:
        """Return whether it differs from the last line about this. It counts as printed from now on."""
        before, self._last[about] = self._last.get(about), what
        return before != what

    def warn(self, runs: Sequence[Run]) -> None:
        """Warn once of each run without a receiver."""
        from ftsupervise.alerts.receivers import without_receivers

        for run in runs:
            for sentence in without_receivers(run):
                if self.new(f"without_receivers {run.name} {run.run_dir}", sentence):
                    say(f"note: {sentence}", err=True)

    def not_used(self, roster: Roster) -> None:
        """Print settings of other accounts that are not used, once each."""
        for index, known in roster.known.items():
            if known.said and self.new(f"not used {roster.label(index)}", known.said):
                say("\n".join(known.said), err=True)


def _refuse(done: TickResult, *, named: bool) -> None:
    """Report an error in the settings of the only run at once, with its exit code."""
    from ftsupervise.errors import NotFound

    for index, run in enumerate(done.progress.runs):
        if run.error is not None:
            if isinstance(run.error, NotFound) and not named:
                run.error.hint = "; ".join(filter(None, (run.error.hint, "or all that you have launched: --all")))
            raise run.error
        if run.trouble:
            from ftsupervise.errors import NoAnswer

            label = done.progress.roster.label(index)
            raise NoAnswer(f"{label}: {run.trouble}", hint="nothing is known of this run until it answers")


def _each(runs: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``runs``, with those of a sweep in the place of its file. One that does not answer, or whose settings cannot be
    read, is left to the tick, which tells of it and watches the others."""
    from ftsupervise.probe.errand import within

    try:
        found: tuple[str, ...] = within(_FIND, partial(_in_place, runs), key=f"runs {' '.join(runs)}")
    except TimeoutError:
        return runs
    return found


def _in_place(runs: tuple[str, ...]) -> tuple[str, ...]:
    from ftsupervise.config.find_run import each_run
    from ftsupervise.errors import Error

    found: list[str] = []
    asked: list[tuple[str, ...]] = [(run,) for run in runs] or [()]
    for named in asked:
        try:
            found += each_run(named)
        except Error:
            found += named
    return tuple(found)


def _name_all(roster: Roster) -> None:
    """Name every run that this account has launched, by its state directory, or by the last answer of that."""
    from ftsupervise.errors import NoAnswer
    from ftsupervise.probe.errand import within
    from ftsupervise.rundir.paths import state_dir
    from ftsupervise.watch import roster as rosters

    roster.away = ""
    try:
        names: tuple[str, ...] = within(8.0, rosters.listed, key=rosters.state_key(state_dir()))
        rosters.forget_all_but(names)
    except TimeoutError as error:
        roster.away = f"{state_dir()} does not answer: {error}"
        names = tuple(sorted(rosters.directories()))
        if not names:
            raise NoAnswer(
                f"the list of your runs cannot be read: {roster.away}",
                hint="name the runs to be watched: their directories or ftsupervise.yaml files",
            ) from None
    roster.rename(names)


def _sign_off(roster: Roster) -> None:
    """Sign off: the guards and the other watchers need not miss this one."""
    from ftsupervise.probe.errand import within
    from ftsupervise.rundir.heartbeat_page import remove_watcher
    from ftsupervise.rundir.paths import RunDir

    def go() -> None:
        for run in roster.runs:
            remove_watcher(RunDir(str(run.run_dir)))

    try:
        within(5.0, go)
    except TimeoutError as error:
        say(f"watch: could not sign off from every run: {error}", err=True)


def _tick(roster: Roster, only: tuple[str, ...], every: timedelta | None, *, send: bool) -> TickResult:
    from ftsupervise.nodes.exclude import relieve
    from ftsupervise.report.day import about_run
    from ftsupervise.report.textfile import export
    from ftsupervise.rundir.paths import ENV_WATCHER, state_dir
    from ftsupervise.scheduler import open_scheduler
    from ftsupervise.watch.tick import tick
    from ftsupervise.watch.tour import TickOrders

    orders = TickOrders(
        now=datetime.now(timezone.utc),
        state=state_dir(),
        env=dict(os.environ),
        scheduler=open_scheduler,
        only=only,
        send=send,
        every=every or _of_the_crontab(),
        typed=ENV_WATCHER not in os.environ and (sys.stdin.isatty() or "SLURM_JOB_ID" in os.environ),
        relieve=relieve,
        draw=about_run,
        export=export,
        diagnose=_diagnose,
    )
    return tick(roster, orders)


def _diagnose(rundir: RunDir, attempts: Sequence[Attempt], seconds: float) -> None:
    from ftsupervise.diagnosis.kept import keep_within  # where something has failed

    keep_within(rundir, attempts, seconds)


def _of_the_crontab() -> timedelta | None:
    """Return how long it takes until the entry of our crontab that this is runs again; None if it is none."""
    from ftsupervise.rundir.paths import ENV_WATCH_EVERY

    seconds = os.environ.get(ENV_WATCH_EVERY, "")
    return timedelta(seconds=int(seconds)) if re.fullmatch("[1-9][0-9]{0,8}", seconds) else None


def _answer(done: TickResult, *, one_line: bool) -> None:
    """Print a tick for a program."""
    runs = [
        {
            "run": told.name,
            "checks": told.checks,
            "notices": told.notices,
            "events": told.events,
            "findings": told.findings,
        }
        for told in done.runs
    ]
    failed = [{"receiver": message.receiver, "why": error} for message, error in done.delivered.failed]
    delivered = {"sent": len(done.delivered.sent), "failed": failed, "waiting": done.delivered.waiting}
    whole = {"schema_version": 1, "at": done.at, "code": _exit_code(done), "runs": runs, "delivered": delivered}
    relief = [{"run": name, "did": sentence} for name, sentence in done.relief]
    say_json(plain({**whole, "relief": relief, "trouble": done.trouble}), one_line=one_line)


def _print(done: TickResult, shown: Shown, *, quiet: bool) -> None:
    from ftsupervise.truth import Health

    stamp = done.at.astimezone().strftime("%H:%M:%S")
    for told in done.runs:
        for notice in told.notices:
            say(f"{stamp} {told.name}: {notice.reason.value}: {notice.finding.summary}")
        for summary in told.events:
            say(f"{stamp} {told.name}: {summary}")
        bad = [f for f in (*told.findings, *_own_trouble(told)) if f.health is Health.BAD]
        unseen = [f for f in told.findings if f.health is Health.UNKNOWN]
        state = [f"{f.health.value}: {f.watchdog}: {f.summary}" for f in (*bad, *unseen)]
        if quiet or not shown.new(f"state {told.name}", state):
            continue
        for line in state or [f"ok ({count(told.checks, 'check')})"]:
            say(f"{stamp} {told.name}: {line}")
    for name, sentence in done.relief:
        say(f"{stamp} {name}: waiting; {sentence}")
    failed = [
        f"not delivered to {message.receiver}: {error} (it is tried again)" for message, error in done.delivered.failed
    ]
    for about, lines in (("delivery", failed), ("trouble", list(done.trouble))):
        if shown.new(about, lines):
            for line in lines:
                say(f"{stamp} {line}", err=True)


def _own_trouble(told: RunReport) -> list[Finding]:
    """Return problems of the delivery itself, which appear only during it and so are no findings."""
    from ftsupervise.alerts.self_monitor import JOURNAL, RECEIVER

    return [alert.finding for alert in told.firing if alert.finding.watchdog in (JOURNAL, RECEIVER)]


def _exit_code(done: TickResult) -> int:
    """Return Nagios's code: the worst finding; 3 only if nothing is known to be bad and something could not be seen."""
    from ftsupervise.findings import Severity
    from ftsupervise.truth import Health

    findings = [finding for told in done.runs for finding in (*told.findings, *_own_trouble(told))]
    bad = [finding.severity for finding in findings if finding.health is Health.BAD]
    if bad:
        return 2 if max(bad) >= Severity.CRITICAL else 1
    unseen = any(finding.health is Health.UNKNOWN for finding in findings)
    return 3 if unseen or not done.saw_all else 0


def stop_on_signals() -> list[int]:
    """Return a list that gets an item when this loop is asked to stop."""
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _frame: asked.append(n))
    return asked
