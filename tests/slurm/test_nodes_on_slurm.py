"""Bad nodes on real Slurm: left out here, excluded for waiting jobs and the next launch; the health command on every node."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.nodes.incidents import Incident, IncidentLog
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import read_brake
from ftsupervise.sandbox import Sandbox
from tests.neighbours.typed import typed

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]
BAD = "echo up on $SLURMD_NODENAME; [ $SLURMD_NODENAME = node-1 ] && kill -9 $$; until [ -e go ]; do sleep 0.2; done"
MARK = "; if [ $SLURM_PROCID = 0 ]; then touch runs/bad/state/finished; fi"  # (every rank ends with 0)


@dataclass
class Here:
    """A run in a sandbox of its own."""

    folder: Path
    sandbox: Sandbox

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.folder / "runs" / "bad")

    def settings(self, command: str, nodes: dict[str, Any] | None = None, **launch: Any) -> None:
        lines = {"restart": {"back_off": "100ms"}, "command": command, "nodes": 2, "jobs": 3, **launch}
        values = {"name": "bad", "launch": {"tasks_per_node": 1, **lines}, **({"nodes": nodes} if nodes else {})}
        (self.folder / "ftsupervise.yaml").write_text("".join(f"{k}: {json.dumps(v)}\n" for k, v in values.items()))

    def type(self, *words: str, code: int = 0) -> str:
        done = typed(*words, folder=self.folder, env=self.sandbox.env(), code=code)
        return done.stdout + done.stderr

    def launch(self) -> str:
        found = re.search(r"submitted as job (.*) \(", self.type("launch"))
        assert found
        return found[1]

    def waiting(self) -> dict[str, str]:
        """Pending job -> the nodes excluded for it, as squeue says."""
        said = self.sandbox.run(["squeue", "-h", "-t", "PENDING", "-o", "%i|%x"])
        return dict(line.strip().split("|") for line in said.splitlines())

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in json.loads(self.type("nodes", "--json"))["nodes"]}

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.rundir.logs.glob("*.out")))

    def over(self) -> bool:
        return not self.sandbox.run(["squeue", "-h"]).strip()


@pytest.fixture
def here(make_sandbox: Callable[..., Sandbox], short_tmp: Path, request: pytest.FixtureRequest) -> Callable[..., Here]:
    def make(**shape: Any) -> Here:
        folder = short_tmp / re.sub(r"[^a-z0-9]+", "-", request.node.name)[5:35]
        folder.mkdir()
        return Here(folder, make_sandbox(**shape))

    return make


@pytest.mark.fault("A node kills its rank twice", "it is excluded for the next member and the next launch")
def test_a_node_that_kills_its_rank_twice_is_left_and_neither_the_next_member_nor_the_next_launch_gets_it(
    here: Callable[..., Here], until: Until
) -> None:
    one = here(nodes=5)
    one.settings(BAD + MARK, exclude=["node-3"])
    job = one.launch()
    until(lambda: set(one.waiting().values()) == {"node-[1,3]"}, "the node to be excluded for those that wait")
    (one.folder / "go").touch()
    until(one.rundir.finished.exists, "the second member to finish")
    until(one.over, "the end of the queue")
    attempts = ledger(one.rundir)
    assert [a.nodes for a in attempts] == [("node-0", "node-1")] * 2 + [("node-0", "node-2")]
    assert [a.job_id for a in attempts] == [f"{job}_1", f"{job}_1", f"{job}_2"]
    assert "there is no node to take the place of node-1, and the next member will not get it" in attempts[1].then
    node = one.nodes()["node-1"]
    assert (node["state"], node["incidents"], node["last"]["kind"]) == ("excluded", 2, "killed")
    assert "rank 1 on node-1 killed by SIGKILL" in one.type("nodes")
    one.rundir.finished.unlink()
    dry = one.type("launch", "--dry-run")
    assert "#SBATCH --exclude=node-3,node-1" in dry
    assert "note: node-1 is excluded: score 2 of 1.5, 2 incidents" in dry
    one.settings("sleep 60", exclude=["node-3"], time="1h")
    again = one.launch()
    until(lambda: one.waiting() == {f"{again}_[2-3%1]": "node-[1,3]"}, "the next launch")
    until((one.rundir.attempt(4) / "start.json").exists, "its first member, which tells those who wait, too")
    assert "excludes node-3" in one.type("nodes", "clear", "node-1"), one.waiting()
    assert one.waiting() == {f"{again}_[2-3%1]": "node-3"}, "what the settings exclude stays"
    one.sandbox.run(["scancel", again])


@pytest.mark.fault(
    "The batch host dies with its supervisor while another node is excluded: nobody is left who could give the node "
    "back",
    "The reserve: one more node than are needed stays for the members that wait; only a supervisor that leaves uses "
    "it up, for the member that starts in its place",
)
@pytest.mark.slow
def test_the_batch_host_dies_while_another_node_is_bad_and_the_chain_goes_on_with_no_watch(
    here: Callable[..., Here], until: Until
) -> None:
    """Of three nodes two are needed: the bad one is kept from the next member only while it starts."""
    one = here(nodes=3, slurmd_timeout=10)
    one.settings(BAD + MARK, jobs=4)
    job = one.launch()
    until(lambda: "up on node-2" in one.log(), "the second member, on the other nodes")
    assert ledger(one.rundir)[-1].nodes == ("node-0", "node-2")
    until(lambda: one.waiting() == {f"{job}_[3-4%1]": ""}, "no exclusion that could make a start impossible")
    assert "it needs 2, and 1 in reserve" in one.log()
    one.sandbox.node("node-0", "crash")
    until(lambda: ledger(one.rundir)[-1].nodes == ("node-1", "node-2"), "the next member, on the nodes there are", 120)
    one.sandbox.run(["scancel", job])


def test_a_spare_takes_the_place_of_a_node_whose_rank_died(here: Callable[..., Here], until: Until) -> None:
    one = here(nodes=3)
    one.settings(BAD + MARK, spare_nodes=1, jobs=2)
    one.launch()
    until(lambda: "up on node-2" in one.log(), "the spare")
    (one.folder / "go").touch()
    until(one.rundir.finished.exists, "the end")
    until(one.over, "the end of the queue")
    assert [a.nodes for a in ledger(one.rundir)] == [("node-0", "node-1"), ("node-0", "node-2")]
    assert "used; one incident" in one.type("nodes")


def test_once_the_run_has_finished_no_member_waits_for_better_nodes(here: Callable[..., Here], until: Until) -> None:
    """Of four nodes one is excluded and two others drained, and two are needed: the rest of the chain could never leave."""
    one = here(nodes=4)
    one.settings(BAD + MARK, jobs=4)
    job = one.launch()
    until(lambda: "up on node-2" in one.log(), "the second member")
    until(lambda: one.waiting() == {f"{job}_[3-4%1]": "node-1"}, "those who wait")
    one.sandbox.run(["scontrol", "update", "NodeName=node-[2-3]", "State=DRAIN", "Reason=test"])
    (one.folder / "go").touch()
    until(one.rundir.finished.exists, "the end of the run")
    until(one.over, "the end of the queue")
    assert len(ledger(one.rundir)) == 3


@pytest.mark.fault("A failure moves with its rank from node to node", "no node is excluded for it")
def test_a_failure_that_goes_with_the_rank_keeps_nobody_from_any_node(here: Callable[..., Here], until: Until) -> None:
    one = here(nodes=3)
    one.settings(
        "[ $SLURM_PROCID = 1 ] && kill -9 $$; sleep 30",
        spare_nodes=1,
        jobs=2,
        restart={"same_failure": 4, "back_off": "0s"},
    )
    one.launch()
    until(lambda: read_brake(one.rundir), "the brake")
    assert {a.nodes for a in ledger(one.rundir)} == {("node-0", "node-1"), ("node-0", "node-2")}
    assert "rank 1 has failed in the same way on node-1, node-2: this blames no node" in one.log()
    assert one.nodes() == {}
    assert set(one.waiting().values()) == {""}
    one.sandbox.run(["scancel", "-u", str(os.getuid())])


@pytest.mark.fault("The health command fails or hangs on one node", "that node is not used")
def test_a_node_that_fails_its_health_command_is_not_used_and_one_that_hangs_neither(
    here: Callable[..., Here], until: Until
) -> None:
    one = here(nodes=4)
    sick = (
        "case $SLURMD_NODENAME in node-1) echo 'GPU 3: 12 uncorrectable errors'; exit 2;; "
        "node-2) sleep 600;; node-3) echo hot; exit 1;; esac"
    )
    health = {"command": sick, "timeout": "8s", "when": ["start"]}
    one.settings("echo up; sleep 1", {"health": health}, spare_nodes=2, jobs=2)
    one.launch()
    until(lambda: ledger(one.rundir) and ledger(one.rundir)[-1].ended, "the first member")
    assert ledger(one.rundir)[0].nodes == ("node-0", "node-3")
    assert "health command on node-1: critical: GPU 3: 12 uncorrectable errors" in one.log()
    assert "health command on node-2: no answer" in one.log()
    found = one.nodes()
    assert {name: (node["last"]["kind"], node["state"]) for name, node in found.items()} == {
        "node-1": ("health", "excluded"),
        "node-2": ("no-answer", "excluded"),
        "node-3": ("warning", ""),
    }
    assert "too few nodes would be left" in one.log(), "four nodes are needed, and the partition has four"
    one.type("kill", "--yes")
    until(one.over, "the end of the queue")


@pytest.mark.fault("The health command fails on all nodes", "the command is not started, the brake counts it")
def test_no_fit_node_no_start_and_the_brake_counts_it(here: Callable[..., Here], until: Until) -> None:
    one = here(nodes=2)
    health = {"command": "echo broken; exit 2", "timeout": "5s"}
    one.settings("echo up", {"health": health}, restart={"back_off": "0s"})
    one.launch()
    until(lambda: read_brake(one.rundir), "the brake")
    assert {(a.exit_code, a.sign) for a in ledger(one.rundir)} == {(75, "no node healthy")}
    assert len(ledger(one.rundir)) == 3, "a lost node has ten tries, a health command that fails everywhere has not"
    assert "up" not in one.log().splitlines()
    one.sandbox.run(["scancel", "-u", str(os.getuid())])


@pytest.mark.fault(
    "The controller is down while waiting jobs are changed",
    "that is no answer: the change is made later",
)
def test_the_jobs_that_wait_are_told_at_once_and_a_controller_that_is_down_is_no_answer(
    here: Callable[..., Here], until: Until
) -> None:
    one = here(nodes=4)
    one.settings("sleep 60", jobs=3, chain="daisy", exclude=["node-0"], tasks_per_node=1)
    one.launch()
    until(lambda: len(one.waiting()) == 2 and ledger(one.rundir), "the first member, which looks when it starts")
    one.type("nodes", "exclude", "node-2", "--reason", "by me", "--no-apply")
    assert set(one.waiting().values()) == {"node-0"}
    assert "excludes node-[0,2]" in one.type("nodes", "apply")
    assert set(one.waiting().values()) == {"node-[0,2]"}
    assert "2 waiting jobs: nothing to change" in one.type("nodes", "apply")
    one.sandbox.controller("stop")
    assert "the waiting jobs are not updated yet" in one.type("nodes", "clear", "node-2")
    one.type("nodes", "apply", code=69)
    one.sandbox.controller("start")
    one.type("nodes", "apply")
    assert set(one.waiting().values()) == {"node-0"}, "only what was ours is taken back"
    one.sandbox.run(["scancel", "-u", str(os.getuid())])


@pytest.mark.fault(
    "All jobs of a run wait and too few nodes are left",
    "The watch gives back what is excluded for its past",
)
def test_the_watch_takes_a_node_back_when_too_few_are_left_for_those_who_wait(
    here: Callable[..., Here], until: Until
) -> None:
    """One node is excluded, two others are drained: no supervisor of the run is there to take it back."""
    one = here(nodes=4)
    filler = one.sandbox.run(
        ["sbatch", "--parsable", "-N4", "--exclusive", "-o", os.devnull, "--wrap=sleep 600"]
    ).strip()
    until(lambda: "RUNNING" in one.sandbox.run(["squeue", "-h", "-o", "%T"]), "the other job")
    one.settings("sleep 60", jobs=2)
    job = one.launch()
    book = IncidentLog("test")
    now = datetime.now(timezone.utc)
    book.add(Incident("node-1", "killed", now, "bad", "1", attempt, "1", "killed", "node-0", "") for attempt in (1, 2))
    book.write([one.rundir.nodes])
    assert "excludes node-1" in one.type("nodes", "apply")
    one.sandbox.run(["scontrol", "update", "NodeName=node-[2-3]", "State=DRAIN", "Reason=test"])
    one.sandbox.run(["scancel", filler])
    until(lambda: filler not in one.sandbox.run(["squeue", "-h", "-o", "%A"]), "the other job's end")
    assert set(one.waiting().values()) == {"node-1"}
    assert f"waiting; job {job}_[1-2%1] excludes no node any more" in one.type("watch")
    until(lambda: "RUNNING" in one.sandbox.run(["squeue", "-h", "-j", job, "-o", "%T"]), "the first member")
    one.sandbox.run(["scancel", job])
