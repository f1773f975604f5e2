"""The promise, on real Slurm: a run that is killed, saved, stopped and timed out trains to the same weights."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.sandbox import Sandbox

pytestmark = pytest.mark.slurm
EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal"
Until = Callable[..., Any]


@dataclass
class Project:
    """A copy of the minimal example with settings of the test's, launched as a person would."""

    folder: Path
    sandbox: Sandbox
    name: str

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    def settings(self, command: str, **launch: Any) -> None:
        lines = {
            "command": f"{sys.executable} train.py {command}",
            "jobs": 10,
            "nodes": 2,
            "tasks_per_node": 1,
            **launch,
        }
        text = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in lines.items())
        poll = "guard:\n  poll: 100ms\n"
        (self.folder / "ftsupervise.yaml").write_text(f"name: {self.name}\nlaunch:\n{text}{poll}")

    def type(self, *words: str, code: int = 0) -> str:
        """Type ``ftsupervise WORDS`` in the project's folder."""
        argv = [sys.executable, "-m", "ftsupervise", *words]
        done = subprocess.run(
            argv, cwd=self.folder, env=self.sandbox.env(), capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def log(self) -> str:
        return "".join(
            path.read_text() for path in sorted(self.run.glob("logs/*.out"), key=lambda p: p.stat().st_mtime_ns)
        )

    def steps(self) -> list[int]:
        return [int(n) for n in re.findall(r"^step (\d+) ", self.log(), re.M)]

    def ends(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.run.glob("attempts/*/end.json"))]

    def queue(self) -> str:
        return self.sandbox.run(["squeue", "-h", "-n", self.name, "-t", "all", "-o", "%i %T"])

    def idle(self) -> bool:
        return not re.search("PENDING|RUNNING|COMPLETING", self.queue())

    def rank(self, number: int) -> int:
        return int(json.loads((self.run / "beats" / f"rank-{number}").read_text())["pid"])


@pytest.fixture
def project(sandbox: Sandbox, short_tmp: Path, request: pytest.FixtureRequest) -> Project:
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[5:40]
    folder = short_tmp / name
    shutil.copytree(EXAMPLE, folder)
    return Project(folder, sandbox, name)


def test_a_kill_switch_ends_an_array_of_ten_and_nothing_is_trained_after_it_was_seen(
    project: Project, until: Until
) -> None:
    project.settings("--steps 100000 --step-time 0.05 --save-every 1000 --log-every 1")
    project.type("launch")
    until(lambda: max(project.steps(), default=0) >= 20, "step 20")
    (project.run / "switches" / "kill-switch").write_text("no longer needed")
    until(project.idle, "the end of all ten members", 120)
    stopped = json.loads((project.run / "attempts" / "0001" / "stopped.json").read_text())
    assert max(project.steps()) == stopped["step"]
    assert f"no longer needed: saving and stopping at step {stopped['step']}" in project.log()
    assert project.log().count("the kill switch is up") >= 9, "each of the others says so at its gate"
    assert [path.name for path in (project.run / "checkpoints").glob("step-*")] == [f"step-{stopped['step']:08d}"]
    assert [end["cause"] for end in project.ends()] == ["kill switch"]
    states = project.queue().splitlines()
    assert len([line for line in states if "COMPLETED" in line]) == 10, states
    for line in states:  # each queued member left by itself, quickly
        job = line.split()[0]
        if not job.endswith("_1"):
            shown = project.sandbox.run(["scontrol", "show", "job", "-o", job])
            times = re.search(r"RunTime=00:00:(\d\d)", shown)
            assert times, shown
            assert int(times[1]) <= 30, shown
    assert "kill switch" in project.type("launch", code=75)


def test_the_save_switch_leaves_exactly_one_extra_checkpoint_and_is_gone(project: Project, until: Until) -> None:
    project.settings("--steps 100000 --step-time 0.02 --save-every 100000", jobs=2)
    project.type("launch")
    until(lambda: max(project.steps(), default=0) >= 20, "step 20")
    project.type("save", "--why", "a loss spike")
    until(lambda: not (project.run / "switches" / "save-switch").exists(), "the switch to go")
    after = max(project.steps())
    until(lambda: max(project.steps()) >= after + 100, "a hundred further steps")
    assert len(list((project.run / "checkpoints").glob("step-*"))) == 1
    assert not list((project.run / "switches").iterdir())
    project.type("kill", "--yes")
    until(project.idle, "the end")


def test_a_job_stops_by_itself_before_its_limit_and_the_next_member_goes_on(project: Project, until: Until) -> None:
    """Slurm looks at limits every 30 s: a warning 10 s before a limit of 60 s comes after 29 s."""
    project.settings("--steps 100000 --step-time 0.05 --save-every 100000", jobs=2, time="1m", warn="10s")
    project.type("launch")
    until(lambda: len(project.ends()) == 1, "the first end", 120)
    end = project.ends()[0]
    assert end["cause"] == "warning signal"
    assert end["exit_code"] == 0
    assert end["seconds"] < 60
    until(lambda: "resumed from" in project.log(), "the next member")
    assert f"resumed from step-{end['last_step']:08d} " in project.log()
    project.type("kill", "--yes")
    until(project.idle, "the end")
    assert not any("TIMEOUT" in line for line in project.queue().split("\n"))
