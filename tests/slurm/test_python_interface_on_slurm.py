"""``ftsupervise.Run`` on a real Slurm, as a notebook uses it: launch, wait for a step, save, look, kill."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ftsupervise
from ftsupervise.errors import Refused, SchedulerUnavailable, SubmitRejected
from ftsupervise.sandbox import Sandbox

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]
TRAIN = """import time
from ftsupervise import Guard
guard = Guard()
for step in range(1, 100000):
    time.sleep(0.1)
    decision = guard.step(step)
    if decision.save:
        with guard.checkpoint(step) as folder:
            (folder / "state").write_text(str(step))
    if decision.stop:
        break
"""


@pytest.fixture
def project(
    request: pytest.FixtureRequest, own_sandbox: Sandbox, short_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A project on a sandbox, and this process as a notebook in it."""
    for name, value in own_sandbox.env().items():
        monkeypatch.setenv(name, value)
    folder: Path = short_tmp / request.node.name[-20:]
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(folder / "state"))
    monkeypatch.chdir(folder)
    lines = ("name: toy", "launch:", f"  command: {sys.executable} train.py", "  time: '00:30:00'", "  jobs: 3")
    (folder / "ftsupervise.yaml").write_text("\n".join((*lines, "")))
    return folder


def test_a_notebook_launches_a_run_saves_looks_and_kills(project: Path, own_sandbox: Sandbox, until: Until) -> None:
    run = ftsupervise.Run("ftsupervise.yaml")
    launched = run.launch()
    assert launched.job_ids and launched.directory == project / "runs" / "toy" and not launched.found_again
    assert any("alerts.receivers is empty" in note for note in launched.notes)
    with pytest.raises(Refused, match="in the queue already"):
        run.launch()
    until(lambda: (run.status().step or 0) > 3, "some steps", 120)
    seen = run.status()
    assert seen.verdict == "RUNNING" and seen.jobs is not None
    assert {job.base_id for job in seen.jobs} == set(launched.job_ids)
    before = len(run.checkpoints().checkpoints)
    raised = run.save("from a notebook")
    assert raised.guard and raised.attempt == 1
    until(lambda: not run.status().fields.switches[1].up, "the save switch to be answered", 60)
    assert len(run.checkpoints().checkpoints) > before
    (attempt,) = run.attempts()
    assert attempt.job_id.startswith(launched.job_ids[0]) and attempt.ended is None
    assert run.account().seconds["train"] > 0
    own_sandbox.controller("stop")
    try:
        blind = run.status()
        assert blind.jobs is None and blind.fields.blind, "no answer is no empty queue"
        with pytest.raises(SchedulerUnavailable):
            run.launch(again=True)
    finally:
        own_sandbox.controller("start")
    until(lambda: run.status().jobs is not None, "Slurm to answer again", 60)
    run.kill("enough", confirm="toy")
    until(lambda: run.status().jobs == (), "the chain to leave", 120)
    assert run.status().verdict == "STOPPED"
    (ended,) = run.attempts()
    assert ended.ended is not None and ended.saved is not None


def test_what_sbatch_refuses_is_raised_with_its_own_words(project: Path) -> None:
    text = (project / "ftsupervise.yaml").read_text()
    (project / "ftsupervise.yaml").write_text(f"{text}  partition: nowhere\n")
    with pytest.raises(SubmitRejected, match="invalid partition specified: nowhere"):
        ftsupervise.Run().launch()
