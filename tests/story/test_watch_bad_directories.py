"""One run's broken directory costs nobody else their watch, and a directory that is gone is not made anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.neighbours.typed import typed

DEEP = '{"a":' + "[" * 200_000


class Desk:
    """Two runs, ``ok`` and ``odd``, and somebody who watches both; the odd one is named first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("ok", "odd"):
            root = folder / name
            for part in ("switches", "watch", "beats", "logs", "launches", "attempts", "state"):
                (root / part).mkdir(parents=True)
            (folder / f"{name}.yaml").write_text(
                f"name: {name}\nscheduler: local\nlaunch: {{command: a}}\nrun_dir: {root}\n"
                f"alerts: {{receivers: [{{file: {{path: {folder}/{name}.txt}}}}]}}\n"
            )

    def watch(self) -> str:
        done = typed("watch", self.folder / "odd.yaml", self.folder / "ok.yaml")
        return done.stdout + done.stderr


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Desk(tmp_path)


@pytest.mark.fault(
    "One run's directory is broken: files where folders belong",
    "it is told, and the next run is watched",
)
def test_a_run_whose_launches_are_a_file_is_told_and_the_next_one_is_watched(desk: Desk) -> None:
    (desk.folder / "odd" / "launches").rmdir()
    (desk.folder / "odd" / "launches").touch()
    said = desk.watch()
    assert "odd: fired: the run directory" in said
    assert "cannot be watched: cannot use" in said
    assert "ok: fired: no job of this run" in said
    assert "cannot be watched" in (desk.folder / "odd.txt").read_text()
    (desk.folder / "odd" / "launches").unlink()
    assert "odd: resolved: the run directory" in desk.watch()


@pytest.mark.parametrize("page", ["watch/memory.json", "beats/rank-0", "launches/0001/launch.json", "state/finished"])
def test_a_page_of_brackets_is_a_damaged_page(desk: Desk, page: str) -> None:
    path = desk.folder / "odd" / page
    path.parent.mkdir(exist_ok=True)
    path.write_text(DEEP)
    said = desk.watch()
    assert "RecursionError" not in said
    assert "ok: fired: no job of this run" in said


def test_a_foreign_generation_with_a_high_number_does_not_stop_the_journal(desk: Desk) -> None:
    journal = desk.folder / "odd" / "watch" / "journal"
    journal.mkdir()
    (journal / "99999999.json").write_text("garbage")
    assert "odd: fired: no job" in desk.watch()
    assert "cannot" not in desk.watch()


def test_a_run_directory_that_is_gone_is_not_made_anew_nor_told_to_be_back(desk: Desk) -> None:
    """It lies on a file system that is not mounted: what is made there now would hide under the mount."""
    desk.watch()
    (desk.folder / "odd").rename(desk.folder / "away")
    said = [desk.watch() for _ in range(3)]
    assert not (desk.folder / "odd").exists()
    assert "odd is gone" in said[0]
    assert not any("resolved" in words for words in said), "\n--\n".join(said)
    (desk.folder / "away").rename(desk.folder / "odd")
    assert "odd: resolved:" in desk.watch()
