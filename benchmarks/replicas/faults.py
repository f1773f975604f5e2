"""Measure what a fault costs a run of four replica groups, beside the same training restarted as a whole, and torchft alone.

    python benchmarks/replicas/faults.py [--rounds 2] [--seed 1] [--launchers groups,whole,torchft] [--json FILE]
    python benchmarks/replicas/faults.py --soak 15m

Needs Slurm's daemons and torch with torchft (`make slurm test-torch`). README.md beside this file: how to read it.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.figures import figure
from benchmarks.replicas.scene import (
    KILL,
    LAUNCHERS,
    LIGHTHOUSE,
    NAMES,
    ONCE,
    STOP,
    WORDS,
    Fault,
    Launcher,
    Played,
    differing,
    effective,
    stage,
    step_time,
)
from benchmarks.replicas.soak import soak
from ftsupervise.sandbox import missing
from ftsupervise.units import parse_duration

START = 180.0  # seconds for the first steps
STEADY = 150  # steps before the first fault: a standby has imported torch by then


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the sandbox goes down
    if absent := missing():
        raise SystemExit(f"needs Slurm: apt-get install {' '.join(dict.fromkeys(absent.values()))}")
    if args.soak:
        soaked = soak(parse_duration(args.soak).total_seconds(), args.seed)
        print(soaked)
        soaked.say_figures()
        return
    wanted = args.launchers.split(",")
    played = [play(one, plan(one, args.rounds, args.seed)) for one in LAUNCHERS if one.mode in wanted]
    print("\n" + table(played))
    say_figures(played)
    if args.json:
        Path(args.json).write_text("".join(json.dumps(asdict(one)) + "\n" for one in played))


def plan(launcher: Launcher, rounds: int, seed: int) -> list[tuple[str, str]]:
    """The same faults of the same groups for all launchers, as far as they have what is hit. Those that take a spare node come
    last."""
    draw = random.Random(seed)
    found = [(kind, draw.choice(NAMES)) for _ in range(rounds) for kind in draw.sample((KILL, STOP, LIGHTHOUSE), 3)]
    found += zip(ONCE, draw.sample(NAMES[1:], len(ONCE)), strict=True)  # the first one's node has the lighthouse
    return [(kind, "" if kind == LIGHTHOUSE else group) for kind, group in found if kind in launcher.faults]


def play(launcher: Launcher, faults: list[tuple[str, str]]) -> Played:
    out = Played(launcher.mode)
    print(f"{launcher.words}:", flush=True)
    with stage(launcher) as scene:
        scene.submit()
        if not scene.stamps.until(lambda: bool(scene.stamps.steps()) and scene.stamps.steps()[-1].step > STEADY, START):
            out.note = "never came to its steps"
            return out
        out.step = step_time(scene.stamps)
        for kind, group in faults:
            if not scene.stamps.until(lambda: scene.all_train(time.monotonic() - 4), launcher.bound):
                out.note = "a group was not back before the next fault"
            time.sleep(4)
            try:
                fault = scene.hit(kind, group)
            except ProcessLookupError:
                print(f"  {WORDS[kind]:20} {group:5} not played: the group was not there any more", flush=True)
                continue
            scene.measure(fault)
            if fault.note and kind == STOP:  # as a person would
                scene.end(group)
                out.manual += 1
                scene.stamps.until(lambda: scene.all_train(time.monotonic() - 4), launcher.bound)
            out.faults.append(fault)
            say(fault)
        scene.stamps.look()
        out.effective = effective(scene.stamps, out.step, time.monotonic())
        out.steps, out.differ = max(one.step for one in scene.stamps.steps()), differing(scene.stamps)
    print(
        f"  effective {out.effective:.0%}, {out.differ} steps differ, by hand {out.manual} times {out.note}", flush=True
    )
    return out


def say(fault: Fault) -> None:
    print(
        f"  {WORDS[fault.kind]:20} {fault.group:5} stall {_seconds(fault.stall)}, back {_seconds(fault.back)}, "
        f"{fault.lost} steps lost {fault.note}",
        flush=True,
    )


def table(played: list[Played]) -> str:
    words = {one.mode: one.words for one in LAUNCHERS}
    lines = []
    ours = next((one for one in played if one.launcher == "groups"), None)
    for kind in (KILL, STOP, LIGHTHOUSE, *ONCE):
        lines += [WORDS[kind], f"{'':34} {'n':>3} {'stall':>8} {'/ ours':>7} {'back':>8} {'lost':>6}"]
        base = _middle([one.stall for one in ours.faults if one.kind == kind]) if ours else None
        for one in played:
            found = [fault for fault in one.faults if fault.kind == kind]
            if not found:
                continue
            stall = _middle([fault.stall for fault in found])
            ratio = f"{stall / base:.1f}" if stall and base else "-"
            back = _middle([fault.back for fault in found])
            lost = median(fault.lost for fault in found)
            lines.append(
                f"{words[one.launcher]:34} {len(found):>3} {_seconds(stall):>8} {ratio:>7} {_seconds(back):>8} {lost:>6.0f}"
            )
        lines.append("")
    lines.append(f"{'':34} {'effective':>10} {'step':>7} {'differ':>7} {'by hand':>8}")
    for one in played:
        lines.append(
            f"{words[one.launcher]:34} {one.effective:>9.0%} {one.step:>7.3f} {one.differ:>7} {one.manual:>8}  {one.note}"
        )
    lines.append("published (FT-HSDP, arXiv 2602.00277, 100,000 GPUs): stall 10 -> 3 minutes, effective 44 -> 80 %")
    return "\n".join(lines)


def say_figures(played: list[Played]) -> None:
    """The stalls beside those of our groups."""
    ours = dict[str, float]()
    for one in sorted(played, key=lambda one: one.launcher != "groups"):
        for kind in (KILL, STOP, LIGHTHOUSE, *ONCE):
            found = [fault for fault in one.faults if fault.kind == kind]
            if (stall := _middle([fault.stall for fault in found])) is not None:
                base = ours.setdefault(kind, stall) if one.launcher == "groups" else ours.get(kind)
                times = stall / base if base and one.launcher != "groups" else None
                figure(f"replicas/{kind}/{one.launcher}", stall, "s", "our groups" if times else "", times=times)
            if (back := _middle([fault.back for fault in found])) is not None:
                figure(f"replicas/{kind}/{one.launcher}/back", back, "s")
        figure(f"replicas/effective/{one.launcher}", 100 * one.effective, "%")
        figure(f"replicas/differ/{one.launcher}", one.differ, "steps")


def _middle(values: list[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return median(known) if known else None


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="of SIGKILL, SIGSTOP and a killed lighthouse")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--launchers", default=",".join(one.mode for one in LAUNCHERS))
    parser.add_argument("--soak", default="", metavar="TIME", help="ours alone, with a fault every 20 to 60 s")
    parser.add_argument("--json", default="", metavar="FILE", help="each launcher as a line")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
