"""A long training of four replica groups with a fault every 20 to 60 seconds, and nobody's help. What has to hold is counted at
its end: each fault is over by itself, the ledger names it and its group, no group ever ran twice, and nothing is left."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.figures import figure
from benchmarks.replicas.scene import (
    KILL,
    LAUNCHERS,
    LIGHTHOUSE,
    NAMES,
    ONCE,
    STOP,
    Fault,
    Scene,
    differing,
    effective,
    stage,
    step_time,
)
from ftsupervise.replicas.record import read_lighthouse
from ftsupervise.rundir.ledger import ledger

_START = 180.0  # seconds for the first steps
_NAMED_WITHIN = timedelta(seconds=90)


class Soaked(NamedTuple):
    faults: tuple[Fault, ...]
    not_over: int  # faults that were not over by themselves
    unnamed: tuple[str, ...]  # faults that the ledger does not name
    twice: tuple[str, ...]  # groups of which two copies made steps at a time
    orphans: int  # processes that were left after the end
    differ: int  # steps after which the weights of two groups were not the same
    steps: int
    effective: float

    def __str__(self) -> str:
        lines = [f"{len(self.faults)} faults, {self.steps} steps, effective {self.effective:.0%}"]
        for kind in (KILL, STOP, LIGHTHOUSE, *ONCE):
            found = [one for one in self.faults if one.kind == kind]
            stalls = sorted(one.stall for one in found if one.stall is not None)
            backs = sorted(one.back for one in found if one.back is not None)
            if stalls:
                back = f", back median {median(backs):.2f} s, most {backs[-1]:.2f} s" if backs else ""
                lines.append(
                    f"  {kind:10} {len(found):3}  stall median {median(stalls):.2f} s, most {stalls[-1]:.2f} s{back}"
                )
        lines.append(f"not over by themselves {self.not_over}, not in the ledger {', '.join(self.unnamed) or 'none'}")
        lines.append(
            f"two copies {', '.join(self.twice) or 'never'}, orphans {self.orphans}, steps that differ {self.differ}"
        )
        return "\n".join(lines)

    def say_figures(self) -> None:
        figure("replica-soak/effective", 100 * self.effective, "%", f"{len(self.faults)} faults, {self.steps} steps")
        figure("replica-soak/not-over", self.not_over, "faults")
        figure("replica-soak/differ", self.differ, "steps")
        for kind in (KILL, STOP, LIGHTHOUSE, *ONCE):
            stalls = [one.stall for one in self.faults if one.kind == kind and one.stall is not None]
            if stalls:
                figure(
                    f"replica-soak/{kind}", median(stalls), "s", f"{len(stalls)} faults, {max(stalls):.2f} s at most"
                )


def soak(seconds: float, seed: int = 1) -> Soaked:
    draw = random.Random(seed)
    launcher = LAUNCHERS[0]
    with stage(launcher) as scene:
        scene.submit()
        if not scene.stamps.until(lambda: scene.all_train() and scene.stamps.steps()[-1].step > 20, _START):
            raise RuntimeError("it never came to its steps")
        step = step_time(scene.stamps)
        end = time.monotonic() + seconds
        faults: list[tuple[Fault, datetime]] = []
        once = list(ONCE)
        while True:
            due = time.monotonic() + draw.uniform(20, 60)
            if due > end:
                break
            while time.monotonic() < due:
                time.sleep(0.2)
                scene.stamps.look()
            kind = draw.choice((KILL, KILL, STOP, STOP, LIGHTHOUSE, *once))
            group = "" if kind == LIGHTHOUSE else draw.choice(NAMES[1:] if kind in once else NAMES)
            once = [one for one in once if one != kind]
            now = datetime.now(timezone.utc)
            fault = scene.hit(kind, group)
            scene.measure(fault)
            faults.append((fault, now))
            print(
                f"  {kind:10} {group:5} stall {fault.stall or -1:6.2f}, back {fault.back or -1:6.2f}, "
                f"{fault.lost} lost {fault.note}",
                flush=True,
            )
        until = time.monotonic()
        words = [sys.executable, "-m", "ftsupervise", "kill", "--yes", str(scene.rundir.root)]
        subprocess.run(words, env=scene.env, check=True, capture_output=True, timeout=60)
        orphans = _left(scene)
        return Soaked(
            tuple(fault for fault, _ in faults),
            sum(bool(fault.note) for fault, _ in faults),
            tuple(_unnamed(scene, faults)),
            tuple(name for name in NAMES if _ran_twice(scene, name)),
            orphans,
            differing(scene.stamps),
            max(one.step for one in scene.stamps.steps()),
            effective(scene.stamps, step, until),
        )


def _left(scene: Scene) -> int:
    """Processes of the training a minute after the run was asked to stop."""
    end = time.monotonic() + 60
    while (left := _running(scene)) and time.monotonic() < end:
        time.sleep(0.5)
    return left


def _running(scene: Scene) -> int:
    mark = f"BENCH_EVENTS={scene.stamps.path}".encode()
    count = 0
    for one in Path("/proc").iterdir():
        if one.name.isdigit():
            try:
                words = (one / "cmdline").read_bytes()
                count += mark in (one / "environ").read_bytes().split(b"\0") and b"slurm" not in words.split(b"\0")[0]
            except OSError:
                continue
    return count


def _ran_twice(scene: Scene, name: str) -> bool:
    """Did a process make a step after a newer one of its group had made one?"""
    gone: set[int] = set()
    newest = 0
    for one in scene.stamps.look():
        if one.what == "step" and one.group == name:
            if one.pid in gone:
                return True
            if newest not in (0, one.pid):
                gone.add(newest)
            newest = one.pid
    return False


def _unnamed(scene: Scene, faults: list[tuple[Fault, datetime]]) -> list[str]:
    found = []
    for fault, at in faults:
        if fault.kind == LIGHTHOUSE:
            record = read_lighthouse(scene.rundir.replicas)
            times = [one.at for one in record.history] if record is not None else []
        else:
            attempts = ledger(scene.rundir.group(fault.group))
            times = [one.ended for one in attempts if one.ended is not None and one.failure is not None]
        if not any(timedelta(seconds=-2) < time - at < _NAMED_WITHIN for time in times):
            found.append(f"{fault.kind} {fault.group} at {at:%H:%M:%S}")
    return found
