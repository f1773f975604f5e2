"""The steps of a run over time: ``state/steps.json``, small for ever, for pictures of step, rate and loss.

Time is cut into equal spans. A span holds the last step that was made in it, how many were made (again, too), its losses, and
for how long the training waited for saves. When there are more than ``MOST`` spans, each two become one: three months take some
90 kB, in spans of about an hour. Records of several attempts or hosts can be merged in any order.

The supervisor of the newest attempt writes it, through its staging area, so that an older one never replaces it (``fence.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ftsupervise.rundir.paths import RunDir, write_whole
from ftsupervise.rundir.records import as_number, as_whole, read_json

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
