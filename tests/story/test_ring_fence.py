"""One writer: what an attempt may still do after a newer one has begun, seen from inside the loop."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftsupervise import Decision, Guard
from ftsupervise.beats import read_beats
from ftsupervise.fence import newer, superseded
from ftsupervise.guard.decision import as_vote, from_vote
from ftsupervise.rundir import RunDir


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    found = RunDir(tmp_path / "run")
    for folder in (found.attempt(1), found.switches, found.beats, found.marks, found.checkpoints):
        folder.mkdir(parents=True)
    monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(found.root))
    monkeypatch.setenv("FTSUPERVISE_ATTEMPT", "1")
    monkeypatch.setenv("FTSUPERVISE_ATTEMPT_DIR", str(found.attempt(1)))
    return found


@pytest.fixture
def guard(rundir: RunDir) -> Iterator[Guard]:
    one = Guard(poll=0.0, beat_every=0.0, signals=(signal.SIGUSR1,), rank=0, world=1)
    yield one
    one.close()


def test_the_newest_attempt_is_not_superseded_and_an_older_one_is(rundir: RunDir) -> None:
    assert newer(rundir.attempts, 1) is None
    rundir.attempt(2).mkdir()
    rundir.attempt(11).mkdir()
    assert newer(rundir.attempts, 1) == 11
    assert newer(rundir.attempts, 11) is None


def test_what_cannot_be_seen_stops_nobody(tmp_path: Path) -> None:
    assert superseded(RunDir(tmp_path / "nothing"), 3) is None


def test_a_loop_whose_successor_has_begun_is_told_to_stop_and_not_to_save(rundir: RunDir, guard: Guard) -> None:
    assert guard.step(1) == Decision.CONTINUE
    assert guard.may_save()
    rundir.attempt(2).mkdir()
    decisions = [guard.step(step) for step in (2, 3)]
    assert decisions[-1].stop
    assert not decisions[-1].save
    assert "attempt 2 has begun" in decisions[-1].reason
    assert not guard.may_save()


def test_after_it_was_superseded_it_touches_no_switch_no_beat_and_no_mark(rundir: RunDir, guard: Guard) -> None:
    (rundir.switches / "save-switch").touch()
    assert guard.step(1).save
    rundir.attempt(2).mkdir()
    theirs = {"rank": 0, "step": 77, "phase": "train", "at": "2026-11-21T08:00:00+00:00", "facts": {"attempt": "2"}}
    (rundir.beats / "rank-0").write_text(json.dumps(theirs))
    guard.saved(1)
    guard.step(2)
    guard.finished(2)
    assert (rundir.switches / "save-switch").exists(), "the newer attempt answers it"
    assert not rundir.finished.exists()
    (beat,) = read_beats(rundir)
    assert beat.step == 77


def test_the_ranks_agree_on_it_before_everything_else() -> None:
    kill, over = Decision(2, "kill switch"), Decision(2, "superseded")
    agreed = from_vote(max(as_vote(kill), as_vote(over)))
    assert (agreed.cause, agreed.save, agreed.stop) == ("superseded", False, True)
