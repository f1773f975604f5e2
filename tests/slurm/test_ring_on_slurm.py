"""Restart in place on real Slurm: a rank, a node, a slurmd dies; the brake holds an array; nothing is left on any node."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.switches import read_brake
from tests.slurm.ring_scene import Scene, undisturbed

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


@pytest.mark.fault(
    "A rank is killed",
    "the run starts again in the same job within seconds and resumes from its newest checkpoint",
)
def test_a_killed_rank_is_back_in_the_same_job_and_the_weights_are_those_of_an_undisturbed_run(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2)
    job = here.train("--steps 150 --step-time 0.03 --save-every 20")
    until(lambda: here.trains(1) and "step 50 " in here.log(), "step 50")
    os.kill(here.trains(1)[1], signal.SIGKILL)
    struck = time.time()
    until(lambda: here.trains(2), "the second attempt's first step")
    took = max(float(b.facts["first_at"]) for b in read_beats(here.rundir)) - struck
    until(here.rundir.finished.exists, "the end", 120)
    until(lambda: here.attempts()[-1].ended, "the last page")
    first, second = here.attempts()
    assert first.sign == "killed by SIGKILL", here.log()
    assert first.then.startswith("restarted in place")
    assert second.words == "finished"
    assert first.job_id == second.job_id == f"{job}_1"
    assert second.first_step is not None and second.first_step > 20, "it resumed"
    assert re.findall(r"weights (\w+)", here.log()) == [undisturbed(here.folder, "--steps 150 --step-time 0")]
    until(lambda: not here.queue(), "the end of the queue")
    assert len(here.attempts()) == 2, "the other members left at the gate"
    assert here.type("launch", code=75).startswith("ftsupervise: ")
    print(f"fault to first step of the next attempt: {took:.2f} s; cold: {first.ready} s")


_HANGS_AT_ITS_END = """
import atexit, os, time
again = os.environ["FTSUPERVISE_RESTART"] != "0"
atexit.register(lambda: None if again else time.sleep(600))  # a communicator that waits for its peers
from ftsupervise import Guard
guard = Guard()
for step in range(1, 60 if again else 100_000):
    time.sleep(0.05)
    guard.step(step)
    if step == 30 and os.environ["SLURM_PROCID"] == "1" and not again:
        print("its last words", end="")
        raise ValueError("no such shape")
guard.finished(59)
"""


@pytest.mark.fault(
    "A rank raises and then hangs in its teardown",
    "it tells its exit code first and is not waited for",
)
def test_a_rank_that_failed_and_does_not_end_is_not_waited_for(scene: Callable[..., Scene], until: Until) -> None:
    here = scene(nodes=2)
    (here.folder / "hangs.py").write_text(_HANGS_AT_ITS_END)
    here.launch(f"{sys.executable} hangs.py", jobs=1)
    until(here.rundir.finished.exists, "the end", 120)
    until(lambda: here.attempts()[-1].ended, "the last page")
    first, second = here.attempts()
    assert (first.failure and first.failure.kind, first.sign.partition(" (")[0]) == ("code", "exit 1"), (
        "srun may be slow to pass the traceback on"
    )
    assert first.words.startswith("rank 1 on node-1 exit 1")
    assert "its last words" in here.log()
    assert first.then.startswith("restarted in place")
    assert second.words == "finished"


_CLOSED = """
import os, socket, time
from ftsupervise import Guard
again, rank = os.environ["FTSUPERVISE_RESTART"] != "0", os.environ["SLURM_PROCID"]
with Guard() as guard:
    guard.step(1)
    while not again and not os.path.exists("go"):  # the agents of both nodes watch us
        time.sleep(0.05)
    peer = socket.socket(socket.AF_UNIX)
    if again:
        pass
    elif rank == "1":
        peer.bind("peer")
        peer.listen()
        other, _ = peer.accept()
        fill = os.memfd_create("fill")  # as a GPU's memory: freed after the connections are closed, before the process is gone
        for _ in range(600):
            os.write(fill, bytes(1 << 20))
        os.kill(os.getpid(), 9)
    else:
        while peer.connect_ex("peer"):
            time.sleep(0.05)
        if not peer.recv(1):
            raise RuntimeError("Connection closed by peer")
    guard.finished(1)
