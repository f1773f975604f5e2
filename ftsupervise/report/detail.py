"""One run in full, as ``status RUN`` shows it: its row, where its time went, its jobs and attempts, nodes, alerts and log."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.model import Cause, CauseKind
from ftsupervise.report import Status, gather
from ftsupervise.report.account import Ettr, Spent, TimeAccount, account
from ftsupervise.report.observed import ObservedRow, observed_rows, observes
from ftsupervise.report.placing import DrawnTime, placed
from ftsupervise.report.queues import QueueSeen
from ftsupervise.report.row import RunRow, row_of
from ftsupervise.rundir.attempt_pages import VerdictPage, read_page
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.ledger import lives_here
from ftsupervise.rundir.observing import observed_alone
from ftsupervise.rundir.paths import TRACKER, RunDir, tracked_attempts
from ftsupervise.rundir.progress import read_marks, read_steps

if TYPE_CHECKING:
    from ftsupervise.checkpoints.quarantine import Quarantined
    from ftsupervise.model import Attempt
    from ftsupervise.report.groups import GroupsSeen
    from ftsupervise.rundir.tracker import TrackerPage

_FRESH = 60.0  # seconds: a page that young is of an attempt that runs, where the queue cannot be asked
_NO_MORE = frozenset(("FINISHED", "STOPPED"))  # no group is to train
_OVER = frozenset(("FINISHED", "STOPPED", "GONE", "NEW", "WAITING"))


class TimeSpent(NamedTuple):
    """The account of its time, for programs. Shares are 0-1; a ratio has a least and a most value where time is unknown."""

    since: datetime
    until: datetime
    seconds: Mapping[str, float]
    goodput: Ettr | None
    ettr_meta: Ettr | None
    ettr_byterobust: Ettr | None
    ettr_last_hour: Ettr | None
    without_guard: tuple[int, ...]


class RunDetail(NamedTuple):
    status: Status
    row: RunRow
    account: TimeAccount
    avoided: tuple[str, ...] | None  # nodes; None: could not be seen
    log: Path | None  # the newest output of its jobs, where it has one
    drawn: DrawnTime  # the account, as pictures show it
    groups: GroupsSeen | None = None  # its replica groups, where it has some
    tracker: TrackerPage | None = None  # its page in an experiment tracker
    aside: tuple[Quarantined, ...] = ()  # checkpoints that were set aside
    observes: tuple[str, ...] = ()  # decisions that are only told at present
    would: tuple[ObservedRow, ...] = ()  # those that were, oldest first
    diagnosis: VerdictPage | None = None  # of the newest attempt, where it failed and that is kept

    @property
    def time(self) -> TimeSpent:
        of = self.account
        return TimeSpent(
            of.since,
            of.until,
            {kind.value: round(seconds, 3) for kind, seconds in of.seconds().items()},
            of.goodput(),
            of.ettr_meta(),
            of.ettr_byterobust(),
            of.ettr_last(),
            of.blind,
        )


def detail(rundir: RunDir, now: datetime, env: Mapping[str, str]) -> RunDetail:
    """Read one run in full. Raises NotFound, NotPermitted when the run directory cannot be read."""
    seen = gather(rundir, now, env)
    row = row_of(seen.run, QueueSeen(seen.jobs, seen.blind))
    groups = _groups(seen, now)
    tracker = _tracker(rundir, seen.run.last.number if seen.run.last is not None else 0)
    avoided = avoided_nodes(rundir, now)
    spent = account_of(seen)
    drawn = placed(spent.stretches, read_steps(rundir))
    aside = _set_aside(rundir)
    told = observes(rundir, seen.attempts[-1] if seen.attempts else None)
    launched = _launched(rundir)
    would = observed_rows(attempts_of(seen), launched, observed_alone(rundir, launched))
    known = _diagnosis(seen)
    return RunDetail(seen, row, spent, avoided, _newest_log(seen), drawn, groups, tracker, aside, told, would, known)


def with_receivers(found: RunDetail) -> RunDetail:
    """Add the state of its receivers. What reads a journal is imported only where there is one."""
    journal = found.status.rundir.watch / "journal"
    try:
        if not os.listdir(journal):
            return found
    except OSError:
        return found
    from ftsupervise.alerts.self_monitor import telling

    return found._replace(status=found.status._replace(telling=telling(journal, found.status.at)))


def _launched(rundir: RunDir) -> tuple[datetime, ...]:
    try:
        return tuple(one.at for one in launches(rundir))
    except OSError:
        return ()


def _set_aside(rundir: RunDir) -> tuple[Quarantined, ...]:
    if not os.path.lexists(rundir.checkpoints / ".quarantine"):  # what reads them is imported where there are some
        return ()
    from ftsupervise.checkpoints.quarantine import quarantined

    try:
        return quarantined(rundir.checkpoints)
    except OSError:
        return ()


def _tracker(rundir: RunDir, newest: int) -> TrackerPage | None:
    if not any(os.path.lexists(rundir.attempt(number) / TRACKER) for number in tracked_attempts(newest)):
        return None  # what reads them is imported where there are some
    from ftsupervise.rundir.tracker import read_tracker

    return read_tracker(rundir, newest)


def _groups(seen: Status, now: datetime) -> GroupsSeen | None:
    rundir = seen.rundir
    if not os.path.lexists(rundir.replicas):  # what reads them is imported where there are some
        return None
    from ftsupervise.report.groups import groups_of

    return groups_of(rundir, now, seen.jobs, over=seen.verdict in _NO_MORE)


def account_of(seen: Status) -> TimeAccount:
    run = seen.run
    running = runs_now(seen)
    stopped = Spent.BRAKED if run.brake and not run.switches[0].up else Spent.HELD
    # of a run that is gone too: nobody has launched it since
    after = {"WAITING": Spent.QUEUE, "STOPPED": stopped, "GONE": Spent.HELD}.get(seen.verdict, Spent.UNKNOWN)
    marks = read_marks(run.rundir)
    return account(run.attempts, run.records, run.at, running=running, afterwards=after, marks=marks)


def runs_now(seen: Status) -> bool:
    """Tell whether the newest attempt still runs, by the queue or its own page."""
    if seen.run.last is None or seen.run.last.ended is not None:
        return False
    if lives_here(seen.run.last):
        return True
    if seen.verdict != "UNKNOWN":
        return seen.verdict not in _OVER
    page = seen.run.page
    return page is not None and abs((seen.at - page.at).total_seconds()) < _FRESH


def attempts_of(seen: Status) -> tuple[Attempt, ...]:
    """Return the ledger with what the queue adds: an attempt on another host without a recorded end runs, or is lost."""
    runs, last = runs_now(seen), len(seen.attempts) - 1
    found = []
    for index, one in enumerate(seen.attempts):
        if one.ended is None and one.kind is CauseKind.UNKNOWN:
            if runs and index == last:
                one = one._replace(cause=None)
            elif not one.stop_signal and (index < last or seen.verdict != "UNKNOWN"):
                one = one._replace(cause=Cause(CauseKind.LOST))
        found.append(one)
    return tuple(found)


def _diagnosis(seen: Status) -> VerdictPage | None:
    last = seen.run.last
    if last is None or not attempts_of(seen)[-1].has_failed:
        return None
    return read_page(VerdictPage, seen.rundir.attempt(last.number))


def avoided_nodes(rundir: RunDir, now: datetime) -> tuple[str, ...] | None:
    try:
        if all(one.is_dir() and not os.listdir(one.path) for one in os.scandir(rundir.nodes)):
            return ()  # the folders that launch makes
    except FileNotFoundError:
        return ()
    except OSError:
        return None
    from ftsupervise.nodes.judging import of_run_dir, read_and_judge

    return tuple(one.name for one in read_and_judge(*of_run_dir(rundir), now).nodes if one.excluded)


def _newest_log(seen: Status) -> Path | None:
    outputs = seen.run.last.outputs if seen.run.last is not None else ()
    return Path(outputs[-1].path) if outputs else None
