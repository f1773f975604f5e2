"""The job ring's own eyes: one node, no agent. A rank's death ends the attempt at once when nobody else would act on it."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ftsupervise.host.signals import SignalQueue
from ftsupervise.ranks.agent_pool import Agents, BeatPoller
from ftsupervise.ranks.rank_table import RankTable
from ftsupervise.rundir.heartbeat_page import write_beat
from ftsupervise.rundir.paths import RunDir
from ftsupervise.scheduler.allocation import Allocation
from ftsupervise.truth import Beat
from tests.neighbours.supervised import Program, SupervisedRun

Until = Callable[..., Any]

# Two ranks below a launcher that sits and waits, as torchrun's workers when one is stuck in a collective.
TRAIN = """
import os, sys, time
from ftsupervise import Guard
if os.environ["FTSUPERVISE_RESTART"] == "1":
    sys.exit(0)
guard = Guard(rank=int(sys.argv[1]), world=2, beat_every=0.05, poll=0.05, signals=())
for step in range(1, 100000):
    guard.step(step)
    time.sleep(0.01)
"""


def start(run: SupervisedRun, command: str, **env: str) -> Program:
    (run.folder / "train.py").write_text(TRAIN)
    words = command.replace("RANK", f"{sys.executable} train.py")
    return run.start("--in-place", "2", "--", "sh", "-c", words, **env)


def test_a_dead_worker_below_a_launcher_that_waits_ends_the_attempt_at_once(run: SupervisedRun, until: Until) -> None:
    ring = start(run, "RANK 0 & RANK 1 & wait", TORCHELASTIC_MAX_RESTARTS="0")
    ranks = until(lambda: run.ranks(2), "both ranks")
    pages = _base(ranks[1])
    until(lambda: _watches(ring.supervisor, ranks[1]), "the ring to have found the rank")
    struck = time.time()
    os.kill(ranks[1], signal.SIGKILL)
    assert ring.wait(60) == 0
    log = run.log()
    told = re.search(r"^(\S+) rank 1 on \S+ (killed by SIGKILL|died): the other ranks have", log, re.M)
    assert told, log
    took = datetime.fromisoformat(told[1]).timestamp() - struck
    print(f"from the kill to the action: {took * 1e3:.0f} ms")
    first, second = run.attempts()
    assert first.sign in ("killed by SIGKILL", "died")
    assert (first.then.partition(":")[0], second.exit_code) == ("restarted in place", 0)
    assert not Path(pages).exists(), "no page is left in the node's memory"


def test_a_dead_rank_that_its_shell_may_start_again_is_left_to_the_shell(run: SupervisedRun, until: Until) -> None:
    ring = start(run, "RANK 0 & (RANK 1; sleep 1; echo again) & wait; kill %1; exit 0")
    ranks = until(lambda: run.ranks(2), "both ranks")
    os.kill(ranks[1], signal.SIGKILL)
    ring.until_said("again")
    os.kill(ranks[0], signal.SIGTERM)
    assert ring.wait(60) == 0
    assert len(run.attempts()) == 1


def test_where_no_agent_can_be_started_the_run_directory_tells_and_the_log_says_so_once(
    tmp_path: Path, until: Until
) -> None:
    """An allocation of two nodes, and no Slurm command that works."""
    (tmp_path / "srun").write_text("#!/bin/sh\necho 'srun: error: no such job' >&2; exit 1\n")
    (tmp_path / "srun").chmod(0o755)
    env = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node-[0-1]", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    rundir, log, signals = RunDir(tmp_path / "run"), tmp_path / "run.log", SignalQueue()
    rundir.beats.mkdir(parents=True)
    agents = Agents(rundir, Allocation(env), env, signals.wake, silence=0.5)
    try:
        agents.begin(4, log)
        assert agents.table.newest() == [], "unknown, until somebody tells"
        beat = Beat(1, 17, "train", datetime.now(timezone.utc), 77, "node-1", {"attempt": "4"})
        write_beat(rundir, beat)
        (found,) = until(agents.table.newest, "the beat")
        assert (found.rank, found.node, found.step, found.state) == (1, "node-1", 17, "")

        def told() -> bool:
            agents.keep_running()
            return "have ended: srun: error: no such job" in log.read_text()

        until(told)
        assert agents.ask({"node-1": "ping"}, timeout=0.3) == {}
        assert agents.kill(tmp_path, ["node-0", "node-1"], 0.3) == frozenset()
    finally:
        agents.close()
        signals.close()
    said = log.read_text()
    assert (
        said.count("no answer from the agents on node-0, node-1: their ranks are followed through the run directory")
        == 1
    )
    assert agents.table.deaths() == []


def _watches(pid: int, rank: int) -> bool:
    """Does it hold a descriptor of that process?"""
    found = Path(f"/proc/{pid}/fdinfo").iterdir()
    try:
        return any(re.search(rf"^Pid:\s+{rank}$", one.read_text(), re.M) for one in found)
    except OSError:
        return False


def _base(pid: int) -> str:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return str(Path(next(word for word in words if word.startswith("FTSUPERVISE_PAGES=")).partition("=")[2]).parent)


def test_beats_of_the_run_directory_are_pulses_whose_age_is_when_we_saw_them_change() -> None:
    slow = BeatPoller(RunDir("/none"), RankTable(b""), lambda: False)
    try:
        yesterday = datetime.fromisoformat("2020-01-01T00:00:00+00:00")  # another host's clock is anywhere

        def beat(step: int, second: int, attempt: str = "2") -> Beat:
            return Beat(3, step, "train", yesterday.replace(second=second), 77, "node-1", {"attempt": attempt})

        def look(one: Beat, now: float) -> list[tuple[float, float, float]]:
            return [(p.stepped, p.beaten, p.seen) for p in slow.states((one,), 2, now)]

        assert look(beat(5, 1), 10.0) == [(10.0, 10.0, 10.0)]
        assert look(beat(5, 1), 12.0) == [(10.0, 10.0, 12.0)]
        assert look(beat(5, 2), 14.0) == [(10.0, 14.0, 14.0)]
        assert look(beat(6, 3), 16.0) == [(16.0, 16.0, 16.0)]
        assert look(beat(9, 4, attempt="1"), 18.0) == []
    finally:
        slow.close()
