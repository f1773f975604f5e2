"""The findings of a tick that belong to no single run: Slurm's health, settings that cannot be read, run directories that do
not answer or are gone; and the dead-man. It is kept in this account's state directory, because the runs' own cannot be written.

Done by a child, as the runs are (``tick.py``). When the state directory itself hangs, another child does it without
(``away``): the journals' spares on this host take it down until the directory answers again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.alerts.deliver import Delivered
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.receivers import Broken, TryLater, read_secret, redact, safe_address
from ftsupervise.alerts.record import record
from ftsupervise.findings import Alert, Finding, Notice
from ftsupervise.host import ownership
from ftsupervise.host.ownership import make_folder, make_own
from ftsupervise.truth import Health
from ftsupervise.watch import checks
from ftsupervise.watch.checks import host_finding, settings_finding, slurm_finding
from ftsupervise.watch.roster import MessagesSent, RunDirChecked, RunReport, TickProgress
from ftsupervise.watch.tour import BOUND, TickOrders, needed_queues, send, slurm_queue, unfinished

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts, DeadMan
    from ftsupervise.probe.errand import Say

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

    address = ""
    try:
        address = safe_address(read_secret(settings, "url"), "dead_man.url").rstrip("/")
        seconds = settings.timeout.total_seconds()
        with requests.post(
            address + suffix,
            data=redact(text).encode(),
            timeout=(seconds, seconds),
            allow_redirects=False,
            stream=True,
            headers={"Content-Type": "text/plain; charset=utf-8", "User-Agent": "ftsupervise"},
        ) as answer:
            return "" if answer.status_code < 300 else f"the dead-man service answered HTTP {answer.status_code}"
    except (Broken, TryLater) as error:
        return str(error)
    except (requests.RequestException, OSError, ValueError) as error:
        return redact(f"the dead-man service: {type(error).__name__}: {error}", [address])


KEEPS, PINGS = "use this account's state directory", "tell the dead-man service"
PINGING = 60.0


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
    queue = slurm_queue(progress)
    if queue is not None:
        findings.append(slurm_finding(queue, orders.now, [run.name for run in unfinished(progress)]))
    host = host_finding(ownership.own_folder_taken(), orders.now)
    if host.health is Health.BAD or host.subject in known:
        findings.append(host)
    if not findings:
        return []
    recorded = record(journal, findings, settings, orders.now, run_name="", where=str(runs[0].run_dir))
    return [(_run_report("watch", findings, recorded.firing, recorded.notices), journal, settings)]


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


def blind(progress: TickProgress) -> str:
    """Return why this tick could not see all that it was to check; "" if it could."""
    unasked = [queue.blind for queue in needed_queues(progress) if queue.jobs is None]
    silent = [finding.summary for _, finding in progress.stored() if finding.health is Health.BAD]
    return next(iter([*unasked, *silent]), "")


def _ping(progress: TickProgress) -> list[str]:
    """Ping each dead-man service once, whichever runs name it."""
    said = []
    done: set[str] = set()
    why = blind(progress) or next(iter(progress.complaints()), "")
    for run in progress.roster.runs:
        service = run.alerts.dead_man
        if service is None or service.model_dump_json() in done:
            continue
        done.add(service.model_dump_json())
        said.append(after_tick(service, progress.all_delivered(), why))
    return [f"dead-man: {words}" for words in said if words]
