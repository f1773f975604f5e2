"""A sandbox is a Slurm like any other: what its users do with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host.processes import environment
from ftsupervise.sandbox import Sandbox

pytestmark = pytest.mark.slurm

Until = Callable[..., Any]
State = Callable[[Sandbox, str], str]


def submit(sandbox: Sandbox, *options: str) -> str:
    return sandbox.run(["sbatch", "--parsable", "-o", "/dev/null", *options]).strip()


def test_a_job_runs_and_its_exit_code_is_known(sandbox: Sandbox, until: Until, state: State) -> None:
    good, bad = submit(sandbox, "--wrap", "exit 0"), submit(sandbox, "--wrap", "exit 3")
    until(lambda: state(sandbox, good) == "COMPLETED", "the good job")
    until(lambda: state(sandbox, bad) == "FAILED", "the bad job")
    assert "ExitCode=3:0" in sandbox.run(["scontrol", "show", "job", bad])


def test_a_step_spans_all_nodes(sandbox: Sandbox) -> None:
    out = sandbox.run(["srun", "-N4", "--mem=100", "sh", "-c", "echo $SLURMD_NODENAME"])
    assert sorted(out.split()) == ["node-0", "node-1", "node-2", "node-3"]


def test_gpu_options_of_a_real_script_are_accepted_and_counted(sandbox: Sandbox) -> None:
    options = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=96", "--mem=400G"]
    out = sandbox.run(["srun", *options, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"])
    assert out.split() == ["0,1,2,3,4,5,6,7"] * 2
    with pytest.raises(Exception, match="Requested node configuration is not available"):
        submit(sandbox, "--gpus-per-node=9", "--wrap", "true")


def test_the_members_of_an_array_run_one_after_the_other(
    sandbox: Sandbox, until: Until, state: State, short_tmp: Path
) -> None:
    log = short_tmp / "array.log"
    body = f"echo start $SLURM_ARRAY_TASK_ID >> {log}; sleep 0.3; echo end $SLURM_ARRAY_TASK_ID >> {log}"
    job = submit(sandbox, "--array=1-3%1", "--mem=100", "--wrap", body)
    until(lambda: set(state(sandbox, job).split()) == {"COMPLETED"}, "the array")
    assert log.read_text().split("\n")[:6] == ["start 1", "end 1", "start 2", "end 2", "start 3", "end 3"]


def test_two_clusters_know_nothing_of_each_other(
    sandbox: Sandbox, make_sandbox: Callable[..., Sandbox], until: Until, state: State
) -> None:
    other = make_sandbox(nodes=1, gpus_per_node=0)
    job = submit(other, "--job-name=elsewhere", "--wrap", "sleep 60")
    until(lambda: state(other, job) == "RUNNING", "the job")
    assert "elsewhere" not in sandbox.run(["squeue", "-h", "-o", "%j"])
    assert sandbox.run(["sinfo", "-h", "-o", "%D"]).strip() == "4"
    assert other.run(["sinfo", "-h", "-o", "%D"]).strip() == "1"


def test_nothing_of_an_outer_job_reaches_the_sandbox(
    make_sandbox: Callable[..., Sandbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "64", "SBATCH_PARTITION": "a100", "SLURM_CONF": "/nowhere"}
    for name, value in (outer | {"SQUEUE_FORMAT": "%A", "PMI_RANK": "3"}).items():
        monkeypatch.setenv(name, value)
    inside = make_sandbox(nodes=1)
    env = inside.env()
    assert not {name for name in env if name.startswith(("SLURM", "SBATCH", "SQUEUE", "PMI"))} - {"SLURM_CONF"}
    assert env["SLURM_CONF"] == f"{inside.directory}/slurm.conf"
    assert inside.run(["srun", "-n1", "sh", "-c", "echo $SLURM_JOB_ID $SLURM_NTASKS"]).split() == ["1", "1"]
    for pid in (m.process.pid for m in inside.processes()):
        assert "4711" not in environment(pid).values()


def test_settings_of_slurm_conf_can_be_replaced_and_added(make_sandbox: Callable[..., Sandbox]) -> None:
    low = "PartitionName=low Nodes=node-[0-1] MaxTime=1:00:00 State=UP"
    inside = make_sandbox(nodes=2, kill_wait=7, overrides=("MaxArraySize=51", low))
    said = inside.run(["scontrol", "show", "config"])
    assert "MaxArraySize            = 51" in said and "KillWait                = 7 sec" in said
    assert inside.run(["sinfo", "-h", "-o", "%P %l"]).splitlines() == ["prod* infinite", "low 1:00:00"]
    assert not subprocess.run(["sinfo"], env=inside.env(), capture_output=True, timeout=30).stderr


def test_a_cluster_of_sixteen_comes_up_as_well(make_sandbox: Callable[..., Sandbox]) -> None:
    inside = make_sandbox(nodes=16)
    assert len(inside.run(["srun", "-N16", "--mem=10", "hostname"]).split()) == 16


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be a second user")
def test_a_second_user_whom_root_lets_in_can_use_roots_sandbox(sandbox: Sandbox) -> None:
    (sandbox.directory / "munge").chmod(0o711)
    asked = ["srun", "-n1", "--chdir=/tmp", "id", "-u"]
    done = subprocess.run(
        asked,
        env=sandbox.env(),
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/tmp",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.strip(), done.stderr) == ("65534", "")
