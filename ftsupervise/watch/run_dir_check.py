"""Run directories that do not answer, or are gone. The tick must not touch them: it would hang, and with it the watch of
every other run, or make anew what somebody moved away. They are an alert of their own, kept in this account's state
directory, because theirs cannot be written.
"""

from __future__ import annotations

import hashlib
import shlex
import traceback
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.errors import Error, from_os_error
from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.rundir import pinned
from ftsupervise.truth import Health
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run


WORDS = {
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
        "if it was moved, move it back or watch it where it is now; if it was deleted, look for a snapshot",
        Severity.CRITICAL,
    ),
    "replaced": Words(
        "What stands there now is not believed, so nothing is known of the run. Its next job starts nothing.",
        "ls -ld {root} {above}; squeue --me",
        "find the run and move it back; if it was you, launch it again, or only watch what is there: rm {page}",
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
    """Its directory can be read."""
    return _finding(run, Health.OK, f"the storage of {run.run_dir} answers", now, "answers")


def silent(run: Run, seconds: float, doing: str, why: str, now: datetime) -> Finding:
    """A read in it has not come back: nothing is known of the run."""
    text = f"the storage of {run.run_dir} has not answered for {show_duration(seconds)}: could not {doing}"
    return _finding(run, Health.BAD, text, now, "silent", detail=why)


def missing(run: Run, now: datetime) -> Finding:
    """There is no such directory. Whether that is as it should be, ``launched_or_not`` says."""
    above = shlex.quote(str(Path(str(run.run_dir)).parent))
    return _finding(run, Health.BAD, f"the run directory {run.run_dir} is gone", now, "missing", above=above)


def unusable(run: Run, error: Exception, now: datetime) -> Finding:
    """A run directory that answers, but in which the watch could not do its work: unreadable, or not what it should be."""
    known = from_os_error(error, f"use {error.filename or run.run_dir}") if isinstance(error, OSError) else error
    do, detail = "repair it, or report it with the lines below", ""
    if isinstance(known, Error):
        words, do = known.message, known.hint or do
    else:
        words, detail = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)[-6:])
    text = f"the run directory {run.run_dir} cannot be watched: {words}"
    return _finding(run, Health.BAD, text, now, "unusable", do=do, detail=detail)


def replaced(run: Run, root: Path, why: str, state: Path, now: datetime) -> Finding:
    """Another directory stands in its place, and nothing in that is believed."""
    names = {"root": root, "above": root.parent, "page": pinned.page_of(state, root)}
    quoted = {name: shlex.quote(str(path)) for name, path in names.items()}
    return _finding(run, Health.BAD, why, now, "replaced", **quoted)


def _finding(
    run: Run, health: Health, summary: str, now: datetime, words: str, *, detail: str = "", **names: object
) -> Finding:
    names["run_dir"] = run.run_dir
    return WORDS[words].finding(
        (run.name, "storage", "run directory"), health, summary, now, names=names, detail=detail
    )


def launched_or_not(run: Run, gone: Finding, state: Path, away: str) -> Finding:
    """``gone``, or, of a run that was never launched, that it was not. Touches ``state`` unless it is ``away``."""
    if away:
        why = f"{run.run_dir} is not there; whether the run was ever launched cannot be looked up: {away}"
        return replace(gone, health=Health.UNKNOWN, summary=why)
    if _was_launched(run, state):
        return gone
    return replace(gone, health=Health.UNKNOWN, severity=Severity.INFO, summary="it has not been launched yet")


def remember(run: Run, state: Path) -> None:
    """That its directory has been seen, so that one that vanishes is not taken for one that is still to come."""
    try:
        if not _page(run, state).exists():
            pinned.note(state, Path(str(run.run_dir)))
    except OSError:
        return


def _was_launched(run: Run, state: Path) -> bool:
    """Has this account launched it (then STATE/runs/NAME points there), or seen its directory before?"""
    try:
        launched = str((state / "runs" / run.name).readlink()) == str(run.run_dir)
    except OSError:
        launched = False
    return launched or _page(run, state).exists()


def _page(run: Run, state: Path) -> Path:
    return pinned.page_of(state, Path(str(run.run_dir)))


def _name_of(run: Run) -> str:
    mark = hashlib.sha256(str(run.run_dir).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{run.name}-{mark}"


def journal_of(run: Run, state: Path) -> Path:
    """Where the alert about this run's storage is kept: one directory for each run directory."""
    return state / "watch" / "storage" / _name_of(run)
