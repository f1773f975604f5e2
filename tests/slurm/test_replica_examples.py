"""The examples of replica groups under ``ftsupervise launch``, on the sandbox: four groups, each on a node of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.find import checkpoints_in
from ftsupervise.model import FailureKind
from ftsupervise.replicas.table import read_table
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from tests.manual.blocks import ROOT
from tests.manual.stories import Story
from tests.neighbours.replicas import longest_pause
from tests.slurm.ring_scene import Scene

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed: make test-torch"),
]
EXAMPLES = ROOT / "examples" / "replicas"
NAMES = ("g000", "g001", "g002", "g003")
Until = Callable[..., Any]


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slurm
@pytest.mark.parametrize(("name", "ranks"), [("ddp", 1), ("hsdp", 2), ("localsgd", 1), ("diloco", 1)])
def test_a_launched_example_loses_a_group_and_gets_it_back_with_the_same_weights(
    scene: Callable[..., Scene], until: Until, name: str, ranks: int
) -> None:
    here = scene(nodes=5)
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, here.folder)
    words = "--steps 100000 --step-time 0.1 --log-every 1 --sync-every 5 --save-every 20"
    groups = {"count": 4, "slowest_step": "5s"}
    here.launch(
        f"{sys.executable} {name}.py {words}",
        nodes=1,
        tasks_per_node=ranks,
        spare_nodes=1,
        jobs=1,
        replica_groups=groups,
    )
    until(lambda: reached(here) >= 5, "the fifth step of all groups", 180)
    of_group = next(here.rundir.group("g001").logs.glob("*.out"))
    until(lambda: "a standby is ready" in of_group.read_text(), "the standby of g001", 180)
    victim = next(one.pid for one in read_beats(here.rundir.group("g001")) if one.rank == ranks - 1)
    logs = [next(here.rundir.group(one).logs.glob("*.out")) for one in NAMES if one != "g001"]
    stall = longest_pause(logs, lambda: os.kill(victim, signal.SIGKILL))
    assert stall < 8, "the timeout of the process group, which a survivor would wait for without an abort, is 10 s"
    until(lambda: ledger(here.rundir.group("g001"))[0].failure, "the end of an attempt of g001")
    step = max(told(here))
    until(lambda: reached(here) > step + 5, "all groups together again", 180)
    table = until(
        lambda: (found := read_table(here.rundir)) and found.groups[1].back is not None and found, "the table"
    )
    print(f"{name}: stall of the others {stall:.2f} s, back after {table.groups[1].back} s")
    here.type("kill", "--yes")
    until(lambda: not here.queue(), "the end of the job", 180)
    failure = ledger(here.rundir.group("g001"))[0].failure
    assert failure is not None and failure.kind is FailureKind.SIGNAL
    assert [len(ledger(here.rundir.group(one))) for one in NAMES] == [1, 2, 1, 1], "the others were not restarted"
    assert {step: of for step, of in told(here).items() if len(set(of.values())) > 1} == {}
    last = {max(step for step, of in told(here).items() if one in of) for one in NAMES}
    assert last == {checkpoints_in(here.rundir.checkpoints)[0].step}


def test_the_example_is_run_as_its_page_says(tmp_path: Path) -> None:
    story = Story("example-replicas", tmp_path / "replicas", dict(os.environ))
    story.run_name = "replicas"
    for path in EXAMPLES.glob("*.*"):
        shutil.copy(path, story.place)
    config = story.place / "ftsupervise.yaml"
    config.write_text(config.read_text().replace("--step-time 0.1", "--step-time 0") + "scheduler: local\n")
    try:
        story.tell()
    finally:
        story.close()


def told(here: Scene) -> dict[int, dict[str, str]]:
    """By step, the weights of each group after it."""
    return told_in(*(here.rundir.group(name).logs for name in NAMES))


def told_in(*folders: Path) -> dict[int, dict[str, str]]:
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for log in (path for folder in folders for path in folder.glob("*")):
        for group, step, weights in re.findall(r"^(g\d+): step (\d+),.* weights (\w+)$", log.read_text(), re.M):
            found[int(step)][group] = weights
    return found


def reached(here: Scene) -> int:
    """The last step that all four groups have told."""
    return max((step for step, of in told(here).items() if set(of) == set(NAMES)), default=0)
