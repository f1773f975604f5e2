"""``ftsupervise run --warm``: the restart is handed to a standby that imported what the first attempt had imported."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.host.ownership import shown_user
from tests.neighbours.supervised import SupervisedRun, alive

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
    while step == 1 and os.path.exists(f"hold-{attempt}"):
        print("attempt", attempt, "held", os.getpid(), flush=True)
        time.sleep(0.1)
    if step == 1:
        print("attempt", attempt, "pid", os.getpid(), "warm" if warm else "cold", f"{heartbeat.age():.2f}", flush=True)
    time.sleep(0.01)
    if guard.step(step).stop:
        sys.exit(0)
    if os.path.exists(f"fail-{attempt}"):
        raise SystemExit(3)
"""


class Ring:
    """``run`` with the training above, and what a test asks of its standby."""

    def __init__(self, run: SupervisedRun, *words: str, **env: str) -> None:
        (run.folder / "train.py").write_text(TRAIN)
        self.run, self.folder, self.rundir = run, run.folder, run.rundir
        self.process = run.start("--in-place", "9", *words, "--", sys.executable, "train.py", **env)
        self.said = self.process.said

    def begun(self, attempt: int) -> tuple[int, str] | None:
        """Process and temperature of an attempt that has made its first step."""
        found = re.search(rf"^attempt {attempt} pid (\d+) (warm|cold)", self.said(), re.M)
        return (int(found[1]), found[2]) if found else None

    def fail(self, attempt: int) -> None:
        (self.folder / f"fail-{attempt}").touch()

    def ready(self) -> int:
        return self.said().count("a standby is ready")

    def children(self) -> list[str]:
        pid = self.process.supervisor
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

    def importing(self) -> bool:
        """Is there a standby on its way? Its orders stand in its environment."""
        found = (processes.environment(int(child)) for child in self.children())  # {} of one that has just ended
        return any(env.get("FTSUPERVISE_STANDBY", "").startswith("{") for env in found)

    def standby(self) -> int:
        """The pid of the standby."""
        for child in self.children():
            if Path(f"/proc/{child}/comm").read_text().strip() == "ftsup-standby":
                return int(child)
        return 0


@pytest.fixture
def ring(run: SupervisedRun) -> Callable[..., Ring]:
    return partial(Ring, run)


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
    assert [page.words for page in one.run.attempts()] == [
        *("exit 3", "exit 3"),
        f"kill switch: raised by {shown_user()}",
    ]
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


@pytest.mark.fault("The standby is killed", "one cold start, then it is replaced")
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


@pytest.mark.fault("A warm rank is killed from outside before its first step", "the next start is warm too")
def test_a_warm_rank_that_is_killed_from_outside_before_its_first_step_makes_no_later_start_cold(
    ring: Callable[..., Ring], tmp_path: Path, until: Until
) -> None:
    (tmp_path / "hold-2").touch()
    one = ring("--back-off", "0", "--same-failure", "9")
    until(one.ready, "the standby")
    until(lambda: one.begun(1), "the first attempt")
    one.fail(1)
    held = until(
        lambda: re.search(r"^attempt 2 held (\d+)", one.said(), re.M), "the second attempt, before its first step"
    )
    os.kill(int(held[1]), signal.SIGKILL)
    assert until(lambda: one.begun(3), "the third attempt")[1] == "warm", one.said()


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
    run: SupervisedRun, words: tuple[str, ...], learns: bool
) -> None:
    look = "import os; print('learns', 'FTSUPERVISE_IMPORTS' in os.environ)"
    one = run.start(*words, "--", sys.executable, "-c", look)
    one.wait(60)
    assert f"learns {learns}" in one.said()


def test_a_job_that_does_not_start_python_says_why_its_restarts_are_cold(run: SupervisedRun) -> None:
    one = run.start("--in-place", "1", "--warm", "numpy", "--", "true")
    assert one.wait(60) == 0
    assert "restarts will be cold: the command does not start with python (true)" in one.said()
