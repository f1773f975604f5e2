"""The ranks of an srun find each other by the names that torch reads, in the first attempt, warm, and on other nodes."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]

# Rank 0 listens where it was told to; each of the others greets it there, with its rank.
TRAIN = """
import sys
how = "warm" if "xml.dom.minidom" in sys.modules else "cold"
import os, socket, time, xml.dom.minidom
from ftsupervise import Guard

def told(name):
    return os.environ.get(name, "-")

rank, world = int(told("RANK")), int(told("WORLD_SIZE"))
place = told("MASTER_ADDR"), int(told("MASTER_PORT"))
assert place == (told("FTSUPERVISE_MASTER_ADDR"), int(told("FTSUPERVISE_MASTER_PORT")))
if rank == 0:
    with socket.create_server(place) as server:
        links = [server.accept()[0] for _ in range(world - 1)]
        met = sorted(int(link.recv(16)) for link in links)
        for link in links:
            link.sendall(b"go")
else:
    met = []
    while True:
        try:
            link = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    link.sendall(str(rank).encode())
    assert link.recv(2) == b"go"
names = "RANK LOCAL_RANK LOCAL_WORLD_SIZE WORLD_SIZE FTSUPERVISE_NODE_RANK SLURMD_NODENAME MASTER_PORT".split()
os.write(1, f"attempt {told('FTSUPERVISE_ATTEMPT')} {how} {' '.join(map(told, names))} met {met}\\n".encode())
guard = Guard(agree=None)
for step in range(1, 100_000):
    time.sleep(0.02)
    if guard.step(step).stop:
        sys.exit(0)
    if os.path.exists("done"):
        break
guard.finished(step)
"""


@pytest.mark.fault(
    "Rank 0's node is replaced, cold or warm",
    "the ranks meet at another node and port, which each is told",
)
def test_the_ranks_of_an_srun_find_each_other_warm_and_on_other_nodes_too(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=3)
    (here.folder / "meet.py").write_text(TRAIN)
    restart = {"warm": ["xml.dom.minidom"], "back_off": "0s"}
    here.launch(f"{sys.executable} meet.py", tasks_per_node=2, spare_nodes=1, jobs=1, restart=restart)
    until(lambda: "a standby is ready on all nodes" in here.log(), "the standbys", 120)
    ranks = until(lambda: here.trains(1, 4), "attempt 1", 120)
    os.kill(ranks[0], signal.SIGKILL)  # its node has an incident now: the next attempt begins on another one
    until(lambda: here.trains(2, 4), "attempt 2", 120)
    (here.folder / "done").touch()
    until(here.rundir.finished.exists, "the end", 120)
    told = re.findall(r"^attempt (\d) (\w+) (\d) (\d) (\d) (\d) (\d) node-(\d) (\d+) met (.*)", here.log(), re.M)
    shape = {
        (int(attempt), how, rank, local, size, world, node, f"node-{name}")
        for attempt, how, rank, local, size, world, node, name, *_ in told
    }
    one, two = (here.attempts()[number].nodes for number in (0, 1))
    assert one[0] != two[0]
    assert shape == {
        (number, how, str(rank), str(rank % 2), "2", "4", str(rank // 2), nodes[rank // 2])
        for number, how, nodes in ((1, "cold", one), (2, "warm", two))
        for rank in range(4)
    }
    assert [met for *_, met in told if met != "[]"] == ["[1, 2, 3]"] * 2
    first, second = ({port for attempt, *_, port, _ in told if attempt == number} for number in "12")
    assert len(first) == len(second) == 1
    assert first != second
