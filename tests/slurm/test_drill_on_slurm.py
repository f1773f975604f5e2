"""``ftsupervise drill`` of the smallest example in a Slurm that is made for it: every row passes, and nothing stays."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from ftsupervise.host import processes
from tests.neighbours.typed import typed

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
MINIMAL = Path(__file__).parents[2] / "examples" / "minimal"


def test_the_smallest_example_passes_every_row_that_can_be_tried_here(tmp_path: Path) -> None:
    folder, temporary = tmp_path / "minimal", tmp_path / "temporary"
    shutil.copytree(MINIMAL, folder, ignore=shutil.ignore_patterns("runs", "checkpoints"))
    temporary.mkdir()
    places = {"FTSUPERVISE_STATE_DIR": str(tmp_path / "state"), "TMPDIR": str(temporary)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, **places, "PATH": path}
    done = typed("drill", "--on", "sandbox", "--json", folder=folder, env=env, code=0, seconds=1500)
    rows = {row["row"]: row for row in json.loads(done.stdout)["rows"]}
    missed = {name for name, row in rows.items() if row["outcome"] == "could not be tried"}
    assert {row["outcome"] for name, row in rows.items() if name not in missed} == {"pass"}, rows
    assert missed <= {"cancel-while-saving", *(["fill-disk"] if os.geteuid() else [])}, (
        rows
    )  # a save that was too quick
    assert not processes.marked("TMPDIR").get(str(temporary))
    assert not list(temporary.glob("ftsupervise-drill-*"))
    assert not (folder / "runs").exists()
