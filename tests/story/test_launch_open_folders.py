"""A launch says when others could put another run in the place of this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftsupervise.config.schema import Run
from ftsupervise.launch.folders import handed_over
from ftsupervise.rundir.paths import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "project" / "runs" / "first")
    found.switches.mkdir(parents=True)
    return found


def told(run_dir: RunDir, **more: object) -> tuple[str, ...]:
    made = {"name": "first", "run_dir": run_dir.root, "launch": {"command": "python train.py"}, **more}
    return handed_over(run_dir, Run.model_validate(made), run_dir.root.parents[1] / "code")


@pytest.mark.threat(
    "A group or everybody may write a folder above the run directory, and so can put another run in its place.",
    "`launch` names the folder and says what that means.",
)
def test_a_folder_above_the_run_that_others_may_write_is_told_at_launch(run_dir: RunDir) -> None:
    assert told(run_dir) == ()
    project = run_dir.root.parents[1]
    project.chmod(0o777)
    (said,) = told(run_dir)
    assert said.startswith(
        f"everybody may write {project} (mode 0777), and so put another run in the place of this one"
    )


def test_a_sticky_folder_above_the_run_is_none_of_these(run_dir: RunDir) -> None:
    run_dir.root.parents[1].chmod(0o1777)
    assert told(run_dir) == ()


@pytest.mark.threat(
    "A group or everybody may write a folder above the checkpoints or the training code, or the script that the command runs.",
    "`launch` names the folder, or the script and its owner, and says what that means.",
)
def test_what_else_others_may_exchange_is_told_too(run_dir: RunDir, tmp_path: Path) -> None:
    shared, script = tmp_path / "shared", tmp_path / "job.sbatch"
    shared.mkdir()
    script.write_text("#!/bin/bash\n")
    more = {"checkpoints": {"path": shared / "saves"}, "launch": {"command": f"bash -e {script} --epochs 3"}}
    assert told(run_dir, **more) == ()
    shared.chmod(0o777)
    script.chmod(0o666)
    assert told(run_dir, **more) == (
        f"everybody may write {shared} (mode 0777), and so put other checkpoints in the place of yours",
        f"everybody may write {script} (mode 0666), and the command runs {script} as you",
    )
    (said,) = told(run_dir, nodes={"directory": shared / "nodes"})
    assert said.endswith("and so put another list of nodes in the place of yours")
    code = run_dir.root.parents[1] / "code"
    code.mkdir(mode=0o755)
    code.chmod(0o777)
    (said,) = told(run_dir)
    assert said == f"everybody may write {code} (mode 0777), and so put other code in the place of yours"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another account")
def test_a_script_of_another_account_is_told(run_dir: RunDir, tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n")
    os.chown(script, 5, 60)
    (said,) = told(run_dir, launch={"command": f"bash {script}"})
    assert str(script) in said and "games" in said, said
