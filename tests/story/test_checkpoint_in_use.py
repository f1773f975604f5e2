"""A checkpoint that something uses is not removed; what an interrupted restore or save left behind is, after a day."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.commit import Origin, commit
from ftsupervise.checkpoints.manifest import read_manifest
from ftsupervise.checkpoints.offload import offload
from ftsupervise.checkpoints.retain import A_DAY, Candidate, Retention, in_use, leftovers, plan, remove, sweep
from ftsupervise.checkpoints.stores import FolderStore
from ftsupervise.model import Cause, CauseKind
from ftsupervise.rundir import ledger
from ftsupervise.rundir.attempt_pages import write_page
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Resumed
from tests.neighbours.supervised import SupervisedRun

Until = Callable[..., Any]
NOW = datetime(2026, 11, 22, 3, tzinfo=timezone.utc)


def test_what_the_newest_attempt_and_a_living_one_began_from_is_in_use(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.attempts.mkdir()
    rundir.checkpoints.mkdir()
    for step, over in ((10, True), (20, False), (30, True), (40, True)):
        mine = ledger.claim(rundir)
        ledger.write_start(mine, {}, ["true"], NOW, None)  # this process lives
        write_page(mine.folder, Resumed(f"step-{step}", step))
        if over:
            ledger.write_end(mine.folder, ledger.over(mine.number, Cause(CauseKind.FINISHED), NOW))
    used = in_use(rundir, rundir.checkpoints, time.time(), {})
    assert used == {"step-20": "attempt 2 began from it", "step-40": "attempt 4 began from it"}
    ones = [
        Candidate(f"step-{step}", step, step, 10, True, {}, False, used.get(f"step-{step}", ""))
        for step in range(10, 100, 10)
    ]
    gone = [one.name for one in plan(ones, Retention()).remove]
    assert gone == ["step-10", "step-30", "step-50", "step-60", "step-70"]


def test_what_is_being_copied_or_restored_is_in_use(tmp_path: Path) -> None:
    here, there = tmp_path / "here", FolderStore(tmp_path / "there")
    seen = []
    for step in (1, 2):
        (here / f"step-{step}").mkdir(parents=True)
        (here / f"step-{step}" / "weights").write_bytes(b"w" * 5000)
        commit(here / f"step-{step}", Origin(step=step))
    offload(
        here / "step-1", there, now=lambda: NOW, progress=lambda size: seen.append(in_use(None, here, time.time(), {}))
    )
    assert {"step-1": "it is being copied"} in seen
    (here / ".restoring-step-2").mkdir()
    assert in_use(None, here, time.time(), {}) == {"step-2": "it is being restored"}
    assert not in_use(None, here, time.time() + A_DAY + 60, {}), "it was interrupted long ago"


@pytest.mark.fault(
    "A save or a restore killed, and no attempt after it",
    "`prune` and `upkeep` clear what it left after a day",
)
def test_what_a_killed_save_and_a_killed_restore_left_goes_after_a_day_and_nothing_else(run: SupervisedRun) -> None:
    script = (
        "import os, sys\nfrom ftsupervise import Guard\nguard = Guard()\n"
        "with guard.checkpoint(1) as folder: (folder / 'state').write_text('1')\n"
        "with guard.checkpoint(2) as folder:\n"
        "    (folder / 'state').write_text('2')\n    os._exit(9)\n"
    )
    one = run.start("sh", "-c", 'exec "$0" -c "$1"', sys.executable, script)
    assert one.wait(60) == 9
    folder = run.rundir.checkpoints
    (folder / ".restoring-step-00000009" / "sub").mkdir(parents=True)
    (folder / ".restoring-step-00000009" / "sub" / "half").write_bytes(b"h" * 100)
    assert not leftovers(run.rundir, folder, time.time())
    found = leftovers(run.rundir, folder, time.time() + A_DAY + 60)
    assert found == (".restoring-step-00000009", ".staging/0001/step-00000002")
    assert remove(folder, found) == found
    assert sweep(folder) == 101
    left = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if "/." not in f"{path}".replace("/.staging", "")
    )
    assert left == [".staging", ".staging/0001", "step-00000001", "step-00000001/state"]
    fine = run.start("true")
    assert fine.wait(60) == 0, "the next attempt seals what is left"


SAVE = """
import os, sys
from ftsupervise import Guard
rank, world, step, dies = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), "dies" in sys.argv
with Guard(signals=(), rank=rank, world=world) as guard:
    with guard.checkpoint(step, barrier=lambda: None) as folder:
        (folder / f"rank-{rank}.pt").write_text(str(rank))
        dies and os._exit(9)
