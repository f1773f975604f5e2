"""One writer: what an attempt may still do after a newer one has begun, seen from inside the loop."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise import Decision, Guard
from ftsupervise.guard.stop_reasons import as_vote, from_vote
from ftsupervise.run import fencing, gate
from ftsupervise.rundir.fence import newer, superseded
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import claim, claim_after
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import Brake, write_brake
from tests.neighbours.supervised import SupervisedRun


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    found = RunDir(tmp_path / "run")
    for folder in (found.attempt(1), found.switches, found.beats, found.state, found.checkpoints):
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


@pytest.mark.fault(
    "The run directory is restored from a backup while an attempt runs, and the run is started again in it",
    "the older attempt, which the backup does not know, ends as superseded: it trained on, and saved nothing any more",
)
def test_an_attempt_that_a_restored_run_directory_does_not_know_is_superseded_by_the_one_that_began_there(
    run: SupervisedRun, until: Callable[..., Any]
) -> None:
    loop = "import time\nfrom ftsupervise import Guard\nwith Guard(poll=0.05, beat_every=0.1) as guard:\n"
    loop += "    step = 0\n    while not guard.step(step := step + 1).stop:\n        time.sleep(0.02)\n"
    assert run.start("--in-place", "0", "--", "sh", "-c", "exit 3").wait(60) == 3
    root = run.rundir.root
    shutil.copytree(root, root.with_name("backup"))
    old = run.start("--in-place", "5", "--", sys.executable, "-c", loop)
    until(lambda: run.ranks(1), "its steps")
    root.rename(root.with_name("away"))
    shutil.copytree(root.with_name("backup"), root)
    run.rundir.attempt(3).mkdir()  # as whoever starts it again does, past all that has staged a checkpoint
    assert old.wait(60) == 0
    assert "superseded" in old.said() and "attempt 3 has begun" in old.said()


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


def begin(rundir: RunDir, number: int) -> None:
    """What the job ring does before a newer attempt's command starts."""
    rundir.attempt(number).mkdir()
    fencing.begin(rundir, number, {}, print)


@pytest.fixture
def fenced(rundir: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    for key, value in fencing.begin(rundir, 1, {}, print).env().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(rundir.checkpoints))
    one = Guard(poll=0.0, beat_every=0.0, signals=(signal.SIGUSR1,), rank=0, world=1)
    yield one
    one.close()


@pytest.mark.fault("A crash in the middle of a checkpoint", "the checkpoint is there as a whole or not at all")
def test_a_checkpoint_is_there_as_a_whole_or_not_at_all(rundir: RunDir, fenced: Guard) -> None:
    with fenced.checkpoint(7) as folder:
        (folder / "weights").write_text("1")
        assert not list(rundir.checkpoints.glob("step-*"))
    assert (rundir.checkpoints / "step-00000007" / "weights").read_text() == "1"
    with pytest.raises(ZeroDivisionError), fenced.checkpoint(8) as folder:
        (folder / "weights").write_text("half")
        raise ZeroDivisionError
    assert [one.name for one in rundir.checkpoints.glob("step-*")] == ["step-00000007"]


def test_a_checkpoint_takes_down_the_save_switch_it_answers(rundir: RunDir, fenced: Guard) -> None:
    (rundir.switches / "save-switch").touch()
    assert fenced.step(1).save
    with fenced.checkpoint(1):
        pass
    assert not (rundir.switches / "save-switch").exists()
    fenced.close()
    (beat,) = read_beats(rundir)
    assert beat.facts["saved"] == "1"


def test_a_checkpoint_written_anew_takes_the_place_of_the_old_one(rundir: RunDir, fenced: Guard) -> None:
    for text in ("old", "new"):
        with fenced.checkpoint(7) as folder:
            (folder / "weights").write_text(text)
    assert (rundir.checkpoints / "step-00000007" / "weights").read_text() == "new"
    assert not list((rundir.checkpoints / ".staging" / "0001").iterdir())


