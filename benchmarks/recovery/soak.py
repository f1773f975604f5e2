"""Many faults in one run of ours: how many of them ended in a new step?"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from benchmarks.recovery.launchers import AT, Launcher
from benchmarks.recovery.scene import Events, stage

APART = 32  # steps between two faults: a checkpoint lies between them


@dataclass
class Soak:
    asked: int
    met: int = 0  # faults that happened
    back: int = 0  # faults after which a new step came
    seconds: list[float] = field(default_factory=list)  # from each fault to the first new step
    finished: bool = False


def soak(launcher: Launcher, count: int, bound: float, kinds: str = "mixed") -> Soak:
    """``count`` faults, SIGKILL, exit 1 and SIGSTOP in turn. Gives up when one is not over within ``bound`` seconds."""
    at = [AT + APART * n for n in range(count)]
    own = {"RECOVERY_FAULT": kinds, "RECOVERY_AT": ",".join(map(str, at)), "RECOVERY_LAST": str(at[-1] + APART)}
    with stage(launcher, **own) as on:
        launcher.submit(on.folder, on.env)
        done = _progress(on.events, count)
        seen, since = (0, 0, 0), time.monotonic()
        while not done.finished and time.monotonic() - since < max(bound, 180 if not done.met else bound):
            on.events.look(0.05)
            done = _progress(on.events, count)
            now = (done.met, done.back, len(on.events.seen))
            if now[:2] != seen[:2] and done.back != seen[1]:
                print(
                    f"  {done.back} of {done.met}, last in {done.seconds[-1]:.2f} s, load {os.getloadavg()[0]:.0f}",
                    flush=True,
                )
            if now != seen:
                seen, since = now, time.monotonic()
    return done


def _progress(events: Events, count: int) -> Soak:
    done = Soak(count)
    steps = [event for event in events.seen if event.what == "step"]
    done.finished = any(event.what == "end" for event in events.seen)
    for fault in (event for event in events.seen if event.what == "fault"):
        done.met += 1
        new = next((one for one in steps if one.step > fault.step and one.at > fault.at), None)
        if new is not None:
            done.back += 1
            done.seconds.append(new.at - fault.at)
    return done
