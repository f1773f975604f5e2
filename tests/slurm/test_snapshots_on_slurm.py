"""Snapshots in memory on real Slurm: a rank is killed, a node is lost and the spare takes its place."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.snapshots import room
from tests.neighbours.patience import waited_for_a_processor
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]

# Two ranks that add up random numbers: the sum at the end says whether any step was left out, or made of another state.
TRAIN = """
import os, random, sys, time
from pathlib import Path
import numpy as np
sys.path.insert(0, os.getcwd())
from group import Group
from ftsupervise import Guard

steps, every = map(int, sys.argv[1:])
folder = Path(os.environ["FTSUPERVISE_CHECKPOINT_DIR"])
group = Group(Path(os.environ["FTSUPERVISE_ATTEMPT_DIR"]))
guard = Guard(rank=group.rank, world=group.world)
random.seed(group.rank)
state = {"sum": 0.0, "done": 0, "weights": np.zeros(50_000)}
begun = guard.restore(state=state)
if begun is None:
    found = sorted(int(path.name) for path in folder.glob("[0-9]*"))
    if found:
        old = np.load(folder / str(found[-1]) / f"{group.rank}.npy")
        state["sum"], state["done"] = float(old[0]), found[-1]
        state["weights"][:] = old[1:]
print("snapshots in", os.environ["FTSUPERVISE_SNAPSHOTS"], flush=True)
where = "memory" if begun is not None else "disk"
print(f"rank {group.rank} on {os.environ['SLURMD_NODENAME']} goes on after step {state['done']} from {where}", flush=True)
for step in range(state["done"] + 1, steps + 1):
    time.sleep(0.05)
    total, _ = group.all_reduce(np.full(4, float(step * (group.rank + 1))), 0)
    state["sum"] += float(total[0])
    state["weights"] += total[0]
    state["done"] = step
    guard.snapshot(step)
    if guard.step(step).stop:  # unsaved
        sys.exit(0)
    if step % every == 0:
        (folder / str(step)).mkdir(exist_ok=True)
        np.save(folder / str(step) / f"{group.rank}.npy", np.append(state["sum"], state["weights"]))
        guard.saved(step)
assert (state["weights"] == state["sum"]).all()
print(f"rank {group.rank} sum {state['sum']:.0f}", flush=True)
guard.finished(steps)
"""


def places(here: Scene) -> set[Path]:
    """What the nodes have in memory for this job."""
    found = re.findall(r"snapshots in (/dev/shm/\S+)", here.log())
    return {place for folder in found for place in Path(folder).glob("*")}


def launch(here: Scene, steps: int, save_every: int, **settings: Any) -> None:
    (here.folder / "train_snapshots.py").write_text(TRAIN)
    here.launch(f"{sys.executable} train_snapshots.py {steps} {save_every}", **settings)


def assert_every_step_counts_once(here: Scene, steps: int) -> None:
    for rank in (0, 1):
        assert f"rank {rank} sum {3 * sum(range(steps + 1))}" in here.log()


@pytest.mark.fault(
    "A rank is killed in a job on several nodes, and the loop makes snapshots",
    "the next attempt goes on from memory: no more steps are made again than lie between two snapshots",
)
@pytest.mark.slow
def test_a_killed_rank_goes_on_from_memory_and_makes_two_steps_again_at_most(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2)
    launch(here, 80, 20)
    until(lambda: here.trains(1) and _step(here) > 30, "step 30")
    os.kill(here.trains(1)[1], signal.SIGKILL)
    until(here.rundir.finished.exists, "the end", 120)  # of the second attempt, whose ranks are gone by then
    until(lambda: here.attempts()[-1].ended, "the last page")
    assert_every_step_counts_once(here, 80)
    _, second = here.attempts()
    assert second.begins is not None
    assert (second.begins.source, second.begins.copies) == ("memory", 0), here.log()
    assert second.begins.again is not None and second.begins.again <= 2
    assert "in memory" in here.type("status", here.name)
    until(lambda: not places(here), "the memory to be free again")


@pytest.mark.fault(
    "A node is lost, and the loop makes snapshots",
    "the spare fetches its ranks' snapshots from the buddy; all begin from the step that every buddy held",
)
@pytest.mark.chain(
    "A node is lost, and the job holds a spare",
    "the run goes on in the same job on the spare, a second later; what belongs to the lost node (its agent, its "
    "`srun`, its step in Slurm) is not waited for",
    "none",
    "`attempt 1 ended: node failure (node-1 is silent)`, `starting again in place`",
)
def test_after_the_loss_of_a_node_the_spare_begins_from_what_the_buddy_held(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=3)
    launch(here, 150, 1000, spare_nodes=1, jobs=1)
    until(lambda: here.trains(1) and (here.attempts()[0].held or 0) > 20, "what every buddy holds")
    held = here.attempts()[0].held or 0
    assert "every buddy holds step" in here.type("status", here.name)
    busy = waited_for_a_processor()
    here.sandbox.node("node-1", "crash")
    until(lambda: here.trains(2), "the second attempt", 150)
    busy = min(60.0, waited_for_a_processor() - busy)
    until(here.rundir.finished.exists, "the end", 150)
    until(lambda: here.attempts()[-1].ended, "the last page")
    assert_every_step_counts_once(here, 150)
    first, second = here.attempts()[0], here.attempts()[-1]
    assert second.nodes == ("node-0", "node-2")
    assert second.begins is not None
    assert second.begins.source == "memory", here.log()
    assert second.begins.copies == 1
    assert second.begins.step is not None and second.begins.step >= held
    assert first.last_step is not None
    assert second.begins.again is not None
    assert second.begins.again >= first.last_step - second.begins.step
    assert f"rank 1 on node-2 goes on after step {second.begins.step} from memory" in here.log()
    killed, again = _at(here, 1, "SIGKILL"), _at(here, 2, "attempt 2 of")
    assert (again - killed).total_seconds() < 1.2 + busy, (
        "the agent, the srun and the step of a lost node are not waited for"
    )
    print(f"steps made again: {second.begins.again}")
    until(lambda: not here.queue(), "the end of the job")
    # the crashed node's memory is this host's, and nobody was left to free it: the next job on the node does
    until(lambda: {place.name for place in places(here)} <= {"node-1"}, "the other nodes' memory to be free")
    room.remove_leftovers()
    until(lambda: not places(here), "the lost node's memory to be free")


def _at(here: Scene, attempt: int, words: str) -> datetime:
    """When an attempt's log first said this."""
    log = (here.rundir.attempt(attempt) / "run.log").read_text()
    return next(datetime.fromisoformat(line.split()[0]) for line in log.splitlines() if words in line)


