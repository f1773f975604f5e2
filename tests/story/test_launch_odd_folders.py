"""What lies in a run directory besides what launch made: launch works past it, or says what it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


class Desk:
    """A run on this machine, launched as people type it."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "ftsupervise.yaml"
        self.config.write_text("name: t\nscheduler: local\nlaunch: {command: 'true', jobs: 1}\n")
        self.root = folder / "runs" / "t"
        self.state = folder / "state"

    def say(self, *words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "ftsupervise", *words],
            cwd=self.config.parent,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))
    return Desk(tmp_path)


def test_a_folder_among_the_launches_whose_name_only_looks_like_a_number_stops_no_launch(desk: Desk) -> None:
    (desk.root / "launches" / "²").mkdir(parents=True)
    done = desk.say("launch")
    assert done.returncode == 0, done.stderr
    assert (desk.root / "launches" / "0001" / "launch.json").is_file()
