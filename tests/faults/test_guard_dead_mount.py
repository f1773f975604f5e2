"""The run directory lies on a file system that stops answering: the loop goes on, and what it had to say is said afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.paths import RunDir

from .conftest import HungMount

pytestmark = pytest.mark.root
Until = Callable[..., Any]

LOOP = """
import json, os, sys, time
from ftsupervise import Guard
longest, step, notes = 0.0, 0, sys.argv[2]
with Guard(sys.argv[1], rank=0, world=1, poll=0.05, beat_every=0.05, signals=(), **json.loads(sys.argv[3])) as guard:
    while True:
        step += 1
        began = time.monotonic()
        decision = guard.step(step)
        if step % 20 == 0:
            with guard.phase(f"eval {step}"):  # news, which is waited for
                guard.check()
        longest = max(longest, time.monotonic() - began)
        with open(notes + ".tmp", "w") as file:
            json.dump([step, longest, time.time()], file)
        os.replace(notes + ".tmp", notes)
        if decision.stop:
            break
        time.sleep(0.01)
print(decision.cause, flush=True)
"""


class Loop:
    def __init__(self, mount: HungMount, tmp_path: Path, **given: float) -> None:
        backing = tmp_path / "backing" / "run"
        for name in ("switches", "beats", "attempts"):
            (backing / name).mkdir(parents=True)
        self.behind = RunDir(backing)  # the same directory, where it always answers
        self._notes = tmp_path / "notes"
        words = [sys.executable, "-c", LOOP, str(mount.point / "run"), str(self._notes), json.dumps(given)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def step(self) -> int:
        return int(self._note()[0])

    def longest(self) -> float:
        return float(self._note()[1])

    def beaten(self) -> int:
        beats = read_beats(self.behind)
        return beats[0].step or 0 if beats else 0

    def has_exited(self) -> bool:
        """The thread that ran the loop, whatever the others still wait for."""
        found = processes.process_stat(self.process.pid)
        return found is not None and found.state == "Z"

    def ended(self) -> tuple[str, str]:
        out, err = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, err
        return out, err

    def _note(self) -> list[Any]:
        try:
            return list(json.loads(self._notes.read_text()))
        except FileNotFoundError:
            return [0, 0.0, 0.0]


@pytest.mark.fault(
    "The run directory stops answering while a loop trains",
    "the loop waits a second in all and goes on; when it answers again the switches are seen and the newest beat is "
    "written",
)
def test_a_run_directory_that_stops_answering_does_not_hold_the_loop_and_is_told_all_afterwards(
    dead_mount: HungMount, tmp_path: Path, until: Until
) -> None:
    loop = Loop(dead_mount, tmp_path)
    until(lambda: loop.beaten() > 5, "beats")
    dead_mount.hang("all")
    at = loop.step()
    until(lambda: loop.step() > at + 150, "150 steps without the run directory")
    silent = loop.beaten()
    assert loop.step() > silent + 100, "the last beat is from before"
    (loop.behind.switches / "kill-switch").touch()
    dead_mount.answer()
    out, err = loop.ended()
    assert out == "kill switch\n", err
    assert loop.beaten() == loop.step(), "the last beat is that of the last step"
    assert loop.longest() < 3, "one wait of a second, not one for each beat and each look"


@pytest.mark.slow
def test_a_loop_on_a_dead_run_directory_stops_at_its_time_and_ends(
    dead_mount: HungMount, tmp_path: Path, until: Until
) -> None:
    loop = Loop(dead_mount, tmp_path, run_for=3.0)
    until(lambda: loop.beaten() > 5, "beats")
    dead_mount.hang("all")
    began = time.monotonic()
    until(lambda: loop.has_exited(), "the end of the loop's thread")
    assert time.monotonic() - began < 15
    dead_mount.answer()  # before that the kernel does not let go of the other thread
    out, _ = loop.ended()
    assert out == "run time reached\n"
    assert loop.longest() < 3
