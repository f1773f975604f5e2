"""A checkpoint that every attempt fails from is set aside, and the run goes on from the one before."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise import Guard
from ftsupervise.checkpoints.quarantine import quarantined, set_aside
from ftsupervise.checkpoints.suspicion import suspect
from ftsupervise.model import Attempt, Cause, CauseKind, Claim, Failure, FailureKind
from ftsupervise.rundir import fence, ledger, switches
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Resumed
from tests.neighbours.supervised import SupervisedRun

NOW = datetime(2026, 11, 22, 3, tzinfo=timezone.utc)
# Trains to step 40 with a checkpoint every 10 and faults of its own choice.
TRAIN = """
import os, sys
from ftsupervise import Guard
attempt = int(os.environ["FTSUPERVISE_ATTEMPT"])
guard = Guard(poll=0.02)
found = guard.latest()
state = (found / "state").read_text() if found else "0 fine"
step, health = state.split()
{load}
for step in range(int(step) + 1, 41):
    guard.step(step)
    {fault}
    if step % 10 == 0:
        with guard.checkpoint(step) as folder:
            (folder / "state").write_text(f"{step} {health}")
guard.finished(40)
"""


def train(run: SupervisedRun, *, load: str = "pass", fault: str = "pass") -> int:
    script = TRAIN.replace("{load}", load).replace("{fault}", fault)
    one = run.start("--in-place", "20", "--back-off", "0", "--warm", "off", "--", sys.executable, "-c", script)
    return one.wait(120)


def begun(run: SupervisedRun) -> list[str]:
    return [one.resumed.checkpoint if one.resumed is not None else "?" for one in run.attempts()]


@pytest.mark.fault(
    "A checkpoint that crashes its loader",
    "after two such attempts it is set aside, and the run goes on from the one before",
)
def test_a_checkpoint_that_crashes_its_loader_is_set_aside_and_the_one_before_is_taken(run: SupervisedRun) -> None:
    code = train(
        run,
        load="if health == 'bad': raise ValueError('size mismatch for layer 3')",
        fault="health = 'bad' if attempt == 1 and step == 20 else health; step == 23 and attempt == 1 and sys.exit(4)",
    )
    assert code == 0, run.members[0].said()
    assert begun(run) == ["", "step-00000020", "step-00000020", "step-00000010"]
    last = run.attempts()[-1]
    assert last.words == "finished" and last.resumed is not None
    assert (last.resumed.set_aside, last.resumed.set_aside_step, last.resumed.step) == ("step-00000020", 20, 10)
    folder = run.rundir.checkpoints
    (aside,) = quarantined(folder)
    assert aside.reason == "2 attempts in a row began from it and failed in the same way: exit 1 (ValueError)"
    assert aside.path is not None and (aside.path / "state").read_text() == "20 bad", "nothing of it was deleted"
    assert (folder / "step-00000020" / "state").read_text() == "20 fine", "the run came there again"
    assert "step-00000020 is set aside in" in run.members[0].said()


@pytest.mark.fault(
    "A run that diverged before its last checkpoint",
    "that checkpoint is set aside; the brake leaves the run this chance",
)
def test_a_run_that_diverged_goes_on_from_before_that_and_the_brake_leaves_it_the_chance(run: SupervisedRun) -> None:
    code = train(
        run,
        fault="health = 'nan' if attempt == 1 and step == 19 else health\n"
        "    if health == 'nan' and step == 23: sys.exit('step 23: loss is nan')",
    )
    assert code == 0, run.members[0].said()
    assert begun(run) == ["", "step-00000020", "step-00000020", "step-00000010"]
    assert {one.failure.kind for one in run.attempts() if one.failure is not None} == {FailureKind.NUMBERS}
    assert run.attempts()[-1].words == "finished"


def test_a_fault_of_the_hardware_sets_no_checkpoint_aside(run: SupervisedRun) -> None:
    code = train(run, fault="if step == 23: sys.exit('NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.')")
    assert code != 0 and set(begun(run)[1:]) == {"step-00000020"} and len(begun(run)) >= 3
    assert all(one.hardware for one in run.attempts())
    assert switches.read_brake(run.rundir) is not None and not quarantined(run.rundir.checkpoints)


@pytest.mark.fault(
    "Somebody kills a rank again and again, soon after each start",
    "no checkpoint is set aside: SIGKILL speaks against none; the brake comes on",
)
def test_a_rank_that_somebody_kills_again_and_again_sets_no_checkpoint_aside(run: SupervisedRun) -> None:
    code = train(run, fault="if step == 23: os.kill(os.getpid(), 9)")
    assert code != 0 and set(begun(run)[1:]) == {"step-00000020"} and len(begun(run)) >= 3
    assert {one.sign for one in run.attempts()} == {"killed by SIGKILL"}
    assert switches.read_brake(run.rundir) is not None and not quarantined(run.rundir.checkpoints)


def test_a_bug_in_the_program_costs_one_checkpoint_its_place_and_the_brake_says_that_it_may_be_good(
    run: SupervisedRun,
) -> None:
    code = train(run, load="if step != '0': raise TypeError('a bug')", fault="step == 33 and sys.exit(4)")
    assert code != 0, "the brake is on"
    assert begun(run)[:4] == ["", "step-00000030", "step-00000030", "step-00000020"]
    assert set(begun(run)[4:]) == {"step-00000020"}, "no second one is set aside"
    assert [one.name for one in quarantined(run.rundir.checkpoints)] == ["step-00000030"]
    assert "step-00000030, which was set aside, may be good" in run.members[0].said()


# --------------------------------------------------------------------------------------------------- the guard's choice


class Scene:
    """A run with checkpoints of steps 10, 20, 30, from the newest of which attempts fail."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, steps: Sequence[int] = (10, 20, 30)) -> None:
        self.rundir, self._patch = RunDir(root), monkeypatch
        monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(root))
        monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(self.rundir.checkpoints))
        monkeypatch.setenv("FTSUPERVISE_GUARD_QUARANTINE_AFTER", "2")
        self.rundir.attempts.mkdir(parents=True)
        self.rundir.state.mkdir()
        monkeypatch.delenv("FTSUPERVISE_ATTEMPT_DIR", raising=False)
        with Guard(signals=()) as guard:
            for step in steps:
                with guard.checkpoint(step) as folder:
                    (folder / "state").write_text(str(step))

    def begin(self) -> Claim:
        mine = ledger.claim(self.rundir)
        ledger.write_start(mine, {}, ["true"], NOW, None)
        area = self.rundir.staging / f"{mine.number:04d}"
        self.staging = fence.staging(self.rundir, self.rundir.checkpoints)
        (self.staging / area.name).mkdir(parents=True)
        area.mkdir(parents=True)
        self._patch.setenv("FTSUPERVISE_ATTEMPT", str(mine.number))
        self._patch.setenv("FTSUPERVISE_ATTEMPT_DIR", str(mine.folder))
        self._patch.setenv("FTSUPERVISE_STAGING_AREA", str(area))
        self._patch.setenv("FTSUPERVISE_STAGING", str(self.staging / area.name))
        return mine

    def choose(self, rank: int = 0, world: int = 1) -> str:
        with Guard(signals=(), rank=rank, world=world) as guard:
            found = guard.latest()
            assert found is not None and found.is_dir()
            return found.name

    def fail(self, times: int = 2, sign: str = "exit 1", kind: FailureKind = FailureKind.CODE) -> None:
        for _ in range(times):
            mine = self.begin()
            self.choose()
            ended = ledger.over(mine.number, Cause(CauseKind.EXIT, code=1), NOW)
            ledger.write_end(mine.folder, ended._replace(failure=Failure(kind, sign), exit_code=1))

    def aside(self) -> list[str]:
        return [one.name for one in quarantined(self.rundir.checkpoints)]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path / "run", monkeypatch)


