"""The evidence of many ranks on one node: each page whole, all of them in time."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.ranks.evidence import RankProcess, asked_for, question
from ftsupervise.ranks.taking import take_afterwards
from tests.neighbours.supervised import SupervisedRun

Until = Callable[..., Any]
RANKS = 64
RANK = """
import os, time
from ftsupervise import Guard
guard = Guard(beat_every=0.05, poll=1)
guard.step(1)
def all_reduce():
    time.sleep(1000)
def work():
    time.sleep(1000)
work() if os.environ["RANK"] == "17" else all_reduce()
"""
ALL = f'r=0; while [ $r -lt {RANKS} ]; do RANK=$r WORLD_SIZE={RANKS} "$@" & r=$((r + 1)); done; wait'


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SupervisedRun]:
    with (
        tempfile.TemporaryDirectory(prefix="fts-many-", dir="/dev/shm") as folder,
        closing(SupervisedRun(Path(folder) / "run", tmp_path)) as one,
    ):
        yield one


@pytest.mark.slow
def test_the_evidence_of_a_hang_of_64_processes_is_on_the_disk_within_20_seconds(
    run: SupervisedRun, until: Until
) -> None:
    run.start(
        *("--in-place", "1", "--hang", "20", "--hang-unknown", "60", "--", "sh", "-c", ALL, "sh"),
        *(sys.executable, "-c", RANK),
    )
    folder = run.rundir.attempt(1) / "evidence"
    until(lambda: list(folder.glob("rank-*.txt")), "the first page", 400)
    began = min(one.stat().st_mtime for one in folder.glob("rank-*.txt")) - 3.0  # most that is read of a rank
    until((folder / "hang.txt").exists, "the page about the hang", 60)
    took = (folder / "hang.txt").stat().st_mtime - began
    print(f"evidence of {RANKS} processes: {took:.1f} s")
    pages = {one.name: one.read_text() for one in folder.glob("rank-*.txt")}
    assert took < 20 and len(pages) == RANKS
    whole = [
        name for name, text in pages.items() if re.search(r"in (?:all_reduce|work)$", text, re.M) and "VmRSS" in text
    ]
    assert len(whole) == RANKS, sorted(set(pages) - set(whole))
    first = run.attempts()[0]
    until(lambda: run.attempts()[0].ended, "the end of the attempt", 60)
    assert "rank 17 " in run.attempts()[0].words and first.number == 1


def test_a_question_for_evidence_is_read_as_it_was_asked() -> None:
    ranks, into = [RankProcess(0, 12), RankProcess(7, 4_194_303)], Path("/a folder/with\nall kinds of/0001/evidence")
    verb, _, rest = question(ranks, into).partition(" ")
    assert (verb, asked_for(rest)) == ("evidence", (ranks, into))
    for wrong in ("", "12 /x", "0:12", "0:12 x", "0:12,, /x", "0:x /x", "0:12 "):
        assert asked_for(wrong) is None, wrong


def test_what_is_taken_after_a_crash_holds_nobody_up(tmp_path: Path) -> None:
    """Slurm takes long, and the nodes do not answer: the caller has gone on."""
    asked: list[str] = []

    def slurm(nodes: object) -> str:
        time.sleep(1)
        return "JobState=RUNNING"

    def ask(questions: Any, _bound: float) -> dict[str, str]:
        asked.extend(questions.values())
        return {}

    began = time.monotonic()
    taken = take_afterwards(ask, ["node-0"], slurm, tmp_path, wait=0.1)
    assert time.monotonic() - began < 0.5
    taken.join(30)
    assert (tmp_path / "evidence" / "slurm.txt").read_text() == "JobState=RUNNING"
    assert asked == [f"node {tmp_path / 'evidence'}"] and taken.daemon
