"""A mount that stops answering in the middle of a copy: the copy is given up and the place named, the others have their turn,
and the next call goes on where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ftsupervise.checkpoints.commit import Origin, commit
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify
from tests.neighbours.patience import wait_until

from .conftest import HungMount
from .test_checkpoint_places_answer import make_run

pytestmark = pytest.mark.root

FILES, SIZE = 12, 300_000
BOUND = 30.0  # seconds for what a busy machine adds to --patience
FT = [sys.executable, "-m", "ftsupervise", "checkpoints"]


def make(folder: Path) -> Path:
    checkpoint = folder / "step-00000001"
    checkpoint.mkdir(parents=True)
    for number in range(FILES):
        (checkpoint / f"{number:02}.bin").write_bytes(os.urandom(SIZE))
    commit(checkpoint, Origin(step=1))
    return checkpoint


@contextmanager
def typed(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A command that somebody types. However the test ends, it is ended."""
    (folder / "tmp").mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(folder / "tmp"), "FTSUPERVISE_STATE_DIR": str(folder / "state")}
    process = subprocess.Popen(
        [*FT, *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.communicate(timeout=20)


def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    began = time.monotonic()
    try:
        said, _ = process.communicate(timeout=BOUND)
    except subprocess.TimeoutExpired:
        pytest.fail(f"it hangs {time.monotonic() - began:.0f} s after the mount did")
    return process.returncode, said


def copies_of_files(folder: Path) -> int:
    return len([path for path in folder.rglob("*.bin") if not path.name.startswith(".")])


@pytest.mark.fault(
    "The mount of a place for copies dies in the middle of a copy",
    "the copy is given up and the place named; the other places have their turn, and the next call goes on where it "
    "was",
)
def test_a_place_that_dies_in_the_middle_of_a_copy_is_given_up_and_the_next_call_goes_on(
    tmp_path: Path, dead_mount: HungMount
) -> None:
    checkpoint, near, backing = make(tmp_path / "here"), tmp_path / "near", tmp_path / "backing" / "far"
    to = ("--to", str(dead_mount.point / "far"), "--to", str(near))
    with typed(tmp_path, "offload", *to, "--rate", "2MB", "--patience", "1s", str(checkpoint)) as process:
        wait_until(lambda: copies_of_files(backing) >= 3, "three files to be copied")
        dead_mount.hang("all")
        code, said = ends(process)
    assert (
        f"{dead_mount.point}/far does not answer" in said and "the same command continues where it stopped" in said
    ), said
    assert code == 74, said
    assert f"is copied to {near}/step-00000001" in said, said
    assert verify(near / "step-00000001", Scope(Thoroughness.FULL)).state is CheckpointState.VERIFIED
    wait_until(lambda: not children_of(checkpoint), "the child that copied to end")
    dead_mount.answer()
    with typed(tmp_path, "offload", *to[:2], str(checkpoint), "--json") as process:
        code, said = ends(process)
    assert code == 0, said
    assert f'"there": {FILES * SIZE}' not in said and '"there": 0' not in said, said
    assert verify(backing / "step-00000001", Scope(Thoroughness.FULL)).state is CheckpointState.VERIFIED
    assert not list(backing.rglob(".tmp-*"))


@pytest.mark.slow
def test_a_copy_whose_place_dies_while_it_is_brought_back_is_left_for_the_next_one(
    tmp_path: Path, dead_mount: HungMount
) -> None:
    checkpoint, far, near = make(tmp_path / "here"), dead_mount.point / "far", tmp_path / "near"
    with typed(tmp_path, "offload", "--to", str(far), "--to", str(near), str(checkpoint)) as process:
        assert ends(process)[0] == 0
    words = ("restore", "--from", str(far), "--from", str(near), "--to", str(tmp_path / "back"), "--rate", "1MB")
    with typed(tmp_path, *words, "--patience", "2s") as process:
        wait_until(lambda: copies_of_files(tmp_path / "back") >= 3, "three files to be brought back")
        dead_mount.hang("all")
        code, said = ends(process)
    assert code == 0, said
    assert f"{far} does not answer" in said and f"as in {near}/step-00000001" in said, said
    back = tmp_path / "back"
    assert verify(back / "step-00000001", Scope(Thoroughness.FULL)).state is CheckpointState.VERIFIED
    assert sorted(os.listdir(back)) == ["step-00000001"]


@pytest.mark.slow
def test_upkeep_gives_up_the_run_whose_place_dies_in_the_middle_and_goes_on_with_the_others(
    tmp_path: Path, dead_mount: HungMount
) -> None:
    make_run(tmp_path, "a", dead_mount.point / "copies")
    make_run(tmp_path, "b", tmp_path / "copies-b")
    make(tmp_path / "big").rename(tmp_path / "a-checkpoints" / "step-00000002")
    with typed(tmp_path, "upkeep", "--patience", "2s", "a", "b") as process:
        wait_until(lambda: any((tmp_path / "backing").rglob("*.bin")), "the first file to be copied")
        dead_mount.hang("write", "fsync")
        code, said = ends(process)
    assert code == 1, said
    assert "a: not copied: step-00000002" in said and "nothing has moved for 2 s" in said, said
    assert (tmp_path / "copies-b" / "step-00000001").is_dir(), said
    dead_mount.answer()
    with typed(tmp_path, "upkeep", "a", "b") as process:
        assert ends(process)[0] == 0
    copy = tmp_path / "backing/copies/step-00000002"
    assert verify(copy, Scope(Thoroughness.FULL)).state is CheckpointState.VERIFIED


def test_a_folder_that_dies_while_its_checkpoints_are_read_is_named(tmp_path: Path, dead_mount: HungMount) -> None:
    make(tmp_path / "backing")
    dead_mount.hang("read:/step-00000001/11.bin")
    with typed(tmp_path, "verify", "--patience", "2s", str(dead_mount.point)) as process:
        code, said = ends(process)
    assert code == 74 and "nothing has moved for 2 s" in said, said


def children_of(checkpoint: Path) -> list[int]:
    """Processes that have the path of ``checkpoint`` on their command line."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            words = Path("/proc", entry, "cmdline").read_bytes() if entry.isdecimal() else b""
        except OSError:
            continue
        if os.fsencode(checkpoint) in words and b"ftsupervise" in words:
            found.append(int(entry))
    return found
