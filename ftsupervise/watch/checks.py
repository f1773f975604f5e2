"""The checks of one tick: the queue once, then every watchdog of a run. They notify nobody: that is done in ``tour.py``.

A watchdog that breaks must not blind the others: its failure is a finding of its own.
"""

from __future__ import annotations

import os
import shlex
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ftsupervise.errors import SchedulerUnavailable
from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.model import Job
from ftsupervise.probe import Probe
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.ledger import newest
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import read_json, write_json
from ftsupervise.scheduler.ownership import by_mark, candidates, identify, jobs_of_run
from ftsupervise.truth import Health
from ftsupervise.watch import Look, due
from ftsupervise.watch.watchdogs import WATCHDOGS, load_watchdog

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.scheduler import Scheduler

_MEMORY = "memory.json"
_SETTINGS = "This run is watched by the settings it had before, or not at all."
WORDS = {
    "slurm": Words(
        "Nobody can tell whether these run: {runs}. Nothing is known to be wrong.",
        "scontrol ping; sinfo",
        "wait for it, or tell your administrator; running jobs are not harmed by it",
    ),
    "settings": Words(
        _SETTINGS,
        "ftsupervise config check{typed}",
        "fix the file; the next tick reads it again",
        Severity.CRITICAL,
    ),
    "unanswered": Words(
        _SETTINGS,
        "squeue --me  (do not ls {run}: your shell would hang)",
        "tell your storage people; nothing was changed",
        Severity.CRITICAL,
    ),
    "host": Words(
        "Spare copies of alerts and notes about hung processes are kept there. Nothing of somebody else's is believed.",
        "ls -ld ${{TMPDIR:-/tmp}}/ftsupervise-$(id -u)",
        "have it removed, or set TMPDIR to a folder of your own",
    ),
    "broken": Words(
        "What it checks is not being checked.",
        "ftsupervise check {name} {run_dir}",
        "report it with the lines below",
    ),
}


@dataclass(frozen=True)
class QueueAnswer:
    """What the scheduler answered this time: jobs, or why it could not be asked."""

    jobs: tuple[Job, ...] | None
    blind: str = ""
    kind: str = ""  # of the scheduler

    @cached_property
    def by_mark(self) -> dict[str, tuple[Job, ...]]:
        """So that a thousand runs do not each go through the jobs of all the others."""
        return by_mark(self.jobs or ())


@dataclass(frozen=True)
class RunLook:
    """What one pass saw of one run."""

    run: Run
    rundir: RunDir
    jobs: tuple[Job, ...] | None
    findings: tuple[Finding, ...]
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)


def ask(scheduler: Scheduler, users: Sequence[str]) -> QueueAnswer:
    """The queue of ``users``, by one request."""
    try:
        return QueueAnswer(scheduler.queue(users=users), kind=scheduler.kind)
    except SchedulerUnavailable as error:
        return QueueAnswer(None, error.message, scheduler.kind)


def slurm_finding(queue: QueueAnswer, now: datetime, runs: Iterable[str]) -> Finding:
    """Whether the controller answers: an alert of its own, one for all runs."""
    blind = queue.jobs is None
    text = f"slurm unreachable: {queue.blind}" if blind else "Slurm answers"
    names = {"runs": ", ".join(sorted(runs)) or "none"}
    return WORDS["slurm"].finding(("", "slurm", "controller"), Health.of(blind), text, now, names=names)


class Unanswered(str):
    """Why settings could not be read, where the storage they lie on does not answer: nobody should touch it by hand."""


HERE = "this directory"  # what a run is called that was not named


def settings_finding(name: str, why: str, now: datetime) -> Finding:
    """Could the settings of a run that is to be watched be read? ``why`` not, "" if they could."""
    text = f"cannot be read: {why.removeprefix(f'{name}: ')}" if why else "can be read"
    words = WORDS["unanswered" if isinstance(why, Unanswered) else "settings"]
    names = {"run": name, "typed": "" if name == HERE else f" {shlex.quote(name)}"}
    subject = f"settings of {name}"
    return words.finding(("", "watch", subject), Health.of(bool(why)), f"the {subject} {text}", now, names=names)


def host_finding(why: str, now: datetime) -> Finding:
    """Could this account keep its spare copies on this host under the usual name? ``why`` not, "" if it could."""
    host = os.uname().nodename
    text = f"on {host}, {why or 'this account has its own folder'}"
    return WORDS["host"].finding(("", "watch", f"own folder on {host}"), Health.of(bool(why)), text, now)


def look_at(
    run: Run,
    queue: QueueAnswer,
    now: datetime,
    *,
    own: frozenset[str],
    only: Sequence[str] = (),
    due_only: bool = False,
    probe: Probe | None = None,
    at: Callable[[str], None] = lambda name: None,
) -> RunLook:
    """Every watchdog of ``run`` once. ``only`` names some of them; ``due_only`` keeps to their own intervals.
    ``at`` is given the name of each before it is run.

    ``probe``: the bounded reads of this tick, shared by all its runs; without one this run gets its own.
    """
    if probe is None:
        with Probe() as own_probe:
            return look_at(run, queue, now, own=own, only=only, due_only=due_only, probe=own_probe, at=at)
    rundir = RunDir(str(run.run_dir))
    jobs = None
    if queue.jobs is not None:
        known_by = identify(rundir, run.name, launches(rundir), newest(rundir), watch=own)
        jobs = jobs_of_run(known_by, candidates(known_by, queue.by_mark))
    memory = read_memory(rundir)
    findings: list[Finding] = []
    for name in WATCHDOGS:
        settings = getattr(run.watch, name.replace("-", "_"), None)
        if settings is None or (only and name not in only):
            continue
        mine = memory.setdefault(name, {})
        if due_only and not due(mine, getattr(settings, "every", None), now):
            continue
        at(name)
        findings += _check(Look(run, rundir, now, jobs, mine, queue.blind, probe, name), settings)
    return RunLook(run, rundir, jobs, tuple(findings), memory)


def _check(look: Look, settings: object) -> list[Finding]:
    words, names = WORDS["broken"], {"name": look.watchdog}
    try:
        found = list(load_watchdog(look.watchdog)(look, settings))
    except Exception as error:  # one broken watchdog must neither end the tick nor go unnoticed
        detail = "".join(traceback.format_exception(error)[-6:])
        summary = f"the {look.watchdog} watchdog itself failed: {type(error).__name__}: {error}"
        return [look.finding("watchdog", Health.BAD, summary, words, names=names, detail=detail)]
    works = f"the {look.watchdog} watchdog works"
    return [*found, look.finding("watchdog", Health.OK, works, words, names=names)]


def read_memory(rundir: RunDir) -> dict[str, dict[str, Any]]:
    """What the watchdogs remember from the last pass. Lost or damaged memory is no memory: trends start anew."""
    try:
        raw = read_json(rundir.watch / _MEMORY) or {}
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in raw.items() if isinstance(value, dict)}


def write_memory(rundir: RunDir, memory: Mapping[str, dict[str, Any]]) -> None:
    """Raises OSError. Not synced: a power cut costs the trends of some minutes."""
    write_json(rundir.watch / _MEMORY, memory, sync=False)
