"""The events of a run since the last tick, from its ledger: pure. Events are sent once and have no end.

It stands alone because it is pure: attempts in, events out.

A fault that is over before the next tick (an attempt dies, the next array member takes over within seconds) is no alert,
but people want to find it in the morning: it is sent as one event with both halves in it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from ftsupervise.findings import EventKind, Finding, Notice
from ftsupervise.host import files
from ftsupervise.host.ownership import as_page, held_to_write, make_folder, user_name
from ftsupervise.model import OUTPUT, Attempt, CauseKind, FailureKind
from ftsupervise.printable import printable
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.starting_over import PercentOver, StartOver, began_again, starts_over
from ftsupervise.truth import OnlyTold
from ftsupervise.units import show_duration

_NOT_DONE = "It was not done: decisions of this kind are only told. To act on them: "

QUICK = timedelta(minutes=5)  # of training lost: a restart that costs less wakes nobody


@dataclass(frozen=True)
class Event:
    """One event. ``dedup`` names it for ever, so that it is sent once, however many watches there are."""

    kind: EventKind
    dedup: str
    at: datetime
    summary: str
    meaning: str = ""
    attempt: int = 0  # the number of the attempt that it is about; 0: of none
    quick: bool = False  # a restart that cost little: several of them are told together


def events(
    attempts: Sequence[Attempt],
    *,
    finished_at: datetime | None,
    raised: str = "",
    run: str = "",
    alone: Sequence[OnlyTold] = (),
) -> tuple[Event, ...]:
    """Return every event of the run so far, oldest first; the journal drops those that were sent.

    ``raised``: a person's name and reason for the kill switch that is up now; the newest attempt has answered it. ``run``:
    its directory, as a shell takes it. ``alone``: decisions that were only told where no attempt began.
    """
    found = _observed_alone(alone, run)
    for index, (before, attempt) in enumerate(zip([None, *attempts], attempts, strict=False)):
        up_to = attempts[: index + 1]
        anew = starts_over(up_to) if attempt.source == OUTPUT else ()
        found += _begin(before, attempt, anew, began_again(up_to) if attempt.percent is not None else None)
        found += _damaged(attempt)
        found += _torn(attempt, attempts[index - 1] if index else None)
        found += _observed(attempt, attempts[index - 1] if index else None, run)
        found += _end(attempt, raised if attempt is attempts[-1] else "")
    if finished_at is not None:
        last = attempts[-1] if attempts else None
        step = f" at step {last.last_step}" if last and last.last_step is not None else ""
        count = f", in {len(attempts)} attempt{'s' if len(attempts) > 1 else ''}" if attempts else ""
        total = ""
        if attempts:
            total = f" after {show_duration(max(0.0, (finished_at - attempts[0].started).total_seconds()))}"
        text = f"done{step}{total}{count}"
        number = last.number if last else 0
        dedup = f"finished-{number}"  # a run that was trained on finishes once more
        means = "Members still queued leave at once."
        found.append(Event(EventKind.FINISHED, dedup, finished_at, text, means, number))
    return tuple(found)


def _begin(
    before: Attempt | None, attempt: Attempt, anew: Sequence[StartOver], again: PercentOver | None
) -> list[Event]:
    if not attempt.host:
        return []  # claimed, and nothing was started: a full disk, or a job that died at once
    where = f"job {attempt.job_id}" if attempt.job_id else f"host {attempt.host}"
    nodes = f" on {len(attempt.nodes)} nodes" if len(attempt.nodes) > 1 else ""
    if before is None:
        return [Event(EventKind.STARTED, "started", attempt.started, f"{where}{nodes}", attempt=attempt.number)]
    if attempt.first_step is None:
        if again is not None and again.attempt == attempt.number:
            text = f"{again.words()} ({where})"
            return [
                Event(EventKind.STARTED, f"resumed-{attempt.number}", attempt.started, text, attempt=attempt.number)
            ]
        return []  # it has not come as far as a step; when it has, it has taken over
    if anew and anew[-1].attempt == attempt.number:
        text = f"{anew[-1].words()} ({where})"
        return [Event(EventKind.STARTED, f"resumed-{attempt.number}", attempt.started, text, attempt=attempt.number)]
    lost = ""
    if before.last_step is not None and attempt.first_step <= before.last_step:
        lost = f"; {before.last_step - attempt.first_step + 1} steps are done again"
    gap = ""
    if before.ended is not None:
        gap = f" {show_duration(max(0.0, (attempt.started - before.ended).total_seconds()))} after"
    step = f" at step {before.last_step}" if before.last_step is not None else ""
    ended = f"attempt {before.number} ended{step} ({before.why() or 'cause unknown'})"
    text = f"attempt {attempt.number} ({where}) goes on from step {attempt.first_step},{gap or ' where'} {ended}{lost}"
    dedup, quick = f"resumed-{attempt.number}", _is_quick(before, attempt)
    return [Event(EventKind.RESUMED, dedup, attempt.started, text, attempt=attempt.number, quick=quick)]


def _is_quick(before: Attempt, attempt: Attempt) -> bool:
    """Return whether the restart cost less than five minutes, steps made again included, and nothing odd was behind it."""
    if before.ended is None or before.hardware or attempt.first_step is None:
        return False
    if before.failure is not None and before.failure.kind is FailureKind.NUMBERS:
        return False
    cost = (attempt.started - before.ended).total_seconds()
    if before.last_step is not None and attempt.first_step <= before.last_step:
        made = before.last_step - (before.first_step or before.last_step) + 1
        each = (before.ended - before.started).total_seconds() / made
        cost += each * (before.last_step - attempt.first_step + 1)
    return cost < QUICK.total_seconds()


def _damaged(attempt: Attempt) -> list[Event]:
    """Return an event where an attempt has found that a checkpoint is not what was saved, before it loaded it."""
    resumed = attempt.resumed
    if resumed is None or not resumed.damaged:
        return []
    text = f"{'; '.join(resumed.damaged)}; attempt {attempt.number} begins {resumed.words()}"
    meaning = "It is kept in .quarantine and was not loaded. Look at the disk and the memory of what wrote and read it."
    return [Event(EventKind.DAMAGED, f"damaged-{attempt.number}", resumed.at or attempt.started, text, meaning)]


def _torn(attempt: Attempt, before: Attempt | None) -> list[Event]:
    """Return an event for each checkpoint that was torn when the attempt began. One that stays is told once in a row."""
    known = {(one.path, one.aside) for one in before.torn} if before is not None else set()
    meaning = "Nothing is deleted: ftsupervise checkpoints list. Where it stays, a loader that takes the newest crashes on it."
    return [
        Event(
            EventKind.DAMAGED,
            f"torn-{attempt.number}-{place}",
            attempt.started,
            f"before attempt {attempt.number}: {one.words()}; {one.now()}",
            meaning,
            attempt.number,
        )
        for place, one in enumerate(attempt.torn)
        if (one.path, one.aside) not in known
    ]


def _observed_alone(alone: Sequence[OnlyTold], run: str) -> list[Event]:
    """Return an event for each decision that was only told where no attempt began."""
    means = _NOT_DONE + f"ftsupervise observe --off {run}".rstrip()
    return [
        Event(
            EventKind.OBSERVED,
            "-".join(filter(None, ("observed", one.decision, one.node, f"{one.at.timestamp():.0f}"))),
            one.at,
            f"no attempt began at {one.at:%H:%M} UTC: {one.words()}",
            means,
        )
        for one in alone
        if one.at is not None
    ]


def _observed(attempt: Attempt, before: Attempt | None, run: str) -> list[Event]:
    """Return an event for each decision that was only told. One that each attempt comes to anew is told once in a row."""
    found = []
    means = _NOT_DONE + f"ftsupervise observe --off {run}".rstrip()
    for one in attempt.observed:
        if one.at is None or (before is not None and one.repeats(before.observed)):
            continue
        dedup = "-".join(
            filter(None, (f"observed-{attempt.number}", one.decision, one.node, f"{one.at.timestamp():.0f}"))
        )
        text = f"attempt {attempt.number} at {one.at:%H:%M} UTC: {one.words()}"
        found.append(Event(EventKind.OBSERVED, dedup, one.at, text, means, attempt.number))
        if one.then:
            then = f"attempt {attempt.number}: {one.then} ({one.words()})"
            found.append(
                Event(EventKind.OBSERVED, f"{dedup}-then", one.at, then, "Nothing was done to it.", attempt.number)
            )
    return found


def _end(attempt: Attempt, raised: str) -> list[Event]:
    """Return an event for an end after which no job takes over. A failure belongs to the recovery watchdog until it is over."""
    if attempt.cause is None or attempt.cause.kind is not CauseKind.KILL_SWITCH:
        return []
    step = f" at step {attempt.last_step}" if attempt.last_step is not None else ""
    words = ", ".join(filter(None, ("kill switch", raised or attempt.cause.text, attempt.note)))
    did = "stopped" if attempt.source == OUTPUT else "saved and stopped"
    text = f"attempt {attempt.number} {did}{step}: {words}"
    meaning = "Queued members leave at once; nothing trains until the switch is cleared and the run launched again."
    dedup, at = f"ended-{attempt.number}", attempt.ended or attempt.started
    return [Event(EventKind.STOPPED, dedup, at, text, meaning, attempt.number)]


# ------------------------------------------------------------------------------------------

# The events of a run as JSON lines, for log collectors: ``watch/events/HOST-ACCOUNT.jsonl``, one file for each writer.
#
# A line is appended in one write, under a lock (``.NAME.lock``) that is held for that only. After a full disk or a crash a torn
# line is closed before the next one, so that it never swallows it. A file that has reached ``LARGEST`` is renamed to
# ``….jsonl.1``, and the one of that name goes: so much is kept, and no more. The journal of the alerts is the truth; this is a
# copy that may lack a line.

SCHEMA = 1  # raised when a field goes or changes its meaning
LARGEST = 1_000_000  # bytes of a file
_LONGEST = 2000  # characters of a text in a line
_LOCK = 2.0  # seconds that another tick of this account, on this host, may hold the file


class EventLine(NamedTuple):
    """``event``: fired, escalated, repeated, resolved, unwatched; or started, resumed, stopped, finished, damaged, observed."""

    at: datetime
    run: str
    directory: str
    event: str
    severity: str
    watchdog: str = ""
    subject: str = ""
    summary: str = ""
    value: str = ""
    limit: str = ""
    since: datetime | None = None
    alert: str = ""

    def text(self, host: str) -> str:
        record: dict[str, object] = {"schema": SCHEMA}
        for name, value in self._asdict().items():
            record[name] = value.isoformat() if isinstance(value, datetime) else value
            if name == "directory":
                record["host"] = host
            if isinstance(value, str):
                record[name] = printable(value, _LONGEST)
        return json.dumps(record, ensure_ascii=False)


def of_notice(notice: Notice, rundir: RunDir) -> EventLine:
    """Make a line of a notice that people get."""
    of, where = notice.finding, str(rundir.root)
    told = EventLine(
        notice.at, of.run, where, notice.reason.value, of.severity.word, of.watchdog, of.subject, of.summary
    )
    return told._replace(value=of.value, limit=of.limit, since=notice.since, alert=notice.alert_id)


def of_event(kind: str, finding: Finding, rundir: RunDir, at: datetime) -> EventLine:
    """Make a line of an event of the run itself, which has no end."""
    return EventLine(at, finding.run, str(rundir.root), kind, finding.severity.word, summary=finding.summary)


def events_path(rundir: RunDir) -> Path:
    writer = re.sub(r"[^A-Za-z0-9._-]", "_", f"{os.uname().nodename}-{user_name()}")
    return rundir.watch / "events" / f"{writer}.jsonl"


def append(path: Path, lines: Iterable[EventLine], *, largest: int = LARGEST) -> None:
    """Append the lines, each whole. Raises OSError; then none of the rest was written."""
    host = os.uname().nodename
    payload = [f"{line.text(host)}\n".encode("utf-8", "replace") for line in lines]
    if not payload:
        return
    make_folder(path.parent)
    with held_to_write(path.parent) as here:
        lock = _lock(here / path.name)
        try:
            _append_locked(here / path.name, payload, largest)
        finally:
            os.close(lock)


def _append_locked(path: Path, payload: Sequence[bytes], largest: int) -> None:
    with suppress(FileNotFoundError):
        if path.lstat().st_size >= largest:
            os.replace(path, f"{path}.1")
    fd = as_page(path)
    try:
        _append(fd, payload)
    finally:
        os.close(fd)


def _append(fd: int, payload: Sequence[bytes]) -> None:
    size = os.fstat(fd).st_size
    if size and _last_byte(fd, size) != b"\n":
        payload = [b"\n" + payload[0], *payload[1:]]
    for line in payload:
        size = os.fstat(fd).st_size
        if os.write(fd, line) != len(line):
            os.ftruncate(fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _last_byte(fd: int, size: int) -> bytes:
    """``fd`` can only be written, so the file is opened again by it."""
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(again, 1, size - 1)
    finally:
        os.close(again)


def _lock(path: Path) -> int:
    """A descriptor that holds the file ``path`` for this tick. Raises OSError.

    Who can read a file can lock it and keep it so, so the lock is another file that only its owner can open.
    """
    until = time.monotonic() + _LOCK
    fd = files.open_append(path.with_name(f".{path.stem}.lock"), 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:  # another tick writes
                if time.monotonic() > until:
                    raise OSError(errno.EBUSY, "another watch holds it", str(path)) from None
            time.sleep(0.02)
    except BaseException:
        os.close(fd)
        raise
