"""The work of a tick's child: everything that touches a disk which may be dead, or a service that may not answer.

Before each step the child says which run it is at, what it does, and how long that may take; it reports each thing it has done.
Its parent (``tick.py``) keeps the same ``TickProgress`` from these reports, so that another child can go on where one hung.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftsupervise.alerts.deliver import Delivered, deliver
from ftsupervise.alerts.journal import Journal, spare_of
from ftsupervise.alerts.last_day import AboutRun
from ftsupervise.alerts.outbox import JournalState, due
from ftsupervise.alerts.record import announce, record, was_announced
from ftsupervise.errors import Error
from ftsupervise.findings import EventKind, Finding, Notice, happened
from ftsupervise.host import files
from ftsupervise.host.in_time import in_time
from ftsupervise.host.ownership import as_page, held_to_write, make_folder, own_folder, user_name
from ftsupervise.model import OUTPUT, Attempt, CauseKind, FailureKind
from ftsupervise.printable import printable
from ftsupervise.probe import Probe
from ftsupervise.rundir import heartbeat_page, pinned
from ftsupervise.rundir.attempt_pages import NAMES, VerdictPage, read_page
from ftsupervise.rundir.launches import launches, people
from ftsupervise.rundir.ledger import backwards, ledger
from ftsupervise.rundir.observing import observed_alone
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.starting_over import PercentOver, StartOver, began_again, starts_over
from ftsupervise.rundir.switches import KILL, Finished, read_finished, read_switch
from ftsupervise.rundir.watched import MOST, FiringAlert, WatchFound, read_found, write_found
from ftsupervise.scheduler import SCHEDULERS
from ftsupervise.scheduler.ownership import own_job_ids
from ftsupervise.truth import Health, OnlyTold
from ftsupervise.units import count, show_duration
from ftsupervise.watch import checks
from ftsupervise.watch import roster as rosters
from ftsupervise.watch.checks import (
    QueueAnswer,
    RunLook,
    ask,
    look_at,
    queue_finding,
    rundir_of,
    settings_finding,
    write_memory,
)
from ftsupervise.watch.roster import (
    DirectoryFound,
    MessagesSent,
    MetricsWritten,
    NodesReleased,
    QueuesRead,
    RunChecked,
    RunDirChecked,
    RunIsNoMore,
    RunReport,
    SettingsRead,
    TickProgress,
    WatchedRun,
)

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.model import Job
    from ftsupervise.probe.errand import Say
    from ftsupervise.scheduler import Scheduler

_FORECAST_KEPT = timedelta(days=1)
_BACK = 20  # attempts of a group, back to one that has made a step
_NEWS = timedelta(days=1)  # a group that has come back before that is no news
_FIRST = 1  # the step, or the epoch, at which a loop begins
BOUND = 8.0  # seconds that a step on a user's disk may take
ASKING = 75.0  # … that the scheduler may take: its command is ended after 60
DRAWING = (
    3.0  # … that the picture of a run's last day may take of it: a message goes without one rather than not at all
)
DIAGNOSING = 10.0  # … that all verdicts about attempts that have failed may take of a tour, before any message goes
SENDING = 80.0  # … that a delivery may be silent: it ends after about 45, and the last message may take 20 more
RELIEVING = 150.0  # … that it may take to bring Slurm's lists up to date

FINDS, READS, STANDS = "find where it lies", "read its settings", "check its directory"
SENDS, RELIEVES, EXPORTS = "send its messages", "take nodes back for it", "write its metrics"
DIAGNOSES = "read why it failed"


@dataclass(frozen=True)
class TickOrders:
    """The orders of a tick: the same for all its children."""

    now: datetime
    state: Path
    env: Mapping[str, str]
    scheduler: Callable[[str], Scheduler]  # by the name that stands in the settings
    only: Sequence[str] = ()
    send: bool = True
    every: timedelta | None = None  # until the next tick, where that is known
    typed: bool = False  # by a person, once: nobody need miss the next one
    relieve: Callable[[Run, datetime], Sequence[str]] | None = None
    # the last day, to send with its messages
    draw: Callable[[RunDir, tuple[Job, ...] | None, datetime], AboutRun | None] | None = None
    export: Callable[[RunDir, tuple[Job, ...] | None, str, datetime, Path], Sequence[str]] | None = None  # its metrics
    # read why its newest attempts failed, in so many seconds, and keep that beside them
    diagnose: Callable[[RunDir, Sequence[Attempt], float], object] | None = None


# ------------------------------------------------------------------------------------------------------------- the way


class Tour:
    """The path of one child through the runs ``group``."""

    def __init__(self, orders: TickOrders, progress: TickProgress, group: Sequence[int], say: Say) -> None:
        self.orders, self.progress, self.group, self.say = orders, progress, group, say
        self.journals: dict[int, Journal] = {}
        self.looks: dict[int, RunLook] = {}
        self.jobs: dict[int, tuple[Job, ...] | None] = {}  # of the runs that were looked at
        self.stood: dict[int, tuple[int, int]] = {}  # of their directories, before these were judged
        self.context: list[Finding] = []  # what may explain a finding of any run
        self.idle: list[int] = []  # the runs that were looked at and have nothing to send
        self.own = own_folder()  # looked for once: it is the same for all
        self.diagnosing = DIAGNOSING  # seconds that are left for it

    def tell(self, event: Any) -> None:
        self.progress.apply(event)
        self.say.tell(event)

    def go(self) -> None:
        runs, known = self.progress.runs, self.progress.roster.known
        for index in self.group:
            if not runs[index].settled:
                self._settle(index)
        for index in self.group:
            if index in known and runs[index].storage is None:
                self._check_directory(index)
        if self._must_ask():
            self._ask()
        self.context = bad_in_general(self.progress, self.orders.now)
        with Probe(waits=self.say.waits) as probe:
            for index in self.group:
                if runs[index].report is None and self.progress.usable(index):
                    self._look(index, probe)
        if self.orders.send:
            self._send()
            self._relieve()
        self._export()

    def _settle(self, index: int) -> None:
        name, known = self.progress.roster.names[index], self.progress.roster.known.get(index)
        run = self.progress.runs[index]
        if known is None and not run.directory:
            self.say.at(index, FINDS, BOUND)
            directory = rosters.target(name)
            if directory is not None:
                self.tell(DirectoryFound(index, directory))
        self.say.at(index, READS, BOUND)
        try:
            now = rosters.read(run.directory or name, known, trust=self.progress.roster.trust)
        except Error as error:
            gone = not self.progress.away and rosters.is_no_more(Path(self.progress.roster.place(index)))
            self.tell(RunIsNoMore(index) if gone else SettingsRead(index, None, error))
        else:
            self.tell(SettingsRead(index, None if now is known else now))

    def _check_directory(self, index: int) -> None:
        run = self.progress.roster.known[index].run
        rundir = rundir_of(run)
        self.say.at(index, STANDS, BOUND)
        try:
            self.stood[index] = pinned.identity(rundir.root)
        except (FileNotFoundError, NotADirectoryError):
            self.tell(RunDirChecked(index, checks.missing(run, self.orders.now), missing=True))
        except OSError as error:
            self.tell(RunDirChecked(index, checks.unusable(run, error, self.orders.now)))
        else:
            found = self._replaced(index) or checks.answers(run, self.orders.now)
            finished = rundir.finished.exists()
            over = finished or read_switch(rundir, KILL).up
            self.tell(RunDirChecked(index, found, people(rundir), finished=finished, over=over))

    def _replaced(self, index: int) -> Finding | None:
        """Report that another directory stands in the place of the run's; None if none does.

        Also asked of the directory of its settings, which name it.
        """
        known = self.progress.roster.known[index]
        if self.progress.away:
            return None
        places = [
            Path(str(known.run.run_dir)),
            *([known.path.parent.absolute()] if known.path.name == "run.yaml" else []),
        ]
        self.say.at(index, FINDS, BOUND)
        pins = [(root, pinned.noted(self.orders.state, root)) for root in dict.fromkeys(places)]
        self.say.at(index, STANDS, BOUND)
        for root, pin in pins:
            try:
                why = "" if pin is None else pinned.another_than_noted(RunDir(root), pin)
            except OSError:  # a check reports what it cannot see
                continue
            if why:
                return checks.replaced(known.run, root, why, self.orders.state, self.orders.now)
        return None

    def _must_ask(self) -> bool:
        """Return whether the scheduler must be asked: once for all runs, and again for one that was checked apart and
        has another owner.
        """
        progress = self.progress
        if progress.queues is None or progress.asked is None:
            return progress.queues is None
        words = {run.scheduler for run in progress.roster.runs}
        return not (progress.users <= progress.asked and words <= progress.queues.keys())

    def _ask(self) -> None:
        users = tuple(sorted({user_name(), *self.progress.users}))
        self.say.at(-1, "find the scheduler", BOUND)  # (which asks Slurm for five seconds where it is in doubt)
        doors = {run.scheduler: self.orders.scheduler(run.scheduler) for run in self.progress.roster.runs}
        answers = {door.kind: self._answer(door, users) for door in {d.kind: d for d in doors.values()}.values()}
        self.tell(QueuesRead({word: answers[door.kind] for word, door in doors.items()}, frozenset(users)))

    def _answer(self, door: Scheduler, users: Sequence[str]) -> QueueAnswer:
        in_state = SCHEDULERS[door.kind].in_state
        if in_state and self.progress.away:
            return QueueAnswer(None, f"its queue lies in it: {self.progress.away}", door.kind)
        self.say.at(-1, "ask the scheduler", BOUND if in_state else ASKING)
        return ask(door, users)

    def _look(self, index: int, probe: Probe) -> None:
        run, orders = self.progress.roster.known[index].run, self.orders
        self.say.at(index, "check it", BOUND)
        journal = self._journal(index)
        try:
            attempts = ledger(rundir_of(run))
            self._diagnose(index, attempts)
            seen = look_at(
                run,
                queue_of(run, self.progress.queues or {}),
                orders.now,
                own=own_job_ids(orders.env),
                only=orders.only or None,
                probe=probe,
                attempts=attempts,
                at=lambda name: self.say.at(index, f"check it (watchdog {name})", BOUND),
            )
            self._require_still(index)
            self.say.at(index, "write down what was found", BOUND)
            report, news = _notify(seen, journal, orders.now, context=self.context)
            if journal.latest.idle:
                self.idle.append(index)
                del self.journals[index]  # thousands of runs are a lot of memory
            self.say.at(index, "write down that it was checked", BOUND)
            trouble = tuple(_remember(seen, report, news, orders))
            self.jobs[index] = seen.jobs
            if seen.run.watch.metrics is not None:
                self.looks[index] = seen
            waits = bool(seen.jobs) and all(job.state.waiting for job in seen.jobs or ())
            self.say.tell(RunChecked(index, report, trouble, waits))
            # its parent prints the report; here it would be memory for thousands of runs
            self.progress.apply(RunChecked(index, RunReport(report.name, ()), trouble, waits))
        except Exception as error:  # a broken directory must neither end the watch of the others nor go unnoticed
            self.tell(RunDirChecked(index, checks.unusable(run, error, orders.now)))

    def _diagnose(self, index: int, attempts: Sequence[Attempt]) -> None:
        """Have it said why the newest attempt failed, so that the message of it says so too. What is not read in time is told
        without it."""
        orders, rundir = self.orders, rundir_of(self.progress.roster.known[index].run)
        if orders.diagnose is None or not orders.send or self.diagnosing < 1 or not _lacks_a_verdict(rundir, attempts):
            return
        began = time.monotonic()
        self.say.at(index, DIAGNOSES, self.diagnosing + BOUND)
        try:
            self._require_still(index)
            orders.diagnose(rundir, attempts, self.diagnosing)
        finally:
            self.diagnosing -= time.monotonic() - began
            self.say.at(index, "check it", BOUND)

    def _require_still(self, index: int) -> None:
        """Raise NotTrusted where another directory was put in its place since it was judged: it may be that one that was
        seen."""
        if index in self.stood:
            pinned.require_still(rundir_of(self.progress.roster.known[index].run), self.stood[index])

    def _journal(self, index: int) -> Journal:
        if index not in self.journals:
            run = self.progress.roster.known[index].run
            folder = rundir_of(run).watch / "journal"
            self.journals[index] = Journal(folder, spare=spare_of(folder, self.own))
        return self.journals[index]

    def _send(self) -> None:
        progress = self.progress
        known, idle = progress.roster.known, set(self.idle)
        may = [index for index in self.group if index in known and _may_send(progress.runs[index])]
        mine = [index for index in may if index not in idle]
        if may:
            settings = [known[i].run.alerts for i in mine]
            journals = [self._journal(i) for i in mine]
            done = send(journals, settings, self.orders.now, self.say, mine, self.about_run)
            self.tell(MessagesSent(tuple(may), done))

    def about_run(self, index: int) -> AboutRun | None:
        """Return what goes with the messages of a run that this child has checked."""
        if self.orders.draw is None or index not in self.jobs:
            return None
        draw, rundir = self.orders.draw, rundir_of(self.progress.roster.known[index].run)
        try:
            return in_time(lambda: draw(rundir, self.jobs[index], self.orders.now), DRAWING)
        except Exception:  # a picture is never worth a message
            return None

    def _relieve(self) -> None:
        for index in [index for index in self.group if self.progress.runs[index].waits]:
            if self.orders.relieve is not None:
                run = self.progress.roster.known[index].run
                self.say.at(index, RELIEVES, RELIEVING)
                sentences = tuple((run.name, sentence) for sentence in self.orders.relieve(run, self.orders.now))
                self.tell(NodesReleased(index, sentences))

    def _export(self) -> None:
        """Write the metrics of the runs that this child has checked.

        This comes last: a directory that hangs costs nobody a message.
        """
        for index, seen in self.looks.items():
            folder, run = seen.run.watch.metrics, self.progress.runs[index]
            if self.orders.export is None or folder is None or run.exported or run.hung:
                continue
            self.say.at(index, EXPORTS, BOUND)
            blind = queue_of(seen.run, self.progress.queues or {}).blind
            self.tell(
                MetricsWritten(index, tuple(self.orders.export(seen.rundir, seen.jobs, blind, self.orders.now, folder)))
            )


def _lacks_a_verdict(rundir: RunDir, attempts: Sequence[Attempt]) -> bool:
    """Return whether one of the two newest attempts has failed and has no verdict."""
    failed = [rundir.attempt(one.number) for one in attempts[-2:] if one.has_failed]
    return any(not os.path.lexists(folder / NAMES[VerdictPage]) for folder in failed)


def _may_send(run: WatchedRun) -> bool:
    return run.storage is not None and not (run.missing or run.hung or run.sent)


def send(
    journals: Sequence[Journal],
    settings: Sequence[Any],
    now: datetime,
    say: Say,
    items: Sequence[int],
    draw: Callable[[int], AboutRun | None] = lambda _: None,
) -> Delivered:
    """Send the messages that are due in ``journals``; ``items`` has the index of each one's run. ``draw``: the last day of a
    run, asked for where there is a message."""
    about_runs: dict[str, AboutRun] = {}
    for journal, item in zip(journals, items, strict=True):  # a journal that hangs does so while nothing is claimed
        say.at(item, SENDS, BOUND)
        if due(journal.read(), now) and (found := draw(item)) is not None:
            about_runs[journal.home] = found
    say.at(-1, "send messages", SENDING)
    return deliver(journals, settings, now, about_runs=about_runs)


def queue_of(run: Run, queues: Mapping[str, QueueAnswer]) -> QueueAnswer:
    if run.scheduler in queues:
        return queues[run.scheduler]
    return QueueAnswer(None, "the scheduler was not asked")


def bad_in_general(progress: TickProgress, now: datetime) -> list[Finding]:
    """Return the findings that may explain one of any run, and that have alerts of their own."""
    troubles = ((progress.roster.label(i), run.trouble) for i, run in enumerate(progress.runs) if run.trouble)
    found = [settings_finding(label, why, now) for label, why in troubles]
    return found + [one for one in queue_findings(progress, now) if one.health is Health.BAD]


def unfinished(progress: TickProgress) -> list[Run]:
    """Return the runs of which jobs are of any concern."""
    known = progress.roster.known
    return [known[index].run for index in sorted(known) if not progress.runs[index].finished]


def needed_queues(progress: TickProgress) -> list[QueueAnswer]:
    """Return the answers of the schedulers on which a run depends that has not finished."""
    words = dict.fromkeys(run.scheduler for run in unfinished(progress))
    return [(progress.queues or {})[word] for word in words if word in (progress.queues or {})]


def queue_findings(progress: TickProgress, now: datetime) -> list[Finding]:
    """Return whether each scheduler answers on which a run depends that has not finished, but for those whose queue lies in the
    state directory."""
    asked = {queue.kind: queue for queue in needed_queues(progress) if queue.kind in SCHEDULERS}
    runs = [(queue_of(run, progress.queues or {}).kind, run.name) for run in unfinished(progress)]
    return [
        queue_finding(queue, now, [name for of, name in runs if of == kind])
        for kind, queue in asked.items()
        if not SCHEDULERS[kind].in_state
    ]


def _notify(
    seen: RunLook, journal: Journal, now: datetime, *, context: Sequence[Finding]
) -> tuple[RunReport, list[EventLine]]:
    try:
        mark, readable = read_finished(seen.rundir), True
    except OSError:
        mark, readable = None, False
    findings = seen.findings if mark is None else _final(seen.findings)
    recorded = record(journal, findings, seen.run.alerts, now, run_name=seen.run.name, context=context)
    said, news = [], [of_notice(notice, seen.rundir) for notice in recorded.notices]
    known = journal.latest
    events_now = _events(seen, mark) if readable else ()
    for event in (*events_now, *_groups_back(seen.rundir, known, now)):
        if was_announced(known, event.key, event.attempt):
            continue
        before = _failed_before(seen, event)
        look = f"ftsupervise status {seen.rundir.quoted()}"
        if before is not None:
            look = f"ftsupervise diagnose {seen.rundir.quoted()} {before.attempt}"
        why = "" if before is None else before.told()
        found = replace(event.finding, run=seen.run.name, at=now, look=look, why=why)
        if announce(journal, seen.run.alerts, replace(event, finding=found), now):
            said.append(f"{found.subject}: {found.summary}")
            news.append(of_event(found, seen.rundir, event.at))
    shown = tuple(finding for finding in seen.findings if finding.health is not Health.OK)
    report = RunReport(seen.run.name, shown, recorded.firing, recorded.notices, tuple(said), len(seen.findings))
    return report, news


def _final(found: Sequence[Finding]) -> Sequence[Finding]:
    """Return what was found of a run that has finished: what is good stays good, but for its disks."""
    return [replace(one, final=one.health is Health.OK and one.disk is None) for one in found]


def _failed_before(seen: RunLook, event: Notice) -> VerdictPage | None:
    """Return what ``diagnose`` says of the attempt that failed and that another one takes over from; None where that is not
    the event, or it is not kept."""
    last = next((one for one in reversed(seen.attempts) if one.number < event.attempt), None)
    if event.event is not EventKind.RESUMED or last is None or not last.has_failed:
        return None
    return read_page(VerdictPage, seen.rundir.attempt(last.number))


def _events(seen: RunLook, mark: Finished | None) -> tuple[Notice, ...]:
    """The events in the ledger and the state files; () when they cannot be read this time."""
    try:
        launched = [one.at for one in launches(seen.rundir)]
    except OSError:
        return ()
    switch = read_switch(seen.rundir, KILL)
    why = f" ({switch.why})" if switch.why else ""
    raised = f"raised by {switch.who}{why}" if switch.up and switch.who else ""
    finished_at, step = (None, None) if mark is None else (mark.at, mark.step)
    alone = observed_alone(seen.rundir, launched)
    run = seen.rundir.quoted()
    return events(seen.attempts, finished_at=finished_at, step=step, raised=raised, run=run, alone=alone)


def _groups_back(rundir: RunDir, known: JournalState, now: datetime) -> Iterator[Notice]:
    """Yield an event for each replica group that was lost alone and trains again, once."""
    if not os.path.lexists(rundir.replicas):  # what reads them is imported where there are some
        return
    from ftsupervise.replicas.table import read_table

    table = read_table(rundir)
    if table is None:
        return
    for row in table.groups:
        dedup = f"group-{row.name}-{row.attempt}"
        if row.attempt < 2 or row.back_in != row.attempt or was_announced(known, dedup, 0):
            continue
        with suppress(OSError):
            found = tuple(islice(backwards(rundir.group(row.name), before=row.attempt + 1), _BACK))
            alone = (
                table.place == "jobs" or len({one.job_id for one in found[:2]}) == 1
            )  # else all began anew with their job
            if len(found) > 1 and alone and now - found[0].started < _NEWS:
                yield from group_back(row.name, found[:0:-1], found[0], row.missed)


def _remember(seen: RunLook, report: RunReport, news: Sequence[EventLine], orders: TickOrders) -> list[str]:
    """Write the watchdogs' memory, the findings, this watch's own beat (read by the run's guard and by other watches),
    and the events for log collectors.
    """
    try:
        write_found(seen.rundir, _found(seen, report, orders.now))
        write_memory(seen.rundir, seen.memory)
        heartbeat_page.write_watcher(seen.rundir, orders.now, _every(seen, orders))
    except OSError as error:
        return [f"{seen.run.name}: cannot write {seen.rundir.watch}: {error.strerror}"]
    try:
        append(events_path(seen.rundir), news)
    except OSError as error:
        return [f"{seen.run.name}: cannot write {events_path(seen.rundir)}: {error.strerror}"]
    return []


def _every(seen: RunLook, orders: TickOrders) -> timedelta | None:
    """Return how often this watch checks the run, as far as it is known, by which others see that it is late."""
    if orders.every is not None:
        return orders.every
    return heartbeat_page.watch_interval(seen.rundir, orders.now, seen.run.watch.every, typed=orders.typed)


def _found(seen: RunLook, report: RunReport, now: datetime) -> WatchFound:
    """Return the findings for ``status``. A forecast stays for a day where its watchdog was not due."""
    firing = [
        FiringAlert(one.id, one.finding.severity.word, one.finding.watchdog, one.finding.summary, one.since)
        for one in report.firing[:MOST]
    ]
    of = seen.run.watch
    judges = tuple(name for name, section in (("hang", of.hang), ("throughput", of.throughput)) if section is not None)
    found = WatchFound(now, len(report.firing), tuple(firing), judges=judges, every=of.every)
    ahead = [one for one in seen.findings if one.disk is not None and one.disk.part == "forecast" and one.value]
    disk = min(ahead, key=lambda one: (one.health is not Health.BAD, one.subject), default=None)
    if disk is not None:
        return found._replace(disk=disk.value, disk_at=now)
    looked = any(one.watchdog == "disk" for one in seen.findings)
    before = None if looked else read_found(seen.rundir)
    if before is None or now - before.disk_at > _FORECAST_KEPT:
        return found
    return found._replace(disk=before.disk, disk_at=before.disk_at)


# ------------------------------------------------------------------------------------------
# The events of a run since the last tick, from its ledger: pure. Events are sent once and have no end.
#
# A fault that is over before the next tick (an attempt dies, the next array member takes over within seconds) is no alert,
# but people want to find it in the morning: it is sent as one event with both halves in it.

_NOT_DONE = "It was not done: decisions of this kind are only told. To act on them: "

QUICK = timedelta(minutes=5)  # of training lost: a restart that costs less wakes nobody


def events(
    attempts: Sequence[Attempt],
    *,
    finished_at: datetime | None,
    step: int | None = None,
    raised: str = "",
    run: str = "",
    alone: Sequence[OnlyTold] = (),
) -> tuple[Notice, ...]:
    """Return every event of the run so far, oldest first; the journal drops those that were sent.

    ``step``: at which it finished, by its mark. ``raised``: a person's name and reason for the kill switch that is up now;
    the newest attempt has answered it. ``run``: its directory, as a shell takes it. ``alone``: decisions that were only told
    where no attempt began.
    """
    found = _observed_alone(alone, run)
    stopped = False  # that was told: what ends it is told at once, however little it cost
    for index, (before, attempt) in enumerate(zip([None, *attempts], attempts, strict=False)):
        up_to = attempts[: index + 1]
        anew = starts_over(up_to) if attempt.source == OUTPUT else ()
        percent = began_again(up_to) if attempt.percent is not None else None
        begun = _begin(before, attempt, _trained(up_to[:-1]), anew, percent)
        found += [replace(one, quick=one.quick and not stopped) for one in begun]
        found += _damaged(attempt)
        found += _torn(attempt, attempts[index - 1] if index else None)
        found += _observed(attempt, attempts[index - 1] if index else None, run)
        ended = _end(attempt, raised if attempt is attempts[-1] else "")
        stopped = bool(ended) or (stopped and not begun)
        found += ended
    if finished_at is not None:
        last = attempts[-1] if attempts else None
        step = last.last_step if last and last.last_step is not None else step
        at_step = f" at step {step}" if step is not None else ""
        count = f", in {len(attempts)} attempt{'s' if len(attempts) > 1 else ''}" if attempts else ""
        total = ""
        if attempts:
            total = f" after {show_duration(max(0.0, (finished_at - attempts[0].started).total_seconds()))}"
        text = f"done{at_step}{total}{count}"
        number = last.number if last else 0
        dedup = f"finished-{number}"  # a run that was trained on finishes once more
        means = "Members still queued leave at once."
        found.append(happened(EventKind.FINISHED, dedup, finished_at, text, means, number))
    return tuple(found)


def _trained(before: Sequence[Attempt]) -> Attempt | None:
    """Return the newest of these that has made a step: what it had reached is made again, whoever crashed at once since."""
    return next((one for one in reversed(before) if one.last_step is not None), None)


def _begin(
    before: Attempt | None,
    attempt: Attempt,
    trained: Attempt | None,
    anew: Sequence[StartOver] = (),
    again: PercentOver | None = None,
) -> list[Notice]:
    if not attempt.host:
        return []  # claimed, and nothing was started: a full disk, or a job that died at once
    where = f"job {attempt.job_id}" if attempt.job_id else f"host {attempt.host}"
    nodes = f" on {len(attempt.nodes)} nodes" if len(attempt.nodes) > 1 else ""
    if before is None:
        return [happened(EventKind.STARTED, "started", attempt.started, f"{where}{nodes}", attempt=attempt.number)]
    if attempt.first_step is None:
        if again is not None and again.attempt == attempt.number:
            text = f"{again.words()} ({where})"
            return [
                happened(EventKind.STARTED, f"resumed-{attempt.number}", attempt.started, text, attempt=attempt.number)
            ]
        return []  # it has not come as far as a step; when it has, it has taken over
    if anew and anew[-1].attempt == attempt.number:
        text = f"{anew[-1].words()} ({where})"
        return [happened(EventKind.STARTED, f"resumed-{attempt.number}", attempt.started, text, attempt=attempt.number)]
    lost, does, event = "", "goes on from", EventKind.RESUMED
    if attempt.source == OUTPUT and attempt.first_step <= _FIRST and (attempt.epoch or 0) <= _FIRST:
        does, event = "begins at", EventKind.STARTED
    if (redone := _redone(trained, attempt)) and trained is not None:
        lost = f"; {redone} steps are done again" if redone > 1 else "; one step is done again"
        lost += "" if trained.number == before.number else f": attempt {trained.number} had reached {trained.last_step}"
    gap = "" if before.ended is None else f" {show_duration(_stood(before.ended, attempt))} after"
    step = f" at step {before.last_step}" if before.last_step is not None else ""
    ended = f"attempt {before.number} ended{step} ({before.why() or 'cause unknown'})"
    text = (
        f"attempt {attempt.number} ({where}) {does} step {attempt.first_step}{f',{gap}' if gap else ':'} {ended}{lost}"
    )
    dedup, quick = f"resumed-{attempt.number}", _is_quick(before, attempt, trained)
    return [happened(event, dedup, attempt.started, text, attempt=attempt.number, quick=quick)]


def _redone(trained: Attempt | None, attempt: Attempt) -> int:
    """Return the steps that ``trained`` had made and this attempt makes again."""
    if trained is None or trained.last_step is None or attempt.first_step is None:
        return 0
    return max(0, trained.last_step - attempt.first_step + 1)


def group_back(name: str, earlier: Sequence[Attempt], attempt: Attempt, missed: int | None) -> list[Notice]:
    """Return the event of a replica group that has come back alone, after its attempts ``earlier``, in order; none where the
    last of them was asked to stop. ``missed``: steps that the others made meanwhile."""
    before = earlier[-1]
    if before.cause is not None and before.cause.orderly:
        return []
    meanwhile = f"; the others made {count(missed, 'step')} meanwhile" if missed else ""
    return [
        replace(
            event,
            key=f"group-{name}-{attempt.number}",
            finding=replace(
                event.finding,
                summary=f"group {name}: {event.finding.summary}{meanwhile}",
                meaning="The other groups trained on.",
            ),
            attempt=0,
        )
        for event in _begin(before, attempt, _trained(earlier))
    ]


def _stood(ended: datetime, attempt: Attempt) -> float:
    """Return the seconds without training from that end of the attempt before to the first step of this one, where that is
    known; else to its start."""
    return max(0.0, (attempt.started - ended).total_seconds() + (attempt.ready or 0.0))


def _is_quick(before: Attempt, attempt: Attempt, trained: Attempt | None) -> bool:
    """Return whether the restart cost less than five minutes, steps made again included, and nothing odd was behind it."""
    if before.ended is None or before.hardware or attempt.first_step is None:
        return False
    if before.failure is not None and before.failure.kind is FailureKind.NUMBERS:
        return False
    cost = _stood(before.ended, attempt)
    if (redone := _redone(trained, attempt)) and trained is not None and trained.last_step is not None:
        made = trained.last_step - (trained.first_step or trained.last_step) + 1
        cost += ((trained.ended or before.ended) - trained.started).total_seconds() / made * redone
    return cost < QUICK.total_seconds()


def _damaged(attempt: Attempt) -> list[Notice]:
    """Return an event where an attempt has found that a checkpoint is not what was saved, before it loaded it."""
    resumed = attempt.resumed
    if resumed is None or not resumed.damaged:
        return []
    text = f"{'; '.join(resumed.damaged)}; attempt {attempt.number} begins {resumed.words()}"
    meaning = "It is kept in .quarantine and was not loaded. Look at the disk and the memory of what wrote and read it."
    return [happened(EventKind.DAMAGED, f"damaged-{attempt.number}", resumed.at or attempt.started, text, meaning)]


def _torn(attempt: Attempt, before: Attempt | None) -> list[Notice]:
    """Return an event for each checkpoint that was torn when the attempt began. One that stays is told once in a row."""
    known = {(one.path, one.aside) for one in before.torn} if before is not None else set()
    meaning = "Nothing is deleted: ftsupervise checkpoints list. Where it stays, a loader that takes the newest crashes on it."
    return [
        happened(
            EventKind.DAMAGED,
            f"torn-{attempt.number}-{place}",
            attempt.started,
            f"before attempt {attempt.number}: {one.words()}; {one.now()}",
            meaning,
            attempt.number,
        )
        for place, one in enumerate(attempt.torn)
        if (one.path, one.aside) not in known
    ]


def _observed_alone(alone: Sequence[OnlyTold], run: str) -> list[Notice]:
    """Return an event for each decision that was only told where no attempt began."""
    means = _NOT_DONE + f"ftsupervise observe --off {run}".rstrip()
    return [
        happened(
            EventKind.OBSERVED,
            "-".join(filter(None, ("observed", one.decision, one.node, f"{one.at.timestamp():.0f}"))),
            one.at,
            f"no attempt began at {one.at:%H:%M} UTC: {one.words()}",
            means,
        )
        for one in alone
        if one.at is not None
    ]


def _observed(attempt: Attempt, before: Attempt | None, run: str) -> list[Notice]:
    """Return an event for each decision that was only told. One that each attempt comes to anew is told once in a row."""
    found = []
    means = _NOT_DONE + f"ftsupervise observe --off {run}".rstrip()
    for one in attempt.observed:
        if one.at is None or (before is not None and one.repeats(before.observed)):
            continue
        dedup = "-".join(
            filter(None, (f"observed-{attempt.number}", one.decision, one.node, f"{one.at.timestamp():.0f}"))
        )
        text = f"attempt {attempt.number} at {one.at:%H:%M} UTC: {one.words()}"
        found.append(happened(EventKind.OBSERVED, dedup, one.at, text, means, attempt.number))
        if one.then:
            then = f"attempt {attempt.number}: {one.then} ({one.words()})"
            found.append(
                happened(EventKind.OBSERVED, f"{dedup}-then", one.at, then, "Nothing was done to it.", attempt.number)
            )
    return found


def _end(attempt: Attempt, raised: str) -> list[Notice]:
    """Return an event for an end after which no job takes over. A failure belongs to the recovery watchdog until it is over."""
    if attempt.cause is None or attempt.kind is not CauseKind.KILL_SWITCH:
        return []
    words = ", ".join(filter(None, ("kill switch", raised or attempt.cause.text, attempt.note)))
    text = f"attempt {attempt.number} {_how_it_stopped(attempt)}: {words}"
    meaning = "Queued members leave at once; nothing trains until the switch is cleared and the run launched again."
    dedup, at = f"ended-{attempt.number}", attempt.ended or attempt.started
    return [happened(EventKind.STOPPED, dedup, at, text, meaning, attempt.number)]


def _how_it_stopped(attempt: Attempt) -> str:
    """Return "saved and stopped at step 140"; of one that did not say that it saved, "stopped at step 140"."""
    last = attempt.last_step
    saved = max((step for step in (attempt.saved, attempt.kept) if step is not None), default=None)
    at = f" at step {last}" if last is not None else ""
    if saved is None or last is None:
        return f"stopped{at}"
    return f"saved and stopped{at}" if saved >= last else f"stopped{at}, last saved at step {saved}"


# ------------------------------------------------------------------------------------------

# The events of a run as JSON lines, for log collectors: ``watch/events/HOST-ACCOUNT.jsonl``, one file for each writer.
#
# A line is appended in one write, under a lock (``.NAME.lock``) that is held for that only. After a full disk or a crash a torn
# line is closed before the next one, so that it never swallows it. A file that has reached ``LARGEST`` is renamed to
# ``….jsonl.1``, and the one of that name goes: so much is kept, and no more. The journal of the alerts is the truth; this is a
# copy that may lack a line.

SCHEMA = 1  # raised when a field goes or changes its meaning
LARGEST = 1_000_000  # bytes of a file
_LONGEST = 2000  # characters of a text in a line
_LOCK = 2.0  # seconds that another tick of this account, on this host, may hold the file


class EventLine(NamedTuple):
    """``event``: fired, escalated, repeated, resolved, unwatched; or started, resumed, stopped, finished, damaged, observed."""

    at: datetime
    run: str
    directory: str
    event: str
    severity: str
    watchdog: str = ""
    subject: str = ""
    summary: str = ""
    value: str = ""
    limit: str = ""
    since: datetime | None = None
    alert: str = ""

    def text(self, host: str) -> str:
        record: dict[str, object] = {"schema": SCHEMA}
        for name, value in self._asdict().items():
            record[name] = value.isoformat() if isinstance(value, datetime) else value
            if name == "directory":
                record["host"] = host
            if isinstance(value, str):
                record[name] = printable(value, _LONGEST)
        return json.dumps(record, ensure_ascii=False)


def of_notice(notice: Notice, rundir: RunDir) -> EventLine:
    """Make a line of a notice that people get."""
    of, where = notice.finding, str(rundir.root)
    told = EventLine(
        notice.at, of.run, where, notice.reason.value, of.severity.word, of.watchdog, of.subject, of.summary
    )
    return told._replace(value=of.value, limit=of.limit, since=notice.since, alert=notice.alert_id)


def of_event(of: Finding, rundir: RunDir, at: datetime) -> EventLine:
    """Make a line of an event of the run itself, which has no end."""
    return EventLine(at, of.run, str(rundir.root), of.subject, of.severity.word, summary=of.summary)


def events_path(rundir: RunDir) -> Path:
    writer = re.sub(r"[^A-Za-z0-9._-]", "_", f"{os.uname().nodename}-{user_name()}")
    return rundir.watch / "events" / f"{writer}.jsonl"


def append(path: Path, lines: Iterable[EventLine], *, largest: int = LARGEST) -> None:
    """Append the lines, each whole. Raises OSError; then none of the rest was written."""
    host = os.uname().nodename
    payload = [f"{line.text(host)}\n".encode("utf-8", "replace") for line in lines]
    if not payload:
        return
    make_folder(path.parent)
    with held_to_write(path.parent) as here:
        lock = _lock(here / path.name)
        try:
            _append_locked(here / path.name, payload, largest)
        finally:
            os.close(lock)


def _append_locked(path: Path, payload: Sequence[bytes], largest: int) -> None:
    with suppress(FileNotFoundError):
        if path.lstat().st_size >= largest:
            os.replace(path, f"{path}.1")
    fd = as_page(path)
    try:
        _append(fd, payload)
    finally:
        os.close(fd)


def _append(fd: int, payload: Sequence[bytes]) -> None:
    size = os.fstat(fd).st_size
    if size and _last_byte(fd, size) != b"\n":
        payload = [b"\n" + payload[0], *payload[1:]]
    for line in payload:
        size = os.fstat(fd).st_size
        if os.write(fd, line) != len(line):
            os.ftruncate(fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _last_byte(fd: int, size: int) -> bytes:
    """``fd`` can only be written, so the file is opened again by it."""
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(again, 1, size - 1)
    finally:
        os.close(again)


def _lock(path: Path) -> int:
    """A descriptor that holds the file ``path`` for this tick. Raises OSError.

    Who can read a file can lock it and keep it so, so the lock is another file that only its owner can open.
    """
    until = time.monotonic() + _LOCK
    fd = files.open_append(path.with_name(f".{path.stem}.lock"), 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:  # another tick writes
                if time.monotonic() > until:
                    raise OSError(errno.EBUSY, "another watch holds it", str(path)) from None
            time.sleep(0.02)
    except BaseException:
        os.close(fd)
        raise
