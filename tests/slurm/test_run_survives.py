"""The promise, on real Slurm: a run that is killed, saved, stopped and timed out trains to the same weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host.ownership import shown_user
from ftsupervise.sandbox import Sandbox
from tests.slurm.ring_scene import EXAMPLE, Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


def scene_in(folder: Path, sandbox: Sandbox) -> Scene:
    shutil.copytree(EXAMPLE, folder)
    return Scene(folder, sandbox, folder.name)


@pytest.fixture
def here(sandbox: Sandbox, short_tmp: Path, request: pytest.FixtureRequest) -> Scene:
    return scene_in(short_tmp / re.sub(r"[^a-z0-9]+", "-", request.node.name)[5:40], sandbox)


@pytest.fixture(scope="module", autouse=True)
def limited(sandbox: Sandbox, short_tmp: Path) -> Scene:
    """A run of jobs of a minute. It trains beside the first tests: Slurm looks at limits every 30 s, and a warning 10 s before
    a limit of 60 s comes after 29 s."""
    here = scene_in(short_tmp / "limited", sandbox)
    here.train("--steps 100000 --step-time 0.05 --save-every 100000", jobs=2, time="1m", warn="10s")
    return here


def steps(here: Scene) -> list[int]:
    return [int(n) for n in re.findall(r"^step (\d+) ", here.log(), re.M)]


def jobs(here: Scene) -> list[str]:
    """Each job with its state, those that have ended too."""
    return here.sandbox.run(["squeue", "-h", "-n", here.name, "-t", "all", "-o", "%i %T"]).splitlines()


def idle(here: Scene) -> bool:
    return not re.search("PENDING|RUNNING|COMPLETING", "".join(jobs(here)))


def test_a_kill_switch_ends_an_array_of_ten_and_nothing_is_trained_after_it_was_seen(here: Scene, until: Until) -> None:
    here.train("--steps 100000 --step-time 0.05 --save-every 1000", jobs=10)
    until(lambda: max(steps(here), default=0) >= 20, "step 20")
    (here.rundir.switches / "kill-switch").write_text("no longer needed")
    until(lambda: idle(here), "the end of all ten members", 120)
    stopped = json.loads((here.rundir.attempt(1) / "stopped.json").read_text())
    assert max(steps(here)) == stopped["step"]
    assert f"no longer needed: saving and stopping at step {stopped['step']}" in here.log()
    assert here.log().count("the kill switch is up") >= 9, "each of the others says so at its gate"
    assert [path.name for path in here.rundir.checkpoints.glob("step-*")] == [f"step-{stopped['step']:08d}"]
    assert [attempt.words for attempt in here.attempts()] == [
        f"kill switch: raised by {shown_user()}: no longer needed"
    ]
    states = jobs(here)
    assert len([line for line in states if "COMPLETED" in line]) == 10, states
    for line in states:  # each queued member left by itself, quickly
        job = line.split()[0]
        if not job.endswith("_1"):
            shown = here.sandbox.run(["scontrol", "show", "job", "-o", job])
            times = re.search(r"RunTime=00:00:(\d\d)", shown)
            assert times, shown
            assert int(times[1]) <= 30, shown
    assert "kill switch" in here.type("launch", code=75)


def test_the_save_switch_leaves_exactly_one_extra_checkpoint_and_is_gone(here: Scene, until: Until) -> None:
    here.train("--steps 100000 --step-time 0.02 --save-every 100000", jobs=2)
    until(lambda: max(steps(here), default=0) >= 20, "step 20")
    here.type("save", "--why", "a loss spike")
    until(lambda: not (here.rundir.switches / "save-switch").exists(), "the switch to go")
    after = max(steps(here))
    until(lambda: max(steps(here)) >= after + 100, "a hundred further steps")
    assert len(list(here.rundir.checkpoints.glob("step-*"))) == 1
    assert not list(here.rundir.switches.iterdir())
    here.type("kill", "--yes")
    until(lambda: idle(here), "the end")


@pytest.mark.fault("The time limit strikes", "the run saves and leaves before it, the next member goes on")
def test_a_job_stops_by_itself_before_its_limit_and_the_next_member_goes_on(limited: Scene, until: Until) -> None:
    until(lambda: limited.attempts() and limited.attempts()[0].ended, "the first end", 120)
    end = limited.attempts()[0]
    assert (end.words, end.exit_code) == ("warning signal", 0)
    assert end.ended is not None and (end.ended - end.started).total_seconds() < 60
    until(lambda: "resumed from" in limited.log(), "the next member")
    assert f"resumed from step-{end.last_step:08d} " in limited.log()
    limited.type("kill", "--yes")
    until(lambda: idle(limited), "the end")
    assert not any("TIMEOUT" in line for line in jobs(limited))
