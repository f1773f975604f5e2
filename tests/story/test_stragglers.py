"""Real ranks with the guard that meet at a barrier at each step; one of them has twice the work, or none has."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.ranks.observe import RankObserver
from ftsupervise.ranks.straggler import StragglerDetector, StragglerLimits
from ftsupervise.rundir.heartbeat_page import ENV_PAGES
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import COMES_LAST, ProgressPage, Straggler, write_progress
from ftsupervise.rundir.records import write_json
from tests.neighbours.typed import typed

NOW = datetime.now(timezone.utc)
RANKS, SLOW = 4, 2
# Ranks in one program: WORK is processor time of their own. ``before``: a step is told before the ranks meet.
TRAIN = f"""
import multiprocessing, os, sys, time
from ftsupervise import Guard
slow, before, saves = int(sys.argv[1]), sys.argv[2] == "before", sys.argv[3] == "saves"
def work(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
def rank(number, meet):
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(number), "{RANKS}"
    guard = Guard(rank=number, world={RANKS}, signals=(), agree=False)
    for step in range(1, 1_000_000):
        work(0.02 if number == slow else 0.01)
        if before:
            guard.step(step)
        meet.wait()
        if not before:
            guard.step(step)
        if saves and step % 20 == 0 and number == 0:
            with guard.phase("save" if step % 40 else "eval"):
                time.sleep(0.2)
context = multiprocessing.get_context("fork")
meet = context.Barrier({RANKS})
ranks = [context.Process(target=rank, args=(number, meet), daemon=True) for number in range({RANKS})]
for one in ranks:
    one.start()
sys.stdin.read()
"""


@contextmanager
def training(folder: Path, slow: int, when: str, saves: str = "") -> Iterator[RankObserver]:
    (folder / "pages").mkdir(mode=0o700)
    for name in ("beats", "switches", "state", "attempts/0001"):
        (folder / "run" / name).mkdir(parents=True)
    env = {
        "PATH": "/usr/bin:/bin", ENV_PAGES: str(folder / "pages" / "1"), "FTSUPERVISE_RUN_DIR": str(folder / "run"),
        "FTSUPERVISE_ATTEMPT": "1", "FTSUPERVISE_ATTEMPT_DIR": str(folder / "run" / "attempts" / "0001"),
        "PYTHONPATH": ":".join(sys.path),
    }  # fmt: skip
    program = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(slow), when, saves], env=env, stdin=subprocess.PIPE, text=True
    )
    observer = RankObserver(str(folder / "pages"), "node-0", select.poll())
    try:
        yield observer
    finally:
        observer.close()
        program.communicate("", timeout=30)


def look(observer: RankObserver, looks: int, limits: StragglerLimits) -> Iterator[Straggler | None]:
    detector = StragglerDetector(limits)
    for _ in range(looks):
        time.sleep(0.05)
        now = time.monotonic()
        detector.look(observer.check(), now)
        yield detector.found(now, NOW)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_has_twice_the_work_of_the_others_is_named(tmp_path: Path, when: str) -> None:
    with training(tmp_path, SLOW, when) as observer:
        found = next(filter(None, look(observer, 2000, StragglerLimits())), None)
    assert found is not None and (found.ranks, found.node, found.of) == ((SLOW,), "node-0", RANKS)
    assert 0.1 <= found.cost < 0.8


@pytest.mark.parametrize("saves", ["", "saves"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_of_ranks_with_the_same_work_none_is_named(tmp_path: Path, when: str, saves: str) -> None:
    with training(tmp_path, -1, when, saves) as observer:
        assert [one for one in look(observer, 200, StragglerLimits(looks=24, blocks=3)) if one is not None] == []


@pytest.fixture
def slow_run(tmp_path: Path) -> Path:
    """A run of four ranks at work, whose supervisor has found that one is slow."""
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: thesis\nscheduler: local\nlaunch: {command: python3 train.py, jobs: 1}\n"
    )
    run = RunDir(tmp_path / "runs" / "thesis")
    for name in ("switches", "attempts/0001", "beats", "state", "watch"):
        (run.root / name).mkdir(parents=True, exist_ok=True)
    now = datetime.now(timezone.utc)
    start = {
        "attempt": 1,
        "job_id": "local-1",
        "at": (now - timedelta(hours=1)).isoformat(),
        "host": "node-0",
        "pid": 1,
    }
    write_json(run.attempt(1) / "start.json", start, sync=False)
    tell_slow(tmp_path, minutes=20)
    return tmp_path


def tell_slow(folder: Path, minutes: float, price: float | None = None) -> None:
    now = datetime.now(timezone.utc)
    one = Straggler((2,), "node-0", 0.31, COMES_LAST, 4, now - timedelta(minutes=minutes), price)
    page = ProgressPage(now, ranks=4, step=70, ahead=70, phase="train", straggler=one)
    write_progress(RunDir(folder / "runs" / "thesis").attempt(1), page)


SAID = "rank 2 on node-0 is slow: it comes last at each step, which costs 31% of the time of all 4 ranks"


def test_the_watchdog_alerts_and_diagnose_says_the_same(slow_run: Path) -> None:
    state = str(slow_run / "state")
    tell_slow(slow_run, minutes=2)
    assert SAID not in typed("check", "straggler", folder=slow_run, code=0, FTSUPERVISE_STATE_DIR=state).stdout
    tell_slow(slow_run, minutes=20)
    said = typed("check", "straggler", folder=slow_run, code=1, FTSUPERVISE_STATE_DIR=state).stdout
    assert SAID in said
    tell_slow(slow_run, minutes=20, price=2.5)
    said = typed("check", "straggler", folder=slow_run, code=1, FTSUPERVISE_STATE_DIR=state).stdout
    assert f"{SAID}, 74.40 a day at the price given" in said
    tell_slow(slow_run, minutes=20)
    settings = slow_run / "ftsupervise.yaml"
    settings.write_text(f"{settings.read_text()}watch: {{straggler: {{least: 40%}}}}\n")
    assert SAID not in typed("check", "straggler", folder=slow_run, code=0, FTSUPERVISE_STATE_DIR=state).stdout
    found = json.loads(typed("diagnose", "--json", folder=slow_run, code=0, FTSUPERVISE_STATE_DIR=state).stdout)
    assert SAID in found["headline"], "its supervisor does not answer, and its last page tells"
