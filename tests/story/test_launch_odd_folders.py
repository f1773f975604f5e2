"""What lies in a run directory besides what launch made: launch works past it, or says what it is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.neighbours.typed import typed


class Desk:
    """A run on this machine, launched as people type it."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "ftsupervise.yaml"
        self.config.write_text("name: t\nscheduler: local\nlaunch: {command: 'true', jobs: 1}\n")
        self.root = folder / "runs" / "t"
        self.state = folder / "state"

    def say(self, *words: str) -> subprocess.CompletedProcess[str]:
        return typed(*words, folder=self.config.parent)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))
    return Desk(tmp_path)


def test_a_folder_among_the_launches_whose_name_only_looks_like_a_number_stops_no_launch(desk: Desk) -> None:
    (desk.root / "launches" / "²").mkdir(parents=True)
    done = desk.say("launch")
    assert done.returncode == 0, done.stderr
    assert (desk.root / "launches" / "0001" / "launch.json").is_file()


def laid(place: Path, kind: str) -> None:
    place.unlink(missing_ok=True)
    if kind == "a FIFO":
        os.mkfifo(place)
    elif kind == "a folder":
        place.mkdir()
    else:
        place.symlink_to(
            {"a link to nothing": "gone", "a link to a folder": "switches", "a link to itself": str(place)}[kind]
        )


KINDS = ["a FIFO", "a folder", "a link to nothing", "a link to a folder", "a link to itself"]


@pytest.mark.parametrize("kind", KINDS)
def test_who_looks_at_a_run_is_told_what_lies_in_the_place_of_its_settings(desk: Desk, kind: str) -> None:
    (desk.root / "switches").mkdir(parents=True)
    laid(desk.root / "run.yaml", kind)
    for words, code in ((("watch",), 78), (("config", "show"), 78), (("check", "all"), 3)):
        done = desk.say(*words, str(desk.root))
        assert done.returncode == code
        assert f"{desk.root}/run.yaml is {kind}, not a regular file" in done.stderr
        assert f"ls -ld {desk.root}/run.yaml" in done.stderr


def test_a_folder_in_the_place_of_the_settings_is_said_before_anything_is_submitted(desk: Desk) -> None:
    assert desk.say("launch").returncode == 0
    (desk.root / "run.yaml").unlink()
    (desk.root / "run.yaml").mkdir()
    done = desk.say("launch", "--again")
    assert done.returncode == 73
    assert f"{desk.root}/run.yaml is a folder, and launch writes the settings there" in done.stderr
    assert f"ls -la {desk.root}/run.yaml" in done.stderr
    assert [path.name for path in (desk.root / "launches").iterdir()] == ["0001"]
    assert [path.name for path in (desk.state / "local").iterdir()] == ["1"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a folder"])
def test_launch_replaces_what_else_lies_in_the_place_of_the_settings(desk: Desk, kind: str) -> None:
    (desk.root / "launches").mkdir(parents=True)
    (desk.root / "switches").mkdir()
    laid(desk.root / "run.yaml", kind)
    done = desk.say("launch")
    assert done.returncode == 0, done.stderr
    assert not (desk.root / "run.yaml").is_symlink() and (desk.root / "run.yaml").is_file()
