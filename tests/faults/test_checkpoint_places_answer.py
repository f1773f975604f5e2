"""A place for copies on a dead mount: the person who types has one sentence soon, and upkeep goes on with the other runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ftsupervise.checkpoints.commit import Origin, commit

from .conftest import HungMount

pytestmark = pytest.mark.root

BOUND = 15.0
FT = [sys.executable, "-m", "ftsupervise"]


def type_it(folder: Path, *words: str) -> tuple[int, str, float]:
    """(exit code, what it said, seconds)."""
    (folder / "tmp").mkdir(exist_ok=True)
    env = {**os.environ, "TMPDIR": str(folder / "tmp"), "FTSUPERVISE_STATE_DIR": str(folder / "state")}
    began = time.monotonic()
    process = subprocess.Popen(
        [*FT, "checkpoints", *words], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{' '.join(words)} hangs")
    return process.returncode, said.decode(), time.monotonic() - began


def make(folder: Path) -> Path:
    checkpoint = folder / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "a.bin").write_bytes(os.urandom(5000))
    commit(checkpoint, Origin(step=1))
    return folder


def make_run(folder: Path, name: str, copies: Path, *, below: Path | None = None, seen_at: Path | None = None) -> None:
    """A run that was launched under its name, with one checkpoint and a place for its copies."""
    root, real = (below or folder) / name, (seen_at or below or folder) / name
    for part in ("switches", "watch", "launches"):
        (real / part).mkdir(parents=True)
    (real / "run.yaml").write_text(
        f"name: {name}\nscheduler: slurm\nlaunch: {{command: a}}\nrun_dir: {root}\n"
        f"checkpoints: {{path: {make(folder / f'{name}-checkpoints')}, offload: {{to: {copies}}}}}\n"
    )
    (folder / "state/runs").mkdir(parents=True, exist_ok=True)
    (folder / "state/runs" / name).symlink_to(root)


@pytest.mark.fault(
    "A place for copies of checkpoints, or the folder of a restore, lies on a dead mount",
    "`offload` and `restore` begin nothing and end with 74 within fifteen seconds; the place is named",
)
def test_a_copy_from_or_to_a_dead_mount_is_not_begun_and_the_place_is_named(
    tmp_path: Path, dead_mount: HungMount
) -> None:
    folder, dead = make(tmp_path / "here"), dead_mount.point / "cp"
    copies = tmp_path / "copies"
    assert type_it(tmp_path, "offload", "--to", str(copies), str(folder))[0] == 0
    make_run(tmp_path, "tr11", dead)
    dead_mount.hang("all")
    typed = [
        ("offload", "--to", str(dead), str(folder)),
        ("offload", "--to", f"file://{dead}", str(folder)),
        ("offload", "tr11"),  # by its settings
        ("restore", "--from", str(dead), str(folder)),
        ("restore", "--from", str(copies), "--to", str(dead), str(folder)),
    ]
    with ThreadPoolExecutor() as people:
        for code, said, seconds in people.map(lambda words: type_it(tmp_path, *words), typed):
            assert code == 74, said
            assert f"{dead} does not answer (mount {dead_mount.point})" in said, said
            assert "Traceback" not in said, said
            assert seconds < BOUND, said


@pytest.mark.fault(
    "One of the runs that `upkeep` goes through lies, or has its copies, on a dead mount",
    "that run is reported as failed; the others are kept up, and the mount costs one bound",
)
@pytest.mark.slow
def test_upkeep_leaves_a_run_with_a_dead_place_and_goes_on_with_the_others(
    tmp_path: Path, dead_mount: HungMount
) -> None:
    """One hangs in its place for copies, another in its own folder, and all on that mount cost one bound."""
    make_run(tmp_path, "a", dead_mount.point / "copies")
    make_run(tmp_path, "b", tmp_path / "copies-b", below=dead_mount.point, seen_at=tmp_path / "backing")
    make_run(tmp_path, "c", dead_mount.point / "copies")
    make_run(tmp_path, "d", tmp_path / "copies-d")
    dead_mount.hang("all")
    code, said, seconds = type_it(tmp_path, "upkeep", "a", "b", "c", "d")
    assert code == 1, said
    assert said.count("does not answer") == 3, said
    assert (tmp_path / "copies-d" / "step-00000001").is_dir(), said
    assert seconds < 2 * BOUND, said
    dead_mount.answer()
    assert type_it(tmp_path, "upkeep", "a", "b", "c", "d")[0] == 0
    assert (tmp_path / "backing" / "copies" / "step-00000001").is_dir()
