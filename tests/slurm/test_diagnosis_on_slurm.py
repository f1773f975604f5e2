"""Four ranks on two nodes, one of which has an error of its own: what the mail, ``status`` and the report say of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from ftsupervise.rundir.attempt_pages import VerdictPage, read_page
from tests.neighbours.typed import typed
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]
RANK = """
import os, sys, time
def step(batch):
    return {}[batch]
rank = int(os.environ["SLURM_PROCID"])
print("step 1 loss 2.3", flush=True)
if rank == 2:
    step("shard-17")
time.sleep(1)
for _ in range(3):
    print(f"[rank{rank}]: RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.1.1.3]:4217",
          file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_the_rank_and_its_node_are_told_wherever_a_person_looks(scene: Callable[..., Scene], until: Until) -> None:
    here = scene(nodes=2)
    (here.folder / "rank.py").write_text(RANK)
    mail = here.folder / "mail"
    here.launch(
        f"srun --label {sys.executable} rank.py",
        jobs=1,
        tasks_per_node=2,
        restart={"in_place": 5, "back_off": "0s"},
        more=f"alerts: {{receivers: [{{file: {{path: {mail}}}}}]}}\nwatch: {{hang: null, disk: null}}\n",
    )
    until((here.rundir.state / "brake").exists, "the brake", 180)
    until((here.rundir.attempt(3) / "end.json").exists, "the end of the third attempt", 60)
    typed("watch", here.rundir.root, folder=here.folder, env=here.sandbox.env())
    kept = read_page(VerdictPage, here.rundir.attempt(3))
    assert kept is not None, here.log()
    assert (kept.kind, kept.confidence, kept.culprits) == ("an error in the program", "high", (2,)), kept
    assert kept.where == "rank 2 on node-1" and kept.line == "KeyError: 'shard-17' at rank.py:4 step"
    assert kept.history == ("the third of this kind in this run (before: attempts 1, 2)",), "it blames no node"
    said = f"an error in the program, rank 2 on node-1 (confidence: high): {kept.line}"
    assert f"\nwhy      {said}\n" in mail.read_text()
    assert f"  why       attempt 3: {said}\n" in here.type("status", str(here.rundir.root))
    assert "rank 2 on node-1 (confidence: high)</summary>" in here.type("report", str(here.rundir.root), "-o", "-")
