"""Agents on real Slurm: pulses of two nodes, a death told at once, the key nowhere to be read, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.sandbox import Sandbox
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]
PROBE = Path(__file__).with_name("agents_probe.py")


def test_two_nodes_are_heard_asked_and_left_clean(
    make_sandbox: Callable[..., Sandbox], short_tmp: Path, until: Until
) -> None:
    sandbox = make_sandbox(nodes=2)
    out, script = short_tmp / "probe.out", short_tmp / "probe.sh"
    words = shlex.join([sys.executable, str(PROBE), str(short_tmp / "probe")])
    script.write_text(f"#!/bin/bash\n#SBATCH -N2 --no-kill -o {out}\nexec {words}\n")
    sandbox.run(["sbatch", str(script)])
    until(
        lambda: (out.exists() and '"closed"' in out.read_text()) or not sandbox.run(["squeue", "-h"]).strip(), "it", 120
    )
    until(lambda: not sandbox.run(["squeue", "-h"]).strip(), "the end of the job")
    text = out.read_text()
    said = {one["what"]: one for one in map(json.loads, re.findall(r"^\{.*\}$", text, re.M))}
    assert list(said) == ["agents", "ranks", "ping", "memory", "secret", "death", "kill", "again", "begun", "closed"], (
        text
    )
    assert len(said["agents"]["steps"]) <= 1, "the agents' step is none of the run's"
    ranks = {one["rank"]: one for one in said["ranks"]["ranks"]}
    assert {number: one["node"] for number, one in ranks.items()} == {0: "node-0", 1: "node-1"}
    assert all(one["state"] and one["cpu"] is not None for one in ranks.values())
    assert said["ping"]["answers"] == {"node-0": "here", "node-1": "here"}
    assert (said["secret"]["shown"], said["secret"]["ranks_have_it"]) == (False, False)
    key = said["secret"]["key"].encode()
    files = [path for path in sandbox.directory.rglob("*") if path.is_file() and not path.is_symlink()]
    read = {path: content for path in files if (content := _content(path))}
    assert len(read) > 5
    assert not [path for path, content in read.items() if key in content], "in no log and no state of Slurm's"
    (death,) = said["death"]["deaths"]
    assert (death["rank"], death["node"], death["crash"]) == (1, "node-1", True)
    print(f"a rank on the second node: death to ring {said['death']['seconds'] * 1e3:.0f} ms; all killed and confirmed "
          f"{said['kill']['seconds'] * 1e3:.0f} ms; agents up in {said['agents']['seconds']:.2f} s; "
          f"ring {said['memory']['ring']} kB, srun of the agents {said['memory']['srun']} kB")  # fmt: skip
    assert said["kill"]["nodes"] == ["node-0", "node-1"]
    assert said["memory"]["ring"] + said["memory"]["srun"] <= 20_000
    assert said["again"]["nodes"] == ["node-0", "node-1"], "a killed srun of the agents is started again"
    assert said["begun"]["newest"] == 0
    assert said["closed"]["left"] is False
    assert "forged or damaged" not in said["closed"]["dropped"]


def test_a_rank_killed_on_the_second_node_is_acted_on_at_once_and_its_ring_killed_leaves_no_agent(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2, kill_wait=30)
    here.train("--steps 100000 --step-time 0.02 --save-every 50", jobs=1)
    ranks = until(lambda: here.trains(1), "the ranks")
    until(lambda: here.agents(), "the agents")
    base = _base(ranks[1])
    until(lambda: len(list(Path(base, "1").glob("rank-*"))) == 2, "the pages")
    until(lambda: here.watched(*ranks.values()), "the agents to have found the ranks")
    struck = time.time()
    os.kill(ranks[1], signal.SIGKILL)
    log = here.rundir.attempt(1) / "run.log"
    found = until(lambda: re.search(r"^(\S+) rank \d on node-\d (.*): the other ranks have", log.read_text(), re.M))
    took = datetime.fromisoformat(found[1]).timestamp() - struck
    print(f"from the kill on the second node to the action: {took * 1e3:.0f} ms ({found[2]})")
    until(lambda: here.trains(2), "the second attempt")
    assert here.attempts()[0].sign == "killed by SIGKILL", "whoever was heard of first"
    start = json.loads((here.rundir.attempt(2) / "start.json").read_text())
    os.kill(start["pid"], signal.SIGKILL)
    until(lambda: not here.queue() and not here.processes() and not here.agents(), "nothing left", 90)
    until(lambda: not list(Path(base).glob("*/rank-*")), "no page left")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # the daemons write new ones and rename them
        return b""


def _base(pid: int) -> str:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return str(Path(next(word for word in words if word.startswith("FTSUPERVISE_PAGES=")).partition("=")[2]).parent)
