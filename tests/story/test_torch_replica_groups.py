"""Four replica groups that train with torchft under ``ftsupervise groups run``: a kill, a hang, the lighthouse's own death."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ftsupervise.model import CauseKind
from ftsupervise.replicas.options import let_join, let_leave
from ftsupervise.replicas.record import read_lighthouse
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from tests.neighbours.patience import wait_until
from tests.neighbours.replicas import longest_pause
from tests.neighbours.supervised import SupervisedRun

pytestmark = [pytest.mark.torch, pytest.mark.slow]
DDP = Path(__file__).parents[2] / "examples" / "replicas" / "ddp.py"
NAMES = ("g000", "g001", "g002", "g003")


class Groups:
    def __init__(self, run: SupervisedRun) -> None:
        pytest.importorskip("torchft")
        self.run = run
        us = [sys.executable, "-m", "ftsupervise", "groups", "run", "--count", "4", "--slowest-step", "3"]
        each = ["--in-place", "9", "--back-off", "0"]
        train = [sys.executable, str(DDP), "--steps", "1000000", "--step-time", "0.1", "--log-every", "1"]
        run.start("--hang", "off", "--warm", "off", "--", *us, "--", *each, "--", *train)

    def pid(self, name: str, attempt: int = 1) -> int:
        beats = read_beats(self.run.rundir.group(name))
        found = [one.pid for one in beats if one.facts.get("attempt") == str(attempt) and one.step]
        return found[0] if found else 0

    def train(self, attempt: int, *names: str) -> dict[str, int]:
        return {name: wait_until(partial(self.pid, name, attempt), f"{name} trains", 120) for name in names}

    def stall(self, fault: Callable[[], None], *survivors: str) -> float:
        logs = [next((self.run.rundir.group(name).logs).glob("*.out")) for name in survivors]
        return longest_pause(logs, fault)


def test_the_survivors_of_a_kill_and_of_a_hang_train_on_and_the_group_comes_back_alone(run: SupervisedRun) -> None:
    groups = Groups(run)
    pids = groups.train(1, *NAMES)
    survivors = [name for name in NAMES if name != "g001"]
    killed = groups.stall(lambda: os.kill(pids["g001"], signal.SIGKILL), *survivors)
    groups.train(2, "g001")
    survivors = [name for name in NAMES if name != "g002"]
    hung = groups.stall(lambda: os.kill(pids["g002"], signal.SIGSTOP), *survivors)
    groups.train(2, "g002")
    page = read_lighthouse(run.rundir.replicas)
    assert page is not None
    without = groups.stall(lambda: os.kill(page.pid, signal.SIGKILL), *NAMES)
    print(
        f"stall of the survivors: {killed:.2f} s of a kill, {hung:.2f} s of a hang, {without:.2f} s of the lighthouse's death"
    )
    assert hung < 13 and killed < 5 and without < 15
    causes = {name: [one.cause and one.cause.kind for one in ledger(run.rundir.group(name))] for name in NAMES}
    assert causes["g001"][0] is CauseKind.SIGNAL and causes["g002"][0] is CauseKind.HANG
    assert len(causes["g000"]) == len(causes["g003"]) == 1, "the others are not touched"
    weights = re.findall(r"step (\d+), 4 of 4 .* weights (\w+)", "".join(_log(run, name) for name in NAMES))
    of_step: dict[str, set[str]] = {}
    for step, digest in weights:
        of_step.setdefault(step, set()).add(digest)
    assert len(of_step) > 30 and all(len(found) == 1 for found in of_step.values()), "all groups have the same weights"


def test_a_group_that_is_let_go_leaves_alone_and_comes_back_when_it_may_join(run: SupervisedRun) -> None:
    groups = Groups(run)
    pids = groups.train(1, *NAMES)
    let_leave(run.rundir, "g002")
    wait_until(lambda: ledger(run.rundir.group("g002"))[0].ended, "the end of g002", 60)
    log = next(run.rundir.group("g000").logs.glob("*.out"))
    wait_until(lambda: "3 of 4 groups" in log.read_text(), "the others to go on", 60)
    let_join(run.rundir, "g002")
    groups.train(2, "g002")
    wait_until(lambda: "4 of 4" in log.read_text().rpartition("3 of 4")[2], "all four", 60)
    others = {name: pids[name] for name in NAMES if name != "g002"}
    assert {name: groups.pid(name) for name in others} == others, "the others are not touched"


def _log(run: SupervisedRun, name: str) -> str:
    return "".join(path.read_text() for path in run.rundir.group(name).logs.glob("*.out"))
