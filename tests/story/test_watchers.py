"""A watch that died does not die in silence: the run's guard and the other watchers miss it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise import Guard
from ftsupervise.config.schema import Launch, Run
from ftsupervise.config.watchdogs import Watchers as Settings
from ftsupervise.findings import Finding
from ftsupervise.guard import heartbeat as door
from ftsupervise.rundir.heartbeat_page import remove_watcher, watcher_folder, watchers, write_watcher
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.truth import Health
from ftsupervise.watch import Look
from ftsupervise.watch.watchdogs.watchers import check

NOW = datetime.now(timezone.utc)


@pytest.fixture
def rundir(tmp_path: Path) -> Iterator[RunDir]:
    for name in ("switches", "watch", "beats"):
        (tmp_path / name).mkdir()
    yield RunDir(tmp_path)


def other(rundir: RunDir, age: timedelta, every: float | None = 60.0) -> None:
    watcher_folder(rundir).mkdir(exist_ok=True)
    record = {"at": (NOW - age).isoformat(), "host": "login2", "pid": 7}
    write_json(watcher_folder(rundir) / "login2-1000", record if every is None else {**record, "every": every})


def looked(rundir: RunDir) -> list[Finding]:
    run = Run(name="r", run_dir=rundir.root, launch=Launch(command="true"))
    return list(check(Look(run=run, rundir=rundir, now=NOW, jobs=()), Settings()))


def test_a_watcher_that_is_late_is_told_by_another(rundir: RunDir) -> None:
    other(rundir, timedelta(minutes=40))
    (finding,) = looked(rundir)
    assert finding.health is Health.BAD
    assert "login2 last checked the run 40m ago" in finding.summary


def test_a_watcher_on_time_and_one_that_promised_nothing_are_fine(rundir: RunDir) -> None:
    other(rundir, timedelta(minutes=2))
    assert [f.health for f in looked(rundir)] == [Health.OK]
    other(rundir, timedelta(days=2), every=None)
    assert looked(rundir) == []


def test_nobody_misses_himself_nor_one_who_took_leave(rundir: RunDir) -> None:
    write_watcher(rundir, NOW - timedelta(hours=3), timedelta(minutes=1))
    assert looked(rundir) == []
    remove_watcher(rundir)
    assert watchers(rundir) == ()


def test_the_guard_says_once_that_nobody_watches_any_more(
    rundir: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "WATCH_EVERY", 0.0)
    other(rundir, timedelta(hours=2))
    with Guard(rundir.root, poll=0, beat_every=0) as guard:
        for step in range(1, 6):
            guard.step(step)
    said = capsys.readouterr().err
    assert said.count("the watch on login2 has not checked since") == 1
    assert os.listdir(rundir.beats)
