"""A job's number is no identity: on a cluster that was built anew another run's job has the number of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ftsupervise.run.gate import hold_pending
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.paths import RunDir
from ftsupervise.sandbox import Sandbox
from ftsupervise.scheduler.ownership import identify, jobs_of_run
from ftsupervise.scheduler.slurm import Slurm
from tests.neighbours.typed import typed

pytestmark = pytest.mark.slurm
SETTINGS = "name: {}\nscheduler: slurm\nlaunch: {{command: sleep 600, jobs: 3, sbatch: [--begin=now+1hour]}}\n"


def _launch(top: Path, name: str, sandbox: Sandbox) -> RunDir:
    folder = top / name
    folder.mkdir()
    (folder / "ftsupervise.yaml").write_text(SETTINGS.format(name))
    typed("launch", folder=folder, env=sandbox.env())
    return RunDir(folder / "runs" / name)


def test_a_job_with_an_old_number_of_ours_is_neither_shown_nor_held_nor_cancelled_by_us(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    before = make_sandbox(nodes=1)
    ours = _launch(tmp_path, "ours", before)
    before.down()
    anew = make_sandbox(nodes=1)
    theirs = _launch(tmp_path, "theirs", anew)
    (old,), (new,) = launches(ours), launches(theirs)
    assert old.job_ids == new.job_ids, "the numbers began anew"
    queue = Slurm(anew.env()).queue()
    assert len(queue) == 1
    assert jobs_of_run(identify(ours, "ours", (old,)), queue) == ()
    assert jobs_of_run(identify(theirs, "theirs", (new,)), queue) == queue
    assert hold_pending(ours, anew.env()) == ((), "")
    said = typed("status", str(ours.root), folder=tmp_path, env=anew.env(), code=None)
    assert "GONE" in said.stdout, said.stdout
    typed("kill", "--yes", str(ours.root), folder=tmp_path, env=anew.env(), code=None)
    assert "PENDING" in anew.run(["squeue", "-h", "-o", "%i %T %r"]), "their job waits on"
    assert hold_pending(theirs, anew.env())[0] == new.job_ids
