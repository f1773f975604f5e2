"""One run on a dead mount delays no other in the table of all runs, and is UNKNOWN with its age."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.neighbours.typed import typed

from .conftest import HungMount


def make_run(root: Path) -> None:
    for part in ("switches", "watch", "beats", "logs", "launches", "state", "attempts/0001", "nodes"):
        (root / part).mkdir(parents=True)
    (root / "run.yaml").write_text(f"name: {root.name}\n")
    (root / "attempts/0001/start.json").write_text('{"attempt": 1, "at": "2026-11-20T00:00:00+00:00", "host": "n"}')


@pytest.mark.fault(
    "One of many runs lies on a dead mount while somebody types `status`",
    "it is UNKNOWN and says so; all others are shown within seconds",
)
@pytest.mark.root
def test_a_run_on_a_dead_mount_is_unknown_and_all_others_are_shown(tmp_path: Path, dead_mount: HungMount) -> None:
    make_run(tmp_path / "backing" / "dead")
    names = tmp_path / "state" / "runs"
    names.mkdir(parents=True)
    for n in range(20):
        make_run(tmp_path / f"run-{n:02d}")
        (names / f"run-{n:02d}").symlink_to(tmp_path / f"run-{n:02d}")
    (names / "dead").symlink_to(dead_mount.point / "dead")
    dead_mount.hang("all")
    env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(tmp_path / "state"), "PATH": "/nowhere"}
    for words in ((), ("--json",)):
        began = time.monotonic()
        done = typed("status", *words, env=env)
        assert time.monotonic() - began < 15
        assert done.returncode == 0, done.stderr
        if not words:
            table, _, first = done.stdout.partition("\n\n")
            lines = table.splitlines()
            assert len(lines) == 22
            assert lines[1].split()[:2] == ["dead", "UNKNOWN"], "what needs a look comes first"
            assert "has not answered for 4 s" in lines[1]
            assert all("GONE" in line for line in lines[2:])
            assert first.startswith("21 runs need a look, these first:\n")
            continue
        rows = json.loads(done.stdout)["runs"]
        assert [row["verdict"] for row in rows if row["name"] == "dead"] == ["unknown"]
        assert sum(row["verdict"] == "gone" for row in rows) == 20


@pytest.mark.root
@pytest.mark.slow
def test_a_run_on_a_dead_mount_costs_no_other_its_metrics(tmp_path: Path, dead_mount: HungMount) -> None:
    make_run(tmp_path / "backing" / "dead")
    make_run(tmp_path / "well")
    names = tmp_path / "state" / "runs"
    names.mkdir(parents=True)
    (names / "well").symlink_to(tmp_path / "well")
    (names / "dead").symlink_to(dead_mount.point / "dead")
    (tmp_path / "textfile").mkdir()
    dead_mount.hang("all")
    env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(tmp_path / "state"), "PATH": "/nowhere"}
    words = ["metrics", "--to", str(tmp_path / "textfile")]
    began = time.monotonic()
    done = typed(*words, env=env)
    assert time.monotonic() - began < 15
    assert "has not answered for 4 s" in done.stderr and done.returncode == 73, done.stderr
    (written,) = (tmp_path / "textfile").glob("*.prom")
    assert 'run="well"' in written.read_text()