def test_every_rank_passes_the_suspect_over_whether_rank_0_has_moved_it_or_not(scene: Scene) -> None:
    scene.fail()
    mine = scene.begin()
    asked: list[str] = []
    other = threading.Thread(target=lambda: asked.append(scene.choose(rank=1, world=2)))
    other.start()
    assert not scene.aside() and not asked, "it waits for rank 0, which alone moves it"
    assert scene.choose(rank=0, world=2) == "step-00000020" and scene.aside() == ["step-00000030"]
    other.join(60)
    assert asked == ["step-00000020"]
    assert scene.choose(rank=1, world=2) == "step-00000020"
    page = json.loads((mine.folder / "resumed.json").read_text())
    assert (page["checkpoint"], page["set_aside"], page["older"]) == ("step-00000020", "step-00000030", 1)


def test_the_only_good_checkpoint_stays_whatever_failed_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path / "run", monkeypatch, steps=(20, 30))
    (scene.rundir.checkpoints / "step-00000020" / "state").write_text("cut off, or longer")
    scene.fail(4)
    scene.begin()
    assert scene.choose() == "step-00000030" and not scene.aside()


@pytest.mark.parametrize("kind", [FailureKind.NODE, FailureKind.DISK, FailureKind.START, FailureKind.LOST])
def test_what_is_no_failure_of_the_program_suspects_no_checkpoint(scene: Scene, kind: FailureKind) -> None:
    scene.fail(3, "node failure", kind)
    scene.begin()
    assert scene.choose() == "step-00000030" and not scene.aside()


def test_failures_that_differ_or_before_the_brake_was_released_do_not_count(scene: Scene) -> None:
    scene.fail(1, "exit 1")
    scene.fail(1, "exit 2")
    scene.begin()
    assert scene.choose() == "step-00000030"
    scene.fail(1, "exit 3")
    switches.write_brake(scene.rundir, switches.Brake())
    scene.fail(1, "exit 3")
    switches.release_brake(scene.rundir, who="ada", now=NOW)
    scene.begin()
    assert scene.choose() == "step-00000030" and not scene.aside()


