"""A program that itself lies on a mount that hangs: who starts it goes on, and it does not run when that is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ftsupervise.crontab.dispatch import Ended, Task, run_all
from ftsupervise.host import bounded, processes
from tests.neighbours.patience import wait_until

from .conftest import HungMount

pytestmark = pytest.mark.root

BOUND = 1.0  # seconds


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def program(dead_mount: HungMount, tmp_path: Path, canary: Path) -> Path:
    """A script on the mount that says when it ran."""
    one = tmp_path / "backing" / "program"
    one.write_text(f"#!/bin/sh\necho ran > {canary}\n")
    one.chmod(0o755)
    return dead_mount.point / "program"


def left(word: str) -> list[processes.Process]:
    """The children of this process that have ``word`` among their words, or were to become a program there."""
    mine = set(processes.below(os.getpid()))
    return [one for one in processes.living() if one.pid in mine and one.state == "D"]


@pytest.mark.fault(
    "A command, the interpreter of its first line or its working directory lies on a mount that hangs",
    "whoever starts it goes on at its bound; it never runs afterwards",
)
@pytest.mark.parametrize("what", ["the program", "the interpreter in its first line", "its working directory"])
def test_what_cannot_begin_is_given_up_at_its_bound_and_never_runs(
    dead_mount: HungMount, tmp_path: Path, program: Path, canary: Path, what: str
) -> None:
    words, cwd = [str(program)], None
    if what.startswith("the interpreter"):
        script = tmp_path / "script"
        script.write_text(f"#!{program}\n")
        script.chmod(0o755)
        words = [str(script)]
    if what == "its working directory":
        words, cwd = ["sh", "-c", f"echo ran > {canary}"], str(dead_mount.point)
    ticks: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.05):
            ticks.append(time.monotonic())

    other = threading.Thread(target=tick, daemon=True)
    dead_mount.hang("all")
    other.start()
    began = time.monotonic()
    done = bounded.run(words, timeout=BOUND, cwd=cwd)
    seconds = time.monotonic() - began
    over.set()
    assert (done.code, done.timed_out) == (None, True)
    assert seconds < BOUND + 5.0, f"{seconds:.1f} s"
    assert len(ticks) > 3, "the other threads of this process have gone on"
    assert bounded.run(["echo", "still here"], timeout=30).stdout == "still here\n"
    dead_mount.answer()
    wait_until(lambda: not left("program"), "the end of the child", 20)
    bounded.reap()
    assert not canary.exists()


def test_what_begins_late_and_within_the_bound_is_answered(dead_mount: HungMount, program: Path, canary: Path) -> None:
    dead_mount.hang("all")
    threading.Timer(0.5, dead_mount.answer).start()
    assert bounded.run([str(program)], timeout=60).code == 0
    assert canary.exists()


@pytest.mark.fault(
    "An entry of the cron is a link to a program on such a mount",
    "the other entries run, and it is ended at its bound",
)
def test_an_entry_of_the_cron_that_cannot_begin_holds_no_other_one(
    dead_mount: HungMount, tmp_path: Path, program: Path, canary: Path
) -> None:
    def task(key: str, *words: str) -> Task:
        (tmp_path / key).mkdir()
        return Task(key, words, dict(os.environ), tmp_path / key, "/")

    ends: dict[str, tuple[Ended, float]] = {}
    dead_mount.hang("all")
    began = time.monotonic()
    tasks = [task("dead", str(program)), task("well", "sh", "-c", "echo well")]
    run_all(
        tasks,
        bound=4.0,
        output_limit=1000,
        on_end=lambda ended: ends.update({ended.key: (ended, time.monotonic() - began)}),
    )
    assert (ends["well"][0].code, (tmp_path / "well/output").read_text()) == (0, "well\n")
    assert ends["dead"][0].code is None and "left behind" in ends["dead"][0].words
    assert ends["dead"][1] < 40.0
    dead_mount.answer()
    wait_until(lambda: not left("program"), "the end of the child", 20)
    assert not canary.exists()


@pytest.mark.fault("The command of a job lies on such a mount", "the job says so, and hears that it is to end")
def test_a_job_whose_command_cannot_begin_hears_that_it_is_to_end(
    dead_mount: HungMount, tmp_path: Path, program: Path
) -> None:
    dead_mount.hang("all")
    argv = [sys.executable, "-m", "ftsupervise", "run", "--run-dir", str(tmp_path / "run"), "--name", "r", "--"]
    log = tmp_path / "log"
    with log.open("w") as out:
        one = subprocess.Popen([*argv, str(program)], stdout=out, stderr=out, start_new_session=True)
    try:
        wait_until(lambda: "does not begin" in log.read_text(), "what it says about its command", 60)
        one.send_signal(signal.SIGTERM)
        one.wait(90)
    finally:
        dead_mount.answer()
        one.kill()
        one.wait(10)
    assert "Traceback" not in log.read_text()
