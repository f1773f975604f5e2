"""The progress of an attempt as its supervisor sees it: all ranks in one small page, ``attempts/NNNN/progress.json``.

The node agents sum up their ranks, the supervisor sums up the nodes and writes this page every few seconds. So ``status`` reads
one file for a run of 100,000 ranks. The page of an attempt that was lost says until when it is known to have lived.

Standard library only: ``status`` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.rundir.paths import RunDir, write_whole
from ftsupervise.rundir.records import EPOCH, as_number, as_whole, read_json, read_record, write_json
from ftsupervise.units import rank_words

PROGRESS = "progress.json"  # in an attempt's directory
# what a supervisor does about a hang: it starts it again in place; ends it, for the next job; tells it only; leaves it running
# and says so; does not look for one
RESTARTS, ENDS, TOLD, LEFT, OFF = ON_HANG = ("restarts", "ends", "told", "left", "off")


COMES_LAST, WORKS = "comes last", "works"  # how it is known for whom the others wait
_LASTS = timedelta(minutes=5)


class Straggler(NamedTuple):
    """The rank, or the ranks of one node, for which the others wait. ``cost``: the share of the time that they lose by it."""

    ranks: tuple[int, ...] = ()
    node: str = ""
    cost: float = 0.0
    how: str = ""  # COMES_LAST or WORKS
    of: int = 0  # ranks that were compared
    since: datetime = EPOCH
    price: float | None = None  # of a rank, which is a GPU, for an hour

    def lasts(self, now: datetime) -> bool:
        """Return whether it has been so for minutes: before, nobody is woken, and no node blamed, for what may pass."""
        return now - self.since >= _LASTS

    def words(self) -> str:
        """Say it in a sentence: "rank 17 on node-3 is slow: it comes last at each step, which costs 23% of the time"."""
        many = len(self.ranks) > 1
        who = f"{rank_words(self.ranks)}{f' on {self.node}' if self.node else ''} {'are' if many else 'is'} slow"
        they = "they" if many else "it"
        if self.how == COMES_LAST:
            why = f"{they} {'come' if many else 'comes'} last at each step"
        else:
            why = f"{they} {'work' if many else 'works'} while the others wait"
        worth = "" if self.price is None else f", {24 * self.of * self.cost * self.price:,.2f} a day at the price given"
        return f"{who}: {why}, which costs {self.cost:.0%} of the time of all {self.of} ranks{worth}"


class ProgressPage(NamedTuple):
    """Times are this host's; ``first_at`` and ``active_at`` are in epoch seconds."""

    at: datetime = EPOCH  # when this was seen
    ranks: int = 0  # that report
    step: int | None = None  # that all of them have reached
    ahead: int | None = None  # that the first of them has reached
    slowest: Annotated[str, 200] = ""  # the rank that is furthest behind, and where, if one is
    phase: Annotated[str, 100] = ""  # of most ranks
    stepped: float | None = None  # seconds since the last step of any rank
    first: int | None = None
    first_at: float | None = None  # when the last rank had made its first step
    active_at: float | None = None  # the last step of any rank, or the last change of its phase
    saved: int | None = None
    saved_at: datetime | None = None  # when that was first seen
    saving: float = 0.0  # seconds in saves
    rate: float | None = None  # steps a second over the last minute, saves included
    usual: float | None = None  # the same over the run
    steady: float | None = None  # the same over the last hour in which it trained; None before there was one
    hung: Annotated[str, 500] = ""  # the hang that the detector has found and left alone, in words
    on_hang: Annotated[str, 20] = ""  # one of ``ON_HANG``; "": not known
    hang_at: float | None = None  # epoch seconds: the present standstill is a hang then, unless something moves
    loss: float | None = None
    last_step: int | None = None  # the one after which the training is complete, where the loop said so
    straggler: Straggler | None = None  # for whom the others wait
    source: Annotated[str, 20] = ""  # who told the steps: one of ``SOURCES``; "": not known


def write_progress(attempt: Path, progress: ProgressPage) -> None:
    """Write the page. Raises OSError. Not synced: an older page is true too."""
    write_json(attempt / PROGRESS, progress, sync=False, indent=None)


def read_progress(rundir: RunDir, number: int) -> ProgressPage | None:
    """Return the page; None where there is none, or it cannot be read."""
    try:
        return read_record(ProgressPage, rundir.attempt(number) / PROGRESS, limit=64_000)
    except (OSError, ValueError):
        return None


# ------------------------------------------------------------------------------------------

# The steps of a run over time: ``state/steps.json``, small for ever, for pictures of step, rate and loss.
#
# Time is cut into equal spans. A span holds the last step that was made in it, how many were made (again, too), its losses, and
# for how long the training waited for saves. When there are more than ``MOST`` spans, each two become one: three months take
# some 90 kB, in spans of about an hour. Records of several attempts or hosts can be merged in any order.
#
# The supervisor of the newest attempt writes it, through its staging area, so that an older one never replaces it
# (``fence.py``).

EVERY = 15  # seconds of the first spans
MOST = 2048  # spans
_LONGEST = 40 * 86400  # seconds of a span
_LATEST = 1 << 34  # the end of a span, epoch seconds


class Span(NamedTuple):
    """``number``: it begins at this many times ``StepRecord.every`` epoch seconds."""

    number: int
    step: int  # the last one in it
    made: int  # steps in it
    loss: float | None = None  # mean of the losses seen in it
    highest: float | None = None  # of them
    losses: int = 0  # that were seen
    saving: float = 0.0  # seconds in saves


