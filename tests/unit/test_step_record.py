"""The record of steps stays small for ever, and parts of it merge in any order."""

from __future__ import annotations

from pathlib import Path
from random import Random

from ftsupervise.host.ownership import make_folder
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import (
    EVERY,
    MOST,
    Span,
    StepRecord,
    added,
    merged,
    rates,
    read_steps,
    steps_path,
    write_steps,
)

BEGIN = 1_800_000_000.0
DAY = 86400.0


def recorded(begin: float, seconds: float, every: float, loss: float | None = None, step: int = 0) -> StepRecord:
    record, at = StepRecord(), begin
    while at < begin + seconds:
        step += 10
        record = added(record, at, step, 10, loss)
        at += every
    return record


def test_ninety_days_take_less_than_a_hundred_kilobytes(tmp_path: Path) -> None:
    random, record, step = Random(1), StepRecord(), 12_345_678
    for minute in range(90 * 24 * 60):
        step += 60
        record = added(record, BEGIN + 60.0 * minute, step, 60, 2.0 + random.random())
    rundir = RunDir(tmp_path)
    make_folder(rundir.state)
    write_steps(rundir, record, None)
    assert steps_path(rundir).stat().st_size < 100_000
    assert len(record.spans) <= MOST
    assert record.every <= 3840
    assert sum(one.made for one in record.spans) == 90 * 24 * 60 * 60
    again = read_steps(rundir)
    assert again.every == record.every
    assert [one[:3] for one in again.spans] == [one[:3] for one in record.spans]


def test_parts_of_a_run_merge_in_any_order_and_at_any_grain() -> None:
    parts = [recorded(BEGIN + 3 * DAY * i, DAY, 30.0, 1.0 + i, 100_000 * i) for i in range(4)]
    parts.append(recorded(BEGIN, 60.0, 1.0))
    one, other = StepRecord(), StepRecord()
    for part in parts:
        one = merged(one, part)
    for part in reversed(parts):
        other = merged(part, other)
    assert [(s.number, s.made, s.losses) for s in one.spans] == [(s.number, s.made, s.losses) for s in other.spans]
    assert sum(s.made for s in one.spans) == sum(s.made for part in parts for s in part.spans)
    assert merged(one, StepRecord()) == one


def test_a_rollback_shows_and_its_steps_count_as_made() -> None:
    record = added(added(StepRecord(), BEGIN, 100, 100), BEGIN + 2 * EVERY, 60, 10)
    assert [(one.step, one.made) for one in record.spans] == [(100, 100), (60, 10)]
    assert rates(recorded(BEGIN, 10 * EVERY, 3.0))[0] == 50 / EVERY


def test_a_clock_that_goes_back_loses_nothing() -> None:
    record = added(added(added(StepRecord(), BEGIN, 10, 10), BEGIN + DAY, 20, 10), BEGIN - DAY, 30, 10)
    assert [one.number for one in record.spans] == sorted(one.number for one in record.spans)
    assert sum(one.made for one in record.spans) == 30


def test_the_time_in_saves_is_kept_with_its_span(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    make_folder(rundir.state)
    record = added(added(StepRecord(), BEGIN, 100, 100, None, 12.5), BEGIN + EVERY, 110, 10, 2.5, 7.5)
    write_steps(rundir, record, None)
    assert [one.saving for one in read_steps(rundir).spans] == [12.5, 7.5]
    assert [one.saving for one in merged(record, StepRecord(2 * EVERY)).spans] in ([20.0], [12.5, 7.5])


def test_a_damaged_record_is_read_as_far_as_it_makes_sense(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    make_folder(rundir.state)
    path = steps_path(rundir)
    path.write_text('{"every": 15, "spans": [[120000000, 5, 5], "x", [1], [-5, 1, 1], [120000001, 6, 1, 2.5, 3, 4]]}')
    assert read_steps(rundir).spans == (Span(120000000, 5, 5), Span(120000001, 6, 1, 2.5, 3.0, 4))
    for text in ("", "[]", '{"every": 0}', '{"every": 16, "spans": []}', '{"every": 15, "spans": 3}'):
        path.write_text(text)
        assert read_steps(rundir) == StepRecord()
