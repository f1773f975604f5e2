"""Output is a hint: a line as srun writes it ends nothing and blames nobody, until an agent or Slurm confirms it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]

# Between its steps rank 0 evaluates with an srun of its own, which fails, and quotes the log of another night.
_EVALUATES = """
import os, subprocess, sys, time
from ftsupervise import Guard
guard, rank, job = Guard(), os.environ["SLURM_PROCID"], os.environ["SLURM_JOB_ID"]
QUOTED = f'''
srun: error: node-1: task 1: Exited with exit code 1
srun: error: node-0: task 0: Segmentation fault (core dumped)
srun: error: Node failure on node-1
srun: error: Task launch for StepId={job}.0 failed on node node-1: Communication connection failure
slurmstepd: error: Detected 1 oom_kill event in StepId={job}.7. Some of the step tasks have been OOM Killed.
slurmstepd: error: *** JOB 1{job} ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO TIME LIMIT ***
'''
for step in range(1, 100):
    time.sleep(0.05)
    guard.step(step)
    if step in (20, 40, 60) and rank == "0":
        words = ["srun", "--overlap", "-N1", "-n1", "-w", "node-1", "sh", "-c", "exit 1"]
        print("evaluation:", subprocess.run(words).returncode, QUOTED, flush=True)
    if len(sys.argv) > 1 and step == 80 and rank == "1" and os.environ["FTSUPERVISE_RESTART"] == "0":
        raise ValueError("no such shape")
guard.finished(99)
"""


@pytest.mark.chain(
    "an evaluation with an `srun --overlap` of its own fails, or a log with lines of Slurm's is quoted",
    "the run goes on; nobody is ended or blamed",
    "0",
    "nothing",
)
def test_neither_an_evaluation_with_its_own_srun_nor_a_quoted_log_ends_a_healthy_run(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2)
    (here.folder / "evaluates.py").write_text(_EVALUATES)
    here.launch(f"{sys.executable} evaluates.py", jobs=1)
    until(lambda: here.attempts() and here.attempts()[-1].ended, "its end", 120)
    assert here.log().count("evaluation: 1") == 3, here.log()
    assert [one.words for one in here.attempts()] == ["finished"]
    assert not list((here.rundir.nodes / "incidents").iterdir())


@pytest.mark.chain(
    "a rank raises an error, and an older line names another rank",
    "it is started again in place; the rank that raised is named, and no node is blamed",
    "0",
    "what it raised",
)
def test_who_failed_by_itself_is_named_and_not_whom_an_older_line_names(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2)
    (here.folder / "evaluates.py").write_text(_EVALUATES)
    here.launch(f"{sys.executable} evaluates.py fails", jobs=1)
    until(lambda: len(here.attempts()) > 1 and here.attempts()[0].ended, "the first end", 120)
    first = here.attempts()[0]
    assert first.words.startswith("rank 1 on node-1 exit 1"), here.log()
    # srun can lose the end of a rank's output, and with it the exception's name
    assert first.failure is not None and first.failure.kind == "code"
    assert first.sign in ("exit 1 (ValueError)", "exit 1"), here.log()
    assert not list((here.rundir.nodes / "incidents").iterdir()), "its own error blames no node"


_DEAF = "trap '' TERM; echo it begins; while :; do sleep 0.1; done\n"


def test_a_rank_without_a_guard_that_dies_is_noticed_as_fast_by_srun_and_its_agent(
    scene: Callable[..., Scene], until: Until
) -> None:
    """The others do not hear SIGTERM: srun itself would wait for Slurm's KillWait."""
    here = scene(nodes=2)
    (here.folder / "deaf.sh").write_text(_DEAF)
    here.launch("bash deaf.sh", jobs=1)

    def ranks(number: int) -> dict[str, int]:
        found = processes.marked(ENV_ATTEMPT_DIR).get(str(here.rundir.attempt(number)), [])
        envs = {one.pid: processes.environment(one.pid) for one in found}
        return {env["SLURM_PROCID"]: pid for pid, env in envs.items() if env.get("SLURM_TASK_PID") == str(pid)}

    until(lambda: len(ranks(1)) == 2 and here.log().count("it begins") == 2, "two ranks")
    time.sleep(1)  # the agents have begun
    struck = time.monotonic()
    os.kill(ranks(1)["1"], signal.SIGKILL)
    until(lambda: len(ranks(2)) == 2, "the second attempt", 60)
    took = time.monotonic() - struck
    first = until(lambda: (one := here.attempts()[0]).words and one, "the page of its end")
    assert first.words.startswith("rank 1 on node-1 killed by SIGKILL"), here.log()
    print(f"killed to the next ranks: {took:.2f} s")
    assert took < 15, "KillWait is 30 s"
