"""Restart in place where each node is a host of its own: the agents are heard over the network, and a host that is lost says
nothing: no connection is closed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from ftsupervise.host.processes import process
from ftsupervise.rundir.heartbeat_page import read_beats
from tests.slurm.ring_scene import Scene
from tests.slurm.test_snapshots_on_slurm import launch

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make network namespaces"),
]
Until = Callable[..., Any]
LONG = "--steps 100000 --step-time 0.02 --save-every 20"


def lives(pid: int) -> bool:
    seen = process(pid)
    return seen is not None and not seen.gone


def test_a_rank_killed_on_another_host_is_acted_on_by_what_its_agent_says(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2, hosts=True)
    here.train(LONG, jobs=1)
    ranks = until(lambda: here.trains(1), "the first attempt")
    until(lambda: here.watched(*ranks.values()), "the agents to see the ranks")
    os.kill(ranks[1], signal.SIGKILL)
    until(lambda: here.trains(2), "the second attempt")
    first = here.attempts()[0]
    assert first.sign == "killed by SIGKILL" and first.words.startswith("rank 1 on node-1 ")
    log = (here.rundir.attempt(1) / "run.log").read_text()
    assert re.search(r"rank 1 on node-1 killed by SIGKILL: the other ranks have", log), log
    here.type("kill", "--yes")
    until(lambda: not here.queue(), "the end of the queue")


@pytest.mark.parametrize("how", ["crash", "cut"])
def test_a_host_that_is_lost_in_silence_is_replaced_by_the_spare(
    scene: Callable[..., Scene], until: Until, how: Any
) -> None:
    here = scene(nodes=3, hosts=True)
    here.train(LONG, spare_nodes=1, jobs=1)
    old = until(lambda: here.trains(1), "the first attempt")[1]
    struck = time.time()
    here.sandbox.node("node-1", how)
    until(lambda: here.trains(2), "the second attempt", 180)
    print(
        f"{how}: {max(float(b.facts['first_at']) for b in read_beats(here.rundir)) - struck:.1f} s to the next first step"
    )
    first, second = here.attempts()
    assert first.nodes == ("node-0", "node-1") and second.nodes == ("node-0", "node-2")
    assert (first.failure and first.failure.kind, first.then.partition(":")[0]) == ("node", "restarted in place")
    if how == "cut":
        assert lives(old), "it waits for its peer, unreached"
        here.sandbox.node("node-1", "plug")
    until(lambda: not lives(old), "the end of the old copy")
    assert here.attempts()[1].ended is None, here.log()
    here.type("kill", "--yes")
    until(lambda: not here.queue(), "the end of the queue")


def test_what_the_buddy_on_another_host_held_is_where_the_spare_begins(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=3, hosts=True)
    launch(here, 150, 1000, spare_nodes=1, jobs=1)
    until(lambda: here.trains(1) and (here.attempts()[0].held or 0) > 20, "what every buddy holds")
    held = here.attempts()[0].held or 0
    here.sandbox.node("node-1", "crash")
    until(here.rundir.finished.exists, "the end", 150)
    until(lambda: here.attempts()[-1].ended, "the last page")
    begins = here.attempts()[-1].begins
    assert begins is not None and (begins.source, begins.copies) == ("memory", 1), here.log()
    assert begins.step is not None and begins.step >= held


def test_a_run_whose_batch_host_loses_its_power_goes_on_in_the_next_member(
    scene: Callable[..., Scene], until: Until
) -> None:
    """The agents of the other nodes hear nothing when their supervisor is gone: they wait for it, and then ask Slurm."""
    here = scene(nodes=3, hosts=True)
    here.train(LONG, spare_nodes=1, jobs=2)
    until(lambda: here.trains(1), "the first attempt")
    struck = time.time()
    here.sandbox.node("node-0", "crash")
    here.sandbox.node("node-0", "start")
    until(lambda: here.trains(2), "the second attempt", 480)
    print(f"{time.time() - struck:.0f} s from the power cut to the next member's first step")
    first, second = here.attempts()
    assert first.job_id != second.job_id and first.words.startswith("ended without a record")
    here.type("kill", "--yes")
    until(lambda: not here.queue(), "the end of the queue")
