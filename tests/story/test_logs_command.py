"""``ftsupervise logs`` finds the output wherever it goes, and follows it across restarts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.report.output import Follower, Part, lines_in, of_rank, rank_files, telling
from tests.neighbours.supervised import SupervisedRun, outside_a_job
from tests.neighbours.typed import typed

Until = Callable[..., Any]

# Fails in its first two attempts, with a traceback; the third one waits until it may end.
TRAIN = """
import os, sys, time
from pathlib import Path
from ftsupervise import Guard
attempt = int(os.environ["FTSUPERVISE_ATTEMPT"])
guard = Guard(beat_every=0.1)
for step in range(1, 4):
    print(f"0: attempt {attempt} step {step}", flush=True)
    print(f"1: attempt {attempt} step {step}", flush=True)
    guard.step(step + 10 * attempt)
if attempt < 3:
    while not Path(f"go-{attempt}").exists():
        time.sleep(0.05)
    raise RuntimeError(f"fault {attempt}")
while not Path("end").exists():
    time.sleep(0.05)
guard.finished(40)
"""


def logs(run: SupervisedRun, *words: str) -> subprocess.CompletedProcess[str]:
    return typed("logs", run.rundir.root, *words, env=outside_a_job())


@pytest.fixture
def following(run: SupervisedRun) -> Iterator[subprocess.Popen[str]]:
    out = run.folder / "followed"
    run.start("--in-place", "5", "--back-off", "0", "--", sys.executable, "-c", TRAIN)
    argv = [sys.executable, "-m", "ftsupervise", "logs", "-f", str(run.rundir.root)]
    while not (run.rundir.attempt(1) / "start.json").exists():
        assert run.members[0].poll() is None, run.members[0].said()
    with out.open("w") as file:
        child = subprocess.Popen(argv, env=outside_a_job(), stdout=file, stderr=file, text=True)
    yield child
    if child.poll() is None:
        child.terminate()
    child.wait(20)


def test_logs_follow_a_run_across_its_restarts_until_it_has_finished(
    run: SupervisedRun, following: subprocess.Popen[str], until: Until
) -> None:
    out = run.folder / "followed"
    until(lambda: "attempt 1 step" in out.read_text(), "the first attempt")
    for attempt in (1, 2):
        (run.folder / f"go-{attempt}").touch()
        until(lambda n=attempt: f"==> attempt {n + 1}: {run.members[0].out} <==" in out.read_text(), "the next attempt")
    until(lambda: "attempt 3 step 3" in run.members[0].said(), "the third attempt")

    newest = logs(run).stdout
    assert "attempt 3 step 3" in newest
    assert "attempt 2 step" not in newest
    assert logs(run, "--attempt", "2", "--rank", "1").stdout.splitlines() == [
        f"1: attempt 2 step {step}" for step in (1, 2, 3)
    ]
    errors = logs(run, "--errors").stdout
    assert errors.index("RuntimeError: fault 1") < errors.index("RuntimeError: fault 2")
    assert 'File "<string>"' in errors
    assert "step 3" not in errors
    assert logs(run, "--path").stdout == f"{run.members[0].out}\n"
    wrong = logs(run, "--attempt", "9")
    assert (wrong.returncode, "has no attempt 9" in wrong.stderr) == (66, True)
    assert "srun --label" in logs(run, "--rank", "7").stderr

    (run.folder / "end").touch()
    assert following.wait(60) == 0
    assert "(the run has finished)" in out.read_text()
    assert "fault 2" in out.read_text()


def test_a_run_whose_output_goes_to_no_file_is_told_so(run: SupervisedRun) -> None:
    argv = [sys.executable, "-m", "ftsupervise", "run", "--run-dir", str(run.rundir.root), "--", "true"]
    subprocess.run(argv, env=outside_a_job(), capture_output=True, timeout=60, check=True)
    done = logs(run)
    assert (done.returncode, done.stdout) == (66, "")
    assert "goes to a terminal or a pipe" in done.stderr
    assert f"more: ftsupervise status {run.rundir.root}" in done.stderr
    assert "last failure" not in done.stderr, "there was none"
    argv[-1:] = [sys.executable, "-c", "raise ValueError('no such shard')"]
    subprocess.run(argv, env=outside_a_job(), capture_output=True, timeout=60, check=False)
    done = logs(run, "--errors")
    assert (done.returncode, done.stdout) == (66, "")
    assert "its last failure, of attempt 2: exit 1; more: " in done.stderr


def test_a_file_that_is_cut_or_replaced_is_followed_from_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("one\ntw")
    following = Follower(Part(path))
    assert following.more() == ["one"]
    path.write_text("two\n")
    assert following.more() == ["two"]
    (tmp_path / "new").write_text("a longer file than before\n")
    os.replace(tmp_path / "new", path)
    assert following.more() == ["a longer file than before"]
    path.unlink()
    assert following.more() == []


def test_a_part_ends_where_the_next_attempt_begins(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("first\nsecond\n")
    assert list(lines_in(Part(path, 1, end=6))) == ["first"]
    assert list(lines_in(Part(path, 2, begin=6))) == ["second"]
    path.write_text("x" * 9_000_000 + "\nlast\n")
    assert list(lines_in(Part(path)))[-1] == "last"


def test_the_lines_of_a_rank_and_those_that_tell_of_an_error() -> None:
    lines = ["0: a", "12: b", "[rank1]: c", "[default3]:d", "plain", "1: e"]
    assert list(of_rank(lines, 1)) == ["[rank1]: c", "1: e"]
    assert list(of_rank(lines, 12)) == ["12: b"]
    said = ["fine", "0: Traceback (most recent call last):", '0:   File "x"', "0: ValueError: no", "step 3 loss 2"]
    assert list(telling(said)) == said[1:4]


def test_each_rank_may_have_a_file_of_its_own(tmp_path: Path) -> None:
    for name in ("out-0.log", "out-3.log"):
        (tmp_path / name).write_text(name)
    found = rank_files(Part(tmp_path / "out-0.log", 1), 3)
    assert found is not None
    assert (found.path.name, found.rank) == ("out-3.log", 3)
    assert rank_files(Part(tmp_path / "out-0.log"), 4) is None
