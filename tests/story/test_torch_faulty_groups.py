"""Real managers of torchft that lie about their step, and loops that hold the interpreter or wait for a lock for ever: the
group is found and started again, and the others train on with the same weights."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from ftsupervise.model import CauseKind
from ftsupervise.replicas.stalls import GroupStall, read_stalls
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import SupervisedRun

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("faulty_group.py")
NAMES = ("g000", "g001", "g002", "g003")
_LINE = re.compile(r": step (\d+), (\d) of 4 .* weights (\w+)")


class FaultyGroups:
    def __init__(self, run: SupervisedRun) -> None:
        pytest.importorskip("torchft")
        self.run, self.faults = run, run.folder / "faults"
        self.faults.mkdir()
        us = [sys.executable, "-m", "ftsupervise", "groups", "run", "--count", "4", "--slowest-step", "2"]
        each = ["--in-place", "9", "--back-off", "0", "--warm", "off"]
        train = [sys.executable, str(SCRIPT), "--steps", "1000000", "--step-time", "0.1", "--log-every", "1"]
        words = ("--hang", "off", "--warm", "off", "--", *us, "--", *each, "--", *train)
        run.start(*words, FAULTS=str(self.faults), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
        wait_until(lambda: min(self.newest(name) for name in NAMES) > 30, "all groups train", 180)

    def steps(self, name: str) -> list[tuple[int, int, str]]:
        """Step, groups that took part, and the weights after it."""
        text = "".join(path.read_text(errors="replace") for path in self.run.rundir.group(name).logs.glob("*.out"))
        return [(int(step), int(present), weights) for step, present, weights in _LINE.findall(text)]

    def newest(self, name: str) -> int:
        steps = self.steps(name)
        return steps[-1][0] if steps else 0

    def becomes(self, name: str, word: str) -> None:
        path = self.faults / f"{name}.new"
        path.write_text(word)
        path.rename(self.faults / name)

    def stall_until_all_train(self, without: str, bound: float = 240.0) -> float:
        """The longest time in which a group other than ``without`` makes no step, until all four have made steps together."""
        others = [name for name in NAMES if name != without]
        before = {name: self.newest(name) for name in NAMES}
        last, longest = dict.fromkeys(others, time.monotonic()), 0.0
        end = time.monotonic() + bound
        while time.monotonic() < end:
            for name in others:
                step, now = self.newest(name), time.monotonic()
                longest = max(longest, now - last[name])
                if step > before[name]:
                    before[name], last[name] = step, now
            done = self.steps(without)
            if done and done[-1][1] == 4 and done[-1][0] > min(before.values()) - 2 and self.came_back(without):
                return longest
            time.sleep(0.05)
        raise AssertionError(f"{without} did not come back:\n{self.log()}")

    def came_back(self, name: str) -> bool:
        return len(ledger(self.run.rundir.group(name))) > 1

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.run.rundir.attempts.glob("*/run.log")))

    def stall_of(self, name: str) -> GroupStall | None:
        """What is told of the loss of this group, once it is back."""
        page = read_stalls(self.run.rundir)
        found = [one for one in page.stalls if one.gone == (name,) and one.back] if page is not None else []
        return found[-1] if found else None

    def agree(self) -> bool:
        of_step: dict[int, set[str]] = {}
        for name in NAMES:
            for step, _, weights in self.steps(name):
                of_step.setdefault(step, set()).add(weights)
        return len(of_step) > 30 and all(len(found) == 1 for found in of_step.values())


@pytest.mark.fault(
    "The loop of a group holds the interpreter, or waits for a lock, for ever",
    "a hang; the others train on after the join timeout, the group comes back",
)
@pytest.mark.parametrize("word", ["gil", "lock"])
def test_a_loop_that_stands_for_ever_is_found_as_a_hang_and_started_again_while_the_others_train_on(
    run: SupervisedRun, word: str
) -> None:
    groups = FaultyGroups(run)
    groups.becomes("g002", word)
    stall = groups.stall_until_all_train("g002")
    attempts = {name: ledger(run.rundir.group(name)) for name in NAMES}
    cause = attempts["g002"][0].cause
    assert cause is not None and cause.kind is CauseKind.HANG, groups.log()
    assert [len(attempts[name]) for name in NAMES if name != "g002"] == [1, 1, 1], "the others are not touched"
    print(f"{word}: the others stood for {stall:.1f} s")
    assert stall < 14, "ten seconds until the quorum is made without it, and the machine is busy"
    assert groups.agree()
    told = wait_until(lambda: groups.stall_of("g002"), f"the stall is told: {read_stalls(run.rundir)}", 30)
    assert told is not None
    assert abs(told.seconds - stall) < 3 and told.missed, told


@pytest.mark.fault(
    "A group's manager reports a step that nobody has made",
    "nobody takes its weights; the group alone is ended and started again",
)
def test_a_manager_that_tells_a_billion_steps_is_not_believed_and_its_group_alone_is_started_again(
    run: SupervisedRun,
) -> None:
    groups = FaultyGroups(run)
    groups.becomes("g003", "high")
    wait_until(lambda: "g003 is ended and started again" in groups.log(), "it is found", 120)
    (groups.faults / "g003").unlink()
    groups.stall_until_all_train("g003")
    assert [len(ledger(run.rundir.group(name))) for name in NAMES] == [1, 1, 1, 2], groups.log()
    assert max(groups.newest(name) for name in NAMES) < 10**6, "nobody has taken its weights"
    assert groups.agree()
    assert "g003 reports step 1000000000" in "".join(
        path.read_text() for path in run.rundir.group("g000").logs.glob("*.out")
    )


def test_a_group_that_tells_less_or_has_just_been_restored_or_started_again_is_no_liar(run: SupervisedRun) -> None:
    """The first two copy the weights of the others; nobody is ended, and nobody waits."""
    groups = FaultyGroups(run)

    def gone(path: Path) -> bool:
        return not path.exists()

    def all_beyond(step: int) -> bool:
        return min(groups.newest(one) for one in NAMES) > step

    for name, word in (("g001", "low"), ("g002", "restored")):
        groups.becomes(name, word)
        wait_until(partial(gone, groups.faults / name), f"{name} has told it", 60)
        step = groups.newest("g000")
        wait_until(partial(all_beyond, step + 10), "all go on", 120)
    os.kill(next(one.pid for one in read_beats(run.rundir.group("g003")) if one.step), signal.SIGKILL)
    groups.stall_until_all_train("g003")
    time.sleep(10)  # a liar is found within so long
    assert [len(ledger(run.rundir.group(name))) for name in NAMES] == [1, 1, 1, 2], groups.log()
    assert "told the lighthouse step" not in groups.log()
    assert groups.agree()
