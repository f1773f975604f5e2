"""Makes the checks of one tick: the queue once, then every watchdog of a run. ``tour.py`` notifies people.

A watchdog that breaks must not blind the others: its failure is a finding of its own.
"""

from __future__ import annotations

import os
import shlex
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ftsupervise.errors import Error, PluginUnusable, SchedulerUnavailable, from_os_error
from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.model import Attempt, Job
from ftsupervise.printable import to_type
from ftsupervise.probe import Probe
from ftsupervise.rundir import pinned
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import ExactObject, read_record, write_json
from ftsupervise.scheduler import SLURM
from ftsupervise.scheduler.ownership import by_mark, candidates, identify, jobs_of_run
from ftsupervise.truth import Health
from ftsupervise.units import show_duration
from ftsupervise.watch import Look, due
from ftsupervise.watch.watchdogs import load_watchdog, names_of

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.scheduler import Scheduler

_MEMORY = "memory.json"
BLIND_FOR = timedelta(days=1)  # a watchdog that could not see for so long says so
_SEES_WITHOUT_A_JOB = ("is-running", "brake", "recovery", "watchers", "disk", "exec")
_SETTINGS = "This run is watched with its previous settings, or not at all."
WORDS = {
    "slurm": Words(
        "It is not known whether these runs are running: {runs}. Nothing is known to be wrong.",
        "scontrol ping; sinfo",
        "wait for it, or tell your administrator; running jobs are not harmed by it",
    ),
    "scheduler": Words(
        "It is not known whether these runs are running: {runs}. Nothing is known to be wrong.",
        "ftsupervise status",
        "wait for it, or tell its administrator; nothing was changed",
    ),
    "settings": Words(
        _SETTINGS,
        "ftsupervise config check{typed}",
        "fix the file; the next tick reads it again{forget}",
        Severity.CRITICAL,
    ),
    "unanswered": Words(
        _SETTINGS,
        "squeue --me  (do not ls {run}: your shell would hang)",
        "tell your storage people; nothing was changed",
        Severity.CRITICAL,
    ),
    "host": Words(
        "Spare copies of alerts and notes about hung processes are kept there. Files of another account are not trusted.",
        "ls -ld ${{TMPDIR:-/tmp}}/ftsupervise-$(id -u)",
        "have it removed, or set TMPDIR to a folder of your own",
    ),
    "blind": Words(
        "Nothing is known of it: a trouble there would not be told.",
        "ftsupervise check {name} {run_dir}",
        "make it see again, or switch it off: watch.{key}: null",
    ),
    "broken": Words(
        "Its checks are not being made.",
        "ftsupervise check {name} {run_dir}",
        "report it with the lines below",
    ),
    "plugin": Words(
        "Its checks are not being made.",
        "ftsupervise check {name} {run_dir}",
        "{do}, or switch it off: watch.{key}: null",
    ),
}


@dataclass(frozen=True)
class QueueAnswer:
    """The scheduler's answer in this tick: jobs, or why it could not be asked."""

    jobs: tuple[Job, ...] | None
    blind: str = ""
    kind: str = ""  # of the scheduler

    @cached_property
    def by_mark(self) -> dict[str, tuple[Job, ...]]:
        """Group the jobs by mark, so that a thousand runs do not each go through the jobs of all the others."""
        return by_mark(self.jobs or ())


@dataclass(frozen=True)
class RunLook:
    """The result of the checks of one run."""

    run: Run
    rundir: RunDir
    jobs: tuple[Job, ...] | None
    findings: tuple[Finding, ...]
    attempts: tuple[Attempt, ...]
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)


def ask(scheduler: Scheduler, users: Sequence[str]) -> QueueAnswer:
    """Ask for the queue of ``users`` in one request."""
    try:
        return QueueAnswer(scheduler.queue(users=users), kind=scheduler.kind)
    except SchedulerUnavailable as error:
        return QueueAnswer(None, error.message, scheduler.kind)


