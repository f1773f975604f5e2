"""Do replica groups that lose members learn as well as undisturbed ones? The same seeds with and without SIGKILLs.

    python benchmarks/replicas/losses.py [--seeds 8] [--loops ddp,localsgd,diloco] [--kills 4] [--check] [--json FILE]

Four groups under ``ftsupervise groups run`` on this machine learn to tell digits apart (losses_job.py). A killed group is away
until it has started again by itself, and its batches are missing meanwhile. Compared is the loss of images that nobody trains
on, the mean over the last steps. ``--check``: exit 1 where the two do not agree within the noise of the seeds (agreement.py).

The runs with FT-DDP are also replayed: one process, without groups and without faults, trains on the very batches that took
part in each step. The difference to that is what the kills cost beyond the missing batches; ``--check`` allows a thousandth.
Needs torch with torchft (`make test-torch`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.figures import figure
from benchmarks.replicas.agreement import Agreement, agreement
from benchmarks.replicas.local import local_run
from benchmarks.replicas.scene import NAMES, Stamps

JOB = Path(__file__).with_name("losses_job.py")
LOOPS = {"ddp": "FT-DDP", "localsgd": "LocalSGD", "diloco": "DiLoCo"}
_LAST = 20  # losses that the final one is the mean of
_BEFORE = 0.1  # share of the steps: the loss is shown as it was so much earlier, for comparison
_OFF = 0.001  # difference of the loss to a replay: sums of floats in another order
_MOST = 300.0  # seconds for one run
_LEAST = 5  # seeds, of which the most extreme of all 252 ways to share the losses out has p = 0.008


class Learned(NamedTuple):
    loop: str
    seed: int
    loss: float  # the mean over the last steps
    before: float  # the same a tenth of the steps earlier
    kills: int
    missing: float  # share of the batches that were not there, since their group was away
    differ: int  # steps after which the weights of two groups were not the same bits
    off: float | None = None  # of the loss of one process that trained on the same batches


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the groups are ended
    found: list[Learned] = []
    for loop in args.loops.split(","):
        for seed in range(args.seeds):
            for kills in (0, args.kills):
                found.append(learn(loop, seed, kills, args.steps, args.step_time))
                say(found[-1])
    print("\n" + table(found))
    if args.json:
        Path(args.json).write_text("".join(json.dumps(one._asdict()) + "\n" for one in found))
    for loop in dict.fromkeys(one.loop for one in found):
        it = compared(found, loop)
        figure(f"losses/{loop}/undisturbed", it.undisturbed, "", f"spread {it.spread:.4f}")
        figure(f"losses/{loop}/with-kills", it.disturbed, "", f"p {it.p:.2f}")
    wrong = problems(found)
    for words in wrong:
        print(words)
    if args.check:
        raise SystemExit(1 if wrong else 0)


def learn(loop: str, seed: int, kills: int, steps: int, step_time: float) -> Learned:
    """One run, from its start to its end by itself. Raises RuntimeError where it does not come to it."""
    words = ["--loop", loop, "--seed", str(seed), "--steps", str(steps), "--step-time", str(step_time)]
    with local_run(sys.executable, str(JOB), *words) as run:
        disturb(run.child, run.stamps, seed, kills, steps if loop == "ddp" else steps // 5, step_time)
        try:
            code = run.child.wait(_MOST)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"the run does not come to its end within {_MOST:.0f} s: {run.said()}") from None
        if code:
            raise RuntimeError(f"the run ended with {code}: {run.said()}")
        run.stamps.look()
        return judged(run.stamps, loop, seed, kills)


def disturb(child: subprocess.Popen[bytes], stamps: Stamps, seed: int, kills: int, last: int, step_time: float) -> None:
    """SIGKILL to one group after the other, spread over the run, each in the middle of its computation. One may still be away
    when the next is killed: then too few are left, and they wait for it."""
    draw = random.Random(seed)
    for number in range(kills):
        due, order = last * (number + draw.uniform(0.2, 0.6)) / (kills + 0.5), draw.sample(NAMES, len(NAMES))

        def computing(due: float = due, order: list[str] = order) -> int:
            for name in order:
                newest = next((one for one in reversed(stamps.all) if one.group == name), None)
                if newest is None or newest.what != "compute" or newest.step < due:
                    continue
                if time.monotonic() - newest.at < step_time / 2:
                    return newest.pid
            return 0

        found: list[int] = []

        def ready(look: Callable[[], int] = computing, found: list[int] = found) -> bool:
            found.append(look())
            return found[-1] > 0 or child.poll() is not None

        if not stamps.until(ready, _MOST) or not found[-1]:
            raise RuntimeError(f"it ended, or stood, before kill {number + 1} of {kills}, at step {due:.0f}")
        os.kill(found[-1], signal.SIGKILL)


def judged(stamps: Stamps, loop: str, seed: int, kills: int) -> Learned:
    """Raises RuntimeError where the stamps do not lead to the last step."""
    of_step: dict[int, list[tuple[float, int, str]]] = {}
    took_part: dict[int, set[int]] = {}
    for one in stamps.steps():
        loss, present, weights, took = one.weights.split("/")
        of_step.setdefault(one.step, []).append((float(loss), int(present), weights))
        took_part.setdefault(one.step, set()).update({NAMES.index(one.group)} if took == "1" else ())
    steps = sorted(of_step)
    losses = [of_step[step][0][0] for step in steps]
    if len(losses) < 3 * _LAST // 2:
        raise RuntimeError(f"{loop}, seed {seed}: only {len(losses)} steps")
    earlier = round(len(losses) * (1 - _BEFORE))
    last = min(_LAST, len(losses) // 3)
    final = fmean(losses[-last:])
    made = sum(max(count for _, count, _ in of_step[step]) for step in steps)
    return Learned(
        loop=loop,
        seed=seed,
        loss=final,
        before=fmean(losses[earlier - last : earlier]),
        kills=kills,
        missing=1 - made / (len(NAMES) * len(steps)),
        differ=sum(len({weights for _, _, weights in found}) > 1 for found in of_step.values()),
        off=abs(final - replayed(seed, [(took_part[step], of_step[step][0][1]) for step in steps], last))
        if loop == "ddp"
        else None,
    )


def replayed(seed: int, took_part: list[tuple[set[int], int]], last: int) -> float:
    """The final loss of one process that trains on the batches of those groups in each step."""
    from benchmarks.replicas.losses_job import replay

    return fmean(replay(seed, took_part)[-last:])


def compared(found: list[Learned], loop: str) -> Agreement:
    of = [one for one in found if one.loop == loop]
    return agreement([one.loss for one in of if not one.kills], [one.loss for one in of if one.kills])


def problems(found: list[Learned]) -> list[str]:
    """A sentence for each loop whose losses do not agree, or whose groups had different weights."""
    wrong = []
    for loop in dict.fromkeys(one.loop for one in found):
        if why := compared(found, loop).outside:
            wrong.append(f"{LOOPS[loop]}: outside the noise of the seeds: {why}")
        if differ := sum(one.differ for one in found if one.loop == loop):
            wrong.append(f"{LOOPS[loop]}: after {differ} steps two groups had different weights")
        if any(one.off is not None and one.off > _OFF for one in found if one.loop == loop):
            wrong.append(f"{LOOPS[loop]}: it learned something else than one process learns from the same batches")
    return wrong


def table(found: list[Learned]) -> str:
    heads = (
        f"{'':10} {'seeds':>5} {'undisturbed':>17} {'with kills':>17} {'difference':>11} {'in spreads':>11} {'p':>6} "
    )
    lines = [heads + f"{'kills':>6} {'missing':>8} {'differ':>7} {'10 % earlier':>13} {'off replay':>11}"]
    for loop in dict.fromkeys(one.loop for one in found):
        of, it = [one for one in found if one.loop == loop], compared(found, loop)
        disturbed = [one for one in of if one.kills]
        spread = agreement([one.loss for one in disturbed], [one.loss for one in disturbed]).spread
        earlier = fmean(one.before - one.loss for one in of if not one.kills)
        lines.append(
            f"{LOOPS[loop]:10} {it.seeds:>5} {it.undisturbed:>8.4f} ± {it.spread:.4f} {it.disturbed:>8.4f} ± {spread:.4f} "
            f"{it.difference:>+11.4f} {it.difference / it.spread:>+11.2f} {it.p:>6.2f} {sum(one.kills for one in of):>6} "
            f"{fmean(one.missing for one in disturbed):>8.0%} {sum(one.differ for one in of):>7} {earlier:>+13.4f} "
            f"{_off(of):>11}"
        )
    return "\n".join(lines)


def _off(of: list[Learned]) -> str:
    found = [one.off for one in of if one.off is not None]
    return f"{max(found):.6f}" if found else "-"


def say(one: Learned) -> None:
    how = f"{one.kills} kills, {one.missing:.0%} of the batches missing" if one.kills else "undisturbed"
    print(f"  {LOOPS[one.loop]:10} seed {one.seed}: loss {one.loss:.4f}, {how}", flush=True)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--loops", default=",".join(LOOPS))
    parser.add_argument("--kills", type=int, default=4, help="SIGKILLs in each disturbed run")
    parser.add_argument("--steps", type=int, default=400, help="of each run; LocalSGD and DiLoCo meet at each fifth")
    parser.add_argument("--step-time", type=float, default=0.04, help="seconds each step is slowed by")
    parser.add_argument("--check", action="store_true", help="exit 1 where the losses do not agree")
    parser.add_argument("--json", default="", metavar="FILE", help="each run as a line")
    found = parser.parse_args(argv)
    if found.check and found.seeds < _LEAST:
        parser.error(f"--check needs {_LEAST} seeds: with fewer no difference is beyond chance")
    return found


if __name__ == "__main__":
    main()
