"""Two marks by which a start knows whether there must be something to go on from.

``state/restorable.json``: ``guard.save`` has committed a checkpoint, so ``guard.restore`` must find one. ``state/anew.json``:
a person has said that the run begins anew (``ftsupervise checkpoints anew``): what earlier attempts saved is not asked for.
"""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple, TypeVar

from ftsupervise.rundir import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import read_record, write_json

_Mark = TypeVar("_Mark", "Restorable", "Anew")


class Restorable(NamedTuple):
    """The first checkpoint that an attempt saved by ``guard.save``."""

    step: int | None = None
    attempt: int = 0


class Anew(NamedTuple):
    """A person's word: the run begins anew after attempt ``attempt``."""

    attempt: int = 0
    at: datetime | None = None
    user: str = ""
    aside: int = 0  # checkpoints that were set aside


class SavedBefore(NamedTuple):
    """What the run has saved since it began, as far as its pages say. None: nothing is known of any."""

    step: int | None = None  # the newest that an attempt said it had saved
    attempt: int | None = None
    restorable: int | None = None  # a step that ``guard.save`` committed


def note_restorable(rundir: RunDir, step: int, attempt: int | None) -> None:
    """Write the mark, once in an attempt. Raises OSError."""
    write_json(rundir.state / "restorable.json", Restorable(step, attempt or 0), sync=False)


def note_anew(rundir: RunDir, anew: Anew) -> None:
    """Write a person's word. Raises OSError."""
    write_json(rundir.state / "anew.json", anew)


def begun_anew(rundir: RunDir) -> int:
    """Return the last attempt before a person began the run anew; 0: nobody has. Raises OSError where that cannot be seen."""
    anew = _mark(rundir, "anew.json", Anew)
    return 0 if anew is None else anew.attempt


def saved_before(rundir: RunDir, attempt: int | None) -> SavedBefore:
    """Return what the attempts before ``attempt`` have saved. Raises OSError where that cannot be seen."""
    anew = _mark(rundir, "anew.json", Anew) or Anew()
    mark = _mark(rundir, "restorable.json", Restorable)
    restorable = mark.step if mark is not None and (not anew.attempt or mark.attempt > anew.attempt) else None
    try:
        for one in ledger.backwards(rundir, attempt, anew.attempt + 1):
            if one.saved is not None:
                return SavedBefore(one.saved, one.number, restorable)
    except FileNotFoundError:  # no attempt was ever claimed
        pass
    return SavedBefore(None, None, restorable)


def _mark(rundir: RunDir, name: str, kind: type[_Mark]) -> _Mark | None:
    try:
        return read_record(kind, rundir.state / name)
    except ValueError:  # damaged: the mark stood there, and nothing else in it is known
        return kind()
