"""Clean ends on real Slurm: preemption, the death of the batch host. Nothing is left on any node, and the
ledger says which it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from ftsupervise.host.processes import environment
from ftsupervise.model import CauseKind
from ftsupervise.rundir.paths import ENV_ATTEMPT
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


def left_of(here: Scene, attempt: int) -> list[int]:
    return [pid for pid in here.processes() if environment(pid).get(ENV_ATTEMPT) == str(attempt)]


@pytest.mark.fault("A job is preempted", "nothing of it is left, the next member goes on")
def test_a_preempted_job_leaves_nothing_and_the_next_member_goes_on_when_the_other_job_has_gone(
    scene: Callable[..., Scene], until: Until
) -> None:
    tiers = "PartitionName=urgent Nodes=node-[0-1] PriorityTier=10 MaxTime=INFINITE State=UP"
    here = scene(nodes=2, kill_wait=30, overrides=["PreemptType=preempt/partition_prio", "PreemptMode=CANCEL", tiers])
    job = here.train("--steps 100000 --step-time 0.02 --save-every 20", jobs=2)
    until(lambda: here.trains(1), "the first member")
    go = here.folder / "go"
    words = f"while ! [ -e {go} ]; do sleep 0.1; done"
    here.sandbox.run(["sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", os.devnull, f"--wrap={words}"])
    until(lambda: here.attempts()[0].ended and not here.processes(), "its end", 45)
    assert here.attempts()[0].words == "cancelled or preempted (SIGTERM)"
    assert len(here.attempts()) == 1
    go.touch()
    until(lambda: here.trains(2), "the second member", 45)
    here.sandbox.run(["scancel", job])
    until(lambda: not here.queue() and not here.processes(), "nothing left")


@pytest.mark.fault(
    "The batch host dies",
    "the ranks on the other nodes are ended, the next member goes on and writes down what became of the host",
)
def test_when_the_batch_host_dies_the_ranks_on_the_other_node_end_too_and_the_next_member_goes_on(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=3)
    job = here.train("--steps 100000 --step-time 0.02 --save-every 20", jobs=2)
    until(lambda: here.trains(1), "the first member")
    here.lose("node-0")
    until(lambda: here.trains(2), "the second member", 60)
    until(lambda: not left_of(here, 1), "nothing left of the first", 30)
    first, second = here.attempts()
    until(lambda: here.attempts()[0].words != "ended without a record", "what became of its host")
    assert (first.exit_code, first.cause.kind) == (None, CauseKind.LOST)  # type: ignore[union-attr]
    assert here.attempts()[0].words == "ended without a record: its batch host node-0 was lost (down)"
    assert (first.job_id, second.job_id) == (f"{job}_1", f"{job}_2")
    assert (first.nodes, second.nodes) == (("node-0", "node-1"), ("node-1", "node-2"))
    here.sandbox.run(["scancel", job])
    until(lambda: not here.queue() and not here.processes(), "nothing left")


@pytest.mark.fault("The batch host of a job with spare nodes dies", "the job does not stay until its time limit")
def test_a_job_with_spare_nodes_does_not_live_on_without_its_batch_host(
    scene: Callable[..., Scene], until: Until
) -> None:
    """``--no-kill``: Slurm takes the lost node out of the job and leaves it "running", with nobody in it, until its limit."""
    here = scene(nodes=4, slurmd_timeout=10)
    job = here.train("--steps 100000 --step-time 0.02 --save-every 20", jobs=2, spare_nodes=1, time="4h")
    until(lambda: here.trains(1), "the first member")
    here.lose("node-0")
    until(lambda: here.trains(2), "the second member", 120)
    until(lambda: not left_of(here, 1), "nothing left of the first", 30)
    first, second = here.attempts()
    said = "ended without a record: its batch host node-0 was lost (down"
    until(lambda: here.attempts()[0].words.startswith(said), "what became of its host")
    assert first.job_id == job
    assert second.job_id != job
    here.sandbox.run(["scancel", "--name", here.name])
    until(lambda: not here.queue() and not here.processes(), "nothing left")
