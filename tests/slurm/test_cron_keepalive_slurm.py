"""A running job brings back the cron that watches it, when somebody or something has ended that for good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.sandbox import Sandbox
from tests.neighbours.typed import typed

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


@pytest.mark.fault("A cron chain is cancelled whole", "the running training brings it back")
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

    def chain() -> list[str]:
        return sandbox.run(["squeue", "-h", "-n", "ftsupervise-cron", "-o", "%i"]).split()

    typed("cron", "install", "--backend", "slurm", folder=folder, env=env, code=0)
    until(chain, "the chain")
    typed("launch", folder=folder, env=env, code=0)
    until(lambda: "RUNNING" in sandbox.run(["squeue", "-h", "-n", "kept", "-o", "%T"]), "the run")
    while chain():  # a tick that runs may just have submitted another
        sandbox.run(["scancel", "-n", "ftsupervise-cron"])
    until(lambda: len(chain()) >= 2, "the chain to be brought back by the running job", 120)
    typed("cron", "remove", folder=folder, env=env, code=0)
    typed("kill", "--yes", folder=folder, env=env, code=0)
