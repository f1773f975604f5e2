"""A supervised run goes on from the node's memory after a fault: real ranks, real kills, on this machine."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftsupervise import Guard
from ftsupervise.host import processes
from ftsupervise.rundir.paths import ENV_RESTART, ENV_SNAPSHOTS
from ftsupervise.snapshots import room
from ftsupervise.snapshots.keeper import place_for
from ftsupervise.snapshots.room import SnapshotPlace
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import Program, SupervisedRun

# Ranks that count in step with each other through the file system, without any collective: rank 0 waits for the others.
RANKS = """
import os, random, subprocess, sys, time
from collections.abc import Iterator
from pathlib import Path
from ftsupervise import Guard

WORLD = {world}
if "COUNTED" not in os.environ:  # the launcher: it ends with the first rank that fails, and the others with it
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", sys.argv[1]],
            env={{**os.environ, "COUNTED": "1", "RANK": str(n), "WORLD_SIZE": str(WORLD)}},
        )
        for n in range(WORLD)
    ] if len(sys.argv) > 1 else []
    while ranks:
        for one in list(ranks):
            code = one.poll()
            if code:
                for other in ranks:
                    other.kill()
                sys.exit(code if code > 0 else 128 - code)
            if code == 0:
                ranks.remove(one)
        time.sleep(0.005)
    sys.exit(0)

rank, attempt = int(os.environ["RANK"]), int(os.environ["FTSUPERVISE_ATTEMPT"])
folder = Path(os.environ["FTSUPERVISE_CHECKPOINT_DIR"])
meet = Path(os.environ["FTSUPERVISE_ATTEMPT_DIR"])
guard = Guard(beat_every=0.05, poll=0.05)
state = {{"sum": 0, "done": 0}}
random.seed(rank)
begun = guard.restore(state=state)
print("snapshots in", os.environ["FTSUPERVISE_SNAPSHOTS"], flush=True)
where = "memory" if begun is not None else "disk"
if begun is None:
    found = sorted(int(p.name.partition("-")[0]) for p in folder.glob(f"*-{{rank}}"))
    if found:
        state["sum"] = int((folder / f"{{found[-1]}}-{{rank}}").read_text())
        state["done"] = found[-1]
print(f"rank {{rank}} attempt {{attempt}} begins after step {{state['done']}} from {{where}}", flush=True)
first = state["done"] + 1
for step in range(first, {steps} + 1):
    with (meet / f"{{rank}}").open("a") as mine:
        mine.write("x")
    while any(not (meet / f"{{n}}").exists() or (meet / f"{{n}}").stat().st_size < step - first for n in range(WORLD)):
        time.sleep(0.001)
    time.sleep(0.01)
    {fault}
    state["sum"] += step * (rank + 1)
    state["done"] = step
    guard.step(step)
    guard.snapshot(step)
    if step % 20 == 0:
        (folder / f"{{step}}-{{rank}}").write_text(str(state["sum"]))
        guard.saved(step)
