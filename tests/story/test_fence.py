"""The fence itself: what an attempt may still do through its desk once a newer one has sealed it, wherever it was stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.fence import is_sealed, last_desk, move, open_desk, seal, staging
from ftsupervise.rundir.paths import RunDir, write_whole

Until = Callable[..., Any]


@pytest.fixture
def desks(tmp_path: Path) -> Path:
    return tmp_path / "desks"


def desk_of(desks: Path, number: int) -> Path:
    desk = open_desk(desks, number)
    assert desk is not None
    return desk


def test_what_was_staged_is_renamed_out_as_long_as_the_desk_is_open(desks: Path, tmp_path: Path) -> None:
    desk = desk_of(desks, 1)
    (desk / "one").mkdir()
    assert move(desk / "one", tmp_path / "one", desk)
    assert (tmp_path / "one").is_dir()


def test_after_the_seal_nothing_goes_out_in_or_onto_the_desk(desks: Path, tmp_path: Path) -> None:
    desk = desk_of(desks, 1)
    (desk / "one").mkdir()
    (tmp_path / "theirs").mkdir()
    seal(desks, 2, (1,))
    assert not move(desk / "one", tmp_path / "one", desk)
    assert not move(tmp_path / "theirs", desk / "theirs", desk)
    assert (tmp_path / "theirs").is_dir()
    with pytest.raises(OSError, match="Not a directory"):
        write_whole(tmp_path / "mark", "x", desk=desk)
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        (desk / "two").mkdir(parents=True, exist_ok=True)
    assert open_desk(desks, 1) is None
    assert is_sealed(desk)


def test_a_handle_on_the_sealed_desk_is_of_no_use_either(desks: Path, tmp_path: Path) -> None:
    """What an NFS client has: the directory, whatever its name is now."""
    desk = desk_of(desks, 1)
    (desk / "one").write_text("x")
    handle = os.open(desk, os.O_RDONLY | os.O_DIRECTORY)
    try:
        seal(desks, 2, (1,))
        with pytest.raises(FileNotFoundError):
            os.rename("one", tmp_path / "one", src_dir_fd=handle)
        with pytest.raises(FileNotFoundError):
            os.open("two", os.O_WRONLY | os.O_CREAT, dir_fd=handle)
        with pytest.raises(FileNotFoundError):
            os.rename(tmp_path, "three", dst_dir_fd=handle)
    finally:
        os.close(handle)


def test_an_attempt_that_had_no_desk_yet_gets_none(desks: Path) -> None:
    desk_of(desks, 3)
    seal(desks, 3, (1, 2))
    assert open_desk(desks, 1) is None
    assert open_desk(desks, 2) is None
    assert open_desk(desks, 3) == desks / "0003"


def test_a_file_that_is_held_open_does_not_keep_the_desk_from_being_sealed(desks: Path) -> None:
    desk = desk_of(desks, 1)
    with (desk / "half").open("w") as file:
        (swept,) = seal(desks, 2, (1,))
        file.write("more")
    (left,) = swept.iterdir()
    assert left.read_text() == "more"
    assert not [name for name in os.listdir(desks) if name.startswith(".sealed")]


def test_what_a_sealer_did_not_get_done_the_next_one_does(desks: Path, tmp_path: Path) -> None:
    desk = desk_of(desks, 1)
    (desk / "one").write_text("x")
    handle = os.open(desk, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.rename(desk, desks / ".sealed-0001-by-2-77-0")  # and then it was killed
        seal(desks, 3, (1, 2))
        with pytest.raises(FileNotFoundError):
            os.rename("one", tmp_path / "one", src_dir_fd=handle)
    finally:
        os.close(handle)
    assert is_sealed(desk)


def test_sealing_twice_or_by_two_at_once_is_sealing(desks: Path) -> None:
    for number in range(1, 30):
        (desk_of(desks, number) / "x").touch()
    code = "import sys, pathlib, ftsupervise.rundir.fence as f; f.seal(pathlib.Path(sys.argv[1]), int(sys.argv[2]), ())"
    both = [subprocess.Popen([sys.executable, "-c", code, str(desks), number]) for number in ("30", "31")]
    assert [one.wait(60) for one in both] == [0, 0]
    assert all(is_sealed(desks / f"{number:04d}") for number in range(1, 30))
    assert last_desk(desks) == 29


def test_a_number_that_was_sealed_is_known_after_the_ledger_was_cleared(desks: Path) -> None:
    desk_of(desks, 4)
    seal(desks, 5, (4,))
    assert last_desk(desks) == 4


def test_two_runs_that_share_a_checkpoint_folder_do_not_seal_each_other(tmp_path: Path) -> None:
    places = []
    for name in ("a", "b"):
        rundir = RunDir(tmp_path / name)
        rundir.attempts.mkdir(parents=True)
        places.append(staging(rundir, tmp_path / "shared"))
    assert places[0] != places[1]
    mine = desk_of(places[0], 1)
    seal(places[1], 9, ())
    assert not is_sealed(mine)
    assert staging(RunDir(tmp_path / "a"), tmp_path / "a" / "checkpoints").name == ".staging"


# Writes as fast as it can, the way of somebody who never looks whether he may: stage, rename, and make the desk anew.
_MAD = """
import os, sys
from pathlib import Path
desk, target = Path(sys.argv[1]), Path(sys.argv[2])
count = 0
while True:
    count += 1
    try:
        (desk / "step").mkdir(parents=True, exist_ok=True)
        (desk / "step" / "data").write_text(str(count))
        os.rename(desk / "step", target / f"{os.getpid()}-{count}")
    except OSError:
        pass
"""


def test_twenty_times_the_writers_that_never_look_commit_nothing_after_the_seal(
    desks: Path, tmp_path: Path, until: Until
) -> None:
    target = tmp_path / "checkpoints"
    target.mkdir()
    for turn in range(1, 21):
        desk = desk_of(desks, turn)
        mad = [subprocess.Popen([sys.executable, "-S", "-c", _MAD, str(desk), str(target)]) for _ in range(2)]
        try:
            until(lambda mad=mad: all(any(target.glob(f"{one.pid}-*")) for one in mad), "both to write")
            seal(desks, turn + 1, ())
            before = len(os.listdir(target))
            time.sleep(0.05)
            assert len(os.listdir(target)) == before, f"turn {turn}"
        finally:
            for one in mad:
                one.kill()
                one.wait()
