"""One tick over many runs: look, write down what changed, tell people, say that the watch lives.

Order matters. Everything that was found is saved with its messages before the first is sent, so a tick that is killed half-way
is finished by the next one. The dead-man is pinged last, and only if this tick could see.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise import watchers
from ftsupervise.alerts import deadman
from ftsupervise.alerts.deliver import Delivered, deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.tick import announce, record
from ftsupervise.ledger import ledger
from ftsupervise.model import Alert, Finding, Health, Notice
from ftsupervise.probe import Probe
from ftsupervise.records import people
from ftsupervise.rundir import RunDir, read_json
from ftsupervise.sharing import FOLDER, make_folder
from ftsupervise.watch import storage
from ftsupervise.watch.belongs import own_job_ids
from ftsupervise.watch.events import Event, events
from ftsupervise.watch.looking import Queue, Seen, ask, look_at, settings_finding, slurm_finding, write_memory

if TYPE_CHECKING:
    from ftsupervise.config.alerting import Alerts
    from ftsupervise.config.schema import Run
    from ftsupervise.scheduler import Scheduler


@dataclass(frozen=True)
class Told:
    """What one tick found and said about one run (or, with no run, about Slurm itself)."""

    name: str
    findings: tuple[Finding, ...]
    firing: tuple[Alert, ...]
    notices: tuple[Notice, ...]
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ticked:
    """The whole tick, for the person who ran it by hand."""

    at: datetime
    runs: tuple[Told, ...]
    blind: str
    delivered: Delivered = field(default_factory=Delivered)
    trouble: tuple[str, ...] = field(default=())  # what the watch itself could not do
    waiting: tuple[Run, ...] = ()  # runs with jobs in the queue of which none runs


def tick(
    runs: Sequence[Run],
    schedulers: Mapping[str, Scheduler],
    now: datetime,
    *,
    state: Path,
    env: Mapping[str, str],
    only: Sequence[str] = (),
    send: bool = True,
    roster: Mapping[str, str] = {},
    every: timedelta | None = None,
) -> Ticked:
    """Look at every run once and tell what changed. ``schedulers`` by kind; ``state`` is this account's directory.

    ``roster``: the runs that were named, each with why its settings could not be read this time, "" if they could; those
    who watch the others are told. ``every``: how often this watcher means to look, if it does so by itself.
    """
    with Probe() as probe:
        return _tick(
            runs, schedulers, now, probe, state=state, env=env, only=only, send=send, roster=roster, every=every
        )


def _tick(
    runs: Sequence[Run],
    schedulers: Mapping[str, Scheduler],
    now: datetime,
    probe: Probe,
    *,
    state: Path,
    env: Mapping[str, str],
    only: Sequence[str],
    send: bool,
    roster: Mapping[str, str],
    every: timedelta | None,
) -> Ticked:
    own = own_job_ids(env)
    stored = storage.look_for(runs, probe, now, state)
    dark = [finding for _, finding in stored if _bad(finding)]
    everything, runs = runs, [run for run, finding in stored if finding.health is Health.OK]
    storage.remember(runs, state)
    queues = {kind: ask(scheduler, _users(runs)) for kind, scheduler in schedulers.items()}
    trouble = [f"{name}: {why}" for name, why in roster.items() if why]
    general = _tell_in_general(queues.get("slurm"), roster, everything, now, state)
    told: list[Told] = [general[0]] if general else []
    journals: list[tuple[Journal, Alerts]] = [general[1]] if general else []
    waiting = []
    for run in runs:
        assert run.run_dir is not None
        rundir = RunDir(run.run_dir)
        queue = queues[_kind(run, schedulers)]
        journal = Journal(rundir.watch / "journal")
        journals.append((journal, run.alerts))
        try:
            seen = look_at(run, rundir, queue, now, own=own, only=only, due_only=not only, probe=probe)
            told.append(_tell(seen, journal, now, beside=general[0].findings if general else ()))
            trouble += _remember(seen, now, every)
            if seen.jobs and all(job.state.waiting for job in seen.jobs):
                waiting.append(run)
        except (
            Exception
        ) as error:  # one run's broken directory must neither end the watch of the others nor go unnoticed
            finding = storage.unusable(run, error, now)
            stored = [(one, finding if one is run else found) for one, found in stored]
            dark.append(finding)
    for told_of, journal_of in _tell_of_storage(stored, state, now):
        told.append(told_of)
        journals.append(journal_of)
    delivered = deliver([j for j, _ in journals], [s for _, s in journals], now) if send else Delivered()
    blind = next((queue.blind for queue in queues.values() if queue.jobs is None), dark[0].summary if dark else "")
    if send:
        trouble += _ping(everything, blind or next(iter(trouble), ""), delivered)
    return Ticked(now, tuple(told), blind, delivered, tuple(trouble), tuple(waiting))


def _kind(run: Run, schedulers: Mapping[str, Scheduler]) -> str:
    from ftsupervise.scheduler import kind_of

    kind = kind_of(run.scheduler)
    return kind if kind in schedulers else next(iter(schedulers))


def _users(runs: Iterable[Run]) -> tuple[str, ...]:
    """Me, and those whose jobs the runs' may be: a colleague's watch sees the sleeping person's jobs."""
    import pwd

    try:
        me = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        me = str(os.getuid())
    theirs = {name for run in runs for name in people(RunDir(Path(str(run.run_dir))))}
    return tuple(sorted({me, *theirs}))


