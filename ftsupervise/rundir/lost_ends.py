"""Judges an attempt that has no end on record: it runs, it was lost, or it had been asked to leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.host import files, processes
from ftsupervise.model import Attempt, Cause, CauseKind
from ftsupervise.printable import printable
from ftsupervise.rundir.paths import WARNING
from ftsupervise.rundir.records import as_time, as_whole, parse_object, read_record, time_of

LOST_END = (
    "lost.json"  # in an attempt's directory, written by the attempt after it, or by the process that starts the groups
)
_NEAR_END = 60.0  # seconds: Slurm's limit loop is up to this early or late


class LostEnd(NamedTuple):
    """Others know why an attempt left no record of its end: Slurm knows of its host, and we know of a group's supervisor."""

    words: Annotated[str, 500] = ""


def lost_end(folder: Path) -> str:
    """Return what became of its host or its supervisor; "" where nobody has found that out."""
    try:
        found = read_record(LostEnd, folder / LOST_END, limit=16_000)
    except (OSError, ValueError):
        return ""
    return "" if found is None else found.words


def without_end(start: Mapping[str, object]) -> Cause | None:
    if start.get("host") != os.uname().nodename:
        return Cause(CauseKind.UNKNOWN)
    pid = start.get("pid")
    lives = isinstance(pid, int) and processes.identity(pid) == start.get("pid_start")
    return None if lives and start.get("boot_id") == processes.boot_id() else Cause(CauseKind.LOST)


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


def end_as_asked(start: Mapping[str, object], at: datetime | None) -> Cause:
    """Return the cause of an end that was asked for and could not be recorded: Slurm's last 5 s were too few for it."""
    ends = as_time(start.get("job_ends"))
    if ends is not None and at is not None and (ends - at).total_seconds() < _NEAR_END:
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
