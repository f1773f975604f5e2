"""A third scheduler is one file and one line in the table: every command of a run finds it there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ftsupervise import scheduler
from ftsupervise.errors import SchedulerUnavailable

PEN = Path(__file__).parents[1] / "neighbours" / "pen.py"
# A scheduler needs this line besides its file.
LINE = """
from ftsupervise import scheduler
scheduler.SCHEDULERS["pen"] = scheduler.SchedulerKind("pen:Pen", "pen-", lambda env: "PEN" in env)
from ftsupervise.cli import main
main()
"""


def test_a_third_scheduler_is_one_file_and_one_line(tmp_path: Path) -> None:
    shutil.copy(PEN, tmp_path)
    (tmp_path / "pen").mkdir()
    config = tmp_path / "ftsupervise.yaml"
    config.write_text("name: t\nscheduler: pen\nlaunch: {command: touch trained, jobs: 1}\n")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "FTSUPERVISE"))}
    env |= {"PEN": str(tmp_path / "pen"), "FTSUPERVISE_STATE_DIR": str(tmp_path / "state"), "PYTHONPATH": str(tmp_path)}

    def say(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-c", LINE, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert "srun" not in say("launch", "--dry-run"), "that is Slurm's"
    assert "submitted as job pen-1" in say("launch")
    said = say("status", ".")
    assert "1 job left" in said
    assert "squeue" not in said and "scancel" not in said, "these are Slurm's"

    (tmp_path / "pen").rename(tmp_path / "away")
    said = say("status", ".")
    assert "cannot be used: No such file" in said
    assert "scontrol" not in said, "that is Slurm's"
    assert "fired: pen unreachable: the pen" in say("watch", ".", code=1)
    (tmp_path / "away").rename(tmp_path / "pen")
    assert "resolved: pen unreachable" in say("watch", ".")

    assert "t is in the queue already: pen-1" in say("launch", code=75)
    assert "after job pen-1" in say("launch", "--after", "pen-1")
    job = {**env, "FTSUPERVISE_JOB_ID": "pen-1"}
    subprocess.run(
        ["bash", tmp_path / "runs/t/launches/0001/train.sbatch"], cwd=tmp_path, env=job, check=True, timeout=60
    )
    assert (tmp_path / "trained").exists()
    assert "pen-1" in say("status", "."), "the attempt ran in it"

    config.write_text(config.read_text().replace("scheduler: pen", "scheduler: pem"))
    assert "'pen'" in say("config", "show", code=78)


def test_a_scheduler_of_no_name_has_no_answer_and_an_id_names_its_scheduler() -> None:
    with pytest.raises(SchedulerUnavailable, match="no scheduler is called 'pen'"):
        scheduler.open_scheduler("pen")
    assert [scheduler.kind_of_job(one) for one in ("87", "88_3", "local-4", "local-4_2")] == ["slurm"] * 2 + [
        "local"
    ] * 2
    assert scheduler.is_job_id("local-4_2")
    assert not scheduler.is_job_id("pen-1")


def test_one_that_cannot_be_opened_gives_no_answer_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scheduler.SCHEDULERS, "pen", scheduler.SchedulerKind("os:strerror", "pen-", lambda env: True))
    with pytest.raises(SchedulerUnavailable, match=r"^os:strerror cannot be opened: TypeError: "):
        scheduler.open_scheduler("pen", {})
    monkeypatch.setitem(
        scheduler.SCHEDULERS, "pen", scheduler.SchedulerKind("pen_is_gone:Pen", "pen-", lambda env: True)
    )
    with pytest.raises(SchedulerUnavailable, match="ModuleNotFoundError: No module named 'pen_is_gone'"):
        scheduler.open_scheduler("pen", {})
