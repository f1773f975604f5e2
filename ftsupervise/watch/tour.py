"""What the child of a tick does: everything that touches a disk which may be dead, or asks somebody who may be silent.

Before each step it says at which run it is, at what, and how long that may take; each thing it has done it tells. Its parent
(``tick.py``) keeps the same account (``Account``) from what it was told, so that another child can go on where one hung.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise.alerts.deliver import Delivered, deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.record import announce, record
from ftsupervise.alerts.wording import event_finding
from ftsupervise.errors import Error
from ftsupervise.findings import Finding
from ftsupervise.host.users import user_name
from ftsupervise.probe import Probe
from ftsupervise.rundir import pinned, watchers
from ftsupervise.rundir.launches import people
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import as_time, read_json, time_of
from ftsupervise.scheduler.ownership import own_job_ids
from ftsupervise.truth import Health
from ftsupervise.watch import roster as rosters
from ftsupervise.watch import run_dir_check
from ftsupervise.watch.account import Account, Found, Looked, Queues, Relieved, Sent, Settled, Stands, Told
from ftsupervise.watch.checks import Queue, Seen, ask, look_at, settings_finding, slurm_finding, write_memory
from ftsupervise.watch.events import Event, events

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.probe.errand import Say
    from ftsupervise.scheduler import Scheduler

BOUND = 8.0  # seconds that a step on somebody's disk may take
ASKING = 75.0  # … that the scheduler may take: its command is ended after 60
SENDING = (
    80.0  # … that a delivery may be silent: it ends by itself after about 45, and the last message may take 20 more
)
RELIEVING = 150.0  # … that it may take to bring Slurm's lists up to date

FINDS, READS, STANDS = "find where it lies", "read its settings", "look at its directory"
SENDS, RELIEVES = "send its messages", "take nodes back for it"


@dataclass(frozen=True)
class Orders:
    """What a tick is to do: the same for all its children."""

    now: datetime
    state: Path
    env: Mapping[str, str]
    scheduler: Callable[[str], Scheduler]  # by the word that stands in the settings
    only: Sequence[str] = ()
    send: bool = True
    every: timedelta | None = None
    relieve: Callable[[Run, datetime], Sequence[str]] | None = None


# ------------------------------------------------------------------------------------------------------------- the way


class Tour:
    """One child's way through the runs ``group``."""

    def __init__(self, orders: Orders, account: Account, group: Sequence[int], say: Say) -> None:
        self.orders, self.account, self.group, self.say = orders, account, group, say
        self.journals: dict[int, Journal] = {}

    def tell(self, event: Any) -> None:
        self.account.hear(event)
        self.say.tell(event)

    def go(self) -> None:
        for index in self.group:
            if index not in self.account.settled:
                self._settle(index)
        for index in self.group:
            if index in self.account.roster.known and index not in self.account.stored:
                self._stand(index)
        if self._must_ask():
            self._ask()
        with Probe(waits=self.say.waits) as probe:
            for index in self.group:
                if self.account.stands(index) and index not in self.account.told:
                    self._look(index, probe)
        if self.orders.send:
            self._send()
            self._relieve()

    def _settle(self, index: int) -> None:
        name, known = self.account.roster.names[index], self.account.roster.known.get(index)
        if known is None and index not in self.account.found:
            self.say.at(index, FINDS, BOUND)
            directory = rosters.target(name)
            if directory is not None:
                self.tell(Found(index, directory))
        self.say.at(index, READS, BOUND)
        try:
            now = rosters.read(self.account.found.get(index, name), known, trust=self.account.roster.trust)
        except Error as error:
            self.tell(Settled(index, None, error))
        else:
            self.tell(Settled(index, None if now is known else now))

    def _stand(self, index: int) -> None:
        run = self.account.roster.known[index].run
        rundir = RunDir(str(run.run_dir))
        self.say.at(index, STANDS, BOUND)
        try:
            rundir.root.stat()
        except (FileNotFoundError, NotADirectoryError):
            self.tell(Stands(index, run_dir_check.missing(run, self.orders.now), missing=True))
        except OSError as error:
            self.tell(Stands(index, run_dir_check.unusable(run, error, self.orders.now)))
        else:
            self.tell(
                Stands(index, self._replaced(index) or run_dir_check.answers(run, self.orders.now), people(rundir))
            )

    def _replaced(self, index: int) -> Finding | None:
        """Does another directory stand in the place of the run's? Also asked of where its settings lie: they name the other."""
        known = self.account.roster.known[index]
        if self.account.away:
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
            except OSError:  # what cannot be seen is told by those who look
                continue
            if why:
                return run_dir_check.replaced(known.run, root, why, self.orders.state, self.orders.now)
        return None

    def _must_ask(self) -> bool:
        """Once for all; again only for a run that stood apart and is somebody's about whom nobody asked."""
        account = self.account
        if account.queues is None or account.asked is None:
            return account.queues is None
        words = {run.scheduler for run in account.roster.runs}
        return not (account.users <= account.asked and words <= account.queues.keys())

    def _ask(self) -> None:
        users = tuple(sorted({user_name(), *self.account.users}))
        self.say.at(-1, "find the scheduler", BOUND)  # (which asks Slurm for five seconds where it is in doubt)
        doors = {run.scheduler: self.orders.scheduler(run.scheduler) for run in self.account.roster.runs}
        answers = {door.kind: self._answer(door, users) for door in {d.kind: d for d in doors.values()}.values()}
        self.tell(Queues({word: answers[door.kind] for word, door in doors.items()}, frozenset(users)))

    def _answer(self, door: Scheduler, users: Sequence[str]) -> Queue:
        if door.kind == "local" and self.account.away:
            return Queue(None, f"the local queue lies in it: {self.account.away}", door.kind)
        self.say.at(-1, "ask the scheduler", BOUND if door.kind == "local" else ASKING)
        return ask(door, users)

    def _look(self, index: int, probe: Probe) -> None:
        run, orders = self.account.roster.known[index].run, self.orders
        rundir = RunDir(str(run.run_dir))
        self.say.at(index, "look at it", BOUND)
        journal = self._journal(index)
        try:
            seen = look_at(
                run,
                rundir,
                queue_of(run, self.account.queues or {}),
                orders.now,
                own=own_job_ids(orders.env),
                only=orders.only,
                due_only=not orders.only,
                probe=probe,
                at=lambda name: self.say.at(index, f"look at it (watchdog {name})", BOUND),
            )
            self.say.at(index, "write down what was found", BOUND)
            told = _tell(seen, journal, orders.now, beside=bad_in_general(self.account, orders.now))
            self.say.at(index, "write down that it was looked at", BOUND)
            trouble = tuple(_remember(seen, orders.now, orders.every))
            waits = bool(seen.jobs) and all(job.state.waiting for job in seen.jobs or ())
            self.tell(Looked(index, told, trouble, waits))
        except Exception as error:  # a broken directory must neither end the watch of the others nor go unnoticed
            self.tell(Stands(index, run_dir_check.unusable(run, error, orders.now)))

    def _journal(self, index: int) -> Journal:
        if index not in self.journals:
            run = self.account.roster.known[index].run
            self.journals[index] = Journal(RunDir(str(run.run_dir)).watch / "journal")
        return self.journals[index]

    def _send(self) -> None:
        account = self.account
        out = account.missing | account.hung | account.sent
        mine = [i for i in self.group if i in account.roster.known and i in account.stored and i not in out]
        if mine:
            settings = [account.roster.known[i].run.alerts for i in mine]
            journals = [self._journal(i) for i in mine]
            self.tell(Sent(tuple(mine), send(journals, settings, self.orders.now, self.say, mine)))

    def _relieve(self) -> None:
        for index in [i for i in self.group if i in self.account.waiting]:
            if self.orders.relieve is not None:
                run = self.account.roster.known[index].run
                self.say.at(index, RELIEVES, RELIEVING)
                sentences = tuple((run.name, sentence) for sentence in self.orders.relieve(run, self.orders.now))
                self.tell(Relieved(index, sentences))