guard.finished({steps})
print(f"rank {{rank}} sum {{state['sum']}}", flush=True)
"""


def ranks(fault: str, world: int = 2, steps: int = 60) -> tuple[str, ...]:
    text = RANKS.format(world=world, steps=steps, fault=fault)
    return sys.executable, "-c", text, text


def folders_of(one: Program) -> set[str]:
    """The folders in memory that its ranks were given."""
    return set(re.findall(r"snapshots in (/dev/shm/\S+)", one.said()))


@pytest.fixture(autouse=True)
def nothing_left_in_memory(run: SupervisedRun) -> Iterator[None]:
    yield
    assert not [folder for one in run.members for folder in folders_of(one) if Path(folder).exists()]


@pytest.mark.fault(
    "A rank is killed, and the loop makes snapshots",
    "the next attempt goes on from memory: no more steps are made again than lie between two snapshots",
)
def test_a_killed_rank_costs_no_more_steps_than_lie_between_two_snapshots(run: SupervisedRun) -> None:
    fault = "if attempt < 4 and step == 13 + 10 * attempt + 4 and rank == 1: os.kill(os.getpid(), 9)"
    one = run.start("--in-place", "5", "--warm", "off", "--", *ranks(fault))
    assert one.wait(60) == 0, one.said()
    said = one.said()
    for rank in (0, 1):
        assert f"rank {rank} sum {sum(range(61)) * (rank + 1)}" in said
    first, *others = run.attempts()
    assert first.begins is None
    assert len(others) == 3
    for number, attempt in enumerate(others, 2):
        killed = 13 + 10 * (number - 1) + 4
        assert attempt.begins is not None, said
        assert attempt.begins.source == "memory"
        assert attempt.begins.step is not None and killed - 3 <= attempt.begins.step < killed
        assert attempt.begins.again is not None and attempt.begins.again <= 2
        assert f"attempt {number} begins after step {attempt.begins.step} from memory" in said
    assert others[-1].words == "finished"


@pytest.mark.fault(
    "Attempts fail from the same snapshot (its state may be poisoned)",
    "the one before is used, then the disk",
)
def test_a_snapshot_from_which_attempts_fail_is_not_used_for_ever(run: SupervisedRun) -> None:
    """A state may be poisoned: the older one in memory is tried, then the disk."""
    fault = "if step == 47 and rank == 0 and where == 'memory' or attempt == 1 and step == 47: sys.exit(3)"
    one = run.start("--in-place", "20", "--same-failure", "0", "--back-off", "0", "--warm", "off", "--", *ranks(fault))
    assert one.wait(60) == 0, one.said()
    begins = [attempt.begins for attempt in run.attempts()[1:]]
    assert all(one is not None for one in begins)
    found = [(one.source, one.step) for one in begins if one]
    assert found[0] == ("memory", 46) and found[-1] == ("disk", 40), begins
    assert found[1:-1] in ([], [("memory", 44)]), "the one before, where no rank has written over it"


@pytest.mark.fault(
    "The supervisor is killed, and its snapshots stay in memory",
    "the next job on the node removes them",
)
def test_the_folder_of_a_killed_supervisor_is_removed_by_the_next_one(run: SupervisedRun) -> None:
    one = run.start("--grace", "0.1", "--", *ranks("", steps=100_000))
    one.until_said("rank 1 attempt 1 begins")
    mine = wait_until(lambda: [f for f in folders_of(one) if any(Path(f).glob("*/rank-1"))], "snapshots")
    one.kill()
    one.wait()
    wait_until(lambda: not [f for f in mine if _in_use(f)], "the ranks end with their supervisor")
    two = run.start("--", sys.executable, "-c", "pass")
    assert two.wait(60) == 0
    assert not [folder for folder in mine if Path(folder).exists()]


@pytest.mark.slow
def test_without_room_or_by_a_setting_there_are_none_and_the_run_goes_on(run: SupervisedRun) -> None:
    fault = "if attempt == 1 and step == 47 and rank == 1: os.kill(os.getpid(), 9)"
    one = run.start("--in-place", "5", "--guard-memory", "0.06", "--warm", "off", "--", *ranks(fault))
    one.wait(60)
    said = one.said()
    assert "no snapshots" in said
    assert "attempt 2 begins after step 40 from disk" in said
    assert [one.begins for one in run.attempts()] == [None, None]


def _in_use(folder: str) -> bool:
    return folder in processes.marked(ENV_SNAPSHOTS)


def test_ranks_that_start_before_their_nodes_agent_have_snapshots_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = room.new_folder("late")
    for name, value in {ENV_SNAPSHOTS: folder, ENV_RESTART: "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    guard, state = Guard(), {"sum": 0}
    assert guard.restore(state=state) is None
    assert not guard.snapshot(2)
    lock = room.make(folder)
    assert lock is not None
    try:
        wait_until(lambda: guard.snapshot(4), "the first snapshot")
    finally:
        room.remove(folder)
        os.close(lock)


@pytest.mark.parametrize("how", ["fails", "is told to stop", "finishes"])
def test_nothing_is_left_in_memory_when_the_job_ends(run: SupervisedRun, how: str) -> None:
    fault = {"fails": "if step == 30: sys.exit(3)", "finishes": ""}.get(how, "")
    one = run.start("--grace", "1", "--", *ranks(fault, steps=100_000 if how == "is told to stop" else 40))
    mine = wait_until(lambda: [f for f in folders_of(one) if any(Path(f).glob("*/rank-0"))], "snapshots")
    if how == "is told to stop":  # as Slurm does at the time limit
        one.send_signal(signal.SIGTERM)
    one.wait(60)
    assert not [folder for folder in mine if Path(folder).exists()]


def test_the_settings_turn_it_all_off() -> None:
    assert place_for("7", 0.02, {"SNAPSHOT_EVERY": "off"}) == SnapshotPlace()
    assert "-7-" in place_for("7", 0.02, {}).folder
