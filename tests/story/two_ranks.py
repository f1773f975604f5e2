"""Two ranks that meet at every step, as in a collective: rank 1 calls rank 0. Resumes from its newest checkpoint.

two_ranks.py [FAULT]          120 steps; rank 1 of the first attempt does FAULT (Python) before it meets in step 75
two_ranks.py soak S SCALE     S seconds of steps with saves, evaluations and heavy-tailed pauses, all times by SCALE
"""

from __future__ import annotations

import os
import random
import signal  # noqa: F401 - for the fault
import socket
import subprocess
import sys
import time
from pathlib import Path

from ftsupervise import Guard

STEPS, AT, EVERY = 120, 75, 10


def connect(rank: int) -> socket.socket:
    os.chdir(os.environ["FTSUPERVISE_ATTEMPT_DIR"])  # the path of a socket must be short
    if rank == 0:
        server = socket.socket(socket.AF_UNIX)
        server.bind("meet-temp")
        server.listen()
        Path("meet-temp").rename("meet")
        return server.accept()[0]
    while True:
        one = socket.socket(socket.AF_UNIX)
        try:
            one.connect("meet")
            return one
        except OSError:
            time.sleep(0.02)


def all_reduce(other: socket.socket) -> None:
    other.sendall(b"x")
    if not other.recv(1):
        sys.exit("the other rank is gone")


def train(guard: Guard, rank: int, other: socket.socket, fault: str) -> None:
    folder = Path(os.environ["FTSUPERVISE_CHECKPOINT_DIR"])
    first = 1 + max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
    for step in range(first, STEPS + 1):
        time.sleep(0.01)
        if step == AT and rank == 1 and os.environ["FTSUPERVISE_ATTEMPT"] == "1":
            exec(fault)
        all_reduce(other)
        guard.step(step)
        if step % EVERY == 0 and rank == 0:
            (folder / str(step)).touch()
            guard.saved(step)
    guard.finished(STEPS)


def soak(guard: Guard, rank: int, other: socket.socket, seconds: float, scale: float) -> None:
    """Both ranks draw alike, so that they agree on what comes next; and each for itself, how long it pauses."""
    both, own = random.Random(7), random.Random(rank)
    end, step = time.monotonic() + seconds, 0
    done = False
    while not done:
        step += 1
        time.sleep(scale * (0.05 + min(7.0, 0.02 * (own.paretovariate(1.5) - 1))))
        draw = both.random()
        if draw < 0.004:
            with guard.phase("save"):
                if rank == 0:
                    time.sleep(scale * min(20.0, 0.5 + own.paretovariate(1.5)))
                all_reduce(other)
        elif draw < 0.006:
            with guard.phase("eval"):
                time.sleep(scale * own.uniform(5, 40))
                all_reduce(other)
        elif draw < 0.008:  # nobody says so, and it uses CPU
            burn(scale * both.uniform(2, 20))
        elif draw < 0.010:  # nobody says so, and it sleeps
            time.sleep(scale * both.uniform(2, 7.5))
        done = step % 20 == 0 and agree(other, rank, time.monotonic() > end)
        all_reduce(other)
        guard.step(step)
    guard.finished(step)


def burn(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def agree(other: socket.socket, rank: int, mine: bool) -> bool:
    """What rank 0 says."""
    if rank == 0:
        other.sendall(b"1" if mine else b"0")
        return mine
    return other.recv(1) == b"1"


def main() -> None:
    if "RANK" not in os.environ:
        env = {**os.environ, "WORLD_SIZE": "2"}
        both = [subprocess.Popen([sys.executable, *sys.argv], env={**env, "RANK": str(rank)}) for rank in (0, 1)]
        sys.exit(max(abs(one.wait()) for one in both))
    rank = int(os.environ["RANK"])
    guard = Guard(beat_every=0.05, poll=0.02)
    other = connect(rank)
    if sys.argv[1:2] == ["soak"]:
        soak(guard, rank, other, float(sys.argv[2]), float(sys.argv[3]))
    else:
        train(guard, rank, other, sys.argv[1] if len(sys.argv) > 1 else "pass")


if __name__ == "__main__":
    main()