@pytest.mark.usefixtures("one_after_the_other")
def test_all_ranks_stage_and_rank_0_commits_behind_the_barrier(
    rundir: RunDir, fenced: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Guard(poll=0.0, signals=(), rank=1, world=2)
    with other.checkpoint(5, barrier=lambda: None) as folder:
        (folder / "shard-1").write_text("b")
    assert not list(rundir.checkpoints.glob("step-*"))
    met = []
    with fenced.checkpoint(5, barrier=lambda: met.append(list(rundir.checkpoints.glob("step-*")))) as folder:
        (folder / "shard-0").write_text("a")
    assert met == [[]]
    assert {p.name for p in (rundir.checkpoints / "step-00000005").glob("[!.]*")} == {"shard-0", "shard-1"}
    other.close()


def test_a_checkpoint_in_the_making_when_a_newer_attempt_begins_is_thrown_away(
    rundir: RunDir, fenced: Guard, until: Callable[..., object]
) -> None:
    with fenced.checkpoint(6) as folder:
        (folder / "weights").write_text("old")
        begin(rundir, 2)
        with pytest.raises(OSError, match="Not a directory"):
            (folder / "more").write_text("old")
        raise RuntimeError("what a saver makes of it")
    with fenced.checkpoint(7) as folder:
        folder.mkdir(parents=True, exist_ok=True)
    assert not list(rundir.checkpoints.glob("step-*"))
    assert fenced.step(8).stop
    until(lambda: not list((rundir.checkpoints / ".staging").glob(".*")), "what was staged to be deleted")


def test_an_old_attempt_that_believes_itself_the_newest_touches_nothing(rundir: RunDir, fenced: Guard) -> None:
    """It looks, is stopped, and goes on after the newer one has begun: here it never sees the newer one at all."""
    theirs = rundir.checkpoints / "step-00000001"
    theirs.mkdir()
    (rundir.switches / "save-switch").touch()
    assert fenced.step(1).save
    begin(rundir, 2)
    rundir.attempt(2).rmdir()  # nothing to be seen: only the seal is left
    (rundir.beats / "rank-0").write_text("theirs")
    with fenced.checkpoint(1) as folder:
        (folder / "x").write_text("old")
    assert not fenced.remove(theirs)
    fenced.saved(1)
    fenced.step(2)
    fenced.finished(2)
    assert not list(theirs.iterdir())
    assert (rundir.switches / "save-switch").exists()
    assert (rundir.beats / "rank-0").read_text() == "theirs"
    assert not rundir.finished.exists()
    with pytest.raises(OSError, match="Not a directory"):
        write_brake(rundir, Brake("exit 1", "", 3, 1), rundir.staging / "0001")


def test_a_save_switch_that_was_just_being_taken_down_goes_up_again(rundir: RunDir, fenced: Guard) -> None:
    (rundir.staging / "0001" / ".answered-save-switch-host-7").write_text("look at this loss")
    begin(rundir, 2)
    assert (rundir.switches / "save-switch").read_text() == "look at this loss"


def test_an_old_checkpoint_is_removed_as_long_as_it_is_ours(rundir: RunDir, fenced: Guard) -> None:
    with fenced.checkpoint(1) as folder:
        (folder / "x").touch()
    assert fenced.remove(rundir.checkpoints / "step-00000001")
    assert not (rundir.checkpoints / "step-00000001").exists()
    with pytest.raises(FileNotFoundError):
        fenced.remove(rundir.checkpoints / "step-00000001")


def test_without_a_supervisor_a_checkpoint_is_whole_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Guard(signals=()) as guard, guard.checkpoint(3) as folder:
        (folder / "x").touch()
    assert (tmp_path / "checkpoints" / "step-00000003" / "x").exists()


def test_a_staging_folder_that_somebody_deleted_is_made_anew(rundir: RunDir, fenced: Guard) -> None:
    shutil.rmtree(rundir.checkpoints / ".staging")
    with fenced.checkpoint(3) as folder:
        (folder / "x").touch()
    assert (rundir.checkpoints / "step-00000003" / "x").exists()


def test_an_attempt_whose_place_was_taken_is_not_started(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    gate.prepare(rundir)
    first = claim(rundir)
    assert claim_after(rundir, first.number) is not None, "a restart in place"
    assert claim_after(rundir, first.number) is None, "somebody was faster"
    fencing.begin(rundir, 3, {}, print)
    shutil.rmtree(rundir.attempts)
    rundir.attempts.mkdir()
    assert claim(rundir).number == 4, "numbers that are sealed are not used again"


@pytest.mark.chain(
    "the run directory was made anew, the checkpoints of its older attempts were kept",
    "its attempts are numbered past the older ones, so that their staging areas are their own and the fence stands",
    "none",
    "nothing",
)
def test_a_run_directory_made_anew_numbers_its_attempts_past_those_whose_areas_lie_beside_the_checkpoints(
    run: SupervisedRun,
) -> None:
    """Otherwise the area of its first attempt is sealed already, and nothing of it is fenced."""
    for _ in range(2):
        assert run.start("--", "true").wait(60) == 0
    shutil.rmtree(run.rundir.attempts)
    shutil.rmtree(run.rundir.staging)
    assert (
        run.start("--", "sh", "-c", 'test -d "$FTSUPERVISE_STAGING" && test -d "$FTSUPERVISE_STAGING_AREA"').wait(60)
        == 0
    )
    assert [one.number for one in run.attempts()] == [3]


def test_a_fence_that_is_off_because_its_area_is_sealed_says_so(rundir: RunDir) -> None:
    said: list[str] = []
    rundir.staging.mkdir()
    (rundir.staging / "0001").touch()
    token = fencing.begin(rundir, 1, {}, said.append)
    assert token.area is None and token.staging is not None
    assert [line for line in said if "staging area 0001 is sealed, though no newer attempt has begun" in line]