def queue_finding(queue: QueueAnswer, now: datetime, runs: Iterable[str]) -> Finding:
    """Report whether the scheduler answers. One alert for all runs."""
    blind = queue.jobs is None
    names = {"runs": ", ".join(sorted(runs)) or "none"}
    if queue.kind == SLURM:
        text = f"slurm unreachable: {queue.blind}" if blind else "Slurm answers"
        return WORDS["slurm"].finding(("", "slurm", "controller"), Health.of(blind), text, now, names=names)
    text = f"{queue.kind} unreachable: {queue.blind}" if blind else f"{queue.kind} answers"
    return WORDS["scheduler"].finding(("", "scheduler", queue.kind), Health.of(blind), text, now, names=names)


class Unanswered(str):
    """Says why settings could not be read where their storage does not answer: touching it by hand would hang too."""


HERE = "this directory"  # the name of a run that was not named


def settings_finding(name: str, why: str, now: datetime) -> Finding:
    """Report whether the settings of a watched run could be read; ``why`` not, "" if they could."""
    text = f"cannot be read: {why.removeprefix(f'{name}: ')}" if why else "can be read"
    words = WORDS["unanswered" if isinstance(why, Unanswered) else "settings"]
    typed = "" if name == HERE else f" {shlex.quote(name)}"
    forget = f"; if nobody needs the run any more: ftsupervise forget{typed}" if typed else ""
    names = {"run": name, "typed": typed, "forget": forget}
    subject = f"settings of {name}"
    return words.finding(("", "watch", subject), Health.of(bool(why)), f"the {subject} {text}", now, names=names)


def host_finding(why: str, now: datetime) -> Finding:
    """Report whether this account could keep its spare copies on this host under the usual name; ``why`` not, "" if it
    could.
    """
    host = os.uname().nodename
    text = f"on {host}, {why or 'this account has its own folder'}"
    return WORDS["host"].finding(("", "watch", f"own folder on {host}"), Health.of(bool(why)), text, now)


def rundir_of(run: Run) -> RunDir:
    """Return the paths of a run, made once for all that a tick does with it in a row."""
    return _rundir(str(run.run_dir))


@lru_cache(maxsize=1)
def _rundir(root: str) -> RunDir:
    return RunDir(root)


def look_at(
    run: Run,
    queue: QueueAnswer,
    now: datetime,
    *,
    own: frozenset[str],
    only: Sequence[str] | None = (),
    probe: Probe | None = None,
    attempts: tuple[Attempt, ...] | None = None,
    at: Callable[[str], None] = lambda name: None,
) -> RunLook:
    """Run every watchdog of ``run`` once.

    ``only`` names some of them; (): all; None: those that are due by their own intervals. ``at`` is given the name of each
    before it is run. ``probe``: the bounded reads of this tick, shared by all its runs; without one this run gets its own.
    ``attempts``: its ledger, where the caller has read it.
    """
    rundir = rundir_of(run)
    attempts = ledger(rundir) if attempts is None else attempts
    if probe is None:
        with Probe() as own_probe:
            return look_at(run, queue, now, own=own, only=only, probe=own_probe, attempts=attempts, at=at)
    jobs = None
    if queue.jobs is not None:
        known_by = identify(rundir, run.name, launches(rundir), attempts[-1] if attempts else None, watch=own)
        jobs = jobs_of_run(known_by, candidates(known_by, queue.by_mark))
    memory, once = read_memory(rundir), dict[str, Any]()
    findings: list[Finding] = []
    for name in names_of(run.watch):
        settings = getattr(run.watch, name.replace("-", "_"), None)
        if settings is None or (only and name not in only):
            continue
        mine = memory.setdefault(name, {})
        if only is None and not due(mine, getattr(settings, "every", None), now):
            continue
        at(name)
        findings += _check(Look(run, rundir, now, jobs, mine, queue.blind, probe, name, attempts, once), settings)
    return RunLook(run, rundir, jobs, tuple(findings), attempts, memory)


