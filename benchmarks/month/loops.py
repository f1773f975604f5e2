"""The three training programs of the month. Each adds up numbers that a step alone decides, so the weights at a step are known.

    python loops.py plain      a script without the guard, as public ones are: it prints, saves in place, and has --resume
    python loops.py groups     one replica group of several: it takes its state from the group that has saved last
    python loops.py snapshots  two ranks with the guard: snapshots in memory, checkpoints on the disk

The file ``last`` in the working folder says at which step they end, once it is there. MONTH_STEP is the time of a step.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np

STEP = float(os.environ.get("MONTH_STEP", "0.2"))
SAVE_EVERY, KEEP = 50, 4
LARGE = 20_000


def weights() -> np.ndarray:
    return np.zeros(LARGE)


def learn(state: np.ndarray, step: int) -> None:
    state *= 0.999
    state += np.random.default_rng(step).normal(size=LARGE)


def digest(state: np.ndarray) -> str:
    return hashlib.sha256(state.tobytes()).hexdigest()[:16]


def last() -> int:
    try:
        return int(Path("last").read_text())
    except (FileNotFoundError, ValueError):
        return sys.maxsize


def undisturbed(steps: int) -> str:
    state = weights()
    for step in range(1, steps + 1):
        learn(state, step)
    return digest(state)


def packed(state: np.ndarray, step: int) -> bytes:
    out = io.BytesIO()
    np.savez(out, weights=state, step=step)
    return out.getvalue()


def read(path: Path) -> tuple[np.ndarray, int]:
    with np.load(path) as saved:
        return saved["weights"], int(saved["step"])


def write_all(file: io.FileIO, data: bytes) -> None:
    """On a disk that is nearly full a raw write takes a part, and raises nothing: torch's writers go on until it does."""
    while data:
        data = data[file.write(data) :]


def plain(words: list[str]) -> None:
    """Saves in place, which takes a moment; whoever ends it in that moment leaves a torn file."""
    out, state, done = Path("out"), weights(), 0
    out.mkdir(exist_ok=True)
    if "--resume" in words:
        state, done = read(Path(words[words.index("--resume") + 1]))
        print(f"resumed from step {done}", flush=True)
    step = done
    while step < last():
        time.sleep(STEP)
        step += 1
        learn(state, step)
        print(f"iter {step}: loss {2 + 40 / (step + 10):.4f}, time {1000 * STEP:.2f}ms", flush=True)
        if step % SAVE_EVERY == 0 or step == last():
            data = packed(state, step)
            with (out / f"checkpoint_{step:07}.pth").open("wb", buffering=0) as file:
                write_all(file, data[: len(data) // 2])
                time.sleep(min(0.4, 2 * STEP))
                write_all(file, data[len(data) // 2 :])
            for old in sorted(out.glob("checkpoint_*.pth"))[:-KEEP]:
                old.unlink()
    print(f"weights at step {step}: {digest(state)}", flush=True)


def groups() -> None:
    from ftsupervise import Guard

    name, top = os.environ["REPLICA_GROUP_ID"], Path(os.environ["FTSUPERVISE_CHECKPOINT_DIR"])
    guard, state, step = Guard(), weights(), 0
    for path in sorted(top.glob("g*/step-*.npz"), key=lambda one: one.stem)[-1:]:
        state, step = read(path)
    print(f"{name} goes on after step {step}", flush=True)
    (top / name).mkdir(parents=True, exist_ok=True)
    stop = False
    while step < last() and not stop:
        time.sleep(STEP)
        step += 1
        learn(state, step)
        decision = guard.step(step)
        stop = decision.stop
        if decision.save or stop or step % SAVE_EVERY == 0 or step == last():
            temp = top / name / ".new"
            temp.write_bytes(packed(state, step))
            temp.replace(top / name / f"step-{step:07}.npz")
            guard.saved(step)
            for old in sorted((top / name).glob("step-*.npz"))[:-KEEP]:
                old.unlink()
    if step >= last():
        print(f"weights at step {step}: {digest(state)}", flush=True)
        guard.finished(step)
    guard.close()


def snapshots() -> None:
    from group import Group

    from ftsupervise import Guard

    top = Path(os.environ["FTSUPERVISE_CHECKPOINT_DIR"])
    group = Group(Path(os.environ["FTSUPERVISE_ATTEMPT_DIR"]))
    guard = Guard(rank=group.rank, world=group.world)
    state: dict[str, Any] = {"done": 0, "weights": weights()}
    begun = guard.restore(state=state)
    if begun is None:
        found = guard.latest() if group.rank == 0 else None
        _, step = group.all_reduce(np.zeros(1), int(found.name.removeprefix("step-")) if found else 0)
        if step:
            state["weights"], state["done"] = read(top / f"step-{step:08d}" / "state.npz")
    where = "memory" if begun is not None else "disk"
    print(f"rank {group.rank} goes on after step {state['done']} from {where}", flush=True)
    while state["done"] < last():
        time.sleep(STEP)
        step = state["done"] + 1
        learn(state["weights"], step)
        _, vote = group.all_reduce(np.ones(1), guard.vote())
        state["done"] = step
        guard.snapshot(step)
        decision = guard.step(step, vote)
        if (decision.save or step % SAVE_EVERY == 0 or step == last()) and group.rank == 0:
            with guard.checkpoint(step) as folder:
                (folder / "state.npz").write_bytes(packed(state["weights"], step))
            for old in sorted(top.glob("step-*"))[:-KEEP]:
                guard.remove(old)
        if decision.stop:
            return
    if group.rank == 0:
        print(f"weights at step {state['done']}: {digest(state['weights'])}", flush=True)
    guard.finished(state["done"])


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        plain(sys.argv[2:])
    else:
        {"groups": groups, "snapshots": snapshots}[sys.argv[1]]()
