"""``ftsupervise run --warm``: the restart is handed to a standby that imported what the first attempt had imported."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir

Until = Callable[..., Any]

# Slow to import, so that a standby is worth its memory; fails when told to, and says how old it is at its first step.
TRAIN = """
import sys
warm = "numpy" in sys.modules
import os, time, numpy
from ftsupervise import Guard
from ftsupervise.guard import heartbeat
attempt = int(os.environ["FTSUPERVISE_ATTEMPT"])
time.sleep(1.1 if attempt == 1 else 0)
if warm and os.path.exists("warm-fails"):
    print("attempt", attempt, "pid", os.getpid(), "warm", flush=True)
    raise SystemExit(5)
guard = Guard(beat_every=0.05, poll=0.02)
for step in range(1, 100_000):
    if step == 1:
        print("attempt", attempt, "pid", os.getpid(), "warm" if warm else "cold", f"{heartbeat.age():.2f}", flush=True)
    time.sleep(0.01)
    if guard.step(step).stop:
        sys.exit(0)
    if os.path.exists(f"fail-{attempt}"):
        raise SystemExit(3)
"""


class Ring:
    """A supervised run in ``folder``."""

    def __init__(self, folder: Path, *words: str, **env: str) -> None:
        (folder / "train.py").write_text(TRAIN)
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FTSUPERVISE_"))}
        self.folder, self.rundir = folder, RunDir(folder / "run")
        argv = [sys.executable, "-m", "ftsupervise", "run", "--run-dir", str(self.rundir.root), "--in-place", "9"]
        with (folder / "out").open("w") as out:
            self.process = subprocess.Popen(
                [*argv, *words, "--", sys.executable, "train.py"],
                cwd=folder, env={**clean, **env}, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def said(self) -> str:
        return (self.folder / "out").read_text()

    def begun(self, attempt: int) -> tuple[int, str] | None:
        """Process and temperature of an attempt that has made its first step."""
        found = re.search(rf"^attempt {attempt} pid (\d+) (warm|cold)", self.said(), re.M)
        return (int(found[1]), found[2]) if found else None

    def fail(self, attempt: int) -> None:
        (self.folder / f"fail-{attempt}").touch()

    def ready(self) -> int:
        return self.said().count("a standby is ready")

    def children(self) -> list[str]:
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()

    def importing(self) -> bool:
        """Is there a standby on its way? Its orders stand in its environment."""
        orders = b"\0FTSUPERVISE_STANDBY={"
        return any(orders in b"\0" + Path(f"/proc/{child}/environ").read_bytes() for child in self.children())

    def standby(self) -> int:
        """The pid of the standby."""
        for child in self.children():
            if Path(f"/proc/{child}/comm").read_text().strip() == "ftsup-standby":
                return int(child)
        return 0


def alive(pid: int) -> bool:
    return processes.identity(pid) is not None


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Callable[..., Ring]]:
    started: list[Ring] = []

    def make(*words: str, **env: str) -> Ring:
        started.append(Ring(tmp_path, *words, **env))
        return started[-1]

    yield make
    for one in started:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            one.process.wait(60)


def test_the_second_attempt_is_warm_and_at_the_end_nothing_is_left(ring: Callable[..., Ring], until: Until) -> None:
    pytest.importorskip("numpy")
    one = ring("--back-off", "0")  # it is the default
    until(one.ready, "the standby")
    standby = until(one.standby, "its process")
    assert one.begun(1)[1] == "cold"  # type: ignore[index]
    for attempt in (1, 2):
        one.fail(attempt)
        until(lambda number=attempt + 1: one.begun(number), "the next attempt")
        assert one.begun(attempt + 1)[1] == "warm", one.said()  # type: ignore[index]
    assert one.standby() == standby
    (one.rundir.switches / "kill-switch").touch()
    assert one.process.wait(60) == 0
    assert [page.words for page in ledger(one.rundir)] == ["exit 3", "exit 3", "kill switch"]
    until(lambda: not alive(standby), "the standby's end")
    print(re.findall(r"^attempt \d pid .*", one.said(), re.M))


def test_a_restart_waits_for_a_standby_that_is_importing(
    ring: Callable[..., Ring], tmp_path: Path, until: Until
) -> None:
    """A failure soon after the first step: the standby is ahead of what would import beside it."""
    site = tmp_path / "site-packages"
    site.mkdir()
    go = tmp_path / "go"
    (site / "numpy.py").write_text(  # it is of no matter what it is; a standby's takes until it is told
        "import os, time\ntime.sleep(4)\n"
        f"while 'FTSUPERVISE_ATTEMPT' not in os.environ and not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    )
    one = ring("--back-off", "0", PYTHONPATH=str(site))
    until(one.importing, "the standby's import")
    one.fail(1)
    until(lambda: "attempt 2 of" in one.said(), "the next attempt's start")
    go.touch()
    until(lambda: one.begun(2), "the next attempt")
    assert one.begun(2)[1] == "warm", one.said()  # type: ignore[index]
    until(one.ready, "its word")
    said = one.said()
    assert said.index("attempt 2 of") < said.index("a standby is ready"), said


def test_a_module_that_was_named_and_is_not_there_is_told(ring: Callable[..., Ring], until: Until) -> None:
    one = ring("--warm", "json,nosuchmodule")
    until(one.ready, "the standby")
    assert "leaves out nosuchmodule: cannot be imported here: No module named 'nosuchmodule'" in one.said()


def test_a_standby_that_was_killed_costs_a_cold_start_and_is_replaced(ring: Callable[..., Ring], until: Until) -> None:
    pytest.importorskip("numpy")
    one = ring("--warm", "numpy", "--back-off", "0")
    until(one.ready, "the standby")
    pid = until(one.standby, "its process")
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid), "its end")
    one.fail(1)
    until(lambda: one.begun(2), "the next attempt")
    assert one.begun(2)[1] == "cold"  # type: ignore[index]
    until(lambda: one.ready() == 2, "the next standby")
    one.fail(2)
    until(lambda: one.begun(3), "the third attempt")
    if one.begun(3)[1] == "cold":  # type: ignore[index]
        assert "started cold: timed out" in one.said(), one.said()  # the machine was too busy for a standby to answer
        one.fail(3)
        until(lambda: one.begun(4), "the fourth attempt")
        assert one.begun(4)[1] == "warm", one.said()  # type: ignore[index]


def test_after_a_module_was_edited_one_start_is_cold_and_the_next_one_warm_again(
    ring: Callable[..., Ring], tmp_path: Path, until: Until
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "numpy.py").write_text("import time; time.sleep(2)")
    one = ring("--back-off", "0", PYTHONPATH=str(site))
    until(one.ready, "the standby")
    (site / "numpy.py").write_text("import time; time.sleep(2)  # edited")
    one.fail(1)
    assert until(lambda: one.begun(2), "the second attempt")[1] == "cold"
    assert "has changed" in one.said()
    until(lambda: one.ready() == 2, "another standby, within the same attempt")
    one.fail(2)
    assert until(lambda: one.begun(3), "the third attempt")[1] == "warm", one.said()


def test_when_only_what_begins_warm_takes_no_step_a_cold_one_follows_and_in_the_end_all_are_cold(
    ring: Callable[..., Ring], tmp_path: Path, until: Until
) -> None:
    pytest.importorskip("numpy")
    (tmp_path / "warm-fails").touch()
    one = ring("--back-off", "0", "--same-failure", "9")
    until(one.ready, "the standby")
    for attempt, how in ((1, "cold"), (2, "warm"), (3, "cold"), (4, "warm"), (5, "cold"), (6, "cold")):
        assert until(lambda number=attempt: one.begun(number), f"attempt {attempt}")[1] == how, one.said()
        one.fail(attempt)
    until(lambda: one.begun(7), "the last")
    assert "restarts will be cold: attempts that began warm took no step, and those that began cold did" in one.said()
    assert not one.standby()


def test_a_warm_rank_hears_the_warning_and_dies_with_its_supervisor(ring: Callable[..., Ring], until: Until) -> None:
    pytest.importorskip("numpy")
    one = ring("--warm", "auto", "--back-off", "0")
    until(one.ready, "the standby")
    one.fail(1)
    rank = until(lambda: one.begun(2), "the next attempt")[0]
    one.process.kill()
    one.process.wait(30)
    until(lambda: not alive(rank), "its end", 60)


@pytest.mark.parametrize(
    ("words", "learns"),
    [((), False), (("--in-place", "1"), True), (("--in-place", "1", "--warm", "off"), False)],
    ids=["never in place", "by default", "off"],
)
def test_imports_are_learned_where_a_restart_in_place_may_need_them(
    tmp_path: Path, words: tuple[str, ...], learns: bool
) -> None:
    look = "import os; print('learns', 'FTSUPERVISE_IMPORTS' in os.environ)"
    argv = [sys.executable, "-m", "ftsupervise", "run", "--run-dir", str(tmp_path / "run"), *words, "--"]
    done = subprocess.run([*argv, sys.executable, "-c", look], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert f"learns {learns}" in done.stdout


def test_a_job_that_does_not_start_python_says_why_its_restarts_are_cold(
    ring: Callable[..., Ring], tmp_path: Path
) -> None:
    argv = [
        sys.executable,
        "-m",
        "ftsupervise",
        "run",
        "--run-dir",
        str(tmp_path / "run"),
        "--in-place",
        "1",
        "--warm",
        "numpy",
        "--",
        "true",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0
    assert "restarts will be cold: the command does not start with python (true)" in done.stdout + done.stderr