"""


@pytest.mark.fault("A rank is killed and another raises because of it", "the killed one is named")
def test_a_killed_rank_is_named_and_not_the_one_that_has_lost_its_connection(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2)
    (here.folder / "closed.py").write_text(_CLOSED)
    here.launch(f"{sys.executable} closed.py", jobs=1)
    ranks = until(lambda: here.trains(1), "the ranks")
    until(lambda: here.watched(*ranks.values()), "the agents to have found them")
    (here.folder / "go").touch()
    until(here.rundir.finished.exists, "the end", 120)
    until(lambda: here.attempts()[-1].ended, "the last page")
    first = here.attempts()[0]
    assert first.sign == "killed by SIGKILL", here.log()
    assert first.words.startswith("rank 1 on node-1 ")


@pytest.mark.fault("Ranks ignore SIGTERM", "they are killed; the restart does not wait for Slurm's KillWait")
def test_ranks_that_do_not_hear_sigterm_do_not_hold_the_restart_up_for_slurms_kill_wait(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2, kill_wait=120)
    deaf = (
        "if [ $FTSUPERVISE_RESTART = 1 ]; then echo again; exit 0; fi; trap '' TERM; echo up; "
        "[ $SLURM_PROCID = 1 ] && sleep 1 && kill -9 $$; while :; do sleep 0.2; done"
    )
    began = time.monotonic()
    here.launch(deaf, jobs=1)
    until(lambda: len(re.findall("^again$", here.log(), re.M)) == 2, "the second attempt on both nodes", 90)
    first, second = (json.loads((here.rundir.attempt(n) / "start.json").read_text())["at"] for n in (1, 2))
    print(f"from start to start, with a second of life between: {first} {second}")
    assert time.monotonic() - began < 90
    assert "rank 1 on node-1 killed by SIGKILL: the other ranks have" in here.log()


@pytest.mark.fault(
    "A node crashes, and the job has a spare one",
    "the next attempt runs on the spare node, in the same allocation",
)
def test_a_crashed_node_is_replaced_by_the_spare_in_the_same_allocation(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=3)
    here.train("--steps 200 --step-time 0.02 --save-every 20", spare_nodes=1, jobs=2)
    until(lambda: here.trains(1) and "step 50 " in here.log(), "step 50")
    here.lose("node-1")
    until(here.rundir.finished.exists, "the end", 150)
    until(lambda: here.attempts()[-1].ended, "the last page")
    first, second = here.attempts()[0], here.attempts()[-1]
    assert first.nodes == ("node-0", "node-1")
    assert (first.failure and first.failure.kind, first.then.partition(":")[0]) == ("node", "restarted in place")
    assert second.nodes == ("node-0", "node-2")
    assert second.words == "finished"
    assert second.job_id == first.job_id


@pytest.mark.fault("A node that the job has lost comes back", "it is not chosen again by this job")
def test_a_node_that_the_job_has_lost_is_not_chosen_again_when_it_is_well(
    scene: Callable[..., Scene], until: Until
) -> None:
    """With --no-kill Slurm takes a failed node out of the job for good; sinfo calls it idle as soon as it is back."""
    here = scene(nodes=3, slurmd_timeout=6)
    here.train("--steps 100000 --step-time 0.02 --save-every 20", spare_nodes=1, jobs=1)
    until(lambda: here.trains(1), "the first attempt")
    here.sandbox.node("node-1", "crash")
    until(lambda: here.trains(2), "the second attempt", 120)
    held = ["squeue", "-h", "-n", here.name, "-t", "RUNNING", "-o", "%N"]
    until(lambda: here.sandbox.run(held).split() == ["node-[0,2]"], "Slurm to take the node away", 120)
    here.sandbox.node("node-1", "start")
    until(lambda: "node-1 idle" in here.sandbox.run(["sinfo", "-h", "-N", "-o", "%N %T"]), "the node to be well")
    os.kill(here.trains(2)[1], signal.SIGKILL)
    until(lambda: here.trains(3), "the third attempt", 90)
    assert here.attempts()[2].nodes == here.attempts()[1].nodes == ("node-0", "node-2")
    here.type("kill", "--yes")
    until(lambda: not here.queue(), "the end of the queue")


@pytest.mark.fault(
    "The controller is away, and what a victim raised is told before the rank that was killed",
    "the killed rank is named: what its node saw, and what srun said, before anybody ended the others counts. Slurm "
    "26.05's srun says nothing meanwhile: the first that was heard is named, and the run goes on",
)
def test_with_the_controller_away_the_killed_rank_is_named_though_its_agent_is_late_and_not_the_one_that_raised(
    scene: Callable[..., Scene], until: Until
) -> None:
    """The agent of the killed rank's node does not get its turn: what the other rank raised is told first, and nobody can be
    asked who was dying before the others are ended."""
    here = scene(nodes=3)
    here.train("--steps 100000 --step-time 0.05", jobs=1)
    ranks = until(lambda: here.trains(1), "the first attempt")
    until(lambda: here.watched(*ranks.values()), "the agents to see the ranks")
    quiet = here.sandbox.run(["scontrol", "--version"]).split()[-1] >= "26.05"
    here.cut_off("node-1")
    here.sandbox.controller("pause")
    os.kill(ranks[0], signal.SIGSTOP)
    os.kill(ranks[1], signal.SIGKILL)
    log = here.rundir.attempt(1) / "run.log"
    try:
        until(lambda: quiet or "node-1: task 1: Killed" in here.log(), "srun to say it", 30)
        os.kill(ranks[0], signal.SIGCONT)
        until(lambda: "the other ranks have" in log.read_text(), "the ring to act", 30)
        until(lambda: "SIGKILL" in log.read_text().partition("the other ranks have")[2], "the others to be ended", 30)
    finally:
        here.sandbox.controller("cont")
    until(lambda: here.attempts()[0].cause, "the end", 120)
    cause = here.attempts()[0].cause
    first = "rank 0 on node-0 exit 1" if quiet else "rank 1 on node-1 killed by SIGKILL"
    assert cause is not None and cause.words().startswith(first)
    until(lambda: here.trains(2), "that it goes on", 120)
    here.type("kill", "--yes")
    until(lambda: not here.queue(), "the end of the queue", 120)


@pytest.mark.fault(
    "Ranks outlive their slurmd",
    "nothing they write reaches the newer attempt, and the agent there ends them",
)
@pytest.mark.parametrize("cut_off", [True, False])
def test_ranks_that_outlive_their_slurmd_write_nothing_after_their_successors_have_begun(
    scene: Callable[..., Scene], until: Until, cut_off: bool
) -> None:
    """No srun reaches them; each trains alone here, so that nothing but the fence stops the old ones; or, where our agent is
    heard, it does: those are deaf."""
    here = scene(nodes=3)
    alone = (
        "import os, sys, time\nfrom pathlib import Path\nfrom ftsupervise import Guard\n"
        "attempt, rank = os.environ['FTSUPERVISE_ATTEMPT'], int(os.environ['SLURM_PROCID'])\n"
        "folder = Path(os.environ['FTSUPERVISE_CHECKPOINT_DIR'])\n"
        "guard = Guard(rank=rank, world=1, poll=0.02, beat_every=0.1, signals=())\n"
        "for step in range(1, 100000):\n"
        "    time.sleep(0.01)\n"
        "    decision = guard.step(step)\n"
        "    if guard.may_save():\n"
        "        (folder / f'{attempt}-{rank}').write_text(str(step))\n"
        "    if decision.stop and (rank, attempt) != (int(sys.argv[1]), '1'): sys.exit(0)\n"
    )
    (here.folder / "alone.py").write_text(alone)
    here.launch(f"{sys.executable} alone.py {-1 if cut_off else 1}", spare_nodes=1, jobs=1)
    old = until(lambda: here.trains(1), "the first attempt")[1]
    if cut_off:
        here.cut_off("node-1")
    here.lose("node-1", "kill")
    until(lambda: here.trains(2), "the second attempt", 90)
    page = (here.rundir.attempt(1) / "end.json").read_text()
    until(
        lambda: not Path(f"/proc/{old}").exists() or "Z" in Path(f"/proc/{old}/stat").read_text().split()[2], "its end"
    )
    began = here.rundir.attempt(2).stat().st_ctime
    wrote = (here.rundir.checkpoints / "1-1").stat().st_mtime
    assert wrote <= began + 0.5, "at most the write that had begun"
    assert (here.rundir.attempt(1) / "end.json").read_text() == page
    assert {b.facts["attempt"] for b in read_beats(here.rundir)} == {"2"}
    here.type("kill", "--yes")
    until(lambda: not here.queue(), "the end of the queue")


@pytest.mark.fault("The program fails at import, at each start", "the brake stops the chain and holds its members")
def test_a_run_that_fails_at_import_is_stopped_by_the_brake_and_its_members_are_held(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2)
    job = here.launch(f"{sys.executable} -c 'import no_such_module_here'", jobs=5)
    until(lambda: read_brake(here.rundir) is not None and "Held" in here.queue(), "the brake", 60)
    until(lambda: here.queue().count("\n") == 0 and "RUNNING" not in here.queue(), "the end of the first member")
    assert here.queue().startswith(f"{job}_[2-5%1] PENDING JobHeld")
    assert {a.sign for a in here.attempts()} <= {"exit 1", "exit 1 (ModuleNotFoundError)"}, here.log()
    assert [a.job_id for a in here.attempts()] == [f"{job}_1"] * 3
    checked = here.type("check", "brake", code=2)
    assert "no_such_module_here" in checked or not any(a.line for a in here.attempts()), here.log()
    here.rundir.finished.touch()  # so that what is released leaves at the gate
    said = here.type("clear", "--brake")
    assert f"Job {job} may start again" in said
    until(lambda: not here.queue(), "the members to leave", 60)


@pytest.mark.fault("scancel, or the supervisor is killed", "no process of the run is left on any node")
def test_scancel_and_a_killed_supervisor_leave_nothing_on_any_node(scene: Callable[..., Scene], until: Until) -> None:
    here = scene(nodes=2, kill_wait=30)
    job = here.train("--steps 100000 --step-time 0.02 --save-every 20", jobs=3)
    until(lambda: here.trains(1), "the first member")
    here.sandbox.run(["scancel", f"{job}_1"])
    until(lambda: here.trains(2), "the second member", 60)
    start = json.loads((here.rundir.attempt(2) / "start.json").read_text())
    os.kill(start["pid"], signal.SIGKILL)
    until(lambda: here.trains(3), "the third member", 60)
    third = set(here.trains(3).values())
    assert {a.words for a in here.attempts()[:2]} == {"cancelled or preempted (SIGTERM)", "ended without a record"}
    here.sandbox.run(["scancel", job])
    until(lambda: not here.queue() and not here.processes(), "nothing left", 60)
    assert third
    assert [a.words for a in here.attempts()][2] == "cancelled or preempted (SIGTERM)"
