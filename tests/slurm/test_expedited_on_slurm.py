"""A member that loses a node begins again at once on the others and a free one, where the cluster offers expedited requeue: on
the newest Slurm, because none before 25.11 has it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.slurm.ring_scene import Scene

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
Until = Callable[..., Any]
LONG = "--steps 100000 --step-time 0.02 --save-every 20"


@pytest.fixture
def offering(scene: Callable[..., Scene], newest_slurm: str) -> Callable[[int], Scene]:
    """Makes a scene of so many nodes, in a cluster that offers it."""
    return lambda nodes: scene(
        nodes=nodes, prefix=newest_slurm, overrides=("SlurmctldParameters=enable_expedited_requeue",)
    )


def rivals(here: Scene, until: Until) -> None:
    """Queue jobs that take two nodes each as soon as they are free."""
    for _ in range(2):
        words = ["sbatch", "-Q", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"]
        subprocess.run(words, env=here.sandbox.env(), cwd=here.folder, check=True, timeout=60)
    waiting = ["squeue", "-h", "-t", "PENDING", "-n", "wrap", "-o", "%r"]
    until(lambda: "Resources" in here.sandbox.run(waiting), "rivals that wait for nodes")


def end(here: Scene, until: Until) -> None:
    here.sandbox.run(["scancel", "-n", "wrap"])
    here.type("kill", "--yes")
    until(lambda: not here.queue(), "the end of the queue", 90)


@pytest.mark.chain(
    "A job without spare nodes loses one, others wait in the queue, and the cluster offers expedited requeue",
    "its nodes are kept until Slurm gives the lost one up; then the same member begins again at once on them and a "
    "free one",
    "none",
    "`other jobs wait for the nodes that are left: they are kept until Slurm begins this member again`",
)
@pytest.mark.parametrize("chain", ["array", "daisy"])
def test_a_member_that_loses_a_node_goes_on_with_its_others_and_a_free_one_in_front_of_its_rivals(
    offering: Callable[[int], Scene], until: Until, chain: str
) -> None:
    """Its supervisor sees the loss sooner than Slurm does. If it left then, its nodes would go to the next in line."""
    here = offering(4)
    here.train(LONG, nodes=3, jobs=3, chain=chain, exclusive=True)
    assert "--requeue=expedite: a member that loses a node begins again" in here.type("config", "check")
    until(lambda: here.trains(1, ranks=3), "the first attempt")
    rivals(here, until)
    here.sandbox.node("node-1", "crash")
    until(lambda: here.trains(2, ranks=3), "the second attempt", 120)
    first, second = here.attempts()
    assert second.job_id == first.job_id, "it is the same member"
    assert second.nodes == ("node-0", "node-2", "node-3")
    assert first.failure is not None and first.failure.kind == "node", "Slurm's SIGTERM is not why it ended"
    assert "they are kept until Slurm begins this member again" in here.log()
    until(lambda: here.type("status", here.name).count("RUNNING"), "status to say that it runs")
    end(here, until)
    assert len(here.attempts()) == 2


@pytest.mark.chain(
    "The batch host of a job is lost, and the cluster offers expedited requeue",
    "the same member begins again on its other nodes and a free one",
    "none",
    "`ended without a record: its batch host node-0 was lost (down*), and Slurm began the job again`",
)
def test_a_member_whose_batch_host_is_lost_begins_again_and_the_ledger_says_why_its_attempt_has_no_end(
    offering: Callable[[int], Scene], until: Until
) -> None:
    here = offering(3)
    here.train(LONG, nodes=2, jobs=2, exclusive=True)
    until(lambda: here.trains(1), "the first attempt")
    rivals(here, until)
    here.sandbox.node("node-0", "crash")
    until(lambda: here.trains(2), "the second attempt", 120)
    first, second = here.attempts()
    assert (first.job_id, first.nodes) == (second.job_id, ("node-0", "node-1"))
    assert second.nodes == ("node-1", "node-2")
    said = "ended without a record: its batch host node-0 was lost (down), and Slurm began the job again"
    until(lambda: here.attempts()[0].words == said, "why there is no end")
    end(here, until)


@pytest.mark.chain(
    "A member is to begin again after the loss of a node, and no node is free",
    "it stands in front of the queue as `EXPEDITING`, and begins when a node is free",
    "none",
    "`WAITING (EXPEDITING)`; `is-running`: `waits to begin again after the loss of a node (EXPEDITING), for 3m so far`",
)
def test_a_member_that_waits_for_a_free_node_to_begin_again_is_seen_as_waiting(
    offering: Callable[[int], Scene], until: Until
) -> None:
    here = offering(2)
    here.train(LONG, nodes=2, jobs=2, chain="daisy", exclusive=True)  # (squeue calls that of an array PENDING)
    until(lambda: here.trains(1), "the first attempt")
    rivals(here, until)
    here.sandbox.node("node-1", "crash")
    until(lambda: "EXPEDITING" in here.queue(), "Slurm to give the node up", 120)
    assert "WAITING (EXPEDITING)" in here.type("status", here.name)
    checked = here.type("check", "is-running")
    assert "waits to begin again after the loss of a node (EXPEDITING), for" in checked, checked
    here.sandbox.run(["scancel", "-n", "wrap"])
    here.sandbox.node("node-1", "start")
    until(lambda: here.trains(2), "the second attempt", 120)
    first, second = here.attempts()
    assert second.job_id == first.job_id
    end(here, until)
