"""A command that waits for a processor does not hang: it is not given up as one that waits for a dead mount is."""

from __future__ import annotations

import os
import subprocess
import sys

BURN = "while True: pass"
TYPED = """
import os, sys, time
from ftsupervise.cli import time_limit
time_limit.ANSWER = 0.5
if time_limit.try_dry_run(["launch"]) is not None:
    while time.process_time() < 0.2:  # of one core, that it shares with three
        pass
    os._exit(0)
print("tried")
"""


def test_a_command_that_has_no_turn_on_a_busy_machine_is_not_given_up() -> None:
    core = {min(os.sched_getaffinity(0))}
    busy = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(3)]
    try:
        for one in busy:
            os.sched_setaffinity(one.pid, core)
        done = subprocess.run(
            [sys.executable, "-c", TYPED], preexec_fn=lambda: os.sched_setaffinity(0, core),
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        for one in busy:
            one.kill()
            one.wait()
    assert (done.returncode, done.stdout) == (0, "tried\n"), done.stderr
