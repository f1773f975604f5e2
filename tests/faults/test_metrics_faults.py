"""The directory of the metrics hangs, or is somebody else's: messages still go out, and the run is not blamed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.neighbours.stranger import STRANGER
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed
from tests.story.measured_run import make_run

from .conftest import HungMount

pytestmark = pytest.mark.root


def look(folder: Path, *runs: Path) -> tuple[str, float]:
    env = outside_a_job(FTSUPERVISE_STATE_DIR=str(folder / "state"))
    began = time.monotonic()
    done = typed("watch", *runs, folder=folder, env=env)
    return done.stdout + done.stderr, time.monotonic() - began


def settings(folder: Path, name: str, metrics: Path) -> Path:
    make_run(folder, name)
    path = folder / f"{name}.yaml"
    path.write_text(
        f"name: {name}\nscheduler: local\nrun_dir: {folder}/runs/{name}\nlaunch: {{command: 'true'}}\n"
        f"watch: {{metrics: {metrics}, disk: null}}\nalerts: {{receivers: [{{file: {{path: {folder}/messages}}}}]}}\n"
    )
    return path


@pytest.mark.fault(
    "The directory of the metrics hangs",
    "The messages have gone out before, no run is blamed, and the tick says so once",
)
@pytest.mark.slow
def test_a_metrics_directory_that_hangs_costs_no_message_and_blames_no_run(
    tmp_path: Path, dead_mount: HungMount
) -> None:
    (tmp_path / "backing" / "textfile").mkdir()
    runs = [settings(tmp_path, name, dead_mount.point / "textfile") for name in ("one", "two")]
    dead_mount.hang("all")
    said, seconds = look(tmp_path, *runs)
    assert seconds < 40, said
    assert said.count("could not write its metrics") == 1, said
    assert "storage does not answer" not in said
    messages = (tmp_path / "messages").read_text()
    assert "one" in messages and "two" in messages, "they were sent before"


def test_a_metrics_directory_of_somebody_else_is_reported_and_nothing_in_it_is_changed(tmp_path: Path) -> None:
    folder = tmp_path / "textfile"
    folder.mkdir()
    run = settings(tmp_path, "one", folder)
    theirs = folder / "ftsupervise-root-one.prom"
    theirs.write_text("ftsupervise_run_step 7\n")
    os.chown(theirs, STRANGER, STRANGER)
    said, _ = look(tmp_path, run)
    assert "is written by" in said and theirs.read_text() == "ftsupervise_run_step 7\n"
