"""Replica groups with jobs of their own lose the small job that runs their lighthouse: its node, its port, its chain.

The groups make no step without it. They wait, go on by themselves when the next job of its chain serves them, and begin again
from the newest checkpoint only where it has another address.
"""

from __future__ import annotations

import importlib.util
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ftsupervise.checkpoints.find import checkpoints_in
from ftsupervise.model import CauseKind
from ftsupervise.replicas.record import LighthouseRecord, read_lighthouse
from ftsupervise.replicas.table import read_table
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from tests.slurm.ring_scene import Scene
from tests.slurm.test_replica_examples import NAMES
from tests.slurm.test_replica_jobs import Apart, on_this_machine  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed: make test-torch"),
]
Until = Callable[..., Any]


class Served(Apart):
    """Four groups on a node each. The lighthouse's job has a fifth one, and more nodes are free."""

    def __init__(self, scene: Scene, until: Until) -> None:
        super().__init__(scene)
        self.until = until

    @property
    def run(self) -> RunDir:
        return self.scene.rundir

    def lighthouse(self) -> LighthouseRecord:
        return read_lighthouse(self.run.replicas) or LighthouseRecord()

    def next_lighthouse(self, after: LighthouseRecord, bound: float = 240) -> LighthouseRecord:
        """Wait for the one that follows ``after``."""

        def found() -> LighthouseRecord | None:
            page = self.lighthouse()
            return page if page.generation > after.generation and page.down_since is None else None

        return self.until(found, f"a lighthouse after that of job {after.job}", bound)  # type: ignore[no-any-return]

    def train_again(self, step: int, what: str) -> float:
        """Wait until all groups have made steps together beyond ``step``; return the seconds."""
        at = time.monotonic()
        self.until(lambda: self.reached(*NAMES) > step + 5, f"all groups train {what}", 240)
        return time.monotonic() - at

    def different_weights(self) -> dict[tuple[int, int], dict[str, str]]:
        """By start of all groups and step, the weights of each group, where they differ: a step that was made again may have
        had other groups in it the first time."""
        found: dict[tuple[int, int], dict[str, str]] = {}
        for log in self.run.logs.glob("*.out"):
            start, last = 1, 0
            for group, step, weights in re.findall(r"^(g\d+): step (\d+),.* weights (\w+)$", log.read_text(), re.M):
                start, last = start + (int(step) <= last), int(step)
                found.setdefault((start, last), {})[group] = weights
        return {place: of for place, of in found.items() if len(set(of.values())) > 1}

    def said_by_groups(self, words: str) -> int:
        """How many groups have said this."""
        text = self.scene.log()
        return sum(1 for name in NAMES if f"group {name} {words}" in text)

    def starts(self) -> list[int]:
        return [len(ledger(self.run.group(name))) for name in NAMES]

    def status(self) -> str:
        return self.scene.type("status", str(self.run.root))

    def free_nodes(self) -> list[str]:
        return self.scene.sandbox.run(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]).split()


@contextmanager
def taken_as_soon_as_it_is_free(page: LighthouseRecord, until: Until) -> Iterator[Callable[[], None]]:
    """A program that has the lighthouse's port from the moment at which that is gone, and answers nothing: what is called there
    hears as little as from a host without power."""
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        def take() -> None:
            def bound() -> bool:
                try:
                    thief.bind((page.host, page.port))
                except OSError:
                    return False
                return True

            until(bound, f"port {page.port} is free", 30)
            thief.listen(128)

        yield take


