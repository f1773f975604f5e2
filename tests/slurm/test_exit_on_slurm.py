"""The run directory stops answering while a job trains, and does not come back: the job ends, and its node stays in use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.sandbox import Sandbox
from tests.faults.conftest import HungMount, dead_mount  # noqa: F401 - a fixture
from tests.neighbours.typed import typed

pytestmark = [pytest.mark.slurm, pytest.mark.root]
Until = Callable[..., Any]
RANK = """import sys, time
from pathlib import Path
here = Path(sys.argv[1])
(here / "up").touch()
while not (here / "leave").exists():
    time.sleep(0.01)
sys.exit(int((here / "leave").read_text()))
"""


@pytest.mark.parametrize("how", ["its command fails", "somebody cancels it"])
def test_a_job_whose_run_directory_does_not_come_back_ends_and_its_node_is_not_drained(
    make_sandbox: Callable[..., Sandbox],
    dead_mount: HungMount,  # noqa: F811
    tmp_path: Path,
    until: Until,
    how: str,
) -> None:
    cluster = make_sandbox(nodes=1, kill_wait=5)
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "ftsupervise.yaml").write_text(
        f"name: dead\nrun_dir: {dead_mount.point}/run\nlaunch:\n"
        f"  command: srun {sys.executable} {tmp_path}/rank.py {tmp_path}\n"
        f"  nodes: 1\n  jobs: 1\n  output: {tmp_path}/job.out\n  restart: {{space_wait: 3s}}\n"
    )
    typed("launch", folder=tmp_path, env=cluster.env())
    until((tmp_path / "up").exists, "the rank")
    job = cluster.run(["squeue", "-h", "-n", "dead", "-t", "R", "-o", "%A"]).strip()
    dead_mount.hang("all")
    if how == "its command fails":
        (tmp_path / "leave").write_text("3")
    else:
        cluster.run(["scancel", job])

    def ended() -> str:
        found = cluster.run(["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"]).split()
        return found[0] if found and found[0] in ("FAILED", "CANCELLED") else ""

    state = until(ended, "the end of the job", 60)
    assert state == ("FAILED" if how == "its command fails" else "CANCELLED")
    if state == "FAILED":
        assert "ExitCode=3:0" in cluster.run(["scontrol", "show", "job", job])
        assert "left with exit code 3: the file system does not answer" in (tmp_path / "job.out").read_text()
    free = ["sinfo", "-h", "-N", "-o", "%t"]
    until(lambda: cluster.run(free).strip() == "idle", "a node for the next job: Slurm drains it after 30 s", 45)
    assert "Kill task failed" not in cluster.run(["sinfo", "-R"])
