"""The nodes excluded for waiting jobs: what we excluded is taken back, all of it, and only when it is known to be over."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.model import Cause, CauseKind, Claim, Failure, FailureKind
from ftsupervise.nodes import exclude, incidents, judging
from ftsupervise.nodes.selector import NodePolicy, NodeSelector, Placement
from ftsupervise.run import Options
from ftsupervise.rundir.ledger import over
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import COMES_LAST, Straggler
from ftsupervise.rundir.records import write_json
from ftsupervise.scheduler.allocation import Allocation
from tests.neighbours.queue import Queue

NOW = datetime.now(timezone.utc)
BAD = judging.JudgedNode("n7", 3.0, "excluded", "a failed health command")
ENDED = over(1, Cause(CauseKind.EXIT, code=1), NOW)._replace(failure=Failure(FailureKind.CODE, "exit 1"), exit_code=1)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "run")
    found.state.mkdir(parents=True)
    (found.launches / "0001").mkdir(parents=True)
    write_json(found.launches / "0001" / "launch.json", {"state": "submitted", "token": "t0"})
    return found


def jobs(*ids: str, **more: Any) -> dict[str, dict[str, Any]]:
    return {id: {"excluded": [], **more} for id in ids}


def test_of_an_array_with_several_records_all_are_given_back(tmp_path: Path, rundir: RunDir) -> None:
    """One that was requeued, or held by itself, stands beside the rest."""
    queue = Queue(tmp_path, ["n6", "n7", "n8"], jobs("88_1", "88_[3-10]"))
    queue.change(jobs={**jobs("88_1"), "88_[3-10]": {"excluded": ["n8"]}})
    assert exclude.apply(rundir, queue.env, (BAD,), whole=True).problem == ""
    assert queue.excluded() == {"88_1": ["n7"], "88_[3-10]": ["n8"]}, "n8 is a person's own, and n6 needs a reserve"
    queue.change(nodes=["n6", "n7", "n8", "n9"])
    exclude.apply(rundir, queue.env, (BAD,), whole=True)
    assert queue.excluded() == {"88_1": ["n7"], "88_[3-10]": ["n[7-8]"]}
    exclude.apply(rundir, queue.env, (), whole=True)
    assert queue.excluded() == {"88_1": [], "88_[3-10]": ["n8"]}
    assert not incidents.any_exclusions(rundir.nodes)


def test_what_is_not_all_that_is_known_gives_no_node_back_and_still_adds_one(tmp_path: Path, rundir: RunDir) -> None:
    queue = Queue(tmp_path, ["n5", "n6", "n7", "n8"], jobs("88_[3-10]"))
    exclude.apply(rundir, queue.env, (BAD,), whole=True)
    done = exclude.apply(rundir, queue.env, (BAD._replace(name="n6"),), whole=False)
    assert "no exclusion is taken back" in done.problem
    assert done.changed == ("job 88_[3-10] excludes n[6-7]",)
    exclude.apply(rundir, queue.env, (), whole=True)
    assert queue.excluded() == {"88_[3-10]": []}


def test_once_the_run_has_finished_nobody_is_excluded_for_two(tmp_path: Path, rundir: RunDir) -> None:
    queue = Queue(tmp_path, ["n7", "n8", "n9"], jobs("88_[3-10]"))
    exclude.apply(rundir, queue.env, (BAD,), whole=True)
    assert queue.excluded() == {"88_[3-10]": ["n7"]}
    rundir.finished.touch()
    exclude.apply(rundir, queue.env, (BAD,), whole=False)
    assert queue.excluded() == {"88_[3-10]": []}


def test_who_is_held_takes_over_from_nobody(tmp_path: Path, rundir: RunDir) -> None:
    queue = Queue(tmp_path, ["n7", "n8", "n9"], jobs("88_[3-10]", reason="JobHeldUser"))
    done = exclude.apply(rundir, queue.env, (BAD,), whole=True)
    assert queue.excluded() == {"88_[3-10]": ["n7"]}
    assert not done.excludes("n7")


def excluded_for_two(tmp_path: Path, rundir: RunDir, nodes: list[str], *bad: str, **more: Any) -> list[str]:
    """The nodes excluded for members that need two."""
    tmp_path.mkdir()
    queue = Queue(tmp_path, nodes, jobs("88_[3-10]", nodes=2, requeue=more.pop("requeue", False)))
    judged = tuple(BAD._replace(name=name) for name in bad)
    assert exclude.apply(rundir, queue.env, judged, whole=True, **more).problem == ""
    return queue.excluded()["88_[3-10]"]


def test_a_batch_host_may_die_with_its_supervisor_and_the_next_member_can_start_all_the_same(
    tmp_path: Path, rundir: RunDir
) -> None:
    """Nobody is left who could give a node back: one more than are needed stay."""
    assert excluded_for_two(tmp_path / "a", rundir, ["n6", "n7", "n8"], "n7") == []
    assert excluded_for_two(tmp_path / "b", rundir, ["n6", "n7", "n8", "n9"], "n7") == ["n7"]


@pytest.mark.fault(
    "Two nodes are lost one after the other while one more is excluded for its past: too few nodes are left for the "
    "next member, and no watch runs",
    "Nodes are excluded for their past only while enough others are up, with one (2 %) in reserve; nodes that do not "
    "answer the supervisor are not up, whatever Slurm says yet",
)
def test_nodes_that_do_not_answer_the_supervisor_count_as_gone_before_slurm_knows_it(
    tmp_path: Path, rundir: RunDir
) -> None:
    four = ["n6", "n7", "n8", "n9"]
    assert excluded_for_two(tmp_path / "a", rundir, four, "n7", gone=frozenset({"n8"})) == []
    assert excluded_for_two(tmp_path / "b", rundir, four, "n7", leaving=True, gone=frozenset({"n8"})) == ["n7"]
    assert excluded_for_two(tmp_path / "c", rundir, four, "n7", leaving=True, gone=frozenset({"n8", "n9"})) == []


@pytest.mark.fault(
    "A node that is excluded and down comes back, and is the one that is missing",
    "What is down is excluded only where enough others are up without it",
)
def test_a_node_that_is_excluded_and_down_is_given_back_when_it_may_be_the_one_that_is_missing(
    tmp_path: Path, rundir: RunDir
) -> None:
    """Two are needed and one is up: once the bad one is back there are two."""
    assert excluded_for_two(tmp_path / "a", rundir, ["n6", "n7"], "n7", leaving=True, gone=frozenset({"n7"})) == []


@pytest.mark.fault(
    "Slurm requeues a job with the list it started with, in front of its array",
    "Where jobs are requeued the reserve is kept also when the supervisor leaves",
)
def test_a_supervisor_that_leaves_uses_the_reserve_up_unless_slurm_may_requeue_what_starts_then(
    tmp_path: Path, rundir: RunDir
) -> None:
    """A job keeps the list that it started with, and one that is requeued stands in front of its array."""
    three = ["n6", "n7", "n8"]
    assert excluded_for_two(tmp_path / "a", rundir, three, "n7", leaving=True) == ["n7"]
    assert excluded_for_two(tmp_path / "b", rundir, three, "n7", leaving=True, requeue=True) == []


class Ring:
    """The nodes of a job in a queue of its own."""

    def __init__(self, queue: Queue, rundir: RunDir, shared: Path | None, nodes: str) -> None:
        env = {**queue.env, "SLURM_JOB_ID": "89", "SLURM_ARRAY_JOB_ID": "88", "SLURM_JOB_NODELIST": nodes}
        options = Options(rundir, ("srun", "-N2", "python", "t.py"), "x", care=NodePolicy(directory=shared))
        self.nodes = NodeSelector(rundir, options.name, options.command, options.care, env, Allocation(env))

    def notes(self, node: str, kind: str) -> None:
        self.nodes.judge.note([incidents.Incident(node, kind, NOW, "x", "89")], None)
        self.nodes.exclusions.update(None)

    def next(self, **states: str) -> str | Placement:
        return self.nodes.next(ENDED, states)


@pytest.fixture
def ring(tmp_path: Path, rundir: RunDir) -> Callable[..., tuple[Ring, Queue]]:
    def make(*, shared: Path | None = None, nodes: str = "n[1-3]") -> tuple[Ring, Queue]:
        queue = Queue(tmp_path, [f"n{number}" for number in range(10)], jobs("88_[3-10]", nodes=2))
        return Ring(queue, rundir, shared, nodes), queue

    return make


def test_what_others_know_counts_on_while_their_directory_does_not_answer(
    ring: Callable[..., tuple[Ring, Queue]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incidents.set_override(tmp_path / "share", incidents.EXCLUDE, "n7", who="ada", why="ECC", now=NOW)
    monkeypatch.setattr("ftsupervise.nodes.judging.PATIENCE", 60.0)
    one, queue = ring(shared=tmp_path / "share")
    one.notes("n1", "warning")
    assert queue.excluded() == {"88_[3-10]": ["n7"]}
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr("ftsupervise.host.processes.own_command", lambda **_: sleeps)
    monkeypatch.setattr("ftsupervise.nodes.judging.PATIENCE", 0.5)
    one.notes("n1", "warning")
    one.nodes.exclusions.outdated = True
    one.notes("n1", "warning")
    assert queue.excluded() == {"88_[3-10]": ["n7"]}
    assert "n7" in one.nodes.barred()


def test_a_job_leaves_a_bad_node_only_to_members_that_are_still_there(
    ring: Callable[..., tuple[Ring, Queue]],
) -> None:
    one, queue = ring()
    one.notes("n1", "health")
    assert queue.excluded() == {"88_[3-10]": ["n1"]}
    found = one.next(n1="mixed", n2="mixed", n3="mixed")
    assert isinstance(found, Placement) and set(found.nodes) == {"n2", "n3"}
    down = {"n1": "mixed", "n2": "mixed", "n3": "down"}
    assert "the next member will not get it" in str(one.next(**down))
    queue.change(jobs={})
    found = one.next(**down)
    assert isinstance(found, Placement) and set(found.nodes) == {"n1", "n2"}, "nobody is left to take over"


def test_what_a_site_prints_at_every_start_is_no_answer_of_the_shared_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import atexit; print('welcome'); atexit.register(print, 'bye')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    incidents.set_override(tmp_path / "share", incidents.EXCLUDE, "n7", who="ada", why="ECC", now=NOW)
    found = judging.read_bounded(tmp_path / "share", None, 20.0)
    assert found is not None and [mark.node for mark in found[1].overrides] == ["n7"]


def test_a_node_of_the_job_for_which_the_others_waited_gets_an_entry(
    ring: Callable[..., tuple[Ring, Queue]], rundir: RunDir
) -> None:
    one, _ = ring()
    rundir.attempt(4).mkdir(parents=True)
    one.nodes.waited_for(Claim(4, rundir.attempt(4)), Straggler((16, 17), "n2.example.org", 0.3, COMES_LAST, 24, NOW))
    one.nodes.waited_for(Claim(4, rundir.attempt(4)), Straggler((3,), "another", 0.3, COMES_LAST, 24, NOW))
    (found,) = incidents.read([rundir.nodes]).incidents
    assert (found.node, found.kind, found.rank, found.attempt) == ("n2", "slow", "16,17", 4)
    assert found.evidence.startswith("ranks 16-17 on n2.example.org are slow: they come last at each step")
