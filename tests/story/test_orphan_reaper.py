"""``kill -9`` of ``ftsupervise run`` where no scheduler clears up after it: nothing of the command is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftsupervise.host import processes
from ftsupervise.run.fencing import OrphanReaper
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR
from tests.neighbours.supervised import Program, SupervisedRun

Until = Callable[..., Any]

# Deaf to SIGTERM, with a child in a session of its own that is deaf too.
DEAF = (
    "trap '' TERM HUP; setsid sh -c 'trap \"\" TERM; echo $$ > child; while :; do sleep 0.1; done' & "
    "echo $$ > parent; while :; do sleep 0.1; done"
)
HEARS = "trap 'echo saved > saved; exit 0' TERM; echo $$ > parent; while :; do sleep 0.1; done"


def start(run: SupervisedRun, command: str, grace: str) -> Program:
    return run.start("--grace", grace, "--", "sh", "-c", command)


def pid_in(path: Path) -> int:
    return int(path.read_text() or 0) if path.exists() else 0


def test_a_command_that_is_deaf_to_sigterm_is_gone_too_with_all_its_children(
    run: SupervisedRun, tmp_path: Path, until: Until
) -> None:
    one = start(run, DEAF, "1")
    pids = [until(lambda name=name: pid_in(tmp_path / name), name) for name in ("parent", "child")]
    one.kill()
    one.wait()
    until(lambda: not run.processes(), "nothing to be left", 60)
    until(lambda: [processes.identity(pid) for pid in pids] == [None, None], "their end")
    assert run.attempts()[0].words == "ended without a record"


def test_a_command_that_hears_sigterm_is_given_the_time_to_save(
    run: SupervisedRun, tmp_path: Path, until: Until
) -> None:
    one = start(run, HEARS, "60")
    until(lambda: pid_in(tmp_path / "parent"), "the command")
    one.kill()
    one.wait()
    until((tmp_path / "saved").exists, "the checkpoint")
    until(lambda: not run.processes(), "nothing to be left", 60)


def test_a_run_that_ends_in_order_leaves_no_minder_behind(tmp_path: Path) -> None:
    minder = OrphanReaper(5)
    assert minder.shell is not None
    pid = minder.shell.pid
    minder.set_attempt(tmp_path)
    minder.set_attempt(None)
    minder.stop()
    assert processes.identity(pid) is None
    minder.stop()


def test_what_is_no_longer_minded_is_left_alone(tmp_path: Path, until: Until) -> None:
    """The attempt has ended; what its environment lives on in is somebody else's by then."""
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, ENV_ATTEMPT_DIR: str(tmp_path)})
    code = (
        "import os, sys, time; from pathlib import Path; from ftsupervise.run.fencing import OrphanReaper\n"
        "one = OrphanReaper(1); one.set_attempt(Path(sys.argv[1])); one.set_attempt(None); print(one.shell.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    try:
        assert done.returncode == -signal.SIGKILL
        until(lambda: processes.identity(int(done.stdout)) is None, "the minder's end")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
