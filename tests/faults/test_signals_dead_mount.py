"""The run directory and the job's output lie on a file system that stops answering: the ranks hear every signal at once."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.neighbours.supervised import SupervisedRun

from .conftest import HungMount

pytestmark = pytest.mark.root
Until = Callable[..., Any]
# Notes on another disk when it hears what, and saves for as long as it is told to before it leaves.
RANK = """import signal, sys, time
from pathlib import Path
notes, saves = Path(sys.argv[1]), float(sys.argv[2])
def note(word):
    with notes.open("a") as file:
        file.write(f"{word} {time.time()}\\n")
heard = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, _: (note(signal.Signals(number).name), heard.append(number)))
note("up")
while signal.SIGTERM not in heard:
    time.sleep(0.01)
time.sleep(saves)
note("saved")
"""


@pytest.fixture
def run(dead_mount: HungMount) -> Iterator[SupervisedRun]:
    one = SupervisedRun(dead_mount.point / "run", dead_mount.point)
    yield one
    dead_mount.answer()
    one.close()


def when(notes: Path, word: str) -> float:
    """The time at which the rank noted it; 0 before."""
    lines = notes.read_text().splitlines() if notes.exists() else []
    return next((float(line.split()[1]) for line in lines if line.startswith(f"{word} ")), 0.0)


@pytest.mark.chain(
    "the run directory and the job's output stop answering, then Slurm warns and ends the job",
    "each signal reaches the ranks at once, and the time to SIGKILL counts from then; what is to be written waits",
    "the one that was over",
    "the page of the attempt, when the disk answers again",
)
def test_signals_reach_the_ranks_at_once_and_the_grace_counts_from_then(
    run: SupervisedRun, dead_mount: HungMount, tmp_path: Path, until: Until
) -> None:
    rank, notes = tmp_path / "rank.py", tmp_path / "notes"
    rank.write_text(RANK)
    words = ("--in-place", "5", "--hang", "10", "--grace", "8", "--", sys.executable, str(rank), str(notes), "4")
    one = run.start(*words, cwd=str(tmp_path))
    until(lambda: when(notes, "up"), "the rank")
    dead_mount.hang("all")
    time.sleep(1.5)  # so long that whoever looks there is stuck
    for name in ("SIGUSR1", "SIGTERM"):
        sent = time.time()
        one.send_signal(getattr(signal, name))
        until(lambda name=name: when(notes, name), f"{name} at the rank", 20)
        assert when(notes, name) - sent < 3.0
    until(lambda: when(notes, "saved"), "the checkpoint, in the time that it has", 20)
    dead_mount.answer()
    assert one.wait(60) == 0
    (only,) = run.attempts()
    assert only.words == "cancelled or preempted (SIGTERM)"
    assert "passed on to the command" in run.log()
