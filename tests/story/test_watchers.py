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
from ftsupervise.report.reading import watch_seen
from ftsupervise.rundir.heartbeat_page import (
    remove_watcher,
    remove_watchers,
    watch_interval,
    watcher_folder,
    watchers,
    write_watcher,
)
from ftsupervise.rundir.paths import ENV_WATCHER, RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.watched import WatchFound, write_found
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


@pytest.mark.fault("A watcher dies", "another watcher and the guard say so")
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


def typed_by_a_crontab(rundir: RunDir, at: datetime) -> None:
    """What a tick of ``ftsupervise watch`` writes that no terminal started."""
    write_watcher(rundir, at, watch_interval(rundir, at, timedelta(minutes=5), typed=False))


def test_a_watch_by_a_crontab_is_late_when_its_crontab_has_died(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A day as a table: a line ``*/15`` on another host, which ends at the third hour. Known from its own ticks."""
    monkeypatch.setenv(ENV_WATCHER, "cron-login2")
    for tick in range(12):
        typed_by_a_crontab(rundir, NOW + timedelta(minutes=15 * tick))
    monkeypatch.delenv(ENV_WATCHER)
    ended, (page,) = NOW + timedelta(minutes=15 * 11), watchers(rundir)
    assert page.every == timedelta(minutes=15)
    late = [minutes for minutes in (5, 15, 30, 44, 46, 60) if page.late_by(ended + timedelta(minutes=minutes))]
    assert late == [46, 60]
    seen = watch_seen(rundir, ended + timedelta(hours=1))
    assert seen.late and not seen.gone


def test_a_watch_that_a_person_types_takes_back_no_promise_of_a_crontab(rundir: RunDir) -> None:
    minute = timedelta(minutes=1)
    assert watch_interval(rundir, NOW, minute, typed=True) is None
    typed_by_a_crontab(rundir, NOW)
    typed_by_a_crontab(rundir, NOW + 5 * minute)
    assert watch_interval(rundir, NOW + 6 * minute, minute, typed=True) == 5 * minute


def test_status_says_that_nobody_watches_a_run_that_was_checked_by_hand_yesterday(rundir: RunDir) -> None:
    write_found(rundir, WatchFound(NOW, every=timedelta(minutes=5)))
    write_watcher(rundir, NOW, None)
    assert not watch_seen(rundir, NOW + timedelta(minutes=10)).gone
    seen = watch_seen(rundir, NOW + timedelta(hours=20))
    assert seen.gone


def test_a_crontab_that_was_removed_is_missed_by_nobody(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cron-ab12-hourly.watch", "cron-cd34-hourly.watch"):
        monkeypatch.setenv(ENV_WATCHER, name)
        write_watcher(rundir, NOW, timedelta(hours=1))
    remove_watchers(rundir, "cron-ab12-")
    assert [one.name for one in watchers(rundir)] == ["cron-cd34-hourly.watch"]
