"""How long does a snapshot in memory hold the training loop up? Beside one memcpy of the same bytes, in the same run.

    python benchmarks/snapshots.py [MB of state]

The state is a model with the two moments of Adam, in arrays of 4 MB and of 64 numbers. With torch they are tensors, and
``torch.save`` into the same memory is what a user would write instead; without it they are NumPy's arrays, and that is pickle.
Figures are this machine's; the ratios travel.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ftsupervise import Guard
from ftsupervise.checkpoints.memory_folder import node_folder

ROUNDS = 9
PIECE = 4 << 20

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]
else:
    torch.set_num_threads(1)


class State:
    """The state of a loop: ``mb`` MB in many arrays."""

    def __init__(self, mb: int) -> None:
        count = max(1, (mb << 20) // PIECE)
        large = [np.random.default_rng(n).standard_normal(PIECE // 4, dtype=np.float32) for n in range(count)]
        small = [np.full(64, n, dtype=np.float32) for n in range(count)]
        self.plain = {
            f"{kind}.{n}": one for kind, rows in (("weight", large), ("bias", small)) for n, one in enumerate(rows)
        }
        self.arrays: dict[str, Any] = self.plain
        if torch is not None:
            self.arrays = {name: torch.from_numpy(one).clone() for name, one in self.plain.items()}
        self.size = sum(one.nbytes for one in self.plain.values())

    def addresses(self) -> list[tuple[int, int]]:
        where = (one.data_ptr() if torch is not None else one.ctypes.data for one in self.arrays.values())
        return [(address, one.nbytes) for address, one in zip(where, self.plain.values(), strict=True)]

    def save(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        if torch is not None:
            torch.save(self.arrays, path)
        else:
            with path.open("wb") as file:
                pickle.dump(self.arrays, file, protocol=5)


def seconds(call: Callable[[], object]) -> float:
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def main(mb: int) -> None:
    os.environ.pop("FTSUPERVISE_RUN_DIR", None)
    root = Path(f"/dev/shm/ftsupervise-benchmark-{os.getpid()}")
    os.environ |= {"FTSUPERVISE_SNAPSHOTS": str(root), "FTSUPERVISE_GUARD_SNAPSHOT_EVERY": "1"}
    place = Path(node_folder(str(root)))
    root.mkdir(mode=0o700)
    place.mkdir(mode=0o700)
    try:
        measure(State(mb), place)
    finally:
        shutil.rmtree(root)


def measure(state: State, place: Path) -> None:
    source, target = np.ones(state.size, dtype=np.uint8), np.ones(state.size, dtype=np.uint8)
    where = state.addresses()

    def whole() -> None:
        ctypes.memmove(target.ctypes.data, source.ctypes.data, state.size)

    def pieces() -> None:
        at = target.ctypes.data
        for address, size in where:
            ctypes.memmove(at, address, size)
            at += size

    guard = Guard(signals=())
    guard.restore(model=state.arrays)
    ready = seconds(lambda: wait_for(guard))
    step = iter(range(2, 1000))
    rows: dict[str, Callable[[], object]] = {
        "one memcpy": whole,
        "memcpy, array after array": pieces,
        "guard.snapshot": lambda: guard.snapshot(next(step)),
        f"{'torch.save' if torch is not None else 'pickle'} into the same memory": lambda: state.save(place / "saved"),
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    for n in range(ROUNDS):
        for name, call in rows.items():
            if n < 3 or "memory" not in name:
                times[name].append(seconds(call))
    (place / "saved").unlink()
    restore = seconds(lambda: Guard(signals=()).restore(model=state.arrays))
    base = median(times["one memcpy"])
    print(f"{state.size / 1e6:,.0f} MB in {len(state.arrays)} {'tensors' if torch is not None else 'arrays'}")
    print(f"{'holds the loop up':<36}{'ms':>8}{'memcpys':>9}")
    for name, found in times.items():
        print(f"{name:<36}{median(found) * 1e3:>8,.1f}{median(found) / base:>9.2f}")
    print(f"{'restore, before the loop':<36}{restore * 1e3:>8,.1f}{restore / base:>9.2f}")
    print(f"{'until ready, beside the loop':<36}{ready * 1e3:>8,.1f}{ready / base:>9.2f}")


def wait_for(guard: Guard) -> None:
    while not guard.snapshot(1):
        time.sleep(0.001)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 256)
