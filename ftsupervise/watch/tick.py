"""One tick over many runs: check them, write down what changed, notify people, say that the watch lives.

This process reads no user's disk, so no dead mount can hold it: all of that is done by children (``tour.py``, ``general.py``)
that are watched while they do it. One child does all healthy runs. Where it hangs on a run, it is given up; that run is
reported as not answering, and new children go on with the others: those on the same device each in its own, for they may
hang as well.

Order matters. Everything that was found is saved with its messages before the first is sent, so a tick that is killed half-way
is finished by the next one. The dead-man is pinged last, and only if this tick could see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.alerts.deliver import Delivered
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.receivers import Broken, TryLater, read_secret, redact, safe_address
from ftsupervise.alerts.record import record
from ftsupervise.findings import Alert, Finding, Notice
from ftsupervise.host import ownership
from ftsupervise.host.ownership import make_folder, make_own
from ftsupervise.host.ready import readable
from ftsupervise.probe.errand import At, Errand, Note, Notes
from ftsupervise.probe.server import Mounts, read_mounts
from ftsupervise.truth import Health
from ftsupervise.units import show_duration
from ftsupervise.watch import checks
from ftsupervise.watch import roster as rosters
from ftsupervise.watch.checks import QueueAnswer, Unanswered, host_finding, settings_finding
from ftsupervise.watch.roster import MessagesSent, Roster, RunDirChecked, RunReport, TickProgress
from ftsupervise.watch.tour import (
    BOUND,
    EXPORTS,
    FINDS,
    READS,
    RELIEVES,
    SENDS,
    TickOrders,
    Tour,
    needed_queues,
    queue_findings,
    send,
)
from ftsupervise.watch.watchdogs import WATCHDOGS, load_watchdog

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts, DeadMan
    from ftsupervise.probe.errand import Say

# The findings of a tick that belong to no single run: Slurm's health, settings that cannot be read, run directories that do not
# answer or are gone; and the dead-man. It is kept in this account's state directory, because the runs' own cannot be written.
#
# Done by a child, as the runs are (``tick.py``). When the state directory itself hangs, another child does it without
# (``away``): the journals' spares on this host take it down until the directory answers again.

# A ping to an outside service, which alerts a person when the pings stop: it watches the watch. Speaks
# healthchecks.io's form: URL for success, URL/log for a note that is no sign of life. Success is sent only after a tick
# that could see and left nothing critical undelivered; a watch that cannot see or cannot send must look dead to the
# outside.


def after_tick(settings: DeadMan, delivered: Delivered, why_blind: str = "") -> str:
    """Send the ping after a tick; ``why_blind``: why it could not see, "" if it could.

    Returns "" when the service took the ping, else why not (without secrets). Never raises, never waits long.
    """
    if why_blind:
        return _send_ping(settings, "/log", f"this tick could not see: {why_blind}")
    if delivered.critical_waiting:
        return _send_ping(
            settings, "/log", f"{delivered.critical_waiting} critical messages could not be delivered yet"
        )
    return _send_ping(settings, "", f"{len(delivered.sent)} messages sent, {delivered.waiting} waiting")


def _send_ping(settings: DeadMan, suffix: str, text: str) -> str:
    import requests

    from ftsupervise.alerts.receivers import webhook

    address = ""
    try:
        address = safe_address(read_secret(settings, "url"), "dead_man.url").rstrip("/")
        headers = {"Content-Type": "text/plain; charset=utf-8", "User-Agent": "ftsupervise"}
        with webhook.post(address + suffix, redact(text).encode(), headers, _PING_WITHIN) as answer:
            return "" if answer.status_code < 300 else f"the dead-man service answered HTTP {answer.status_code}"
    except (Broken, TryLater) as error:
        return str(error)
    except (requests.RequestException, OSError, ValueError) as error:
        return redact(f"the dead-man service: {type(error).__name__}: {error}", [address])


KEEPS, PINGS = "use this account's state directory", "tell the dead-man service"
PINGING = 60.0
_PING_WITHIN = 5.0  # seconds to reach the service, and for its answer: the next tick pings again


class GeneralReport(NamedTuple):
    general: tuple[RunReport, ...]  # of no single run
    storage: tuple[RunReport, ...]

    def into(self, progress: TickProgress) -> None:
        progress.general, progress.storage = self


class DeadManPinged(NamedTuple):
    trouble: tuple[str, ...]

    def into(self, progress: TickProgress) -> None:
        progress.pinged = True
        progress.notes += self.trouble


def work(orders: TickOrders, progress: TickProgress, say: Say) -> None:
    """Do the rest of it; a child before this one may have done a part."""
    away = progress.away
    if progress.general is None:
        say.at(-1, KEEPS, BOUND)
        general = _in_general(orders, progress, away)
        storage = list(_of_storage(orders, progress, say, away))
        _report(progress, say, GeneralReport(tuple(one for one, *_ in general), tuple(one for one, *_ in storage)))
        every = [*general, *storage]
        if orders.send and every:
            journals, settings = [journal for _, journal, _ in every], [alerts for *_, alerts in every]
            _report(progress, say, MessagesSent((), send(journals, settings, orders.now, say, [-1] * len(every))))
    if orders.send and not progress.pinged:
        say.at(-1, PINGS, PINGING)
        _report(progress, say, DeadManPinged(tuple(_ping(progress))))


def _report(progress: TickProgress, say: Say, event: NamedTuple) -> None:
    progress.apply(event)
    say.tell(event)


def _in_general(orders: TickOrders, progress: TickProgress, away: str) -> list[tuple[RunReport, Journal, Alerts]]:
    """Slurm's own health, one alert for all runs, and runs whose settings cannot be read: sent to the receivers of all runs."""
    runs = progress.roster.runs
    if not runs:
        return []
    settings = _everybody([run.alerts for run in runs])
    journal = _journal(orders.state, orders.state / "watch" / "journal", away)
    known = {alert.finding.subject for alert in journal.read().alerts.values()}
    labels = map(progress.roster.label, range(len(progress.runs)))
    checked = [settings_finding(label, r.trouble, orders.now) for label, r in zip(labels, progress.runs, strict=True)]
    findings = [one for one in checked if one.health is Health.BAD or one.subject in known]
    findings += queue_findings(progress, orders.now)
    host = host_finding(ownership.own_folder_taken(), orders.now)
    if host.health is Health.BAD or host.subject in known:
        findings.append(host)
    if not findings:
        return []
    where, full = str(runs[0].run_dir), _full_under(progress, journal.directory)
    recorded = record(journal, findings, settings, orders.now, run_name="", where=where, context=full)
    return [(_run_report("watch", findings, recorded.firing, recorded.notices), journal, settings)]


