"""A rank that nothing can wake or kill: it is named, left behind, and the run starts again without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from tests.faults.conftest import wait_until

TWO_RANKS = str(Path(__file__).parents[1] / "story" / "two_ranks.py")


@pytest.mark.root
def test_a_rank_in_uninterruptible_sleep_is_named_and_left_behind_and_the_run_goes_on(
    freezer: Callable[[int], None], tmp_path: Path
) -> None:
    rundir = RunDir(tmp_path / "run")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FTSUPERVISE_", "RANK", "WORLD_SIZE"))}
    stuck = rundir.attempt(1) / "stuck"
    fault = "Path('stuck.temp').write_text(str(os.getpid())); Path('stuck.temp').rename('stuck'); time.sleep(1000)"
    words = ("--in-place", "5", "--hang", "3", "--", sys.executable, TWO_RANKS, fault)
    one = subprocess.Popen([sys.executable, "-m", "ftsupervise", "run", "--run-dir", str(rundir.root), *words], env=env)
    try:
        wait_until(stuck.exists, "the fault", 60)
        freezer(int(stuck.read_text()))
        assert one.wait(90) == 0
    finally:
        if one.poll() is None:
            one.kill()
            one.wait()
    first, second = ledger(rundir)
    assert first.words.startswith("hang: rank 1 on ")
    assert first.note.startswith("left behind")
    assert second.words == "finished"
    assert (rundir.attempt(1) / "evidence" / "rank-1.txt").read_text().startswith("pid ")
