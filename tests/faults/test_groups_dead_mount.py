"""The run directory of replica groups lies on a file system that stops answering: their parent goes on with its work."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host.processes import process
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.supervised import SupervisedRun
from tests.story.test_replica_groups_run import NAMES, Groups

from .conftest import HungMount

pytestmark = [pytest.mark.root, pytest.mark.slow]
Until = Callable[..., Any]


@pytest.fixture
def groups(dead_mount: HungMount, tmp_path: Path) -> Iterator[Groups]:
    run = SupervisedRun(dead_mount.point / "run", tmp_path)
    yield Groups(run, tmp_path)
    dead_mount.answer()
    run.close()


@pytest.mark.fault(
    "The run directory of replica groups stops answering",
    "the groups train on, and their parent still sees to signals, ends and stopped supervisors",
)
def test_a_dead_run_directory_holds_nothing_up_and_its_groups_train_on(
    groups: Groups, dead_mount: HungMount, tmp_path: Path, until: Until
) -> None:
    def state(pid: int) -> str:
        found = process(pid)
        assert found is not None
        return found.state

    member = groups.start(1_000_000)
    pids = groups.train()
    supervisor = until(lambda: groups.row("g002").pid, "the supervisor of g002")
    behind = RunDir(tmp_path / "backing" / "run")  # the same directory, where it always answers
    dead_mount.hang("all:/run")
    for _ in range(2):
        os.kill(supervisor, signal.SIGSTOP)
        until(lambda: state(supervisor) == "T", "it is stopped")
        until(lambda: state(supervisor) != "T", "its parent continues it", 20)
    dead_mount.answer()
    log = behind.attempt(1) / "run.log"
    until(
        lambda: "does not answer: no group is started until it does" in log.read_text(), "that is said afterwards", 60
    )
    until(lambda: "answers again" in log.read_text(), "and that it is over")
    assert {name: groups.pid(name) for name in pids} == pids, "every rank trains on"
    (behind.switches / "kill-switch").touch()
    assert member.wait(90) == 0


def test_groups_that_all_end_while_their_directory_does_not_answer_are_started_again_when_it_does(
    groups: Groups, dead_mount: HungMount, tmp_path: Path, until: Until
) -> None:
    member = groups.start(1_000_000)
    groups.train()
    supervisors = [until(lambda name=name: groups.row(name).pid, f"the supervisor of {name}") for name in NAMES]
    dead_mount.hang("all:/run")
    for pid in supervisors:
        os.kill(pid, signal.SIGKILL)
    until(lambda: all(process(pid) is None for pid in supervisors), "their parent reaps them", 30)
    time.sleep(5)  # two looks at the directory
    assert member.poll() is None, "the ends of the groups are not known: nobody may say that none goes on"
    dead_mount.answer()
    groups.train(2)
    behind = RunDir(tmp_path / "backing" / "run")
    (behind.switches / "kill-switch").touch()
    assert member.wait(90) == 0
