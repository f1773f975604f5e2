"""How long does a fault cost? ftsupervise beside what a user would pick instead, on a real Slurm on this machine.

    python benchmarks/recovery [--rounds 5] [--launchers a,b] [--faults SIGKILL,exit1] [--bound 60] [--idle 15] [--soak 60]

Needs torch; launchers that are not installed are left out and named (pip install -e '.[peers]' has them all). In each round
every launcher plays in turn, so that what else the machine does meets all of them. README.md beside this file: how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.figures import figure
from benchmarks.recovery.idle import idle
from benchmarks.recovery.launchers import LAUNCHERS, Launcher
from benchmarks.recovery.scene import FAULTS, Trial, play
from benchmarks.recovery.soak import soak
from benchmarks.recovery.table import say_figures, tables
from ftsupervise.sandbox import missing

GIVE_UP = 2  # so many misses and a launcher is not asked for that fault again: each costs the whole bound


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the sandbox goes down
    absent = missing()
    if absent:
        raise SystemExit(f"needs Slurm: apt-get install {' '.join(dict.fromkeys(absent.values()))}")
    launchers = chosen(args.launchers)
    faults = [fault for fault in FAULTS if fault.replace(" ", "") in args.faults.split(",")]
    trials: list[Trial] = []
    for number in range(args.rounds):
        for fault in faults:
            for launcher in launchers:
                played = [one for one in trials if (one.launcher, one.fault) == (launcher.name, fault)]
                if len(played) >= GIVE_UP and all(one.new is None for one in played):
                    continue
                trial = one_trial(launcher, fault, args.bound)
                trials.append(trial)
                say(number, trial)
                write(args.json, trials)
    if trials:
        print("\n" + tables(trials, launchers, faults, args.bound))
        say_figures(trials, launchers, faults)
    if args.idle:
        print_idle(launchers, args.idle)
    if args.soak:
        print_soak(launchers, args)


def chosen(names: str) -> list[Launcher]:
    found = []
    for launcher in LAUNCHERS:
        if names and launcher.name not in names.split(","):
            continue
        if why := launcher.missing():
            print(f"{launcher.words}: {why}", flush=True)
        else:
            found.append(launcher)
    return found


def one_trial(launcher: Launcher, fault: str, bound: float) -> Trial:
    try:
        return play(launcher, fault, bound)
    except Exception as error:  # one that breaks must not take the others' figures with it
        return Trial(launcher.name, fault, note=f"{type(error).__name__}: {error}"[:60])


def say(number: int, trial: Trial) -> None:
    back = f"new step after {trial.new:.2f} s (cold {trial.cold or 0:.2f} s)" if trial.new else trial.note or "not back"
    print(f"round {number + 1}  {trial.fault:8} {trial.launcher:18} {back}, load {os.getloadavg()[0]:.0f}", flush=True)


def write(path: str, trials: list[Trial]) -> None:
    if path:
        Path(path).write_text("".join(json.dumps(one.as_json()) + "\n" for one in trials))


def print_idle(launchers: list[Launcher], seconds: float) -> None:
    print(f"While nothing happens, over {seconds:.0f} s: all processes beside the ranks, Slurm's own left out\n")
    print(f"{'':34} {'processes':>9} {'PSS MB':>8} {'% of a core':>12}")
    for launcher in launchers:
        for restarted in (False, True) if launcher.ours else (False,):  # its ranks are other processes then
            words = f"{launcher.words}{', restarted' if restarted else ''}"
            cost = idle(launcher, seconds, restarted)
            if cost is None:
                print(f"{words:34} did not come to its steps", flush=True)
                continue
            each = ", ".join(f"{what} {pss:.1f} MB {share:.2f} %" for what, pss, share in cost.each)
            print(f"{words:34} {cost.processes:>9} {cost.pss:>8.1f} {cost.share:>12.2f}   {each}", flush=True)
            name = f"recovery/idle/{launcher.name}{'-restarted' if restarted else ''}"
            figure(name, cost.pss, "MiB", f"{cost.processes} processes")
            figure(f"{name}/share", cost.share, "%", "of a core")
            largest = {what: (pss, share) for what, pss, share in sorted(cost.each, key=lambda one: one[1]) if pss > 1}
            for what, (pss, share) in largest.items():
                figure(f"{name}/process/{what}", pss, "MiB", f"{share:.2f} % of a core")


def print_soak(launchers: list[Launcher], args: argparse.Namespace) -> None:
    for launcher in launchers:
        if launcher.ours:
            done = soak(launcher, args.soak, args.bound)
            took = sorted(done.seconds)
            middle = f", median {took[len(took) // 2]:.2f} s, slowest {took[-1]:.2f} s" if took else ""
            end = "the run finished" if done.finished else "the run did not finish"
            print(f"{launcher.words}: {done.back} of {args.soak} recoveries{middle}; {end}", flush=True)
            figure(f"recovery-soak/{launcher.name}", done.back, "", f"of {args.soak} faults")
            if took:
                figure(f"recovery-soak/{launcher.name}/median", took[len(took) // 2], "s")
                figure(f"recovery-soak/{launcher.name}/slowest", took[-1], "s")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    words = __doc__ or ""
    parser = argparse.ArgumentParser(description=words, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--launchers", default="", help="names, with commas: " + ",".join(one.name for one in LAUNCHERS)
    )
    parser.add_argument("--faults", default=",".join(FAULTS).replace(" ", ""), help="default: %(default)s")
    parser.add_argument("--bound", type=float, default=60.0, metavar="S", help="how long a recovery is waited for")
    parser.add_argument("--idle", type=float, default=0.0, metavar="S", help="measure so long what it costs at rest")
    parser.add_argument("--soak", type=int, default=0, metavar="N", help="N faults in one run of ours")
    parser.add_argument("--json", default="", metavar="FILE", help="each trial as a line")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
