"""A command that is waited for in bounded time, beside a supervisor that reaps every child of its process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import bounded
from tests.neighbours.supervised import alive

Until = Callable[..., Any]


def test_who_reaps_all_children_takes_no_answer_away_from_a_command_that_is_waited_for(until: Until) -> None:
    bounded.reap()  # what other tests of this process left
    answers: list[bounded.CompletedCommand] = []
    threads = [
        threading.Thread(target=lambda: answers.append(bounded.run(["sh", "-c", "sleep 0.1; exit 7"], timeout=30)))
        for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    mine = subprocess.Popen(["sh", "-c", "sleep 0.2; exit 3"])
    reaped: dict[int, int] = {}

    def all_over() -> bool:
        reaped.update(bounded.reap())
        return mine.pid in reaped and len(answers) == 5

    until(all_over, "the end of all")
    mine.returncode = 3
    assert os.waitstatus_to_exitcode(reaped.pop(mine.pid)) == 3
    assert reaped == {}
    assert [one.code for one in answers] == [7] * 5


@pytest.mark.fault(
    "A command of Slurm, or of a site, writes without an end",
    "it is ended at 64 MB, while it writes; its sentence has 300 characters",
)
@pytest.mark.parametrize("to", ["", " >&2"])
def test_a_command_that_writes_without_an_end_is_ended_while_it_writes_and_its_sentence_is_short(to: str) -> None:
    began = time.monotonic()
    done = bounded.run(["sh", "-c", f"exec yes 'a line of a filter that went wrong'{to}"], timeout=60)
    assert time.monotonic() - began < 20, "it is ended for what it wrote, and not at its bound"
    assert (done.code, done.endless) == (None, True)
    assert len(done.stdout) + len(done.stderr) <= 200_000, "the beginning is enough"
    assert "wrote without an end" in done.words() and len(done.words()) < 400


def test_a_long_answer_is_no_endless_one() -> None:
    done = bounded.run(["sh", "-c", "head -c 20000000 /dev/zero"], timeout=60)
    assert (done.code, done.endless, len(done.stdout)) == (0, False, 20_000_000)


def test_a_command_dies_with_the_process_that_has_asked_it(tmp_path: Path, until: Until) -> None:
    """``report`` asks in a thread, and leaves before the bound."""
    asks = f"""
import os, sys, threading, time
from ftsupervise.host import bounded
from tests.neighbours.supervised import alive
asks = lambda: bounded.run(["sh", "-c", "echo $$ > {tmp_path}/pid; exec sleep 600"], timeout=600)
threading.Thread(target=asks, daemon=True).start()
while not os.path.exists("{tmp_path}/pid"): time.sleep(0.01)
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", asks], check=True, timeout=60)
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not alive(pid), "its end")