def _full_under(progress: TickProgress, folder: Path) -> list[Finding]:
    """Return what runs have found of the disk that ``folder`` lies on, as of no run: one that is full explains that nothing is
    written there."""
    mounts, found = Mounts(read_mounts()), list[Finding]()
    for report in (run.report for run in progress.runs if run.report is not None):
        found += [one for one in report.findings if one.disk is not None and one.health is Health.BAD]
    device = mounts.of(str(folder))
    return [replace(one, run="") for one in found if one.disk is not None and mounts.of(str(one.disk.path)) == device]


def _of_storage(
    orders: TickOrders, progress: TickProgress, say: Say, away: str
) -> Iterator[tuple[RunReport, Journal, Alerts]]:
    """Yield reports of run directories that do not answer or cannot be used, and of those that have recovered."""
    for index, finding in progress.stored():
        run = progress.roster.known[index].run
        if progress.runs[index].missing:
            finding = checks.launched_or_not(run, finding, orders.state, away)
            _report(progress, say, RunDirChecked(index, finding))
        elif finding.health is Health.OK and not away:
            checks.remember(run, orders.state, progress.runs[index].over)
        folder = checks.journal_of(run, orders.state)
        if finding.health is not Health.BAD and (away or not folder.is_dir()):
            if finding.health is Health.UNKNOWN:  # not launched yet: nothing to record, something to print
                yield (
                    _run_report(run.name, [finding], (), ()),
                    _journal(orders.state, folder, away or "not needed"),
                    run.alerts,
                )
            continue
        journal = _journal(orders.state, folder, away)
        answers = finding if finding.health is Health.BAD else replace(finding, health=Health.OK)
        recorded = record(journal, [answers], run.alerts, orders.now, run_name=run.name, where=str(run.run_dir))
        yield _run_report(run.name, [finding], recorded.firing, recorded.notices), journal, run.alerts


