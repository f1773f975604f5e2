"""A report is written where a part of what it tells does not answer, and says so; the week leaves out no other run."""

from __future__ import annotations

import re
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from tests.faults.conftest import HungMount
from tests.neighbours.patience import waited_for_a_processor
from tests.neighbours.prepared_runs import prepare
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed


@pytest.mark.fault(
    "The checkpoints of a run, or another run, lie on a dead mount while a report is made",
    "the report is written within seconds and says what did not answer",
)
@pytest.mark.root
@pytest.mark.slow
def test_a_report_is_written_without_the_checkpoints_whose_folder_hangs(tmp_path: Path, dead_mount: HungMount) -> None:
    env = outside_a_job(**prepare(tmp_path / "account", datetime.now(timezone.utc), ["fine", "hang"]))
    config = tmp_path / "account" / "fine" / "run.yaml"
    text = re.sub(
        r"^checkpoints:\n  path: null", f"checkpoints:\n  path: {dead_mount.point}", config.read_text(), flags=re.M
    )
    assert str(dead_mount.point) in text
    config.write_text(text)
    (tmp_path / "account" / "state" / "runs" / "dead").symlink_to(dead_mount.point / "r")
    dead_mount.hang("all")
    began, busy = time.monotonic(), waited_for_a_processor()
    done = typed("report", "fine", folder=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 20 + min(60.0, waited_for_a_processor() - busy)
    assert f"{dead_mount.point}: no answer within 4 s" in (tmp_path / "report-fine.html").read_text()

    done = typed("report", "--week", "-o", "-", env=env)
    assert done.returncode == 0, done.stderr
    assert "has not answered for 4 s" in done.stdout
    assert done.stdout.count('<th scope="row">fine</th>') == 1
