"""Which checkpoint is taken after trouble with the loss, with what is there and what is not."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise import Guard
from ftsupervise.checkpoints.quarantine import quarantined
from ftsupervise.guard.resume import CannotResume
from ftsupervise.model import Cause, CauseKind, Failure, FailureKind, Reached
from ftsupervise.rundir import ledger
from ftsupervise.rundir.attempt_pages import read_page
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import NOT_A_NUMBER, LossTrouble, Resumed

NOW = datetime(2026, 11, 23, tzinfo=timezone.utc)


class Scene:
    """A run with checkpoints; ``trouble(since)`` is an attempt whose loss was no number, ``choose()`` the next one's choice."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, steps: Sequence[int]) -> None:
        self.rundir, self._patch = RunDir(root), patch
        for name in ("FTSUPERVISE_ATTEMPT_DIR", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
            patch.delenv(name, raising=False)
        patch.setenv("FTSUPERVISE_RUN_DIR", str(root))
        patch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(self.rundir.checkpoints))
        self.rundir.attempts.mkdir(parents=True)
        with Guard(signals=()) as guard:
            for step in steps:
                with guard.checkpoint(step) as folder:
                    (folder / "state").write_text(str(step))

    def begin(self) -> Path:
        mine = ledger.claim(self.rundir)
        ledger.write_start(mine, {}, ["true"], NOW, None)
        self._patch.setenv("FTSUPERVISE_ATTEMPT", str(mine.number))
        self._patch.setenv("FTSUPERVISE_ATTEMPT_DIR", str(mine.folder))
        return mine.folder

    def choose(self, rank: int = 0, world: int = 1) -> str:
        with Guard(signals=(), rank=rank, world=world) as guard:
            found = guard.latest()
            return found.name if found is not None else ""

    def trouble(self, since: int, then: str = "resume", saved: int | None = None) -> None:
        folder = self.begin()
        self.choose()
        found = LossTrouble(NOT_A_NUMBER, since, since, 0, f"nan at step {since}", then)
        cause, reached = Cause(CauseKind.NOT_A_NUMBER), Reached(1, since, saved, trouble=found)
        ended = ledger.over(int(folder.name), cause, NOW, reached=reached)
        ledger.write_end(folder, ended._replace(failure=Failure(FailureKind.NUMBERS, NOT_A_NUMBER)))

    def aside(self) -> list[str]:
        return [one.name for one in quarantined(self.rundir.checkpoints)]


def scene(tmp_path: Path, patch: pytest.MonkeyPatch, *steps: int, back: int = 100) -> Scene:
    patch.setenv("FTSUPERVISE_GUARD_LOSS_BACK", str(back))
    return Scene(tmp_path / "run", patch, steps)


def test_every_rank_takes_the_same_whether_rank_0_has_set_the_newer_ones_aside_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scene(tmp_path, monkeypatch, 100, 200, 300, 400)
    one.trouble(410)
    folder = one.begin()
    asked: list[str] = []
    other = threading.Thread(target=lambda: asked.append(one.choose(rank=1, world=2)))
    other.start()
    assert not one.aside() and not asked, "it waits for rank 0"
    assert one.choose(rank=0, world=2) == "step-00000300" and one.aside() == ["step-00000400"]
    other.join(60)
    assert asked == [one.choose(rank=1, world=2)] == [one.choose(rank=0, world=2)] == ["step-00000300"]
    written = read_page(Resumed, folder)
    assert written is not None and written.set_aside == "step-00000400", "asked twice, it still says so"
    assert written.skip == 110


def test_where_none_is_old_enough_the_oldest_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = scene(tmp_path, monkeypatch, 350, 380, 400)
    one.trouble(410)
    one.begin()
    assert one.choose() == "step-00000350" and one.aside() == ["step-00000380", "step-00000400"]


def test_a_damaged_one_that_is_old_enough_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = scene(tmp_path, monkeypatch, 100, 200, 300, 400)
    (one.rundir.checkpoints / "step-00000300" / "state").write_text("cut off, or longer")
    one.trouble(410)
    one.begin()
    assert one.choose() == "step-00000200"


def test_without_one_from_before_the_run_begins_anew_only_where_that_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = scene(tmp_path / "early", monkeypatch, 60), scene(tmp_path / "late", monkeypatch, 5000, 5100)
    late.trouble(4000)
    late.begin()
    assert late.choose() == "step-00005000", "the older ones were removed; 4000 steps are not given up in silence"
    monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(early.rundir.root))
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(early.rundir.checkpoints))
    early.trouble(50)
    folder = early.begin()
    assert early.choose() == "" and early.aside() == ["step-00000060"]
    written = read_page(Resumed, folder)
    assert written is not None and written.checkpoint == "" and written.skip == 50


def test_an_attempt_that_moved_a_checkpoint_back_may_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = scene(tmp_path, monkeypatch, 100, 200, 300)
    one.trouble(310)
    one.begin()
    assert one.choose() == "step-00000200"
    (one.rundir.checkpoints / ".quarantine" / "step-00000300").rename(one.rundir.checkpoints / "step-00000300")
    one.begin()
    assert one.choose() == "step-00000300", "a person has said so"


@pytest.mark.resume(
    "The loss was no number, and no checkpoint from before may be used: damaged, or the folder was opened",
    "nothing: the program ends with 93; once a person has mended that, the run still goes back",
    "stderr: what is wrong with them, and what to type",
)
def test_where_none_of_those_before_may_be_used_the_run_does_not_begin_anew_and_still_goes_back_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has opened the folder: what was saved is there, and is not believed."""
    one = scene(tmp_path, monkeypatch, 100, 200, 300, 400)
    one.trouble(410)
    one.rundir.checkpoints.chmod(0o777)
    for _ in range(2):
        folder = one.begin()
        with pytest.raises(CannotResume, match=r"chmod go-w .* begin anew: ftsupervise checkpoints anew"):
            one.choose()
        written = read_page(Resumed, folder)
        assert written is not None and written.refused and not written.set_aside
    assert len(list(one.rundir.checkpoints.glob("step-*"))) == 4, "nothing is set aside"
    one.rundir.checkpoints.chmod(0o755)
    one.begin()
    assert one.choose() == "step-00000300" and one.aside() == ["step-00000400"], "the loss is not forgotten meanwhile"


def test_where_all_of_those_before_are_damaged_the_run_does_not_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = scene(tmp_path, monkeypatch, 20, 40)
    one.trouble(50)
    for path in one.rundir.checkpoints.glob("step-*/state"):
        path.write_text("cut off, or longer")
    one.begin()
    with pytest.raises(CannotResume, match="this run has saved before: step-"):
        one.choose()