def _check(look: Look, settings: object) -> list[Finding]:
    words, names = WORDS["broken"], {"name": look.watchdog}
    try:
        found = list(load_watchdog(look.watchdog)(look, settings))
    except PluginUnusable as error:
        names |= {"key": look.watchdog.replace("-", "_"), "do": error.hint or "report it to the authors of its package"}
        return [look.finding("watchdog", Health.BAD, error.message, WORDS["plugin"], names=names)]
    except Exception as error:  # one broken watchdog must neither end the tick nor go unnoticed
        detail = "".join(traceback.format_exception(error)[-6:])
        summary = f"the {look.watchdog} watchdog itself failed: {type(error).__name__}: {error}"
        return [look.finding("watchdog", Health.BAD, summary, words, names=names, detail=detail)]
    if blind := _blind(look, found):
        names["key"] = look.watchdog.replace("-", "_")
        return [*found, look.finding("watchdog", Health.BAD, blind[0], WORDS["blind"], names=names, since=blind[1])]
    works = f"the {look.watchdog} watchdog works"
    return [*found, look.finding("watchdog", Health.OK, works, words, names=names)]


def _blind(look: Look, found: Sequence[Finding]) -> tuple[str, datetime] | None:
    """Return what the watchdog has not been able to see for a day, and since when; None if it sees. Where no job of the run is
    running there is nothing to be seen of it."""
    before, now = look.memory.get("_blind"), look.now.timestamp()
    idle = look.jobs is not None and not any(not job.state.waiting and not job.state.ended for job in look.jobs)
    unseen = {one.subject: one for one in found if one.health is Health.UNKNOWN}
    if idle and look.watchdog not in _SEES_WITHOUT_A_JOB:
        unseen = {}
    known = before if isinstance(before, dict) else {}
    since = {
        subject: at if isinstance(at := known.get(subject), (int, float)) and 0 <= at <= now else now
        for subject in unseen
    }
    look.memory["_blind"] = since
    if not since:
        look.memory.pop("_blind")
        return None
    subject, begun = min(since.items(), key=lambda one: one[1])
    if now - begun < BLIND_FOR.total_seconds():
        return None
    shown = show_duration(now - begun)
    text = f"the {look.watchdog} watchdog has not seen {subject} for {shown}: {unseen[subject].summary}"
    return text, datetime.fromtimestamp(begun, look.now.tzinfo)


class WatchMemory(NamedTuple):
    """The page: what each watchdog remembers, by its name."""

    watchdogs: Mapping[str, ExactObject] = MappingProxyType({})


def read_memory(rundir: RunDir) -> dict[str, dict[str, Any]]:
    """The watchdogs' memory of the last tick. Where it is lost or damaged, trends start anew."""
    try:
        page = read_record(WatchMemory, rundir.watch / _MEMORY)
        return dict(page.watchdogs) if page is not None else {}
    except (OSError, ValueError):
        return {}


def write_memory(rundir: RunDir, memory: Mapping[str, dict[str, Any]]) -> None:
    """Write the watchdogs' memory. Raises OSError. Not synced: a power cut costs the trends of some minutes."""
    write_json(rundir.watch / _MEMORY, WatchMemory(memory), sync=False, indent=None)


# Run directories that do not answer, or are gone. The tick must not touch them: it would hang, and with it the watch of
# every other run, or create a directory again that a person has moved away. They are an alert of their own, kept in this
# account's state directory, because theirs cannot be written.

RUN_DIR_WORDS = {
    "answers": Words(severity=Severity.CRITICAL),
    "silent": Words(
        "Nothing can be said about this run until it answers, and the run itself is probably standing still.",
        "squeue --me  (do not ls {run_dir}: your shell would hang)",
        "tell your storage people; nothing was changed",
        Severity.CRITICAL,
    ),
    "missing": Words(
        "Switches, ledger, logs and perhaps checkpoints are not where the run keeps them.",
        "ls -la {above}; squeue --me",
        "if it was moved, move it back or watch it where it is now; if it was deleted, look for a snapshot; "
        "if nobody needs it any more: ftsupervise forget {run_dir}",
        Severity.CRITICAL,
    ),
    "replaced": Words(
        "The directory that is there now is not trusted, so nothing is known of the run. Its next job starts nothing.",
        "ls -ld {root} {above}; squeue --me",
        "find the run's directory and move it back; if you replaced it yourself, launch the run again, "
        "or, to only watch what is there: rm {page}",
        Severity.CRITICAL,
    ),
    "unusable": Words(
        "Nothing can be said about this run until this is repaired; other runs are watched as before.",
        "ls -la {run_dir}",
        "{do}",
        Severity.CRITICAL,
    ),
}