def _run_report(
    name: str, findings: Sequence[Finding], firing: Sequence[Alert], notices: Sequence[Notice]
) -> RunReport:
    shown = tuple(finding for finding in findings if finding.health is not Health.OK)
    return RunReport(name, shown, tuple(firing), tuple(notices), (), len(findings))


def _journal(state: Path, folder: Path, away: str) -> Journal:
    if not away:
        try:
            make_own(state)
            make_folder(folder.parent, parents=True)
        except OSError:  # best effort: without it the journal goes to its spare place and says so
            pass
    return Journal(folder, away=away)


def _everybody(all_settings: Sequence[Alerts]) -> Alerts:
    """Return the first run's settings with every run's receivers, each once. Routes are the first run's."""
    first = all_settings[0]
    receivers = {receiver.model_dump_json(): receiver for one in all_settings for receiver in one.receivers}
    taken = {receiver.name for receiver in first.receivers}
    more = [r for r in receivers.values() if r not in first.receivers and (r.name is None or r.name not in taken)]
    return first.model_copy(update={"receivers": (*first.receivers, *more)}) if more else first


def why_tick_was_blind(progress: TickProgress) -> str:
    """Return why this tick could not see all that it was to check; "" if it could."""
    unasked = [queue.blind for queue in needed_queues(progress) if queue.jobs is None]
    silent = [finding.summary for _, finding in progress.stored() if finding.health is Health.BAD]
    return next(iter([*unasked, *silent]), "")


def _ping(progress: TickProgress) -> list[str]:
    """Ping each dead-man service once, whichever runs name it."""
    said = []
    done: set[str] = set()
    why = why_tick_was_blind(progress) or next(iter(progress.complaints()), "")
    for run in progress.roster.runs:
        service = run.alerts.dead_man
        if service is None or service.model_dump_json() in done:
            continue
        done.add(service.model_dump_json())
        said.append(after_tick(service, progress.all_delivered(), why))
    return [f"dead-man: {words}" for words in said if words]


# ------------------------------------------------------------------------------------------


_AT_ONCE = 8  # children


@dataclass(frozen=True)
class TickResult:
    """The whole tick, for the person who ran it by hand."""

    at: datetime
    runs: tuple[RunReport, ...]
    blind: str
    progress: TickProgress
    delivered: Delivered = field(default_factory=Delivered)
    trouble: tuple[str, ...] = ()  # failures of the watch itself
    relief: tuple[tuple[str, str], ...] = ()  # (run, what was done for it while all its jobs wait)

    @property
    def saw_all(self) -> bool:
        """Return whether every run that was named was checked."""
        return not any(run.trouble or run.hung for run in self.progress.runs)


def tick(roster: Roster, orders: TickOrders) -> TickResult:
    """Check every run once and notify people of what changed. Bounded in time whatever any run's storage does.

    ``roster`` keeps the settings that were read, for the next tick.
    """
    _import_all(orders)
    progress = TickProgress(roster)
    party = _Children(orders, progress)
    party.go()
    party.do_general()
    return _ticked(orders, progress)


def _ticked(orders: TickOrders, progress: TickProgress) -> TickResult:
    runs = (run.report for run in progress.runs if run.report is not None)
    reports = (*(progress.general or ()), *runs, *progress.storage)
    why = why_tick_was_blind(progress)
    return TickResult(
        orders.now,
        reports,
        why,
        progress,
        progress.all_delivered(),
        tuple(progress.complaints()),
        tuple(progress.relief),
    )


