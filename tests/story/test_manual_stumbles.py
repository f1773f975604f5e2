"""What a newcomer who followed the manual word for word stumbled over."""

from __future__ import annotations

import os
from pathlib import Path

from ftsupervise.config.load import load
from tests.manual.stories import Story
from tests.neighbours.typed import typed

NO_CLUSTER = "#!/bin/sh\necho 'squeue: fatal: Could not establish a configuration source' >&2\nexit 1\n"


def test_slurm_s_commands_without_a_cluster_lead_to_the_local_scheduler(tmp_path: Path) -> None:
    for name in ("sbatch", "squeue", "scontrol", "sinfo"):
        (tmp_path / name).write_text(NO_CLUSTER)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ftsupervise.yaml").write_text("name: first\nlaunch: {command: 'true', jobs: 1}\n")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    done = typed("launch", folder=tmp_path, env=env, code=0)
    assert "on this machine" in done.stdout
    done = typed("launch", "--scheduler", "slurm", folder=tmp_path, env=env, code=69)
    assert "Could not establish a configuration source" in done.stderr


def test_the_scheduler_that_was_named_at_the_launch_is_the_one_to_ask_later(tmp_path: Path) -> None:
    story = Story("named", tmp_path / "first", dict(os.environ))
    (story.place / "ftsupervise.yaml").write_text("name: first\nlaunch: {command: 'true', jobs: 1}\n")
    try:
        story.type(["ftsupervise launch --scheduler local"], strict=True)
        assert load(story.run / "run.yaml").scheduler == "local"
    finally:
        story.close()