def send(
    journals: Sequence[Journal], settings: Sequence[Any], now: datetime, say: Say, items: Sequence[int]
) -> Delivered:
    """What is due in ``journals``, each of the run ``items`` has at its place."""
    for journal, item in zip(journals, items, strict=True):  # a journal that hangs does so while nothing is claimed
        say.at(item, SENDS, BOUND)
        journal.read()
    say.at(-1, "send messages", SENDING)
    return deliver(journals, settings, now)


def queue_of(run: Run, queues: Mapping[str, Queue]) -> Queue:
    if run.scheduler in queues:
        return queues[run.scheduler]
    return Queue(None, "the scheduler was not asked")


def bad_in_general(account: Account, now: datetime) -> list[Finding]:
    """What may explain a finding of any run, and is told by itself."""
    found = [settings_finding(account.roster.label(i), why, now) for i, why in account.trouble.items()]
    queue = slurm_queue(account)
    if queue is not None and queue.jobs is None:
        found.append(slurm_finding(queue, now, [run.name for run in account.roster.runs]))
    return found


def slurm_queue(account: Account) -> Queue | None:
    return next((queue for queue in (account.queues or {}).values() if queue.kind == "slurm"), None)


def _tell(seen: Seen, journal: Journal, now: datetime, *, beside: Sequence[Finding]) -> Told:
    recorded = record(journal, seen.findings, seen.run.alerts, now, run_name=seen.run.name, beside=beside)
    said = []
    for event in _events(seen):
        look = f"ftsupervise status {shlex.quote(str(seen.rundir.root))}"
        finding = event_finding(seen.run.name, event.kind, event.summary, now, look=look, meaning=event.meaning)
        if announce(journal, seen.run.alerts, event.kind, event.dedup, finding):
            said.append(f"{event.kind.value}: {event.summary}")
    shown = tuple(finding for finding in seen.findings if finding.health is not Health.OK)
    return Told(seen.run.name, shown, recorded.firing, recorded.notices, tuple(said), len(seen.findings))


def _events(seen: Seen) -> tuple[Event, ...]:
    """What the ledger and the marks say happened; () when they cannot be read this time."""
    try:
        attempts = ledger(seen.rundir)
        mark = read_json(seen.rundir.finished)
        finished_at = None if mark is None else _mark_time(seen.rundir, mark)
    except ValueError:  # ``touch state/finished`` leaves an empty file
        finished_at = _mark_time(seen.rundir, {})
    except OSError:
        return ()
    return events(attempts, finished_at=finished_at)


def _mark_time(rundir: RunDir, mark: Mapping[str, object]) -> datetime:
    return as_time(mark.get("at")) or time_of(rundir.finished.stat())


def _remember(seen: Seen, now: datetime, every: timedelta | None) -> list[str]:
    """The watchdogs' memory, and this watcher's own beat, which the run's guard and other watchers look at."""
    try:
        write_memory(seen.rundir, seen.memory)
        watchers.beat(seen.rundir, now, every)
    except OSError as error:
        return [f"{seen.run.name}: cannot write {seen.rundir.watch}: {error.strerror}"]
    return []
