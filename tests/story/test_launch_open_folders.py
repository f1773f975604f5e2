"""A launch says when others could put another run in the place of this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftsupervise.config.schema import Sharing
from ftsupervise.launch.folders import handed_over
from ftsupervise.rundir.paths import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "project" / "runs" / "first")
    found.switches.mkdir(parents=True)
    return found


@pytest.mark.threat(
    "A group or everybody may write a folder above the run directory, and so can put another run in its place.",
    "`launch` names the folder and says what that means.",
)
def test_a_folder_above_the_run_that_others_may_write_is_told_at_launch(run_dir: RunDir) -> None:
    assert handed_over(run_dir, Sharing()) == ()
    project = run_dir.root.parents[1]
    project.chmod(0o777)
    (said,) = handed_over(run_dir, Sharing())
    assert said.startswith(
        f"everybody may write {project} (mode 0777), and so put another run in the place of this one"
    )


def test_a_sticky_folder_above_the_run_is_none_of_these(run_dir: RunDir) -> None:
    run_dir.root.parents[1].chmod(0o1777)
    assert handed_over(run_dir, Sharing()) == ()
