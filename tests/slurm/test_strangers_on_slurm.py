"""A job, its agents and its keeper stand in a folder into which another account has laid Python modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.sandbox import Sandbox
from tests.faults.test_strangers_code import TYPED, Trap


@pytest.fixture
def trap() -> Iterator[Trap]:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another account")
    top = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    top.chmod(0o755)
    yield Trap(top)
    shutil.rmtree(top)


@pytest.mark.threat(
    "The same files lie there in a job of a real Slurm, with agents and the cron's keeper at work.",
    "None of them is imported, and the job script names its directory by `--chdir`.",
)
@pytest.mark.root
@pytest.mark.slurm
def test_a_job_its_agents_and_its_keeper_run_no_code_of_the_folder_they_stand_in(
    trap: Trap, sandbox: Sandbox, until: Callable[..., Any]
) -> None:
    (trap.folder / "ftsupervise.yaml").write_text(
        "name: mine\nscheduler: slurm\nnodes: {directory: nodes}\n"
        "launch: {command: [sh, -c, 'touch begun; while ! [ -e over ]; do sleep 0.2; done'], nodes: 2, jobs: 1, time: '5:00'}\n"
    )
    (trap.folder / "nodes").mkdir()
    env = {**sandbox.env(), "FTSUPERVISE_KEEPER_SECONDS": "1", "PYTHONPATH": ":/nowhere"}
    argv = [TYPED, "launch", str(trap.folder / "ftsupervise.yaml")]
    subprocess.run(argv, cwd="/", env=env, check=True, capture_output=True, timeout=60)
    until((trap.folder / "begun").exists, "the training", 120)

    def at_work(word: str) -> bool:
        return any(word in line for line in processes(trap.folder))

    until(lambda: at_work("ftsupervise.ranks"), "the agents")
    until(lambda: at_work("cron\0ensure"), "the keeper")
    script = next((trap.folder / "runs/mine/launches").glob("*/*.sbatch")).read_text()
    assert f"#SBATCH --chdir={trap.folder}\n" in script
    (trap.folder / "over").touch()
    until(lambda: not sandbox.run(["squeue", "-h", "-n", "mine"]).strip(), "the end", 120)
    assert trap.sprung() == []


def processes(folder: Path) -> list[str]:
    """The command lines of all processes that stand in ``folder``: other tests on this machine have agents too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink() == folder:
                    found.append((entry / "cmdline").read_bytes().decode("utf-8", "replace"))
            except OSError:
                continue
    return found
