"""The mount of a launched run goes away between two members: the next one makes no other run on the disk beneath."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.neighbours.patience import wait_until
from tests.neighbours.typed import typed

from .conftest import need_root_and

pytestmark = pytest.mark.root


class Disk:
    """A tmpfs and a second place where it stands, so that what is on it stays when one mount goes away."""

    def __init__(self, folder: Path) -> None:
        self.kept, self.point = folder / "kept", folder / "disk"
        for place in (self.kept, self.point):
            place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "small", str(self.kept)], check=True)
        self.mount()

    def mount(self) -> None:
        subprocess.run(["mount", "--bind", str(self.kept), str(self.point)], check=True)

    def lose(self) -> None:
        subprocess.run(["umount", "-l", str(self.point)], check=True)

    def close(self) -> None:
        for place in (self.point, self.kept):
            subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    need_root_and("mount")
    disk = Disk(tmp_path)
    try:
        yield disk
    finally:
        disk.close()


class Member:
    """The script of a launched run, as the scheduler starts it for each member."""

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self.folder, self.run_dir, self.marks = folder, run_dir, folder / "marks"
        self.marks.mkdir()
        self.env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(folder / "state"), "TMPDIR": str(folder)}
        (folder / "ftsupervise.yaml").write_text(
            f"name: r\nscheduler: local\nrun_dir: {run_dir}\n"
            f"launch:\n  jobs: 1\n  command: touch {self.marks}/$FTSUPERVISE_ATTEMPT\n"
        )
        typed("launch", folder / "ftsupervise.yaml", env=self.env, code=0)
        wait_until(lambda: (run_dir / "attempts/0001/end.json").exists(), "the first member's end", 60)
        self.script = (run_dir / "launches/0001/train.sbatch").read_text()

    def start(self, seconds: float) -> subprocess.Popen[str]:
        script = self.script.replace(" -- ", f" --space-wait {seconds:g} -- ")
        return subprocess.Popen(
            ["bash", "-c", script], env=self.env, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@pytest.fixture
def member(tmp_path: Path, disk: Disk) -> Member:
    return Member(tmp_path, disk.point / "runs" / "r")


@pytest.mark.fault(
    "A member starts after the mount of its run directory went away",
    "it makes nothing on the disk beneath, waits for the mount, and leaves with 66 and one sentence",
)
def test_a_member_that_starts_after_the_mount_went_away_makes_nothing_anew_and_says_what_is_missing(
    disk: Disk, member: Member
) -> None:
    disk.lose()
    began = member.start(0)
    said, _ = began.communicate(timeout=60)
    assert began.returncode == 66, said
    assert f"the run directory {member.run_dir} is not on" in said and "findmnt" in said, said
    assert "Traceback" not in said
    assert list(disk.point.iterdir()) == []
    assert not (member.marks / "2").exists()


@pytest.mark.fault(
    "Slurm has made the folder of the job's output beneath the lost mount (24.11 on)",
    "that is not taken for the run directory",
)
def test_slurm_may_have_made_the_folder_of_the_output_beneath_the_lost_mount(disk: Disk, member: Member) -> None:
    disk.lose()
    (member.run_dir / "logs").mkdir(parents=True)  # from 24.11 on
    began = member.start(0)
    said, _ = began.communicate(timeout=60)
    assert began.returncode == 66, said
    assert [one.name for one in member.run_dir.iterdir()] == ["logs"]


def test_a_mount_that_comes_back_in_time_costs_no_member(disk: Disk, member: Member) -> None:
    disk.lose()
    began = member.start(120)
    assert began.stdout is not None
    assert "waiting up to 120 s for it" in (line := began.stdout.readline()), line
    disk.mount()
    said, _ = began.communicate(timeout=90)
    assert began.returncode == 0, said
    assert "the run directory is there again" in said, said
    assert (member.marks / "2").exists()


def test_a_run_that_is_typed_by_hand_makes_its_directory_in_a_new_place(tmp_path: Path) -> None:
    place = tmp_path / "new" / "r"
    began = time.monotonic()
    typed("run", "--run-dir", place, "--", "true", code=0)
    assert (place / "attempts/0001/end.json").exists() and time.monotonic() - began < 60
