"""Four replica groups under one ``ftsupervise run`` on this machine: what happens to one of them is no affair of the others."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from ftsupervise.host.processes import process
from ftsupervise.model import Attempt, CauseKind
from ftsupervise.replicas.table import GroupState, GroupTable, ReplicaGroup, read_table
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import read_progress
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import Program, SupervisedRun, outside_a_job
from tests.neighbours.typed import typed

LOOP = """\
import os, sys, time
from pathlib import Path
from ftsupervise import Guard

guard, step = Guard(), 0
bad = Path(sys.argv[2]) / os.environ["FTSUPERVISE_GROUP"]
print("group", os.environ["REPLICA_GROUP_ID"], "of", os.environ["NUM_REPLICA_GROUPS"], flush=True)
while step < int(sys.argv[1]):
    if bad.exists():
        raise SystemExit("the data of this group cannot be read")
    time.sleep(0.02)
    step += 1
    if guard.step(step).stop:
        break
else:
    guard.finished(step)
guard.close()
"""
NAMES = ("g000", "g001", "g002", "g003")


class Groups:
    def __init__(self, run: SupervisedRun, folder: Path) -> None:
        self.run, self.folder = run, folder
        (folder / "loop.py").write_text(LOOP)
        (folder / "bad").mkdir()

    def start(self, steps: int, *options: str, env: Mapping[str, str] = {}) -> Program:
        us = [sys.executable, "-m", "ftsupervise", "groups", "run", "--count", "4", "--lighthouse", "none"]
        each = ["--in-place", "9", "--back-off", "0", "--warm", "off", "--guard-poll", "0.1", *options]
        words = [
            *us,
            "--",
            *each,
            "--",
            sys.executable,
            str(self.folder / "loop.py"),
            str(steps),
            str(self.folder / "bad"),
        ]
        return self.run.start("--hang", "off", "--warm", "off", "--", *words, **env)

    def type(self, *words: str) -> str:
        return typed(*words, env=outside_a_job(), code=0).stdout

    def of(self, name: str) -> RunDir:
        return self.run.rundir.group(name)

    def attempts(self, name: str) -> tuple[Attempt, ...]:
        return ledger(self.of(name))

    def pid(self, name: str, attempt: int = 1) -> int:
        """Of its rank, once it makes steps in this attempt; 0 before."""
        beats = [one for one in read_beats(self.of(name)) if one.facts.get("attempt") == str(attempt) and one.step]
        return beats[0].pid if beats else 0

    def train(self, attempt: int = 1, *names: str) -> dict[str, int]:
        return {name: wait_until(partial(self.pid, name, attempt), f"{name} trains") for name in names or NAMES}

    def table(self) -> GroupTable:
        return read_table(self.run.rundir) or GroupTable()

    def row(self, name: str) -> ReplicaGroup:
        return next((one for one in self.table().groups if one.name == name), ReplicaGroup())


@pytest.fixture
def groups(run: SupervisedRun, tmp_path: Path) -> Groups:
    return Groups(run, tmp_path)


@pytest.mark.fault(
    "The supervisor of a replica group is stopped (SIGSTOP), then the process that starts the groups",
    "each is continued after two seconds; the ranks and the other groups do not notice",
)
def test_a_killed_group_comes_back_a_stopped_supervisor_is_continued_and_no_other_group_notices(groups: Groups) -> None:
    member = groups.start(100_000)
    pids = groups.train()
    os.kill(pids["g001"], signal.SIGKILL)
    stopped = wait_until(lambda: groups.row("g003").pid, "the supervisor of g003")
    os.kill(stopped, signal.SIGSTOP)
    groups.train(2, "g001")
    assert {name: groups.pid(name) for name in ("g000", "g002", "g003")} == {
        name: pids[name] for name in ("g000", "g002", "g003")
    }
    said = wait_until(lambda: "g001: attempt 1 ended" in groups.run.log() and groups.run.log(), "its end is told")
    assert "killed by SIGKILL; restarted in place" in said
    wait_until(
        lambda: "g003: its supervisor was stopped (SIGSTOP); it is continued" in groups.run.log(), "that is seen"
    )
    wait_until(lambda: process(stopped).state != "T", "it goes on")  # type: ignore[union-attr]
    above = process(stopped).parent  # type: ignore[union-attr]
    os.kill(above, signal.SIGSTOP)
    wait_until(lambda: process(above).state != "T", "the process above goes on")  # type: ignore[union-attr]
    ours = "this process was stopped (SIGSTOP); the supervisor of g00"
    wait_until(lambda: ours in groups.run.log(), "that is said")
    root = str(groups.run.rundir.root)
    assert "group g001 of 4" in groups.type("logs", root, "--group", "g001", "-n", "0")
    wait_until(lambda: groups.row("g001").attempt == 2 and groups.row("g001").back is not None, "the table has it")
    wait_until(
        lambda: (page := read_progress(groups.run.rundir, 1)) is not None and page.ranks == 4,
        "the progress of the whole run: a page every five seconds, the first one of those that had begun",
    )
    assert groups.run.log().count(ours) == 1, "once"
    (groups.run.rundir.switches / "kill-switch").touch()
    assert member.wait(60) == 0
    assert all(groups.attempts(name)[-1].cause.kind is CauseKind.KILL_SWITCH for name in NAMES)  # type: ignore[union-attr]
    assert not groups.run.processes()


STUBBORN = """\
import os, signal, sys, time
from pathlib import Path
from ftsupervise import Guard

