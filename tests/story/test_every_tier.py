"""Random faults with every tier in play: memory, the disk, the copies. The weights end as an undisturbed run's, bit for bit."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.neighbours.supervised import SupervisedRun

# A loop whose numbers depend on every number before. It hurts itself at random, as the number of its attempt says.
LOOP = """
import io, os, random, shutil, signal, sys
from datetime import datetime, timezone
from pathlib import Path
import numpy as np
from ftsupervise import Guard
from ftsupervise.checkpoints.offload import offload
from ftsupervise.checkpoints.restore import copies_in, restore
from ftsupervise.checkpoints.stores import open_store

steps, faults, far = int(sys.argv[1]), int(sys.argv[2]), open_store(sys.argv[3])
attempt, folder = int(os.environ["FTSUPERVISE_ATTEMPT"]), Path(os.environ["FTSUPERVISE_CHECKPOINT_DIR"])
chance = random.Random(f"fault {attempt} {faults}")
now = lambda: datetime.now(timezone.utc)
guard = Guard(beat_every=0.05, poll=0.05)
weights, place = np.zeros(20_000), {"step": 0, "seen": 0.0}
np.random.seed(1)

def load(path):
    with np.load(path / "state.npz") as kept:
        weights[:] = kept["weights"]
        place.update(step=int(kept["step"]), seen=float(kept["seen"]))
    words = (path / "generator.txt").read_text().split()
    np.random.set_state((words[0], np.array(words[4:], dtype=np.uint32), int(words[1]), int(words[2]), float(words[3])))

def save(path):
    np.savez(path / "state.npz", weights=weights, step=place["step"], seen=place["seen"])
    name, keys, position, has, kept = np.random.get_state()
    (path / "generator.txt").write_text(" ".join(map(str, [name, position, has, repr(float(kept)), *keys])))

source = "copy"
copies, _ = copies_in([far])
if copies and not any(folder.glob("step-*")):  # or the guard would stop: it had saved, and finds nothing
    load(restore(copies[0], folder, now=now))
elif guard.restore(weights=weights, place=place) is not None:
    source = "memory"
else:
    newest = guard.latest()
    source = "disk" if newest else "nothing"
    here = int(newest.name.split("-")[1]) if newest else -1
    if copies and copies[0].manifest.step > here:
        newest, source = restore(copies[0], folder, now=now), "copy"
    if newest is not None:
        load(newest)
print(f"attempt {attempt} begins after step {place['step']} from {source}", flush=True)

at = chance.randrange(place["step"] + 3, place["step"] + 40) if attempt <= faults else steps + 1
kind = chance.choice(["kill", "kill", "exit", "memory", "flip", "cut", "lost"])
for step in range(place["step"] + 1, steps + 1):
    noise = np.random.standard_normal(weights.shape)
    weights *= 0.999
    weights += noise * 0.01
    place["seen"] += float(noise[0])
    place["step"] = step
    guard.step(step)
    guard.snapshot(step)
    if step % 10 == 0:
        with guard.checkpoint(step) as staged:
            save(staged)
        if step % 20 == 0:
            offload(folder / staged.name, far, now=now)
    if step == at:
        newest = max(folder.glob("step-*"), default=None)
        if kind != "kill" and kind != "exit":  # the node's memory is lost too
            for path in Path(os.environ["FTSUPERVISE_SNAPSHOTS"]).glob("*/rank-*"):
                path.unlink()
        if newest is not None and kind == "flip":
            data = bytearray((newest / "state.npz").read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            (newest / "state.npz").write_bytes(data)
        if newest is not None and kind == "cut":
            os.truncate(newest / "state.npz", chance.randrange((newest / "state.npz").stat().st_size))
        if kind == "lost":
            for path in folder.glob("step-*"):
                shutil.rmtree(path)
        print(f"attempt {attempt} fault {kind} at step {step}", flush=True)
        sys.exit(3) if kind == "exit" else os.kill(os.getpid(), signal.SIGKILL)
guard.finished(steps)
import hashlib
print("weights", hashlib.sha256(weights.tobytes() + repr(place).encode()).hexdigest(), flush=True)
"""


def weights(run: SupervisedRun, folder: Path, faults: int, steps: int) -> tuple[str, str]:
    words = ("--in-place", "100", "--same-failure", "0", "--back-off", "0", "--warm", "off", "--verify", "full")
    one = run.start(*words, "--", sys.executable, "-c", LOOP, str(steps), str(faults), str(folder / "far"))
    assert one.wait(240) == 0, one.said()
    said = one.said()
    return said.partition("weights ")[2].split()[0], said


def play(tmp_path: Path, faults: int, steps: int) -> Counter[str]:
    """Both runs; where the attempts began from."""
    ends, begins = [], Counter[str]()
    for name, count in (("undisturbed", 0), ("disturbed", faults)):
        folder = tmp_path / name
        folder.mkdir()
        run = SupervisedRun(folder / "run", folder)
        try:
            end, said = weights(run, folder, count, steps)
        finally:
            run.close()
        ends.append(end)
        begins.update(line.rpartition(" ")[2] for line in said.splitlines() if " begins after step " in line)
    assert ends[0] == ends[1], "bit for bit"
    return begins


@pytest.mark.fault(
    "Random faults one after the other: kills, a lost memory, flipped, cut and lost checkpoints",
    "the run goes on from memory, disk or a copy, and its weights end as an undisturbed run's, bit for bit",
)
def test_a_few_faults_change_no_bit_of_the_weights(tmp_path: Path) -> None:
    begins = play(tmp_path, 5, 250)
    assert begins["memory"], begins
    assert sum(begins.values()) == 7, "two beginnings and five faults"


@pytest.mark.slow
def test_twenty_random_faults_with_every_tier_in_play_change_no_bit_of_the_weights(tmp_path: Path) -> None:
    begins = play(tmp_path, 20, 900)
    assert sum(begins.values()) == 22
    assert begins["memory"] and begins["disk"] and begins["copy"], begins
