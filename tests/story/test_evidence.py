"""The evidence of many ranks on one node: each page whole, all of them in time."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from subprocess import PIPE as PIPE_TO_US
from subprocess import Popen
from typing import Any

import pytest

from ftsupervise.ranks.evidence import RankProcess, asked_for, question, take
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


RECORDER = """
import os, sys, time
stem, dump = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"], os.environ["TORCH_FR_DUMP_TEMP_FILE"]
os.mkfifo(f"{stem}3.pipe")
fd = os.open(f"{stem}3.pipe", os.O_RDONLY | os.O_NONBLOCK)
print("ready", flush=True)
while True:
    if os.read(fd, 128):
        with open(f"{dump}3", "w") as file:
            file.write('{"entries": []}')
    time.sleep(0.5)
"""


def test_a_recorder_with_a_pipe_is_asked_for_its_dump_in_a_hang_and_never_in_a_run_that_may_be_healthy(
    tmp_path: Path,
) -> None:
    """In place of NCCL's: it reads the pipe each half second, and writes where torch writes."""
    env = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/p_", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/d_"}
    with Popen([sys.executable, "-c", RECORDER], stdout=PIPE_TO_US, env=env) as rank:
        try:
            assert rank.stdout is not None and rank.stdout.readline() == b"ready\n"
            take([RankProcess(3, rank.pid)], tmp_path / "now", "here", goes_on=True)
            assert not (tmp_path / "now" / "flight").exists() and not (tmp_path / "d_3").exists()
            take([RankProcess(3, rank.pid)], tmp_path / "evidence", "here")
            assert (tmp_path / "evidence" / "flight" / "rank_3").read_text() == '{"entries": []}'
            assert "15 bytes in flight/rank_3" in (tmp_path / "evidence" / "rank-3.txt").read_text()
        finally:
            rank.kill()


@pytest.mark.threat("A link lies where the pipe of a rank's flight recorder should", "nothing is written through it")
def test_nothing_is_written_through_a_link_or_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "p_3.pipe").symlink_to(tmp_path / "precious")
    env = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/p_"}
    with Popen(
        [sys.executable, "-c", "print(flush=True); input()"], stdin=PIPE_TO_US, stdout=PIPE_TO_US, env=env
    ) as rank:
        assert rank.stdout is not None and rank.stdout.readline()
        for _ in range(2):
            take([RankProcess(3, rank.pid)], tmp_path / "evidence", "here")
            assert (tmp_path / "precious").read_text() == "mine"
            assert not (tmp_path / "evidence" / "flight").exists()
            (tmp_path / "p_3.pipe").unlink()
            (tmp_path / "p_3.pipe").hardlink_to(tmp_path / "precious")
        rank.kill()
