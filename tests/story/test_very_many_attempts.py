"""Whoever may write in a run can make any number of attempts and launches: what is read of them is bounded, and said."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise.cli.status import lines_of
from ftsupervise.report.detail import detail
from ftsupervise.rundir import launches, ledger
from ftsupervise.rundir.ledger import claim
from ftsupervise.rundir.paths import RunDir

MANY = 3 * ledger.NEWEST


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    for folder in (run.attempts, run.launches, run.switches, run.state, run.beats):
        folder.mkdir(parents=True)
    for number in (*range(1, MANY + 1), 12345):
        for above, page in ((run.attempts, "start.json"), (run.launches, "launch.json")):
            (above / f"{number:04d}").mkdir()
            (above / f"{number:04d}" / page).write_text(
                json.dumps({"at": "2026-11-22T00:00:00+00:00", "job_ids": ["7"]})
            )
    return run


@pytest.mark.threat(
    "Tens of thousands of attempts or launches slow down every look.",
    "ftsupervise reads the first one and the newest thousand, and `status` says so.",
)
def test_of_very_many_attempts_the_first_and_the_newest_are_read_and_status_says_so(run: RunDir) -> None:
    read = ledger.ledger(run)
    assert [one.number for one in (*read[:2], read[-1])] == [1, MANY - ledger.NEWEST + 3, 12345]
    assert len(read) == ledger.NEWEST
    seen = detail(run, datetime(2026, 11, 23, tzinfo=timezone.utc), {})
    not_read = seen.status.run.not_read
    assert not_read == MANY + 1 - ledger.NEWEST
    said = "\n".join(lines_of(seen))
    assert f"({MANY - 4} earlier ones, of which {not_read} were not read: ls {run.attempts})" in said
    assert claim(run).number == 12346, "the next number is that after all of them"


def test_of_very_many_launches_the_newest_are_read(run: RunDir) -> None:
    found = launches.launches(run)
    assert len(found) == launches.NEWEST
    assert found[-1].number == 12345, "five digits come after four"
