"""The ledger: all attempts of a run, read from the pages that each attempt's own process wrote (``run/ledger.py``).

Light (standard library, no subprocess): ``status``, the gate and the watch read this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host import files, processes
from ftsupervise.model import Attempt, Beat
from ftsupervise.printable import printable
from ftsupervise.rundir import beats
from ftsupervise.rundir.paths import WARNING, RunDir
from ftsupervise.rundir.records import as_count, as_number, as_text, as_time, as_whole, read_json, time_of

UNKNOWN = "unknown"  # cause of an attempt that has no end on record and cannot be looked at from here
TOLD = "told: "  # how the note of an attempt without an end begins when it was told to leave; then what it was told
NEWEST = 1000  # attempts that are read
_LONGEST = 2000  # characters of a text in a page
_NEAR_END = 60.0  # seconds: Slurm's limit loop is up to this early or late
LATE = ", and it did not leave in time"  # end of the cause of one whose process is gone, and that was told to leave
LOST = "died without a word"  # it has no end on record and its process is gone


class Reached(NamedTuple):
    """How far an attempt came, as far as its beats tell."""

    first: int | None = None  # first step
    last: int | None = None  # last step
    saved: int | None = None  # newest step that was saved
    first_at: float | None = None  # epoch seconds at which the last rank had made its first step


def reached(rundir: RunDir, number: int) -> Reached:
    """Of attempt ``number``. Nothing when the beats cannot be read, or newer ones have taken their place."""
    try:
        mine = [beat for beat in beats.read_beats(rundir) if beat.facts.get("attempt") == str(number)]
    except OSError:
        return Reached()
    lasts = [beat.step for beat in mine if beat.step is not None]
    times = [when for beat in mine if (when := _moment(beat.facts.get("first_at"))) is not None]
    return Reached(
        first=min(_facts(mine, "first"), default=None),
        last=max(lasts, default=None),
        saved=max(_facts(mine, "saved"), default=None),
        first_at=max(times, default=None),
    )


def steps(rundir: RunDir, number: int) -> tuple[int | None, int | None]:
    """First and last step of attempt ``number``, as far as its beats tell."""
    seen = reached(rundir, number)
    return seen.first, seen.last


def _facts(found: list[Beat], name: str) -> list[int]:
    words = (beat.facts.get(name, "") for beat in found)
    sizes = ((word, as_count(word.removeprefix("-"))) for word in words)
    return [-size if word.startswith("-") else size for word, size in sizes if size is not None]


def ledger(rundir: RunDir) -> tuple[Attempt, ...]:
    """The attempts of the run, oldest first; () if there was none. Raises OSError if the directory cannot be read.

    Of more than ``NEWEST`` the first one and the newest: whoever may write there can make any number of them.

    One that runs has ``cause`` "" and no ``ended``. Without an end on record it is LOST when its process is gone from this
    host, and UNKNOWN when it is another host's and nothing can be said from here. A damaged page is told in ``note``.
    """
    try:
        found = sorted(numbers(rundir))
    except FileNotFoundError:
        return ()
    read = found if len(found) <= NEWEST else [found[0], *found[1 - NEWEST :]]
    return tuple(_attempt(rundir, number) for number in read)


def newest(rundir: RunDir) -> Attempt | None:
    """The last attempt of the run; None if there was none. Raises OSError."""
    try:
        found = numbers(rundir)
    except FileNotFoundError:
        return None
    return _attempt(rundir, max(found)) if found else None


def lives_here(attempt: Attempt | None) -> bool:
    """Is its supervisor a living process of this host, whatever a queue says? False where that cannot be seen from here."""
    return attempt is not None and bool(attempt.host) and attempt.ended is None and not attempt.cause


def numbers(rundir: RunDir) -> list[int]:
    """Of the attempts that have been claimed. Raises OSError."""
    counts = map(as_count, os.listdir(rundir.attempts))
    return [number for number in counts if number is not None]


def _attempt(rundir: RunDir, number: int) -> Attempt:
    folder = rundir.attempt(number)
    start, bad_start = _page(folder / "start.json")
    end, bad_end = _page(folder / "end.json")
    if start is None:
        note = bad_start or "claimed, but nothing was started"
        return Attempt(number, "", _claimed_at(folder), cause="" if _young(folder) else UNKNOWN, note=note)
    began = Attempt(
        number=number,
        job_id=as_text(start.get("job_id"), _LONGEST),
        started=read_time(start.get("at")) or _claimed_at(folder),
        host=as_text(start.get("host"), _LONGEST),
        nodes=_nodes(str(start.get("nodes") or "")),
    )
    if end is not None:
        code = end.get("exit_code")
        return began._replace(
            ended=read_time(end.get("at")),
            exit_code=code if isinstance(code, int) else None,
            cause=as_text(end.get("cause", UNKNOWN), _LONGEST),
            first_step=_step(end.get("first_step")),
            last_step=_step(end.get("last_step")),
            note=as_text(end.get("note"), _LONGEST),
            kind=as_text(end.get("kind"), _LONGEST),
            failure=as_text(end.get("failure"), _LONGEST),
            saved=_step(end.get("saved")),
            ready=as_number(end.get("ready")),
            then=as_text(end.get("then"), _LONGEST),
            detail=as_text(end.get("detail"), _LONGEST),
        )
    seen = reached(rundir, number)
    told = _warned(folder)
    note = "; ".join(filter(None, (bad_end, told)))
    cause = _without_end(start)
    if cause == LOST and told.startswith(f"{TOLD}SIGTERM at "):
        cause = _told_to_end(start, told)
    return began._replace(cause=cause, first_step=seen.first, last_step=seen.last, saved=seen.saved, note=note)


def _without_end(start: Mapping[str, object]) -> str:
    if start.get("host") != os.uname().nodename:
        return UNKNOWN
    pid = start.get("pid")
    lives = isinstance(pid, int) and processes.identity(pid) == start.get("pid_start")
    return "" if lives and start.get("boot_id") == processes.boot_id() else LOST


def _told_to_end(start: Mapping[str, object], told: str) -> str:
    """It was told, and Slurm's last 5 s were too few for the last page of a command that did not obey."""
    ends = read_time(start.get("job_ends"))
    at = read_time(told.removeprefix(f"{TOLD}SIGTERM at ").removesuffix(" UTC") + "+00:00")
    limit = ends is not None and at is not None and (ends - at).total_seconds() < _NEAR_END
    return f"{'time limit' if limit else 'cancelled or preempted (SIGTERM)'}{LATE}"


