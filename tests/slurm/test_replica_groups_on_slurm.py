"""Four replica groups in one job on real Slurm, each on a node of its own: a fault of one is no affair of the others."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.model import CauseKind, FailureKind
from ftsupervise.replicas.table import GroupState, ReplicaGroup, read_table
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]
NAMES = ("g000", "g001", "g002", "g003")
LOOP = """\
import os, time
from ftsupervise import Guard

guard, step = Guard(), 0
while True:
    time.sleep(0.05)
    step += 1
    if guard.step(step).stop:
        break
guard.close()
"""


class Four:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        (scene.folder / "loop.py").write_text(LOOP)

    def launch(self, **launch: Any) -> None:
        groups = {"count": 4, "lighthouse": "none", **launch.pop("replica_groups", {})}
        restart = {"warm": "off", "hang": {"at_least": "4s", "start": "60s"}}
        given = {"nodes": 1, "jobs": 1, "restart": restart, "replica_groups": groups, **launch}
        self.scene.launch(f"{sys.executable} loop.py", **given)

    def pid(self, name: str, attempt: int = 1) -> int:
        """Of the rank of a group that makes steps in this attempt; 0 before."""
        beats = read_beats(self.scene.rundir.group(name))
        found = [one.pid for one in beats if one.facts.get("attempt") == str(attempt) and one.step]
        return found[0] if found else 0

    def row(self, name: str) -> ReplicaGroup:
        table = read_table(self.scene.rundir)
        return next((one for one in table.groups if one.name == name), ReplicaGroup()) if table else ReplicaGroup()

    def causes(self, name: str) -> list[CauseKind | None]:
        return [one.cause and one.cause.kind for one in ledger(self.scene.rundir.group(name))]


@pytest.mark.slow
def test_each_fault_is_of_one_group_and_a_lost_node_is_replaced_by_the_spare_one(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = Four(scene(nodes=5, slurmd_timeout=6))
    here.launch(spare_nodes=1)
    pids = {name: until(lambda name=name: here.pid(name), f"{name} trains") for name in NAMES}
    nodes = {name: until(lambda name=name: here.row(name).nodes, f"the nodes of {name}") for name in NAMES}
    assert nodes == {name: (f"node-{number}",) for number, name in enumerate(NAMES)}
    os.kill(pids["g001"], signal.SIGKILL)
    until(lambda: here.pid("g001", 2), "g001 to be back")
    os.kill(pids["g002"], signal.SIGSTOP)
    until(lambda: here.pid("g002", 2), "g002 to be back")
    here.scene.sandbox.node("node-3", "crash")
    until(lambda: here.pid("g003", 2) or here.pid("g003", 3), "g003 to be back on another node", 120)
    until(lambda: here.row("g003").nodes == ("node-4",), "the table to say so")
    assert here.pid("g000") == pids["g000"], "g000 has not noticed"
    assert here.causes("g001")[0] is CauseKind.SIGNAL and here.causes("g002")[0] is CauseKind.HANG
    first = ledger(here.scene.rundir.group("g003"))[0]
    assert first.failure is not None and first.failure.kind is FailureKind.NODE, first
    until(lambda: here.row("g001").back is not None, "how long it was away")
    here.scene.type("kill", "--yes")
    until(lambda: not here.scene.queue(), "the end of the job", 60)
    assert {here.causes(name)[-1] for name in NAMES} == {CauseKind.KILL_SWITCH}
    assert here.row("g000").state is GroupState.OVER
    assert not here.scene.processes()


@pytest.mark.slow
def test_a_group_with_a_job_of_its_own_may_wait_in_the_queue_while_the_others_train(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = Four(scene(nodes=4))
    here.launch(replica_groups={"in": "jobs"}, exclusive=True, jobs=2)
    train = until(lambda: [found := [name for name in NAMES if here.pid(name)]][0][2:] and found, "three groups")
    (waits,) = set(NAMES) - set(train)
    until(lambda: here.row(waits).state is GroupState.WAITING and "in the queue" in here.row(waits).why, "the fourth")
    until(lambda: [here.row(name).state for name in train] == [GroupState.RUNNING] * 3, "the three")
    said = here.scene.type("status", str(here.scene.rundir.root))
    assert "3 of 4 run, at least 3 have to" in said and f"{waits} waiting" in said
    assert "is in the queue already" in here.scene.type("launch", code=75)
    here.scene.type("kill", "--yes")
    until(lambda: not here.scene.queue(), "the end of all jobs", 90)
    assert {here.causes(name)[-1] for name in train} == {CauseKind.KILL_SWITCH}
    assert here.causes(waits) == []


@pytest.mark.fault(
    "The batch host of all groups of a job is lost, and no other node is free",
    "the next job goes on without a spare node, and the status says why",
)
@pytest.mark.slow
def test_the_next_job_goes_on_without_a_spare_node_when_the_batch_host_of_all_groups_is_lost(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = Four(scene(nodes=5))
    here.launch(spare_nodes=1, jobs=2, time="1h")
    for name in NAMES:
        until(lambda name=name: here.pid(name), f"{name} trains")
    at = time.monotonic()
    here.scene.sandbox.node("node-0", "crash")
    until(lambda: all(here.pid(name, 2) for name in NAMES), "all groups in the next job", 240)
    print(f"all groups train again {time.monotonic() - at:.0f} s after their batch host was lost")
    lost = "ended without a record: its batch host node-0 was lost"
    until(lambda: lost in here.scene.type("status", str(here.scene.rundir.root)), "the status to say why")
    until(lambda: all(here.row(name).nodes not in ((), ("node-0",)) for name in NAMES), "the nodes of all groups")
    here.scene.type("kill", "--yes")
    until(lambda: not here.scene.queue(), "the end of the job", 90)


@pytest.mark.slow
@pytest.mark.torch
def test_groups_on_nodes_of_their_own_train_together_by_torchft(scene: Callable[..., Scene], until: Until) -> None:
    pytest.importorskip("torchft")
    here = scene(nodes=4)
    ddp = Path(__file__).parents[2] / "examples" / "replicas" / "ddp.py"
    words = f"{sys.executable} {ddp} --steps 100000 --step-time 0.1 --log-every 1"
    here.launch(words, nodes=1, jobs=1, replica_groups={"count": 4, "slowest_step": "3s"})
    logs = [here.rundir.group(name).logs for name in NAMES]

    def said(folder: Path) -> str:
        return "".join(path.read_text() for path in folder.glob("*.out"))

    until(lambda: all("4 of 4 groups" in said(folder) for folder in logs), "all four to train together", 150)
    (beat,) = read_beats(here.rundir.group("g001"))
    os.kill(beat.pid, signal.SIGKILL)
    until(lambda: all("3 of 4 groups" in said(folder) for folder in (logs[0], logs[2], logs[3])), "three to go on", 30)
    group = here.rundir.group("g001")
    until(lambda: [one for one in read_beats(group) if one.facts.get("attempt") == "2" and one.step], "g001 back", 120)
    here.type("kill", "--yes")
    until(lambda: not here.queue(), "the end of the job", 60)
    last = {ledger(here.rundir.group(name))[-1].last_step for name in NAMES}
    assert len(last) == 1, f"all stop at the same step: {last}"
