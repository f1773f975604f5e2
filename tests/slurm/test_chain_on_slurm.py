"""A chain on real Slurm whose members end in ways that no page tells: it is held after three of them, and people hear why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.switches import read_brake
from ftsupervise.scheduler.parse import array_size
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]

# A rank that kills its supervisor, as Slurm and the kernel do when the batch step has used up its memory.
KILLS = """
import os, signal, sys
from pathlib import Path
def supervisor(pid):
    while b"--launched" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid
if not Path("mended").exists():
    os.kill(supervisor(os.getpid()), signal.SIGKILL)
from ftsupervise import Guard
with Guard() as guard:
    guard.step(1)
    guard.finished(1)
"""


def held(scene: Scene) -> bool:
    """Do all its members that are left stand in the queue, on hold? Slurm gives these the priority 0."""
    found = scene.sandbox.run(["squeue", "-h", "-n", scene.name, "-o", "%T %Q"]).splitlines()
    return bool(found) and set(found) == {"PENDING 0"}


def begun(scene: Scene) -> list[str]:
    """The members that have begun an attempt, by their attempts."""
    return [one.job_id for one in scene.attempts()]


@pytest.mark.chain(
    "Supervisors are killed with their members (the batch step is out of memory)",
    "After the third the next member starts nothing, puts the brake on, holds the rest and goes back into the queue",
    "3",
    "The brake alert: 3 members in a row ended without a record; what to type",
)
@pytest.mark.parametrize("chain", ["array", "daisy"])
def test_members_whose_supervisors_are_killed_are_three_and_the_rest_is_held(
    scene: Callable[..., Scene], until: Until, chain: str
) -> None:
    here = scene(nodes=1)
    (here.folder / "kills.py").write_text(KILLS)
    here.launch(f"{sys.executable} kills.py", nodes=1, jobs=10, srun=False, chain=chain)
    until(lambda: read_brake(here.rundir) is not None and held(here), "the chain on hold", 120)
    assert len(set(begun(here))) == 3, begun(here)
    brake = read_brake(here.rundir)
    assert brake is not None and "3 members in a row were used up without a new step" in brake.why
    assert brake.failure == "ended without a record"
    assert sum(array_size(line.split()[0]) for line in here.queue().splitlines()) == 7, here.queue()
    assert "STOPPED" in here.type("status", ".") and "clear --brake" in here.type("status", ".")
    assert here.type("check", "brake", code=2)
    (here.folder / "mended").touch()
    here.type("clear", "--brake")
    until(here.rundir.finished.exists, "the end of the run", 60)


@pytest.mark.chain(
    "Somebody kills a run whose chain the brake holds",
    "`ftsupervise kill` ends the members that are held, which otherwise stay in the queue for ever; no other job is "
    "touched",
    "none",
    "`Members of … that the brake held were ended:` and their ids",
)
@pytest.mark.parametrize("chain", ["array", "daisy"])
def test_kill_ends_what_the_brake_holds_and_no_other_job(scene: Callable[..., Scene], until: Until, chain: str) -> None:
    """By themselves these stay in the queue for ever: nobody releases the members of a run that was killed."""
    here = scene(nodes=1)
    other = here.sandbox.run(
        ["sbatch", "--parsable", "--hold", "-J", here.name, "-D", "/tmp", "--wrap", "true"]
    ).strip()
    here.launch(f"{sys.executable} -c 'import nothing_of_that_name'", nodes=1, jobs=10, chain=chain)
    until(lambda: read_brake(here.rundir) is not None and held(here), "the chain on hold", 120)
    said = here.type("kill", "--yes")
    assert "Members of" in said and "that the brake held were ended" in said, said
    until(lambda: here.queue().split() == [other, "PENDING", "JobHeldUser"], "an empty queue but for the other's job")
    assert "may start again" not in here.type("clear", "--brake")
    here.sandbox.run(["scancel", other])


@pytest.mark.parametrize("chain", ["array", "daisy"])
def test_kill_now_ends_all_jobs_of_the_run_and_no_other(scene: Callable[..., Scene], until: Until, chain: str) -> None:
    """The program stands and has no guard: nobody answers the kill switch."""
    here = scene(nodes=1)
    other = here.sandbox.run(
        ["sbatch", "--parsable", "--hold", "-J", here.name, "-D", "/tmp", "--wrap", "true"]
    ).strip()
    here.launch("sleep 600", nodes=1, jobs=4, chain=chain)
    until(lambda: "RUNNING" in here.queue() and begun(here), "its first attempt", 60)
    said = here.type("kill", "--yes", "--now")
    assert f"Members of {here.name} were ended" in said and "still be there" not in said, said
    until(
        lambda: here.queue().split() == [other, "PENDING", "JobHeldUser"], "an empty queue but for the other's job", 60
    )
    assert f"{here.name} has no job in the queue." in here.type("kill", "--yes", "--now")
    here.sandbox.run(["scancel", other])


def in_queue(scene: Scene) -> int:
    return sum(array_size(line.split()[0]) for line in scene.queue().splitlines())


@pytest.mark.chain(
    "The run directory is read-only, gives an I/O error or needs a new ticket when a member starts",
    "It waits as for a full disk (`launch.restart.space_wait`); then it holds the chain by the scheduler alone and "
    "goes back into the queue",
    "none",
    "`status` and *is-running*: held by a member of the chain, and why (from the comments of its jobs); what to type",
)
@pytest.mark.root
@pytest.mark.parametrize("chain", ["array", "daisy"])
def test_a_run_directory_that_became_read_only_costs_no_member_and_the_queue_says_why(
    scene: Callable[..., Scene], until: Until, tmp_path: Path, chain: str
) -> None:
    here = scene(nodes=1)
    attempts = here.rundir.attempts
    attempts.mkdir(parents=True)
    subprocess.run(["mount", "--bind", attempts, attempts], check=True, timeout=20)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", attempts], check=True, timeout=20)
        here.train("--steps 3 --step-time 0", nodes=1, jobs=5, chain=chain, restart={"space_wait": "2s"})
        until(lambda: held(here), "the chain on hold", 120)
        assert in_queue(here) == 5, here.queue()
        assert "waiting up to 2 s" in here.log() and "Read-only file system" in here.log()
        why = here.type("status", ".")
        assert "Read-only file system" in why and "clear --brake" in why, why
        assert "Read-only file system" in here.type("check", "is-running", code=2)
    finally:
        subprocess.run(["umount", "-l", attempts], check=True, timeout=20)
    here.type("clear", "--brake")
    until(here.rundir.finished.exists, "the end of the run", 120)


@pytest.mark.chain(
    "No node is fit, and an older attempt that makes no step may be running elsewhere",
    "Each member waits ten minutes for it and claims nothing; the third holds the rest and goes back into the queue",
    "2",
    "The brake alert: which nodes are unfit, and which attempt may be running",
)
def test_no_fit_node_while_an_older_attempt_may_be_running_costs_three_members(
    scene: Callable[..., Scene], until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one is somebody's outside of the chain: its process lives here, and makes no step."""
    here = scene(nodes=1)
    monkeypatch.setenv("FTSUPERVISE_OLDER_SECONDS", "1")
    folder = here.rundir.attempt(1)
    folder.mkdir(parents=True)
    pid = os.getpid()
    page = {"attempt": 1, "job_id": "", "at": "2026-11-21T08:00:00+00:00", "host": os.uname().nodename, "pid": pid}
    page |= {"pid_start": processes.identity(pid), "boot_id": processes.boot_id()}
    (folder / "start.json").write_text(json.dumps(page))
    here.train("--steps 3", nodes=1, jobs=8, more="nodes: {health: {command: 'echo GPU 3 is gone; exit 2'}}\n")
    until(lambda: read_brake(here.rundir) is not None and held(here), "the chain on hold", 240)
    brake = read_brake(here.rundir)
    assert brake is not None and "attempt 1 may still be running" in brake.failure, brake
    assert [one.number for one in here.attempts()] == [1], "it was not claimed over"
    assert in_queue(here) == 6, "the third has gone back into the queue"
