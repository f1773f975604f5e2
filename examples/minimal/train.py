"""A real training run in one screen: handwritten digits, two layers, momentum SGD, data-parallel, resumable bit for bit.

    python train.py                          alone
    srun -n2 python train.py                 two ranks
    ftsupervise run -- srun python train.py  supervised

The lines marked GUARD are all that ftsupervise needs.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one thread: fast enough, and the same bits every time

import argparse
import gzip
import hashlib
import json
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from group import Group

from ftsupervise import Guard  # GUARD

BATCH, HIDDEN, RATE, MOMENTUM, KEEP = 128, 64, 0.1, 0.9, 3
SHAPES = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))


def main() -> None:
    args = arguments()
    checkpoints = Path(os.environ.get("FTSUPERVISE_CHECKPOINT_DIR", "checkpoints"))
    group = Group(Path(os.environ.get("FTSUPERVISE_ATTEMPT_DIR", checkpoints)))
    guard = Guard(rank=group.rank, world=group.world)  # GUARD
    images, labels = digits()
    rng = np.random.default_rng(args.seed)
    weights = rng.normal(0, 0.1, sum(np.prod(shape, dtype=int) for shape in SHAPES))
    momentum = np.zeros_like(weights)
    first = 1
    newest = latest(guard, group, checkpoints)  # GUARD
    if newest is not None:
        weights, momentum, first = load(newest, rng)
    say(
        group,
        f"{'resumed from ' + newest.name if newest else 'started'} at world size {group.world}, to step {args.steps}",
    )

    for step in range(first, args.steps + 1):
        batch = rng.integers(0, len(images), BATCH)[group.rank :: group.world]
        gradient, loss, right = backward(weights, images[batch], labels[batch])
        time.sleep(args.step_time)
        total, vote = group.all_reduce(np.append(gradient, (loss, right)), guard.vote())  # GUARD
        momentum = MOMENTUM * momentum + total[:-2] / BATCH
        weights = weights - RATE * momentum
        if step % args.log_every == 0:
            say(group, f"step {step} loss {total[-2] / BATCH:.4f} acc {total[-1] / BATCH:.3f}")

        decision = guard.step(step, vote)  # GUARD
        if group.rank == 0 and (decision.save or step % args.save_every == 0 or step == args.steps):
            with guard.checkpoint(step) as folder:  # GUARD
                save(folder, weights, momentum, step, rng)
            say(group, f"saved step {step}")
            for old in sorted(checkpoints.glob("step-*"))[:-KEEP]:
                guard.remove(old)
        if decision.stop:
            say(group, f"stopped at step {step}: {decision.reason}")
            return

    say(group, f"finished at step {args.steps}, weights {digest(weights)}")
    guard.finished(args.steps)  # GUARD


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-time", type=float, default=0.02, help="seconds each step is slowed by")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def say(group: Group, text: str) -> None:
    if group.rank == 0:
        print(text, flush=True)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """1,797 images of 8 x 8 as rows of 64, and their labels: the file scikit-learn ships, without importing it."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("this example trains on the digits that scikit-learn ships: pip install scikit-learn")
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    return table[:, :64] / 16, table[:, 64].astype(int)


def unpack(flat: np.ndarray) -> list[np.ndarray]:
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in SHAPES])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), SHAPES, strict=True)]


def backward(flat: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Summed gradient, summed loss and the number that is right, over these images."""
    w1, b1, w2, b2 = unpack(flat)
    hidden = np.maximum(x @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    scores -= scores.max(axis=1, keepdims=True)
    logp = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    rows = np.arange(len(y))
    delta = np.exp(logp)
    delta[rows, y] -= 1
    back = delta @ w2.T * (hidden > 0)
    gradient = (x.T @ back, back.sum(axis=0), hidden.T @ delta, delta.sum(axis=0))
    return np.concatenate([part.ravel() for part in gradient]), -logp[rows, y].sum(), (logp.argmax(axis=1) == y).sum()


def save(folder: Path, weights: np.ndarray, momentum: np.ndarray, step: int, rng: np.random.Generator) -> None:
    np.savez(
        folder / "state.npz", weights=weights, momentum=momentum, step=step, rng=json.dumps(rng.bit_generator.state)
    )


def latest(guard: Guard, group: Group, folder: Path) -> Path | None:
    """The newest checkpoint that is whole. Rank 0 looks and tells the others, so that all begin from the same one."""
    found = guard.latest() if group.rank == 0 else None
    _, step = group.all_reduce(np.zeros(1), int(found.name.removeprefix("step-")) if found else 0)
    return folder / f"step-{step:08d}" if step else None


def load(checkpoint: Path, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    with np.load(checkpoint / "state.npz") as saved:
        rng.bit_generator.state = json.loads(str(saved["rng"]))
        return saved["weights"], saved["momentum"], int(saved["step"]) + 1


def digest(weights: np.ndarray) -> str:
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    main()