def _warned(folder: Path) -> str:
    """What the attempt was told before it ended without an end on record."""
    try:
        text = files.read_bounded(folder / WARNING, 64_000).decode("utf-8", "replace")
        return f"{TOLD}{printable(text.partition(chr(10))[0].strip(), 200) or 'to leave'}"
    except OSError:
        return ""


def _page(path: Path) -> tuple[dict[str, object] | None, str]:
    """A page, or None and what is wrong with it ("" if it is just not there)."""
    try:
        return read_json(path), ""
    except (OSError, ValueError) as error:
        return None, f"{path.name} cannot be read: {error}"


def _nodes(text: str) -> tuple[str, ...]:
    if not text:
        return ()
    from ftsupervise.hostlist import expand_hostlist

    try:
        return expand_hostlist(text)
    except ValueError:  # a damaged page: it is not known where it ran
        return ()


def _claimed_at(folder: Path) -> datetime:
    try:
        return time_of(folder.stat())
    except OSError:
        return datetime.fromtimestamp(0, timezone.utc)


def _young(folder: Path) -> bool:
    """Claimed a moment ago: its first page is being written."""
    return abs(datetime.now(timezone.utc).timestamp() - _claimed_at(folder).timestamp()) < 60


def read_time(value: object) -> datetime | None:
    """A time as our files have it (ISO 8601, UTC unless it says otherwise); None for what is none."""
    return as_time(value)


def _step(value: object) -> int | None:
    return as_whole(value)


def _moment(fact: str | None) -> float | None:
    """A number in a beat's facts, which are all text; None for what is none, or has no end."""
    try:
        return as_number(float(fact)) if fact is not None else None
    except ValueError:
        return None
