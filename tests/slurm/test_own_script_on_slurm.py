"""A script without the guard in a chain on a real Slurm: begun anew it is held, and so it is until somebody says it is done."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.switches import read_brake, read_finished
from tests.neighbours.own_script import nano
from tests.slurm.ring_scene import Scene
from tests.slurm.test_chain_on_slurm import held

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


@pytest.mark.chain(
    "A script without the guard begins at step 0 in each member, over the checkpoint that the one before had left",
    "What the first had saved is kept in `RUN/kept`; after the second time the rest is held",
    "3",
    "`attempt 2 began at step 0, attempt 1 had reached 45: it does not resume`, the likely reason, and `launch.resume`",
)
def test_members_that_begin_anew_after_each_other_are_held_after_the_second_time_and_lose_nothing(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=1)
    (here.folder / "own.py").write_text(nano(1000))
    (here.folder / "deaths").write_text("9")
    here.launch(f"{sys.executable} own.py", nodes=1, jobs=8, restart={"in_place": 0, "back_off": "0s"})
    until(lambda: read_brake(here.rundir) is not None and held(here), "the chain on hold", 180)
    brake = read_brake(here.rundir)
    assert brake is not None and brake.failure == "it does not resume" and "attempt 3 began at step 0" in brake.why
    assert [one.first_step for one in here.attempts()] == [0, 0, 0]
    assert (here.rundir.root / "kept/0001/ckpt.pt").read_text().startswith("40 by process")


@pytest.mark.chain(
    "A script without the guard has trained and leaves with 0",
    "The others wait, held, until `clear --finished` or `clear --brake`; `launch.finished_by` decides it beforehand",
    "none",
    "`is it finished? it left with 0`, and both commands",
)
def test_a_member_that_leaves_with_0_holds_the_others_until_somebody_says_that_it_is_finished(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=1)
    (here.folder / "own.py").write_text(nano(40))
    (here.folder / "deaths").write_text("0")
    here.launch(f"{sys.executable} own.py", nodes=1, jobs=4)
    until(lambda: read_brake(here.rundir) is not None and held(here), "the question", 120)
    brake = read_brake(here.rundir)
    assert brake is not None and brake.asks and len(here.attempts()) == 1
    assert "is it finished? it left with 0" in here.type("check", "brake", code=1)
    here.type("clear", "--finished")
    until(lambda: not here.queue().strip(), "the end of the members", 60)
    mark = read_finished(here.rundir)
    assert len(here.attempts()) == 1 and mark is not None and mark.step == 40


@pytest.mark.chain(
    "Slurm warns before the limit, and no process of the command catches the signal",
    "Nothing is sent, and it trains on to the limit; `srun` would hand the signal on, and a Python without a handler "
    "dies of it",
    "the one that was over",
    "`nothing in the command catches it, so nothing is sent: it trains on to the end of the job`",
)
@pytest.mark.parametrize("command", ["{python} own.py", "cd . && {python} own.py | cat"], ids=["program", "shell code"])
def test_a_script_that_does_not_catch_the_warning_is_not_killed_by_it(
    scene: Callable[..., Scene], until: Until, command: str
) -> None:
    """srun hands SIGUSR1 on to its ranks, and a Python without a handler dies of it: minutes of each job were lost."""
    here = scene(nodes=1)
    (here.folder / "own.py").write_text(nano(100_000))
    (here.folder / "deaths").write_text("0")
    job = here.launch(command.format(python=sys.executable), nodes=1, jobs=1)
    until(lambda: "iter 10:" in here.log(), "steps", 60)
    until(
        lambda: [one.host for one in read_beats(here.rundir)] == ["node-0"], "the beat, with the name of the node", 60
    )
    (beat,) = read_beats(here.rundir)
    assert b"own.py" in (words := Path(f"/proc/{beat.pid}/cmdline").read_bytes()) and b"srun" not in words
    here.sandbox.run(["scancel", "--batch", "--signal=USR1", job])
    log = here.rundir.attempt(1) / "run.log"
    until(lambda: "the job ends soon" in log.read_text(), "the warning", 30)
    assert "nothing in the command catches it, so nothing is sent" in log.read_text()
    now = int(here.log().rpartition("iter ")[2].partition(":")[0])
    until(lambda: f"iter {now + 40}:" in here.log(), "that it trains on", 60)
    assert here.attempts()[0].ended is None
    here.sandbox.run(["scancel", job])
    until(lambda: here.attempts()[0].ended is not None, "its end", 60)
    assert "cancelled or preempted" in here.attempts()[0].words


# rank 0 makes a step once rank 1 has made it; both only sleep and look
PAIR = """
import os, time
from pathlib import Path

rank = int(os.environ["SLURM_PROCID"])
here = Path(os.environ["FTSUPERVISE_ATTEMPT_DIR"])
for at in range(2000):
    if rank:
        (here / "other.tmp").write_text(str(at))
        (here / "other.tmp").rename(here / "other")
    else:
        while not (here / "other").exists() or int((here / "other").read_text()) < at:
            time.sleep(0.2)
        print(f"iter {at}: loss {4 - at / 1000:.4f}, time 80.12ms", flush=True)
    time.sleep(0.2)
"""


def test_a_stopped_process_on_another_node_is_seen_without_a_guard(scene: Callable[..., Scene], until: Until) -> None:
    here = scene(nodes=2)
    (here.folder / "pair.py").write_text(PAIR)
    here.launch(f"{sys.executable} pair.py", jobs=1, restart={"hang": {"at_least": "6s"}})
    until(lambda: here.attempts() and (here.attempts()[0].last_step or 0) > 20, "steps", 90)
    other = until(lambda: ranks_of(here, "node-1"), "the rank on the other node")
    os.kill(other[0], signal.SIGSTOP)
    until(lambda: here.attempts()[0].ended is not None, "that its standstill is seen", 120)
    assert here.attempts()[0].words.startswith("hang: rank 1 on node-1 is stopped"), here.attempts()[0].words
    evidence = here.rundir.attempt(1) / "evidence"
    assert "State:\tT (stopped)" in (evidence / "rank-1.txt").read_text()
    until(lambda: len(here.attempts()) > 1 and here.attempts()[1].last_step, "that it goes on in the same job", 90)


def ranks_of(here: Scene, node: str) -> list[int]:
    mark = processes.marked("FTSUPERVISE_ATTEMPT_DIR").get(str(here.rundir.attempt(1)), [])
    env = {one.pid: processes.environment(one.pid) for one in mark if "pair.py" in " ".join(words_of(one.pid))}
    return [pid for pid, names in env.items() if names.get("SLURMD_NODENAME") == node and "SLURM_PROCID" in names]


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
