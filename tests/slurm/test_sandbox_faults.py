"""Breaking a sandbox on purpose, and what Slurm makes of it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from ftsupervise.errors import AlreadyRunning, NotFound, SchedulerUnavailable
from ftsupervise.host.processes import environment, identity
from ftsupervise.sandbox import Sandbox

pytestmark = pytest.mark.slurm

Until = Callable[..., Any]
State = Callable[[Sandbox, str], str]


def submit(sandbox: Sandbox, *options: str) -> str:
    return sandbox.run(["sbatch", "--parsable", "-o", "/dev/null", *options]).strip()


def sleepers(sandbox: Sandbox, node: str) -> list[int]:
    """Job processes on a node."""
    mine = (m.process for m in sandbox.processes() if m.node == node)
    return [process.pid for process in mine if process.name == "sleep"]


def running_on_two(sandbox: Sandbox, until: Until, *options: str) -> str:
    """A job whose batch host is node-0 and which has a rank on node-1."""
    job = submit(sandbox, "-w", "node-0,node-1", "--mem=100", *options, "--wrap", "srun sleep 300")
    until(lambda: sleepers(sandbox, "node-0") and sleepers(sandbox, "node-1"), "both ranks")
    return job


def test_a_crashed_node_requeues_one_job_and_fails_another(
    make_sandbox: Callable[..., Sandbox], until: Until, state: State
) -> None:
    own_sandbox = make_sandbox(slurmd_timeout=3)
    again = running_on_two(own_sandbox, until, "--requeue")
    never = submit(own_sandbox, "-w", "node-1", "--no-requeue", "--mem=100", "--wrap", "sleep 300")
    until(lambda: state(own_sandbox, never) == "RUNNING", "the second job")
    own_sandbox.node("node-1", "crash")
    assert not [m for m in own_sandbox.processes() if m.node == "node-1"], "a power cut leaves nothing"
    assert state(own_sandbox, never) == "RUNNING", "nobody lived to tell the controller"
    until(lambda: state(own_sandbox, never) == "NODE_FAIL", "NODE_FAIL", seconds=60)
    until(lambda: "Restarts=1" in own_sandbox.run(["scontrol", "show", "job", again]), "the requeue", seconds=60)
    own_sandbox.node("node-1", "start")
    own_sandbox.wait_ready(60)
    until(lambda: state(own_sandbox, again) == "RUNNING", "the second run", seconds=60)


def test_a_killed_slurmd_leaves_its_ranks_alive_and_comes_back_to_them(own_sandbox: Sandbox, until: Until) -> None:
    running_on_two(own_sandbox, until)
    before = sleepers(own_sandbox, "node-1")
    own_sandbox.node("node-1", "kill")
    assert sleepers(own_sandbox, "node-1") == before
    with pytest.raises(NotFound, match="node-1 is not running"):
        own_sandbox.node("node-1", "pause")
    own_sandbox.node("node-1", "start")
    own_sandbox.wait_ready(30)
    assert sleepers(own_sandbox, "node-1") == before
    with pytest.raises(AlreadyRunning, match="node-1 is running already"):
        own_sandbox.node("node-1", "start")


def test_a_paused_slurmd_is_not_seen_until_it_goes_on(own_sandbox: Sandbox, until: Until) -> None:
    def word() -> str:
        return own_sandbox.run(["sinfo", "-h", "-n", "node-2", "-o", "%T"]).strip()

    own_sandbox.node("node-2", "pause")
    until(lambda: word().endswith("*"), "not responding", seconds=60)
    own_sandbox.node("node-2", "cont")
    until(lambda: word() == "idle", "idle again", seconds=60)
    own_sandbox.node("node-2", "stop")


def test_an_unknown_node_is_named_with_those_there_are(sandbox: Sandbox) -> None:
    with pytest.raises(NotFound, match="no node 'node-9'") as caught:
        sandbox.node("node-9", "kill")
    assert "node-[0-3]" in caught.value.hint


def test_the_controller_comes_back_with_its_jobs(
    make_sandbox: Callable[..., Sandbox], until: Until, state: State
) -> None:
    inside = make_sandbox(nodes=2, message_timeout=2)
    job = running_on_two(inside, until)
    began = time.time()

    inside.controller("pause")
    with pytest.raises(SchedulerUnavailable, match="Socket timed out"):
        inside.run(["squeue"])
    inside.controller("cont")
    until(lambda: state(inside, job) == "RUNNING", "an answer")

    inside.run(["scontrol", "update", f"JobId={job}", "Comment=changed"])  # else it may have been written just before
    saved = inside.layout.state / "job_state"
    until(lambda: saved.stat().st_mtime > began, "the controller's notes on the job")
    inside.controller("kill")
    # the second in the moment after the kill, when the socket still took us
    how = r"Unable to contact slurm controller|endpoint is not connected|Socket timed out|Zero Bytes|reset by peer"
    with pytest.raises(SchedulerUnavailable, match=how):
        inside.run(["squeue"])
    with pytest.raises(NotFound, match="slurmctld is not running"):
        inside.controller("kill")
    inside.controller("start")
    until(lambda: state(inside, job) == "RUNNING", "the job again")
    with pytest.raises(AlreadyRunning, match="slurmctld is running already"):
        inside.controller("start")

    inside.controller("restart")
    until(lambda: state(inside, job) == "RUNNING", "the job once more")
    inside.controller("stop")


def test_a_controller_stopped_while_paused_still_stops(make_sandbox: Callable[..., Sandbox]) -> None:
    inside = make_sandbox(nodes=1)
    inside.controller("pause")
    inside.controller("stop")
    assert "slurmctld" not in {m.process.name for m in inside.processes()}


def test_waiting_for_a_cluster_without_controller_ends_with_what_sinfo_said(
    make_sandbox: Callable[..., Sandbox],
) -> None:
    inside = make_sandbox(nodes=1, message_timeout=2)
    inside.controller("kill")
    with pytest.raises(SchedulerUnavailable, match=r"not ready within 1 s: sinfo .*"):
        inside.wait_ready(1)


def test_a_crash_spares_a_shell_that_only_uses_the_sandbox(own_sandbox: Sandbox, until: Until) -> None:
    with subprocess.Popen(["sleep", "300"], env=own_sandbox.env()) as mine:
        try:
            conf = str(own_sandbox.layout.slurm_conf)
            until(lambda: environment(mine.pid).get("SLURM_CONF") == conf, "the environment")
            own_sandbox.node("node-0", "crash")
            own_sandbox.down()
            assert identity(mine.pid) is not None
        finally:
            mine.kill()
