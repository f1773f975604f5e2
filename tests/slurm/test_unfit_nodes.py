"""Nodes that lack what the job starts from: the script says so itself, in plain shell, and uses up no chain."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from ftsupervise.config.load import load
from ftsupervise.launch.plan import plan
from ftsupervise.launch.submit import launch_run
from ftsupervise.rundir.switches import read_brake
from ftsupervise.scheduler.slurm import Slurm
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]
MEMBERS = 8


def launched(here: Scene, **launch: Any) -> str:
    """Launch with an interpreter that does not start on the nodes that ``broken-NODE`` names; return the job's id."""
    python = here.folder / "python"
    python.write_text(
        f'#!/bin/sh\n[ -e "{here.folder}/broken-$SLURMD_NODENAME" ] && '
        'echo "python: error while loading shared libraries: libpython3.so: cannot open shared object file" >&2 && exit 127\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    lines = {"command": "sleep 1", "jobs": MEMBERS, **launch}
    text = "".join(f"  {key}: {value}\n" for key, value in lines.items())
    config = here.folder / "ftsupervise.yaml"
    config.write_text(f"name: {here.name}\nlaunch:\n{text}")
    run = load(config)
    one = plan(run, kind="slurm", token="0123456789ab", workdir=here.folder, python=str(python))
    one = replace(one, own_workdir=True)
    env = {**os.environ, **here.sandbox.env(), "FTSUPERVISE_UNFIT_SECONDS": "0"}
    now = datetime.now(timezone.utc)
    return launch_run(one, run, Slurm(env), again=False, now=now, env=env).job_ids[0]


def waiting(here: Scene, what: str = "%i|%r|%x") -> list[str]:
    return here.sandbox.run(["squeue", "-h", "-r", "-t", "PENDING", "-n", here.name, "-o", what]).splitlines()


@pytest.mark.parametrize("chain", ["array", "daisy"])
def test_a_node_on_which_the_interpreter_does_not_start_costs_one_member_and_is_excluded(
    scene: Callable[..., Scene], until: Until, chain: str
) -> None:
    here = scene(nodes=2)
    (here.folder / "broken-node-0").touch()
    launched(here, chain=chain, command="'touch done; sleep 600'")
    until((here.folder / "done").exists, "the next member, on the other node", 90)
    assert here.attempts()[0].nodes == ("node-1",)
    left = waiting(here)
    assert len(left) == MEMBERS - 2, left
    assert all(line.endswith("|node-0") for line in left), left
    assert "node-0 is not fit for this run: python: error while loading shared libraries" in here.log()
    assert read_brake(here.rundir) is None
    here.type("kill", "--yes")
    here.sandbox.run(["scancel", "-n", here.name])


def test_three_members_in_a_row_without_the_interpreter_hold_the_rest_and_clear_lets_it_go_on(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=4)
    job = launched(here, jobs=20, command="'touch done; sleep 600'")
    (here.folder / "python").rename(here.folder / "away")
    brake = until(lambda: read_brake(here.rundir), "the brake", 120)
    left = waiting(here)
    assert len(left) == 17, left
    assert all("JobHeldUser" in line for line in left), left
    assert brake.held == (job,)
    assert brake.failure.endswith(f"is not fit for this run: {here.folder}/python is not there")
    said = here.type("status", ".")
    assert "no member started in 3 in a row" in said and "is not there" in said, said
    (here.folder / "away").rename(here.folder / "python")
    assert f"Job {job} may start again" in here.type("clear", "--brake", ".")
    until((here.folder / "done").exists, "the next member", 90)
    here.sandbox.run(["scancel", "-n", here.name])


def test_a_folder_that_belongs_to_another_account_by_then_costs_one_member(
    scene: Callable[..., Scene], until: Until
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    here = scene(nodes=1)
    here.sandbox.node("node-0", "pause")
    job = launched(here)
    os.chown(here.folder, 65534, -1)
    here.sandbox.node("node-0", "cont")
    brake = until(lambda: read_brake(here.rundir), "the brake", 120)
    assert "belongs to another account than at launch" in brake.failure
    assert len(waiting(here)) == MEMBERS - 1
    assert brake.held == (job,)
    here.sandbox.run(["scancel", "-n", here.name])
