"""Slots, claimed by mkdir: whatever is submitted twice, requeued or started late, no slot runs twice.

mkdir is the one operation that every shared file system gets right: exactly one caller makes the directory. A
slot that was claimed is never run again, also when its tick died at once; an entry that lost its run by that is owed
one, see ``schedule.due``.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from ftsupervise.crontab.place import CronDir, Installed, read_stamp, stamp
from ftsupervise.crontab.schedule import floor
from ftsupervise.host.modes import PAGE, claim_folder, make_folder
from ftsupervise.rundir.records import read_json, write_json

KEEP = 600  # slots whose records are kept
_AHEAD = timedelta(hours=1)
ENSURED = "ensured"


@dataclass(frozen=True)
class Slot:
    """A slot as its record has it. ``late``: seconds from the slot to its tick; None: the tick died at once."""

    at: datetime
    late: float | None = None
    job_id: str = ""
    ended: bool = False
    backend: str = ""  # what started its tick; "" where that was not written down
    ran: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()


def claim(cron: CronDir, slot: datetime, now: datetime, job_id: str, backend: str = "") -> bool:
    """True for exactly one caller per slot, ever. Raises OSError when the file system cannot say."""
    folder = cron.slots / stamp(slot)
    try:
        claim_folder(folder)
    except FileExistsError:
        return False
    except FileNotFoundError:
        make_folder(folder.parent, parents=True)
        try:
            claim_folder(folder)
        except FileExistsError:
            return False
    _write(
        folder / "claim.json",
        {
            "at": now.isoformat(),
            "late": round((now - slot).total_seconds(), 3),
            "job_id": job_id,
            "backend": backend,
            **_who(),
        },
    )
    return True


def mark_ensured(cron: CronDir, slot: datetime) -> None:
    """Say to the other jobs of this slot that its successors are in the queue."""
    try:
        (cron.slots / stamp(slot) / ENSURED).touch(mode=PAGE)
    except OSError:
        return


def is_ensured(cron: CronDir, slot: datetime, patience: float) -> bool:
    """Whether the tick that has the slot has kept the chain; waits up to ``patience`` seconds for it."""
    until = time.monotonic() + patience
    while True:
        try:
            if ENSURED in os.listdir(cron.slots / stamp(slot)):
                return True
        except OSError:
            return False
        if time.monotonic() >= until:
            return False
        time.sleep(min(0.25, patience))


def close(cron: CronDir, slot: datetime, record: Mapping[str, object]) -> None:
    _write(cron.slots / stamp(slot) / "end.json", record)


def slots(cron: CronDir, now: datetime) -> tuple[Slot, ...]:
    """The records that are kept, oldest first. Raises OSError; () when there are none."""
    return tuple(_read(cron.slots / stamp(at), at) for at in claimed(cron, now))


def claimed(cron: CronDir, now: datetime | None = None) -> tuple[datetime, ...]:
    """The claimed slots that are kept, oldest first; with ``now`` none that lies in the future by more than an hour, such as
    a clock that was wrong once has left behind: it must not pass for the newest one for years."""
    try:
        names = os.listdir(cron.slots)
    except FileNotFoundError:
        return ()
    found = sorted(at for at in map(read_stamp, names) if at is not None)
    return tuple(at for at in found if now is None or at <= now + _AHEAD)


def newest(cron: CronDir, installed: Installed, now: datetime) -> Slot | None:
    """The last slot that the back end of ``installed`` has ticked at; None if it never did since it was installed."""
    for at in reversed(claimed(cron, now)):
        if at < floor(installed.since, installed.period):
            return None
        slot = _read(cron.slots / stamp(at), at)
        if slot.backend in ("", installed.backend):
            return slot
    return None


def read_slot(cron: CronDir, at: datetime) -> Slot:
    return _read(cron.slots / stamp(at), at)


def prune(cron: CronDir) -> None:
    """Forget the oldest. Best effort: a full directory is untidy, not wrong."""
    try:
        old = claimed(cron)[:-KEEP]
    except OSError:
        return
    for at in old:
        shutil.rmtree(cron.slots / stamp(at), ignore_errors=True)


def _read(folder: Path, at: datetime) -> Slot:
    begun, ended = _json(folder / "claim.json"), _json(folder / "end.json")
    late, ran, trouble, drained = _seconds(begun.get("late")), *map(ended.get, ("ran", "trouble", "drained"))
    return Slot(
        at,
        late=late,
        backend=str(begun.get("backend", "")),
        job_id=str(begun.get("job_id", "")),
        ended=bool(ended),
        ran=tuple(map(str, ran)) if isinstance(ran, list) else (),
        trouble=tuple(map(str, trouble)) if isinstance(trouble, list) else (),
        drained=tuple(map(str, drained)) if isinstance(drained, list) else (),
    )


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e9 else None


def _json(path: Path) -> dict[str, object]:
    try:
        return read_json(path, limit=1_000_000) or {}
    except (OSError, ValueError):
        return {}


def _write(path: Path, record: Mapping[str, object]) -> None:
    try:
        write_json(path, record)
    except OSError:  # the directory is the claim; what stands in it is for people
        return


def _who() -> dict[str, object]:
    return {"host": os.uname().nodename, "pid": os.getpid()}
