"""A hang on real Slurm: the rank that stands still on another node is named, and the run goes on in the same job."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.neighbours.typed import typed
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


@pytest.mark.fault(
    "A rank is stopped (SIGSTOP) on another node",
    "it is named, its stacks are kept, the run goes on in the same job",
)
def test_a_stopped_rank_on_another_node_is_named_and_the_run_goes_on_in_the_same_job(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2)
    here.train("--steps 150 --step-time 0.03 --save-every 20", restart={"hang": {"at_least": "4s"}})
    until(lambda: here.trains(1) and "step 50 " in here.log(), "step 50")
    os.kill(here.trains(1)[1], signal.SIGSTOP)
    struck = time.time()
    until(lambda: here.attempts()[0].ended, "the end of the first attempt")
    until(here.rundir.finished.exists, "the end", 120)
    until(lambda: here.attempts()[-1].ended, "the last page")
    first, second = here.attempts()
    assert first.ended is not None
    print(f"from SIGSTOP to the end of the attempt: {first.ended.timestamp() - struck:.2f} s")
    assert re.match(r"hang: rank 1 on node-1 is stopped; ", first.words), first.words
    assert (first.failure and first.failure.kind, first.then.partition(":")[0]) == ("hang", "restarted in place")
    assert second.words == "finished"
    folder = Path(here.rundir.attempt(1)) / "evidence"
    assert "-> 1  node-1" in (folder / "hang.txt").read_text()
    assert "State:\tT (stopped)" in (folder / "rank-1.txt").read_text()
    assert "train.py" in (folder / "rank-0.txt").read_text(), "where the other one waits"
    assert not here.processes()


def test_the_ranks_of_two_nodes_are_asked_how_they_are_and_go_on(scene: Callable[..., Scene], until: Until) -> None:
    here = scene(nodes=2)
    here.train("--steps 400 --step-time 0.05 --save-every 100", restart={"hang": {"at_least": "60s"}})
    until(lambda: here.trains(1) and "step 50 " in here.log(), "step 50")
    stopped = here.trains(1)[1]
    os.kill(stopped, signal.SIGSTOP)

    def asked() -> str:
        said = typed("diagnose", here.rundir.root, code=0).stdout
        return said if "it stands still: a rank that is stopped" in said else ""

    said = until(asked, "the rank that is stopped", 60)
    assert "where     rank 1 on node-1" in said and "rank 0: " in said, said
    os.kill(stopped, signal.SIGCONT)
    until(lambda: "now: it goes on" in typed("diagnose", here.rundir.root, code=0).stdout, "a run that goes on", 60)
    until(here.rundir.finished.exists, "the end", 120)
    until(lambda: here.attempts()[-1].ended, "the last page")
    (only,) = here.attempts()
    assert only.words == "finished"


def test_after_a_crash_slurms_view_and_the_pages_of_the_nodes_follow_while_the_run_goes_on(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2)
    here.train("--steps 600 --step-time 0.05 --save-every 100")
    until(lambda: here.trains(1) and "step 50 " in here.log(), "step 50")
    os.kill(here.trains(1)[1], signal.SIGKILL)
    folder = Path(here.rundir.attempt(1)) / "evidence"
    until(lambda: len(list(folder.glob("node-node-*.txt"))) == 2, "the pages of both nodes", 90)
    first, second = here.attempts()
    assert first.ended is not None and (second.started - first.ended).total_seconds() < 4, "before that was taken"
    view = (folder / "slurm.txt").read_text()
    assert "NodeName=node-1" in view and "JobState=RUNNING" in view
    assert not list(folder.glob("rank-*.txt"))
    until(here.rundir.finished.exists, "the end", 120)
