"""A group's supervisor ends before Slurm has noticed that its node is lost: its older copy may still run there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise.host.signals import SignalQueue
from ftsupervise.model import Attempt
from ftsupervise.replicas.disk import GroupReading
from ftsupervise.replicas.job import GroupsOfJob
from ftsupervise.replicas.options import GroupOptions
from ftsupervise.replicas.table import GroupState
from ftsupervise.rundir.paths import ENV_ATTEMPT, ENV_ATTEMPT_DIR, RunDir

NOW = datetime(2026, 11, 23, 3, 0, tzinfo=timezone.utc)


class Nodes:
    """Slurm's view of the nodes, which a test changes."""

    all = frozenset(("node-0", "node-1", "node-2", "node-3"))
    scores: Mapping[str, float] = {}

    def __init__(self) -> None:
        self.gone: frozenset[str] = frozenset()

    def lost(self) -> frozenset[str]:
        return self.gone

    def close(self) -> None:
        pass


class Lighthouse:
    """It hears a copy of the group, does not, or does not answer."""

    def __init__(self) -> None:
        self.answer: bool | None = True

    def heard(self, group: str) -> bool | None:
        return self.answer


@pytest.fixture
def job(tmp_path: Path) -> Iterator[GroupsOfJob]:
    signals, folder = SignalQueue(), tmp_path / "attempts" / "0001"
    folder.mkdir(parents=True)
    asked = GroupOptions(RunDir(tmp_path), "tr11", "", 3, 1, 2, {}, ("srun", "true"))
    env = {ENV_ATTEMPT: "1", ENV_ATTEMPT_DIR: str(folder)}
    one = GroupsOfJob(asked, env, signals)
    one.nodes.close()
    for number, group in enumerate(one.groups):
        group.row = group.row._replace(nodes=(f"node-{number}",), attempt=1)
    yield one
    signals.close()


def test_a_node_that_slurm_gives_up_after_the_end_of_its_group_is_asked_about_before_the_next_start(
    job: GroupsOfJob,
) -> None:
    nodes, lighthouse = Nodes(), Lighthouse()
    job.nodes, job.lighthouse = nodes, lighthouse  # type: ignore[assignment]
    group = job.groups[1]
    group.take(GroupReading(Attempt(1, "88", NOW, ended=NOW, exit_code=1)), NOW)
    assert group.row.state is GroupState.WAITING and not group.lost, "as its node was well when its supervisor ended"
    assert job.place(group, NOW) == ("node-1",), "as far as anybody knows its node is well, and it has ended its ranks"
    nodes.gone = frozenset(("node-1",))
    assert job.place(group, NOW) is None
    assert group.row.why == "its older copy on node-1 still answers"
    lighthouse.answer = None
    assert job.place(group, NOW) is None
    assert "may still run: the lighthouse does not answer" in group.row.why
    nodes.gone = frozenset()  # a node that is back may still run what it ran
    assert job.place(group, NOW) is None
    lighthouse.answer, nodes.gone = False, frozenset(("node-1",))
    assert job.place(group, NOW) == ("node-3",)
