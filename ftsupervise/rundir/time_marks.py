"""Keeps how far a run was at each of its last minutes: ``state/last_hours.json``, a few kilobytes for ever.

The ledger has the sums of a whole attempt. With these marks the account of time can tell what an attempt did within its last
hour. The supervisor of the newest attempt writes them, through its staging area, as it writes the steps (``steps.py``).

Standard library only: ``status`` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ftsupervise.rundir.paths import RunDir, write_whole
from ftsupervise.rundir.records import as_number, as_whole, read_json

EVERY = 60.0  # seconds between two marks
KEPT = 7500.0  # seconds: two hours, and some marks before them
_MOST = 400  # marks, of many attempts
_LATEST = float(1 << 34)  # epoch seconds


class TimeMark(NamedTuple):
    """The progress of attempt ``attempt`` at epoch seconds ``at``."""

    at: float
    attempt: int
    step: int | None  # the highest of any rank
    saving: float  # seconds in saves until then
    active: float | None  # epoch seconds of the last sign of progress


def marks_path(rundir: RunDir) -> Path:
    return rundir.state / "last_hours.json"


def marked(marks: Iterable[TimeMark], new: TimeMark) -> tuple[TimeMark, ...]:
    """Return ``marks`` with ``new``, without those that are too old, or of a clock that has gone back since."""
    kept = [one for one in marks if new.at - KEPT <= one.at < new.at]
    return (*kept[-_MOST + 1 :], new)


def read_marks(rundir: RunDir) -> tuple[TimeMark, ...]:
    """Return the marks in the order of their times; () where there is no such page, or it cannot be read."""
    try:
        raw = read_json(marks_path(rundir), limit=100_000) or {}
    except (OSError, ValueError):
        return ()
    rows = raw.get("marks")
    if not isinstance(rows, list):
        return ()
    return tuple(sorted((mark for row in rows[:_MOST] if (mark := _mark(row)) is not None), key=lambda one: one.at))


def write_marks(rundir: RunDir, marks: Iterable[TimeMark], area: Path | None) -> None:
    """Raises OSError; also once a newer attempt has sealed ``area``."""
    rows = [
        [round(one.at), one.attempt, one.step, round(one.saving, 1), one.active and round(one.active)] for one in marks
    ]
    text = json.dumps({"marks": rows}, separators=(",", ":"))
    write_whole(marks_path(rundir), text.replace("],[", "],\n[") + "\n", sync=False, area=area)


def _mark(row: object) -> TimeMark | None:
    if not isinstance(row, list) or len(row) != 5:
        return None
    at, attempt, step, saving, active = as_number(row[0]), as_whole(row[1]), as_whole(row[2]), as_number(row[3]), row[4]
    if at is None or attempt is None or saving is None or not 0 <= at < _LATEST or saving < 0:
        return None
    active = as_number(active)
    return TimeMark(at, attempt, step, saving, active if active is not None and 0 <= active < _LATEST else None)
