"""A command that is slow does not hang: it is not given up as one that waits for a dead mount is, and what it says where it is
given up is true."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.errors import NoAnswer
from tests.neighbours.typed import typed

BURN = "while True: pass"
TYPED = """
import os, signal, subprocess, sys, time
from ftsupervise.cli import time_limit
time_limit.ANSWER, time_limit._QUIET, time_limit._PATIENT = 0.5, 0.3, 0.2
if time_limit.try_dry_run({typed}) is not None:
    {work}
    os._exit(0)
print("tried")
"""
WORKS = "while time.process_time() < 0.2: pass"  # of one core, that it shares with three
BEGUN = (
    "subprocess.run([sys.executable, '-S', '-c', '''import time\nwhile time.process_time() < 0.2: pass''']) # the same"
)
ASKS = "[time.sleep(0.02) for _ in range(100)]"  # again and again, as one asks a slow Slurm
STANDS = "signal.pause()"


def tried(work: str, *words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    program = TYPED.format(typed=list(words or ("launch",)), work=work.replace("\n", "\\n"))
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, **{"stderr": subprocess.PIPE, **how},
        text=True, timeout=120, check=False,
    )  # fmt: skip
    return done


@pytest.mark.parametrize("work", [WORKS, BEGUN], ids=["itself", "what it has begun"])
def test_a_command_that_has_no_turn_on_a_busy_machine_is_not_given_up(work: str) -> None:
    core = {min(os.sched_getaffinity(0))}
    busy = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(3)]
    try:
        for one in busy:
            os.sched_setaffinity(one.pid, core)
        done = tried(work, preexec_fn=lambda: os.sched_setaffinity(0, core))
    finally:
        for one in busy:
            one.kill()
            one.wait()
    assert (done.returncode, done.stdout) == (0, "tried\n"), done.stderr


def test_a_dry_run_in_which_something_moves_is_slow_and_not_given_up() -> None:
    done = tried(ASKS)
    assert (done.returncode, done.stdout) == (0, "tried\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (("launch",), "nothing was submitted; type the same command again;"),
        (("cron", "install"), "nothing was begun;"),
    ],
)
def test_a_dry_run_that_stands_is_given_up_and_the_words_say_what_was_done(words: tuple[str, ...], state: str) -> None:
    done = tried(STANDS, *words)
    assert done.returncode == NoAnswer.exit_code
    first, second, _ = done.stderr.split("\n")
    assert first.startswith(f"ftsupervise: {' '.join(words)}: no answer within ")
    assert second.strip().startswith(state)


def test_a_launch_that_stands_says_that_it_may_have_been_submitted_and_what_to_type() -> None:
    program = """
import signal
from ftsupervise.cli import time_limit
time_limit.go_on_in_a_child(["launch"], patience=0.5)
signal.pause()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == NoAnswer.exit_code
    state = "it may have been submitted; type the same command again later: it looks for the job before it submits;"
    assert state in done.stderr


def test_a_person_at_a_terminal_is_told_what_is_waited_for_once() -> None:
    ours, theirs = pty.openpty()
    try:
        assert tried(ASKS, stderr=theirs).stdout == "tried\n"
        said = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    told = "launch: waiting for an answer of Slurm or of a file system; nothing was submitted yet"
    assert said.count("\n") == 1 and told in said
    assert "waiting for" not in tried(ASKS).stderr, "what is read by a program has its errors alone"


SLOW = "sleep 8"  # seconds for one answer: a controller with very many jobs


@pytest.mark.slow
def test_a_launch_waits_for_a_slurm_that_is_slow_and_submits_once(tmp_path: Path) -> None:
    answers = {"squeue": SLOW, "sbatch": "echo $* >> sent; echo 7", "sinfo": "", "scontrol": "", "sacct": ""}
    for name, does in answers.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{does}\n")
        path.chmod(0o755)
    (tmp_path / "ftsupervise.yaml").write_text("name: r\nscheduler: slurm\nlaunch: {command: 'true', jobs: 2}\n")
    programs = f"{tmp_path}/bin:{os.environ['PATH']}"
    said = typed("launch", folder=tmp_path, code=0, PATH=programs, FTSUPERVISE_STATE_DIR=str(tmp_path / "state")).stdout
    assert "r: submitted as job 7" in said
    assert len((tmp_path / "sent").read_text().splitlines()) == 1
