"""One writer on real Slurm: ranks that outlive their slurmd, and those of a job that is stuck in COMPLETING, write on as fast
as they can, and never see that a newer attempt has begun. No checkpoint, switch, beat, mark or page of the newer is touched.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.switches import SAVE
from ftsupervise.sandbox import Sandbox
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]
STUBBORN = Path(__file__).with_name("stubborn.py")
TRIES = 60  # of each old rank after the newer attempt has begun
COMMITS = 20  # of the newer one, beside them


def number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def outlive_their_slurmd(here: Scene, job: str, ranks: list[int], until: Until) -> list[int]:
    """slurmd on node-1 is killed, its network is gone: the ring starts the next attempt on the spare node, rank 1 lives on."""
    here.cut_off("node-1")
    here.lose("node-1", "kill")
    return ranks[1:]


def are_cut_off(here: Scene, job: str, ranks: list[int], until: Until) -> list[int]:
    """The network cable of node-1 is pulled: slurmd, agent and rank 1 live on there. What Slurm finds, it finds by itself."""
    here.sandbox.node("node-1", "cut")
    return ranks[1:]


def are_stuck_in_completing(here: Scene, job: str, ranks: list[int], until: Until) -> list[int]:
    """Every slurmstepd of the job is stopped, as one in state D is; the job is cancelled, the next member starts. Its ring ends
    what it can reach once it sees that."""
    supervisor = json.loads((here.rundir.attempt(1) / "start.json").read_text())["pid"]
    front = processes.process(supervisor)
    assert front is not None
    steps = {found.parent for pid in (*ranks, front.parent) if (found := processes.process(pid))}
    for pid in steps:
        assert "slurmstepd" in (Path("/proc") / str(pid) / "comm").read_text()
        os.kill(pid, signal.SIGSTOP)
    here.cut_off()
    here.sandbox.run(["scancel", f"{job}_1"])
    until(lambda: f"{job}_1 COMPLETING" in here.queue(), "the old job to be COMPLETING")
    return ranks


def play(
    make: Callable[..., Sandbox], folder: Path, turn: int, trouble: Callable[..., list[int]], until: Until
) -> None:
    folder.mkdir()
    hosts = trouble is are_cut_off
    here = Scene(folder, make(nodes=4, hosts=hosts), f"fence-{turn}")
    spare = 0 if trouble is are_stuck_in_completing else 1
    # a rank that we stop is meant to outlive its attempt, not to be found
    job = here.launch(f"{sys.executable} {STUBBORN} {folder}", spare_nodes=spare, restart={"hang": None})
    until(lambda: all(number(folder / f"pid-1-{rank}") for rank in (0, 1)), "the first attempt")
    until(lambda: len(list(here.rundir.checkpoints.glob("step-*"))) > 5, "its checkpoints")
    ranks = [number(folder / f"pid-1-{rank}") for rank in (0, 1)]
    old: list[int] = []
    try:
        old = trouble(here, job, ranks, until)
        if turn % 2 == (
            trouble is outlive_their_slurmd
        ):  # stopped somewhere in its writing, to go on when the newer one is at work
            for pid in old:
                os.kill(pid, signal.SIGSTOP)
        until((folder / "begun").exists, "the second attempt", 90)
        time.sleep(random.random() / 10)
        for pid in old:
            os.kill(pid, signal.SIGCONT)
        watch_the_newer(here, [ranks.index(pid) for pid in old], until)
    finally:
        for pid in (*ranks, *here.agents()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def watch_the_newer(here: Scene, old: list[int], until: Until) -> None:
    folder = here.folder
    page = (here.rundir.attempt(2) / "start.json").read_text()
    switch = here.rundir.switches / SAVE
    switch.write_text("for the newer one to answer")

    def tried() -> bool:
        assert {beat.facts["attempt"] for beat in read_beats(here.rundir)} == {"2"}
        assert switch.read_text() == "for the newer one to answer"
        return all(number(folder / f"tries-{rank}") >= TRIES for rank in old)

    until(tried, "the old ranks' tries", 90)
    until(lambda: number(folder / "commits") >= COMMITS, "the newer one's commits")
    (folder / "enough").touch()
    until((folder / "book.json").exists, "the newer attempt's book")
    book = json.loads((folder / "book.json").read_text())
    # as the book has them: "" is one that two of the old ranks committed empty, before the newer one began
    there = {
        one.name: "".join(by.read_text() for by in one.glob("by")) for one in here.rundir.checkpoints.glob("step-*")
    }
    assert there == book
    # the supervisor of the newest attempt records steps and times here, once a minute and at its end; no rank writes here
    assert set(os.listdir(here.rundir.state)) <= {"steps.json", "last_hours.json", "lineage.json", "members"}
    assert (here.rundir.attempt(2) / "start.json").read_text() == page
    learned = here.rundir.attempt(2) / "imports.json"
    assert not learned.exists() or json.loads(learned.read_text())["attempt"] == 2
    assert not (here.rundir.attempt(2) / "end.json").exists()
    assert here.rundir.staging.joinpath("0001").is_file()


TROUBLES = [outlive_their_slurmd, are_stuck_in_completing]
BY_CABLE = pytest.param(are_cut_off, marks=[pytest.mark.root, pytest.mark.slow])


@pytest.mark.parametrize("trouble", [*TROUBLES, BY_CABLE], ids=lambda one: one.__name__)
def test_ranks_that_write_on_touch_nothing_of_the_newer_attempt_when_they(
    make_sandbox: Callable[..., Sandbox], short_tmp: Path, until: Until, trouble: Any
) -> None:
    play(make_sandbox, short_tmp / trouble.__name__, 1, trouble, until)


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("turn", range(1, 21))
def test_twenty_of_twenty_times_nothing_of_the_newer_attempt_is_touched_when_ranks(
    make_sandbox: Callable[..., Sandbox], short_tmp: Path, until: Until, trouble: Any, turn: int
) -> None:
    play(make_sandbox, short_tmp / f"{trouble.__name__}-{turn}-of-20", turn, trouble, until)
