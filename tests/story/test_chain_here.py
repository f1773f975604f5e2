"""A chain on this machine whose members end without a new step: it is held after three, and goes on when it is released."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import Brake, read_brake
from ftsupervise.scheduler.local import Local
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed
from tests.slurm.test_chain_on_slurm import KILLS

Until = Callable[..., Any]
Launch = Callable[..., RunDir]

# It comes to its first step as the warning comes, and leaves without anything saved.
SLOW = """
import os, time
from pathlib import Path
from ftsupervise import Guard
with Guard() as guard:
    while not (Path(os.environ["FTSUPERVISE_ATTEMPT_DIR"]) / "warning").exists():
        time.sleep(0.05)
    step = 1
    while not guard.step(step).stop:
        step += 1
        time.sleep(0.05)
"""


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))

    def one(program: str, **more: object) -> RunDir:
        (tmp_path / "program.py").write_text(program)
        lines = "".join(f"  {key}: {value}\n" for key, value in more.items())
        (tmp_path / "ftsupervise.yaml").write_text(
            f"name: here\nscheduler: local\nlaunch:\n  command: {sys.executable} program.py\n{lines}"
            "  restart: {back_off: 0s}\n"
        )
        typed("launch", folder=tmp_path, env=outside_a_job(FTSUPERVISE_STATE_DIR=str(tmp_path / "state")), code=0)
        return RunDir(tmp_path / "runs" / "here")

    yield one
    local = Local()
    for job in local.queue():
        local.cancel(job.base_id)


def braked(rundir: RunDir) -> Brake | None:
    """The brake, once all that is left of the chain is on hold."""
    queue = Local().queue()
    return read_brake(rundir) if queue and all(job.reason == "JobHeldUser" for job in queue) else None


@pytest.mark.chain(
    "The time limit is too short for the start: each member is warned before there is anything to save",
    "After the third the brake comes on and the rest is held",
    "3",
    "The brake alert with both numbers: how long the start takes, and the time limit less the warning",
)
def test_a_time_limit_too_short_for_the_start_costs_three_members_and_both_numbers_are_said(
    launch: Launch, until: Until
) -> None:
    rundir = launch(SLOW, jobs=8, time="1m", warn="55s")
    brake = until(lambda: braked(rundir), "the chain on hold", 120)
    assert brake.failure == "the time limit is too short for the start"
    assert "3 members in a row left nothing to resume from: the start takes " in brake.why
    assert "and the time limit less the warning is " in brake.why
    assert len(ledger(rundir)) == 3


@pytest.mark.chain(
    "The same on a machine without a scheduler: supervisors are killed",
    "The next member starts nothing, the local chain is held, and that member runs again once it is released",
    "3",
    "The brake alert",
)
def test_a_local_chain_whose_supervisors_are_killed_is_held_after_three_members_and_loses_none_of_the_others(
    launch: Launch, until: Until, tmp_path: Path
) -> None:
    rundir = launch(KILLS, jobs=8)
    brake = until(lambda: braked(rundir), "the chain on hold", 120)
    assert brake.failure == "ended without a record" and len(ledger(rundir)) == 3
    (tmp_path / "mended").touch()
    env = outside_a_job(FTSUPERVISE_STATE_DIR=str(tmp_path / "state"))
    typed("clear", "--brake", folder=tmp_path, env=env, code=0)
    until(rundir.finished.exists, "the end of the run", 60)
    assert ledger(rundir)[-1].job_id.endswith("_4"), "the one that had only looked"
