"""The fence itself: what an attempt may still do through its staging area once a newer one has sealed it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.fence import is_sealed, last_area, move, open_area, seal, staging
from ftsupervise.rundir.paths import RunDir, write_whole

Until = Callable[..., Any]


@pytest.fixture
def areas(tmp_path: Path) -> Path:
    return tmp_path / "staging"


def area_of(areas: Path, number: int) -> Path:
    area = open_area(areas, number)
    assert area is not None
    return area


def test_what_was_staged_is_renamed_out_as_long_as_the_staging_area_is_open(areas: Path, tmp_path: Path) -> None:
    area = area_of(areas, 1)
    (area / "one").mkdir()
    assert move(area / "one", tmp_path / "one", area)
    assert (tmp_path / "one").is_dir()


def test_after_the_seal_nothing_goes_out_in_or_onto_the_staging_area(areas: Path, tmp_path: Path) -> None:
    area = area_of(areas, 1)
    (area / "one").mkdir()
    (tmp_path / "theirs").mkdir()
    seal(areas, 2, (1,))
    assert not move(area / "one", tmp_path / "one", area)
    assert not move(tmp_path / "theirs", area / "theirs", area)
    assert (tmp_path / "theirs").is_dir()
    with pytest.raises(OSError, match="Not a directory"):
        write_whole(tmp_path / "mark", "x", area=area)
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        (area / "two").mkdir(parents=True, exist_ok=True)
    assert open_area(areas, 1) is None
    assert is_sealed(area)


def test_a_handle_on_the_sealed_staging_area_is_of_no_use_either(areas: Path, tmp_path: Path) -> None:
    """What an NFS client has: the directory, whatever its name is now."""
    area = area_of(areas, 1)
    (area / "one").write_text("x")
    handle = os.open(area, os.O_RDONLY | os.O_DIRECTORY)
    try:
        seal(areas, 2, (1,))
        with pytest.raises(FileNotFoundError):
            os.rename("one", tmp_path / "one", src_dir_fd=handle)
        with pytest.raises(FileNotFoundError):
            os.open("two", os.O_WRONLY | os.O_CREAT, dir_fd=handle)
        with pytest.raises(FileNotFoundError):
            os.rename(tmp_path, "three", dst_dir_fd=handle)
    finally:
        os.close(handle)


def test_an_attempt_that_had_no_staging_area_yet_gets_none(areas: Path) -> None:
    area_of(areas, 3)
    seal(areas, 3, (1, 2))
    assert open_area(areas, 1) is None
    assert open_area(areas, 2) is None
    assert open_area(areas, 3) == areas / "0003"


def test_a_file_that_is_held_open_does_not_keep_the_staging_area_from_being_sealed(areas: Path) -> None:
    area = area_of(areas, 1)
    with (area / "half").open("w") as file:
        (swept,) = seal(areas, 2, (1,))
        file.write("more")
    (left,) = swept.iterdir()
    assert left.read_text() == "more"
    assert not [name for name in os.listdir(areas) if name.startswith(".sealed")]


def test_what_a_sealer_did_not_get_done_the_next_one_does(areas: Path, tmp_path: Path) -> None:
    area = area_of(areas, 1)
    (area / "one").write_text("x")
    handle = os.open(area, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.rename(area, areas / ".sealed-0001-by-2-77-0")  # and then it was killed
        seal(areas, 3, (1, 2))
        with pytest.raises(FileNotFoundError):
            os.rename("one", tmp_path / "one", src_dir_fd=handle)
    finally:
        os.close(handle)
    assert is_sealed(area)


def test_sealing_twice_or_by_two_at_once_is_sealing(areas: Path) -> None:
    for number in range(1, 30):
        (area_of(areas, number) / "x").touch()
    code = "import sys, pathlib, ftsupervise.rundir.fence as f; f.seal(pathlib.Path(sys.argv[1]), int(sys.argv[2]), ())"
    both = [subprocess.Popen([sys.executable, "-c", code, str(areas), number]) for number in ("30", "31")]
    assert [one.wait(60) for one in both] == [0, 0]
    assert all(is_sealed(areas / f"{number:04d}") for number in range(1, 30))
    assert last_area(areas) == 29


def test_a_number_that_was_sealed_is_known_after_the_ledger_was_cleared(areas: Path) -> None:
    area_of(areas, 4)
    seal(areas, 5, (4,))
    assert last_area(areas) == 4


def test_two_runs_that_share_a_checkpoint_folder_do_not_seal_each_other(tmp_path: Path) -> None:
    places = []
    for name in ("a", "b"):
        rundir = RunDir(tmp_path / name)
        rundir.attempts.mkdir(parents=True)
        places.append(staging(rundir, tmp_path / "shared"))
    assert places[0] != places[1]
    mine = area_of(places[0], 1)
    seal(places[1], 9, ())
    assert not is_sealed(mine)
    assert staging(RunDir(tmp_path / "a"), tmp_path / "a" / "checkpoints").name == ".staging"


# Writes as fast as it can, the way of somebody who never looks whether he may: stage, rename, and make the area anew.
_MAD = """
import os, sys
from pathlib import Path
area, target = Path(sys.argv[1]), Path(sys.argv[2])
count = 0
while True:
    count += 1
    try:
        (area / "step").mkdir(parents=True, exist_ok=True)
        (area / "step" / "data").write_text(str(count))
        os.rename(area / "step", target / f"{os.getpid()}-{count}")
    except OSError:
        pass
"""


@pytest.mark.fault("An older attempt writes on after a newer one has begun", "the fence lets none of it through")
def test_twenty_times_the_writers_that_never_look_commit_nothing_after_the_seal(
    areas: Path, tmp_path: Path, until: Until
) -> None:
    target = tmp_path / "checkpoints"
    target.mkdir()
    for turn in range(1, 21):
        area = area_of(areas, turn)
        mad = [subprocess.Popen([sys.executable, "-S", "-c", _MAD, str(area), str(target)]) for _ in range(2)]
        try:
            until(lambda mad=mad: all(any(target.glob(f"{one.pid}-*")) for one in mad), "both to write")
            seal(areas, turn + 1, ())
            before = len(os.listdir(target))
            time.sleep(0.05)
            assert len(os.listdir(target)) == before, f"turn {turn}"
        finally:
            for one in mad:
                one.kill()
                one.wait()
