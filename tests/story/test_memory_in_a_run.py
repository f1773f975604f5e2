"""One rank whose memory is short makes all ranks save and leave; the ledger and status name it."""

from __future__ import annotations

import sys

import pytest

from ftsupervise.model import CauseKind, FailureKind
from tests.neighbours.supervised import SupervisedRun
from tests.neighbours.typed import typed

# Two ranks that meet in each step. In the first attempt rank 1 takes more of the memory than its limit leaves it.
TWO_RANKS = """
import os, socket, time
here, there = socket.socketpair()
child = os.fork()
rank, other = (0, here) if child else (1, there)
from ftsupervise import Guard
from ftsupervise.host.memory import HostMemory
def agree(vote):
    other.sendall(vote.to_bytes(8, "big", signed=True))
    return max(vote, int.from_bytes(other.recv(8, socket.MSG_WAITALL), "big", signed=True))
short = rank == 1 and os.environ["FTSUPERVISE_ATTEMPT"] == "1"
limit = max(HostMemory().shares().values()) + 0.012 if short else 0.999
guard = Guard(poll=0.01, agree=agree, rank=rank, world=2, memory=limit)
hold, last = [], 2000 if os.environ["FTSUPERVISE_ATTEMPT"] == "1" else 40
for step in range(1, last + 1):
    if last > 40:
        time.sleep(0.01)
    if short and step % 50 == 25:  # what is full from the beginning stops nobody: it comes, and goes, and comes
        hold = [] if hold else [bytearray(os.urandom(1 << 20) * 400)]
    decision = guard.step(step)
    if decision.save and rank == 0:
        with guard.checkpoint(step) as folder:
            (folder / "state").write_text(str(step))
    if decision.stop:
        print("rank", rank, "leaves at", step, flush=True)
        break
else:
    guard.finished(last)
guard.close()
if child:
    os.waitpid(child, 0)
"""


@pytest.mark.fault(
    "Memory is short on one rank alone",
    "all ranks save and leave at the same step; the ledger and status name the rank and the memory",
)
def test_the_rank_whose_memory_is_short_is_named_and_all_leave_with_a_checkpoint(run: SupervisedRun) -> None:
    words = ("--in-place", "5", "--back-off", "0", "--warm", "off")
    code = run.start(*words, "--", sys.executable, "-c", TWO_RANKS).wait(120)
    said = run.members[0].said()
    assert code == 0, said
    first, last = run.attempts()
    assert last.words == "finished" and first.saved is not None and said.count(f"leaves at {first.saved}") == 2, said
    assert first.cause is not None and first.cause.kind is CauseKind.HOST_MEMORY
    assert first.words.startswith("host memory: rank 1 on ") and "% used, limit " in first.words
    assert first.failure is not None and first.failure.kind is FailureKind.MEMORY
    assert "rank 1: host memory" in said, "rank 0 knows no more than that somebody is short"
    told = typed("status", run.rundir.root)
    assert "host memory: rank 1 on" in told.stdout, told


FULL = """
import time
from ftsupervise import Guard
with Guard(poll=0.001) as guard:
    for step in range(1, 200):
        if guard.step(step).stop:
            break
        time.sleep(0.005)
    else:
        guard.finished(200)
"""


@pytest.mark.fault(
    "Another job uses the memory of the host up to the limit",
    "the run stops once, with a save; where it is as full when the next attempt begins, that is said and the run trains on",
)
def test_a_host_that_is_full_from_the_beginning_is_told_and_the_run_trains_on(run: SupervisedRun) -> None:
    words = ("--in-place", "5", "--back-off", "0", "--warm", "off", "--guard-memory", "0.001")
    code = run.start(*words, "--", sys.executable, "-c", FULL).wait(120)
    said = run.members[0].said()
    assert code == 0, said
    assert [one.words for one in run.attempts()] == ["finished"], said
    assert "used at the first step already, limit 0%: the next attempt would find the same" in said