class StepRecord(NamedTuple):
    every: int = EVERY  # seconds of a span: EVERY times a power of two
    spans: tuple[Span, ...] = ()  # those in which something was seen, in order


def steps_path(rundir: RunDir) -> Path:
    return rundir.state / "steps.json"


def added(
    record: StepRecord, at: float, step: int, made: int, loss: float | None = None, saving: float = 0.0
) -> StepRecord:
    """Return ``record`` with what was seen at epoch seconds ``at``: since the last time there were ``made`` steps, the last one
    being ``step``, and ``saving`` seconds in saves."""
    seen = Span(int(at // record.every), step, made, loss, loss, int(loss is not None), saving)
    spans = record.spans
    if spans and spans[-1].number == seen.number:
        return record._replace(spans=(*spans[:-1], _joined(spans[-1], seen)))
    if spans and spans[-1].number > seen.number:  # the clock went back
        return merged(record, StepRecord(record.every, (seen,)))
    return _bounded(record.every, [*spans, seen])


def merged(one: StepRecord, other: StepRecord) -> StepRecord:
    every = max(one.every, other.every)
    return _bounded(every, [*_coarser(one, every), *_coarser(other, every)])


def rates(record: StepRecord) -> list[float]:
    """Return steps a second in each whole span in which there were any."""
    return [one.made / record.every for one in record.spans[1:-1] if one.made > 0]


def read_steps(rundir: RunDir) -> StepRecord:
    """Return the record; empty where there is none, or it cannot be read."""
    try:
        raw = read_json(steps_path(rundir), limit=1_000_000) or {}
    except (OSError, ValueError):
        return StepRecord()
    every, rows = as_whole(raw.get("every")) or 0, raw.get("spans")
    if not _is_period(every) or not isinstance(rows, list):
        return StepRecord()
    return _bounded(every, [span for row in rows[: 2 * MOST] if (span := _span(row, every)) is not None])


def write_steps(rundir: RunDir, record: StepRecord, area: Path | None) -> None:
    """Write the record. Raises OSError; also once a newer attempt has sealed ``area``."""
    rows = [[span.number, span.step, span.made, *_figures(span)] for span in record.spans]
    text = json.dumps({"every": record.every, "spans": rows}, separators=(",", ":"))
    write_whole(steps_path(rundir), text.replace("],[", "],\n[") + "\n", sync=False, area=area)


def _figures(span: Span) -> list[float]:
    saving = [round(span.saving, 1)] if span.saving >= 0.05 else []
    if span.loss is None or span.highest is None:
        return saving
    return [float(f"{span.loss:.5g}"), float(f"{span.highest:.5g}"), span.losses, *saving]


def _span(row: object, every: int) -> Span | None:
    if not isinstance(row, list) or len(row) not in (3, 4, 6, 7):
        return None
    number, step, made = (as_whole(value) for value in row[:3])
    if number is None or step is None or made is None or not 0 <= number * every < _LATEST or made < 0:
        return None
    saving = as_number(row[-1]) if len(row) in (4, 7) else 0.0
    saving = saving if saving is not None and 0.0 <= saving <= _LONGEST else 0.0
    if len(row) < 6:
        return Span(number, step, made, saving=saving)
    loss, highest, losses = as_number(row[3]), as_number(row[4]), as_whole(row[5])
    return (
        Span(number, step, made, loss, highest, losses, saving) if losses else Span(number, step, made, saving=saving)
    )


def _is_period(every: int) -> bool:
    parts = every // EVERY
    return 0 < every < _LONGEST and every % EVERY == 0 and parts & (parts - 1) == 0


def _coarser(record: StepRecord, every: int) -> Iterable[Span]:
    factor = every // record.every
    return (span._replace(number=span.number // factor) for span in record.spans)


def _bounded(every: int, spans: Sequence[Span]) -> StepRecord:
    found: dict[int, Span] = {}
    for span in spans:
        found[span.number] = _joined(found[span.number], span) if span.number in found else span
    while len(found) > MOST:
        halved: dict[int, Span] = {}
        for number in sorted(found):
            half = found[number]._replace(number=number // 2)
            halved[number // 2] = _joined(halved[number // 2], half) if number // 2 in halved else half
        found, every = halved, every * 2
    return StepRecord(every, tuple(found[number] for number in sorted(found)))


def _joined(earlier: Span, later: Span) -> Span:
    losses = earlier.losses + later.losses
    means = [(one.loss, one.losses) for one in (earlier, later) if one.loss is not None]
    mean = sum(loss * count for loss, count in means) / max(1, losses) if means else None
    highest = max((one.highest for one in (earlier, later) if one.highest is not None), default=None)
    saving = earlier.saving + later.saving
    return Span(earlier.number, later.step, earlier.made + later.made, mean, highest, losses, saving)


# ------------------------------------------------------------------------------------------

# Keeps how far a run was at each of its last minutes: ``state/last_hours.json``, a few kilobytes for ever.
#
# The ledger has the sums of a whole attempt. With these marks the account of time can tell what an attempt did within its last
# hour. The supervisor of the newest attempt writes them, through its staging area, as it writes the steps.
#
# Standard library only: ``status`` reads it.

KEPT = 7500.0  # seconds: two hours, and some marks before them
_MOST = 400  # marks, of many attempts
_LATEST_MARK = float(1 << 34)  # epoch seconds


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
    if at is None or attempt is None or saving is None or not 0 <= at < _LATEST_MARK or saving < 0:
        return None
    active = as_number(active)
    return TimeMark(at, attempt, step, saving, active if active is not None and 0 <= active < _LATEST_MARK else None)
