"""Replica groups on hosts of their own, each with a network and a name that leads to 127.0.1.1, as Debian has it.

A rank is killed, a host loses its power, another one is cut off and comes back.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.model import FailureKind
from ftsupervise.replicas.table import ReplicaGroup, read_table
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from tests.neighbours.replicas import longest_pause
from tests.slurm.ring_scene import Scene
from tests.slurm.test_replica_examples import EXAMPLES, NAMES, reached, told

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed: make test-torch"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make network namespaces"),
]
Until = Callable[..., Any]
TIMEOUT = 10.0  # seconds: of the process group


class Hosts:
    """Four groups on a host each, of seven; the first host has the supervisors and the lighthouse too."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.rundir = scene, scene.rundir

    def begin(self, name: str = "ddp", nodes: int = 1) -> None:
        for path in EXAMPLES.glob("*.py"):
            shutil.copy(path, self.scene.folder)
        words = "--steps 100000 --step-time 0.1 --log-every 1 --save-every 50"
        groups = {"count": 4, "slowest_step": "5s", "nodes_each": nodes}
        self.scene.launch(
            f"{sys.executable} {name}.py {words}", nodes=1, spare_nodes=2, jobs=1, exclusive=True, replica_groups=groups
        )

    def row(self, name: str) -> ReplicaGroup:
        table = read_table(self.rundir)
        return next((one for one in table.groups if one.name == name), ReplicaGroup()) if table else ReplicaGroup()

    def pid(self, name: str) -> int:
        return next(one.pid for one in read_beats(self.rundir.group(name)) if one.rank == 0)

    def stall(self, lost: str, fault: Callable[[], object]) -> float:
        """Seconds for which the other groups made no step."""
        return longest_pause([self.log(one) for one in NAMES if one != lost], fault)

    def log(self, name: str) -> Path:
        return next(self.rundir.group(name).logs.glob("*.out"))


@pytest.mark.fault(
    "The host of a replica group loses its power, or its cable is pulled and put in again; host names lead to "
    "127.0.1.1",
    "the others go on within two seconds, the group goes on on a spare host, and its older copy ends",
)
def test_a_group_on_another_host_is_killed_loses_its_power_and_is_cut_off_and_the_others_train_on(
    scene: Callable[..., Scene], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    here = Hosts(scene(nodes=6, hosts=True))
    here.begin()
    until(lambda: reached(here.scene) >= 5, "the fifth step of all groups", 180)

    seconds: dict[str, list[float]] = {}

    def hits(what: str, lost: str, fault: Callable[[], object]) -> None:
        at, attempts = time.monotonic(), len(ledger(here.rundir.group(lost)))
        stall = here.stall(lost, fault)
        until(lambda: len(ledger(here.rundir.group(lost))) > attempts, f"the next attempt of {lost}", 180)
        step = max(told(here.scene))
        until(lambda: reached(here.scene) > step, f"{lost} is back with the others", 180)
        seconds[what] = [stall, time.monotonic() - at]
        print(f"{what}: the others stood for {stall:.2f} s, {lost} is back after {seconds[what][1]:.0f} s", flush=True)

    hits("SIGKILL", "g001", lambda: os.kill(here.pid("g001"), signal.SIGKILL))
    (second,) = here.row("g002").nodes
    hits("power", "g002", lambda: here.scene.sandbox.node(second, "crash"))
    (third,) = here.row("g003").nodes
    old = here.pid("g003")
    hits("cable", "g003", lambda: here.scene.sandbox.node(third, "cut"))
    here.scene.sandbox.node(third, "plug")
    until(lambda: not Path(f"/proc/{old}").exists(), "the end of the older copy of g003", 120)
    step = max(told(here.scene))
    until(lambda: reached(here.scene) > step + 20, "the groups train on", 120)

    here.scene.type("kill", "--yes")
    until(lambda: not here.scene.queue(), "the end of the job", 180)
    failures = {name: [one.failure and one.failure.kind for one in ledger(here.rundir.group(name))] for name in NAMES}
    assert failures["g001"][0] is FailureKind.SIGNAL and len(failures["g000"]) == 1
    assert failures["g002"][0] is failures["g003"][0] is FailureKind.NODE
    assert max(stall for stall, _ in seconds.values()) < TIMEOUT - 3, seconds
    assert {step: of for step, of in told(here.scene).items() if len(set(of.values())) > 1} == {}


def test_groups_of_two_hosts_lose_the_second_host_of_one_of_them(
    scene: Callable[..., Scene], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first rank lives on, and its heartbeats with it: the others wait until its supervisor has ended it."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # for the process group inside a group, which is torch's own
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    here = Hosts(scene(nodes=10, hosts=True))
    here.begin("hsdp", nodes=2)
    until(lambda: reached(here.scene) >= 5, "the fifth step of all groups", 240)
    first, second = here.row("g002").nodes
    at = time.monotonic()
    stall = here.stall("g002", lambda: here.scene.sandbox.node(second, "cut"))
    until(lambda: len(ledger(here.rundir.group("g002"))) > 1, "the next attempt of g002", 180)
    step = max(told(here.scene))
    until(lambda: reached(here.scene) > step, "g002 is back with the others", 180)
    print(f"the others stood for {stall:.1f} s, g002 is back after {time.monotonic() - at:.0f} s", flush=True)
    assert here.row("g002").nodes[0] == first and second not in here.row("g002").nodes
    here.scene.type("kill", "--yes")
    until(lambda: not here.scene.queue(), "the end of the job", 180)
    assert stall < 20, stall
    assert [len(ledger(here.rundir.group(name))) for name in NAMES] == [1, 1, 2, 1]
    assert {step: of for step, of in told(here.scene).items() if len(set(of.values())) > 1} == {}
