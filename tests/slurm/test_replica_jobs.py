"""Replica groups that have jobs of their own, on the sandbox with torchft: one waits in the queue, one is cancelled, one loses
its node, and the others train on with the same weights.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from ftsupervise.checkpoints.find import checkpoints_in
from ftsupervise.model import CauseKind
from ftsupervise.replicas.table import GroupState
from ftsupervise.rundir.ledger import ledger
from tests.slurm.ring_scene import Scene
from tests.slurm.test_replica_examples import EXAMPLES, NAMES, told_in
from tests.slurm.test_replica_groups_on_slurm import Four

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed: make test-torch"),
]
Until = Callable[..., Any]
MEMBERS = 3


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Apart(Four):
    """Four groups with jobs of their own, on a node each; the lighthouse's job has another node."""

    def begin(self, script: str = "ddp.py", **launch: Any) -> None:
        for path in EXAMPLES.glob("*.py"):
            shutil.copy(path, self.scene.folder)
        words = "--steps 100000 --step-time 0.1 --log-every 1 --save-every 50"
        groups = {"count": 4, "in": "jobs", "slowest_step": "5s"}
        given = {"nodes": 1, "jobs": MEMBERS, "exclusive": True, "replica_groups": groups, **launch}
        self.scene.launch(f"{sys.executable} {script} {words}", **given)

    def node_is(self, node: str, state: str) -> None:
        self.scene.sandbox.run(["scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test"])

    def told(self) -> dict[int, dict[str, str]]:
        """By step, the weights of each group after it. Such a group prints into the file of its job."""
        return told_in(self.scene.rundir.logs)

    def reached(self, *names: str) -> int:
        """The last step that exactly these groups have told."""
        return max((step for step, of in self.told().items() if set(of) == set(names)), default=0)

    def trained(self) -> set[str]:
        """The groups that have told a step."""
        return {name for of in self.told().values() for name in of}

    def job(self, name: str) -> str:
        """The job of its newest attempt, as ``squeue`` shows it."""
        return ledger(self.scene.rundir.group(name))[-1].job_id


@pytest.mark.fault(
    "The job of one replica group waits in the queue, is cancelled, or loses its node (`in: jobs`)",
    "the others train on, it comes back by the next job of its chain, all weights are the same bits",
)
def test_groups_with_jobs_of_their_own_wait_fall_out_and_come_back_while_the_others_train(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = Apart(scene(nodes=6))
    run = here.scene.rundir
    for node in ("node-4", "node-5"):
        here.node_is(node, "DRAIN")
    here.begin()
    until(lambda: len(here.trained()) == 3, "three groups that train", 240)
    (late,) = set(NAMES) - here.trained()
    three = sorted(here.trained())
    until(lambda: here.row(late).state is GroupState.WAITING and "in the queue" in here.row(late).why, "the fourth")
    step = here.reached(*three)
    until(lambda: here.reached(*three) > step + 100, "a hundred steps without the one that is PENDING", 120)
    assert here.row(late).attempt == 0 and not ledger(run.group(late))

    here.node_is("node-4", "RESUME")
    until(lambda: here.reached(*NAMES) > step, "the late group with the others", 180)

    step, cancelled = here.reached(*NAMES), three[0]
    others = [name for name in NAMES if name != cancelled]
    before = here.job(cancelled)
    at = time.monotonic()
    here.scene.sandbox.run(["scancel", before])
    until(lambda: here.reached(*others) > step, "the others without it", 60)
    until(lambda: here.job(cancelled) != before, "its next member", 120)
    step = here.reached(*others)
    until(lambda: here.reached(*NAMES) > step, "it is back with the others", 180)
    back = [time.monotonic() - at]

    here.node_is("node-5", "RESUME")
    step, lost = here.reached(*NAMES), three[1]
    others = [name for name in NAMES if name != lost]
    before, (node,) = here.job(lost), here.row(lost).nodes
    at = time.monotonic()
    here.scene.lose(node)
    until(lambda: here.reached(*others) > step, "the others without the lost node", 90)
    until(lambda: here.job(lost) != before, "its next member", 180)
    step = here.reached(*others)
    until(lambda: here.reached(*NAMES) > step, "it is back on another node", 180)
    back.append(time.monotonic() - at)
    print(f"a group is back {back[0]:.0f} s after its job was cancelled, {back[1]:.0f} s after its node was lost")
    assert here.row(lost).nodes != (node,)

    here.scene.type("kill", "--yes")
    until(lambda: not here.scene.queue(), "the end of all jobs", 180)
    starts = {name: len(ledger(run.group(name))) for name in NAMES}
    assert starts == {late: 1, three[2]: 1, cancelled: 2, lost: 2}, "each loss was of one group"
    assert ledger(run.group(cancelled))[0].cause.kind is CauseKind.CANCELLED  # type: ignore[union-attr]
    said = "".join(path.read_text() for path in run.attempts.glob("*/run.log"))
    assert f"{cancelled}: attempt 1 ended" in said and f"{lost}: attempt 1 ended" in said
    assert {step: of for step, of in here.told().items() if len(set(of.values())) > 1} == {}
    last = {max(step for step, of in here.told().items() if name in of) for name in NAMES}
    assert last == {checkpoints_in(run.checkpoints)[0].step}, "all have stopped at one step"
    assert not here.scene.processes()