def answers(run: Run, now: datetime) -> Finding:
    """Report that its directory can be read."""
    return _finding(run, Health.OK, f"the storage of {run.run_dir} answers", now, "answers")


def silent(run: Run, seconds: float, doing: str, why: str, now: datetime) -> Finding:
    """Report that a read in it has not come back: nothing is known of the run."""
    text = f"the storage of {run.run_dir} has not answered for {show_duration(seconds)}: could not {doing}"
    return _finding(run, Health.BAD, text, now, "silent", detail=why)


def missing(run: Run, now: datetime) -> Finding:
    """Report that there is no such directory. ``launched_or_not`` says whether that is as it should be."""
    above = shlex.quote(str(Path(str(run.run_dir)).parent))
    return _finding(run, Health.BAD, f"the run directory {run.run_dir} is gone", now, "missing", above=above)


def unusable(run: Run, error: Exception, now: datetime) -> Finding:
    """Report a run directory that answers, but in which the watch could not do its work: unreadable, or not what it
    should be.
    """
    known = from_os_error(error, f"use {error.filename or run.run_dir}") if isinstance(error, OSError) else error
    do, detail = "repair it, or report it with the lines below", ""
    if isinstance(known, Error):
        words, do = known.message, known.hint or do
    else:
        words, detail = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)[-6:])
    text = f"the run directory {run.run_dir} cannot be watched: {words}"
    return _finding(run, Health.BAD, text, now, "unusable", do=do, detail=detail)


def replaced(run: Run, root: Path, why: str, state: Path, now: datetime) -> Finding:
    """Report that another directory stands in its place, and nothing in that is trusted."""
    names = {"root": root, "above": root.parent, "page": pinned.page_of(state, root)}
    quoted = {name: shlex.quote(str(path)) for name, path in names.items()}
    return _finding(run, Health.BAD, why, now, "replaced", **quoted)


def _finding(
    run: Run, health: Health, summary: str, now: datetime, words: str, *, detail: str = "", **names: object
) -> Finding:
    names["run_dir"] = to_type(run.run_dir)
    return RUN_DIR_WORDS[words].finding(
        (run.name, "storage", "run directory"), health, summary, now, names=names, detail=detail
    )


def launched_or_not(run: Run, gone: Finding, state: Path, away: str) -> Finding:
    """Return ``gone``, or, for a run that was never launched, a finding that says so.

    Touches ``state`` unless it is ``away``.
    """
    if away:
        why = f"{run.run_dir} is not there; whether the run was ever launched cannot be looked up: {away}"
        return replace(gone, health=Health.UNKNOWN, summary=why)
    if pinned.gone_for_good(state, Path(str(run.run_dir))):
        why = "it was over, and its directory is gone"
        return replace(gone, health=Health.UNKNOWN, severity=Severity.INFO, summary=why)
    if _was_launched(run, state):
        return gone
    return replace(gone, health=Health.UNKNOWN, severity=Severity.INFO, summary="it has not been launched yet")


def remember(run: Run, state: Path, over: bool) -> None:
    """Note that its directory has been seen, so that one that vanishes is not taken for one that is still to come; and
    whether the run is ``over``, so that then it is not missed.
    """
    try:
        pinned.note_over(state, Path(str(run.run_dir)), over)
    except OSError:
        return


def _was_launched(run: Run, state: Path) -> bool:
    """Return whether this account has launched it (then STATE/runs/NAME points there), or has seen its directory before."""
    try:
        launched = str((state / "runs" / run.name).readlink()) == str(run.run_dir)
    except OSError:
        launched = False
    return launched or _page(run, state).exists()


def _page(run: Run, state: Path) -> Path:
    return pinned.page_of(state, Path(str(run.run_dir)))


def _name_of(run: Run) -> str:
    return f"{run.name}-{pinned.mark_of(Path(str(run.run_dir)))}"


def journal_of(run: Run, state: Path) -> Path:
    """Return the journal of the alert about this run's storage: one directory for each run directory."""
    return state / "watch" / "storage" / _name_of(run)


def journals_of(root: Path, state: Path) -> tuple[Path, ...]:
    """Return those of the run directory ``root``, whatever the run was called."""
    return tuple((state / "watch" / "storage").glob(f"*-{pinned.mark_of(root)}"))
