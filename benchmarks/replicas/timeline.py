"""Measure where a survivor's time goes, from the SIGKILL of another group to its own next step, and how late heartbeats are.

    python benchmarks/replicas/timeline.py [--kills 10] [--seed 1]

Four groups on this machine, steps of 0.1 s (job.py). The heartbeats of those that live are watched on the lighthouse's page
while nothing is wrong: the oldest one of them says how long a timeout has to be. Needs torch with torchft (`make test-torch`).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.figures import figure
from benchmarks.replicas.local import LocalRun, local_run
from benchmarks.replicas.scene import NAMES
from ftsupervise.replicas.members import LighthousePage, look
from ftsupervise.replicas.record import read_lighthouse

JOB = Path(__file__).with_name("job.py")
PARTS = ("last step", "failed", "asks", "quorum", "configured", "step")
_BOUND = 120.0  # seconds


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the groups are ended
    draw, found, ages = random.Random(args.seed), list[list[float]](), list[float]()
    with local_run(sys.executable, str(JOB), BENCH_MODE="timeline") as run:
        for number in range(args.kills):
            together(run)
            ages += heartbeats(run, draw.uniform(3, 5))
            found.append(killed(run, draw.choice(NAMES)))
            print(f"  kill {number + 1}: " + ", ".join(_shown(found[-1])), flush=True)
    rows = [[one[at] for one in found] for at in range(len(PARTS))]
    print(f"\nof {len(found)} kills, seconds after the death, of the slowest survivor (load {os.getloadavg()[0]:.0f})")
    for name, row in zip(PARTS, rows, strict=True):
        print(f"{name:12} median {median(row):6.3f}, most {max(row):6.3f}")
        figure(f"timeline/{name}", median(row), "s", f"{max(row):.2f} s at most")
    stalls = [last - first for first, last in zip(rows[0], rows[-1], strict=True)]
    print(f"{'stall':12} median {median(stalls):6.3f}, most {max(stalls):6.3f}")
    figure("timeline/stall", median(stalls), "s", f"{max(stalls):.2f} s at most")
    ages.sort()
    figure("timeline/heartbeat", ages[len(ages) * 99 // 100], "s", f"{ages[-1]:.2f} s at most")
    print(
        f"heartbeats of living groups: {len(ages)} looks, 99 % of them younger than {ages[len(ages) * 99 // 100]:.3f} s"
    )
    print(f"the oldest ones, in seconds: {', '.join(f'{age:.3f}' for age in ages[-5:])}")


def together(run: LocalRun) -> None:
    """Wait until all groups train with each other. Raises RuntimeError."""

    def there() -> bool:
        newest = {name: next((one for one in reversed(run.stamps.steps(name))), None) for name in NAMES}
        known = [one for one in newest.values() if one is not None and time.monotonic() - one.at < 1.0]
        return len(known) == len(NAMES) and max(one.step for one in known) - min(one.step for one in known) < 2

    if not run.stamps.until(there, _BOUND):
        raise RuntimeError(f"the groups do not train together: {run.said()}")


def heartbeats(run: LocalRun, seconds: float) -> list[float]:
    """Return how old the newest heartbeat of each group is, at every look."""
    record, until, found = read_lighthouse(run.rundir.replicas), time.monotonic() + seconds, list[float]()
    assert record is not None
    while time.monotonic() < until:
        page = look(record.host, record.port, 1.0)
        if isinstance(page, LighthousePage):
            newest: dict[str, float] = {}
            for one in page.heartbeats:
                newest[one.group] = min(one.age, newest.get(one.group, one.age))
            found += newest.values()
        time.sleep(0.03)
    return found


def killed(run: LocalRun, name: str) -> list[float]:
    """The parts of the slowest survivor's way, in seconds after the death."""
    pid, others = run.stamps.pid(name), [one for one in NAMES if one != name]
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    if not run.stamps.until(lambda: all(_way(run, one, at) for one in others), _BOUND):
        raise RuntimeError(f"the others do not go on: {run.said()}")
    ways = [way for one in others if (way := _way(run, one, at)) is not None]
    return max(ways, key=lambda way: way[-1] - way[0])


def _way(run: LocalRun, name: str, at: float) -> list[float] | None:
    """None while it is not at its end."""
    mine = [one for one in run.stamps.all if one.group == name]
    last = next((one.at for one in reversed(mine) if one.what == "step" and one.at <= at), None)
    way, since = [0.0 if last is None else last - at], at
    for what in PARTS[1:]:
        found = next((one for one in mine if one.what == what and one.at > since), None)
        if found is None and what != "failed":
            return None
        since = found.at if found is not None else since  # no reduction was under way
        way.append(since - at)
    return way


def _shown(way: list[float]) -> list[str]:
    return [f"{name} {seconds:.3f}" for name, seconds in zip(PARTS, way, strict=True)]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
