"""A run that stands still, with real processes on this machine: found, confirmed, written down, ended and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.progress import ENDS, LEFT, OFF, RESTARTS, ProgressPage, read_progress
from tests.neighbours.supervised import SupervisedRun

Until = Callable[..., Any]

TWO_RANKS = str(Path(__file__).with_name("two_ranks.py"))
FAST = ("--in-place", "5", "--hang", "1", "--back-off", "0")


def train(*words: str) -> tuple[str, ...]:
    return (sys.executable, TWO_RANKS, *words)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SupervisedRun]:
    """In memory: others here write to the disk, and a rank that waits for it asleep stands still for all to see."""
    with (
        tempfile.TemporaryDirectory(prefix="fts-hang-", dir="/dev/shm") as folder,
        closing(SupervisedRun(Path(folder) / "run", tmp_path)) as one,
    ):
        yield one


def test_a_stopped_rank_is_named_its_stacks_are_kept_and_the_run_goes_on_from_its_checkpoint(
    run: SupervisedRun,
) -> None:
    one = run.start(*FAST, "--", *train("os.kill(os.getpid(), signal.SIGSTOP)"))
    assert one.wait(60) == 0
    first, second = run.attempts()
    assert first.failure is not None and first.failure.kind == "hang"
    assert re.match(r"hang: rank 1 on .* is stopped; no progress for \d\.\d s at step 74 \(train\)", first.words)
    assert first.then.startswith("restarted in place")
    assert (second.words, second.first_step) == ("finished", 71)
    assert "-> 1 " in run.evidence("hang.txt")
    assert "the process is stopped; it answers when it continues" in run.evidence("rank-1.txt")
    assert re.search(r"in all_reduce$", run.evidence("rank-0.txt"), re.M), "where the other one waits"
    assert "State:\tT (stopped)" in run.evidence("rank-1.txt")


@pytest.mark.parametrize(
    ("words", "does"),
    [(("--in-place", "5", "--hang", "120"), RESTARTS), (("--hang", "120"), ENDS), ((), LEFT), (("--hang", "off"), OFF)],
)
def test_the_page_of_a_run_says_what_becomes_of_a_standstill_and_when(
    run: SupervisedRun, until: Until, words: tuple[str, ...], does: str
) -> None:
    run.start(*words, "--", *train("os.kill(os.getpid(), signal.SIGSTOP)"))

    def stands() -> ProgressPage | None:
        page = read_progress(run.rundir, 1)
        if page is None or page.step != 74 or (page.stepped or 0.0) <= 2:
            return None
        return page if page.on_hang and (page.hang_at or does not in (RESTARTS, ENDS)) else None

    page = until(stands, "a page of the standstill", 60)
    assert page.on_hang == does
    if does in (RESTARTS, ENDS):
        assert page.hang_at - page.active_at == pytest.approx(60, abs=5), "half of --hang for a rank that is stopped"
    else:
        assert page.hang_at is None


@pytest.mark.fault("A rank sleeps outside of the collective that the others wait in", "it is named by its stack")
def test_a_rank_that_sleeps_outside_the_collective_is_named_by_its_stack(run: SupervisedRun) -> None:
    one = run.start(*FAST, "--", *train("time.sleep(1000)"))
    assert one.wait(60) == 0
    first, second = run.attempts()
    assert first.words.startswith("hang: rank 1 on ")
    assert second.words == "finished"
    assert "waits no" in run.evidence("rank-1.txt").splitlines()[0]
    assert "waits yes" in run.evidence("rank-0.txt").splitlines()[0]


@pytest.mark.fault("A rank is in an endless loop", "it is ended later, since it uses CPU")
def test_a_rank_in_an_endless_loop_is_ended_later_because_it_uses_cpu(run: SupervisedRun) -> None:
    one = run.start("--in-place", "5", "--hang", "1", "--", *train("while True: pass"))
    assert one.wait(120) == 0
    first, second = run.attempts()
    found = re.match(r"hang: rank 1 on .* uses CPU and makes no step; no progress for (\d+\.\d) s", first.words)
    assert found is not None, first.words
    assert float(found[1]) >= 0.9 * 6 * 1
    assert second.words == "finished"


def test_without_restarts_a_hang_is_told_with_evidence_and_left_alone(run: SupervisedRun, until: Until) -> None:
    run.start("--hang-unknown", "3", "--", *train("os.kill(os.getpid(), signal.SIGSTOP)"))
    until(lambda: "the hung command is left running" in run.log(), "the line in the log")
    assert (run.rundir.attempt(1) / "evidence" / "hang.txt").exists()
    ranks = run.ranks(2)
    assert Path(f"/proc/{ranks[1]}").exists()
    os.kill(ranks[1], signal.SIGCONT)
    until(lambda: run.attempts()[0].words == "finished", "the end of the run that went on")


@pytest.fixture
def overloaded() -> Iterator[None]:
    """A process on each core that wants all of it."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    yield
    for one in burners:
        one.kill()
        one.wait()


def soak(run: SupervisedRun, seconds: float, scale: float) -> None:
    """Saves, evaluations, pauses with a heavy tail (Pareto 1.5, up to 7 s): no alarm, nor a look into one."""
    one = run.start("--in-place", "5", "--hang", f"{10 * scale:g}", "--", *train("soak", f"{seconds:g}", f"{scale:g}"))
    assert one.wait(2 * seconds + 60) == 0
    (only,) = run.attempts()
    print(f"{only.last_step} steps in {seconds:g} s: no alarm")
    assert only.words == "finished"
    assert not (run.rundir.attempt(1) / "evidence").exists()


@pytest.fixture
def crowded() -> Iterator[None]:
    """The same on one core, with all that is started from here: the others are needed elsewhere."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        burner.kill()
        burner.wait()
        os.sched_setaffinity(0, before)


@pytest.mark.usefixtures("crowded")
def test_saves_evaluations_and_pauses_on_overloaded_cores_are_no_hang(run: SupervisedRun) -> None:
    soak(run, 10, 0.3)


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.usefixtures("overloaded")
def test_an_hour_of_saves_evaluations_and_pauses_on_overloaded_cores_raises_no_alarm(run: SupervisedRun) -> None:
    soak(run, 3600, 1.0)