guard, folder = Guard(), Path(sys.argv[2])
if os.environ["FTSUPERVISE_ATTEMPT"] == "1":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
for step in range(1, int(sys.argv[1])):
    time.sleep(0.02)
    (folder / f"{os.environ['FTSUPERVISE_GROUP']}-{os.environ['FTSUPERVISE_ATTEMPT']}").write_text(str(time.time()))
    if guard.step(step).stop and os.environ["FTSUPERVISE_ATTEMPT"] != "1":
        break
guard.close()
"""


@pytest.mark.fault(
    "The supervisor of a replica group is killed, and a rank of it ignores SIGTERM",
    "the group is started again when that rank is gone",
)
@pytest.mark.slow
def test_the_next_copy_of_a_group_whose_supervisor_was_killed_starts_when_the_ranks_of_the_last_one_are_gone(
    groups: Groups,
) -> None:
    (groups.folder / "loop.py").write_text(STUBBORN)
    groups.start(100_000, "--grace", "4")
    groups.train()
    supervisor = wait_until(lambda: groups.row("g001").pid, "the supervisor of g001")
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: "g001: waits: its older copy still ends: processes" in groups.run.log(), "that is said")
    groups.train(2, "g001")
    last = float((groups.folder / "bad" / "g001-1").read_text())
    assert groups.attempts("g001")[1].started.timestamp() > last, "never two copies"
    assert "its supervisor was killed by SIGKILL" in groups.attempts("g001")[0].words
    asked = wait_until(lambda: groups.row("g003").pid, "the supervisor of g003")
    (groups.folder / "loop.py").write_text(LOOP)
    os.kill(asked, signal.SIGTERM)
    wait_until(lambda: len(groups.attempts("g003")) == 2, "a group that somebody has asked to stop comes back")
    wait_until(lambda: "g003: somebody has asked this group alone to stop" in groups.run.log(), "that is said")
    wait_until(lambda: "record: its supervisor was killed by SIGKILL" in groups.run.log(), "the log says so")


def test_below_the_least_the_run_waits_and_goes_on_by_itself(groups: Groups) -> None:
    groups.start(100_000, "--same-failure", "1")
    groups.train()
    for name in ("g002", "g003"):
        (groups.folder / "bad" / name).touch()
    wait_until(lambda: groups.table().below, "too few groups run")
    said = groups.run.log()
    assert "2 of 4 groups run, and fewer than 3 do not train on: they wait" in said
    assert groups.row("g003").state is GroupState.STOPPED and "clear --brake" in groups.row("g003").why
    assert len(groups.attempts("g000")) == 1, "the others are not touched"
    said = groups.type("status", str(groups.run.rundir.root))
    assert "2 of 4 run, at least 3 have to: the run waits since" in said
    assert "exit 1: the data of this group cannot be read; stopped by the brake" in said
    said = groups.type("logs", str(groups.run.rundir.root), "--errors")
    assert [said.count(f"==> group {name}, attempt 1") for name in NAMES] == [0, 0, 1, 1], said
    assert said.count("the data of this group cannot be read") == 2
    said = groups.type("logs", str(groups.run.rundir.root), "-n", "10")
    assert all(f"==> group {name}, attempt 1" in said for name in NAMES) and said.count("\n") <= 4 * 3 + 4
    seen = json.loads(groups.type("status", str(groups.run.rundir.root), "--json"))["groups"]
    assert {one["group"] for one in seen["faults"]} == {"g002", "g003"}
    assert {one["name"]: one["state"] for one in seen["rows"]}["g000"] == "running"
    for name in ("g002", "g003"):
        (groups.folder / "bad" / name).unlink()
    said = groups.type("clear", "--brake", str(groups.run.rundir.root))
    assert "The brake of group g002 is off" in said and "The brake of group g003 is off" in said
    groups.train(2, "g002", "g003")
    wait_until(lambda: "groups run again: the run goes on" in groups.run.log(), "it goes on")


def test_a_group_leaves_for_good_and_joins_again_and_slurms_warning_is_for_all(groups: Groups) -> None:
    member = groups.start(100_000)
    groups.train()
    root = str(groups.run.rundir.root)
    assert "g002 leaves for good" in groups.type("groups", "leave", "g002", root)
    wait_until(lambda: groups.row("g002").state is GroupState.LEFT, "it has left")
    groups.type("groups", "join", "g002", root)
    groups.train(2, "g002")
    member.send_signal(signal.SIGUSR1)
    assert member.wait(60) == 0
    assert {groups.attempts(name)[-1].cause.kind for name in NAMES} == {CauseKind.WARNING}  # type: ignore[union-attr]
    assert [one.cause.kind for one in groups.run.attempts() if one.cause] == [CauseKind.WARNING]


def test_a_run_ends_when_its_groups_have_finished(groups: Groups) -> None:
    member = groups.start(40)
    assert member.wait(60) == 0, member.said()
    assert [one.cause.kind for one in groups.run.attempts() if one.cause] == [CauseKind.FINISHED]
    assert all(len(groups.attempts(name)) == 1 for name in NAMES)
