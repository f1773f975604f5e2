"""Measure what a simulation costs: 1,000 runs of 90 days at 16,384 GPUs, and the same with twice the GPUs.

    python benchmarks/simulator.py [--runs 1000] [--check]

CPU seconds of one process, so that what else runs here counts little. ``--check`` exits 1 where the first takes more than 60 s,
where twice the GPUs take more than 2.2 times as long, or where it needs more than 100 MB.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import figure
from ftsupervise.planning.faults import Fleet, Lasting
from ftsupervise.planning.formulas import DAY
from ftsupervise.planning.simulator import Strategy, simulate

RATE = 6.50e-3 / DAY  # failures of a node in a second: Meta's RSC-1
SECONDS, TIMES, MEMORY = 60.0, 2.2, 100e6


def taken(gpus: int, runs: int) -> float:
    strategy = Strategy("cold", 600.0, 20.0, cold=Lasting(300.0))
    began = time.process_time()
    (found,) = simulate(Fleet(gpus // 8, RATE), [strategy], 90 * DAY, runs, seed=1)
    seconds = time.process_time() - began
    each = seconds / (found.faults * runs) * 1e6
    print(
        f"{gpus:>8,} GPUs: {seconds:6.2f} s CPU, ETTR {found.ettr:.4f}, {found.faults * runs:,.0f} failures, {each:.1f} µs each"
    )
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    print(f"{given.runs:,} runs of 90 days")
    first, second = taken(16_384, given.runs), taken(32_768, given.runs)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"twice the GPUs take {second / first:.2f} times as long; {memory / 1e6:.0f} MB at most")
    figure("simulator/16384", first, "s", f"{given.runs} runs of 90 days, one core")
    figure("simulator/32768", second, "s", "half the GPUs", times=second / first)
    figure("simulator/memory", memory / 1e6, "MB")
    return int(given.check and (first > SECONDS or second > TIMES * first or memory > MEMORY))


if __name__ == "__main__":
    sys.exit(main())
