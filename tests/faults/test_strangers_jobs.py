"""Somebody whose run is looked at writes the numbers of our jobs, or the name of our run, into it. Ours stay as they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ftsupervise.nodes import exclude, judging
from ftsupervise.rundir.launches import may_change
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.queue import Queue

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another account")]

STRANGER = 65534
BAD = judging.JudgedNode("n7", 3.0, "by hand", "said the stranger")


@pytest.fixture
def theirs(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.state.mkdir(parents=True)
    page = run.launches / "0001" / "launch.json"
    page.parent.mkdir(parents=True)
    page.write_text(json.dumps({"token": "abc", "state": "submitted", "job_ids": ["88"], "by": "root@here"}))
    for path in (run.root, page):
        os.chown(path, STRANGER, STRANGER)
    return run


@pytest.mark.threat(
    "You watch a run whose owner writes your jobs' numbers or your run's name into its files, and marks all nodes as "
    "bad.",
    "Only launches that this account made itself, or in its own run directory, say which jobs may be changed.",
)
@pytest.mark.parametrize("comment", ["ftsupervise:x:abc", "something else"])
def test_a_run_of_somebody_else_keeps_no_job_of_ours_from_a_node(tmp_path: Path, theirs: RunDir, comment: str) -> None:
    queue = Queue(tmp_path, ["n5", "n6", "n7", "n8"], {"88_[3-10]": {"excluded": [], "comment": comment}})
    exclude.apply(theirs, queue.env, (BAD,), whole=True)
    assert queue.excluded() == {"88_[3-10]": []}
    assert not may_change(theirs, "88_3"), "nor is one of ours let go because of their brake"
    os.chown(theirs.launches / "0001" / "launch.json", 0, 0)
    exclude.apply(theirs, queue.env, (BAD,), whole=True)
    assert queue.excluded() == {"88_[3-10]": ["n7"]}, "one that we have launched there is"
    assert may_change(theirs, "88_3")