def _import_all(orders: TickOrders) -> None:
    """Import our watchdogs here: a child that imports them cannot hand them to the next one. Those of other packages run in
    children alone."""
    for name in orders.only or WATCHDOGS:
        load_watchdog(name)


class _Children:
    """The children of one tick."""

    def __init__(self, orders: TickOrders, progress: TickProgress) -> None:
        self.orders, self.progress, self.notes = orders, progress, Notes()
        self.mounts = Mounts(read_mounts())
        self.running: dict[Errand, list[int]] = {}

    # -------------------------------------------------------------------------------------------------------- the runs

    def go(self) -> None:
        roster = self.progress.roster
        stuck = {note.key: note for note in self.notes.stuck()}
        note = stuck.get(self._state_key)
        if roster.away or note is not None:
            self._state_is_away(roster.away or _silence(self.orders.state, note.seconds if note else 0.0))
        for index in range(len(roster.names)):
            note = stuck.get(roster.key(index))
            if note is not None:
                self._no_answer(
                    index, note.seconds, _what(note), f"process {note.pid} hangs on it and cannot be killed"
                )
        left = [index for index, run in enumerate(self.progress.runs) if not run.hung]
        slow, roster.slow = roster.slow, set()
        waiting = deque([[i for i in left if i not in slow], *([i] for i in left if i in slow)])
        try:
            while waiting or self.running:
                while waiting and self._may_start():
                    self._start(waiting.popleft())
                if self.running:
                    readable(self.running, 0.2)
                for errand, group in list(self.running.items()):
                    waiting.extend(self._look_after(errand, group))
        finally:
            for errand in self.running:
                errand.finish("errand", "a tick that was stopped")

    def _may_start(self) -> bool:
        """Return whether a further child may start: until the scheduler has answered there is one child, which asks it."""
        return not self.running or (self.progress.queues is not None and len(self.running) < _AT_ONCE)

    def _start(self, group: list[int]) -> None:
        if group:
            errand = Errand(lambda say: Tour(self.orders, self.progress, group, say).go(), notes=self.notes)
            self.running[errand] = group

    def _look_after(self, errand: Errand, group: list[int]) -> list[list[int]]:
        """Apply what one child reports. Returns the groups that are to be started because it cannot go on."""
        for event in errand.heard():
            self.progress.apply(event)
        if errand.ended and not errand.died:
            del self.running[errand]
            errand.finish("messages", "a receiver")  # a sender may still hang, in a thread of it
            if errand.error is not None:
                raise errand.error
            return []
        if not errand.died and not errand.late:
            return []
        del self.running[errand]
        at, silent = errand.at, errand.silent
        key = self._state_key if at.words == FINDS else self.progress.roster.key(at.item) if at.item >= 0 else at.words
        gone = errand.finish(key, at.words)
        why = errand.died or f"no answer within {silent:.0f} s" + (f"; process {errand.pid} hangs on it" * (not gone))
        self._give_up(at, silent, why, group)
        return self._divided(at.item, [index for index in group if not self._done(index)])

    def _give_up(self, at: At, seconds: float, why: str, group: Sequence[int]) -> None:
        """Report that the child did not come back from ``at``, and see to it that the next one does not go there."""
        progress = self.progress
        if at.item < 0:
            self._give_up_for_all(at, why, group)
        elif at.words == FINDS:
            self._state_is_away(_silence(self.orders.state, seconds))
        elif at.words == SENDS:
            progress.runs[at.item].sent = True
            progress.notes.append(f"{progress.roster.label(at.item)}: could not {SENDS}: {why}")
            self._no_answer(at.item, seconds, at.words, why)
        elif at.words == EXPORTS:
            for run in progress.runs:  # all that are left: most write to one place
                run.exported = True
            progress.notes.append(f"{progress.roster.label(at.item)}: could not {EXPORTS}: {why}")
            return
        elif at.words == RELIEVES:
            progress.runs[at.item].waits = False
            progress.notes.append(f"{progress.roster.label(at.item)}: could not {RELIEVES}: {why}")
        else:
            self._no_answer(at.item, seconds, at.words, why)
        if at.item >= 0:
            progress.roster.slow.add(at.item)

    def _give_up_for_all(self, at: At, why: str, group: Sequence[int]) -> None:
        if self.progress.queues is None:
            words = {run.scheduler for run in self.progress.roster.runs}
            self.progress.queues = {word: QueueAnswer(None, f"could not {at.words}: {why}", word) for word in words}
            self.progress.asked = None
        else:
            for index in group:
                self.progress.runs[index].sent = True
            self.progress.notes.append(f"could not {at.words or 'begin'}: {why}")

    def _no_answer(self, index: int, seconds: float, doing: str, why: str) -> None:
        """Leave this run alone for the rest of the tick. It is still checked only where its settings hang and are known."""
        run, known = self.progress.runs[index], self.progress.roster.known.get(index)
        if doing in (FINDS, READS) and not run.settled:
            run.settled, run.hung = True, known is None
            run.trouble = Unanswered(f"its storage does not answer: could not {doing}: {why}")
            return
        run.hung, run.report = True, None
        if known is not None:
            run.storage = checks.silent(known.run, seconds, doing, why, self.orders.now)

    def _done(self, index: int) -> bool:
        run = self.progress.runs[index]
        if run.hung or (run.settled and index not in self.progress.roster.known):
            return True
        return run.sent and not run.waits

    def _divided(self, hung: int, left: list[int]) -> list[list[int]]:
        """Split up the rest: a run on the device of the one that hung may hang as well, so each of those gets a child
        of its own.
        """
        if hung < 0:
            return [left]
        device = self.mounts.of(self.progress.roster.place(hung))
        alone = [index for index in left if self.mounts.of(self.progress.roster.place(index)) == device]
        return [[index for index in left if index not in alone], *([index] for index in alone)]

    # --------------------------------------------------------------------------------------------- the state directory

    @property
    def _state_key(self) -> str:
        return rosters.state_key(self.orders.state)

    def _state_is_away(self, why: str) -> None:
        """Leave the state directory alone for the rest of the tick: the meaning of names is remembered on this host."""
        progress, before = self.progress, rosters.directories()
        progress.away = why
        for index, (name, run) in enumerate(zip(progress.roster.names, progress.runs, strict=True)):
            if index in progress.roster.known or run.directory or name is None or not rosters.is_name(name):
                continue
            if name in before:
                run.directory = before[name]
            else:
                run.settled = run.hung = True
                run.trouble = Unanswered(f"its directory cannot be looked up: {why}")

    def do_general(self) -> None:
        """Do what belongs to no single run. A state directory that hangs costs one bound."""
        progress, names = self.progress, self.progress.roster.names
        found = {str(name): run.directory for name, run in zip(names, progress.runs, strict=True) if run.directory}
        if found and not progress.away:
            rosters.remember(found)
        for _ in range(3):
            errand = Errand(lambda say: work(self.orders, progress, say), notes=self.notes)
            try:
                while not errand.ended and not errand.late:
                    for event in errand.wait(0.2):
                        progress.apply(event)
                for event in errand.heard():
                    progress.apply(event)
            finally:
                at, silent = errand.at, errand.silent
                errand.finish(self._state_key if at.words == KEEPS and not errand.ended else "messages", at.words)
            if errand.error is not None:
                raise errand.error
            if errand.ended and not errand.died:
                break
            if at.words == KEEPS and not progress.away:
                self._state_is_away(_silence(self.orders.state, silent))
                continue
            progress.notes.append(f"could not {at.words}: {errand.died or f'no answer within {silent:.0f} s'}")
            progress.pinged = progress.pinged or at.words == PINGS
            progress.general = progress.general or ()
        if progress.away:
            progress.notes.append(progress.away)


def _silence(state: Path, seconds: float) -> str:
    return f"{state} has not answered for {show_duration(seconds)}"


def _what(note: Note) -> str:
    return note.what or "check it"
