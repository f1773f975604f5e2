"""A running job brings back the cron that watches it, when somebody or something has ended that for good."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.sandbox import Sandbox

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


def test_a_chain_that_was_cancelled_whole_is_brought_back_by_the_run(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path, until: Until
) -> None:
    sandbox = make_sandbox(nodes=2)
    folder = sandbox.directory.parent / "keeper"
    folder.mkdir()
    (folder / "ftsupervise.yaml").write_text(
        f"name: kept\nlaunch: {{command: sleep 300, jobs: 1}}\ncron: {{directory: {folder}/cron, period: 3s}}\n"
    )
    env = {**sandbox.env(), "FTSUPERVISE_STATE_DIR": str(folder / "state"), "FTSUPERVISE_KEEPER_SECONDS": "2"}

    def typed(*words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "ftsupervise", *words],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def chain() -> list[str]:
        return sandbox.run(["squeue", "-h", "-n", "ftsupervise-cron", "-o", "%i"]).split()

    typed("cron", "install", "--backend", "slurm")
    until(chain, "the chain")
    typed("launch")
    until(lambda: "RUNNING" in sandbox.run(["squeue", "-h", "-n", "kept", "-o", "%T"]), "the run")
    while chain():  # a tick that runs may just have submitted another
        sandbox.run(["scancel", "-n", "ftsupervise-cron"])
    until(lambda: len(chain()) >= 2, "the chain to be brought back by the running job", 120)
    typed("cron", "remove")
    typed("kill", "--yes")