@pytest.mark.fault(
    "The node of the lighthouse's own job is lost (`in: jobs`)",
    "the next job of its chain serves the groups, which have waited; at another address they begin again from the "
    "newest checkpoint, which is no failure",
)
def test_the_groups_outlive_the_node_of_their_lighthouse_and_follow_it_to_another_address(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = Served(scene(nodes=7), until)
    run = here.run
    here.begin(jobs=6)
    here.train_again(60, "for the first time")
    first = here.lighthouse()
    assert first.node not in {node for name in NAMES for node in here.row(name).nodes}

    step, at = here.reached(*NAMES), time.monotonic()
    here.scene.lose(first.node)
    second = here.next_lighthouse(first)
    listens = time.monotonic() - at
    here.train_again(step, "with the next lighthouse")
    print(f"lost node, same address: it listens after {listens:.0f} s, all train after {time.monotonic() - at:.0f} s")
    assert (second.address, second.moved) == (first.address, None) and second.node != first.node
    assert here.starts() == [1, 1, 1, 1], "the groups have waited"
    lost = f"ended without a record: its (node|batch host) {first.node} was lost"  # as Slurm sees it just then
    until(lambda: re.search(lost, here.status()), "the status to say why the lighthouse was away", 60)

    with taken_as_soon_as_it_is_free(second, until) as take:
        saved, step, at = checkpoints_in(run.checkpoints)[0].step, here.reached(*NAMES), time.monotonic()
        here.scene.lose(second.node)
        take()
        third = here.next_lighthouse(second)
        listens = time.monotonic() - at
        until(lambda: here.starts() == [2, 2, 2, 2], "all groups are started again with the new address", 120)
        here.train_again(step, "with the lighthouse that has moved")
        print(
            f"lost node, another address: it listens after {listens:.0f} s, all train after {time.monotonic() - at:.0f} s"
        )
    assert third.address != second.address and third.moved is not None
    assert saved is not None
    for name in NAMES:
        before, now = ledger(run.group(name))
        assert before.cause is not None and before.cause.kind is CauseKind.MOVED and before.failure is None, before
        why = "the lighthouse is at another address now; restarted in place: with that address"
        assert re.search(rf"fault .* {name} at step \d+: {why}", here.status()), here.status()
        assert now.first_step is not None and saved < now.first_step <= step + 2, (saved, now, step)

    for node in here.free_nodes():
        here.node_is(node, "DRAIN")
    here.node_is(third.node, "DRAIN")
    step = here.reached(*NAMES)
    here.scene.sandbox.run(["scancel", third.job])
    until(lambda: "lighthouse away: its job" in here.status(), "the status to say that it is in the queue", 120)
    said = here.status()
    assert "waits in the queue (" in said and "without it no group makes a step" in said, said
    at = time.monotonic()
    here.node_is(third.node, "RESUME")
    fourth = here.next_lighthouse(third)
    here.train_again(step, "after a wait in the queue")
    print(f"all train {time.monotonic() - at:.0f} s after a node was free for the lighthouse's job")
    assert (fourth.address, fourth.moved) == (third.address, third.moved) and here.starts() == [2, 2, 2, 2]

    step, at = here.reached(*NAMES), time.monotonic()
    here.scene.sandbox.run(["scontrol", "update", f"JobId={fourth.job}", "TimeLimit=2"])
    here.next_lighthouse(fourth, 300)
    here.train_again(step, "after the time limit of the lighthouse's job")
    print(f"all train {time.monotonic() - at:.0f} s after its limit was set")
    assert here.starts() == [2, 2, 2, 2]

    here.scene.type("kill", "--yes")
    until(lambda: not here.scene.queue(), "the end of all jobs", 180)
    assert here.different_weights() == {}
    last = {max(step for step, of in here.told().items() if name in of) for name in NAMES}
    assert last == {checkpoints_in(run.checkpoints)[0].step}, "all have stopped at one step"
    kinds = [one.cause and one.cause.kind for one in here.scene.attempts()]
    assert kinds[2] is CauseKind.CANCELLED and kinds[-1] is CauseKind.KILL_SWITCH, kinds
    table = read_table(run)
    assert table is not None and not here.scene.processes()


SHORT = """\
import os, runpy, sys

os.environ.update(TORCHFT_QUORUM_TIMEOUT_SEC="90", TORCHFT_QUORUM_RETRIES="89")
sys.argv[0] = "ddp.py"
runpy.run_path("ddp.py", run_name="__main__")
"""


@pytest.mark.fault(
    "The lighthouse's chain of jobs is cancelled",
    "the status names the script to submit; groups that gave up begin again with the next lighthouse, and the kill "
    "switch is obeyed without one",
)
def test_groups_that_end_themselves_without_a_lighthouse_begin_again_with_the_next_one_and_hear_the_kill_switch(
    scene: Callable[..., Scene], until: Until
) -> None:
    """torchft gives up after ten minutes without a quorum; here after 90 seconds."""
    here = Served(scene(nodes=5), until)
    run = here.run
    (here.scene.folder / "short.py").write_text(SHORT)
    here.begin("short.py")
    here.train_again(60, "for the first time")
    first, saved, step = here.lighthouse(), checkpoints_in(run.checkpoints)[0].step, here.reached(*NAMES)
    array = first.job.partition("_")[0]
    here.scene.sandbox.run(["scancel", array])
    until(lambda: here.lighthouse().down_since is not None, "its page to say that there is none", 30)

    until(lambda: "no job of it is in the queue: sbatch " in here.status(), "the status to say what to type", 120)
    until(lambda: all(ledger(run.group(name))[0].ended for name in NAMES), "all groups to give up", 300)
    until(lambda: here.said_by_groups("waits: the run has no lighthouse now") == 4, "all of them wait for the next one")
    assert here.starts() == [1, 1, 1, 1], "no attempt begins without a lighthouse"

    (script,) = re.findall(r"sbatch (\S+/train-1\.sbatch)", here.status())
    at = time.monotonic()
    here.scene.sandbox.run(["sbatch", script])
    here.next_lighthouse(first)
    until(lambda: here.starts() == [2, 2, 2, 2], "all groups begin again", 120)
    here.train_again(step, "with the lighthouse that was submitted by hand")
    print(f"all train {time.monotonic() - at:.0f} s after the lighthouse's job was submitted")
    assert saved is not None
    for name in NAMES:
        before, now = ledger(run.group(name))
        assert now.first_step is not None and now.first_step > saved, (before, now)

    here.scene.sandbox.run(["scancel", here.lighthouse().job.partition("_")[0]])
    until(lambda: here.lighthouse().down_since is not None, "the end of the lighthouse")
    at = time.monotonic()
    here.scene.type("kill", "--yes")
    until(lambda: not here.scene.queue(), "the end of all jobs", 180)
    print(f"the kill switch was obeyed within {time.monotonic() - at:.0f} s without a lighthouse")
    assert all("the kill switch is up" in ledger(run.group(name))[-1].then for name in NAMES)
    assert here.different_weights() == {}
    assert not here.scene.processes()
