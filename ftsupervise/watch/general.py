"""What a tick tells that is nobody's in particular: Slurm's health, settings that cannot be read, run directories that do
not answer or are gone; and the dead-man. It is kept in this account's state directory, because the runs' own cannot be written.

Done by a child, as the runs are (``tick.py``). When the state directory itself hangs, another child does it without
(``away``): the journals' spares on this host take it down until the directory answers again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.alerts import deadman
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.record import record
from ftsupervise.findings import Alert, Finding, Notice
from ftsupervise.host import private
from ftsupervise.host.modes import make_folder, make_own
from ftsupervise.truth import Health
from ftsupervise.watch import run_dir_check
from ftsupervise.watch.account import Account, Sent, Told
from ftsupervise.watch.checks import host_finding, settings_finding, slurm_finding
from ftsupervise.watch.tour import BOUND, Orders, send, slurm_queue

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts
    from ftsupervise.probe.errand import Say

KEEPS, PINGS = "use this account's state directory", "tell the dead-man service"
PINGING = 60.0


class Judged(NamedTuple):
    """The storage of run ``index``, now that the state directory has been asked whether the run was ever launched."""

    which: int
    finding: Finding

    def into(self, account: Account) -> None:
        account.stored[self.which] = self.finding


class Generally(NamedTuple):
    first: tuple[Told, ...]  # of nobody in particular
    last: tuple[Told, ...]  # of storage

    def into(self, account: Account) -> None:
        account.in_general = self.first, self.last


class Pinged(NamedTuple):
    trouble: tuple[str, ...]

    def into(self, account: Account) -> None:
        account.pinged = True
        account.notes += self.trouble


def work(orders: Orders, account: Account, say: Say) -> None:
    """What is left of it to be done."""
    away = account.away
    if account.in_general is None:
        say.at(-1, KEEPS, BOUND)
        general = _tell_in_general(orders, account, away)
        told = [*general, *_tell_of_storage(orders, account, say, away)]
        _tell(
            account, say, Generally(tuple(one for one, *_ in general), tuple(one for one, *_ in told[len(general) :]))
        )
        if orders.send and told:
            journals, settings = [journal for _, journal, _ in told], [alerts for *_, alerts in told]
            _tell(account, say, Sent((), send(journals, settings, orders.now, say, [-1] * len(told))))
    if orders.send and not account.pinged:
        say.at(-1, PINGS, PINGING)
        _tell(account, say, Pinged(tuple(_ping(account))))


def _tell(account: Account, say: Say, event: NamedTuple) -> None:
    account.hear(event)
    say.tell(event)


def _tell_in_general(orders: Orders, account: Account, away: str) -> list[tuple[Told, Journal, Alerts]]:
    """Slurm's own health, one alert for all runs, and runs whose settings cannot be read: told to all who watch any run."""
    runs = account.roster.runs
    if not runs:
        return []
    settings = _everybody([run.alerts for run in runs])
    journal = _journal(orders.state, orders.state / "watch" / "journal", away)
    told = {alert.finding.subject for alert in journal.read().alerts.values()}
    every = range(len(account.roster.names))
    looked = [settings_finding(account.roster.label(i), account.trouble.get(i, ""), orders.now) for i in every]
    findings = [one for one in looked if one.health is Health.BAD or one.subject in told]
    queue = slurm_queue(account)
    if queue is not None:
        findings.append(slurm_finding(queue, orders.now, [run.name for run in runs]))
    host = host_finding(private.taken(), orders.now)
    if host.health is Health.BAD or host.subject in told:
        findings.append(host)
    if not findings:
        return []
    recorded = record(journal, findings, settings, orders.now, run_name="", where=str(runs[0].run_dir))
    return [(_as_told("watch", findings, recorded.firing, recorded.notices), journal, settings)]


def _tell_of_storage(orders: Orders, account: Account, say: Say, away: str) -> Iterator[tuple[Told, Journal, Alerts]]:
    """Run directories that do not answer or cannot be used, and those that could not and can again."""
    for index in sorted(account.stored):
        run, finding = account.roster.known[index].run, account.stored[index]
        if index in account.missing:
            finding = run_dir_check.launched_or_not(run, finding, orders.state, away)
            _tell(account, say, Judged(index, finding))
        elif finding.health is Health.OK and not away:
            run_dir_check.remember(run, orders.state)
        folder = run_dir_check.journal_of(run, orders.state)
        if finding.health is not Health.BAD and (away or not folder.is_dir()):
            if finding.health is Health.UNKNOWN:  # not launched yet: nothing to record, something to print
                yield (
                    _as_told(run.name, [finding], (), ()),
                    _journal(orders.state, folder, away or "not needed"),
                    run.alerts,
                )
            continue
        journal = _journal(orders.state, folder, away)
        answers = finding if finding.health is Health.BAD else replace(finding, health=Health.OK)
        recorded = record(journal, [answers], run.alerts, orders.now, run_name=run.name, where=str(run.run_dir))
        yield _as_told(run.name, [finding], recorded.firing, recorded.notices), journal, run.alerts


def _as_told(name: str, findings: Sequence[Finding], firing: Sequence[Alert], notices: Sequence[Notice]) -> Told:
    shown = tuple(finding for finding in findings if finding.health is not Health.OK)
    return Told(name, shown, tuple(firing), tuple(notices), (), len(findings))


def _journal(state: Path, folder: Path, away: str) -> Journal:
    if not away:
        try:
            make_own(state)
            make_folder(folder.parent, parents=True)
        except OSError:  # best effort: without it the journal goes to its spare place and says so
            pass
    return Journal(folder, away=away)


def _everybody(all_settings: Sequence[Alerts]) -> Alerts:
    """The first run's settings with every run's receivers, each once. Routes are the first run's."""
    first = all_settings[0]
    receivers = {receiver.model_dump_json(): receiver for one in all_settings for receiver in one.receivers}
    taken = {receiver.name for receiver in first.receivers}
    more = [r for r in receivers.values() if r not in first.receivers and (r.name is None or r.name not in taken)]
    return first.model_copy(update={"receivers": (*first.receivers, *more)}) if more else first


def blind(account: Account) -> str:
    """Why this tick could not see all that it was to look at; "" if it could."""
    unasked = [queue.blind for queue in (account.queues or {}).values() if queue.jobs is None]
    dark = [finding.summary for _, finding in sorted(account.stored.items()) if finding.health is Health.BAD]
    return next(iter([*unasked, *dark]), "")


def _ping(account: Account) -> list[str]:
    """Tell each dead-man service once, whichever runs name it."""
    said = []
    done: set[str] = set()
    why = blind(account) or next(iter(account.complaints()), "")
    for run in account.roster.runs:
        service = run.alerts.dead_man
        if service is None or service.model_dump_json() in done:
            continue
        done.add(service.model_dump_json())
        said.append(deadman.after_tick(service, could_see=not why, delivered=account.all_delivered(), why_blind=why))
    return [f"dead-man: {words}" for words in said if words]
