"""The cause names what came first: a request to stop, or an end for which somebody then told the rest to leave.

Both look the same to the guard of rank 0, to which SIGTERM comes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.neighbours.supervised import SupervisedRun

Until = Callable[..., Any]

# As srun and torchrun do: two ranks, and what is left of them is told to leave as soon as one has failed.
LAUNCHER = """
import os, signal, subprocess, sys, time
from pathlib import Path
def rank(number):
    env = {**os.environ, "RANK": str(number), "WORLD_SIZE": "2"}
    return subprocess.Popen([sys.executable, "rank.py", *sys.argv[1:]], env=env)
ranks = [rank(0), rank(1)]
while not Path("observed").exists():
    time.sleep(0.01)
if sys.argv[1] == "asked":
    for one in ranks:
        one.send_signal(signal.SIGTERM)
elif sys.argv[1] == "fails":
    Path("go").touch()
    ranks[1].wait()
    ranks[0].send_signal(signal.SIGTERM)
sys.exit(max(one.wait() for one in ranks))
"""
RANK = """
import os, sys, time
from pathlib import Path
from ftsupervise import Guard
guard, number, how = Guard(agree=False), os.environ.get("RANK", "0"), sys.argv[1]
for step in range(1, 100_000):
    time.sleep(0.01)
    decision = guard.step(step)
    if step == 3:
        Path(f"stepped-{number}").touch()
    if decision.stop:
        break
    if how == "fails" and number == "1" and Path("go").exists():
        raise ValueError("no such shape")
if how == "asked" and number == "1":
    time.sleep(0.2)
    sys.exit(1)
"""


@pytest.fixture
def two(run: SupervisedRun) -> SupervisedRun:
    (run.folder / "launcher.py").write_text(LAUNCHER)
    (run.folder / "rank.py").write_text(RANK)
    return run


def ended(two: SupervisedRun, how: str, until: Until) -> int:
    """Start both ranks; let it happen once somebody sees them, and return the exit code."""
    member = two.start(sys.executable, "launcher.py", how)
    ranks = until(lambda: two.ranks(2), "a step of both ranks")
    until(lambda: observed(member.pid, ranks.values()), "somebody to see the end of each")
    (two.folder / "observed").touch()
    return member.wait(60)


def observed(supervisor: int, ranks: Iterable[int]) -> bool:
    """Does it, or a child of it, hold a descriptor of each of these processes?"""
    below = psutil.Process(supervisor).children(recursive=True)
    held = ""
    for pid in (supervisor, *(one.pid for one in below)):
        try:
            held += "".join(one.read_text() for one in Path(f"/proc/{pid}/fdinfo").iterdir())
        except OSError:
            continue
    return all(re.search(rf"^Pid:\s+{pid}$", held, re.M) for pid in ranks)


def test_a_rank_that_was_told_to_leave_because_another_had_failed_was_not_asked_to_stop(
    two: SupervisedRun, until: Until
) -> None:
    assert ended(two, "fails", until) == 1
    (only,) = two.attempts()
    assert (only.words, only.sign) == ("exit 1", "exit 1 (ValueError)"), two.members[0].said()


def test_ranks_that_were_asked_to_stop_and_then_failed_were_asked_to_stop_first(
    two: SupervisedRun, until: Until
) -> None:
    assert ended(two, "asked", until) == 1
    (only,) = two.attempts()
    assert only.words == "asked to stop (SIGTERM), then exit 1", two.members[0].said()


@pytest.mark.parametrize(("code", "words"), [(0, "exit 0"), (3, "exit 3")])
def test_a_program_that_we_ended_as_a_leftover_was_not_asked_to_stop_by_anybody(
    two: SupervisedRun, code: int, words: str
) -> None:
    leaves = f"{sys.executable} rank.py leaves & until [ -e stepped-0 ]; do sleep 0.05; done; exit {code}"
    assert two.start("sh", "-c", leaves).wait(60) == code
    (only,) = two.attempts()
    assert only.words == words, two.members[0].said()
