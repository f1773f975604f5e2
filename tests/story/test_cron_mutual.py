"""A running job looks after the cron that watches it: revives it, or tells the run's own receivers; and tells its return."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ftsupervise.config.load import loads
from ftsupervise.config.schema import Run
from ftsupervise.crontab.keepalive import look_after_for
from ftsupervise.truth import Health
from tests.story.cron_folder import NINE, Folder, make


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "run" / "switches").mkdir(parents=True)
    return loads(
        f"name: train\nlaunch: {{command: a}}\nrun_dir: {tmp_path}/run\ncron: {{directory: {tmp_path}/cron}}\n"
        f"alerts: {{receivers: [{{file: {{path: {tmp_path}/heard}}}}]}}\n",
        tmp_path / "ftsupervise.yaml",
    )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return make(tmp_path, backend="slurm")


def test_while_cron_lives_nothing_is_asked_and_nothing_is_written(run: Run, folder: Folder, tmp_path: Path) -> None:
    folder.queue.asked = 0
    found = look_after_for(run, folder.queue, NINE + timedelta(minutes=3))
    assert found is not None
    assert found.health is Health.OK
    assert folder.queue.asked == 0
    assert not (tmp_path / "run" / "watch").exists()


def test_a_dead_cron_is_revived_and_nobody_is_woken(run: Run, folder: Folder, tmp_path: Path) -> None:
    folder.queue.jobs.clear()
    found = look_after_for(run, folder.queue, NINE + timedelta(minutes=11))
    assert found is not None
    assert "brought back" in found.summary
    assert not (tmp_path / "heard").exists()


def test_a_cron_that_cannot_be_revived_is_told_by_the_run_and_so_is_its_return(
    run: Run, folder: Folder, tmp_path: Path
) -> None:
    folder.queue.jobs.clear()
    folder.queue.refuses = "Job violates accounting/QOS policy"
    for minutes in (11, 16, 21):
        look_after_for(run, folder.queue, NINE + timedelta(minutes=minutes))
    heard = (tmp_path / "heard").read_text()
    assert heard.count("could not be brought back") >= 1
    assert "QOS policy" in heard
    assert "RESOLVED" not in heard
    folder.queue.refuses = ""
    look_after_for(run, folder.queue, NINE + timedelta(minutes=26))
    assert "RESOLVED" in (tmp_path / "heard").read_text()


def test_a_run_without_a_cron_is_left_in_peace(run: Run, folder: Folder, tmp_path: Path) -> None:
    alone = run.model_copy(update={"cron": run.cron.model_copy(update={"directory": tmp_path / "nowhere"})})
    assert look_after_for(alone, folder.queue, NINE) is None