def _step(here: Scene) -> int:
    from ftsupervise.rundir.heartbeat_page import read_beats

    return min((beat.step or 0 for beat in read_beats(here.rundir)), default=0)


@pytest.mark.fault(
    "Slurm ends a job on several nodes, and its loop does not save",
    "the nodes keep the memory on the disk before they are killed",
)
@pytest.mark.slow
def test_a_job_that_is_told_to_end_keeps_its_memory_for_the_next_one(scene: Callable[..., Scene], until: Until) -> None:
    """As at the time limit: Slurm tells the job's processes on all nodes to end, and kills them half a minute later."""
    here = scene(nodes=2)
    launch(here, 150, 1000, jobs=2)
    until(lambda: here.trains(1) and (here.attempts()[0].held or 0) > 20, "snapshots on both nodes")
    first = here.attempts()[0]
    here.sandbox.run(["scancel", "--full", "--signal=TERM", first.job_id])
    until(lambda: len(here.attempts()) > 1, "the second job", 90)
    assert here.attempts()[0].kept, here.log()
    until(here.rundir.finished.exists, "the end", 150)
    assert_every_step_counts_once(here, 150)
    second = here.attempts()[1]
    assert second.begins is not None
    assert (second.begins.source, second.begins.step) == ("kept", here.attempts()[0].kept), here.log()
    assert f"step {second.begins.step} kept on the disk" in here.type("status", here.name)


@pytest.mark.slow
def test_after_the_loss_of_a_node_no_step_is_made_again_that_waited_for_its_copy(
    scene: Callable[..., Scene], until: Until
) -> None:
    """``guard.step`` comes after the snapshot: what it has told the supervisor is on a second node."""
    here = scene(nodes=3)
    launch(
        here,
        200,
        1000,
        spare_nodes=1,
        jobs=1,
        more="checkpoints: {snapshot_every: 1, snapshot_wait: 5s}\n",
    )
    until(lambda: here.trains(1) and (here.attempts()[0].held or 0) > 20, "what every buddy holds")
    here.sandbox.node("node-1", "crash")
    until(here.rundir.finished.exists, "the end", 150)
    until(lambda: here.attempts()[-1].ended, "the last page")
    assert_every_step_counts_once(here, 200)
    first, second = here.attempts()[0], here.attempts()[-1]
    assert second.begins is not None and first.last_step is not None
    assert (second.begins.source, second.begins.copies) == ("memory", 1), here.log()
    assert second.begins.step is not None and second.begins.step >= first.last_step, here.log()
