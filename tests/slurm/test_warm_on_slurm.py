"""Warm restarts on real Slurm: a standby per node in a step beside the ranks, over two failures; nothing is left."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.heartbeat_page import read_beats
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]

TRAIN = """
import sys
warm = "warm" if "numpy" in sys.modules else "cold"
import os, time, numpy
from ftsupervise import Guard
from ftsupervise.guard import heartbeat
attempt, rank = os.environ["FTSUPERVISE_ATTEMPT"], os.environ["SLURM_PROCID"]
gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
os.write(1, f"attempt {attempt} rank {rank} {warm} gpus {gpus} age {heartbeat.age():.2f}\\n".encode())
guard = Guard(agree=None)
for step in range(1, 100_000):
    time.sleep(0.02)
    if guard.step(step).stop:
        sys.exit(0)
    if os.path.exists("done"):
        break
guard.finished(step)
"""


def test_the_ranks_of_two_nodes_restart_from_their_standbys(scene: Callable[..., Scene], until: Until) -> None:
    pytest.importorskip("numpy")
    here = scene(nodes=2)
    (here.folder / "warm.py").write_text(TRAIN)
    shape: dict[str, Any] = {
        "tasks_per_node": 2,
        "gpus_per_node": 8,
        "jobs": 1,
        "restart": {"warm": ["numpy"], "back_off": "0s"},
    }
    here.launch(f"{sys.executable} warm.py", **shape)
    until(lambda: "a standby is ready on all nodes" in here.log(), "the standbys", 120)
    for attempt in (1, 2):
        ranks = until(lambda number=attempt: here.trains(number, 4), f"attempt {attempt}", 120)
        os.kill(ranks[2], signal.SIGKILL)
        until(lambda number=attempt + 1: here.trains(number, 4), "the next attempt", 120)
    (here.folder / "done").touch()
    until(here.rundir.finished.exists, "the end", 120)
    until(lambda: here.attempts()[-1].ended, "the last page", 60)
    told = re.findall(r"^attempt (\d) rank (\d) (\w+) gpus (\S+)", here.log(), re.M)
    eight = "0,1,2,3,4,5,6,7"
    assert {(number, how, gpus) for number, _, how, gpus in told} == {
        ("1", "cold", eight),
        ("2", "warm", eight),
        ("3", "warm", eight),
    }
    assert [one.sign for one in here.attempts()] == ["killed by SIGKILL", "killed by SIGKILL", ""]
    until(lambda: not here.processes(), "everybody's end", 60)
    until(lambda: not standbys(here.folder), "the standbys' end", 60)
    print(re.findall(r"^attempt .* age .*", here.log(), re.M))


def test_a_spare_node_that_is_lost_takes_no_warm_rank_with_it(scene: Callable[..., Scene], until: Until) -> None:
    pytest.importorskip("numpy")
    here = scene(nodes=3)
    (here.folder / "warm.py").write_text(TRAIN)
    here.launch(f"{sys.executable} warm.py", spare_nodes=1, jobs=1, restart={"warm": ["numpy"], "back_off": "0s"})
    until(lambda: "a standby is ready on all nodes" in here.log(), "the standbys", 120)
    os.kill(until(lambda: here.trains(1), "the first attempt", 120)[1], signal.SIGKILL)
    ranks = until(lambda: here.trains(2), "the next attempt", 120)
    assert len(standbys(here.folder)) == 3
    (spare,) = {"node-0", "node-1", "node-2"} - set(
        here.attempts()[1].nodes
    )  # the killed rank's node: it has an incident now
    here.sandbox.run(["scontrol", "update", f"NodeName={spare}", "State=DOWN", "Reason=test"])
    until(lambda: len(standbys(here.folder)) < 3, "the end of the standby there", 60)
    seen = here.trains(2)
    assert seen == ranks
    steps = {beat.rank: beat.step or 0 for beat in read_beats(here.rundir)}
    until(lambda: all((beat.step or 0) > steps[beat.rank] for beat in read_beats(here.rundir)), "more steps", 60)
    os.kill(ranks[0], signal.SIGKILL)
    until(lambda: here.trains(3), "an attempt from the standbys that are left", 120)
    (here.folder / "done").touch()
    until(here.rundir.finished.exists, "the end", 120)
    told = set(re.findall(r"^attempt (\d) rank \d (\w+)", here.log(), re.M))
    assert told == {("1", "cold"), ("2", "warm"), ("3", "warm")}
    until(lambda: not here.processes() and not standbys(here.folder), "everybody's end", 60)


def standbys(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder:
                found.append((entry / "comm").read_text().strip())
        except OSError:
            continue
    return [name for name in found if name == "ftsup-standby"]
