"""From where a group of replicas takes weights: from starts at work of its run, as their ranks have written it down."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftsupervise.replicas.sources import ManagerPage, at_work, pages_of, write_manager
from ftsupervise.rundir.attempt_pages import EndPage, write_page
from ftsupervise.rundir.paths import RunDir

FIRST = ManagerPage("http://node-1:1", "g001:a", "http://node-1:2/checkpoint/")
SECOND = ManagerPage("http://node-1:3", "g001:b", "http://node-1:4/checkpoint/")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    for attempt in ("0001", "0002"):
        (tmp_path / "groups" / "g001" / "attempts" / attempt).mkdir(parents=True)
    return RunDir(tmp_path)


@pytest.mark.threat(
    "A start of a group has ended, and another account of its node listens at the port that its manager had, and joins the "
    "quorum at the lighthouse.",
    "Weights are taken from starts at work alone.",
)
def test_weights_are_taken_from_the_newest_start_of_a_group_until_it_has_ended(run: RunDir) -> None:
    group = run.group("g001")
    write_manager(group.attempt(1), 0, FIRST)
    assert at_work(run.group("g000"), 0) == set(), "a newer start has begun"
    write_manager(group.attempt(2), 0, SECOND)
    assert at_work(run.group("g000"), 0) == {SECOND}
    write_page(group.attempt(2), EndPage())
    assert at_work(run.group("g000"), 0) == set()
    assert pages_of(group) == [FIRST, SECOND], "what they were called is known after their end"


def test_each_rank_takes_its_own_weights(run: RunDir) -> None:
    for rank in (0, 1):
        write_manager(run.group("g001").attempt(2), rank, SECOND._replace(weights=f"http://node-1:{rank}/checkpoint/"))
    assert {one.weights for one in at_work(run.group("g000"), 1)} == {"http://node-1:1/checkpoint/"}
    assert at_work(run.group("g000"), 2) == set()
