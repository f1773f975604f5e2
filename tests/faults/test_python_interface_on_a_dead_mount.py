"""``ftsupervise.Run``, and a followed report, while a place of the run or of the account hangs: both go on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftsupervise.cli import time_limit
from tests.neighbours.patience import wait_until, waited_for_a_processor
from tests.neighbours.supervised import Program
from tests.neighbours.typed import FT

from .conftest import HungMount
from .test_dead_mount_everywhere import SLACK, Desk

pytestmark = pytest.mark.root

NOTEBOOK = """import os, sys, threading, time
import ftsupervise
run = ftsupervise.Run(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for name in sys.argv[2:]:
    began = time.monotonic()
    try:
        getattr(run, name)()
        said = "answered"
    except ftsupervise.Error as error:
        said = type(error).__name__ + ": " + " ".join(str(error).split())
    print(f"{name}|{time.monotonic() - began:.1f}|{said}", flush=True)
"""


@pytest.mark.fault(
    "A notebook asks about a run, or launches it, while its run directory or its settings hang",
    "`ftsupervise.Run` raises within the bound of the command of that name and leaves no process that could be ended; the "
    "notebook goes on, and ends",
)
@pytest.mark.parametrize("lies", ["run", "settings", "state", "home"])
def test_a_notebook_goes_on_while_a_place_hangs(tmp_path: Path, dead_mount: HungMount, lies: str) -> None:
    desk = Desk(tmp_path, dead_mount, lies, "notebook")
    names = ("status", "attempts", "checkpoints", "alerts", "save", "launch")
    where = "r" if desk.by_name else str(desk.settings)
    notebook = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, where, *names],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **desk.env},
    )  # fmt: skip
    assert notebook.stdin is not None and notebook.stdout is not None
    assert notebook.stdout.readline() == "ready\n"
    dead_mount.hang("all")
    busy, began = waited_for_a_processor(), time.monotonic()
    bound = sum(time_limit.BOUNDS["launch" if name == "launch" else "status"].seconds + SLACK for name in names)
    try:
        said, _ = notebook.communicate("\n", timeout=bound + 60)
    except subprocess.TimeoutExpired:
        notebook.kill()
        raise
    finally:
        left = [one for one in desk.left() if one.state != "D"]
        dead_mount.answer()
    late = waited_for_a_processor() - busy
    assert time.monotonic() - began <= bound + late, said
    assert notebook.returncode == 0 and not left, (said, left)
    lines = [line.split("|") for line in said.splitlines()]
    assert [name for name, *_ in lines] == list(names)
    for name, seconds, words in lines:
        most = time_limit.BOUNDS["launch" if name == "launch" else "status"].seconds + SLACK + late
        assert float(seconds) <= most, f"{name} took {seconds} s: {words}"
    if lies == "run":
        assert all("NoAnswer: " in words for _, _, words in lines), said


@pytest.mark.fault(
    "The run directory of a followed report hangs",
    "`report --follow` gives each look up and goes on; the page keeps what was seen last and says since when it could not see, "
    "and is renewed when the mount answers",
)
def test_a_followed_report_goes_on_while_the_run_directory_hangs(tmp_path: Path, dead_mount: HungMount) -> None:
    desk = Desk(tmp_path, dead_mount, "run", "follow")
    page = tmp_path / "pages" / "report-r.html"
    words = ("report", str(desk.settings), "--follow", "--every", "5s", "-o", str(page.parent))
    one = Program([*FT, *words], tmp_path, {**os.environ, **desk.env}, tmp_path / "followed")
    try:
        wait_until(lambda: page.exists() and "Renewed every" in page.read_text(), "the first page", 60)
        dead_mount.hang("all")
        wait_until(
            lambda: "it cannot be seen in full: nothing has moved for" in page.read_text(), "the page to say so", 120
        )
        assert "What stands below was seen at" in page.read_text() and one.poll() is None
        dead_mount.answer()
        wait_until(lambda: "cannot be seen" not in page.read_text(), "the run to be seen again", 120)
    finally:
        dead_mount.answer()
        one.end()
    assert "Traceback" not in one.said()
    wait_until(lambda: not desk.left(), "the end of all that it began", 30)
