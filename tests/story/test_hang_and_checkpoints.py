"""A hang is not hidden by what moves in the checkpoint folder: only saves of this run are progress. Nights as tables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.commit import Origin, commit
from ftsupervise.config.load import loads
from ftsupervise.model import Job, JobState
from ftsupervise.probe import Probe
from ftsupervise.rundir.lineage import keep_lineage
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Health
from ftsupervise.watch import Look
from ftsupervise.watch.watchdogs import load_watchdog

BEGIN, TICK, HOUR = 1_800_000_000.0, 300.0, 3600.0


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Probe]:
    with Probe(notes=tmp_path / "notes" / "probe", bound=60) as probe:
        yield probe


def put(path: Path, at: float, text: str = "x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (at, at))
    os.utime(path.parent, (at, at))


def an_event_file_grows(folder: Path, at: float) -> None:
    put(folder / "events.out.tfevents.1", at)


def an_evaluation_writes_into_the_last_one(folder: Path, at: float) -> None:
    put(folder / "step-300" / f"eval-{at:.0f}.json", at)


def a_lock_is_touched(folder: Path, at: float) -> None:
    put(folder / ".lock", at)


def retention_renames(folder: Path, at: float) -> None:
    put(folder / ".removed" / f"step-{at:.0f}" / "0", at)


def night(
    folder: Path, probe: Probe, moves: Callable[[Path, float], None], more: str = ""
) -> list[tuple[float, Health]]:
    """A run that saves each half hour, hangs at the third hour, and in whose folder ``moves`` goes on at each tick."""
    run = loads(f"name: r\nlaunch: {{command: a}}\nrun_dir: {folder}\n{more}", folder / "ftsupervise.yaml")
    rundir, checkpoints = RunDir(folder), run.checkpoints.path or RunDir(folder).checkpoints
    for path in (rundir.beats, rundir.logs, rundir.watch, rundir.state, rundir.switches, checkpoints):
        path.mkdir(parents=True, exist_ok=True)
    put(rundir.attempt(1) / "start.json", BEGIN, "{}")
    keep_lineage(rundir, "r")
    job = Job("7", "7", "r", "me", JobState.RUNNING, start_time=datetime.fromtimestamp(BEGIN, timezone.utc))
    memory: dict[str, Any] = {}
    found = []
    for number in range(1, 13 * 12):
        now = BEGIN + number * TICK
        if number * TICK <= 3 * HOUR and number % 6 == 0:
            put(checkpoints / f"step-{100 * number // 6}" / "0", now - 20)
        moves(checkpoints, now - 5)
        look = Look(
            run, rundir, datetime.fromtimestamp(now, timezone.utc), (job,), memory, probe=probe, watchdog="hang"
        )
        found += [(now - BEGIN, one.health) for one in load_watchdog("hang")(look, run.watch.hang)]
        memory = json.loads(json.dumps(memory))
    return found


@pytest.mark.parametrize(
    "moves",
    [
        an_event_file_grows,
        an_evaluation_writes_into_the_last_one,
        a_lock_is_touched,
        retention_renames,
    ],
    ids=lambda one: one.__name__,
)
def test_what_moves_beside_the_checkpoints_hides_no_hang(
    tmp_path: Path, probe: Probe, moves: Callable[[Path, float], None]
) -> None:
    seen = night(tmp_path / "run", probe, moves)
    assert all(health is Health.OK for at, health in seen if at <= 3 * HOUR)
    assert all(health is Health.BAD for at, health in seen if at > 6 * HOUR)


def test_the_saves_of_another_run_in_one_folder_hide_no_hang(tmp_path: Path, probe: Probe) -> None:
    shared = tmp_path / "shared"

    def another_saves(folder: Path, at: float) -> None:
        made = folder / f"step-9{at:.0f}"
        put(made / "0", at)
        commit(made, Origin(step=1, run="other", run_id="another"))
        os.utime(made, (at, at))

    seen = night(tmp_path / "run", probe, another_saves, f"checkpoints: {{path: {shared}}}\n")
    assert all(health is Health.BAD for at, health in seen if at > 6 * HOUR)


def test_a_save_that_is_being_written_is_progress(tmp_path: Path, probe: Probe) -> None:
    def stages(folder: Path, at: float) -> None:
        if at - BEGIN > 3 * HOUR:
            put(folder / ".staging" / "0001" / f"step-{at:.0f}" / "0", at)

    assert all(health is Health.OK for _, health in night(tmp_path / "run", probe, stages))


def test_a_checkpoint_that_is_written_over_is_progress(tmp_path: Path, probe: Probe) -> None:
    seen = night(tmp_path / "run", probe, lambda folder, at: put(folder / "last.ckpt", at))
    assert all(health is Health.OK for _, health in seen)
