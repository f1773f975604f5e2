"""Judges an attempt that has no end on record: it runs, it was lost, or it had been asked to leave."""

from __future__ import annotations

import os
import signal
from datetime import datetime, timedelta
from pathlib import Path

from ftsupervise.host import files, processes
from ftsupervise.model import Attempt, Cause, CauseKind
from ftsupervise.printable import printable
from ftsupervise.rundir.attempt_pages import StartPage
from ftsupervise.rundir.paths import WARNING
from ftsupervise.rundir.records import as_time, as_whole, parse_object, time_of

_NEAR_END = 60.0  # seconds: Slurm's limit loop is up to this early or late


def without_end(start: StartPage) -> Cause | None:
    """Return None where its supervisor lives on this host."""
    if start.host != os.uname().nodename:
        return Cause(CauseKind.UNKNOWN)
    lives = start.pid > 0 and processes.identity(start.pid) == start.pid_start
    return None if lives and start.boot_id == processes.boot_id() else Cause(CauseKind.LOST)


def last_sign(folder: Path, attempt: Attempt, before: datetime | None) -> datetime:
    """Return the newest sign of life of an attempt that left no record of its end. ``before``: the next one's start.

    That is its supervisor's last page, its last line in the log, or the last output of its job.
    """
    signs = [attempt.started, *filter(None, (attempt.heard,))]
    signs += [attempt.started + timedelta(seconds=n) for n in (attempt.ready, attempt.worked) if n is not None]
    for path in (folder / "run.log", *(Path(part.path) for part in attempt.outputs)):
        try:
            signs.append(time_of(path.stat()))
        except OSError:
            continue
    return max(attempt.started, max(min(sign, before) if before is not None else sign for sign in signs))


def end_as_asked(start: StartPage, at: datetime | None) -> Cause:
    """Return the cause of an end that was asked for and could not be recorded: Slurm's last 5 s were too few for it."""
    if start.job_ends is not None and at is not None and (start.job_ends - at).total_seconds() < _NEAR_END:
        return Cause(CauseKind.TIME_LIMIT, late=True)
    return Cause(CauseKind.CANCELLED, signal=int(signal.SIGTERM), late=True)


def stop_request(folder: Path) -> tuple[str, int, datetime | None]:
    """Return the stop request to an attempt without a recorded end: text for people, the signal (0: none), and the time."""
    try:
        text = files.read_bounded(folder / WARNING, 64_000).decode("utf-8", "replace")
    except OSError:
        return "", 0, None
    words, _, rest = text.partition("\n")
    try:
        page = parse_object(rest.encode())
    except ValueError:  # it was made on a full disk, or by a person
        page = {}
    reason = printable(words.strip(), 200)
    text = f"asked to stop: {reason}" if reason else "asked to stop"
    return text, as_whole(page.get("signal")) or 0, as_time(page.get("at"))
