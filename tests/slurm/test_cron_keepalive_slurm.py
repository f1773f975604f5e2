"""A running job brings back the cron that watches it, when somebody or something has ended that for good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shlex import join
from typing import Any

import pytest

from ftsupervise.sandbox import Sandbox
from tests.neighbours.typed import FT, typed

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


@pytest.mark.fault("A cron chain is cancelled as a run ends", "its job asks once more as it ends, and the end is told")
def test_the_end_of_a_run_is_told_although_the_chain_was_cancelled_just_before(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path, until: Until
) -> None:
    sandbox = make_sandbox(nodes=2)
    folder = sandbox.directory.parent / "last"
    folder.mkdir()
    heard = folder / "heard"
    (folder / "ftsupervise.yaml").write_text(
        "name: last\nlaunch: {command: 'while [ ! -e stop ]; do sleep 0.2; done', jobs: 1}\n"
        f"cron: {{directory: {folder}/cron, period: 3s}}\nalerts: {{receivers: [{{file: {{path: {heard}}}}}]}}\n"
    )
    env = {**sandbox.env(), "FTSUPERVISE_STATE_DIR": str(folder / "state")}

    def chain() -> list[str]:
        return sandbox.run(["squeue", "-h", "-n", "ftsupervise-cron", "-o", "%i"]).split()

    typed("cron", "install", "--backend", "slurm", folder=folder, env=env, code=0)
    (folder / "cron" / "crontab").write_text(f"@tick {join(FT)} watch --all\n")
    typed("launch", folder=folder, env=env, code=0)
    until((folder / "runs" / "last" / "watch" / "found.json").exists, "a tick that has looked at the run", 120)
    while chain():  # a tick that runs may just have submitted another
        sandbox.run(["scancel", "-n", "ftsupervise-cron"])
    (folder / "stop").touch()
    until(lambda: "attempt 1 ended: exit 0" in heard.read_text(), "the end to be told", 120)
    typed("cron", "remove", folder=folder, env=env, code=0)