def test_an_attempt_that_is_over_sets_nothing_aside(scene: Scene) -> None:
    scene.fail()
    mine = scene.begin()
    fence.seal(scene.staging, mine.number + 1, [mine.number])
    scene.choose()
    assert not scene.aside() and not (mine.folder / "resumed.json").exists()


def test_a_checkpoint_that_a_person_moved_back_is_used_again(scene: Scene) -> None:
    scene.fail()
    scene.fail(1, "exit 1")
    assert scene.aside() == ["step-00000030"]
    folder = scene.rundir.checkpoints
    os.rename(folder / ".quarantine" / "step-00000030", folder / "step-00000030")
    scene.begin()
    assert scene.choose() == "step-00000030" and not scene.aside()


def test_a_later_look_for_a_checkpoint_does_not_change_what_the_attempt_began_from(scene: Scene) -> None:
    mine = scene.begin()
    with Guard(signals=()) as guard:
        assert guard.latest() is not None
        guard.step(31)
        with guard.checkpoint(40) as folder:
            (folder / "state").write_text("40")
        found = guard.latest()
        assert found is not None and found.name == "step-00000040"
    assert json.loads((mine.folder / "resumed.json").read_text())["checkpoint"] == "step-00000030"


def night(*attempts: tuple[int, int | None, str]) -> list[Attempt]:
    """Attempts that failed with NaN, newest first. ``attempts``: (from step, saved, set aside)."""
    nan = Failure(FailureKind.NUMBERS, "loss is not a number")
    found = []
    for number, (step, saved, aside) in enumerate(attempts, 1):
        resumed = Resumed(f"step-{step}", step, NOW, older=5, set_aside=aside, set_aside_step=100 if aside else None)
        found.append(Attempt(number, "88", NOW, failure=nan, saved=saved, resumed=resumed))
    return found[::-1]


def test_a_run_that_diverges_again_and_again_loses_three_checkpoints_at_most_until_it_comes_further() -> None:
    one = [(80, 100, "step-100"), (100, None, ""), (100, None, "")]
    assert suspect(night(*one), 2) is not None
    assert suspect(night(*one * 3), 2) is None
    further = [*one * 3, (80, 120, ""), (120, None, ""), (120, None, "")]
    found = suspect(night(*further), 2)
    assert found is not None and (found.checkpoint.step, found.times) == (120, 2)
    assert suspect(night(*further), 0) is None and suspect(night(*further), 3) is None


def test_the_page_of_the_checkpoint_stays_readable() -> None:
    golden = RunDir(Path(__file__).parents[1] / "golden" / "records" / "ledger")
    (one,) = [one for one in ledger.ledger(golden) if one.resumed is not None]
    assert one.number == 5 and one.resumed is not None
    assert one.resumed.words() == "from step-00000499 (step-00000520 was set aside; 1 newer passed over)"
    assert (one.resumed.step, one.resumed.committed, one.resumed.older, one.resumed.set_aside_step) == (
        499,
        NOW,
        3,
        520,
    )


def test_an_attempt_that_a_newer_one_has_sealed_sets_no_checkpoint_aside(tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    areas = tmp_path / fence.STAGING
    area = fence.open_area(areas, 1)
    assert area is not None
    fence.seal(areas, 2, (1,))
    with pytest.raises(OSError, match="a newer attempt has begun"):
        set_aside(checkpoint, "it fails", NOW, area=area)
    assert checkpoint.is_dir() and quarantined(tmp_path) == ()
    area = fence.open_area(areas, 2)
    set_aside(checkpoint, "it fails", NOW, area=area)
    assert not checkpoint.exists() and [one.reason for one in quarantined(tmp_path)] == ["it fails"]


@pytest.mark.parametrize("own", [True, False], ids=["a folder of its own", "a folder that two runs share"])
def test_a_checkpoint_on_its_way_into_quarantine_is_put_back_by_the_next_attempt(tmp_path: Path, own: bool) -> None:
    """Its attempt was killed, or stopped, between the two renames."""
    areas = tmp_path / fence.STAGING if own else tmp_path / fence.STAGING / "run-7"
    area = fence.open_area(areas, 1)
    assert area is not None
    for name in ("step-00000001", "step-00000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)
        assert fence.move(tmp_path / name, area / f"{fence.ASIDE}{name}", area)
    (tmp_path / "step-00000002").mkdir()  # saved again meanwhile
    assert fence.seal(areas, 2, (1,)) == []
    assert (tmp_path / "step-00000001" / "weights").read_text() == "step-00000001"
    assert (tmp_path / "step-00000002~2" / "weights").read_text() == "step-00000002"
