"""What all runs share of their nodes lies on a file system that does not answer: no run waits for it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from ftsupervise.rundir.paths import RunDir
from tests.faults.conftest import HungMount
from tests.neighbours.queue import Queue
from tests.neighbours.supervised import SupervisedRun
from tests.neighbours.typed import typed

pytestmark = pytest.mark.root


@pytest.mark.fault("The directory of shared node records hangs", "it is left out, the run goes on")
def test_a_shared_directory_that_hangs_is_left_out_and_the_run_goes_on(
    run: SupervisedRun, hung_mount: HungMount
) -> None:
    hung_mount.hang("getattr", "readdir")
    began = time.monotonic()
    shared = str(hung_mount.point / "shared")
    one = run.start("--in-place", "1", "--back-off", "0", "--nodes-dir", shared, "--", "sh", "-c", "exit 3")
    assert one.wait(60) == 3, one.said()
    assert one.said().count("does not answer: the incidents of other runs are unknown") == 1
    assert len(run.attempts()) == 2
    assert time.monotonic() - began < 45


def test_who_asks_for_the_nodes_is_answered_without_what_hangs(hung_mount: HungMount, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    (rundir.nodes / "exclude").mkdir(parents=True)
    (rundir.nodes / "exclude" / "node-7").touch()
    rundir.switches.mkdir()
    queue = Queue(tmp_path, ["node-7"], {})
    rundir.config.write_text(f"name: run\nnodes: {{directory: {hung_mount.point}/shared}}\n")
    hung_mount.hang("getattr", "readdir")

    def type_in(verb: str) -> subprocess.CompletedProcess[str]:
        return typed("nodes", verb, rundir.root, env=queue.env)

    seen, changed = type_in("list"), type_in("apply")
    assert seen.returncode == 0, seen.stderr
    assert "node-7" in seen.stdout
    assert "does not answer: the incidents of other runs are left out" in seen.stderr
    assert changed.returncode == 69
    assert "not all incidents of the nodes could be read" in changed.stderr, "half of it gives no node back"
