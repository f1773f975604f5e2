"""The events of a run as JSON lines, for log collectors: ``watch/events/HOST-ACCOUNT.jsonl``, one file for each writer.

A line is appended in one write, under a lock (``.NAME.lock``) that is held for that only. After a full disk or a crash a torn
line is closed before the next one, so that it never swallows it. A file that has reached ``LARGEST`` is renamed to
``….jsonl.1``, and the one of that name goes: so much is kept, and no more. The journal of the alerts is the truth; this is a
copy that may lack a line.
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
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ftsupervise.findings import Finding, Notice
from ftsupervise.host import files
from ftsupervise.host.modes import as_page, make_folder
from ftsupervise.host.ownership import held_to_write, user_name
from ftsupervise.printable import printable
from ftsupervise.rundir.paths import RunDir

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