def _tell_in_general(
    queue: Queue | None, roster: Mapping[str, str], runs: Sequence[Run], now: datetime, state: Path
) -> tuple[Told, tuple[Journal, Alerts]] | None:
    """What is nobody's in particular: Slurm's own health, one alert for all runs, and runs whose settings cannot be read.
    Told to everybody who watches any run."""
    if not runs:
        return None
    settings = _everybody([run.alerts for run in runs])
    _make(state)
    journal = Journal(state / "watch" / "journal")
    told = {alert.finding.subject for alert in journal.read().alerts.values()}
    looked = [settings_finding(name, why, now) for name, why in roster.items()]
    findings = [finding for finding in looked if _bad(finding) or finding.subject in told]
    if queue is not None:
        findings.append(slurm_finding(queue, now, [run.name for run in runs]))
    if not findings:
        return None
    recorded = record(journal, findings, settings, now, run_name="", where=str(runs[0].run_dir))
    return Told("watch", tuple(findings), recorded.firing, recorded.notices), (journal, settings)


def _tell_of_storage(
    stored: Iterable[tuple[Run, Finding]], state: Path, now: datetime
) -> Iterator[tuple[Told, tuple[Journal, Alerts]]]:
    """Run directories that do not answer or cannot be used, and those that could not and can again."""
    for run, finding in stored:
        folder = storage.journal_of(run, state)
        journal = Journal(folder)
        if not _bad(finding) and not folder.is_dir():
            if finding.health is Health.UNKNOWN:  # not launched yet: nothing to record, something to print
                yield Told(run.name, (finding,), (), ()), (journal, run.alerts)
            continue
        _make(folder.parent)
        answers = finding if _bad(finding) else replace(finding, health=Health.OK)
        recorded = record(journal, [answers], run.alerts, now, run_name=run.name, where=str(run.run_dir))
        yield Told(run.name, (finding,), recorded.firing, recorded.notices), (journal, run.alerts)


def _make(folder: Path) -> None:
    """Best effort: without it the journal goes to its spare place and says so."""
    try:
        make_folder(folder, FOLDER, parents=True)
    except OSError:
        return


def _everybody(all_settings: Sequence[Alerts]) -> Alerts:
    """The first run's settings with every run's receivers, each once. Routes are the first run's."""
    first = all_settings[0]
    receivers = {receiver.model_dump_json(): receiver for one in all_settings for receiver in one.receivers}
    taken = {receiver.name for receiver in first.receivers}
    more = [r for r in receivers.values() if r not in first.receivers and (r.name is None or r.name not in taken)]
    return first.model_copy(update={"receivers": (*first.receivers, *more)}) if more else first


def _tell(seen: Seen, journal: Journal, now: datetime, *, beside: Sequence[Finding]) -> Told:
    recorded = record(
        journal, seen.findings, seen.run.alerts, now, run_name=seen.run.name, beside=[f for f in beside if _bad(f)]
    )
    said = []
    for event in _events(seen):
        if announce(
            journal,
            seen.run.alerts,
            event.kind,
            run=seen.run.name,
            summary=event.summary,
            at=now,
            dedup=event.dedup,
            look=f"ftsupervise status {seen.rundir.root}",
            meaning=event.meaning,
        ):
            said.append(f"{event.kind.value}: {event.summary}")
    return Told(seen.run.name, seen.findings, recorded.firing, recorded.notices, tuple(said))


def _bad(finding: Finding) -> bool:
    return finding.health is Health.BAD


def _events(seen: Seen) -> tuple[Event, ...]:
    """What the ledger and the marks say happened; () when they cannot be read this time."""
    try:
        attempts = ledger(seen.rundir)
        mark = read_json(seen.rundir.finished)
        finished_at = None if mark is None else _mark_time(seen.rundir, mark)
    except ValueError:  # ``touch marks/finished`` leaves an empty file
        finished_at = _mark_time(seen.rundir, {})
    except OSError:
        return ()
    return events(attempts, finished_at=finished_at)


def _mark_time(rundir: RunDir, mark: Mapping[str, object]) -> datetime:
    try:
        at = datetime.fromisoformat(str(mark.get("at")))
        return at if at.tzinfo else at.replace(tzinfo=timezone.utc)
    except ValueError:
        return datetime.fromtimestamp(rundir.finished.stat().st_mtime, timezone.utc)


def _remember(seen: Seen, now: datetime, every: timedelta | None) -> list[str]:
    """The watchdogs' memory, and this watcher's own beat, which the run's guard and other watchers look at."""
    try:
        write_memory(seen.rundir, seen.memory)
        watchers.beat(seen.rundir, now, every)
    except OSError as error:
        return [f"{seen.run.name}: cannot write {seen.rundir.watch}: {error.strerror}"]
    return []


def _ping(runs: Sequence[Run], blind: str, delivered: Delivered) -> list[str]:
    """Tell each dead-man service once, whichever runs name it."""
    said = []
    done: set[str] = set()
    for run in runs:
        service = run.alerts.dead_man
        if service is None or service.model_dump_json() in done:
            continue
        done.add(service.model_dump_json())
        said.append(deadman.after_tick(service, could_see=not blind, delivered=delivered, why_blind=blind))
    return [f"dead-man: {words}" for words in said if words]
