"""Asked to stop is allowed to save: the next member, on free nodes, begins when its predecessor has left."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.paths import ENV_RUN_DIR
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]

_SAVES_LONG = """
import os, time
from ftsupervise import Guard
guard = Guard()
found = guard.latest()
step = int(found.name.removeprefix("step-")) if found else 0
print("begins behind", step, flush=True)
while True:
    step += 1
    time.sleep(0.05)
    decision = guard.step(step)
    if decision.save:
        print("saves", step, flush=True)
        with guard.checkpoint(step) as folder:
            (folder / "state").write_text(str(step))
            time.sleep(6)
        print("saved", step, flush=True)
    if decision.stop:
        break
"""


@pytest.mark.chain(
    "a member is cancelled while it saves, and Slurm starts the next one on free nodes",
    "the next one waits until the save is made, at most KillWait and 10 s, and goes on from it",
    "1",
    "`was asked to stop and may be about to save`",
)
def test_the_member_after_a_cancelled_one_waits_for_its_save_and_goes_on_from_it(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2, kill_wait=30)
    (here.folder / "saves.py").write_text(_SAVES_LONG)
    job = here.launch(f"{sys.executable} saves.py", jobs=3, nodes=1)
    until(lambda: here.trains(1, 1) and (here.attempts()[-1].last_step or 0) > 20, "steps of the first member")
    here.sandbox.run(["scancel", f"{job}_1"])
    until(lambda: here.trains(2, 1), "the second member", 90)
    first, second = here.attempts()
    assert (first.job_id, second.job_id) == (f"{job}_1", f"{job}_2")
    assert first.words == "cancelled or preempted (SIGTERM)", here.log()
    saved = re.search(r"^saved (\d+)$", here.log(), re.M)
    assert saved and f"begins behind {saved[1]}\n" in here.log(), here.log()
    assert second.first_step == int(saved[1]) + 1
    assert f"attempt 1 was asked to stop and may be about to save in job {job}_1; waiting for its end" in here.log()


@pytest.mark.chain(
    "somebody cancels a link of a daisy chain that waits",
    "the links behind it wait for all before it; one that begins all the same waits for the one that runs",
    "1",
    "`is still running in job`",
)
def test_a_link_that_is_cancelled_lets_nobody_begin_beside_the_one_that_runs(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2, kill_wait=30)
    (here.folder / "saves.py").write_text(_SAVES_LONG)
    first = int(here.launch(f"{sys.executable} saves.py", jobs=3, nodes=1, chain="daisy"))
    until(lambda: here.trains(1, 1), "the first member")
    here.sandbox.run(["scancel", str(first + 1)])
    until(lambda: str(first + 1) not in here.queue(), "one link less")
    asked = ["squeue", "-h", "-j", str(first + 2), "-o", "%T %E"]
    assert f"PENDING afterany:{first}(unfulfilled)" in here.sandbox.run(asked)
    # as with a chain of an older version: Slurm starts it beside the one that runs
    here.sandbox.run(["scontrol", "update", f"JobId={first + 2}", "Dependency="])
    until(lambda: "attempt 1 is still running in job" in here.log(), "that it waits", 90)
    assert len(here.attempts()) == 1
    here.sandbox.run(["scancel", str(first)])
    until(lambda: here.trains(2, 1), "the next one", 90)
    assert here.attempts()[1].first_step != 1, "nothing is lost"


_DEAF = "trap '' TERM; echo up; while :; do sleep 0.2; done"


@pytest.mark.chain(
    "`scancel` on a cluster with another `KillWait` than 30 s",
    "the ranks have as long as Slurm gives them, less 5 s (of a short one a quarter): SIGKILL does not cut a save "
    "that Slurm waits for",
    "the one that was cancelled",
    "nothing",
)
@pytest.mark.parametrize(("kill_wait", "grace"), [(45, "40"), (8, "6")])
def test_a_command_has_as_long_to_leave_as_slurm_gives_it(
    scene: Callable[..., Scene], until: Until, kill_wait: int, grace: str
) -> None:
    """With 25 s always, a save of half a minute would be cut where Slurm waits longer."""
    here = scene(nodes=1, kill_wait=kill_wait)
    job = here.launch(_DEAF, jobs=1, nodes=1)
    until(lambda: "\nup\n" in here.log(), "the rank", 60)
    here.sandbox.run(["scancel", f"{job}_1" if "_" in here.queue() else job])
    until(
        lambda: f"SIGTERM: passed on to the command; SIGKILL in {grace} s for the rest" in here.log(), "the grace", 30
    )
    processes.end_all(lambda: processes.marked(ENV_RUN_DIR).get(str(here.rundir.root), []), 10)


@pytest.mark.chain(
    "`scancel`, or the limit, of a job of one node whose ranks ignore SIGTERM",
    "they are killed and the end is on record before Slurm kills the supervisor too",
    "the one that was ended",
    "nothing",
)
def test_the_end_of_ranks_that_ignore_sigterm_is_on_record_before_slurm_kills_all(
    scene: Callable[..., Scene], until: Until
) -> None:
    """A job that ends gets no step any more, by which its ranks were to be killed: the question took the last seconds."""
    here = scene(nodes=1, kill_wait=12)
    job = here.launch(_DEAF, jobs=1, nodes=1)
    until(lambda: "\nup\n" in here.log(), "the rank", 60)
    here.sandbox.run(["scancel", f"{job}_1" if "_" in here.queue() else job])
    until(lambda: not here.queue(), "the end of the job", 60)
    (ended,) = here.attempts()
    assert ended.ended is not None and ended.words == "cancelled or preempted (SIGTERM)", here.log()