"""


def save(folder: Path, rank: int, world: int, step: int, *more: str, later: bool = False) -> subprocess.Popen[bytes]:
    """A rank that saves, without a supervisor. ``later``: by a clock that is two days ahead."""
    clock = [shutil.which("faketime") or "", "-f", "+2d"] if later else []
    env = {**os.environ, "FTSUPERVISE_CHECKPOINT_DIR": str(folder), "NO_FAKE_STAT": "1"}
    words = [*clock, sys.executable, "-c", SAVE, str(rank), str(world), str(step), *more]
    return subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def save_both(folder: Path, step: int, until: Until, *, later: bool = False) -> list[int]:
    """Rank 1 has written when rank 0 commits, and hears of it. The codes with which they exit."""
    first = save(folder, 1, 2, step, later=later)
    written = f".staging/alone-2/step-{step:08}/rank-1.pt"
    until((folder / written).exists, "rank 1's file")
    return [save(folder, 0, 2, step, later=later).wait(60), first.wait(60)]


def staged(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder / ".staging").as_posix() for path in folder.glob(".staging/alone*/*"))


@pytest.mark.skipif(shutil.which("faketime") is None, reason="needs faketime (apt-get install faketime)")
def test_what_a_killed_save_of_several_ranks_left_without_a_supervisor_goes_after_a_day(
    tmp_path: Path, until: Until
) -> None:
    for rank in range(2):
        assert save(tmp_path, rank, 2, 1, "dies").wait(60) == 9
    assert staged(tmp_path) == ["alone-2/step-00000001"]
    assert save_both(tmp_path, 2, until) == [0, 0]
    assert staged(tmp_path) == ["alone-2/step-00000001"], "its ranks may still write there"
    first = save(tmp_path, 1, 2, 3, later=True)
    until((tmp_path / ".staging/alone-2/step-00000003/rank-1.pt").exists, "rank 1's file")
    assert staged(tmp_path) == ["alone-2/step-00000001", "alone-2/step-00000003"], "rank 0 alone takes it away"
    assert [save(tmp_path, 0, 2, 3, later=True).wait(60), first.wait(60)] == [0, 0]
    assert staged(tmp_path) == []
    assert leftovers(None, tmp_path, time.time() + 2 * A_DAY) == ()
    assert sorted(path.name for path in tmp_path.glob("step-*/rank-*")) == [
        "rank-0.pt",
        "rank-0.pt",
        "rank-1.pt",
        "rank-1.pt",
    ]


def test_what_a_killed_save_of_four_ranks_left_is_no_part_of_the_same_step_saved_by_two(
    tmp_path: Path, until: Until
) -> None:
    for rank in range(4):
        assert save(tmp_path, rank, 4, 1, "dies").wait(60) == 9
    assert save_both(tmp_path, 1, until) == [0, 0]
    manifest = read_manifest(tmp_path / "step-00000001")
    assert manifest is not None and [entry.path for entry in manifest.files] == ["rank-0.pt", "rank-1.pt"]
    assert leftovers(None, tmp_path, time.time() + A_DAY + 60) == (".staging/alone-4/step-00000001",)
