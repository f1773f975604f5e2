"""A rank that nothing can wake or kill: it is named, left behind, and the run starts again without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import SupervisedRun

TWO_RANKS = str(Path(__file__).parents[1] / "story" / "two_ranks.py")


@pytest.mark.fault("A rank is in uninterruptible sleep", "it is named and left behind, the run goes on")
@pytest.mark.root
def test_a_rank_in_uninterruptible_sleep_is_named_and_left_behind_and_the_run_goes_on(
    run: SupervisedRun, freezer: Callable[[int], None]
) -> None:
    stuck = run.rundir.attempt(1) / "stuck"
    fault = "Path('stuck.temp').write_text(str(os.getpid())); Path('stuck.temp').rename('stuck'); time.sleep(1000)"
    one = run.start("--in-place", "5", "--hang", "3", "--", sys.executable, TWO_RANKS, fault)
    wait_until(stuck.exists, "the fault")
    freezer(int(stuck.read_text()))
    assert one.wait(90) == 0
    first, second = run.attempts()
    assert first.words.startswith("hang: rank 1 on ")
    assert first.note.startswith("left behind")
    assert second.words == "finished"
    assert run.evidence("rank-1.txt").startswith("pid ")
