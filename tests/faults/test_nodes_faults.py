"""What all runs share of their nodes lies on a file system that does not answer: no run waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from tests.faults.conftest import HungMount
from tests.neighbours.queue import Queue

pytestmark = pytest.mark.root


def test_a_shared_directory_that_hangs_is_left_out_and_the_run_goes_on(hung_mount: HungMount, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    hung_mount.hang("getattr", "readdir")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FTSUPERVISE_"))}
    argv = [
        sys.executable,
        "-m",
        "ftsupervise",
        "run",
        "--run-dir",
        str(rundir.root),
        "--in-place",
        "1",
        "--back-off",
        "0",
    ]
    began = time.monotonic()
    done = subprocess.run(
        [*argv, "--nodes-dir", str(hung_mount.point / "shared"), "--", "sh", "-c", "exit 3"],
        env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("does not answer: nothing new is known of nodes from other runs") == 1
    assert len(ledger(rundir)) == 2
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
        words = [sys.executable, "-m", "ftsupervise", "nodes", verb, str(rundir.root)]
        return subprocess.run(words, env=queue.env, capture_output=True, text=True, timeout=60, check=False)

    seen, changed = type_in("list"), type_in("apply")
    assert seen.returncode == 0, seen.stderr
    assert "node-7" in seen.stdout
    assert "does not answer: what other runs know of the nodes is left out" in seen.stderr
    assert changed.returncode == 69
    assert "not all that is known of the nodes could be read" in changed.stderr, "half of it gives no node back"
