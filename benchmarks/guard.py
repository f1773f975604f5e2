"""What does the guard cost in the training loop? Beside the checks people write by hand, in the same run.

    python benchmarks/guard.py

Figures are this machine's; the ratios travel. "by hand" is what the usual guides put into every step: ``os.path.exists`` for
the kill and the save switch and ``psutil.virtual_memory()``.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from timeit import repeat

from ftsupervise import Guard

STEPS_PER_SECOND = 20


def ns(call: Callable[[], object], number: int, rounds: int = 9) -> tuple[float, float]:
    """Best and median nanoseconds of one call."""
    times = sorted(t / number * 1e9 for t in repeat(call, number=number, repeat=rounds))
    return times[0], median(times)


def by_hand(root: Path) -> Callable[[], bool]:
    """The guide's checks; without psutil its place is taken by reading /proc/meminfo, which is cheaper."""
    kill, save = str(root / "kill-switch"), str(root / "save-switch")
    try:
        import psutil
    except ImportError:

        def memory() -> float:
            return float(Path("/proc/meminfo").read_text().split(None, 2)[1])
    else:

        def memory() -> float:
            return float(psutil.virtual_memory().percent)

    return lambda: os.path.exists(kill) or os.path.exists(save) or memory() < 0  # noqa: PTH110


def in_a_loop(check: Callable[[int], object], steps: int = 300) -> float:
    """Mean ns of ``check`` between bits of work that turn the caches over, as in a real loop."""
    work, spent = bytearray(1 << 22), 0
    for step in range(steps):
        work[:] = work[::-1]
        before = time.perf_counter_ns()
        check(step)
        spent += time.perf_counter_ns() - before
    return spent / steps


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        attempt = root / "attempts" / "0001"
        for place in (root / "switches", root / "beats", attempt):
            place.mkdir(parents=True)
        os.environ |= {"FTSUPERVISE_RUN_DIR": folder, "FTSUPERVISE_ATTEMPT_DIR": str(attempt)}
        with Guard(poll=3600, memory=0.99, signals=()) as guard, Guard(poll=0, memory=0.99, signals=()) as eager:
            guard.step(0)
            eager.step(0)
            empty = ns(lambda: None, 200_000)
            hot = ns(lambda: guard.step(1), 200_000)
            look = ns(lambda: eager.step(1), 2_000)
            check = by_hand(root)
            naive = ns(check, 2_000)
            polite = Guard(poll=1.0, memory=0.99, signals=())
            real, real_naive = in_a_loop(polite.step), in_a_loop(lambda _: check())
            polite.close()
    rows = [
        ("step(), nothing due", hot[0] - empty[0], hot[1] - empty[1]),
        ("step() that looks (once a second)", look[0] - empty[0], look[1] - empty[1]),
        ("by hand, every step", naive[0] - empty[0], naive[1] - empty[1]),
    ]
    print(f"{'ns per call':<36}{'best':>10}{'median':>10}")
    for name, best, middle in rows:
        print(f"{name:<36}{best:>10,.0f}{middle:>10,.0f}")
    amortised = rows[0][1] + rows[1][1] / STEPS_PER_SECOND
    print(f"\nat {STEPS_PER_SECOND} steps/s, poll 1 s: {amortised:,.0f} ns per step; by hand {rows[2][1]:,.0f} ns")
    print(f"in a loop with cold caches: {real:,.0f} ns per step; by hand {real_naive:,.0f} ns")
    print(f"by hand costs {rows[2][1] / amortised:.0f} times the guard, {real_naive / real:.0f} times in the loop")


if __name__ == "__main__":
    main()
