"""What is kept of a failure where its output lies on a mount that hangs, and where the run is another account's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ftsupervise.rundir.attempt_pages import VerdictPage, read_page
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.patience import wait_until
from tests.neighbours.typed import typed

from .conftest import HungMount

pytestmark = pytest.mark.root
WAITS = 60.0  # seconds on a busy machine: ten of them for the output


@pytest.mark.fault(
    "An attempt has failed, and its output lies on a mount that hangs",
    "the message goes in the same tick and names `diagnose`; what is kept says that the output was not read",
)
def test_an_output_on_a_dead_mount_holds_no_message_and_no_report(dead_mount: HungMount, tmp_path: Path) -> None:
    run, env = fails_three_times(tmp_path, f"output: {dead_mount.point}/%x-%j.out")
    dead_mount.hang("read")
    began = time.monotonic()
    typed("watch", run.root, env=env)
    assert time.monotonic() - began < WAITS
    mail = (tmp_path / "mail").read_text()
    assert "FIRING (critical)  thesis: brake chain" in mail and f"\nlook     ftsupervise diagnose {run.root}\n" in mail
    assert "\nwhy " not in mail
    pages = [read_page(VerdictPage, run.attempt(number)) for number in (1, 2, 3)]
    assert [page.unseen for page in pages if page is not None] == 3 * [("its output was not read within 10 s",)]
    assert not any(page.is_known for page in pages if page is not None)
    began = time.monotonic()
    page = typed("report", run.root, "-o", "-", env=env, code=0).stdout
    assert time.monotonic() - began < WAITS
    assert "<summary>not diagnosed</summary>" in page and "its output was not read within 10 s" in page
    dead_mount.answer()
    assert "KeyError: 'tokens' at train.py:2 <module>" in typed("diagnose", run.root, env=env, code=0).stdout


def test_nothing_is_written_into_a_run_of_another_account(tmp_path: Path) -> None:
    """Whoever may read it is told what to type all the same."""
    run, env = fails_three_times(tmp_path, "nodes: 1")
    for one in run.attempts.iterdir():
        os.chown(one, 65534, 65534)
    before = typed("report", run.root, "-o", "-", env=env, code=0).stdout
    assert "1 of these faults is not diagnosed." in before
    assert f"<code>ftsupervise diagnose {run.root} ATTEMPT</code> says what happened in one." in before
    assert not list(run.attempts.glob("*/verdict.json"))


def fails_three_times(tmp_path: Path, where: str) -> tuple[RunDir, dict[str, str]]:
    """A run of which the brake is on. ``where``: a line of its section ``launch``."""
    (tmp_path / "train.py").write_text("print('step 1 loss 2.3', flush=True)\n{}['tokens']\n")
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: thesis\nscheduler: local\nlaunch:\n  command: python3 train.py\n  jobs: 1\n"
        f"  {where}\n  restart: {{back_off: 0s}}\n"
        f"watch: {{hang: null, disk: null}}\nalerts: {{receivers: [{{file: {{path: {tmp_path}/mail}}}}]}}\n"
    )
    env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    typed("launch", folder=tmp_path, env=env, code=0)
    run = RunDir(tmp_path / "runs" / "thesis")
    wait_until((run.state / "brake").exists, "the brake")
    wait_until((run.attempt(3) / "end.json").exists, "the end of the third attempt")
    return run, env
