"""A run that is launched a thousand times, and numbered past 9999: nothing is lost, sorted wrongly or slow."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.typed import typed

Until = Callable[..., Any]
SETTINGS = """
name: often
scheduler: local
launch: {command: "touch $FTSUPERVISE_RUN_DIR/state/finished", jobs: 1, time: 1h}
"""


@pytest.fixture
def often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: Until) -> RunDir:
    """A run that was launched once and has ended."""
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "own"))
    (tmp_path / "ftsupervise.yaml").write_text(SETTINGS)
    run = RunDir(tmp_path / "runs" / "often")
    launched(run, until)
    return run


def launched(run: RunDir, until: Until) -> None:
    before = len(list(run.attempts.glob("*/end.json")))
    (run.state / "finished").unlink(missing_ok=True)
    typed("launch", folder=run.root.parents[1], code=0)
    until(lambda: len(list(run.attempts.glob("*/end.json"))) > before, "the end of the attempt", 120)


def had_before(run: RunDir, *numbers: int) -> None:
    """Give the run launches and attempts of these numbers, as the first one was."""
    for number in numbers:
        shutil.copytree(run.attempt(1), run.attempt(number))
        folder = run.launches / f"{number:04d}"
        shutil.copytree(run.launches / "0001", folder)
        page = json.loads((folder / "launch.json").read_text())
        (folder / "launch.json").write_text(
            json.dumps({**page, "number": number, "job_ids": [f"local-{number + 10**6}"]})
        )


def processor_seconds(*words: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    typed(*words, code=0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_after_9999_launches_and_attempts_comes_10000(often: RunDir, until: Until) -> None:
    had_before(often, 9998, 9999)
    for number in (10_000, 10_001):
        launched(often, until)
        assert [launches(often)[-1].number, ledger(often)[-1].number] == [number, number]
        assert [launches(often, 1)[0].state, ledger(often)[-1].words] == ["submitted", "finished"]
    assert [one.number for one in ledger(often)] == [1, 9998, 9999, 10_000, 10_001]
    told = json.loads(typed("status", "--json", str(often.root), code=0).stdout)
    assert "10001" in json.dumps(told)
    assert "attempt 10001" in typed("logs", str(often.root), code=0).stdout


def test_a_thousand_launches_are_no_wait_for_who_asks_how_the_run_is(often: RunDir, until: Until) -> None:
    few = processor_seconds("status", str(often.root))
    had_before(often, *range(2, 1001))
    many = processor_seconds("status", str(often.root))
    assert many < few + 3, f"{many:.1f} s of a processor, with one launch {few:.1f} s"
    launched(often, until)
    assert launches(often)[-1].number == 1001 and len(os.listdir(often.attempts)) == 1001
