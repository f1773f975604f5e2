"""A script that calls srun is the command: its steps end with it, and it is started again on the nodes that are there."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.neighbours.supervised import alive
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]

# Its step outlives it: srun leaves the session, and is ended with it; on the other nodes only Slurm can do that.
LEAVES = """
[ $FTSUPERVISE_RESTART = 1 ] && { squeue -s -h -j $SLURM_JOB_ID -o '%i %j' > steps; exit 0; }
srun --overlap bash -c 'trap "" TERM; echo $$ > rank-$SLURM_PROCID; while :; do sleep 0.2; done' &
until [ -s rank-0 ] && [ -s rank-1 ] && [ -e go ]; do sleep 0.1; done
kill -9 $!
exit 3
"""

FOLLOWS = """
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 $1 bash -c '
  echo $SLURMD_NODENAME > on-$FTSUPERVISE_ATTEMPT-$SLURM_PROCID; while ! [ -e go ]; do sleep 0.1; done' $2
"""


def submit(here: Scene, nodes: int, *command: str) -> str:
    """A person's own job script, whose command is no srun."""
    (here.folder / "job.sh").write_text(
        f"#!/bin/bash\n#SBATCH --no-kill -N{nodes} --ntasks-per-node=1 -J {here.name} -o {here.folder}/job.out\n"
        f"exec {sys.executable} -m ftsupervise run --in-place 5 --back-off 0 --run-dir {here.rundir.root} -- "
        f"{shlex.join(command)}\n"
    )
    here.rundir.root.mkdir(parents=True)
    return here.sandbox.run(["sbatch", "-D", str(here.folder), str(here.folder / "job.sh")]).split()[-1]


def test_steps_of_a_shell_end_before_its_next_attempt_and_those_of_a_person_who_looks_do_not(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2)
    job = submit(here, 2, "bash", "-c", LEAVES)
    until(lambda: all((here.folder / f"rank-{n}").stat().st_size for n in (0, 1)), "its ranks")
    ranks = [int((here.folder / f"rank-{n}").read_text()) for n in (0, 1)]
    looks = subprocess.Popen(
        ["srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "bash", "-c", "echo > looks; exec sleep 300"],
        cwd=here.folder, env=here.sandbox.env(),
    )  # fmt: skip
    try:
        until((here.folder / "looks").exists, "the person's own step")
        (here.folder / "go").touch()
        until((here.folder / "steps").exists, "the second attempt")
        steps = until(lambda: (here.folder / "steps").read_text(), "its look at the steps")
        assert looks.poll() is None, here.log()
        assert [line.split()[1] for line in steps.splitlines() if "." in line and "ftsupervise" not in line] in (
            ["bash", "batch"],
            ["batch", "bash"],
        ), steps
        assert not any(Path(f"/proc/{rank}/environ").exists() and alive(rank) for rank in ranks)
    finally:
        looks.kill()
        looks.wait()


def test_a_script_that_lost_a_node_starts_again_on_the_nodes_it_is_told(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=3)
    lose_a_node(here, "--nodelist=$FTSUPERVISE_NODES", "", until)
    until(lambda: (here.folder / "on-2-1").exists() and (here.folder / "on-2-0").exists(), "the second attempt")
    until(
        lambda: [(here.folder / f"on-2-{n}").read_text().strip() for n in (0, 1)] == ["node-0", "node-2"], "its nodes"
    )
    (here.folder / "go").touch()
    until(lambda: here.attempts()[-1].words == "exit 0", "the end")
    first, second = here.attempts()
    assert first.failure is not None and first.failure.kind == "node"
    assert second.nodes == ("node-0", "node-2")


def test_a_script_that_does_not_listen_leaves_to_the_next_member_when_a_node_is_lost(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=3)
    lose_a_node(here, "", "& until [ -e failed ]; do sleep 0.1; done; kill -9 $!; exit 3", until)
    (here.folder / "failed").touch()
    (only,) = until(lambda: here.attempts() if here.attempts()[-1].ended else (), "the end")
    assert only.failure is not None and only.failure.kind == "node"
    log = (here.rundir.attempt(1) / "run.log").read_text()
    assert "2 of 3 nodes are left (node-1 is" in log
    assert "does not take its nodes from $FTSUPERVISE_NODES: the next member, if any, takes over" in log


def lose_a_node(here: Scene, option: str, then: str, until: Until) -> None:
    (here.folder / "work.sh").write_text(FOLLOWS.replace("$1", option).replace("$2", then))
    submit(here, 3, "bash", "work.sh")
    until(lambda: (here.folder / "on-1-1").exists() and (here.folder / "on-1-0").exists(), "the first attempt")
    until(lambda: (here.folder / "on-1-1").read_text().strip() == "node-1", "its nodes")
    here.lose("node-1")
